// The interface of operations. Each operation is one entry of this table, with a field for
// everything that a pass asks about a kind of node. A family's entries are in one file of this
// folder. Passes call row_of(op) and have no special cases.
//
// The types in the signatures are declared here and defined where they are used. So a layer that
// uses one field does not include the others' headers.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "compiler/ir/graph.h"

namespace logitless::ir {

class ChunkClone;        // analysis/chunk_clone.h
class Derivation;        // ir/derivation.h
class Lowering;          // plan/lowering.h
class PointwiseBuilder;  // plan/pointwise_builder.h
class TextReader;        // ir/text_reader.h
struct Chunked;          // analysis/split.h
struct Destination;      // plan/lowering.h
struct CutNode;          // analysis/cut.h
struct Evaluation;       // ir/evaluation.h
struct Lead;             // analysis/cut.h
struct Linearity;        // analysis/linearity.h
struct Split;            // analysis/split.h
struct Tensor;           // ir/interpreter.h
struct Typing;           // ir/typing.h
struct View;             // plan/program.h

// A key of the text form and its attribute: "axis(1)". ops/text_key.h makes them.
struct TextKey {
  std::string_view name;
  void (*read)(TextReader&, Attributes&) = nullptr;
  std::string (*write)(const Attributes&) = nullptr;
  bool required = true;  // false: the key is omitted if its value is empty
};

// The cost of recomputing a value of the operation.
enum class Work : std::uint8_t {
  none,         // a view or a constant: no memory
  elementwise,  // computed where it is read, or stored
  full,
};

// The effect of the sign of a zero operand on the results.
enum class ZeroSign : std::uint8_t {
  sees,   // any effect: 1 / x
  makes,  // zeros of either sign where there were zeros: -x
  moves,  // becomes the sign of a zero in a result; no other has -0
  loses,  // none; no result has -0, since sums start from 0
};
template <ZeroSign kSign>
ZeroSign zeros(const Node&, std::size_t) {
  return kSign;
}

// The effect of an operand's last bits on the results.
enum class Rounding : std::uint8_t {
  sees,   // any effect: floor(x), x < y, an index
  moves,  // as large relative to a result: x + y
  loses,  // no larger than the result's own rounding: exp(x), a sum of many, 16 bits
};
template <Rounding kRounding>
Rounding rounds(const Node&, std::size_t) {
  return kRounding;
}

struct Operation {
  Op op = Op::parameter;
  std::string_view name;
  Work work = Work::full;
  bool of_nothing = false;  // no operands: every reader may recompute the value
  bool sums = false;        // is a sum; the result's dtype may be wider than the operands'

  // --- types. Throws InvalidArgument.
  std::vector<Type> (*infer)(const Typing&) = nullptr;

  // --- text
  bool statement = true;               // NAME operands keys : type
  bool typed = false;                  // the type of the result must be given
  std::span<const TextKey> keys = {};  // in the order in which they are written
  // If the name contains attributes: `reads` sets them if it recognises the name, `spelling`
  // returns the name.
  bool (*reads)(std::string_view name, Attributes&) = nullptr;
  std::string (*spelling)(const Attributes&) = nullptr;

  // --- meaning, in float64. Null: the caller of the interpreter supplies the value.
  std::vector<Tensor> (*evaluate)(const Evaluation&) = nullptr;

  // --- gradients of the operands in their order; invalid without a gradient. Null: no rule.
  std::vector<Value> (*gradient)(Derivation&) = nullptr;

  // --- effect of the sign of a zero in operand i. Null: any effect.
  ZeroSign (*zero_sign)(const Node&, std::size_t i) = nullptr;
  // --- effect of the last bits of operand i. Null: any effect.
  Rounding (*rounding)(const Node&, std::size_t i) = nullptr;

  // --- chunks. Returns how the node runs if its result 0 is cut so, or nothing if it cannot be.
  // Null: a boundary.
  std::optional<Chunked> (*cut_by_result)(const CutNode&, const Split& result) = nullptr;
  // Returns the consequence of a cut of operand i.
  Lead (*cut_by_operand)(const CutNode&, std::size_t i, const Split& operand) = nullptr;
  // Returns the degree of the result in a scalar that some operands are linear in. Null: not
  // linear.
  int (*degree)(const Linearity&) = nullptr;
  // Adds the node on a chunk to the body. Null: with unchanged attributes.
  Value (*clone)(ChunkClone&) = nullptr;

  // --- instructions. Runs before any instruction is written, from the last node to the first:
  // assigns operands to parts of the result's memory.
  void (*arrange)(Lowering&, int node) = nullptr;
  // Returns whether the instruction that computes the value writes it to the destination.
  bool (*place)(Lowering&, Value, const Destination&) = nullptr;
  // Returns the value as a view of its operand's memory.
  View (*view)(Lowering&, Value) = nullptr;
  // Returns the loop register with an element of the value, for elementwise operations.
  int (*registers)(PointwiseBuilder&, Value) = nullptr;
  // Writes the instructions of a node. Null: its readers compute it.
  void (*emit)(Lowering&, int node) = nullptr;
};

const Operation& row_of(Op op);
// Returns all operations, in the order of Op.
std::span<const Operation* const> operations();

// Returns an assumed number of multiply-adds for an extern: a constant for each element of its
// largest tensor, in every part along which it can be cut. So all chunks together have the work of
// the full call, and recomputation shows. Sizes are bound.
double extern_work(const Graph& graph, const Node& node);

// Returns the operation's name in the text form: "exp", "argmax", "dot".
std::string spelling_of(Op op, const Attributes& attributes);

}  // namespace logitless::ir
