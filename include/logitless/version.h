#pragma once

#include "logitless/export.h"

#define LOGITLESS_VERSION_MAJOR 0
#define LOGITLESS_VERSION_MINOR 1
#define LOGITLESS_VERSION_PATCH 0

namespace logitless {

// "0.1.0", of the library that runs (the macros tell what was compiled against).
LOGITLESS_API const char* version();

}  // namespace logitless
