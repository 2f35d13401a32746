// Which far pairs of a tile (a group, on a GPU) and a block of tokens a call computes exactly, to
// stand for the others in d_weight and d_bias (docs/far_field.md).
#pragma once

#include <cstdint>

#include "math/host_device.h"

namespace logitless {

// Every `every`-th block of each tile, from one that differs between tiles. Over `every` seeds from
// a multiple of it on, each pair is taken once; beyond, the order is another.
struct FarSample {
  std::int64_t every = 0;  // 0: none
  std::uint64_t key = 0;
  std::uint64_t phase = 0;  // < every

  FarSample() = default;
  // chunk: tells the chunks of a call apart.
  FarSample(std::int64_t sample_every, std::uint64_t seed, std::int64_t chunk)
      : every(sample_every) {
    if (every == 0) return;
    const auto period = static_cast<std::uint64_t>(every);
    key = mix(seed / period ^ mix(static_cast<std::uint64_t>(chunk)));
    phase = seed % period;
  }
  LOGITLESS_HOST_DEVICE bool takes(std::int64_t tile, std::int64_t block) const {
    if (every == 0) return false;
    const auto period = static_cast<std::uint64_t>(every);
    const std::uint64_t first = mix(key ^ static_cast<std::uint64_t>(tile)) % period;
    return (first + phase) % period == static_cast<std::uint64_t>(block) % period;
  }

 private:
  // splitmix64
  LOGITLESS_HOST_DEVICE static std::uint64_t mix(std::uint64_t x) {
    x += 0x9e3779b97f4a7c15u;
    x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
    x = (x ^ (x >> 27)) * 0x94d049bb133111ebu;
    return x ^ (x >> 31);
  }
};

}  // namespace logitless
