#include "compiler/passes/differentiate.h"

#include <algorithm>
#include <map>
#include <numbers>

#include "compiler/ir/build.h"
#include "core/check.h"

namespace logitless::ir {
namespace {

bool is_real(DType dtype) {
  return dtype == DType::f32 || dtype == DType::bf16 || dtype == DType::f16 || dtype == DType::f64;
}

// Gradients of the operands of one node, given those of its results.
class Rules {
 public:
  Rules(Graph& graph, int node, std::vector<Value> results)
      : g_(graph),
        n_(graph.node(node)),
        id_(node),
        results_(std::move(results)),
        dy_(results_[0]) {}

  // In the order of the operands; not valid(): none.
  std::vector<Value> run() {
    const Attributes& a = n_.attributes;
    switch (n_.op) {
      case Op::map:
        return function();
      case Op::cast:
        if (!is_real(operand_type(0).dtype)) return {Value{}};
        return {cast(g_, dy_, operand_type(0).dtype)};
      case Op::broadcast:
        return {reduce(g_, Reduce::sum, dy_, other_dims(g_.type(dy_).rank(), a.dims))};
      case Op::reshape:
        return {reshape(g_, dy_, operand_type(0).shape)};
      case Op::transpose: {
        std::vector<int> back(a.dims.size());
        for (std::size_t i = 0; i < a.dims.size(); ++i)
          back[static_cast<std::size_t>(a.dims[i])] = static_cast<int>(i);
        return {transpose(g_, dy_, back)};
      }
      case Op::slice: {
        Shape high;
        for (std::size_t d = 0; d < a.end.size(); ++d)
          high.push_back(operand_type(0).shape[d] - a.end[d]);
        return {pad(g_, dy_, a.begin, high)};
      }
      case Op::pad: {
        Shape end;
        for (std::size_t d = 0; d < a.begin.size(); ++d)
          end.push_back(a.begin[d] + operand_type(0).shape[d]);
        return {slice(g_, dy_, a.begin, end)};
      }
      case Op::concat:
        return concat_parts();
      case Op::reduce:
        return {reduction()};
      case Op::dot:
        return dot();
      case Op::take: {
        Attributes scatter;
        scatter.type.shape = {operand_type(0).shape[0]};
        return {g_.add(Op::scatter_add, {x(1), dy_}, scatter), Value{}};
      }
      case Op::scatter_add:
        return {Value{}, cast(g_, g_.add(Op::take, {dy_, x(0)}), operand_type(1).dtype)};
      case Op::pick:
        return {pick(), Value{}};
      case Op::attention: {
        require(!results_[1].valid(), "attention: lse has no gradient rule; use out alone");
        Attributes same;
        same.causal = a.causal;
        same.number = a.number;
        const Value v = g_.add(Op::attention_grad, {x(0), x(1), x(2), y(0), y(1), dy_}, same);
        return {v, {v.node, 1}, {v.node, 2}};
      }
      case Op::stop_gradient:
      case Op::parameter:
      case Op::constant:
      case Op::iota:
        return std::vector<Value>(n_.operands.size());
      case Op::attention_grad:
      case Op::loop:
      case Op::head:
        break;
    }
    throw InvalidArgument(
        concat("differentiate: ", name_of(n_.op), " has no gradient rule",
               n_.op == Op::attention_grad ? "" : "; differentiate before compiling"));
  }

 private:
  Graph& g_;
  const Node n_;  // a copy: the graph grows
  int id_;
  std::vector<Value> results_;
  Value dy_;

  Value x(std::size_t i) const { return n_.operands[i]; }
  Value y(int i = 0) const { return {id_, i}; }
  const Type& operand_type(std::size_t i) const { return g_.type(n_.operands[i]); }
  Value number(double value) { return constant(g_, value, n_.results[0]); }
  Value op(Function f, Value a, Value b = {}, Value c = {}) {
    std::vector<Value> operands = {a};
    if (b.valid()) operands.push_back(b);
    if (c.valid()) operands.push_back(c);
    return map(g_, f, std::move(operands));
  }
  Value times(Value a, Value b) { return op(Function::mul, a, b); }

