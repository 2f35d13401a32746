// A target with bugs, to see that the driver finds and reports them: text of 3 bytes that is not
// "abc" aborts, one longer by more than 3 bytes throws.
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
