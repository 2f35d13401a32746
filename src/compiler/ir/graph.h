// The program a compiler works on: an SSA graph of tensor operations (docs/ir.md).
//
// Nodes stand in topological order: a node reads only nodes before it. Passes do not edit a graph
// in place, they write a new one (build.h has short forms), so a graph that exists is one that
// verifies.
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

// Each has a row in ops/, which says all that there is to know of it.
enum class Op : std::uint8_t {
  parameter,
  constant,  // one number in every element
  iota,      // the index along `axis`
  map,       // a named scalar function of each element
  cast,
  broadcast,  // dims[i]: which dimension of the result is dimension i of the operand
  reshape,
  transpose,    // dims[i]: which dimension of the operand is dimension i of the result
  slice,        // begin <= index < end of each dimension
  pad,          // zeros: low before, high after, of each dimension
  concat,       // along axis
  flip,         // backwards along axis
  reduce,       // over dims, which vanish
  dot,          // result dimensions: batch, those of a alone, those of b alone
  take,         // table [V, ...], index [I...] -> [I..., ...]; 0 where the index is outside [0, V)
  scatter_add,  // index [I...], updates [I..., ...] -> [rows, ...]; outside indices are dropped
  pick,         // x, index (the shape of x without axis) -> x at index along axis; 0 outside.
                // An index of x's rank: as many along axis as it has
  attention,    // q, k, v [B, H, T, D], then Scores' optional operands -> out, lse [B, H, T]
  attention_grad,  // q, k, v, out, lse, d_out, then the same -> d_q, d_k, d_v
  scan,            // sums, or log-sum-exps, of what stands up to each element along axis
  sort,            // x -> the first of its elements along axis in order, and their indices (i64)
  stop_gradient,
  loop,
  head,       // x [..., D], w [V, D], targets [...], then Head's optional operands: made by a pass
  fused_dot,  // a dot, then Epilogue's optional operands: made when a GPU's program is planned
  put,        // index, updates of its shape -> 0 with them added at index along axis; outside
              // indices are dropped
  extern_call,  // what the caller runs: one result of a call, of a type that is written
};
std::string_view name_of(Op op);  // "reduce"

enum class Reduce : std::uint8_t { sum, max, lse, argmax };
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
//   operands  x, w, targets, with bias its [V], with gradients d_lse and d_logit [...] f32
//   results   lse [...] f32, logit of the target [...] f32 (0 outside [0, V)), then the gradients
//             of <lse, d_lse> + <logit, d_logit> that are asked for: [..., D], [V, D], [V]
struct Head {
  bool bias = false, gradients = false;
  double scale = 1.0, softcap = 0.0;  // softcap 0: none
  // Dtypes of the gradients; i8: not asked for.
  DType d_x = DType::i8, d_w = DType::i8, d_bias = DType::i8;
  // Rows of this target, which is outside [0, V), cost nothing: lse, logit and gradients are 0.
  std::optional<std::int64_t> ignored;
  // Bytes it may take, where a plan fits into them; 0: some, so that nothing is computed twice.
  std::int64_t workspace = 0;
};

// What a product does to its sums before it stores them.
//   operands  those of the dot, bias [n], residual or x of the result's shape, all of its dtype
struct Epilogue {
  bool bias = false;           // added, along the last dimension
  bool residual = false;       // added
  bool gelu = false;           // results: gelu of the sum, by tanh, and the sum; no residual
  bool gelu_gradient = false;  // times the derivative of that gelu at x; nothing else beside it
  bool any() const { return bias || residual || gelu || gelu_gradient; }
};
// "bias, residual": as reports say it.
std::string text_of(const Epilogue& epilogue);

// What attention makes of the products of queries and keys: z = softcap(scale q k^T) + bias, and
// -inf where the query does not see the key. Query t stands at p = t + S - T.
//   operands  bias [1 or B, 1 or H, 1 or T, S], f32 or of q's dtype; segments of queries [B, T] and
//             of keys [B, S], i32 or i64
struct Scores {
  bool causal = false;      // sees s <= p
  double softcap = 0.0;     // 0: none
  std::int64_t window = 0;  // sees p - window < s < p + window; 0: all
  bool bias = false;
  bool segments = false;  // sees keys of its own segment
  std::size_t operands() const { return std::size_t{bias} + std::size_t{segments} * 2; }
  bool operator==(const Scores&) const = default;
};
// "causal softcap window": what there is of it, as descriptions say it.
std::string text_of(const Scores& scores);

// One result of a call that whoever compiles a program runs: a function of its operands and nothing
// else. Calls of one id compute the same of equal operands.
struct Extern {
  static constexpr int kWhole = -1;  // of an operand: every chunk reads all of it
  static constexpr int kSum = -2;    // of the result: it is the sum of those of chunks
  std::int64_t id = 0;
  int result = 0;  // which of the call's
  // Ways of cutting it: the dimension of each operand, then of the result, along which parts are
  // computed from parts.
  std::vector<std::vector<int>> along;
  bool operator==(const Extern&) const = default;
};

