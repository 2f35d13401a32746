#include "head/plan_contents.h"

#include <algorithm>

#include "core/check.h"
#include "head/workspace.h"

namespace logitless {

std::size_t weight_sum_bytes(const HeadShape& shape, const HeadFeatures& features,
                             const ChunkSizes& sizes) {
  const bool apart = !sizes.forward_only && features.d_weight &&
                     features.d_weight_dtype != DType::f32 && sizes.tokens < shape.tokens;
  if (!apart) return 0;
  const std::int64_t bytes = features.d_weight_dtype == DType::bf16 ? 2 : 4;
  return static_cast<std::size_t>(round_up(shape.vocab * shape.dim * bytes, 64));
}

std::string describe_contents(const HeadKernel& kernel, const HeadShape& shape,
                              const HeadFeatures& features, const ChunkSizes& sizes,
                              std::size_t total) {
  std::string text;
  std::size_t rest = total;
  const auto add = [&](std::size_t bytes, const auto&... what) {
    if (bytes == 0) return;
    rest -= std::min(rest, bytes);
    text += concat(what..., ", ", format_bytes(bytes), "; ");
  };
  ChunkSizes none = sizes;
  none.stored_vocab = 0;
  add(layout_workspace(kernel, shape, features, sizes).total -
          layout_workspace(kernel, shape, features, none).total,
      "exp(z) of ", sizes.tokens, " tokens x ", std::min(sizes.stored_vocab, shape.vocab),
      " words in ", 8 * kernel.stored_element_bytes(shape.dtype), " bits");
  add(weight_sum_bytes(shape, features, sizes), "what ", name_of(features.d_weight_dtype),
      " leaves of the sums of d_weight");
  return concat(text, text.empty() ? "" : "the rest, ", "chunks",
                sizes.slab_vocab > 0 ? " and slabs" : "", ", ", format_bytes(rest));
}

}  // namespace logitless
