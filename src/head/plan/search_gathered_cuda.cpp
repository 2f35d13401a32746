#include "head/plan/search_gathered_cuda.h"

#include <algorithm>

#include "head/gathered_words.h"
#include "kernels/cpu_head.h"

namespace logitless {

SizedPlan GatheredCudaSearch::best(PlanKind kind, std::size_t budget) const {
  constexpr std::int64_t kPair = 256;
  BestSize best(budget);
  const auto offer = [&](std::int64_t piece, std::int64_t slab) {
    const PlanSizes sizes{.chunk_tokens = tokens_, .slab_vocab = slab, .piece_rows = piece};
    best.offer(
        {.sizes = sizes,
         .bytes = cuda::layout_of(kernel_, p_.shape, p_.features, cuda::sizes_for(kind, sizes, 0))
                      .total},
        seconds(kind, sizes));
  };
  for (const std::int64_t piece : piece_sizes(p_.features.gathered_rows)) {
    if (kind == PlanKind::forward) {
      offer(piece, 0);
      continue;
    }
    const std::int64_t most = cuda::words_of_call(p_.features, piece);
    const std::int64_t words = cuda::padded_words(most);
    for (std::int64_t slabs = 1; slabs <= words / kPair; slabs += 1 + slabs / 16)
      offer(piece, std::min(most, round_up(ceil_div(words, slabs), kPair)));
  }
  return best.found();
}

double GatheredCudaSearch::seconds(PlanKind kind, const PlanSizes& sizes) const {
  const HeadFeatures& f = p_.features;
  const auto n = static_cast<double>(tokens_);
  const auto v = static_cast<double>(p_.shape.vocab);
  const auto d = static_cast<double>(p_.shape.dim);
  const double pass = 2.0 * n * v * d;
  const cuda::DeviceRates r = kernel_.rates(p_.shape.dtype);
  const double blocks = static_cast<double>(rows_lie_together(f) ? 1 : piece_blocks(f)) *
                        static_cast<double>(piece_count(f.gathered_rows, sizes.piece_rows));
  const double forward = pass / r.forward_flops + n * v * r.logit_seconds;
  double out = forward + blocks * r.chunk_seconds;
  if (kind == PlanKind::forward) return out;
  const double slabs =
      blocks * static_cast<double>(ceil_div(cuda::words_of_call(f, sizes.piece_rows),
                                            std::max<std::int64_t>(sizes.slab_vocab, 1)));
  out += forward + blocks * r.chunk_seconds + slabs * r.slab_seconds;
  double bytes = 3.0 * n * v * 2.0;  // vocabulary blocks of gradients
  if (f.d_hidden) {
    out += pass / r.product_flops;
    bytes += slabs * n * d * 8.0;
  }
  if (f.d_weight) {
    out += pass / r.product_flops;
    bytes += v * d * 12.0;  // sums of a slice, and of the ranks
  }
  return out + bytes / r.bytes_per_second;
}

}  // namespace logitless
