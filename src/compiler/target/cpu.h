// The CPU as a target, and conversions of instructions to its kernels' arguments.
#pragma once

#include "compiler/target/target.h"
#include "kernels/cpu_tensor.h"

namespace logitless::ir {

// Decisions do not depend on `threads`, but the scratch of kernels does. `runs` is false for
// programs that others run: their matrix products copy operands without plain strides.
class CpuTarget final : public Target {
 public:
  explicit CpuTarget(int threads, bool runs = true) : threads_(threads), runs_(runs) {}

  std::int64_t alignment() const final { return 64; }
  std::int64_t row_alignment() const final { return 1; }
  std::int64_t chunk_multiple() const final { return 1; }
  bool strided_gemms() const final { return runs_; }
  bool uses_results() const final { return runs_; }
  std::string refuse(const Instruction& instruction) const final;
  std::int64_t scratch_bytes(const Gemm& gemm) const final;
  std::int64_t scratch_bytes(const Attention& attention) const final;
  std::int64_t scratch_bytes(const ScatterAdd&) const final { return 0; }
  std::int64_t scratch_bytes(const RowGroup&) const final { return 0; }
  bool epilogues() const final { return false; }
  bool gelu_epilogues() const final { return false; }
  std::optional<ProductEngine> product_engine() const final { return std::nullopt; }
  // A row stays in the cache between loops.
  std::int64_t most_group_columns() const final { return 0; }
  bool heads_add() const final { return false; }
  std::int64_t parts_bytes(const Pointwise& reduction) const final;
  HeadPlan head_plan(const HeadShape& shape, const HeadFeatures& features,
                     std::int64_t workspace) const final;
  // Rates of a nominal core, independent of the machine that compiles.
  Rates rates() const final;
  std::int64_t thick_rows() const final { return 64; }

 private:
  int threads_;
  bool runs_;
};

// Returns the matrix product over (innermost outer dimension, m, n, k) with null pointers.
GemmProblem gemm_problem(const Gemm& gemm, int threads);
// Returns the sizes of an attention.
AttentionShape attention_shape(const Attention& attention, int threads);

}  // namespace logitless::ir
