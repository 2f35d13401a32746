// C++ helpers of the C tests.
#include <stdexcept>

#include "expected.h"

#if defined(__has_feature)
#define LOGITLESS_HAS_FEATURE(name) __has_feature(name)
#else
#define LOGITLESS_HAS_FEATURE(name) 0
#endif

// Breaks the contract of a trace callback: the library must not let the exception out.
void throwing_trace(const char*, void*) { throw std::runtime_error("thrown by the trace"); }

// The C files may be compiled without the sanitizer of the library.
int ends_on_failing_allocation(void) {
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
  return 1;
#else
  return LOGITLESS_HAS_FEATURE(address_sanitizer) || LOGITLESS_HAS_FEATURE(thread_sanitizer);
#endif
}
