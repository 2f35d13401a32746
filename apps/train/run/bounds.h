// Bounds of the numbers of a run, on the command line and in a checkpoint.
#pragma once

#include <cmath>
#include <cstdint>
#include <string>
#include <string_view>

#include "logitless/error.h"

namespace logitless::train {

// Bounds of a whole number. `name` is the option's; `unset` stands for an option that was not
// given.
struct WholeBounds {
  std::string_view name;
  std::int64_t least = 0, most = 0;
  std::int64_t unset = least;

  constexpr bool allow(std::int64_t value) const { return value >= least && value <= most; }
  std::string expected() const {
    return "expected a whole number from " + std::to_string(least) + " to " + std::to_string(most);
  }
};

inline constexpr std::int64_t kMostOfASize = 1 << 20;
inline constexpr std::int64_t kMostSteps = INT64_C(1) << 40;
inline constexpr std::int64_t kMostWindows = INT64_C(1) << 60;

inline constexpr WholeBounds kWholeBounds[] = {
    {"vocab", 1, kMostOfASize},
    {"dim", 1, kMostOfASize},
    {"heads", 1, kMostOfASize},
    {"layers", 1, 4096},
    {"context", 1, kMostOfASize, 0},
    {"batch", 1, kMostOfASize},
    {"length", 1, kMostOfASize},
    {"steps", 1, kMostSteps},
    {"accumulate", 1, kMostOfASize},
    {"warmup", 0, kMostSteps, -1},
    {"ranks", 1, 1024},
    {"seed", 0, kMostSteps},
    {"eval-every", 1, kMostSteps, 0},
    {"sample", 0, kMostOfASize},
    {"top-k", 0, kMostOfASize},
};

// Bounds of a real number: at least 0, or, with `fraction`, between 0 and 1, both excluded.
struct RealBounds {
  std::string_view name;
  bool fraction = false;
  double unset = 0.0;

  bool allow(double value) const {
    return std::isfinite(value) && (fraction ? value > 0.0 && value < 1.0 : value >= 0.0);
  }
  std::string expected() const {
    return fraction ? "expected a number between 0 and 1, both excluded"
                    : "expected a number of at least 0";
  }
};

inline constexpr RealBounds kRealBounds[] = {
    {"lr"},   {"min-lr", false, -1.0},  {"weight-decay"},
    {"clip"}, {"far-field", true, 0.0}, {"temperature"},
};

namespace detail {
template <typename Bounds>
const Bounds& bounds_of(std::string_view name, const Bounds* begin, const Bounds* end) {
  for (; begin != end; ++begin) {
    if (begin->name == name) return *begin;
  }
  throw InternalError("no bounds of the option " + std::string(name));
}
}  // namespace detail

inline const WholeBounds& whole_bounds(std::string_view name) {
  return detail::bounds_of(name, std::begin(kWholeBounds), std::end(kWholeBounds));
}
inline const RealBounds& real_bounds(std::string_view name) {
  return detail::bounds_of(name, std::begin(kRealBounds), std::end(kRealBounds));
}

}  // namespace logitless::train
