// A call's tokens in the order of a list, those with a target first. Ignored tokens then have
// chunks and tiles of their own, which no kernel computes.
#pragma once

#include "head/cuda/run.h"

namespace logitless::cuda {

// Refers to the run, which must outlive it. The list is in the run's workspace.
class ListedTokens {
 public:
  explicit ListedTokens(const Run& run) : run_(run) {}

  // Makes the list; before all else.
  void begin() const;
  const std::int32_t* rows() const { return list().rows; }
  // Returns the call of tokens [first, first + count) of the list. Outputs are in the workspace.
  ForwardCall chunk_call(std::int64_t first, std::int64_t count) const;
  // Returns the rows of hidden from position `first` of the list on.
  ListedRows original(std::int64_t first) const;
  // Copies the chunk's hidden states to where its call reads them. The backward overwrites them
  // where it scales hidden (scales_hidden).
  void gather(const ForwardCall& chunk) const;
  // Brings the rows of d_hidden from the order of the list into that of the tokens. Where fp32 sums
  // are rounded (sums_hidden), Backward does so then.
  void spread_hidden() const;

 private:
  TokenList list() const;
  void* hidden() const { return run_.at<std::byte>(run_.layout.list.hidden); }

  const Run& run_;
};

}  // namespace logitless::cuda
