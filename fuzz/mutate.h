// Deterministic damage to files.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

namespace logitless::fuzz {

// Strings of a dictionary in libFuzzer's format: lines name="text" with \xAB, \" and \\ escaped,
// and comments from #.
std::vector<std::string> parse_dict(std::string_view text);

// One file of `corpus`, not empty, with a few changes: bits, bytes, numbers in text and in binary,
// pieces removed, repeated, exchanged for a token or for a piece of another file. The same for the
// same arguments, on any machine.
std::string mutate(const std::vector<std::string>& corpus, const std::vector<std::string>& tokens,
                   std::uint64_t seed, std::uint64_t number);

}  // namespace logitless::fuzz
