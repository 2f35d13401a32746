// loop: a body that runs for each chunk of an axis. Made by passes; its text, which holds
// statements, is the grammar's (ir/parse.cpp, ir/print.cpp).
#include <algorithm>

#include "compiler/ir/derivation.h"
#include "compiler/ir/evaluation.h"
#include "compiler/ir/typing.h"
#include "compiler/ops/families.h"

namespace logitless::ir {
namespace {

using oracle::at;
using oracle::each;
using oracle::Index;

// The size along an axis of a cut value: of all, or of a chunk.
Dim extent_of(const Dim& axis, std::int64_t factor) { return axis * Dim(factor); }

void check_parameters(const Typing& r, const Loop& loop) {
  const std::vector<int> parameters = loop.body.parameters();
  r.expect(parameters.size() == r.operands.size() + 1 && loop.inputs.size() == r.operands.size(),
           "the body has ", parameters.size(), " parameters and the loop ", r.operands.size(),
           " operands; expected one more");
  r.expect(loop.outputs.size() == loop.body.outputs().size(), "the body has ",
           loop.body.outputs().size(), " results and the loop ", loop.outputs.size());
  const auto parameter = [&](std::size_t i) -> const Type& {
    return loop.body.node(parameters[i]).results[0];
  };
  r.expect(parameter(0) == Type{DType::i64, {}}, "the first parameter of the body is ",
           text_of(parameter(0)), ", expected i64[]");
  for (std::size_t i = 0; i < r.operands.size(); ++i) {
    Type expected = *r.operands[i];
    const Loop::Input& how = loop.inputs[i];
    if (how.kind == Loop::In::slice) {
      const auto axis = static_cast<std::size_t>(how.axis);
      const Dim all = extent_of(Dim(loop.extent), how.factor);
      r.expect(axis < expected.shape.size(), "operand ", i, " is cut along dimension ", axis);
      r.expect(expected.shape[axis] == all, "operand ", i, " is ", text_of(expected), ", expected ",
               all.text(), " along dimension ", axis);
      expected.shape[axis] = extent_of(Dim::symbol(loop.symbol), how.factor);
    }
    r.expect(parameter(i + 1) == expected, "parameter ", i + 1, " of the body is ",
             text_of(parameter(i + 1)), ", expected ", text_of(expected));
  }
}

std::vector<Type> loop_types(const Typing& r) {
  r.expect(r.a.loop != nullptr, "no body");
  const Loop& loop = *r.a.loop;
  r.expect(loop.chunk >= 1 && loop.extent >= 0, "chunks of ", loop.chunk, " of ", loop.extent);
  check_parameters(r, loop);
  std::vector<Type> types;
  for (std::size_t i = 0; i < loop.outputs.size(); ++i) {
    Type type = loop.body.type(loop.body.outputs()[i].value);
    const Loop::Result& how = loop.outputs[i];
    if (how.kind == Loop::Out::stack) {
      const auto axis = static_cast<std::size_t>(how.axis);
      const Dim chunk = extent_of(Dim::symbol(loop.symbol), how.factor);
      r.expect(axis < type.shape.size() && type.shape[axis] == chunk, "result ", i, " is ",
               text_of(type), ", expected ", chunk.text(), " along dimension ", axis);
      type.shape[axis] = extent_of(Dim(loop.extent), how.factor);
    }
    for (const Dim& dim : type.shape) {
      const std::vector<std::string> names = dim.symbols();
      r.expect(std::find(names.begin(), names.end(), loop.symbol) == names.end(), "result ", i,
               " has the size of a chunk in ", text_of(type));
    }
    types.push_back(type);
  }
  return types;
}

// --- float64

// What the chunk from element `first` on reads of an operand.
Tensor chunk_of(const Tensor& whole, const Loop::Input& how, const Type& type, std::int64_t first) {
  if (how.kind == Loop::In::whole) return whole;
  Tensor part = oracle::tensor_of(type);
  std::size_t k = 0;
  each(part.shape, [&](Index index) {
    index[static_cast<std::size_t>(how.axis)] += first * how.factor;
    part.data[k++] = at(whole, index);
  });
  return part;
}

void merge_into(Tensor& result, const Tensor& part, const Loop::Result& how, std::int64_t first) {
  std::size_t k = 0;
  each(part.shape, [&](Index index) {
    const double x = part.data[k++];
    if (how.kind == Loop::Out::stack)
      index[static_cast<std::size_t>(how.axis)] += first * how.factor;
    double& to = at(result, index);
    to = how.kind == Loop::Out::stack ? x
         : how.kind == Loop::Out::sum ? to + x
         : how.kind == Loop::Out::max ? oracle::merged(Reduce::max, to, x)
                                      : oracle::merged(Reduce::lse, to, x);
  });
}

std::vector<Tensor> loop_value(const Evaluation& e) {
  const Loop& l = *e.node.attributes.loop;
  std::vector<Tensor> results;
  for (std::size_t i = 0; i < e.node.results.size(); ++i) {
    constexpr Reduce kKinds[] = {Reduce::sum, Reduce::sum, Reduce::max, Reduce::lse};
    results.push_back(oracle::tensor_of(
        e.node.results[i], oracle::start(kKinds[static_cast<int>(l.outputs[i].kind)])));
  }
  for (std::int64_t first = 0; first < l.extent; first += l.chunk) {
    const Graph body = bind(l.body, {{l.symbol, std::min(l.chunk, l.extent - first)}});
    std::size_t next = 0;
    const std::vector<Tensor> parts = evaluate_graph(body, [&](const Node& parameter) {
      if (next++ == 0) return Tensor{{}, {static_cast<double>(first)}};
      const std::size_t i = next - 2;
      return chunk_of(e.in(i), l.inputs[i], parameter.results[0], first);
    });
    for (std::size_t i = 0; i < results.size(); ++i)
      merge_into(results[i], parts[i], l.outputs[i], first);
  }
  return results;
}

constexpr Operation kOperations[] = {{
    .op = Op::loop,
    .name = "loop",
    .infer = loop_types,
    .statement = false,
    .evaluate = loop_value,
    .gradient = compiled_gradient,
}};

}  // namespace

std::span<const Operation> loop_operations() { return kOperations; }

}  // namespace logitless::ir
