// The SSA graph of tensor operations that the compiler works on (docs/reference/ir.md).
//
// Nodes are in topological order: a node reads only earlier nodes. Passes do not edit a graph in
// place but write a new one (build.h has shorthands), so every existing graph verifies.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "compiler/ir/function.h"
#include "compiler/ir/lists.h"
#include "compiler/ir/shared.h"
#include "logitless/dim.h"
#include "logitless/dtype.h"

namespace logitless::ir {

struct Type {
  DType dtype = DType::f32;
  Shape shape;
  int rank() const { return static_cast<int>(shape.size()); }
  bool operator==(const Type&) const = default;
};
std::string text_of(const Type& type);  // "f32[4, N]"

// Each operation is described by a table entry in ops/.
enum class Op : std::uint8_t {
  parameter,
  constant,  // one number in every element
  iota,      // the index along `axis`
  map,       // a named scalar function of each element
  cast,
  broadcast,  // dims[i]: the result's dimension of operand dimension i
  reshape,
  transpose,    // dims[i]: the operand's dimension of result dimension i
  slice,        // begin <= index < end of each dimension
  pad,          // adds zeros: low before, high after each dimension
  concat,       // along axis
  flip,         // reverses along axis
  reduce,       // over dims, which are removed
  dot,          // result dimensions: batch, then those of a alone, then those of b alone
  take,         // table [V, ...], index [I...] -> [I..., ...]; 0 where the index is outside [0, V)
  scatter_add,  // index [I...], updates [I..., ...] -> [rows, ...]; outside indices are dropped
  pick,  // x, index (the shape of x without axis) -> x at index along axis; 0 outside. An index of
         // x's rank has several entries along axis
  attention,       // q, k, v [B, H, T, D], then optional operands of Scores -> out, lse [B, H, T]
  attention_grad,  // q, k, v, out, lse, d_out, then the same -> d_q, d_k, d_v
  scan,            // running sums, maxima, products or log-sum-exps along axis, inclusive
  sort,            // x -> its first sorted elements along axis, and their indices (i64)
  stop_gradient,
  loop,
  head,       // x [..., D], w [V, D], targets [...], then optional operands of Head: made by a pass
  fused_dot,  // a dot, then optional operands of Epilogue: made when a GPU program is planned
  put,  // index, updates of its shape -> 0 with updates added at index along axis; outside indices
        // are dropped
  extern_call,  // run by the caller: one result of a call, with its type given
  recurrence,   // a, b -> y[k] = a[k] y[k - 1] + b[k] along axis, with y[0] = b[0]
};
std::string_view name_of(Op op);  // "reduce"

enum class Reduce : std::uint8_t { sum, max, lse, argmax, product };
std::string_view name_of(Reduce kind);

// One result of a node.
struct Value {
  std::int32_t node = -1;
  std::int32_t index = 0;
  bool valid() const { return node >= 0; }
  auto operator<=>(const Value&) const = default;
};

struct Loop;

// A head that the engine of logitless/head.h runs: logits z = softcap(scale (x . w + bias)).
//  operands  x, w, targets; with bias: bias [V]; with gradients: d_lse and d_logit [...] f32
//  results   lse [...] f32, logit of the target [...] f32 (0 outside [0, V)); with log_prob: their
//            difference logit - lse [...] f32 (0 outside); then the requested gradients of
//            <lse, d_lse> + <logit, d_logit>: [..., D], [V, D], [V]
struct Head {
  bool bias = false, gradients = false;
  // The difference is rounded once: an offset that all logits have leaves no trace in it.
  bool log_prob = false;
  double scale = 1.0, softcap = 0.0;  // softcap 0: none
  // Dtypes of the gradients; i8: not requested.
  DType d_x = DType::i8, d_w = DType::i8, d_bias = DType::i8;
  // Rows of this target, which is outside [0, V), are skipped: lse, logit and gradients are 0.
  std::optional<std::int64_t> ignored;
  // Most bytes of workspace if a plan fits into them; 0: enough to recompute nothing.
  std::int64_t workspace = 0;

