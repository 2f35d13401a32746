// Deterministic mutations of files.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

namespace logitless::fuzz {

// Parses a dictionary in libFuzzer's format: lines name="text" with \xAB, \" and \\ escaped, and
// comments after #.
std::vector<std::string> parse_dict(std::string_view text);

// Returns one non-empty file of `corpus` with a few changes to bits, bytes, and numbers in text and
// in binary. Slices are removed, repeated, or replaced by a token or by a slice of another file.
// Equal arguments give equal results on any machine.
std::string mutate(const std::vector<std::string>& corpus, const std::vector<std::string>& tokens,
                   std::uint64_t seed, std::uint64_t number);

}  // namespace logitless::fuzz
