#include "compiler/exec/cpu/packed_sort.h"

#include <algorithm>
#include <array>
#include <utility>

namespace logitless::ir {
namespace {

constexpr std::int64_t kShort = 24;  // elements that insertion sorts as fast
constexpr int kDigitBits = 8;
constexpr std::size_t kDigits = 1u << kDigitBits;

void sort_short(const PackedRow& row) {
  for (std::int64_t i = 1; i < row.count; ++i) {
    const Packed x = row[i];
    std::int64_t at = i;
    for (; at > 0 && row[at - 1] > x; --at) row[at] = row[at - 1];
    row[at] = x;
  }
}

// Puts each number among those of its digit; `begin` and `end` are where these are.
void distribute(const PackedRow& row, int shift, std::array<std::int64_t, kDigits> begin,
                const std::array<std::int64_t, kDigits>& end) {
  const auto digit = [shift](Packed x) { return static_cast<std::size_t>(x >> shift) % kDigits; };
  for (std::size_t d = 0; d < kDigits; ++d) {
    while (begin[d] < end[d]) {
      Packed x = row[begin[d]];
      for (std::size_t to = digit(x); to != d; to = digit(x)) std::swap(x, row[begin[to]++]);
      row[begin[d]++] = x;
    }
  }
}

}  // namespace

void sort_packed(const PackedRow& row) {
  if (row.count <= kShort) return sort_short(row);
  Packed differ = 0;
  bool sorted = true;
  for (std::int64_t i = 1; i < row.count; ++i) {
    differ |= row[i] ^ row[0];
    sorted = sorted && row[i - 1] <= row[i];
  }
  if (sorted) return;
  const int shift = std::max(static_cast<int>(std::bit_width(differ)) - kDigitBits, 0);
  std::array<std::int64_t, kDigits> begin{}, end{};
  for (std::int64_t i = 0; i < row.count; ++i)
    ++end[static_cast<std::size_t>(row[i] >> shift) % kDigits];
  for (std::size_t d = 1; d < kDigits; ++d) {
    begin[d] = end[d - 1];
    end[d] += begin[d];
  }
  distribute(row, shift, begin, end);
  for (std::size_t d = 0; d < kDigits; ++d) {
    if (end[d] - begin[d] > 1) sort_packed(row.part(begin[d], end[d] - begin[d]));
  }
}

void LeastPacked::sink(std::int64_t i) const {
  const Packed moved = row_[i];
  for (std::int64_t child = 2 * i + 1; child < row_.count; child = 2 * i + 1) {
    if (child + 1 < row_.count && row_[child] < row_[child + 1]) ++child;
    if (moved >= row_[child]) break;
    row_[i] = row_[child];
    i = child;
  }
  row_[i] = moved;
}

}  // namespace logitless::ir
