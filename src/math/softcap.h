// c * tanh(u / c) and its derivative.
#pragma once

#include <cmath>

#include "math/host_device.h"

namespace logitless {

// c = 0: no cap.
template <typename T>
LOGITLESS_HOST_DEVICE inline T softcap(T u, T c) {
  return c == T(0) ? u : c * std::tanh(u / c);
}

// d softcap / du from the capped value z: 1 - (z / c)^2.
template <typename T>
LOGITLESS_HOST_DEVICE inline T softcap_slope(T z, T c) {
  return c == T(0) ? T(1) : (T(1) - z / c) * (T(1) + z / c);
}

}  // namespace logitless
