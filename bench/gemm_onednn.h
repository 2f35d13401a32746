#pragma once

#include <cstdint>
#include <functional>

namespace bench {

// Returns a function that computes bf16 [tokens, vocab] = hidden [tokens, dim] . weight [vocab,
// dim]^T by oneDNN. The weights are reordered beforehand into oneDNN's preferred layout. Empty when
// built without oneDNN.
std::function<void()> onednn_gemm(const void* hidden, const void* weight, std::int64_t tokens,
                                  std::int64_t dim, std::int64_t vocab, int threads);

}  // namespace bench
