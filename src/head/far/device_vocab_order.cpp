// Orders of the vocabulary made on a GPU.
#include <string>
#include <vector>

#include "core/check.h"
#include "head/cuda/order.h"
#include "head/cuda/views.h"
#include "head/far/device_order.h"
#include "kernels/device_order.h"

namespace logitless {

VocabOrder device_vocab_order(const Context& context, const ConstTensorView& weight,
                              std::span<const float> average, std::int64_t per_stratum,
                              std::uint64_t seed) {
  const RowMatrix rows = cuda::rows_of("weight", weight);
  const auto vocab = static_cast<std::size_t>(rows.rows);
  const cuda::DeviceMemory averages(vocab * sizeof(float));
  const cuda::DeviceMemory words(vocab * sizeof(std::int32_t));
  const cuda::DeviceMemory workspace(cuda::order_workspace_bytes(rows.rows, rows.columns));
  cuda::copy_to_device(averages.data(), average.data(), averages.bytes(), context.stream());
  cuda::OrderCall call;
  call.dtype = weight.dtype();
  call.weight = weight.data();
  call.stride = rows.row_stride;
  call.vocab = rows.rows;
  call.dim = rows.columns;
  call.average = static_cast<const float*>(averages.data());
  call.per_stratum = per_stratum;
  call.seed = seed;
  call.words = static_cast<std::int32_t*>(words.data());
  call.workspace = workspace.data();
  call.stream = context.stream();
  cuda::order_words(call);
  std::vector<std::int32_t> found(vocab);
  cuda::copy_to_host(found.data(), words.data(), words.bytes(), context.stream());
  return VocabOrder(std::vector<std::int64_t>(found.begin(), found.end()), average);
}

VocabOrder device_measure_tiles(const Context& context, const VocabOrder& order,
                                const ConstTensorView& hidden, const ConstTensorView& weight,
                                const ConstTensorView& bias, float logit_scale, float tau) {
  const std::string missing = cuda::moments_unsupported();
  if (!missing.empty()) throw Unsupported(concat("measure_tiles: ", missing));
  const RowMatrix tokens = cuda::rows_of("hidden", hidden);
  const RowMatrix rows = cuda::rows_of("weight", weight);
  cuda::MomentsCall call;
  call.head.shape = {tokens.rows, rows.columns, rows.rows, weight.dtype()};
  call.head.hidden = hidden.data();
  call.head.hidden_stride = tokens.row_stride;
  call.head.weight = weight.data();
  call.head.weight_stride = rows.row_stride;
  call.head.bias = cuda::floats_of("bias", bias);
  call.head.logit_scale = logit_scale;
  call.head.stream = context.stream();
  const cuda::DeviceKernel& kernel = cuda::find_device_kernel("hopper");
  const int capability = context.device().compute_capability;
  const std::string reason =
      capability < kernel.least_capability || capability > kernel.most_capability
          ? concat("kernel hopper does not run on compute capability ", capability / 10, ".",
                   capability % 10)
          : cuda::hopper_unsupported(call.head);
  if (!reason.empty()) throw Unsupported(concat("measure_tiles: ", reason));
  const auto dim = static_cast<std::size_t>(rows.columns);
  const auto tiles = static_cast<std::size_t>(cuda::far_tile_count(rows.rows));
  const cuda::DeviceMemory axes(dim * dim * sizeof(float));
  const cuda::DeviceMemory variance(tiles * dim * sizeof(float));
  const cuda::DeviceMemory caution(tiles * sizeof(float));
  const cuda::DeviceMemory workspace(cuda::moments_workspace_bytes(call.head.shape));
  call.order = cuda::device_order(order);
  call.tau = tau;
  call.axes = static_cast<float*>(axes.data());
  call.variance = static_cast<float*>(variance.data());
  call.caution = static_cast<float*>(caution.data());
  call.workspace = workspace.data();
  cuda::measure_moments(call);
  const auto fetch = [&](const cuda::DeviceMemory& from) {
    std::vector<float> values(from.bytes() / sizeof(float));
    cuda::copy_to_host(values.data(), from.data(), from.bytes(), context.stream());
    return values;
  };
  return order.with_moments(rows.columns, fetch(axes), fetch(variance), fetch(caution));
}

}  // namespace logitless
