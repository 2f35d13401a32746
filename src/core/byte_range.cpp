#include "core/byte_range.h"

namespace logitless {

std::optional<ByteRange> byte_range(const ConstTensorView& view) {
  if (!view.defined() || view.numel() == 0) return ByteRange{};
  const auto item = static_cast<std::int64_t>(size_of(view.dtype()));
  std::int64_t low = 0, high = 0;  // bytes from the first element to the lowest and highest
  for (int d = 0; d < view.rank(); ++d) {
    std::int64_t reach = 0;
    if (__builtin_mul_overflow(view.size(d) - 1, view.stride(d), &reach) ||
        __builtin_mul_overflow(reach, item, &reach)) {
      return std::nullopt;
    }
    std::int64_t& side = reach < 0 ? low : high;
    if (__builtin_add_overflow(side, reach, &side)) return std::nullopt;
  }
  if (__builtin_add_overflow(high, item, &high)) return std::nullopt;
  const auto first = reinterpret_cast<std::uintptr_t>(view.data());
  ByteRange range;
  if (__builtin_add_overflow(first, low, &range.begin) ||
      __builtin_add_overflow(first, high, &range.end)) {
    return std::nullopt;
  }
  return range;
}

}  // namespace logitless