  std::vector<Value> function() {
    using enum Function;
    const FunctionInfo& info = info_of(n_.attributes.function);
    if (!is_real(n_.results[0].dtype)) return std::vector<Value>(n_.operands.size());
    switch (info.function) {
      case neg:
        return {op(neg, dy_)};
      case abs:
        return {times(dy_, op(sign, x(0)))};
      case exp:
        return {times(dy_, y())};
      case log:
        return {op(div, dy_, x(0))};
      case log1p:
        return {op(div, dy_, op(add, x(0), number(1.0)))};
      case expm1:
        return {times(dy_, op(add, y(), number(1.0)))};
      case sqrt:
        return {op(div, times(dy_, number(0.5)), y())};
      case rsqrt:
        return {times(times(dy_, number(-0.5)), times(y(), times(y(), y())))};
      case tanh:
        return {times(dy_, op(sub, number(1.0), times(y(), y())))};
      case erf:
        return {times(times(dy_, number(2.0 * std::numbers::inv_sqrtpi)),
                      op(exp, op(neg, times(x(0), x(0)))))};
      case sigmoid:
        return {times(dy_, times(y(), op(sub, number(1.0), y())))};
      case sin:
        return {times(dy_, op(cos, x(0)))};
      case cos:
        return {op(neg, times(dy_, op(sin, x(0))))};
      case floor:
      case sign:
        return {Value{}};
      case add:
        return {dy_, dy_};
      case sub:
        return {dy_, op(neg, dy_)};
      case mul:
        return {times(dy_, x(1)), times(dy_, x(0))};
      case div: {
        const Value first = op(div, dy_, x(1));
        return {first, op(neg, op(mul, first, y()))};
      }
      case pow: {
        // d/da = b a^(b - 1), 0 where b is 0; d/db = y log a, 0 where a is 0.
        const Value zero = number(0.0);
        const Value first = op(mul, op(mul, dy_, x(1)), op(pow, x(0), op(sub, x(1), number(1.0))));
        const Node& exponent = g_.node(x(1));
        if (exponent.op == Op::constant)
          return {exponent.attributes.number == 0.0 ? zero : first, Value{}};
        return {op(select, op(eq, x(1), zero), zero, first),
                op(select, op(eq, x(0), zero), zero, op(mul, op(mul, dy_, y()), op(log, x(0))))};
      }
      case max:
      case min: {
        const Function wins = info.function == max ? gt : lt;
        const Value zero = number(0.0), half = op(mul, dy_, number(0.5));
        const Value tie = op(select, op(eq, x(0), x(1)), half, zero);
        return {op(select, op(wins, x(0), x(1)), dy_, tie),
                op(select, op(wins, x(1), x(0)), dy_, tie)};
      }
      case select: {
        const Value zero = number(0.0);
        return {Value{}, op(select, x(0), dy_, zero), op(select, x(0), zero, dy_)};
      }
      default:
        return std::vector<Value>(n_.operands.size());
    }
  }

  std::vector<Value> concat_parts() {
    std::vector<Value> parts;
    const auto axis = static_cast<std::size_t>(n_.attributes.axis);
    Dim at(0);
    for (std::size_t i = 0; i < n_.operands.size(); ++i) {
      Shape begin(operand_type(i).shape.size(), Dim(0)), end = operand_type(i).shape;
      begin[axis] = at;
      at += operand_type(i).shape[axis];
      end[axis] = at;
      parts.push_back(is_real(operand_type(i).dtype) ? slice(g_, dy_, begin, end) : Value{});
    }
    return parts;
  }

  // Over the operand of a reduction: the gradient or value of its result.
  Value spread(Value v) {
    const Type to = operand_type(0);
    return broadcast(g_, cast(g_, v, to.dtype), to.shape,
                     other_dims(to.rank(), n_.attributes.dims));
  }
  Value reduction() {
    switch (n_.attributes.reduce) {
      case Reduce::sum:
        return spread(dy_);
      case Reduce::max: {
        const Type to = operand_type(0);
        const Value equal = op(Function::eq, x(0), spread(y()));
        const Value zero = constant(g_, 0.0, to), one = constant(g_, 1.0, to);
        const Value ties =
            reduce(g_, Reduce::sum, op(Function::select, equal, one, zero), n_.attributes.dims);
        return op(Function::select, equal, op(Function::div, spread(dy_), spread(ties)), zero);
      }
      case Reduce::lse:
        return times(spread(dy_), op(Function::exp, op(Function::sub, x(0), spread(y()))));
      case Reduce::argmax:
        break;
    }
    return {};
  }

