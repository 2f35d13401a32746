// An operation is one row: whatever a pass asks of a kind of node stands in it, and the rows of a
// family in one file of this folder. Passes ask row_of(op) and have no cases of their own.
//
// The types of what the functions take and give are declared here and defined where they are used,
// so that a layer that asks one column includes nothing of the others.
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

// A part of the text form and the attribute it holds: "axis(1)". ops/text_key.h makes them.
struct TextKey {
  std::string_view name;
  void (*read)(TextReader&, Attributes&) = nullptr;
  std::string (*write)(const Attributes&) = nullptr;
  bool required = true;  // one that is not is left out where what it would hold is empty
};

// What it costs to have a value of the operation once more.
enum class Work : std::uint8_t {
  none,         // it is a view, or a number: no memory
  elementwise,  // computed where it is read, or stored
  full,
};

// What the sign of a zero in an operand does to the results.
enum class ZeroSign : std::uint8_t {
  sees,   // anything: 1 / x
  makes,  // zeros of either sign, where there were zeros: -x
  moves,  // nothing but that it is the sign of a zero in a result; no other has -0
  loses,  // nothing; no result has -0: sums start from 0
};
template <ZeroSign kSign>
ZeroSign zeros(const Node&, std::size_t) {
  return kSign;
}

struct Operation {
  Op op = Op::parameter;
  std::string_view name;
  Work work = Work::full;
  bool of_nothing = false;  // no operands: every reader may make the value for itself
  bool sums = false;        // adds up; the dtype of the result may be wider than its operands'

  // --- types. Throws InvalidArgument.
  std::vector<Type> (*infer)(const Typing&) = nullptr;

  // --- text
  bool statement = true;               // NAME operands keys : type
  bool typed = false;                  // the type of the result must be given
  std::span<const TextKey> keys = {};  // in the order in which they are written
  // Where attributes are part of the name: whether this is one, and what it sets; and the name.
  bool (*reads)(std::string_view name, Attributes&) = nullptr;
  std::string (*spelling)(const Attributes&) = nullptr;

  // --- meaning, in float64. Null: the interpreter is given the value.
  std::vector<Tensor> (*evaluate)(const Evaluation&) = nullptr;

  // --- gradients of the operands, in their order, not valid() where there is none. Null: no rule.
  std::vector<Value> (*gradient)(Derivation&) = nullptr;

  // --- the sign of a zero in operand i. Null: it is seen.
  ZeroSign (*zero_sign)(const Node&, std::size_t i) = nullptr;

  // --- chunks. How the node runs when its result 0 is to be cut so, or nothing when it cannot.
  // Null: a boundary.
  std::optional<Chunked> (*cut_by_result)(const CutNode&, const Split& result) = nullptr;
  // Where operand i leads when it comes cut so.
  Lead (*cut_by_operand)(const CutNode&, std::size_t i, const Split& operand) = nullptr;
  // Degree of the result in a scalar that some operands are linear in. Null: not linear.
  int (*degree)(const Linearity&) = nullptr;
  // The node on a chunk, added to the body. Null: with the attributes that it has.
  Value (*clone)(ChunkClone&) = nullptr;

  // --- instructions. Before any is written, the last node first: gives operands their places in
  // the result.
  void (*arrange)(Lowering&, int node) = nullptr;
  // Whether the one that makes the value writes it where it must go.
  bool (*place)(Lowering&, Value, const Destination&) = nullptr;
  // The value as a view of its operand's memory.
  View (*view)(Lowering&, Value) = nullptr;
  // The register of a loop that holds an element of the value: an elementwise operation.
  int (*registers)(PointwiseBuilder&, Value) = nullptr;
  // Writes the instructions of a node. Null: it is made where it is read.
  void (*emit)(Lowering&, int node) = nullptr;
};

const Operation& row_of(Op op);
// All of them, in the order of Op.
std::span<const Operation* const> operations();

// Multiply-adds that an extern is taken to do: some for each element of its largest tensor, in
// every part along which it can be cut. So chunks together do what the whole does, and what is
// computed twice shows. Sizes are bound.
double extern_work(const Graph& graph, const Node& node);

// "exp", "argmax", "dot": as the text form writes the operation.
std::string spelling_of(Op op, const Attributes& attributes);

}  // namespace logitless::ir
