// Rotary position embedding: angles of positions, and their scaling for long contexts.
#pragma once

#include <cstdint>
#include <string_view>
#include <vector>

namespace logitless::train {

struct RopeScaling {
  enum class Kind : std::uint8_t {
    none,
    linear,  // frequencies are divided by the factor
    llama3,  // wavelengths over original_context / low: divided by the factor; under
             // original_context / high: unchanged; between: interpolated
  } kind = Kind::none;
  double factor = 1.0;
  double low = 1.0, high = 4.0;       // llama3
  std::int64_t original_context = 0;  // llama3

  bool operator==(const RopeScaling&) const = default;
};

// Returns inverse frequencies [size / 2]: pair i of a head of `size` numbers rotates by the i-th of
// them for each position.
std::vector<double> inverse_frequencies(std::int64_t size, double theta,
                                        const RopeScaling& scaling);

// Cosines and sines of position * frequency, [length, frequencies]. They are computed in f64 and
// rounded once: the error is at most 2^-25 (half a unit in the last place at 1).
struct RopeTables {
  std::vector<float> cos, sin;
};
RopeTables rope_tables(const std::vector<double>& frequencies, std::int64_t length);

}  // namespace logitless::train
