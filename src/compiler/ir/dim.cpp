#include "logitless/dim.h"

#include <algorithm>
#include <cctype>

#include "core/check.h"

namespace logitless {
namespace {

// More terms or factors are mistakes, and slow ones.
constexpr std::size_t kMostTerms = 256;
constexpr std::size_t kMostFactors = 32;

// The lowest integer has no negative, so its text could not be read back.
std::int64_t multiplied(std::int64_t a, std::int64_t b) {
  std::int64_t result = 0;
  require(!__builtin_mul_overflow(a, b, &result) && result != INT64_MIN,
          "a size overflows 64 bits: ", a, " * ", b);
  return result;
}
std::int64_t added(std::int64_t a, std::int64_t b) {
  std::int64_t result = 0;
  require(!__builtin_add_overflow(a, b, &result) && result != INT64_MIN,
          "a size overflows 64 bits: ", a, " + ", b);
  return result;
}

}  // namespace

Dim Dim::symbol(std::string_view name) {
  const auto letter = [](char c) {
    return std::isalpha(static_cast<unsigned char>(c)) || c == '_';
  };
  require(!name.empty() && letter(name[0]) &&
              std::all_of(
                  name.begin(), name.end(),
                  [&](char c) { return letter(c) || std::isdigit(static_cast<unsigned char>(c)); }),
          "'", name, "' is no name of a size: expected letters, digits and _");
  Dim dim;
  dim.terms_.push_back({{std::string(name)}, 1});
  return dim;
}

std::int64_t Dim::value() const {
  if (!is_constant())
    throw InvalidArgument(concat("the size ", text(), " is not bound to a number"));
  return constant_;
}

void Dim::add_term(const Term& term) {
  require(term.factors.size() <= kMostFactors, "a size multiplies more than ", kMostFactors,
          " names");
  const auto at =
      std::lower_bound(terms_.begin(), terms_.end(), term,
                       [](const Term& a, const Term& b) { return a.factors < b.factors; });
  if (at != terms_.end() && at->factors == term.factors) {
    at->coefficient = added(at->coefficient, term.coefficient);
    if (at->coefficient == 0) terms_.erase(at);
  } else if (term.coefficient != 0) {
    require(terms_.size() < kMostTerms, "a size has more than ", kMostTerms, " terms");
    terms_.insert(at, term);
  }
}

Dim& Dim::operator+=(const Dim& other) {
  constant_ = added(constant_, other.constant_);
  for (const Term& term : other.terms_) add_term(term);
  return *this;
}

Dim operator*(const Dim& a, const Dim& b) {
  Dim result(multiplied(a.constant_, b.constant_));
  if (a.is_constant() && b.is_constant()) return result;
  for (const Dim::Term& x : a.terms_)
    result.add_term({x.factors, multiplied(x.coefficient, b.constant_)});
  for (const Dim::Term& y : b.terms_) {
    result.add_term({y.factors, multiplied(y.coefficient, a.constant_)});
    for (const Dim::Term& x : a.terms_) {
      Dim::Term both{x.factors, multiplied(x.coefficient, y.coefficient)};
      both.factors.insert(both.factors.end(), y.factors.begin(), y.factors.end());
      std::sort(both.factors.begin(), both.factors.end());
      result.add_term(both);
    }
  }
  return result;
}

Dim Dim::bind(const Bindings& bindings) const {
  if (is_constant()) return *this;
  Dim result(constant_);
  for (const Term& term : terms_) {
    Dim part(term.coefficient);
    for (const std::string& name : term.factors) {
      const auto found = bindings.find(name);
      part = part * (found != bindings.end() ? Dim(found->second) : symbol(name));
    }
    result += part;
  }
  return result;
}

std::string Dim::text() const {
  std::string out;
  for (const Term& term : terms_) {
    std::int64_t coefficient = term.coefficient;
    if (!out.empty()) {
      out += coefficient < 0 ? " - " : " + ";
      coefficient = std::abs(coefficient);
    }
    if (coefficient != 1) out += std::to_string(coefficient) + " * ";
    for (std::size_t i = 0; i < term.factors.size(); ++i)
      out += (i > 0 ? " * " : "") + term.factors[i];
  }
  if (out.empty()) return std::to_string(constant_);
  if (constant_ != 0) out += (constant_ < 0 ? " - " : " + ") + std::to_string(std::abs(constant_));
  return out;
}

std::vector<std::string> Dim::symbols() const {
  std::vector<std::string> names;
  for (const Term& term : terms_)
    names.insert(names.end(), term.factors.begin(), term.factors.end());
  std::sort(names.begin(), names.end());
  names.erase(std::unique(names.begin(), names.end()), names.end());
  return names;
}

Dim product(const Shape& shape) {
  Dim result(1);
  for (const Dim& dim : shape) result = result * dim;
  return result;
}

std::string text_of(const Shape& shape) {
  std::string out = "[";
  for (std::size_t i = 0; i < shape.size(); ++i) out += (i > 0 ? ", " : "") + shape[i].text();
  return out + "]";
}

}  // namespace logitless
