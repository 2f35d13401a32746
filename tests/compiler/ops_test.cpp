// Checks each operation's table entry: its text reads back, its gradient is its derivative, its
// chunks equal the full result. Its instructions compute the interpreter's results. An operation
// without an example here fails.
#include <gtest/gtest.h>

#include <bit>
#include <cmath>
#include <set>

#include "compiler/analysis/region.h"
#include "compiler/graph_access.h"
#include "compiler/ir/build.h"
#include "compiler/ir/text.h"
#include "compiler/ops/op.h"
#include "compiler/passes/form_loops.h"
#include "compiler/passes/passes.h"
#include "compiler/run.h"

namespace logitless::test {
namespace {

struct Example {
  ir::Op op;
  const char* text;
  bool executed = true;
};

// Examples are f64 if they have a gradient; results named y* are differentiated by %x*.
const Example kExamples[] = {
    {ir::Op::parameter, "graph g(%x: f64[3]) { return y: %x }"},
    {ir::Op::constant,
     "graph g(%x: f64[3, 2]) { %c = constant value(2.5) : f64[3, 2] %y = mul %x, %c return y: %y "
     "}"},
    {ir::Op::iota,
     "graph g(%x: f64[3, 4]) { %i = iota axis(1) : i64[3, 4] %c = cast %i : f64[3, 4] %y = mul %x, "
     "%c return y: %y }"},
    {ir::Op::map, "graph g(%x: f64[4, 3]) { %e = exp %x %y = mul %e, %x return y: %y }"},
    {ir::Op::cast, "graph g(%x: f64[4, 3]) { %s = cast %x : f32[4, 3] return s: %s }"},
    {ir::Op::broadcast,
     "graph g(%x: f64[4]) { %y = broadcast %x dims(1) : f64[3, 4, 2] return y: %y }"},
    {ir::Op::reshape, "graph g(%x: f64[6, 4]) { %y = reshape %x : f64[2, 12] return y: %y }"},
    {ir::Op::transpose,
     "graph g(%x: f64[2, 3, 4]) { %y = transpose %x dims(2, 0, 1) return y: %y }"},
    {ir::Op::slice, "graph g(%x: f64[5, 4]) { %y = slice %x begin(1, 0) end(4, 4) return y: %y }"},
    {ir::Op::pad, "graph g(%x: f64[3, 4]) { %y = pad %x low(1, 0) high(2, 0) return y: %y }"},
    {ir::Op::concat,
     "graph g(%x: f64[2, 4], %x2: f64[3, 4]) { %y = concat %x, %x2 axis(0) return y: %y }"},
    {ir::Op::flip, "graph g(%x: f64[3, 4, 2]) { %y = flip %x axis(1) return y: %y }"},
    // Reverses values that are computed where they are read: an index, a product, a table.
    {ir::Op::flip,
     "graph g(%x: f64[3, 4], %q: f64[4]) { %i = iota axis(1) : i64[3, 4] %c = cast %i : f64[3, 4] "
     "%t = broadcast %q dims(1) : f64[3, 4] %m = mul %x, %t %p = mul %m, %c %f = flip %p axis(1) "
     "%b = flip %f axis(0) %y = add %b, %m return y: %y }"},
    {ir::Op::reduce, "graph g(%x: f64[4, 5]) { %y = reduce_lse %x dims(1) return y: %y }"},
    {ir::Op::reduce, "graph g(%x: f64[4, 5]) { %a = argmax %x dims(1) return a: %a }"},
    {ir::Op::dot,
     "graph g(%x: f64[2, 4, 5], %x2: f64[2, 5, 3]) { %y = dot %x, %x2 batch(0; 0) contract(2; 1) "
     "return y: %y }"},
    {ir::Op::take, "graph g(%x: f64[7, 3], %t: i64[5]) { %y = take %x, %t return y: %y }"},
    {ir::Op::scatter_add,
     "graph g(%x: f64[5, 3], %t: i64[5]) { %y = scatter_add %t, %x rows(6) return y: %y }"},
    {ir::Op::pick, "graph g(%x: f64[5, 7], %t: i64[5]) { %y = pick %x, %t axis(1) return y: %y }"},
    // Several indices in each row, one of them twice.
    {ir::Op::pick,
     "graph g(%x: f64[5, 7, 2], %t: i64[5, 4, 2]) { %y = pick %x, %t axis(1) return y: %y }"},
    {ir::Op::put,
     "graph g(%x: f64[5, 4, 2], %t: i64[5, 4, 2]) { %y = put %t, %x axis(1) size(3) return y: %y "
     "}"},
    {ir::Op::put,
     "graph g(%x: f64[5, 4], %z: f64[5, 3], %t: i64[5, 4]) { %p = put %t, %x axis(1) size(3) %e = "
     "exp %z %y = add %e, %p return y: %y }"},
    // A chunk of what it reads would be cut through rows and through the axis.
    {ir::Op::put,
     "graph g(%x: f64[3, 2, 4], %t: i64[3, 2, 4]) { %e = exp %x %u = reshape %e : f64[3, 8] %j = "
     "reshape %t : i64[3, 8] %y = put %j, %u axis(1) size(3) return y: %y }"},
    {ir::Op::map,
     "graph g(%k: i64[2], %x: f32[6, 5]) { %a = slice %k begin(0) end(1) %b = slice %k begin(1) "
     "end(2) %p = reshape %a : i64[] %q = reshape %b : i64[] %m = broadcast %p dims() : i64[6, 5] "
     "%n = broadcast %q dims() : i64[6, 5] %i = iota axis(0) : i64[6, 5] %j = iota axis(1) : "
     "i64[6, 5] %f = constant value(4294967296) : i64[6, 5] %h = mul %i, %f %c = add %h, %j %r = "
     "random %m, %n, %c %s = mul %r, %x return s: %s }"},
    {ir::Op::scan, "graph g(%x: f64[3, 5, 2]) { %y = cumsum %x axis(1) reverse(0) return y: %y }"},
    {ir::Op::scan, "graph g(%x: f64[3, 5, 2]) { %y = cumlse %x axis(2) reverse(1) return y: %y }"},
    {ir::Op::scan, "graph g(%x: f64[3, 5, 2]) { %y = cumprod %x axis(1) reverse(0) return y: %y }"},
    {ir::Op::scan, "graph g(%x: f64[3, 5, 2]) { %y = cumprod %x axis(1) reverse(1) return y: %y }"},
    {ir::Op::scan, "graph g(%x: f64[3, 5, 2]) { %y = cummax %x axis(0) reverse(0) return y: %y }"},
    {ir::Op::scan, "graph g(%x: f64[3, 5, 2]) { %y = cummax %x axis(1) reverse(1) return y: %y }"},
    {ir::Op::recurrence,
     "graph g(%x: f64[3, 5, 2], %x2: f64[3, 5, 2]) { %y = recurrence %x, %x2 axis(1) reverse(0) "
     "return y: %y }"},
    {ir::Op::recurrence,
     "graph g(%x: f64[4, 6], %x2: f64[4, 6]) { %y = recurrence %x, %x2 axis(1) reverse(1) return "
     "y: %y }"},
    {ir::Op::reduce,
     "graph g(%x: f64[4, 5, 3]) { %y = reduce_product %x dims(0, 2) return y: %y }"},
    {ir::Op::reduce, "graph g(%x: f64[4, 5]) { %y = reduce_product %x dims(1) return y: %y }"},
    {ir::Op::scan, "graph g(%i: i64[3, 5]) { %s = cumsum %i axis(0) reverse(1) return s: %s }"},
    {ir::Op::sort,
     "graph g(%x: f64[4, 6, 2]) { %v, %i = sort %x axis(1) count(3) descending(1) %c = cast %i : "
     "f64[4, 3, 2] %y = mul %v, %c return y: %y }"},
    {ir::Op::sort,
     "graph g(%t: i64[4, 6]) { %v, %i = sort %t axis(0) count(4) descending(0) %s = add %v, %i "
     "return s: %s }"},
    {ir::Op::attention,
     "graph g(%x: f64[2, 2, 3, 2], %x2: f64[2, 1, 3, 2]) { %y, %l = attention %x, %x2, %x2 "
     "causal(1) scale(0.5) return y: %y }",
     false},  // no kernel supports f64
    {ir::Op::attention_grad,
     "graph g(%q: f32[2, 2, 3, 2], %k: f32[2, 1, 3, 2]) { %o, %l = attention %q, %k, %k causal(0) "
     "scale(0.5) %a, %b, %c = attention_grad %q, %k, %k, %o, %l, %q causal(0) scale(0.5) return a: "
     "%a, b: %b, c: %c }"},
    {ir::Op::stop_gradient,
     "graph g(%x: f64[4]) { %s = stop_gradient %x %t = mul %s, %s return t: %t }"},
    {ir::Op::loop,
     "graph g(%q: f32[6, 2]) { %r = loop c extent(6) chunk(4) (%first, %p = slice %q axis(0) "
     "factor(1)) { %e = exp %p return e: stack %e axis(0) factor(1) } return r: %r }"},
    // Reads the index of the first element from memory.
    {ir::Op::loop,
     "graph g(%w: f32[9, 3], %q: f32[6, 2]) { %r, %s = loop c extent(6) chunk(4) (%first, %p = "
     "slice %q axis(0) factor(1), %t = whole %w) { %row = take %t, %first %b = broadcast %row "
     "dims(1) : f32[c, 3] return b: stack %b axis(0) factor(1), s: sum %first } return r: %r, s: "
     "%s }"},
    {ir::Op::head,
     "graph g(%q: f32[3, 4], %w: f32[7, 4], %t: i64[3]) { %l, %z = head %q, %w, %t bias(0) "
     "scale(2) "
     "softcap(5) workspace(0) return l: %l, z: %z }"},
    {ir::Op::fused_dot,
     "graph g(%q: bf16[4, 8], %w: bf16[8, 16], %b: bf16[16], %r: bf16[4, 16]) { %z = fused_dot %q, "
     "%w, %b, %r contract(1; 0) bias(1) residual(1) : bf16[4, 16] return z: %z }",
     false},
    // Reads each row with all of the second operand; call 1 sums over rows.
    {ir::Op::extern_call,
     "graph g(%q: f32[4, 3], %w: f32[3, 3]) { %s = extern %q, %w call(0) result(0) along(0, whole, "
     "0; whole, 1, 1) : f32[4, 3] return s: %s }",
     false},
    {ir::Op::extern_call,
     "graph g(%q: f32[6, 3], %u: f32[6, 2]) { %e = exp %q %s = extern %e, %u call(1) result(0) "
     "along(0, 0, sum; 1, whole, 0) : f32[3, 2] return e: %e, s: %s }",
     false},
};

// A matrix product, of a's columns or, for call 1, rows.
ir::Tensor product(const ir::Node& n, const std::vector<const ir::Tensor*>& operands) {
  const ir::Tensor &a = *operands[0], &b = *operands[1];
  const bool by_rows = n.attributes->call.id == 1;
  ir::Tensor c{{by_rows ? a.shape[1] : a.shape[0], b.shape[1]}, {}};
  for (std::int64_t i = 0; i < c.shape[0]; ++i) {
    for (std::int64_t j = 0; j < c.shape[1]; ++j) {
      double sum = 0.0;
      for (std::int64_t k = 0; k < b.shape[0]; ++k)
        sum += a.data[static_cast<std::size_t>(by_rows ? k * a.shape[1] + i : i * a.shape[1] + k)] *
               b.data[static_cast<std::size_t>(k * b.shape[1] + j)];
      c.data.push_back(sum);
    }
  }
  return c;
}
ir::Tensors meaning(const ir::Graph& graph, const ir::Tensors& inputs) {
  return ir::interpret(graph, inputs, product);
}

bool uses(const ir::Graph& graph, ir::Op op) {
  for (const ir::Node& n : graph.nodes()) {
    if (n.op == op) return true;
  }
  return false;
}

TEST(Operations, HaveRowsAndExamples) {
  std::set<std::string_view> names;
  for (std::size_t i = 0; i < ir::operations().size(); ++i) {
    const ir::Operation& row = *ir::operations()[i];
    SCOPED_TRACE(row.name);
    EXPECT_EQ(static_cast<std::size_t>(row.op), i);
    EXPECT_TRUE(names.insert(row.name).second);
    EXPECT_NE(row.infer, nullptr);
    EXPECT_TRUE(row.evaluate != nullptr || row.op == ir::Op::parameter);
    // The operation can be run in some way.
    EXPECT_TRUE(row.emit != nullptr || row.view != nullptr || row.registers != nullptr ||
                row.op == ir::Op::parameter);
    EXPECT_TRUE(std::any_of(std::begin(kExamples), std::end(kExamples),
                            [&](const Example& e) { return e.op == row.op; }));
  }
}

TEST(Operations, ReadBackTheirText) {
  for (const Example& e : kExamples) {
    const ir::Graph graph = ir::parse(e.text).graph;
    ASSERT_TRUE(uses(graph, e.op)) << e.text;
    const std::string text = ir::print(graph);
    EXPECT_EQ(ir::print(ir::parse(text).graph), text);
  }
}

TEST(Operations, ComputeWhatTheInterpreterDoes) {
  for (const Example& e : kExamples) {
    if (!e.executed) continue;
    SCOPED_TRACE(e.text);
    const Graph graph = Graph::parse(e.text);
    const ir::Graph& inner = GraphAccess::of(graph);
    const ir::Tensors inputs = random_inputs(inner, 3);
    EXPECT_LT(difference(execute(compile(graph), inputs), ir::interpret(inner, inputs)), 2e-6);
  }
}

// A weighted sum with fixed weights, so that the derivatives of all results differ.
double objective(const ir::Graph& graph, const ir::Tensors& inputs) {
  const ir::Tensor y = ir::interpret(graph, inputs).at("y");
  double sum = 0.0;
  for (std::size_t i = 0; i < y.data.size(); ++i)
    sum += y.data[i] * std::cos(static_cast<double>(i));
  return sum;
}

TEST(Operations, HaveTheGradientOfTheirMeaning) {
  int compared = 0;
  for (const Example& e : kExamples) {
    const ir::Graph graph = ir::parse(e.text).graph;
    if (graph.outputs()[0].name != "y") continue;
    SCOPED_TRACE(e.text);
    ir::Graph full = graph;
    ir::Attributes cotangent;
    cotangent.name = "cotangent";
    cotangent.type = graph.type(graph.outputs()[0].value);
    const ir::Value g = full.add(ir::Op::parameter, {}, cotangent);
    const std::vector<ir::Value> wrt = {{graph.find_parameter("x"), 0}};
    full.add_output("d", ir::gradients(full, {graph.outputs()[0].value}, {g}, wrt)[0]);
    ir::Tensors inputs = random_inputs(full, 5);
    std::vector<double>& weights = inputs.at("cotangent").data;
    for (std::size_t i = 0; i < weights.size(); ++i) weights[i] = std::cos(static_cast<double>(i));
    const ir::Tensor d = ir::interpret(full, inputs).at("d");
    for (std::size_t i = 0; i < d.data.size(); ++i) {
      constexpr double kStep = 1e-5;
      ir::Tensors up = inputs, down = inputs;
      up.at("x").data[i] += kStep;
      down.at("x").data[i] -= kStep;
      const double expected = (objective(graph, up) - objective(graph, down)) / (2.0 * kStep);
      EXPECT_NEAR(d.data[i], expected, 1e-7 + 1e-6 * std::abs(expected)) << i;
    }
    ++compared;
  }
  EXPECT_GE(compared, 14);
}

// Cuts the last node along each dimension into a loop of chunks of 2, which must equal the full
// result.
TEST(Operations, GiveTheSameInChunks) {
  int cuts = 0;
  for (const Example& e : kExamples) {
    const ir::Graph graph = ir::parse(e.text).graph;
    const ir::Value seed = graph.outputs()[0].value;
    const ir::Tensors inputs = random_inputs(graph, 9), whole = meaning(graph, inputs);
    for (int dim = 0; dim < graph.type(seed).rank(); ++dim) {
      const ir::Region region = ir::grow_region(graph, seed, {dim, 1, 1});
      if (region.nodes.empty()) continue;
      const ir::Graph loops = ir::form_loops(graph, region, 2);
      ir::verify(loops);
      EXPECT_LT(difference(meaning(loops, inputs), whole), 1e-12) << ir::print(loops);
      ++cuts;
    }
  }
  EXPECT_GE(cuts, 25);
}

// --- the sign of zeros

// Returns a graph of one node with parameters as operands.
ir::Graph alone(const ir::Graph& graph, const ir::Node& n) {
  ir::Graph g;
  std::vector<ir::Value> operands;
  for (std::size_t i = 0; i < n.operands.size(); ++i) {
    ir::Attributes a;
    a.name = "p" + std::to_string(i);
    a.type = graph.type(n.operands[i]);
    operands.push_back(g.add(ir::Op::parameter, {}, a));
  }
  const int node = g.add(n.op, operands, n.attributes).node;
  for (std::size_t i = 0; i < n.results.size(); ++i)
    g.add_output("r" + std::to_string(i), {node, static_cast<std::int32_t>(i)});
  return g;
}

bool is_negative_zero(double x) { return x == 0.0 && std::signbit(x); }

// Compares the effect of -0 instead of 0 in operand i with the table entry.
void expect_signs(const ir::Graph& g, const ir::Node& n, std::size_t i, ir::Tensors inputs) {
  const ir::ZeroSign sign = ir::row_of(n.op).zero_sign(n, i);
  const ir::Tensors before = ir::interpret(g, inputs);
  for (double& x : inputs.at("p" + std::to_string(i)).data) x = x == 0.0 ? -0.0 : x;
  const ir::Tensors after = ir::interpret(g, inputs);
  for (const auto& [name, tensor] : before) {
    for (std::size_t k = 0; k < tensor.data.size(); ++k) {
      const double x = tensor.data[k], y = after.at(name).data[k];
      if (sign == ir::ZeroSign::sees) continue;
      EXPECT_TRUE(x == y || (std::isnan(x) && std::isnan(y)));
      if (sign == ir::ZeroSign::makes) continue;
      EXPECT_FALSE(is_negative_zero(x));
      if (sign == ir::ZeroSign::moves) continue;
      EXPECT_EQ(std::bit_cast<std::uint64_t>(x), std::bit_cast<std::uint64_t>(y));
    }
  }
}

TEST(Operations, DoWithTheSignOfZerosWhatTheySay) {
  std::vector<std::pair<ir::Graph, ir::Node>> nodes;
  for (const Example& e : kExamples) {
    const ir::Graph graph = ir::parse(e.text).graph;
    for (const ir::Node& n : graph.nodes()) {
      if (ir::row_of(n.op).zero_sign != nullptr) nodes.emplace_back(alone(graph, n), n);
    }
  }
  ir::Graph all;  // of the functions
  const auto operand = [&](DType dtype) { return ir::constant(all, 0.0, {dtype, {Dim(40)}}); };
  for (int f = 0; f <= static_cast<int>(ir::Function::select); ++f) {
    const auto function = static_cast<ir::Function>(f);
    const ir::FunctionInfo& info = ir::info_of(function);
    std::vector<ir::Value> operands;
    for (int i = 0; i < info.operands; ++i) {
      const bool condition = info.kind == ir::FunctionKind::logical ||
                             (info.kind == ir::FunctionKind::choose && i == 0);
      operands.push_back(operand(condition ? DType::i8 : DType::f64));
    }
    const ir::Value v = ir::map(all, function, operands);
    nodes.emplace_back(alone(all, all.node(v)), all.node(v));
  }
  int compared = 0;
  for (const auto& [g, n] : nodes) {
    SCOPED_TRACE(ir::print(g));
    ir::Tensors inputs = random_inputs(g, 11);
    for (auto& [name, tensor] : inputs) {
      for (std::size_t k = 0; k < tensor.data.size(); k += 2) tensor.data[k] = 0.0;
      for (std::size_t k = 0; k < tensor.data.size(); k += 5) tensor.data[k] = 0.0;
    }
    for (std::size_t i = 0; i < n.operands.size(); ++i) {
      if (g.type({static_cast<int>(i), 0}).dtype == DType::i64) continue;
      expect_signs(g, n, i, inputs);
      ++compared;
    }
  }
  EXPECT_GE(compared, 60);
}

}  // namespace
}  // namespace logitless::test