  std::int32_t first_gradient() const { return log_prob ? 3 : 2; }  // of the results
};

// The epilogue of a matrix product, applied to its sums before they are stored.
//  operands  those of the dot, bias [n], residual or x of the result's shape, all of its dtype
struct Epilogue {
  bool bias = false;      // added along the last dimension
  bool residual = false;  // added
  // Two results: gelu (tanh form) of the sum, and the sum; excludes residual.
  bool gelu = false;
  // Multiplies by the derivative of that gelu at x; excludes the others.
  bool gelu_gradient = false;
  bool any() const { return bias || residual || gelu || gelu_gradient; }
};
// Returns "bias, residual", as in reports.
std::string text_of(const Epilogue& epilogue);

// The scores of attention: z = softcap(scale q k^T) + bias, and -inf where the mask hides the key.
// Query t is at position p = t + S - T.
//  operands  bias [1 or B, 1 or H, 1 or T, S], f32 or of q's dtype; segments of queries [B, T] and
//            of keys [B, S], i32 or i64
struct Scores {
  bool causal = false;      // keys s <= p are visible
  double softcap = 0.0;     // 0: none
  std::int64_t window = 0;  // keys p - window < s < p + window are visible; 0: all
  bool bias = false;
  bool segments = false;  // keys of the query's segment are visible
  std::size_t operands() const { return std::size_t{bias} + std::size_t{segments} * 2; }
  bool operator==(const Scores&) const = default;
};
// Returns "causal softcap window": the features in use, as in descriptions.
std::string text_of(const Scores& scores);

// One result of a call that the caller of the compiler runs. The call is a pure function of its
// operands. Calls of one id compute equal results from equal operands.
struct Extern {
  static constexpr int kWhole = -1;  // for an operand: every chunk reads all of it
  static constexpr int kSum = -2;    // for the result: the sum of the chunks' results
  std::int64_t id = 0;
  int result = 0;  // index of the result of the call
  // Ways to chunk the call: the cut dimension of each operand, then of the result.
  std::vector<std::vector<int>> along;
  bool operator==(const Extern&) const = default;
};

// Attributes of an operation; each operation uses some of them.
struct Attributes {
  std::string name;                         // parameter
  Function function = Function::neg;        // map
  Reduce reduce = Reduce::sum;              // reduce, scan (all but argmax)
  double number = 0.0;                      // constant; attention: the scale
  bool reverse = false;                     // scan, recurrence: from the end; sort: descending
  bool near = false;                        // map: see mark_near_results()
  Scores scores;                            // attention
  Extern call;                              // extern
  int axis = 0;                             // iota, concat, flip, pick, scan, sort, put, recurrence
  std::vector<int> dims;                    // broadcast, transpose, reduce
  std::vector<int> batch_a, batch_b;        // dot
  std::vector<int> contract_a, contract_b;  // dot
  // slice; pad: low, high; constant: an optional begin[0] multiplies the number; sort: begin[0]
  // elements are kept.
  Shape begin, end;
  // The result type where operands do not determine it: parameter, constant, iota, cast (dtype),
  // broadcast, reshape, extern. Also dot and reduce, whose results may be f32 (from 16 bit) or f64
  // (from any dtype). scatter_add: shape[0] is the number of rows; put: the size along axis.
  Type type{DType::i8, {}};
  std::shared_ptr<const Loop> loop;
  Head head;
  Epilogue epilogue;  // fused_dot
  // Source location, "loss.py:12", or empty: UTF-8 without quotes and control characters. It is an
  // attribute so that copies of an operation keep it; it has no other effect.
  std::string location = {};
};

struct Node {
  Op op = Op::parameter;
  std::vector<Value> operands;
  // Copies of an operation in other graphs share its attributes.
  Shared<Attributes> attributes;
  SharedList<Type> results;
  std::string name;  // hint for printing; may be empty
};

inline bool is_map(const Node& node, Function function) {
  return node.op == Op::map && node.attributes->function == function;
}
inline bool is_reduce(const Node& node, Reduce kind) {
  return node.op == Op::reduce && node.attributes->reduce == kind;
}

// Returns "exp", "reduce": the name of values without a hint.
std::string_view title_of(const Node& node);
// Returns the name in reports: "layer3.mlp.gelu (tanh) bf16[4, N], loss.py:12".
std::string description_of(const Node& node);
// Returns the title, the type and the name without the numbers before its last dot. So
// corresponding values of different layers of a network have one kind.
std::string kind_of(const Node& node);

// Returns whether two nodes compute the same from equal operands. Names and locations may differ.
// Loops and heads must be the same object.
bool computes_alike(const Node& a, const Node& b);

struct Output {
  std::string name;
  Value value;
};

class Origin;

class Graph {
 public:
  std::string name = "main";

