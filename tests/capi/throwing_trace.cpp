// A trace callback that breaks its contract: the library must not let the exception out.
#include <stdexcept>

#include "expected.h"

void throwing_trace(const char*, void*) { throw std::runtime_error("thrown by the trace"); }
