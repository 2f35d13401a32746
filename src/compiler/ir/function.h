// The scalar functions of `map`, with their names, operand types and values.
#pragma once

#include <array>
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
  fmod,  // a - trunc(a / b) b, exact, with the sign of a
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
  random,   // counter-based: Threefry-2x32, 20 rounds, with key (a, b) and counter c
  uniform,  // the same by Philox-4x32, 10 rounds, with more bits; c is a vocabulary entry
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
//
// `uniform` returns (n + 1/2) 2^-39 of 39 random bits n, rounded to f32 and at most 1 - 2^-24. Keys
// and the entry c count modulo 2^32. Eight entries share a block: entry 32 i + 8 w + 2 q + h, with
// w and q below 4 and h below 2, has slot 2 w + h of block 4 i + q. So a thread that holds a
// fragment of a tensor core's results has whole blocks. The results of philox() of the counter
// (block, 0, 0, 0) are the upper 16 bits of n of each slot, the lower half of a result first. The
// lower 23 bits of n are the upper ones of result `slot % 4` of the counter (block, 1 + slot / 4,
// 0, 0).

// Returns whether it compares two numbers.
constexpr bool is_compare(Function f) { return f >= Function::eq && f <= Function::ge; }

// Returns whether it draws random numbers.
constexpr bool is_random(Function f) { return f == Function::random || f == Function::uniform; }

// Salmon et al., "Parallel random numbers: as easy as 1, 2, 3": Philox-4x32 after 10 rounds.
std::array<std::uint32_t, 4> philox(std::uint32_t key0, std::uint32_t key1,
                                    std::array<std::uint32_t, 4> counter);

// Evaluates a function in double. Unused operands are ignored.
double evaluate(Function function, double a, double b, double c);

}  // namespace logitless::ir
