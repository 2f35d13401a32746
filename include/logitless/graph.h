// Writes tensor programs for the compiler (compiler.h): a graph of values, its results, their
// gradients. docs/reference/ir.md describes the operations and the text form.
//
//   Graph g;
//   Value h = g.parameter("h", DType::f32, {Dim::symbol("N"), 768});
//   Value w = g.parameter("w", DType::f32, {50257, 768});
//   Value t = g.parameter("t", DType::i64, {Dim::symbol("N")});
//   Value z = matmul(h, transpose(w, {1, 0}));
//   Value loss = mean(logsumexp(z, {1}) - pick(z, t, 1), {0});
//   g.result("loss", loss);
//   auto d = g.gradients({loss}, {h, w});
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "logitless/dim.h"
#include "logitless/dtype.h"
#include "logitless/export.h"

namespace logitless {

namespace ir {
class Graph;
class Origin;
struct GradientRequest;
}  // namespace ir

class Graph;

// One tensor of a graph: a small handle. The graph must outlive it, and may be moved.
class LOGITLESS_API Value {
 public:
  Value() = default;
  DType dtype() const;
  const Shape& shape() const;
  int rank() const { return static_cast<int>(shape().size()); }

 private:
  friend class Graph;
  friend struct GraphAccess;
  ir::Graph* graph_ = nullptr;
  std::int32_t node_ = -1;
  std::int32_t index_ = 0;
};

// A graph of tensor operations. All functions that make values throw InvalidArgument naming the
// operation, the expected and the actual operands.
class LOGITLESS_API Graph {
 public:
  explicit Graph(std::string_view name = "main");
  ~Graph();
  Graph(Graph&&) noexcept;
  Graph& operator=(Graph&&) noexcept;

  Value parameter(std::string_view name, DType dtype, Shape shape);
  Value constant(double number, DType dtype = DType::f32, Shape shape = {});
  // Returns the index along `axis`.
  Value iota(Shape shape, int axis, DType dtype = DType::i64);
  void result(std::string_view name, Value value);

  // Returns the gradients of sum_i <outputs[i], cotangents[i]> (ones without cotangents) with
  // respect to each of `wrt`, as values of this graph.
  std::vector<Value> gradients(const std::vector<Value>& outputs, const std::vector<Value>& wrt,
                               const std::vector<Value>& cotangents = {});

  // Text form; parse applies the `differentiate` requests of the text. Throws InvalidArgument
  // "FILE:LINE:COLUMN: message".
  std::string text() const;
  static Graph parse(std::string_view text, std::string_view file = "program");

  std::vector<std::string> parameter_names() const;
  std::vector<std::string> result_names() const;
  // Size symbols that a compilation must bind.
  std::vector<std::string> symbols() const;

 private:
  friend struct GraphAccess;
  std::unique_ptr<ir::Graph> ir_;
};

// Names the values that the graph gains during its lifetime: `name`, after the names of the
// enclosing scopes, as in "layer3.mlp". Reports and the text form show the names, and call
// gradients "d_layer3.mlp". Scopes end in the reverse order, before their graph does.
class LOGITLESS_API Scope {
 public:
  // The name has letters, digits, _ and dots, and begins with no digit or dot. Throws
  // InvalidArgument.
  Scope(Graph& graph, std::string_view name);
  ~Scope();
  Scope(const Scope&) = delete;
  Scope& operator=(const Scope&) = delete;

