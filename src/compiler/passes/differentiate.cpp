#include <algorithm>
#include <map>

#include "compiler/ir/build.h"
#include "compiler/ir/derivation.h"
#include "compiler/ir/typing.h"
#include "compiler/ops/op.h"
#include "compiler/passes/passes.h"
#include "core/check.h"

namespace logitless::ir {
namespace {

// Returns the gradients in the order of the operands; an invalid value means none.
std::vector<Value> gradients_of_operands(Graph& graph, int node, std::vector<Value> results,
                                         std::vector<bool> wanted) {
  const auto rule = row_of(graph.node(node).op).gradient;
  require(rule != nullptr, "differentiate: ", name_of(graph.node(node).op),
          " has no gradient rule");
  Derivation derivation(graph, node, std::move(results), std::move(wanted));
  return rule(derivation);
}

// Returns "d_x" for a value x with a name.
std::string name_of_gradient(const Graph& graph, Value of) {
  const Node& n = graph.node(of);
  const std::string& name = n.op == Op::parameter ? n.attributes->name : n.name;
  return name.empty() ? name : "d_" + name;
}

}  // namespace

std::vector<Value> gradients(Graph& graph, const std::vector<Value>& outputs,
                             const std::vector<Value>& cotangents, const std::vector<Value>& wrt) {
  require(cotangents.empty() || cotangents.size() == outputs.size(),
          "differentiate: ", outputs.size(), " outputs but ", cotangents.size(), " cotangents");
  // Marks the nodes that depend on wrt.
  const int end = graph.size();
  std::vector<bool> active(static_cast<std::size_t>(end));
  for (const Value v : wrt) {
    require(is_float(graph.type(v).dtype), "differentiate: wrt is ", text_of(graph.type(v)),
            ", expected floats");
    active[static_cast<std::size_t>(v.node)] = true;
  }
  for (int id = 0; id < end; ++id) {
    for (const Value v : graph.node(id).operands) {
      if (active[static_cast<std::size_t>(v.node)] && is_float(graph.type(v).dtype) &&
          graph.node(id).op != Op::stop_gradient)
        active[static_cast<std::size_t>(id)] = true;
    }
  }
  std::map<Value, Value> grads;
  const auto add = [&](Value to, Value part) {
    Value& sum = grads[to];
    sum = sum.valid() ? map(graph, Function::add, {sum, part}, name_of_gradient(graph, to)) : part;
  };
  for (std::size_t i = 0; i < outputs.size(); ++i) {
    const Type type = graph.type(outputs[i]);
    require(is_float(type.dtype), "differentiate: the output is ", text_of(type),
            ", expected floats");
    Value cotangent = cotangents.empty() ? Value{} : cotangents[i];
    if (cotangent.valid()) {
      require(graph.type(cotangent).shape == type.shape && is_float(graph.type(cotangent).dtype),
              "differentiate: the cotangent is ", text_of(graph.type(cotangent)), ", expected ",
              text_of(type));
      cotangent = cast(graph, cotangent, type.dtype);
    } else {
      cotangent = constant(graph, 1.0, type);
    }
    if (active[static_cast<std::size_t>(outputs[i].node)]) add(outputs[i], cotangent);
  }
  for (int id = end - 1; id >= 0; --id) {
    if (!active[static_cast<std::size_t>(id)]) continue;
    if (std::any_of(wrt.begin(), wrt.end(), [&](Value v) { return v.node == id; }) &&
        graph.node(id).op == Op::parameter)
      continue;
    std::vector<Value> results(graph.node(id).results.size());
    bool any = false;
    for (std::size_t i = 0; i < results.size(); ++i) {
      const auto found = grads.find({id, static_cast<std::int32_t>(i)});
      if (found != grads.end()) results[i] = found->second;
      any = any || results[i].valid();
    }
    if (!any || !results[0].valid()) {
      require(!any, "differentiate: ", name_of(graph.node(id).op),
              ": only its first result has a gradient rule");
      continue;
    }
    const std::vector<Value> operands = graph.node(id).operands;
    std::vector<bool> wanted;
    for (const Value v : operands) wanted.push_back(active[static_cast<std::size_t>(v.node)]);
    const Origin origin(graph, graph.node(id), "d_");
    const int before = graph.size();
    const std::vector<Value> parts = gradients_of_operands(graph, id, results, wanted);
    for (std::size_t i = 0; i < operands.size(); ++i) {
      const Value part = parts[i];
      if (!part.valid() || !wanted[i]) continue;
      const std::string name = name_of_gradient(graph, operands[i]);
      if (part.node >= before && graph.node(part).results.size() == 1 && !name.empty())
        graph.set_hint(part.node, name);
      add(operands[i], part);
    }
  }
  std::vector<Value> result;
  for (const Value v : wrt) {
    const auto found = grads.find(v);
    result.push_back(found != grads.end() ? found->second : constant(graph, 0.0, graph.type(v)));
  }
  return result;
}

Graph differentiate(const Graph& graph, const std::vector<GradientRequest>& requests) {
  Graph result = graph;
  const auto parameter = [&](const std::string& name) {
    const int id = result.find_parameter(name);
    require(id >= 0, "differentiate: there is no parameter '", name, "'");
    return Value{id, 0};
  };
  for (const GradientRequest& request : requests) {
    std::vector<Value> outputs, cotangents, wrt;
    for (const GradientRequest::Term& term : request.terms) {
      const auto found = std::find_if(graph.outputs().begin(), graph.outputs().end(),
                                      [&](const Output& o) { return o.name == term.output; });
      require(found != graph.outputs().end(), "differentiate: there is no result '", term.output,
              "'");
      outputs.push_back(found->value);
      cotangents.push_back(term.cotangent.empty() ? Value{} : parameter(term.cotangent));
    }
    for (const std::string& name : request.parameters) wrt.push_back(parameter(name));
    const std::vector<Value> grads = gradients(result, outputs, cotangents, wrt);
    for (std::size_t i = 0; i < grads.size(); ++i) {
      const std::string prefix =
          requests.size() > 1 ? request.terms[0].output + "." : std::string();
      result.add_output(prefix + "d_" + request.parameters[i], grads[i]);
    }
  }
  return result;
}

}  // namespace logitless::ir
