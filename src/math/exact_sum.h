// An order-independent sum of positive numbers in fixed point: any order and grouping gives
// the same bits. It sums over the vocabulary in one call, or over several ranks.
//
// Bits have absolute positions, in bins of 64 (Kulisch's accumulator). Bins that drop small
// contributions are due to Demmel and Nguyen, "Fast reproducible floating-point summation", 2013.
// The two highest bins that any number reaches are kept, 128 bits in all, with a carry beside each
// bin. Nothing moves between bins before the end, so the dropped bits of a number depend only on
// the highest bin of all numbers. A sum of n numbers is below the exact one by a relative error of
// less than n 2^-64.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

#include "math/host_device.h"

namespace logitless {

class ExactSum {
 public:
  // Adds value * 2^exponent, with value >= 0 and an integral exponent within 2^31. Infinity makes
  // the sum infinite, and NaN or another exponent makes it NaN.
  LOGITLESS_HOST_DEVICE void add(double value, double exponent) {
    std::uint64_t mantissa;
    std::memcpy(&mantissa, &value, sizeof(mantissa));
    const auto biased = static_cast<std::int64_t>(mantissa >> 52 & 0x7ff);
    if (std::isnan(value) || !(std::fabs(exponent) <= 0x1p31)) top_ = kNaN;
    if (biased == 0x7ff && top_ != kNaN) top_ = kInfinite;
    if (top_ >= kInfinite) return;
    mantissa &= (std::uint64_t{1} << 52) - 1;
    if (biased > 0) mantissa |= std::uint64_t{1} << 52;
    // Absolute position of the mantissa's lowest bit.
    const std::int64_t place =
        (biased > 0 ? biased : 1) - 1075 + static_cast<std::int64_t>(exponent);
    const std::int64_t bin = place >> 6;
    const int shift = static_cast<int>(place & 63);
    add_bin(bin, mantissa << shift, 0);
    if (shift > 0) add_bin(bin + 1, mantissa >> (64 - shift), 0);
  }

  LOGITLESS_HOST_DEVICE void add(const ExactSum& other) {
    if (other.top_ >= kInfinite && other.top_ > top_) top_ = other.top_;
    if (other.top_ == kNone || top_ >= kInfinite) return;
    add_bin(other.top_, other.bits_[1], other.carry_[1]);
    add_bin(std::int64_t{other.top_} - 1, other.bits_[0], other.carry_[0]);
  }

  LOGITLESS_HOST_DEVICE bool empty() const { return top_ == kNone; }

  // Returns the sum times 2^-exponent, rounded to double; 0 and infinity beyond its range.
  LOGITLESS_HOST_DEVICE double scaled(double exponent) const {
    if (top_ == kNaN) return NAN;
    if (top_ == kInfinite) return INFINITY;
    if (top_ == kNone) return 0.0;
    const double sum = bin_value(1) + 0x1p-64 * bin_value(0);
    const double by = 64.0 * top_ - exponent;
    return ldexp(sum, static_cast<int>(fmin(fmax(by, -4096.0), 4096.0)));
  }

 private:
  static constexpr std::int32_t kNone = INT32_MIN;
  static constexpr std::int32_t kInfinite = INT32_MAX - 1;  // above all bins
  static constexpr std::int32_t kNaN = INT32_MAX;

  LOGITLESS_HOST_DEVICE double bin_value(int bin) const {
    return 0x1p64 * carry_[bin] + static_cast<double>(bits_[bin]);
  }
  LOGITLESS_HOST_DEVICE void add_bin(std::int64_t bin, std::uint64_t bits, std::uint32_t carry) {
    if (bits == 0 && carry == 0) return;
    if (top_ == kNone || bin > top_) {
      const bool next = top_ != kNone && bin == std::int64_t{top_} + 1;
      bits_[0] = next ? bits_[1] : 0;
      carry_[0] = next ? carry_[1] : 0;
      bits_[1] = 0;
      carry_[1] = 0;
      top_ = static_cast<std::int32_t>(bin);
    }
    const std::int64_t at = 1 - (top_ - bin);
    if (at < 0) return;
    const std::uint64_t before = bits_[at];
    bits_[at] = before + bits;
    carry_[at] += carry + (bits_[at] < before ? 1 : 0);
  }

  std::uint64_t bits_[2] = {0, 0};   // bins top - 1 and top
  std::uint32_t carry_[2] = {0, 0};  // times 2^64; enough for 2^32 numbers
  std::int32_t top_ = kNone;         // bits of that bin count 2^(64 top)
  std::int32_t unused_ = 0;          // sent with the rest
};
static_assert(sizeof(ExactSum) == 32);

}  // namespace logitless
