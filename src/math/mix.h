// The finaliser of splitmix64 (Steele, Lea, Flood 2014): a portable pseudo-random hash.
#pragma once

#include <cstdint>

#include "math/host_device.h"

namespace logitless {

LOGITLESS_HOST_DEVICE inline std::uint64_t mix64(std::uint64_t x) {
  x += 0x9e3779b97f4a7c15u;
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
  x = (x ^ (x >> 27)) * 0x94d049bb133111ebu;
  return x ^ (x >> 31);
}

}  // namespace logitless
