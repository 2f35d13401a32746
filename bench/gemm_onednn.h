#pragma once

#include <cstdint>
#include <functional>

namespace bench {

// bf16 [tokens, vocab] = hidden [tokens, dim] . weight [vocab, dim]^T by oneDNN, the weights
// reordered beforehand into the layout that it likes best. Empty when built without oneDNN.
std::function<void()> onednn_gemm(const void* hidden, const void* weight, std::int64_t tokens,
                                  std::int64_t dim, std::int64_t vocab, int threads);

}  // namespace bench
