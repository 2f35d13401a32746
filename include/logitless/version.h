#pragma once

#include "logitless/export.h"

#define LOGITLESS_VERSION_MAJOR 0
#define LOGITLESS_VERSION_MINOR 1
#define LOGITLESS_VERSION_PATCH 0

namespace logitless {

// Returns the version of the library that runs, "0.1.0"; the macros are that of compilation.
LOGITLESS_API const char* version();

}  // namespace logitless
