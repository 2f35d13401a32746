#include "compiler/analysis/values.h"

namespace logitless::ir {

bool is_costly(const Node& n) {
  if (n.op != Op::map) return false;
  switch (n.attributes->function) {
    case Function::exp:
    case Function::log:
    case Function::log1p:
    case Function::expm1:
    case Function::tanh:
    case Function::erf:
    case Function::sigmoid:
    case Function::sin:
    case Function::cos:
    case Function::atan:
    case Function::erfc:
    case Function::lgamma:
    case Function::digamma:
    case Function::trigamma:
    case Function::pow:
      return true;
    default:
      return false;
  }
}

bool rounds_operand(const Graph& graph, const Node& node, Value operand) {
  if (node.op != Op::map) return false;
  if (!is_compare(node.attributes->function) && node.attributes->function != Function::fmod)
    return false;
  const DType dtype = graph.type(operand).dtype;
  return dtype == DType::bf16 || dtype == DType::f16;
}

}  // namespace logitless::ir
