// Names of calls and ranks in error messages.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "core/check.h"

namespace logitless {

// Returns "all_gather of 64 bytes".
inline std::string exchange_text(std::string_view kind, std::size_t bytes_each) {
  return concat(kind, " of ", bytes_each, " bytes");
}

// Returns "call 7 (all_gather of 64 bytes)".
inline std::string call_text(std::uint64_t number, std::string_view kind, std::size_t bytes_each) {
  return concat("call ", number, " (", exchange_text(kind, bytes_each), ")");
}

// Returns "rank 1", "ranks 1 and 3", "ranks 1, 2 and 3".
inline std::string ranks_text(const std::vector<int>& ranks) {
  std::string text = ranks.size() == 1 ? "rank " : "ranks ";
  for (std::size_t i = 0; i < ranks.size(); ++i) {
    const bool last = i + 1 == ranks.size();
    text += concat(i == 0 ? "" : last ? " and " : ", ", ranks[i]);
  }
  return text;
}

}  // namespace logitless
