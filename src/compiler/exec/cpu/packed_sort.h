#pragma once

#include <bit>
#include <cstdint>

namespace logitless::ir {

// A key of 32 bits above the index of its element: numbers in the order of the elements, equal
// elements in the order of their indices.
using Packed = std::uint64_t;

// Returns a number that grows with x. Zeros are equal, and NaN is greater than all numbers.
inline std::uint32_t key_of(float x) {
  if (!(x == x)) return 0xFFFFFFFFu;
  const auto bits = std::bit_cast<std::uint32_t>(x == 0.0f ? 0.0f : x);
  return bits >> 31 != 0 ? ~bits : bits | 0x80000000u;
}
inline std::uint32_t key_of(std::int32_t x) { return static_cast<std::uint32_t>(x) ^ 0x80000000u; }

inline Packed packed(std::uint32_t key, std::int64_t index, bool descending) {
  return static_cast<Packed>(descending ? ~key : key) << 32 | static_cast<Packed>(index);
}
inline std::int64_t index_of(Packed x) { return static_cast<std::int64_t>(x & 0xFFFFFFFFu); }

// `count` numbers, one in `step`.
struct PackedRow {
  Packed* data;
  std::int64_t count, step;

  Packed& operator[](std::int64_t i) const { return data[i * step]; }
  PackedRow part(std::int64_t first, std::int64_t size) const {
    return {data + first * step, size, step};
  }
};

// Sorts different numbers in place, without other memory: by their digits of 8 bits from the first
// one on in which they differ, and short rows by insertion.
void sort_packed(const PackedRow& row);

// The least `row.count` of the numbers that are added. It is a heap, the greatest number first.
class LeastPacked {
 public:
  explicit LeastPacked(const PackedRow& row) : row_(row) {}
  void add(Packed x) {
    if (filled_ < row_.count) {
      row_[filled_++] = x;
      if (filled_ == row_.count) {
        for (std::int64_t i = row_.count / 2; i-- > 0;) sink(i);
      }
    } else if (x < row_[0]) {
      row_[0] = x;
      sink(0);
    }
  }

 private:
  PackedRow row_;
  std::int64_t filled_ = 0;

  void sink(std::int64_t i) const;
};

}  // namespace logitless::ir
