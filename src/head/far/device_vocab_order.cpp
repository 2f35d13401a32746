// Vocabulary orders made on a GPU.
#include <cmath>
#include <memory>
#include <string>
#include <vector>

#include "core/check.h"
#include "head/cuda/views.h"
#include "head/far/device_order.h"
#include "head/far/shared_order.h"
#include "head/shard_plan.h"
#include "kernels/device/order.h"
#include "math/lse_state.h"

namespace logitless {

VocabOrder device_vocab_order(const Context& context, const ConstTensorView& weight,
                              std::span<const float> average, std::int64_t per_stratum,
                              std::uint64_t seed) {
  const RowMatrix rows = cuda::rows_of("weight", weight);
  const auto vocab = static_cast<std::size_t>(rows.rows);
  const cuda::DeviceMemory averages(vocab * sizeof(float));
  const cuda::DeviceMemory vocab_ids(vocab * sizeof(std::int32_t));
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
  call.vocab_ids = static_cast<std::int32_t*>(vocab_ids.data());
  call.workspace = workspace.data();
  call.stream = context.stream();
  cuda::order_vocab(call);
  std::vector<std::int32_t> found(vocab);
  cuda::copy_to_host(found.data(), vocab_ids.data(), vocab_ids.bytes(), context.stream());
  return VocabOrder(std::vector<std::int64_t>(found.begin(), found.end()), average);
}

namespace {

// Moments of the local vocabulary shard, in device memory.
class DeviceTileMoments {
 public:
  DeviceTileMoments(const Context& context, const VocabOrder& order, const ConstTensorView& hidden,
                    const ConstTensorView& weight, const ConstTensorView& bias, float logit_scale,
                    float tau) {
    const RowMatrix tokens = cuda::rows_of("hidden", hidden);
    const RowMatrix rows = cuda::rows_of("weight", weight);
    call_.head.shape = {tokens.rows, rows.columns, rows.rows, weight.dtype()};
    call_.head.hidden = hidden.data();
    call_.head.hidden_stride = tokens.row_stride;
    call_.head.weight = weight.data();
    call_.head.weight_stride = rows.row_stride;
    call_.head.bias = cuda::floats_of("bias", bias);
    call_.head.logit_scale = logit_scale;
    call_.head.stream = context.stream();
    call_.kernel = &kernel_of(context, call_.head.shape);
    const std::string reason = call_.kernel->far->unsupported(call_.head);
    if (!reason.empty()) throw Unsupported(concat("measure_tiles: ", reason));
    const auto dim = static_cast<std::size_t>(rows.columns);
    const auto tiles = static_cast<std::size_t>(cuda::far_tile_count(rows.rows));
    axes_ = cuda::DeviceMemory(dim * dim * sizeof(float));
    variance_ = cuda::DeviceMemory(tiles * dim * sizeof(float));
    caution_ = cuda::DeviceMemory(tiles * sizeof(float));
    workspace_ = cuda::DeviceMemory(cuda::moments_workspace_bytes(*call_.kernel, call_.head.shape));
    call_.order = cuda::device_order(order);
    call_.tau = tau;
    call_.axes = static_cast<float*>(axes_.data());
    call_.variance = static_cast<float*>(variance_.data());
    call_.caution = static_cast<float*>(caution_.data());
    call_.workspace = workspace_.data();
    totals_ = cuda::measure_moments(call_);
  }

  // Fetches log2 of the exact and the estimated total of each row of hidden.
  void fetch_totals(std::vector<float>& exact, std::vector<float>& estimated) const {
    fetch(exact, totals_.lse);
    fetch(estimated, totals_.log2_estimated);
    for (float& total : exact) total *= static_cast<float>(kLog2E);
  }
  void set_totals(std::vector<float> exact, const std::vector<float>& estimated) const {
    for (float& total : exact) total *= static_cast<float>(kLn2);
    const auto set = [&](float* to, const std::vector<float>& from) {
      cuda::copy_to_device(to, from.data(), from.size() * sizeof(float), call_.head.stream);
    };
    set(totals_.lse, exact);
    set(totals_.log2_estimated, estimated);
  }

  VocabOrder finish(const VocabOrder& order) const {
    cuda::find_cautions(call_);
    const auto values = [&](const cuda::DeviceMemory& from) {
      std::vector<float> out(from.bytes() / sizeof(float));
      fetch(out, from.data());
      return out;
    };
    return order.with_moments(call_.head.shape.dim, values(axes_), values(variance_),
                              values(caution_));
  }

 private:
  static const cuda::DeviceKernel& kernel_of(const Context& context,
                                             const cuda::ForwardShape& shape) {
    try {
      return cuda::find_far_kernel(context.device().compute_capability, context.device().kernel,
                                   shape);
    } catch (const Unsupported& error) {
      throw Unsupported(concat("measure_tiles: ", error.what()));
    }
  }
  void fetch(std::vector<float>& to, const void* from) const {
    cuda::copy_to_host(to.data(), from, to.size() * sizeof(float), call_.head.stream);
  }

  cuda::MomentsCall call_;
  cuda::MomentTotals totals_;
  cuda::DeviceMemory axes_, variance_, caution_, workspace_;
};

}  // namespace

VocabOrder device_measure_tiles(const Context& context, const VocabOrder& order,
                                const ConstTensorView& hidden, const ConstTensorView& weight,
                                const ConstTensorView& bias, float logit_scale, float tau,
                                const Sharding& sharding) {
  std::unique_ptr<DeviceTileMoments> moments;
  const auto measure = [&] {
    const std::string missing = cuda::moments_unsupported();
    if (!missing.empty()) throw Unsupported(concat("measure_tiles: ", missing));
    if (order.vocab() > 0)
      moments = std::make_unique<DeviceTileMoments>(context, order, hidden, weight, bias,
                                                    logit_scale, tau);
  };
  if (!is_sharded(sharding)) {
    measure();
    return moments->finish(order);
  }
  const auto rows = static_cast<std::size_t>(as_rows("hidden", hidden).rows);
  std::vector<float> exact(rows, -INFINITY), estimated(rows, -INFINITY);
  together(sharding, [&] {
    measure();
    if (moments != nullptr) moments->fetch_totals(exact, estimated);
  });
  for (auto* totals : {&exact, &estimated})
    sum_log2(sharding, totals->data(), static_cast<std::int64_t>(rows));
  VocabOrder out = order;
  together(sharding, [&] {
    if (moments == nullptr) return;
    moments->set_totals(exact, estimated);
    out = moments->finish(order);
  });
  return out;
}

}  // namespace logitless