  // Appends a node and returns its first result. A missing hint or location is taken from the
  // innermost Origin. Throws InvalidArgument with the operation, the expectation and the actual
  // arguments.
  Value add(Op op, std::vector<Value> operands, Attributes attributes = {}, std::string hint = {});
  // Adds a copy of a node of this or another graph with other operands. Types are inferred only if
  // the types of operands differ.
  Value copy(const Graph& from, int id, std::vector<Value> operands);
  // Consumes this graph and returns it with the kept nodes alone. Readers of node id read
  // instead[id], which is kept, precedes its readers, and has the same types.
  Graph kept(const std::vector<bool>& keep, const std::vector<int>& instead) &&;
  // Throws InvalidArgument unless the output's name is unique.
  void add_output(std::string output, Value value);

  int size() const { return static_cast<int>(nodes_.size()); }
  const Node& node(int id) const { return nodes_[static_cast<std::size_t>(id)]; }
  const Node& node(Value value) const { return node(value.node); }
  const Type& type(Value value) const {
    return node(value).results[static_cast<std::size_t>(value.index)];
  }
  const std::vector<Node>& nodes() const { return nodes_; }
  const std::vector<Output>& outputs() const { return outputs_; }
  // Reserves memory for so many nodes.
  void reserve(int nodes) { nodes_.reserve(static_cast<std::size_t>(nodes)); }
  void set_hint(int id, std::string hint) {
    nodes_[static_cast<std::size_t>(id)].name = std::move(hint);
  }
  std::vector<int> parameters() const;  // in order
  // Returns -1 if there is no such parameter.
  int find_parameter(std::string_view parameter) const;
  // Returns the readers of each node, ascending and without duplicates. Outputs do not count.
  Lists<int> users() const;
  // Returns the symbols of all types.
  std::vector<std::string> symbols() const;
  // Returns the name of the innermost Origin, or an empty text.
  const std::string& origin_name() const { return origin_name_; }

 private:
  friend class Origin;
  std::vector<Node> nodes_;
  std::vector<Output> outputs_;
  std::string origin_name_, origin_location_;
};

// Sets the name and location of a graph's new nodes during its lifetime, for operations that
// replace another one. The graph must not move meanwhile.
class Origin {
 public:
  Origin(Graph& graph, std::string name, std::string location);
  // Takes them from this node, with `prefix` before a name; a missing name stays empty.
  Origin(Graph& graph, const Node& node, std::string_view prefix = {});
  ~Origin();
  Origin(const Origin&) = delete;
  Origin& operator=(const Origin&) = delete;

 private:
  Graph& graph_;
  std::string name_, location_;  // values before this Origin
};

// A loop over chunks of an axis. The first parameter of the body is the index of the chunk's first
// element (scalar i64), followed by one parameter for each operand. Sizes may contain `symbol`, the
// chunk's number of elements. It is `chunk`, and in the last round the rest of `extent`.
struct Loop {
  enum class In : std::uint8_t { slice, whole };
  enum class Out : std::uint8_t { stack, sum, max, lse };  // all but stack merge over the chunks
  struct Input {
    In kind = In::whole;
    int axis = 0;
    std::int64_t factor = 1;  // elements along axis for each element of the loop's axis
  };
  struct Result {
    Out kind = Out::stack;
    int axis = 0;
    std::int64_t factor = 1;
  };
  std::string symbol = "c";
  std::int64_t extent = 0;
  std::int64_t chunk = 0;
  std::vector<Input> inputs;
  std::vector<Result> outputs;  // of the body's outputs, in order
  Graph body;
  std::int64_t rounds() const { return extent / chunk + (extent % chunk != 0 ? 1 : 0); }
};

// Returns the types of the results. Throws InvalidArgument. ir/infer.cpp
std::vector<Type> infer_types(Op op, const std::vector<const Type*>& operands,
                              const Attributes& attributes);

// Checks the invariants of graphs made by passes: order, operands, inferred types, names, loops.
// Throws InternalError with the node and the rule.
void verify(const Graph& graph);

// Returns the bytes of a value; sizes must be bound.
std::int64_t bytes_of(const Type& type);
std::int64_t elements_of(const Type& type);

// Replaces the symbols in all sizes, also in the bodies of loops. Throws InvalidArgument with the
// symbol if a size becomes negative.
Graph bind(const Graph& graph, const Bindings& bindings);

}  // namespace logitless::ir
