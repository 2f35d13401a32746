#include <algorithm>

#include "compiler/search/plan.h"

namespace logitless::ir {
namespace {

bool same_loop(const Loop& a, const Loop& b) {
  if (&a == &b) return true;
  const auto same_way = [](const auto& x, const auto& y) {
    return x.kind == y.kind && x.axis == y.axis && x.factor == y.factor;
  };
  return a.symbol == b.symbol && a.extent == b.extent && a.chunk == b.chunk &&
         std::equal(a.inputs.begin(), a.inputs.end(), b.inputs.begin(), b.inputs.end(), same_way) &&
         std::equal(a.outputs.begin(), a.outputs.end(), b.outputs.begin(), b.outputs.end(),
                    same_way) &&
         same_graph(a.body, b.body);
}

bool same_head(const Head& a, const Head& b) {
  return a.bias == b.bias && a.gradients == b.gradients && a.log_prob == b.log_prob &&
         a.scale == b.scale && a.softcap == b.softcap && a.d_x == b.d_x && a.d_w == b.d_w &&
         a.d_bias == b.d_bias && a.ignored == b.ignored && a.workspace == b.workspace;
}

bool same_node(const Node& a, const Node& b) {
  if (a.op != b.op || a.operands != b.operands) return false;
  if (a.attributes.is(b.attributes) && a.results.is(b.results)) return true;
  switch (a.op) {
    case Op::loop:
      return same_loop(*a.attributes->loop, *b.attributes->loop);
    case Op::head:
      return same_head(a.attributes->head, b.attributes->head) && a.results == b.results;
    case Op::parameter:
      return a.attributes->name == b.attributes->name && a.results == b.results;
    default:
      return computes_alike(a, b);
  }
}

}  // namespace

bool same_graph(const Graph& a, const Graph& b) {
  const auto same_output = [](const Output& x, const Output& y) {
    return x.name == y.name && x.value == y.value;
  };
  return std::equal(a.nodes().begin(), a.nodes().end(), b.nodes().begin(), b.nodes().end(),
                    same_node) &&
         std::equal(a.outputs().begin(), a.outputs().end(), b.outputs().begin(), b.outputs().end(),
                    same_output);
}

}  // namespace logitless::ir
