#include "head/cuda/listed_tokens.h"

namespace logitless::cuda {

TokenList ListedTokens::list() const {
  return {run_.at<std::int32_t>(run_.layout.list.rows),
          run_.at<std::int32_t>(run_.layout.list.counts)};
}

void ListedTokens::begin() const { list_tokens(run_.all, list()); }

ForwardCall ListedTokens::chunk_call(std::int64_t first, std::int64_t count) const {
  ForwardCall c = run_.call_by_rows(list().rows, first, count);
  c.original = original(first);
  c.hidden = hidden();
  c.hidden_stride = c.shape.dim;
  return c;
}

ListedRows ListedTokens::original(std::int64_t first) const {
  return {run_.all.hidden, run_.all.hidden_stride, list().rows + first};
}

// Chunks that are assembled for ranks have no rows among the call's tokens.
void ListedTokens::gather(const ForwardCall& chunk) const {
  gather_listed(
      chunk, chunk.rows == nullptr ? nullptr : list().counts + list_blocks(run_.all.shape.tokens),
      const_cast<void*>(chunk.hidden));
}

void ListedTokens::spread_hidden() const {
  if (run_.d_hidden.data == nullptr) return;
  spread_rows(list(), run_.all.shape.tokens, run_.all.shape.dim, run_.d_hidden, run_.all.stream);
}

}  // namespace logitless::cuda
