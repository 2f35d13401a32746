// Formats the registers and steps of a loop as expressions of CUDA C++.
#pragma once

#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "compiler/plan/program.h"

namespace logitless::ir {

// The registers of a loop: floats of its width, and 64-bit integers where the loop is exact.
class RegisterText {
 public:
  // names: of the registers, in their order; null: r0, r1 and so on.
  explicit RegisterText(const Pointwise& loop, const std::vector<std::string>* names = nullptr)
      : loop_(loop), names_(names) {}

  // Returns the type of the loop's floats.
  std::string_view real() const { return loop_.wide ? "double" : "float"; }
  // Returns the type of a register.
  std::string_view type(int r) const;
  // Returns the name of a register, or the literal of a constant.
  std::string name(int r) const;
  // Returns the register that is stored. Where the store rounds, as bf16 does, it is the one before
  // a rounding to the same dtype.
  int result() const;
  // Returns the expression of step `s`, of the type of its register.
  std::string step(std::size_t s) const;
  // Returns the sum of an element in memory and a value of the type of the result's register.
  std::string added(const std::string& old, const std::string& value) const;

  // Returns the type in which the loop's reduction counts: unsigned for sums of integers, which
  // wrap.
  std::string_view reduced_type() const;
  // Returns the literal that a reduction starts from.
  std::string nothing() const;

 private:
  const Pointwise& loop_;
  const std::vector<std::string>* names_;

  std::string literal(double number) const;
  std::string real(int r) const;
  std::string integer(int r) const;
  std::string round(const Pointwise::Step& step) const;
  std::string of_integers(const Pointwise::Step& step) const;
  std::string of_reals(const Pointwise::Step& step) const;
  std::optional<double> constant(int r) const;
  std::string power(const Pointwise::Step& step) const;
  std::string divided(const Pointwise::Step& step) const;
};

}  // namespace logitless::ir
