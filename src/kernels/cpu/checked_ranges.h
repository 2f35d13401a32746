// Accesses of the innermost loop of a product, which AddressSanitizer checks by ranges before the
// loop. With a check at each load the loop takes 29 times as long, and was two thirds of a far
// head's test. Other builds have neither the check nor the attribute.
#pragma once

#include <cstddef>
#include <cstdint>

#ifdef __SANITIZE_ADDRESS__
#include <sanitizer/asan_interface.h>
// A function without checks of its own: check_floats sees all its accesses. Its file is compiled
// with -fno-sanitize-address-use-after-scope (src/CMakeLists.txt says why).
#define LOGITLESS_CHECKED_BY_RANGES __attribute__((no_sanitize("address", "undefined")))
#else
#define LOGITLESS_CHECKED_BY_RANGES
#endif

namespace logitless::cpu {

#ifdef __SANITIZE_ADDRESS__
inline constexpr bool kChecksRanges = true;

// Checks x [rows][count], `stride` floats between rows: the bytes of each row by AddressSanitizer,
// its first float by UndefinedBehaviorSanitizer, too (null, alignment, overflow of the address).
inline void check_floats(const float* x, std::int64_t rows, std::int64_t stride,
                         std::int64_t count) {
  for (std::int64_t i = 0; i < rows && count > 0; ++i) {
    const float* row = x + i * stride;
    [[maybe_unused]] const float first = *const_cast<const volatile float*>(row);
    const void* bad = __asan_region_is_poisoned(const_cast<float*>(row),
                                                static_cast<std::size_t>(count) * sizeof(float));
    // Reads the first wrong byte, so that AddressSanitizer reports it and ends the program.
    if (bad != nullptr) {
      [[maybe_unused]] const char byte = *static_cast<const volatile char*>(bad);
    }
  }
}
#else
inline constexpr bool kChecksRanges = false;
inline void check_floats(const float*, std::int64_t, std::int64_t, std::int64_t) {}
#endif

}  // namespace logitless::cpu
