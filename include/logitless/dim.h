// Sizes of tensors in a program: whole numbers, or polynomials of named ones (B * T, T - 1).
#pragma once

#include <concepts>
#include <cstdint>
#include <map>
#include <string>
#include <string_view>
#include <vector>

#include "logitless/export.h"

namespace logitless {

// Values of the symbols of a program.
using Bindings = std::map<std::string, std::int64_t, std::less<>>;

// constant + sum of coefficient * product of symbols. Equal polynomials compare equal. Arithmetic
// throws InvalidArgument beyond 64 bits, 256 terms or 32 factors of one.
class LOGITLESS_API Dim {
 public:
  Dim(std::int64_t value = 0) : constant_(value) {}  // NOLINT: implicit on purpose
  // Converts any integer, also size_t; one beyond 63 bits becomes negative, which no tensor
  // accepts.
  template <std::integral T>
  Dim(T value)  // NOLINT: implicit on purpose
      : constant_(static_cast<std::int64_t>(value)) {}
  // Throws InvalidArgument when the name is not a letter or _ followed by letters, digits or _.
  static Dim symbol(std::string_view name);

  bool is_constant() const { return terms_.empty(); }
  // Throws InvalidArgument naming the size when it has symbols.
  std::int64_t value() const;
  // Replaces the symbols that `bindings` names; others stay.
  Dim bind(const Bindings& bindings) const;
  // Returns "768", "B * T", "2 * N - 1".
  std::string text() const;
  std::vector<std::string> symbols() const;  // sorted, each once

  Dim& operator+=(const Dim& other);
  Dim& operator-=(const Dim& other) { return *this += other * Dim(-1); }
  friend Dim operator+(Dim a, const Dim& b) { return a += b; }
  friend Dim operator-(Dim a, const Dim& b) { return a -= b; }
  LOGITLESS_API friend Dim operator*(const Dim& a, const Dim& b);
  bool operator==(const Dim&) const = default;

 private:
  struct Term {
    std::vector<std::string> factors;  // sorted, at least one
    std::int64_t coefficient = 0;      // not 0
    bool operator==(const Term&) const = default;
  };
  void add_term(const Term& term);
  std::int64_t constant_ = 0;
  std::vector<Term> terms_;  // sorted by factors
};

using Shape = std::vector<Dim>;

// Returns the product of all sizes; 1 for none.
LOGITLESS_API Dim product(const Shape& shape);
// Returns text like "[4, B * T]".
LOGITLESS_API std::string text_of(const Shape& shape);

}  // namespace logitless
