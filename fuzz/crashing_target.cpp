// A target with planted bugs, to test that the driver finds and reports them. Text of 3 bytes other
// than "abc" aborts, more than 6 bytes throw.
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <stdexcept>

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  if (size == 3 && std::memcmp(data, "abc", 3) != 0) std::abort();
  if (size > 6) throw std::runtime_error("too long");
  return 0;
}
