#include "compiler/exec/cuda/step_text.h"

#include <cmath>
#include <cstdio>

#include "core/check.h"

namespace logitless::ir {

std::string literal(double number, bool wide) {
  if (!wide) number = static_cast<double>(static_cast<float>(number));
  if (std::isnan(number)) return "(infinity() - infinity())";
  if (std::isinf(number)) return number > 0 ? "infinity()" : "-infinity()";
  char text[40];
  std::snprintf(text, sizeof(text), wide ? "%.17g" : "%.9g", number);
  std::string out = text;
  if (out.find_first_of(".e") == std::string::npos) out += ".0";
  return wide ? out : out + "f";
}

std::string step_text(const Pointwise::Step& step, bool wide, const std::string& a,
                      const std::string& b, const std::string& c) {
  const std::string real = wide ? "double" : "float", f = wide ? "" : "f";
  if (step.kind == Pointwise::Step::Kind::round) {
    switch (step.dtype) {
      case DType::bf16:
        return concat("round_bf16((float)", a, ")");
      case DType::f16:
        return concat("round_f16((float)", a, ")");
      case DType::f32:
        return concat("(float)", a);
      case DType::f64:
        return a;
      default:
        return concat("trunc", f, "(", a, ")");
    }
  }
  const auto infix = [&](const char* op) { return concat(a, " ", op, " ", b); };
  const auto truth = [&](const std::string& condition) {
    return concat("(", real, ")(", condition, ")");
  };
  const auto call = [&](const char* name) { return concat(name, f, "(", a, ")"); };
  const std::string zero = wide ? "0.0" : "0.0f";
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
      return call("sqrt");
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
      return infix("/");
    case Function::pow:
      return concat("pow", f, "(", a, ", ", b, ")");
    case Function::max:
      return concat("maximum<", real, ">(", a, ", ", b, ")");
    case Function::min:
      return concat("minimum<", real, ">(", a, ", ", b, ")");
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
  }
  throw InternalError("a function without a text");
}

}  // namespace logitless::ir