 private:
  std::unique_ptr<ir::Origin> origin_;
};

// --- Element-wise operations. Operands of a binary function are broadcast as in NumPy and have
// equal dtypes. A number becomes a constant of the other operand's dtype.
LOGITLESS_API Value operator+(Value a, Value b);
LOGITLESS_API Value operator-(Value a, Value b);
LOGITLESS_API Value operator*(Value a, Value b);
LOGITLESS_API Value operator/(Value a, Value b);
LOGITLESS_API Value operator-(Value a);
LOGITLESS_API Value operator+(Value a, double b);
LOGITLESS_API Value operator-(Value a, double b);
LOGITLESS_API Value operator*(Value a, double b);
LOGITLESS_API Value operator/(Value a, double b);
LOGITLESS_API Value operator+(double a, Value b);
LOGITLESS_API Value operator-(double a, Value b);
LOGITLESS_API Value operator*(double a, Value b);
LOGITLESS_API Value operator/(double a, Value b);
// Applies a function of docs/reference/ir.md by name: "exp", "tanh", "max", "eq", "random", ...
LOGITLESS_API Value apply(std::string_view function, const std::vector<Value>& operands);
LOGITLESS_API Value exp(Value x);
LOGITLESS_API Value log(Value x);
LOGITLESS_API Value tanh(Value x);
LOGITLESS_API Value sigmoid(Value x);
LOGITLESS_API Value rsqrt(Value x);
LOGITLESS_API Value relu(Value x);
LOGITLESS_API Value square(Value x);
// tanh-gelu of GPT-2: 0.5 x (1 + tanh(sqrt(2 / pi) (x + 0.044715 x^3))).
LOGITLESS_API Value gelu(Value x);
// Takes a where condition (i8 or a comparison's result) is not 0, else b.
LOGITLESS_API Value select(Value condition, Value a, Value b);
LOGITLESS_API Value equal(Value a, Value b);
LOGITLESS_API Value less(Value a, Value b);
LOGITLESS_API Value cast(Value x, DType dtype);
LOGITLESS_API Value stop_gradient(Value x);

// --- Shapes.
LOGITLESS_API Value reshape(Value x, Shape shape);
LOGITLESS_API Value transpose(Value x, std::vector<int> dims);
// Dimension i of x becomes dimension dims[i] of the result.
LOGITLESS_API Value broadcast(Value x, Shape shape, std::vector<int> dims);
// Takes begin <= index < end along one axis.
LOGITLESS_API Value slice(Value x, int axis, Dim begin, Dim end);
LOGITLESS_API Value pad(Value x, int axis, Dim low, Dim high);
LOGITLESS_API Value concat(const std::vector<Value>& parts, int axis);
// Reverses x along the axis.
LOGITLESS_API Value flip(Value x, int axis);

// --- Reductions, which remove the dimensions. The result has the dtype of x (argmax: i64); sums
// run in fp32.
LOGITLESS_API Value sum(Value x, std::vector<int> dims);
LOGITLESS_API Value mean(Value x, std::vector<int> dims);
LOGITLESS_API Value max(Value x, std::vector<int> dims);
LOGITLESS_API Value logsumexp(Value x, std::vector<int> dims);
LOGITLESS_API Value argmax(Value x, int dim);

// --- Scans and sorting. Cumulative sums, or log-sum-exps, in the shape of x: of the elements up to
// and including each one along the axis; reverse: from it to the end.
LOGITLESS_API Value cumsum(Value x, int axis, bool reverse = false);
LOGITLESS_API Value logcumsumexp(Value x, int axis, bool reverse = false);
// The first `count` elements along the axis in sorted order, and their indices (i64). The sort is
// stable, and NaN is greater than everything.
struct Sorted {
  Value values, index;
};
LOGITLESS_API Sorted sort(Value x, int axis, Dim count, bool descending = false);

// --- Matrix products. contract_* are the summed dimensions of a and b, batch_* those that they
// share. The result has the batch dimensions, then the others of a, then those of b. Sums are fp32;
// the result has the operands' dtype, or f32.
struct DotOptions {
  std::vector<int> contract_a = {}, contract_b = {};
  std::vector<int> batch_a = {}, batch_b = {};
  bool f32_result = false;
};
LOGITLESS_API Value dot(Value a, Value b, const DotOptions& options);
// Multiplies a [..., M, K] and b [K, N] or [..., K, N] with equal leading dimensions.
LOGITLESS_API Value matmul(Value a, Value b);

// --- Indexing. Gathers rows of table [V, ...] into [shape of index, ...]; 0 where the index is
// outside [0, V).
LOGITLESS_API Value take(Value table, Value index);
// Adds updates [I..., ...] by index [I...] into [rows, ...]; outside indices are dropped.
LOGITLESS_API Value scatter_add(Value index, Value updates, Dim rows);
// Picks x at index along axis; index has the shape of x without it. 0 where it is outside.
LOGITLESS_API Value pick(Value x, Value index, int axis);
// Scatters updates to index along axis, zeros elsewhere. updates and index have one shape; the
// result has `size` along axis. Updates of equal indices add up; outside indices are dropped.
LOGITLESS_API Value put(Value index, Value updates, int axis, Dim size);

// --- Composites.
LOGITLESS_API Value softmax(Value x, int dim);
LOGITLESS_API Value log_softmax(Value x, int dim);
// Normalises over the last dimension; gain and bias [dim].
LOGITLESS_API Value layer_norm(Value x, Value gain, Value bias, double epsilon = 1e-5);
// Returns x / sqrt(mean of x^2 + epsilon) * gain over the last dimension; gain [dim].
LOGITLESS_API Value rms_norm(Value x, Value gain, double epsilon = 1e-6);
// Returns x sigmoid(x).
LOGITLESS_API Value silu(Value x);
// Rotary position embedding (Su et al. 2021). Elements i and i + D / 2 of the last dimension, of
// size D, form a pair. Each pair is rotated by the angle of position t, the index along `axis`:
//
//   (a, b) -> (a cos - b sin, b cos + a sin)     cos, sin f32 [T, D / 2]
//
// It is computed in f32 and rounded once to the dtype of x, which is not f64. D is a number and
// even.
LOGITLESS_API Value rotate(Value x, Value cos, Value sin, int axis);
// Computes softmax(scale q k^T) v for q [B, H, T, D], k and v [B, Hkv, S, D], H a multiple of Hkv.
// With causal, query t sees keys s <= t + S - T. The scores [T, S] never exist.
LOGITLESS_API Value attention(Value q, Value k, Value v, double scale, bool causal);

// Options of softmax(z) v with the scores z = softcap(scale q k^T) + bias, and -inf where a query
// does not see a key. Query t has position p = t + S - T. A GPU supports only scale and causal.
struct AttentionOptions {
  double scale = 1.0;
  bool causal = false;      // sees keys s <= p
  double softcap = 0.0;     // c tanh(z / c); 0: none
  std::int64_t window = 0;  // sees keys p - window < s < p + window; 0: all
  Value bias;               // [1 or B, 1 or H, 1 or T, S], f32 or of q's dtype; has no gradient
  Value query_segments;     // [B, T] i32 or i64: sees keys of the same segment
  Value key_segments;       // [B, S], given with query_segments
};
LOGITLESS_API Value attention(Value q, Value k, Value v, const AttentionOptions& options);

}  // namespace logitless
