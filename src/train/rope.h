// Rotary position embedding: the angles of positions, and how models stretch them.
#pragma once

#include <cstdint>
#include <string_view>
#include <vector>

namespace logitless::train {

struct RopeScaling {
  enum class Kind : std::uint8_t {
    none,
    linear,  // frequencies are divided by the factor
    llama3,  // those of wavelengths over original_context / low are, those under original_context /
             // high are not, and those between in part
  } kind = Kind::none;
  double factor = 1.0;
  double low = 1.0, high = 4.0;       // llama3
  std::int64_t original_context = 0;  // llama3

  bool operator==(const RopeScaling&) const = default;
};

// Pair i of a head of `size` numbers turns by inverse_frequencies()[i] for each position; [size /
// 2].
std::vector<double> inverse_frequencies(std::int64_t size, double theta,
                                        const RopeScaling& scaling);

// Cosines and sines of position * frequency, [length, frequencies]: computed in f64 and rounded
// once, so that each is within 2^-25 (half a unit of the last place at 1) of that of the exact
// angle.
struct RopeTables {
  std::vector<float> cos, sin;
};
RopeTables rope_tables(const std::vector<double>& frequencies, std::int64_t length);

}  // namespace logitless::train
