// The properties of a machine that lowering depends on. All functions are pure, so compiling does
// not need the machine.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>

#include "compiler/plan/program.h"

namespace logitless::ir {

// How the head engine runs one head.
struct HeadPlan {
  std::shared_ptr<const LossPlan> plan;
  std::shared_ptr<const Context> context;
  std::int64_t bytes = 0;        // of scratch
  std::int64_t value_bytes = 0;  // the same without parts that depend on threads
};

// Rates of the machine for large sizes, for predictions. These must not depend on where a program
// is compiled or on its threads. Only the ratios decide.
struct Rates {
  double products16 = 0.0, products32 = 0.0, products64 = 0.0;  // flops, by the operands' dtype
  double bytes = 0.0;                                           // read or written
  double functions = 0.0;                                       // exp, tanh and the like
  double launch = 0.0;  // seconds of overhead of any instruction
  // false: each step of an elementwise loop is an operation with a launch, which reads and writes
  // memory. Frameworks run programs so.
  bool fuses = true;
  // Matrix products wait for memory in part: their seconds are the root of the sum of the squares
  // of both, not the longer. That is within 6 % for products of 256 to 4096 rows on an H200.
  bool products_wait = false;
  double head_products = 1.0;  // rate of a head's matrix products relative to others
  double head_chunk = 0.0;     // seconds of each chunk of a head but the first: small kernels
  // A matrix product is split into tiles of its result, `units` of which are computed at a time.
  std::int64_t tile_rows = 1, tile_columns = 1, units = 1;
  // Products with generated epilogues, of 16-bit operands: flops, and the side of their square
  // tiles, `epilogue_tiles` of which are computed at a time.
  double epilogue_products = 0.0;
  std::int64_t epilogue_side = 1, epilogue_tiles = 1;
  // Attention. `attention_products`: rate of its matrix products relative to others. The next two:
  // cost of a score, as a number of functions, forward and backward. `score_rows`: rows of a tile;
  // a causal tile is computed to its end.
  double attention_products = 0.6, score_functions = 0.0, score_gradient_functions = 0.0;
  std::int64_t score_rows = 0;
};

// The launch of an operation by PyTorch, which its host needs.
inline constexpr double kFrameworkLaunch = 5e-6;

class Target {
 public:
  virtual ~Target() = default;

  // Alignment of the arena and of offsets in it.
  virtual std::int64_t alignment() const = 0;
  // Returns the alignment in bytes of rows of matrix products' operands and results in the arena;
  // 1: any.
  virtual std::int64_t row_alignment() const = 0;

  // Returns the number that large chunks should be multiples of, for fast matrix products.
  virtual std::int64_t chunk_multiple() const = 0;

  // Returns whether matrix products read operands of any strides at full rate; otherwise copies may
  // pay.
  virtual bool strided_gemms() const = 0;

  // Returns whether values may be in the memory of results until these are made.
  virtual bool uses_results() const = 0;

  // Returns why no kernel runs the instruction, with operation and dtype; empty if one does.
  virtual std::string refuse(const Instruction& instruction) const = 0;

  // Returns the bytes that a kernel needs beside operands and results.
  virtual std::int64_t scratch_bytes(const Gemm& gemm) const = 0;
  virtual std::int64_t scratch_bytes(const Attention& attention) const = 0;
  virtual std::int64_t scratch_bytes(const ScatterAdd& scatter) const = 0;
  virtual std::int64_t scratch_bytes(const RowGroup& group) const = 0;
  // Returns the bytes that a product's kernels move beside its operands and result.
  virtual std::int64_t additional_bytes(const Gemm&) const { return 0; }
  // Returns the bytes of partial sums of a reduction that is split into parts; 0: not split.
  virtual std::int64_t parts_bytes(const Pointwise& reduction) const = 0;
  // Returns the longest rows over which neighbouring loops are fused into row groups; 0: none are.
  virtual std::int64_t most_group_columns() const = 0;
  // Returns whether heads can add their gradients to existing values. A far-field step that misses
  // the error is then not repeated: what has been added stays.
  virtual bool heads_add() const = 0;
  // Returns whether matrix products have epilogues, and whether gelu and its gradient are among
  // them.
  virtual bool epilogues() const = 0;
  virtual bool gelu_epilogues() const = 0;
  // Returns the kernel whose epilogues can be the loops that read its product (fuse_products), or
  // nothing.
  virtual std::optional<ProductEngine> product_engine() const = 0;

  // Returns the fastest plan within `workspace` bytes, or within the least power of two times it
  // that any plan fits into. 0: nothing is recomputed.
  virtual HeadPlan head_plan(const HeadShape& shape, const HeadFeatures& features,
                             std::int64_t workspace) const = 0;

  // Returns the rates for predicted_seconds() of plan/cost.h.
  virtual Rates rates() const = 0;
  // Returns the number of rows from which a matrix product runs at its full rate.
  virtual std::int64_t thick_rows() const = 0;
};

}  // namespace logitless::ir
