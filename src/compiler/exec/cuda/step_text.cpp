#include "compiler/exec/cuda/step_text.h"

#include <cmath>
#include <cstdint>
#include <cstdio>
#include <limits>

#include "compiler/plan/integers.h"
#include "core/check.h"

namespace logitless::ir {
namespace {

std::string integer_literal(std::int64_t number) {
  if (number == std::numeric_limits<std::int64_t>::min()) return "least<long long>()";
  return number < 0 ? concat("(", number, "ll)") : concat(number, "ll");
}

}  // namespace

std::string RegisterText::literal(double number) const {
  if (!loop_.wide) number = static_cast<double>(static_cast<float>(number));
  if (std::isnan(number)) return "(infinity() - infinity())";
  if (std::isinf(number)) return number > 0 ? "infinity()" : "-infinity()";
  char text[40];
  std::snprintf(text, sizeof(text), loop_.wide ? "%.17g" : "%.9g", number);
  std::string out = text;
  if (out.find_first_of(".e") == std::string::npos) out += ".0";
  return loop_.wide ? out : out + "f";
}

std::string_view RegisterText::type(int r) const {
  return holds_integers(loop_, r) ? "long long" : real();
}

std::string RegisterText::name(int r) const {
  const auto i = static_cast<std::size_t>(r);
  if (i < loop_.leaves.size() && loop_.leaves[i].kind == Pointwise::Leaf::Kind::constant)
    return literal(loop_.leaves[i].number);
  return names_ != nullptr ? (*names_)[i] : concat("r", r);
}

int RegisterText::result() const {
  const int source = loop_.store.source, leaves = static_cast<int>(loop_.leaves.size());
  const DType to = loop_.store.view.dtype;
  const bool rounds = (to == DType::bf16 || to == DType::f16) && !loop_.wide && !loop_.reduction &&
                      !loop_.store.accumulate;
  if (!rounds || source < leaves) return source;
  const Pointwise::Step& last = loop_.steps[static_cast<std::size_t>(source - leaves)];
  const bool again = last.kind == Pointwise::Step::Kind::round && last.dtype == to;
  return again ? last.a : source;
}

// Returns a register as a float.
std::string RegisterText::real(int r) const {
  if (r < 0) return {};
  return holds_integers(loop_, r) ? concat("(", real(), ")", name(r)) : name(r);
}

// Returns a register as an integer.
std::string RegisterText::integer(int r) const {
  if (r < 0) return {};
  const auto i = static_cast<std::size_t>(r);
  if (i < loop_.leaves.size() && loop_.leaves[i].kind == Pointwise::Leaf::Kind::constant)
    return integer_literal(integer_of(loop_.leaves[i].number, DType::i64));
  return holds_integers(loop_, r) ? name(r)
                                  : concat("(long long)whole<", real(), ">(", name(r), ", ",
                                           literal(most_of(DType::i64)), ")");
}

std::string RegisterText::added(const std::string& old, const std::string& value) const {
  if (loop_.exact && is_index(loop_.store.view.dtype))
    return concat("wrapped_sum(number(", old, "), (long long)", value, ")");
  return concat("(", real(), ")number(", old, ") + ", value);
}

std::string_view RegisterText::reduced_type() const {
  if (!holds_integers(loop_, loop_.store.source)) return real();
  return loop_.reduce == Reduce::sum ? "unsigned long long" : "long long";
}

std::string RegisterText::nothing() const {
  if (loop_.reduce == Reduce::product) return literal(1.0);
  if (loop_.reduce == Reduce::sum)
    return holds_integers(loop_, loop_.store.source) ? "0ll" : literal(0.0);
  return holds_integers(loop_, loop_.store.source)
             ? "least<long long>()"
             : literal(-std::numeric_limits<double>::infinity());
}

std::string RegisterText::step(std::size_t s) const {
  const Pointwise::Step& step = loop_.steps[s];
  if (step.kind == Pointwise::Step::Kind::round) return round(step);
  const bool compares_integers =
      is_compare(step.function) && (holds_integers(loop_, step.a) || holds_integers(loop_, step.b));
  return compares_integers || holds_integers(loop_, static_cast<int>(loop_.leaves.size() + s))
             ? of_integers(step)
             : of_reals(step);
}

std::string RegisterText::round(const Pointwise::Step& step) const {
  const std::string a = name(step.a),
                    most = is_index(step.dtype) ? literal(most_of(step.dtype)) : "";
  switch (step.dtype) {
    case DType::bf16:
      return concat("round_bf16((float)", a, ")");
    case DType::f16:
      return concat("round_f16((float)", a, ")");
    case DType::f32:
      return concat("(float)", a);
    case DType::f64:
      return a;
    case DType::i8:
      return concat("truncated(", real(step.a), ")");
    default:
      if (holds_integers(loop_, step.a)) return step.dtype == DType::i32 ? concat("(int)", a) : a;
      return concat(loop_.exact ? "(long long)" : "", "whole<", real(), ">(", a, ", ", most, ")");
  }
}

// Returns a step of integers: its register holds one, or it compares them.
std::string RegisterText::of_integers(const Pointwise::Step& step) const {
  const std::string a = integer(step.a), b = integer(step.b);
  const auto wraps = [&](const char* function, const std::string& x, const std::string& y) {
    return concat(step.dtype == DType::i32 ? "(int)" : "", function, "(", x, ", ", y, ")");
  };
  const auto truth = [&](const char* op) {
    return concat("(", real(), ")(", a, " ", op, " ", b, ")");
  };
  switch (step.function) {
    case Function::neg:
      return wraps("wrapped_difference", "0ll", a);
    case Function::abs:
      return concat(a, " < 0ll ? ", wraps("wrapped_difference", "0ll", a), " : ", a);
    case Function::sign:
      return concat("sign_of<long long>(", a, ")");
    case Function::add:
      return wraps("wrapped_sum", a, b);
    case Function::sub:
      return wraps("wrapped_difference", a, b);
    case Function::mul:
      return wraps("wrapped_product", a, b);
    case Function::max:
      return concat("maximum<long long>(", a, ", ", b, ")");
    case Function::min:
      return concat("minimum<long long>(", a, ", ", b, ")");
    case Function::select:
      return concat(real(step.a), " != ", literal(0.0), " ? ", b, " : ", integer(step.c));
    case Function::eq:
      return truth("==");
    case Function::ne:
      return truth("!=");
    case Function::lt:
      return truth("<");
    case Function::le:
      return truth("<=");
    case Function::gt:
      return truth(">");
    case Function::ge:
      return truth(">=");
    default:
      throw InternalError("a function without a form of integers");
  }
}

// Returns the number of a register that is a constant.
std::optional<double> RegisterText::constant(int r) const {
  const auto i = static_cast<std::size_t>(r);
  if (i >= loop_.leaves.size() || loop_.leaves[i].kind != Pointwise::Leaf::Kind::constant)
    return {};
  const double number = loop_.leaves[i].number;
  return loop_.wide ? number : static_cast<double>(static_cast<float>(number));
}

// Returns a power. A few products are as exact as powf, which takes some 75 instructions.
std::string RegisterText::power(const Pointwise::Step& step) const {
  constexpr double kMost = 7.0;  // 8 roundings: 4 units in the last place, as powf
  const std::string a = real(step.a);
  const double exponent = constant(step.b).value_or(0.0);
  if (exponent != 0.0 && std::abs(exponent) <= kMost && exponent == std::trunc(exponent))
    return concat("integral_power<", static_cast<int>(exponent), ">(", a, ")");
  return concat(loop_.wide ? "pow" : "powf", "(", a, ", ", real(step.b), ")");
}

// Returns a quotient. One by a constant is its product with the reciprocal, corrected once unless
// its last bits do not matter.
std::string RegisterText::divided(const Pointwise::Step& step) const {
  const std::string a = real(step.a), b = real(step.b);
  const std::optional<double> number = constant(step.b);
  const auto by = static_cast<float>(number.value_or(0.0));
  if (loop_.wide || !std::isnormal(by) || !std::isnormal(1.0f / by))
    return step.near && !loop_.wide && !number ? concat("quotient(", a, ", ", b, ")")
                                               : concat(a, " / ", b);
  const std::string reciprocal = literal(1.0f / by);
  int exponent = 0;
  if (step.near || std::abs(std::frexp(by, &exponent)) == 0.5f) return concat(a, " * ", reciprocal);
  return concat("divided(", a, ", ", b, ", ", reciprocal, ")");
}

std::string RegisterText::of_reals(const Pointwise::Step& step) const {
  const std::string a = real(step.a), b = real(step.b), c = real(step.c);
  const std::string f = loop_.wide ? "" : "f", zero = literal(0.0);
  const auto infix = [&](const char* op) { return concat(a, " ", op, " ", b); };
  const auto truth = [&](const std::string& condition) {
    return concat("(", real(), ")(", condition, ")");
  };
  const auto call = [&](const char* name) { return concat(name, f, "(", a, ")"); };
  switch (step.function) {
    case Function::neg:
      return concat("-(", a, ")");
    case Function::abs:
      return call("fabs");
    case Function::exp:
      return call("exp");
    case Function::log:
      return call("log");
    case Function::log1p:
      return call("log1p");
    case Function::expm1:
      return call("expm1");
    case Function::sqrt:
      return step.near && !loop_.wide ? concat("near_root(", a, ")") : call("sqrt");
    case Function::rsqrt:
      return concat("inverse_root(", a, ")");
    case Function::tanh:
      return call("tanh");
    case Function::erf:
      return call("erf");
    case Function::sigmoid:
      return concat("sigmoid(", a, ")");
    case Function::sin:
      return call("sin");
    case Function::cos:
      return call("cos");
    case Function::atan:
      return call("atan");
    case Function::erfc:
      return call("erfc");
    case Function::lgamma:  // its roots at 1 and 2 ask for more digits than f32 has
      return concat("(", real(), ")lgamma((double)(", a, "))");
    case Function::digamma:
      return concat("digamma(", a, ")");
    case Function::trigamma:
      return concat("trigamma(", a, ")");
    case Function::floor:
      return call("floor");
    case Function::sign:
      return concat("sign_of(", a, ")");
    case Function::add:
      return infix("+");
    case Function::sub:
      return infix("-");
    case Function::mul:
      return infix("*");
    case Function::div:
      return divided(step);
    case Function::pow:
      return power(step);
    case Function::fmod:
      return concat("fmod", f, "(", a, ", ", b, ")");
    case Function::max:
      return concat("maximum<", real(), ">(", a, ", ", b, ")");
    case Function::min:
      return concat("minimum<", real(), ">(", a, ", ", b, ")");
    case Function::eq:
      return truth(infix("=="));
    case Function::ne:
      return truth(infix("!="));
    case Function::lt:
      return truth(infix("<"));
    case Function::le:
      return truth(infix("<="));
    case Function::gt:
      return truth(infix(">"));
    case Function::ge:
      return truth(infix(">="));
    case Function::logical_and:
      return truth(concat(a, " != ", zero, " && ", b, " != ", zero));
    case Function::logical_or:
      return truth(concat(a, " != ", zero, " || ", b, " != ", zero));
    case Function::logical_not:
      return truth(concat(a, " == ", zero));
    case Function::select:
      return concat(a, " != ", zero, " ? ", b, " : ", c);
    case Function::random:
      return concat("random_number(", a, ", ", b, ", ", c, ")");
    case Function::uniform:
      return concat("uniform_number(", a, ", ", b, ", ", c, ")");
  }
  throw InternalError("a function without a text");
}

}  // namespace logitless::ir
