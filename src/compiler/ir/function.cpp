#include "compiler/ir/function.h"

#include <array>
#include <bit>
#include <cmath>
#include <cstdint>
#include <limits>
#include <numbers>

#include "core/check.h"

namespace logitless::ir {
namespace {

using enum Function;
using enum FunctionKind;

constexpr std::array kFunctions = {
    FunctionInfo{neg, "neg", 1, arithmetic},
    FunctionInfo{abs, "abs", 1, arithmetic},
    FunctionInfo{exp, "exp", 1, real},
    FunctionInfo{log, "log", 1, real},
    FunctionInfo{log1p, "log1p", 1, real},
    FunctionInfo{expm1, "expm1", 1, real},
    FunctionInfo{sqrt, "sqrt", 1, real},
    FunctionInfo{rsqrt, "rsqrt", 1, real},
    FunctionInfo{tanh, "tanh", 1, real},
    FunctionInfo{erf, "erf", 1, real},
    FunctionInfo{sigmoid, "sigmoid", 1, real},
    FunctionInfo{sin, "sin", 1, real},
    FunctionInfo{cos, "cos", 1, real},
    FunctionInfo{atan, "atan", 1, real},
    FunctionInfo{erfc, "erfc", 1, real},
    FunctionInfo{lgamma, "lgamma", 1, real},
    FunctionInfo{digamma, "digamma", 1, real},
    FunctionInfo{trigamma, "trigamma", 1, real},
    FunctionInfo{floor, "floor", 1, real},
    FunctionInfo{sign, "sign", 1, arithmetic},
    FunctionInfo{add, "add", 2, arithmetic},
    FunctionInfo{sub, "sub", 2, arithmetic},
    FunctionInfo{mul, "mul", 2, arithmetic},
    FunctionInfo{div, "div", 2, real},
    FunctionInfo{pow, "pow", 2, real},
    FunctionInfo{fmod, "fmod", 2, real},
    FunctionInfo{max, "max", 2, arithmetic},
    FunctionInfo{min, "min", 2, arithmetic},
    FunctionInfo{eq, "eq", 2, compare},
    FunctionInfo{ne, "ne", 2, compare},
    FunctionInfo{lt, "lt", 2, compare},
    FunctionInfo{le, "le", 2, compare},
    FunctionInfo{gt, "gt", 2, compare},
    FunctionInfo{ge, "ge", 2, compare},
    FunctionInfo{logical_and, "logical_and", 2, logical},
    FunctionInfo{logical_or, "logical_or", 2, logical},
    FunctionInfo{logical_not, "logical_not", 1, logical},
    FunctionInfo{select, "select", 3, choose},
    FunctionInfo{random, "random", 3, counter},
    FunctionInfo{uniform, "uniform", 3, counter},
};

// Salmon et al., "Parallel random numbers: as easy as 1, 2, 3". Returns the exclusive or of the two
// 32-bit results of Threefry-2x32 after 20 rounds.
std::uint32_t threefry(std::uint32_t key0, std::uint32_t key1, std::uint64_t counter) {
  constexpr int kRotations[2][4] = {{13, 15, 26, 6}, {17, 29, 16, 24}};
  const std::uint32_t keys[3] = {key0, key1, key0 ^ key1 ^ 0x1BD11BDAu};
  std::uint32_t x = static_cast<std::uint32_t>(counter >> 32) + keys[0];
  std::uint32_t y = static_cast<std::uint32_t>(counter) + keys[1];
  for (std::uint32_t group = 0; group < 5; ++group) {
    for (const int by : kRotations[group % 2]) {
      x += y;
      y = std::rotl(y, by) ^ x;
    }
    x += keys[(group + 1) % 3];
    y += keys[(group + 2) % 3] + group + 1;
  }
  return x ^ y;
}

// Unlike std::lgamma it writes no global sign.
double log_gamma(double x) {
  int sign = 0;
  return ::lgamma_r(x, &sign);
}

// Abramowitz and Stegun, 6.3.7 for negative x, 6.3.5 up to 40, the first terms of 6.3.18 from
// there.
double digamma_of(double x) {
  if (x == 0.0) return std::copysign(std::numeric_limits<double>::infinity(), -x);
  if (x < 0.0) {
    const double fraction = x - std::round(x);  // keeps the digits of a small x
    if (!(fraction != 0.0 && std::isfinite(x))) return std::numeric_limits<double>::quiet_NaN();
    return digamma_of(1.0 - x) - std::numbers::pi / std::tan(std::numbers::pi * fraction);
  }
  if (x < 40.0) return digamma_of(x + 1.0) - 1.0 / x;
  const double z = 1.0 / (x * x);
  return std::log(x) - 0.5 / x - z * (1.0 / 12.0 - z * (1.0 / 120.0 - z / 252.0));
}

// Abramowitz and Stegun, 6.4.7, 6.4.6 and 6.4.12, likewise.
double trigamma_of(double x) {
  if (x < 0.5) {
    const double fraction = x - std::round(x);
    if (fraction == 0.0) return std::numeric_limits<double>::infinity();
    const double sine = std::sin(std::numbers::pi * fraction);
    return std::numbers::pi * std::numbers::pi / (sine * sine) - trigamma_of(1.0 - x);
  }
  if (x < 40.0) return trigamma_of(x + 1.0) + 1.0 / (x * x);
  const double z = 1.0 / (x * x);
  return (1.0 + 0.5 / x + z * (1.0 / 6.0 - z * (1.0 / 30.0 - z * (1.0 / 42.0 - z / 30.0)))) / x;
}

double uniform_number(std::uint32_t key0, std::uint32_t key1, std::uint32_t entry) {
  const std::uint32_t block = entry / 32 * 4 + entry % 8 / 2;
  const std::uint32_t slot = entry / 8 % 4 * 2 + entry % 2;
  const std::uint32_t pair = philox(key0, key1, {block, 0, 0, 0})[slot / 2];
  const std::uint32_t first = slot % 2 == 0 ? pair & 0xFFFFu : pair >> 16;
  const std::uint32_t more = philox(key0, key1, {block, 1 + slot / 4, 0, 0})[slot % 4] >> 9;
  const double n = std::ldexp(static_cast<double>(first), 23) + static_cast<double>(more);
  const double most = 1.0 - 0x1p-24;
  return std::fmin(static_cast<double>(static_cast<float>(std::ldexp(n + 0.5, -39))), most);
}

std::uint64_t whole(double x) { return static_cast<std::uint64_t>(static_cast<std::int64_t>(x)); }

}  // namespace

const FunctionInfo& info_of(Function function) {
  const FunctionInfo& row = kFunctions[static_cast<std::size_t>(function)];
  check(row.function == function, "the table of functions is out of order at ", row.name);
  return row;
}

std::optional<Function> find_function(std::string_view name) {
  for (const FunctionInfo& row : kFunctions) {
    if (row.name == name) return row.function;
  }
  return std::nullopt;
}

std::array<std::uint32_t, 4> philox(std::uint32_t key0, std::uint32_t key1,
                                    std::array<std::uint32_t, 4> counter) {
  std::array<std::uint32_t, 4> x = counter;
  for (int round = 0; round < 10; ++round) {
    const std::uint64_t a = std::uint64_t{0xD2511F53u} * x[0];
    const std::uint64_t b = std::uint64_t{0xCD9E8D57u} * x[2];
    x = {static_cast<std::uint32_t>(b >> 32) ^ x[1] ^ key0, static_cast<std::uint32_t>(b),
         static_cast<std::uint32_t>(a >> 32) ^ x[3] ^ key1, static_cast<std::uint32_t>(a)};
    key0 += 0x9E3779B9u;
    key1 += 0xBB67AE85u;
  }
  return x;
}

double evaluate(Function function, double a, double b, double c) {
  const double nan = std::numeric_limits<double>::quiet_NaN();
  switch (function) {
    case neg:
      return -a;
    case abs:
      return std::fabs(a);
    case exp:
      return std::exp(a);
    case log:
      return std::log(a);
    case log1p:
      return std::log1p(a);
    case expm1:
      return std::expm1(a);
    case sqrt:
      return std::sqrt(a);
    case rsqrt:
      return 1.0 / std::sqrt(a);
    case tanh:
      return std::tanh(a);
    case erf:
      return std::erf(a);
    case sigmoid:
      return 1.0 / (1.0 + std::exp(-a));
    case sin:
      return std::sin(a);
    case cos:
      return std::cos(a);
    case atan:
      return std::atan(a);
    case erfc:
      return std::erfc(a);
    case lgamma:
      return log_gamma(a);
    case digamma:
      return digamma_of(a);
    case trigamma:
      return trigamma_of(a);
    case floor:
      return std::floor(a);
    case sign:
      return a > 0.0 ? 1.0 : a < 0.0 ? -1.0 : a;
    case add:
      return a + b;
    case sub:
      return a - b;
    case mul:
      return a * b;
    case div:
      return a / b;
    case pow:
      return std::pow(a, b);
    case fmod:
      return std::fmod(a, b);
    case max:
      return std::isnan(a) || std::isnan(b) ? nan : a > b ? a : b;
    case min:
      return std::isnan(a) || std::isnan(b) ? nan : a < b ? a : b;
    case eq:
      return a == b;
    case ne:
      return a != b;
    case lt:
      return a < b;
    case le:
      return a <= b;
    case gt:
      return a > b;
    case ge:
      return a >= b;
    case logical_and:
      return a != 0.0 && b != 0.0;
    case logical_or:
      return a != 0.0 || b != 0.0;
    case logical_not:
      return a == 0.0;
    case select:
      return a != 0.0 ? b : c;
    case random: {
      const std::uint32_t bits = threefry(static_cast<std::uint32_t>(whole(a)),
                                          static_cast<std::uint32_t>(whole(b)), whole(c));
      return std::ldexp(static_cast<double>(bits >> 9), -23);
    }
    case uniform:
      return uniform_number(static_cast<std::uint32_t>(whole(a)),
                            static_cast<std::uint32_t>(whole(b)),
                            static_cast<std::uint32_t>(whole(c)));
  }
  return nan;
}

}  // namespace logitless::ir
