// log |gamma(x)|, its derivative digamma and its second derivative trigamma.
#pragma once

#include <cmath>
#include <limits>
#include <numbers>

namespace logitless {

// Unlike std::lgamma it writes no global sign.
inline double log_gamma(double x) {
  int sign = 0;
  return ::lgamma_r(x, &sign);
}

// Abramowitz and Stegun, 6.3.7 for negative x, 6.3.5 up to 10, 6.3.18 from there.
inline double digamma(double x) {
  constexpr double inf = std::numeric_limits<double>::infinity();
  constexpr double nan = std::numeric_limits<double>::quiet_NaN();
  constexpr double pi = std::numbers::pi;
  if (x == 0.0) return std::signbit(x) ? inf : -inf;
  double y = 0.0;
  if (x < 0.0) {
    const double fraction = x - std::round(x);  // keeps the digits of a small x
    if (!(fraction != 0.0 && std::isfinite(x))) return nan;
    y = -pi / std::tan(pi * fraction);
    x = 1.0 - x;
  }
  for (; x < 10.0; x += 1.0) y -= 1.0 / x;
  const double z = 1.0 / (x * x);
  double series = 691.0 / 32760.0 - z / 12.0;
  for (const double of : {1.0 / 132.0, 1.0 / 240.0, 1.0 / 252.0, 1.0 / 120.0, 1.0 / 12.0})
    series = of - z * series;
  return y + std::log(x) - 0.5 / x - z * series;
}

// Abramowitz and Stegun, 6.4.7, 6.4.6 and 6.4.12.
inline double trigamma(double x) {
  constexpr double pi = std::numbers::pi;
  double y = 0.0, sign = 1.0, sum = 0.0;
  if (x < 0.5) {
    const double fraction = x - std::round(x);
    if (fraction == 0.0) return std::numeric_limits<double>::infinity();
    const double of_sine = pi / std::sin(pi * fraction);
    y = of_sine * of_sine;
    sign = -1.0;
    x = 1.0 - x;
  }
  for (; x < 10.0; x += 1.0) sum += 1.0 / (x * x);
  const double z = 1.0 / (x * x);
  double series = 5.0 / 66.0 - z * (691.0 / 2730.0);
  for (const double of : {1.0 / 30.0, 1.0 / 42.0, 1.0 / 30.0, 1.0 / 6.0}) series = of - z * series;
  return y + sign * (sum + (1.0 + 0.5 / x + z * series) / x);
}

}  // namespace logitless
