// What lowering asks of the machine that a program is for: a pure function of what is asked, so
// that compiling needs no such machine.
#pragma once

#include <cstdint>
#include <memory>
#include <string>

#include "compiler/plan/program.h"

namespace logitless::ir {

// How the head engine runs one head.
struct HeadPlan {
  std::shared_ptr<const LossPlan> plan;
  std::shared_ptr<const Context> context;
  std::int64_t bytes = 0;        // of scratch
  std::int64_t value_bytes = 0;  // the same without what depends on threads
};

// What the machine does in a second when sizes are large: for predictions, which must be the same
// wherever and for however many threads a program is compiled. Only their ratios decide.
struct Rates {
  double products16 = 0.0, products32 = 0.0, products64 = 0.0;  // flops, by the operands' dtype
  double bytes = 0.0;                                           // read or written
  double functions = 0.0;                                       // exp, tanh and their like
  double launch = 0.0;  // seconds that any instruction takes
  // A product is cut into tiles of its result, `units` of which are computed at a time.
  std::int64_t tile_rows = 1, tile_columns = 1, units = 1;
  // Attention: the part of the products' rate that its own have; for each score what takes as long
  // as so many functions beside them, forward and backward; and the rows of a tile, which a causal
  // one computes to its end.
  double attention_products = 0.6, score_functions = 0.0, score_gradient_functions = 0.0;
  std::int64_t score_rows = 0;
};

class Target {
 public:
  virtual ~Target() = default;

  // Of the arena, and of offsets in it.
  virtual std::int64_t alignment() const = 0;
  // Bytes that rows of products' operands and results are to begin at multiples of, where they lie
  // in the arena; 1: anywhere.
  virtual std::int64_t row_alignment() const = 0;

  // What large chunks are best multiples of: the sizes that products are fast at.
  virtual std::int64_t chunk_multiple() const = 0;

  // Whether products read operands of any strides at their rate; else copies of those may pay.
  virtual bool strided_products() const = 0;

  // Why no kernel runs the instruction, naming operation and dtype; empty: one does.
  virtual std::string refuse(const Instruction& instruction) const = 0;

  // What a kernel needs beside operands and results.
  virtual std::int64_t scratch_bytes(const Gemm& gemm) const = 0;
  virtual std::int64_t scratch_bytes(const Attention& attention) const = 0;
  virtual std::int64_t scratch_bytes(const ScatterAdd& scatter) const = 0;
  virtual std::int64_t scratch_bytes(const RowGroup& group) const = 0;
  // Of a reduction whose results are sums of parts, for those; 0: none.
  virtual std::int64_t parts_bytes(const Pointwise& reduction) const = 0;
  // Whether neighbouring loops become row groups.
  virtual bool groups_rows() const = 0;
  // Whether heads add their gradients to what is there. A far-field step that misses the error is
  // then not done again: what has been added stays.
  virtual bool heads_add() const = 0;
  // Whether products take epilogues, and gelu and its gradient among them.
  virtual bool epilogues() const = 0;
  virtual bool gelu_epilogues() const = 0;

  // The fastest plan within `workspace` bytes, or within the least power of two times it that one
  // fits into; 0: nothing is computed twice.
  virtual HeadPlan head_plan(const HeadShape& shape, const HeadFeatures& features,
                             std::int64_t workspace) const = 0;

  // For predicted_seconds() of plan/cost.h.
  virtual Rates rates() const = 0;
  // Rows from which on a product is thick enough to run at its rate.
  virtual std::int64_t thick_rows() const = 0;
};

}  // namespace logitless::ir
