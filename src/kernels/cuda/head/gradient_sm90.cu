// Host side of the gradient GEMMs: schedule, tensor maps, launch.
#include <algorithm>

#include "kernels/cuda/device/kernels_of_file.cuh"
#include "kernels/cuda/device/launch.cuh"
#include "kernels/cuda/device/tensor_map.cuh"
#include "kernels/cuda/head/gradient_sm90.cuh"
#include "kernels/cuda/head/sizes.h"
#include "kernels/device/far.h"
#include "kernels/device/gradient.h"

namespace logitless::cuda {
namespace {

GemmArguments product(const GradientOutput& out, std::int64_t rows, std::int64_t columns,
                      std::int64_t contracted) {
  GemmArguments p{};
  if (out.data == nullptr) return p;
  p.row_pairs = static_cast<int>(ceil_div(rows, kClusterRows));
  p.column_tiles = static_cast<int>(ceil_div(columns, kTileColumns));
  p.steps = static_cast<int>(ceil_div(contracted, kStep));
  p.rows = static_cast<int>(rows);
  p.columns = static_cast<int>(columns);
  p.add = out.add;
  p.narrow = out.dtype != DType::f32;
  return p;
}

void require_map(const char* name, const void* data, std::int64_t stride, DType dtype) {
  const std::int64_t bytes = stride * (dtype == DType::f32 ? 4 : 2);
  if (reinterpret_cast<std::uintptr_t>(data) % 16 != 0 || bytes % 16 != 0)
    throw Unsupported(concat("kernel hopper: ", name,
                             ": expected an address and rows that are multiples of 16 bytes"));
}

template <bool kRankOne>
GradientTiles far_tiles_of(bool entries) {
  return entries ? gradient_tiles<__nv_bfloat16, kRankOne, true, true, false>
                 : gradient_tiles<__nv_bfloat16, kRankOne, false, true, false>;
}
GradientTiles tiles_of(const GradientGemmsCall& c, bool rank_one, bool entries, bool sums) {
  if (c.far.call != nullptr)
    return rank_one ? far_tiles_of<true>(entries) : far_tiles_of<false>(entries);
  return c.dtype == DType::f16 ? f16_tiles_of(rank_one, entries, sums)
                               : dense_tiles_of<__nv_bfloat16>(rank_one, entries, sums);
}

FarVocabBlockArguments far_vocab_block(const GradientGemmsCall& c) {
  FarVocabBlockArguments out{};
  const FarCall& far = *c.far.call;
  out.block_groups = far.block_groups;
  out.group_blocks = far.group_blocks;
  out.blocks = static_cast<int>(padded_tokens(c.tokens) / kFarBlock);
  out.group_bits = static_cast<int>(far_bits(far_group_count(c.far.vocab)));
  out.block_bits = static_cast<int>(far_bits(out.blocks));
  out.first_group = static_cast<int>(c.far.first_position / kFarGroup);
  out.groups = static_cast<int>(far_group_count(c.block_vocab));
  out.list_begin = far.list_begin + out.first_group;
  out.order_vocab = far.order.vocab_ids + c.far.first_position;
  out.share = far.order.share + c.far.first_position;
  out.tile_gradient = c.far.tile_gradient + c.far.first_position / kFarTile * c.dim;
  out.d_weight = c.d_weight.data;
  out.stride = c.d_weight.stride;
  return out;
}

// Split-K of d_hidden: the workspace begins with the pace counters, then come the partial sums.
struct HiddenParts {
  explicit HiddenParts(const GradientGemmsCall& c) {
    if (c.d_hidden.data != nullptr && c.far.call == nullptr)
      count = hopper_hidden_parts(c.tokens, c.dim);
    // The last chunk may want a larger factor than the workspace allows.
    while (count > 1 &&
           hopper_gemms_bytes(c.tokens, c.dim, c.block_vocab, count) > c.kernel_workspace_bytes)
      --count;
    pace = hopper_pace_bytes(c.tokens, c.dim, c.block_vocab) * static_cast<std::size_t>(count);
    sums = reinterpret_cast<float*>(static_cast<std::byte*>(c.kernel_workspace) + pace);
  }
  int count = 1;
  std::size_t pace = 0;  // bytes
  float* sums = nullptr;
};

// Vocabulary entries of d_weight in the first launch: all, or those of the first range.
std::int64_t weight_vocab(const GradientGemmsCall& c) {
  return c.ranges.count == 0 ? c.block_vocab : c.ranges.vocab_count(0);
}
LogitBlock weight_block(const GradientGemmsCall& c) {
  return c.ranges.count == 0 ? c.block : LogitBlock{c.ranges.data[0], c.ranges.stride(0)};
}

// The call for d_weight of range r alone.
GradientGemmsCall weight_range(const GradientGemmsCall& c, int r) {
  GradientGemmsCall p = c;
  const std::int64_t first = c.ranges.first[r];
  p.ranges = {};
  p.block = {c.ranges.data[r], c.ranges.stride(r)};
  p.block_vocab = c.ranges.vocab_count(r);
  p.d_hidden = {};
  p.d_weight.data =
      static_cast<std::byte*>(c.d_weight.data) +
      first * c.d_weight.stride * static_cast<std::int64_t>(size_of(p.d_weight.dtype));
  if (p.running.low != nullptr) p.running.low += running_sum_bytes(first, c.dim);
  p.entries.begin += first;
  if (p.logit_weights != nullptr) p.logit_weights += first;
  return p;
}

GradientArguments arguments_of(const GradientGemmsCall& c, const HiddenParts& parts) {
  GradientArguments a{};
  a.hidden = product(c.d_hidden, c.tokens, c.dim, c.block_vocab);
  a.hidden.factor = c.factor;
  a.hidden_pairs = a.hidden.row_pairs;
  a.hidden_steps = a.hidden.steps;
  if (parts.count > 1) {
    a.hidden.row_pairs *= parts.count;
    a.hidden.steps = static_cast<int>(ceil_div(a.hidden.steps, parts.count));
    a.hidden.add = false;
    a.hidden.narrow = false;
  }
  if (c.weight_sum != nullptr) {
    a.hidden.column_part = c.weight_sum;
    a.hidden.row_part = &c.rows->gamma;
    a.hidden.row_part_stride = sizeof(RowCoefficients) / sizeof(float);
  }
  a.weight = product(c.d_weight, weight_vocab(c), c.dim, c.tokens);
  if (c.hidden_sum != nullptr) {
    a.weight.column_part = c.hidden_sum;
    a.weight.row_part = c.logit_weights;
    a.weight.row_part_stride = 1;
  }
  a.sums = {c.running, static_cast<std::uint16_t*>(c.d_weight.data), c.d_weight.stride};
  a.active = c.active;
  a.targets_per_token = c.targets_per_token;
  a.vocab_begin = c.vocab_begin;
  a.vocab_ids = c.vocab_ids;
  a.coefficient = c.coefficient;
  a.entry_begin = c.entries.begin;
  a.entry_token = c.entries.tokens;
  a.entry_coefficient = c.entries.coefficients;
  a.many = c.entries.many;
  a.weight_unscale = c.weight_unscale;
  const bool apart = c.target_weight != nullptr;
  a.weight_rows = apart ? c.target_weight : c.weight;
  a.weight_stride = apart ? c.target_stride : c.weight_stride;
  a.hidden_rows = c.hidden;
  a.hidden_stride = c.hidden_stride;
  if (c.far.call != nullptr) a.far = far_vocab_block(c);
  a.pace = static_cast<unsigned*>(c.kernel_workspace);
  return a;
}

// Tensor maps in the order of the kernel's parameters; maps that a call does not need are
// arbitrary.
struct GemmMaps {
  GemmMaps(const GradientGemmsCall& c, const HiddenParts& parts) {
    const LogitBlock of_weight = weight_block(c);
    constexpr auto kBf16 = DType::bf16;  // to TMA all types of 16 bits are one
    const auto of_output = [](DType dtype) { return dtype == DType::f32 ? dtype : kBf16; };
    block_rows = block_maps(c.block, c.ranges, c.tokens, kTileRows);
    block_columns =
        matrix_map(of_weight.data, kBf16, c.tokens, of_weight.stride, of_weight.stride, kStep);
    weight = matrix_map(c.weight, kBf16, c.block_vocab, c.dim, c.weight_stride, kStep);
    hidden = d_hidden = d_weight = weight;
    if (c.d_weight.data != nullptr) {
      hidden = matrix_map(c.factored_hidden, kBf16, c.tokens, c.dim, c.factored_stride, kStep);
      require_map("d_weight", c.d_weight.data, c.d_weight.stride, c.d_weight.dtype);
      if (c.far.call == nullptr)
        d_weight = matrix_map(c.d_weight.data, of_output(c.d_weight.dtype), weight_vocab(c), c.dim,
                              c.d_weight.stride, 64);
    }
    if (c.d_hidden.data == nullptr) return;
    require_map("d_hidden", c.d_hidden.data, c.d_hidden.stride, c.d_hidden.dtype);
    d_hidden = parts.count > 1 ? matrix_map(parts.sums, DType::f32,
                                            parts.count * padded_tokens(c.tokens), c.dim, c.dim, 64)
                               : matrix_map(c.d_hidden.data, of_output(c.d_hidden.dtype), c.tokens,
                                            c.dim, c.d_hidden.stride, 64);
  }
  BlockMaps block_rows;
  CUtensorMap block_columns, weight, hidden, d_hidden, d_weight;
};

void add_hidden_parts(const GradientGemmsCall& c, const GradientArguments& a,
                      const HiddenParts& parts, cudaStream_t stream) {
  const auto add = [&](auto type, auto out) {
    using Out = decltype(out);
    add_parts<decltype(type), Out><<<static_cast<unsigned>(c.tokens), 128, 0, stream>>>(
        a, parts.sums, static_cast<int>(c.dim), static_cast<Out*>(c.d_hidden.data),
        c.d_hidden.stride, c.d_hidden.add);
  };
  const auto add_to = [&](auto type) {
    c.d_hidden.dtype == DType::f32 ? add(type, float{}) : add(type, type);
  };
  c.dtype == DType::f16 ? add_to(__half{}) : add_to(__nv_bfloat16{});
  require_cuda(cudaGetLastError(), "parts of d_hidden");
}

bool lists_targets(const GradientGemmsCall& c) {
  return c.d_weight.data != nullptr && c.entries.begin != nullptr;
}

// One launch, plus one for the targets of an fp32 d_weight.
void multiply_block(const GradientGemmsCall& c) {
  const bool has_hidden = c.d_hidden.data != nullptr;
  const auto stream = static_cast<cudaStream_t>(c.stream);
  const HiddenParts parts(c);
  GradientArguments a = arguments_of(c, parts);
  const GemmMaps maps(c, parts);

  const bool far = c.far.call != nullptr;
  const bool rank_one = c.weight_sum != nullptr || c.hidden_sum != nullptr;
  const bool entries = lists_targets(c) && c.d_weight.dtype != DType::f32;
  const bool sums = c.running.from != SumsFrom::nothing || !c.running.last;
  if (sums && !entries)
    throw InternalError("running sums are of a 16-bit d_weight whose entries are listed");
  const GradientTiles kernel = tiles_of(c, rank_one, entries, sums);
  allow_shared(kernel, kTileShared);
  const int tiles =
      a.hidden.row_pairs * a.hidden.column_tiles + a.weight.row_pairs * a.weight.column_tiles;
  const int clusters = std::min(processor_count() / kClusterCtas, tiles);
  // Waits cost short tiles more than they gain; narrow heads fit into L2.
  constexpr int kPacedSteps = 1024;
  constexpr int kPacedColumns = 8;
  a.paced = !far && ceil_div(c.dim, kTileColumns) >= kPacedColumns &&
            (!has_hidden || a.hidden.steps >= kPacedSteps);
  if (a.paced) require_cuda(cudaMemsetAsync(a.pace, 0, parts.pace, stream), "pace");
  kernel<<<clusters * kClusterCtas, kTileThreads, kTileShared, stream>>>(
      maps.block_rows, maps.block_columns, maps.weight, maps.hidden, maps.d_hidden, maps.d_weight,
      a);
  require_cuda(cudaGetLastError(), "gradient kernel");
  if (parts.count > 1) add_hidden_parts(c, a, parts, stream);
}

}  // namespace

// With ranges, the first launch computes all of d_hidden, which reads the entire block. It
// also computes d_weight of the first range, whose output aliases none of the block. Each later
// launch overwrites the range that the one before has read last.
void hopper_gradient_gemms(const GradientGemmsCall& c) {
  const bool has_weight = c.d_weight.data != nullptr;
  if (c.tokens == 0 || (c.d_hidden.data == nullptr && !has_weight)) return;
  multiply_block(c);
  if (c.hidden_done != nullptr) {
    require_cuda(cudaEventRecord(static_cast<cudaEvent_t>(c.hidden_done),
                                 static_cast<cudaStream_t>(c.stream)),
                 "event");
  }
  for (int r = 1; has_weight && r < c.ranges.count; ++r) multiply_block(weight_range(c, r));
  if (lists_targets(c) && c.d_weight.dtype == DType::f32 && c.far.call == nullptr)
    add_weight_targets(c);
}

}  // namespace logitless::cuda
