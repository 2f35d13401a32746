// The public graph builder: thin wrappers of ir::Graph::add, and composite operations.
#include "logitless/graph.h"

#include <algorithm>
#include <cctype>
#include <cmath>
#include <numbers>

#include "compiler/graph_access.h"
#include "compiler/ir/build.h"
#include "compiler/ir/text.h"
#include "compiler/passes/passes.h"
#include "core/check.h"

namespace logitless {
namespace {

void check_value(Value v, std::string_view what) {
  require(GraphAccess::id(v).valid(), what, ": an operand is no value of a graph");
}
ir::Value in(Value v) { return GraphAccess::id(v); }
Value out(Value like, ir::Value v) { return GraphAccess::value(GraphAccess::of(like), v); }
ir::Graph& graph(Value v) { return GraphAccess::of(v); }

Value add(ir::Op op, const std::vector<Value>& operands, ir::Attributes attributes) {
  std::vector<ir::Value> ids;
  for (const Value v : operands) {
    check_value(v, ir::name_of(op));
    require(&graph(v) == &graph(operands[0]), ir::name_of(op), ": operands are of two graphs");
    ids.push_back(in(v));
  }
  return out(operands[0], graph(operands[0]).add(op, std::move(ids), std::move(attributes)));
}

// NumPy's broadcasting: shapes are aligned at their last dimensions; a 1 or a missing dimension is
// repeated.
Shape common_shape(const Shape& a, const Shape& b, std::string_view what) {
  Shape result = a.size() >= b.size() ? a : b;
  for (std::size_t i = 1; i <= std::min(a.size(), b.size()); ++i) {
    const Dim &x = a[a.size() - i], &y = b[b.size() - i];
    require(x == y || x == Dim(1) || y == Dim(1), what, ": the operands are ", text_of(a), " and ",
            text_of(b));
    result[result.size() - i] = x == Dim(1) ? y : x;
  }
  return result;
}

Value stretched(Value x, const Shape& shape) {
  const Shape from = x.shape();
  if (from == shape) return x;
  // Removes dimensions of size 1 that grow: a broadcast repeats values, it does not stretch
  // dimensions.
  Shape kept;
  std::vector<int> dims;
  const std::size_t lead = shape.size() - from.size();
  for (std::size_t d = 0; d < from.size(); ++d) {
    if (from[d] == Dim(1) && shape[lead + d] != Dim(1)) continue;
    kept.push_back(from[d]);
    dims.push_back(static_cast<int>(lead + d));
  }
  return broadcast(reshape(x, kept), shape, dims);
}

Value binary(std::string_view name, Value a, Value b) {
  check_value(a, name);
  check_value(b, name);
  const Shape shape = common_shape(a.shape(), b.shape(), name);
  return apply(name, {stretched(a, shape), stretched(b, shape)});
}
Value number_like(double number, Value x) {
  check_value(x, "a number and a value");
  return out(x, ir::constant(graph(x), number, graph(x).type(in(x))));
}

}  // namespace

DType Value::dtype() const {
  require(graph_ != nullptr, "a value of no graph has no dtype");
  return GraphAccess::of(*this).type(GraphAccess::id(*this)).dtype;
}
const Shape& Value::shape() const {
  require(graph_ != nullptr, "a value of no graph has no shape");
  return GraphAccess::of(*this).type(GraphAccess::id(*this)).shape;
}

Graph::Graph(std::string_view name) : ir_(std::make_unique<ir::Graph>()) { ir_->name = name; }
Graph::~Graph() = default;
Graph::Graph(Graph&&) noexcept = default;
Graph& Graph::operator=(Graph&&) noexcept = default;

Value Graph::parameter(std::string_view name, DType dtype, Shape shape) {
  ir::Attributes a;
  a.name = name;
  a.type = {dtype, std::move(shape)};
  return GraphAccess::value(*ir_, ir_->add(ir::Op::parameter, {}, std::move(a)));
}
Value Graph::constant(double number, DType dtype, Shape shape) {
  return GraphAccess::value(*ir_, ir::constant(*ir_, number, {dtype, std::move(shape)}));
}
Value Graph::iota(Shape shape, int axis, DType dtype) {
  return GraphAccess::value(*ir_, ir::iota(*ir_, {dtype, std::move(shape)}, axis));
}
void Graph::result(std::string_view name, Value value) {
  check_value(value, "result");
  require(&graph(value) == ir_.get(), "result '", name, "' is a value of another graph");
  ir_->add_output(std::string(name), in(value));
}

std::vector<Value> Graph::gradients(const std::vector<Value>& outputs,
                                    const std::vector<Value>& wrt,
                                    const std::vector<Value>& cotangents) {
  const auto ids = [&](const std::vector<Value>& values) {
    std::vector<ir::Value> list;
    for (const Value v : values) {
      require(v.graph_ == nullptr || v.graph_ == ir_.get(),
              "gradients: a value is of another graph");
      list.push_back(in(v));
    }
    return list;
  };
  std::vector<Value> result;
  for (const ir::Value v : ir::gradients(*ir_, ids(outputs), ids(cotangents), ids(wrt)))
    result.push_back(GraphAccess::value(*ir_, v));
  return result;
}

std::string Graph::text() const { return ir::print(*ir_); }

Graph Graph::parse(std::string_view text, std::string_view file) {
  const ir::ParsedGraph parsed = ir::parse(text, file);
  Graph graph;
  *graph.ir_ = ir::differentiate(parsed.graph, parsed.gradients);
  return graph;
}

std::vector<std::string> Graph::parameter_names() const {
  std::vector<std::string> names;
  for (const int id : ir_->parameters()) names.push_back(ir_->node(id).attributes->name);
  return names;
}
std::vector<std::string> Graph::result_names() const {
  std::vector<std::string> names;
  for (const ir::Output& output : ir_->outputs()) names.push_back(output.name);
  return names;
}
std::vector<std::string> Graph::symbols() const { return ir_->symbols(); }

Scope::Scope(Graph& graph, std::string_view name) {
  ir::Graph& inside = GraphAccess::of(graph);
  const auto letter = [](char c) { return std::isalpha(static_cast<unsigned char>(c)) != 0; };
  require(!name.empty() && (letter(name[0]) || name[0] == '_'), "Scope: the name is '", name,
          "', expected a letter or _ first");
  const std::string& around = inside.origin_name();
  origin_ = std::make_unique<ir::Origin>(
      inside, around.empty() ? std::string(name) : logitless::concat(around, ".", name), "");
}
Scope::~Scope() = default;

Value apply(std::string_view function, const std::vector<Value>& operands) {
  ir::Attributes a;
  const std::optional<ir::Function> found = ir::find_function(function);
  require(found.has_value(), "apply: there is no function '", function, "'");
  require(!operands.empty(), function, ": no operands");
  a.function = *found;
  return add(ir::Op::map, operands, std::move(a));
}

Value operator+(Value a, Value b) { return binary("add", a, b); }
Value operator-(Value a, Value b) { return binary("sub", a, b); }
Value operator*(Value a, Value b) { return binary("mul", a, b); }
Value operator/(Value a, Value b) { return binary("div", a, b); }
Value operator-(Value a) { return apply("neg", {a}); }
Value operator+(Value a, double b) { return a + number_like(b, a); }
Value operator-(Value a, double b) { return a - number_like(b, a); }
Value operator*(Value a, double b) { return a * number_like(b, a); }
Value operator/(Value a, double b) { return a / number_like(b, a); }
Value operator+(double a, Value b) { return number_like(a, b) + b; }
Value operator-(double a, Value b) { return number_like(a, b) - b; }
Value operator*(double a, Value b) { return number_like(a, b) * b; }
Value operator/(double a, Value b) { return number_like(a, b) / b; }
Value exp(Value x) { return apply("exp", {x}); }
Value log(Value x) { return apply("log", {x}); }
Value tanh(Value x) { return apply("tanh", {x}); }
Value sigmoid(Value x) { return apply("sigmoid", {x}); }
Value rsqrt(Value x) { return apply("rsqrt", {x}); }
Value relu(Value x) { return binary("max", x, number_like(0.0, x)); }
Value square(Value x) { return x * x; }
Value gelu(Value x) {
  const Value inner = (x + x * x * x * 0.044715) * std::sqrt(2.0 * std::numbers::inv_pi);
  return x * 0.5 * (tanh(inner) + 1.0);
}
Value select(Value condition, Value a, Value b) {
  check_value(condition, "select");
  check_value(a, "select");
  check_value(b, "select");
  const Shape shape =
      common_shape(common_shape(condition.shape(), a.shape(), "select"), b.shape(), "select");
  return apply("select", {stretched(condition, shape), stretched(a, shape), stretched(b, shape)});
}
Value equal(Value a, Value b) { return binary("eq", a, b); }
Value less(Value a, Value b) { return binary("lt", a, b); }
Value cast(Value x, DType dtype) {
  check_value(x, "cast");
  return out(x, ir::cast(graph(x), in(x), dtype));
}
Value stop_gradient(Value x) { return add(ir::Op::stop_gradient, {x}, {}); }

Value reshape(Value x, Shape shape) {
  check_value(x, "reshape");
  return out(x, ir::reshape(graph(x), in(x), std::move(shape)));
}
Value transpose(Value x, std::vector<int> dims) {
  ir::Attributes a;
  a.dims = std::move(dims);
  return add(ir::Op::transpose, {x}, std::move(a));
}
Value broadcast(Value x, Shape shape, std::vector<int> dims) {
  check_value(x, "broadcast");
  return out(x, ir::broadcast(graph(x), in(x), std::move(shape), std::move(dims)));
}
Value slice(Value x, int axis, Dim begin, Dim end) {
  check_value(x, "slice");
  require(axis >= 0 && axis < x.rank(), "slice: axis is ", axis, " of ", text_of(x.shape()));
  Shape low(x.shape().size(), Dim(0)), high = x.shape();
  low[static_cast<std::size_t>(axis)] = std::move(begin);
  high[static_cast<std::size_t>(axis)] = std::move(end);
  return out(x, ir::slice(graph(x), in(x), std::move(low), std::move(high)));
}
Value pad(Value x, int axis, Dim low, Dim high) {
  check_value(x, "pad");
  require(axis >= 0 && axis < x.rank(), "pad: axis is ", axis, " of ", text_of(x.shape()));
  Shape before(x.shape().size(), Dim(0)), after = before;
  before[static_cast<std::size_t>(axis)] = std::move(low);
  after[static_cast<std::size_t>(axis)] = std::move(high);
  return out(x, ir::pad(graph(x), in(x), std::move(before), std::move(after)));
}
Value concat(const std::vector<Value>& parts, int axis) {
  require(!parts.empty(), "concat: no parts");
  ir::Attributes a;
  a.axis = axis;
  return add(ir::Op::concat, parts, std::move(a));
}
Value flip(Value x, int axis) {
  ir::Attributes a;
  a.axis = axis;
  return add(ir::Op::flip, {x}, std::move(a));
}

namespace {
Value reduced(ir::Reduce kind, Value x, std::vector<int> dims) {
  ir::Attributes a;
  a.reduce = kind;
  a.dims = std::move(dims);
  return add(ir::Op::reduce, {x}, std::move(a));
}
}  // namespace

Value sum(Value x, std::vector<int> dims) { return reduced(ir::Reduce::sum, x, std::move(dims)); }
Value mean(Value x, std::vector<int> dims) {
  check_value(x, "mean");
  Dim count(1);
  for (const int d : dims) {
    require(d >= 0 && d < x.rank(), "mean: dims names dimension ", d, " of ", x.rank());
    count = count * x.shape()[static_cast<std::size_t>(d)];
  }
  const Value total = sum(x, std::move(dims));
  if (count.is_constant()) return total / static_cast<double>(count.value());
  ir::Attributes size;
  size.number = 1.0;
  size.begin = {count};
  size.type = {total.dtype(), {}};
  return total / out(x, graph(x).add(ir::Op::constant, {}, std::move(size)));
}
Value max(Value x, std::vector<int> dims) { return reduced(ir::Reduce::max, x, std::move(dims)); }
Value logsumexp(Value x, std::vector<int> dims) {
  return reduced(ir::Reduce::lse, x, std::move(dims));
}
Value argmax(Value x, int dim) { return reduced(ir::Reduce::argmax, x, {dim}); }

namespace {
Value scanned(ir::Reduce kind, Value x, int axis, bool reverse) {
  ir::Attributes a;
  a.reduce = kind;
  a.axis = axis;
  a.reverse = reverse;
  return add(ir::Op::scan, {x}, std::move(a));
}
}  // namespace

Value cumsum(Value x, int axis, bool reverse) { return scanned(ir::Reduce::sum, x, axis, reverse); }
Value logcumsumexp(Value x, int axis, bool reverse) {
  return scanned(ir::Reduce::lse, x, axis, reverse);
}
Sorted sort(Value x, int axis, Dim count, bool descending) {
  ir::Attributes a;
  a.axis = axis;
  a.reverse = descending;
  a.begin = {std::move(count)};
  const Value values = add(ir::Op::sort, {x}, std::move(a));
  return {values, GraphAccess::value(GraphAccess::of(x), {GraphAccess::id(values).node, 1})};
}

Value dot(Value a, Value b, const DotOptions& options) {
  check_value(a, "dot");
  ir::Attributes attributes;
  attributes.batch_a = options.batch_a;
  attributes.batch_b = options.batch_b;
  attributes.contract_a = options.contract_a;
  attributes.contract_b = options.contract_b;
  if (options.f32_result) attributes.type.dtype = DType::f32;
  return add(ir::Op::dot, {a, b}, std::move(attributes));
}
Value matmul(Value a, Value b) {
  check_value(a, "matmul");
  check_value(b, "matmul");
  require(a.rank() >= 2 && (b.rank() == 2 || b.rank() == a.rank()), "matmul: the operands are ",
          text_of(a.shape()), " and ", text_of(b.shape()));
  DotOptions options;
  options.contract_a = {a.rank() - 1};
  options.contract_b = {b.rank() - 2};
  for (int d = 0; b.rank() > 2 && d < a.rank() - 2; ++d) {
    options.batch_a.push_back(d);
    options.batch_b.push_back(d);
  }
  return dot(a, b, options);
}

Value take(Value table, Value index) { return add(ir::Op::take, {table, index}, {}); }
Value scatter_add(Value index, Value updates, Dim rows) {
  ir::Attributes a;
  a.type.shape = {std::move(rows)};
  return add(ir::Op::scatter_add, {index, updates}, std::move(a));
}
Value pick(Value x, Value index, int axis) {
  ir::Attributes a;
  a.axis = axis;
  return add(ir::Op::pick, {x, index}, std::move(a));
}
Value put(Value index, Value updates, int axis, Dim size) {
  ir::Attributes a;
  a.axis = axis;
  a.type.shape = {std::move(size)};
  return add(ir::Op::put, {index, updates}, std::move(a));
}

namespace {
// Broadcasts the result of a reduction over `dim` back along that dimension.
Value spread(Value x, Value reduced_value, int dim) {
  return broadcast(reduced_value, x.shape(), ir::other_dims(x.rank(), {dim}));
}
}  // namespace

Value log_softmax(Value x, int dim) { return x - spread(x, logsumexp(x, {dim}), dim); }
Value softmax(Value x, int dim) { return exp(log_softmax(x, dim)); }
Value layer_norm(Value x, Value gain, Value bias, double epsilon) {
  check_value(x, "layer_norm");
  require(x.rank() >= 1, "layer_norm: x is a scalar");
  const int last = x.rank() - 1;
  const Value centred = x - spread(x, mean(x, {last}), last);
  const Value inverse = rsqrt(mean(square(centred), {last}) + epsilon);
  return centred * spread(x, inverse, last) * gain + bias;
}
Value rms_norm(Value x, Value gain, double epsilon) {
  check_value(x, "rms_norm");
  require(x.rank() >= 1, "rms_norm: x is a scalar");
  const int last = x.rank() - 1;
  return x * spread(x, rsqrt(mean(square(x), {last}) + epsilon), last) * gain;
}
Value silu(Value x) { return x * sigmoid(x); }
Value rotate(Value x, Value cos, Value sin, int axis) {
  for (const Value v : {x, cos, sin}) check_value(v, "rotate");
  const Shape shape = x.shape();
  require(axis >= 0 && axis < x.rank() - 1, "rotate: axis is ", axis, " of ", text_of(shape));
  const Dim& dim = shape.back();
  require(dim.is_constant() && dim.value() > 0 && dim.value() % 2 == 0,
          "rotate: the last dimension of ", text_of(shape), " is no even number");
  const Dim half = dim.value() / 2, length = shape[static_cast<std::size_t>(axis)];
  const Shape table = {length, half};
  require(cos.shape() == table && sin.shape() == table, "rotate: cos and sin are ",
          text_of(cos.shape()), " and ", text_of(sin.shape()), ", expected ", text_of(table));
  require(cos.dtype() == DType::f32 && sin.dtype() == DType::f32 && x.dtype() != DType::f64,
          "rotate: cos and sin are f32, and x is not f64");
  // Reshapes to pairs along a dimension of two, where the rotation swaps them: (a, b) becomes (b,
  // a).
  Shape pairs(shape.begin(), shape.end() - 1);
  pairs.insert(pairs.end(), {Dim(2), half});
  const int rank = static_cast<int>(pairs.size());
  const Value signs =
      concat({reshape(-sin, {length, 1, half}), reshape(sin, {length, 1, half})}, 1);
  const Value turned = cast(reshape(x, pairs), DType::f32);
  const Value y = turned * broadcast(cos, pairs, {axis, rank - 1}) +
                  flip(turned, rank - 2) * broadcast(signs, pairs, {axis, rank - 2, rank - 1});
  return reshape(cast(y, x.dtype()), shape);
}
Value attention(Value q, Value k, Value v, double scale, bool causal) {
  AttentionOptions options;
  options.scale = scale;
  options.causal = causal;
  return attention(q, k, v, options);
}
Value attention(Value q, Value k, Value v, const AttentionOptions& options) {
  ir::Attributes a;
  a.number = options.scale;
  a.scores = {options.causal, options.softcap, options.window};
  std::vector<Value> operands = {q, k, v};
  const auto given = [](Value x) { return GraphAccess::id(x).valid(); };
  a.scores.bias = given(options.bias);
  if (a.scores.bias) operands.push_back(options.bias);
  a.scores.segments = given(options.query_segments);
  require(a.scores.segments == given(options.key_segments),
          "attention: segments of queries and of keys are given together");
  if (a.scores.segments)
    operands.insert(operands.end(), {options.query_segments, options.key_segments});
  return add(ir::Op::attention, operands, std::move(a));
}

}  // namespace logitless
