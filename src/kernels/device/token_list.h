// Tokens with a target first, in a call on a GPU. Chunks, blocks of logits and products of
// gradients are then of these tokens; ignored ones end up in tiles that no kernel computes.
#pragma once

#include "kernels/device/gradient.h"

namespace logitless::cuda {

// Tokens of a thread block that makes the list.
inline constexpr std::int64_t kListedTokens = 1024;

struct TokenList {
  std::int32_t* rows = nullptr;  // [tokens]: those with a target, ascending, then the others
  // [tokens / kListedTokens, rounded up, + 1]: how many of each thread block have a target (not
  // written for up to 8 blocks); the last: how many of all
  std::int32_t* counts = nullptr;
};
constexpr std::int64_t list_blocks(std::int64_t tokens) {
  return (tokens + kListedTokens - 1) / kListedTokens;
}

// Lists the tokens of a call. Only its targets and shape are read.
void list_tokens(const ForwardCall& all, const TokenList& list);

// Copies the hidden states of a chunk's tokens, call.original, to `to` [tokens, dim]. counted: how
// many tokens of the call's list have a target; the others get 0. Null: all are copied.
void gather_listed(const ForwardCall& call, const std::int32_t* counted, void* to);

// Copies the outputs of a chunk to their tokens in `all`: by call.rows, or in the same order
// without rows.
void scatter_outputs(const ForwardCall& call, const ForwardCall& all);

// Moves rows i of `out`, i < counted, to rows[i], in place, and zeroes the rows of all others.
void spread_rows(const TokenList& list, std::int64_t tokens, std::int64_t columns,
                 const GradientOutput& out, Stream stream);

}  // namespace logitless::cuda
