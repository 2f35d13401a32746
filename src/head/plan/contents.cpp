#include <algorithm>

#include "core/check.h"
#include "head/cpu/layout.h"
#include "head/plan/text.h"

namespace logitless {

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
  add(cpu::layout_of(kernel, shape, features, sizes).total -
          cpu::layout_of(kernel, shape, features, none).total,
      "exp(z) of ", sizes.tokens, " tokens x ", std::min(sizes.stored_vocab, shape.vocab),
      " vocabulary entries in ", 8 * kernel.stored_element_bytes(shape.dtype), " bits");
  add(cpu::weight_sum_bytes(shape, features, sizes), "what ", name_of(features.d_weight_dtype),
      " leaves of the sums of d_weight");
  return concat(text, text.empty() ? "" : "the rest, ", "chunks",
                sizes.block_vocab > 0 ? " and vocabulary blocks" : "", ", ", format_bytes(rest));
}

}  // namespace logitless
