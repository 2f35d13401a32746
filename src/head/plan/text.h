// Numbers of plans as text.
#pragma once

#include <cstdio>
#include <string>

namespace logitless {

inline std::string seconds_text(double seconds) {
  char text[32];
  if (seconds >= 1.0) {
    std::snprintf(text, sizeof(text), "%.2f s", seconds);
  } else {
    std::snprintf(text, sizeof(text), "%.2f ms", seconds * 1e3);
  }
  return text;
}

}  // namespace logitless
