#include "logitless/version.h"

#define LOGITLESS_TEXT_(x) #x
#define LOGITLESS_TEXT(x) LOGITLESS_TEXT_(x)

namespace logitless {

const char* version() {
  return LOGITLESS_TEXT(LOGITLESS_VERSION_MAJOR) "." LOGITLESS_TEXT(
      LOGITLESS_VERSION_MINOR) "." LOGITLESS_TEXT(LOGITLESS_VERSION_PATCH);
}

}  // namespace logitless
