// The scalar functions of `map`, with their names, operand types and values.
#pragma once

#include <cstdint>
#include <optional>
#include <string_view>

namespace logitless::ir {

enum class Function : std::uint8_t {
  neg,
  abs,
  exp,
  log,
  log1p,
  expm1,
  sqrt,
  rsqrt,
  tanh,
  erf,
  sigmoid,
  sin,
  cos,
  atan,
  erfc,
  lgamma,  // log |gamma(x)|
  digamma,
  trigamma,
  floor,
  sign,
  add,
  sub,
  mul,
  div,
  pow,
  max,
  min,
  eq,
  ne,
  lt,
  le,
  gt,
  ge,
  logical_and,
  logical_or,
  logical_not,
  select,
  random,  // counter-based: Threefry-2x32, 20 rounds, with key (a, b) and counter c
};

enum class FunctionKind : std::uint8_t {
  real,        // floats to a float of the same dtype
  arithmetic,  // numbers to a number of the same dtype
  compare,     // two numbers of the same dtype to i8: 0 or 1
  logical,     // i8 to i8
  choose,      // i8, then two of the same dtype
  counter,     // three i64 to f32
};

struct FunctionInfo {
  Function function;
  std::string_view name;
  int operands;
  FunctionKind kind;
};

const FunctionInfo& info_of(Function function);
std::optional<Function> find_function(std::string_view name);
// `random` returns a number in [0, 1), a multiple of 2^-23, from 32 random bits. Keys count modulo
// 2^32. The counter's upper 32 bits are its first word of 32 bits.

// Returns whether it compares two numbers.
constexpr bool is_compare(Function f) { return f >= Function::eq && f <= Function::ge; }

// Evaluates a function in double. Unused operands are ignored.
double evaluate(Function function, double a, double b, double c);

}  // namespace logitless::ir