// What an operation needs beside its operands; each reads its own.
struct Attributes {
  std::string name;                         // parameter
  Function function = Function::neg;        // map
  Reduce reduce = Reduce::sum;              // reduce, scan (sum or lse)
  double number = 0.0;                      // constant; attention: the scale
  bool reverse = false;                     // scan: from the end; sort: descending
  Scores scores;                            // attention
  Extern call;                              // extern
  int axis = 0;                             // iota, concat, flip, pick, scan, sort, put
  std::vector<int> dims;                    // broadcast, transpose, reduce
  std::vector<int> batch_a, batch_b;        // dot
  std::vector<int> contract_a, contract_b;  // dot
  // slice; pad: low, high; constant: begin[0], if there, multiplies the number; sort: begin[0] are
  // kept.
  Shape begin, end;
  // The result where operands do not tell it: parameter, constant, iota, cast (dtype), broadcast,
  // reshape, extern, and dot and reduce, whose dtype may be f32 (f64) above 16-bit (any) operands.
  // scatter_add: shape[0] is the rows; put: the size along axis.
  Type type{DType::i8, {}};
  std::shared_ptr<const Loop> loop;
  Head head;
  Epilogue epilogue;  // fused_dot
  // Where its author wrote it, "loss.py:12", or empty: UTF-8 without quotes and control characters.
  // It stands here so that whatever copies an operation keeps it; it changes nothing else.
  std::string location = {};
};

struct Node {
  Op op = Op::parameter;
  std::vector<Value> operands;
  // Shared by the copies of an operation in the graphs that passes make of each other.
  Shared<Attributes> attributes;
  SharedList<Type> results;
  std::string name;  // a hint for printing; may be empty
};

// "exp", "reduce": what values without a hint are called.
std::string_view title_of(const Node& node);
// "layer3.mlp.gelu (tanh) bf16[4, N], loss.py:12": what reports call it.
std::string description_of(const Node& node);
// The same for values that differ but in the layer of a network that they belong to: the title, the
// type, and the name with the numbers before its last dot left out.
std::string kind_of(const Node& node);

// Whether two nodes make the same of equal operands: names and places may differ. Loops and heads
// are alike only if they are one.
bool computes_alike(const Node& a, const Node& b);

struct Output {
  std::string name;
  Value value;
};

class Origin;

class Graph {
 public:
  std::string name = "main";

  // Appends a node and returns its first result; without a hint or location of its own it has those
  // of the innermost Origin. Throws InvalidArgument naming the operation, what was expected and
  // what came.
  Value add(Op op, std::vector<Value> operands, Attributes attributes = {}, std::string hint = {});
  // A node of another graph, or of this one, with other operands: add() of its parts, and nothing
  // is inferred again where the operands have the types that they had there.
  Value copy(const Graph& from, int id, std::vector<Value> operands);
  // This graph, given up, with the nodes alone that are kept. What reads node id reads instead[id],
  // one that is kept, stands where id may stand, and makes values of the same types.
  Graph kept(const std::vector<bool>& keep, const std::vector<int>& instead) &&;
  // Result names are unique. Throws InvalidArgument.
  void add_output(std::string output, Value value);

  int size() const { return static_cast<int>(nodes_.size()); }
  const Node& node(int id) const { return nodes_[static_cast<std::size_t>(id)]; }
  const Node& node(Value value) const { return node(value.node); }
  const Type& type(Value value) const {
    return node(value).results[static_cast<std::size_t>(value.index)];
  }
  const std::vector<Node>& nodes() const { return nodes_; }
  const std::vector<Output>& outputs() const { return outputs_; }
  // Room for so many nodes, for those who know how many come.
  void reserve(int nodes) { nodes_.reserve(static_cast<std::size_t>(nodes)); }
  void set_hint(int id, std::string hint) {
    nodes_[static_cast<std::size_t>(id)].name = std::move(hint);
  }
  std::vector<int> parameters() const;  // in order
  // -1: no such parameter.
  int find_parameter(std::string_view parameter) const;
  // Nodes that read each node, ascending, each once. Outputs do not count.
  Lists<int> users() const;
  // Symbols of all types.
  std::vector<std::string> symbols() const;
  // Of the innermost Origin; empty without.
  const std::string& origin_name() const { return origin_name_; }

 private:
  friend class Origin;
  std::vector<Node> nodes_;
  std::vector<Output> outputs_;
  std::string origin_name_, origin_location_;
};

// What a graph's new nodes are called, and where they come from, while it lives: operations that
// stand for one. The graph stays where it is meanwhile.
class Origin {
 public:
  Origin(Graph& graph, std::string name, std::string location);
  // As they are at this node: the name after `prefix`, none if it has none.
  Origin(Graph& graph, const Node& node, std::string_view prefix = {});
  ~Origin();
  Origin(const Origin&) = delete;
  Origin& operator=(const Origin&) = delete;

 private:
  Graph& graph_;
  std::string name_, location_;  // before
};

// A loop over chunks of an axis. The body has a parameter for the number of the first element
// (scalar i64), then one for each operand; its sizes may hold `symbol`, the elements of this
// chunk: `chunk` of them, and in the last round what is left of `extent`.
struct Loop {
  enum class In : std::uint8_t { slice, whole };
  enum class Out : std::uint8_t { stack, sum, max, lse };  // all but stack: over the chunks
  struct Input {
    In kind = In::whole;
    int axis = 0;
    std::int64_t factor = 1;  // elements along axis for each one of the loop
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

// Types of the results. Throws InvalidArgument. ir/infer.cpp
std::vector<Type> infer_types(Op op, const std::vector<const Type*>& operands,
                              const Attributes& attributes);

// Throws InternalError naming node and rule when an invariant does not hold: order, operands,
// types as inferred, names, loops. For graphs made by passes.
void verify(const Graph& graph);

// Bytes of a value; sizes must be bound.
std::int64_t bytes_of(const Type& type);
std::int64_t elements_of(const Type& type);

// Every size with the symbols replaced; loop bodies included. Throws InvalidArgument naming the
// symbol when a size becomes negative.
Graph bind(const Graph& graph, const Bindings& bindings);

}  // namespace logitless::ir
