#include "train/model/rope.h"

#include <cmath>
#include <numbers>

namespace logitless::train {
namespace {

double scaled(double frequency, const RopeScaling& s) {
  switch (s.kind) {
    case RopeScaling::Kind::none:
      return frequency;
    case RopeScaling::Kind::linear:
      return frequency / s.factor;
    case RopeScaling::Kind::llama3:
      break;
  }
  // Rotations within the context of the model's first training.
  const double turns =
      static_cast<double>(s.original_context) * frequency / (2.0 * std::numbers::pi);
  if (turns < s.low) return frequency / s.factor;
  if (turns > s.high) return frequency;
  const double kept = (turns - s.low) / (s.high - s.low);
  return (1.0 - kept) * frequency / s.factor + kept * frequency;
}

}  // namespace

std::vector<double> inverse_frequencies(std::int64_t size, double theta,
                                        const RopeScaling& scaling) {
  std::vector<double> result;
  for (std::int64_t i = 0; i < size / 2; ++i) {
    const double exponent = static_cast<double>(2 * i) / static_cast<double>(size);
    result.push_back(scaled(std::pow(theta, -exponent), scaling));
  }
  return result;
}

RopeTables rope_tables(const std::vector<double>& frequencies, std::int64_t length) {
  RopeTables tables;
  const std::size_t count = static_cast<std::size_t>(length) * frequencies.size();
  tables.cos.reserve(count);
  tables.sin.reserve(count);
  for (std::int64_t t = 0; t < length; ++t) {
    for (const double frequency : frequencies) {
      const double angle = static_cast<double>(t) * frequency;
      tables.cos.push_back(static_cast<float>(std::cos(angle)));
      tables.sin.push_back(static_cast<float>(std::sin(angle)));
    }
  }
  return tables;
}

}  // namespace logitless::train