  // y = batch, free of a, free of b. da = dy . b over the free of b, and db = dy . a over that of
  // a, each with its dimensions brought into the order of the operand.
  std::vector<Value> dot() {
    const Attributes& a = n_.attributes;
    const int batch = static_cast<int>(a.batch_a.size());
    std::vector<int> used_a = a.batch_a, used_b = a.batch_b;
    used_a.insert(used_a.end(), a.contract_a.begin(), a.contract_a.end());
    used_b.insert(used_b.end(), a.contract_b.begin(), a.contract_b.end());
    const std::vector<int> free_a = other_dims(operand_type(0).rank(), used_a);
    const std::vector<int> free_b = other_dims(operand_type(1).rank(), used_b);
    const int na = static_cast<int>(free_a.size());
    const auto side = [&](std::size_t to, std::size_t other, const std::vector<int>& batch_to,
                          const std::vector<int>& batch_other, const std::vector<int>& free_to,
                          const std::vector<int>& free_other, const std::vector<int>& contract_to,
                          const std::vector<int>& contract_other, int first_contracted) {
      const DType dtype = operand_type(to).dtype;
      Attributes d;
      for (int i = 0; i < batch; ++i) d.batch_a.push_back(i);
      d.batch_b = batch_other;
      for (std::size_t i = 0; i < free_other.size(); ++i)
        d.contract_a.push_back(first_contracted + static_cast<int>(i));
      d.contract_b = free_other;
      const Value product = g_.add(Op::dot, {cast(g_, dy_, dtype), x(other)}, d);
      // The product's dimensions: batch, free of `to`, then the contracted ones as they stand in
      // the other operand.
      std::vector<int> place = batch_to;
      place.insert(place.end(), free_to.begin(), free_to.end());
      std::vector<int> order(contract_other);
      std::sort(order.begin(), order.end());
      for (const int d_other : order) {
        const auto at = std::find(contract_other.begin(), contract_other.end(), d_other) -
                        contract_other.begin();
        place.push_back(contract_to[static_cast<std::size_t>(at)]);
      }
      std::vector<int> dims(place.size());
      for (std::size_t i = 0; i < place.size(); ++i)
        dims[static_cast<std::size_t>(place[i])] = static_cast<int>(i);
      return transpose(g_, product, dims);
    };
    return {
        side(0, 1, a.batch_a, a.batch_b, free_a, free_b, a.contract_a, a.contract_b, batch + na),
        side(1, 0, a.batch_b, a.batch_a, free_b, free_a, a.contract_b, a.contract_a, batch)};
  }

  Value pick() {
    const Type to = operand_type(0);
    const int axis = n_.attributes.axis;
    const std::vector<int> others = other_dims(to.rank(), {axis});
    const Value at = iota(g_, {operand_type(1).dtype, to.shape}, axis);
    const Value hit = op(Function::eq, at, broadcast(g_, x(1), to.shape, others));
    return op(Function::select, hit, broadcast(g_, dy_, to.shape, others), constant(g_, 0.0, to));
  }
};

}  // namespace

std::vector<Value> gradients(Graph& graph, const std::vector<Value>& outputs,
                             const std::vector<Value>& cotangents, const std::vector<Value>& wrt) {
  require(cotangents.empty() || cotangents.size() == outputs.size(),
          "differentiate: ", outputs.size(), " outputs but ", cotangents.size(), " cotangents");
  // What depends on wrt.
  const int end = graph.size();
  std::vector<bool> active(static_cast<std::size_t>(end));
  for (const Value v : wrt) {
    require(is_real(graph.type(v).dtype), "differentiate: wrt is ", text_of(graph.type(v)),
            ", expected floats");
    active[static_cast<std::size_t>(v.node)] = true;
  }
  for (int id = 0; id < end; ++id) {
    for (const Value v : graph.node(id).operands) {
      if (active[static_cast<std::size_t>(v.node)] && is_real(graph.type(v).dtype) &&
          graph.node(id).op != Op::stop_gradient)
        active[static_cast<std::size_t>(id)] = true;
    }
  }
  std::map<Value, Value> grads;
  const auto add = [&](Value to, Value part) {
    Value& sum = grads[to];
    sum = sum.valid() ? map(graph, Function::add, {sum, part}) : part;
  };
  for (std::size_t i = 0; i < outputs.size(); ++i) {
    const Type type = graph.type(outputs[i]);
    require(is_real(type.dtype), "differentiate: the output is ", text_of(type),
            ", expected floats");
    Value cotangent = cotangents.empty() ? Value{} : cotangents[i];
    if (cotangent.valid()) {
      require(graph.type(cotangent).shape == type.shape && is_real(graph.type(cotangent).dtype),
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
    const std::vector<Value> parts = Rules(graph, id, results).run();
    for (std::size_t i = 0; i < operands.size(); ++i) {
      if (parts[i].valid() && active[static_cast<std::size_t>(operands[i].node)])
        add(operands[i], parts[i]);
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
