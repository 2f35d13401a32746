#include <algorithm>

#include "head/gathered_vocab.h"
#include "head/plan/search/gathered.h"
#include "kernels/cpu_head.h"

namespace logitless {

SizedPlan GatheredCudaSearch::best(PlanKind kind, std::size_t budget) const {
  BestSize best(budget);
  const auto offer = [&](std::int64_t slice, std::int64_t vocab_block) {
    const PlanSizes sizes{.chunk_tokens = tokens_, .block_vocab = vocab_block, .slice_rows = slice};
    best.offer(
        {.sizes = sizes,
         .bytes = cuda::layout_of(kernel_, p_.shape, p_.features, cuda::sizes_for(kind, sizes, 0))
                      .total},
        seconds(kind, sizes));
  };
  for (const std::int64_t slice : slice_sizes(p_.features.gathered_rows)) {
    if (kind == PlanKind::forward) {
      offer(slice, 0);
      continue;
    }
    const std::int64_t most = cuda::vocab_of_call(p_.features, slice);
    const std::int64_t vocab_count = cuda::padded_vocab(most);
    for (std::int64_t vocab_blocks = 1; vocab_blocks <= vocab_count / kernel_.tile_vocab;
         vocab_blocks += 1 + vocab_blocks / 16)
      offer(slice,
            std::min(most, round_up(ceil_div(vocab_count, vocab_blocks), kernel_.tile_vocab)));
  }
  return best.found();
}

double GatheredCudaSearch::seconds(PlanKind kind, const PlanSizes& sizes) const {
  const HeadFeatures& f = p_.features;
  const auto n = static_cast<double>(tokens_);
  const auto v = static_cast<double>(p_.shape.vocab);
  const auto d = static_cast<double>(p_.shape.dim);
  const double pass = 2.0 * n * v * d;
  const cuda::DeviceRates& r = rates_;
  const double blocks = static_cast<double>(rows_lie_together(f) ? 1 : slice_blocks(f)) *
                        static_cast<double>(slice_count(f.gathered_rows, sizes.slice_rows));
  const double forward = pass / r.forward_flops + n * v * r.logit_seconds;
  double out = forward + blocks * r.chunk_seconds;
  if (kind == PlanKind::forward) return out;
  const double vocab_blocks =
      blocks * static_cast<double>(ceil_div(cuda::vocab_of_call(f, sizes.slice_rows),
                                            std::max<std::int64_t>(sizes.block_vocab, 1)));
  out += forward + blocks * r.chunk_seconds + vocab_blocks * r.block_seconds;
  double bytes = 3.0 * n * v * 2.0;  // vocabulary blocks of gradients
  if (f.d_hidden) {
    out += pass / r.gemm_flops;
    bytes += vocab_blocks * n * d * 8.0;
  }
  if (f.d_weight) {
    out += pass / r.gemm_flops;
    bytes += v * d * 12.0;  // sums of a slice, and of the ranks
  }
  return out + bytes / r.bytes_per_second;
}

}  // namespace logitless
