#include "head/overlap.h"

#include "core/byte_range.h"
#include "core/check.h"
#include "core/described.h"

namespace logitless {
namespace {

bool certainly_share(const ConstTensorView& a, const ConstTensorView& b) {
  const ByteRange x = byte_range(a).value_or(ByteRange{});
  const ByteRange y = byte_range(b).value_or(ByteRange{});
  if (x.empty() || y.empty() || !x.meets(y)) return false;
  if (a.contiguous() && b.contiguous()) return true;
  const auto first = [](const ConstTensorView& view) {
    const auto at = reinterpret_cast<std::uintptr_t>(view.data());
    return ByteRange{at, at + size_of(view.dtype())};
  };
  if (a.contiguous()) return x.meets(first(b));
  if (b.contiguous()) return y.meets(first(a));
  return first(a).meets(first(b));
}

void check_pair(const NamedView& output, const NamedView& other) {
  require(!certainly_share(output.view, other.view), output.prefix, output.name, ": ",
          described(output.view), " shares memory with ", other.prefix, other.name, ", ",
          described(other.view), "; an output needs memory of its own");
}

}  // namespace

void require_apart(std::span<const NamedView> outputs, std::span<const NamedView> inputs) {
  for (std::size_t a = 0; a < outputs.size(); ++a) {
    if (!outputs[a].view.defined()) continue;
    for (const NamedView& input : inputs) check_pair(outputs[a], input);
    for (const NamedView& other : outputs.subspan(a + 1)) check_pair(outputs[a], other);
  }
}

}  // namespace logitless
