// Builds one loop from its leaves and steps.
#pragma once

#include <cstddef>
#include <limits>
#include <utility>
#include <vector>

#include "compiler/plan/lowering.h"

namespace logitless::ir {

class PointwiseBuilder {
 public:
  static constexpr int kNone = std::numeric_limits<int>::min();

  PointwiseBuilder(Lowering& lowering, std::vector<std::int64_t> shape) : l_(lowering) {
    loop_.shape = std::move(shape);
    loop_.leaves.reserve(kUsual);
    loop_.steps.reserve(kUsual);
  }

  // Returns the register of a value, which is loaded, or computed if it has no memory.
  int value(Value v);
  // Returns the register of the node computed here, even if it has memory.
  int compute(Value v);
  // Returns the register of a value that is read backwards along a dimension.
  int backwards(Value v, int dim);

  int constant(double number);
  int iota(int dim);
  int memory(View view);
  // dtype: the result's, where it is i32 or i64.
  int step(Function f, int a, int b = kNone, int c = kNone, DType dtype = DType::f32);
  int round(DType dtype, int a);
  const Graph& graph() const { return l_.graph(); }
  // Returns whether a register is loaded, a number or an index, and not computed.
  static bool is_leaf(int r) { return r > 0; }

  // Renumbers a register when the loop is finished: leaves first, then steps.
  int final(int r) const { return r > 0 ? r - 1 : static_cast<int>(loop_.leaves.size()) - r - 1; }
  Pointwise finish();

 private:
  Lowering& l_;
  Pointwise loop_;
  unsigned backwards_ = 0;                  // bit d: dimension d is read backwards
  static constexpr std::size_t kUsual = 4;  // of leaves, and of steps
  struct Register {
    Value value;
    unsigned backwards;
    int number;
  };
  std::vector<Register> registers_;  // at most kMaxRegisters

  int leaf(Pointwise::Leaf leaf);
  int add_step(const Pointwise::Step& step);
  int make(Value v);
};

// Merges dimensions and decides the width of registers.
void finish_pointwise(Pointwise& loop);
// Sets `wide` and `exact`, and drops the conversions that registers so chosen need not make.
void choose_registers(Pointwise& loop);

}  // namespace logitless::ir
