// A GPU as a target, and conversions of instructions to its kernels' arguments.
#pragma once

#include <span>

#include "compiler/target/target.h"
#include "kernels/device/attention.h"
#include "kernels/device/cards.h"
#include "kernels/device/gemm.h"
#include "kernels/device/index.h"

namespace logitless::ir {

class CudaTarget final : public Target {
 public:
  // `card` without a name: the usual one of the capability. `runs` is false for programs that
  // others run: these have no row groups, no epilogues, and rows without gaps.
  explicit CudaTarget(int compute_capability, bool epilogues = true, const GpuCard& card = {},
                      bool runs = true)
      : compute_capability_(compute_capability),
        epilogues_(epilogues),
        runs_(runs),
        card_(cuda::card_or_usual(card, compute_capability)) {}

  std::int64_t alignment() const final { return 256; }
  std::int64_t row_alignment() const final { return runs_ ? 16 : 1; }
  std::int64_t chunk_multiple() const final { return 8; }
  bool strided_gemms() const final { return false; }
  bool uses_results() const final { return runs_; }
  std::string refuse(const Instruction& instruction) const final;
  std::int64_t scratch_bytes(const Gemm& gemm) const final;
  std::int64_t additional_bytes(const Gemm& gemm) const final;
  std::int64_t scratch_bytes(const Attention& attention) const final;
  std::int64_t scratch_bytes(const ScatterAdd& scatter) const final;
  std::int64_t scratch_bytes(const RowGroup& group) const final;
  std::int64_t most_group_columns() const final;
  bool heads_add() const final { return true; }
  bool epilogues() const final { return runs_ && epilogues_; }
  // Only where they were measured: elsewhere the library may run them slower than separate loops.
  bool gelu_epilogues() const final;
  // None of programs that others run: these store a product before they read it.
  std::optional<ProductEngine> product_engine() const final;
  std::int64_t parts_bytes(const Pointwise& reduction) const final;
  HeadPlan head_plan(const HeadShape& shape, const HeadFeatures& features,
                     std::int64_t workspace) const final;
  // Sustained rates of the card. Those of fp32, fp64 and elementary functions are fractions of its
  // peaks, measured on Hopper alone.
  Rates rates() const final;
  std::int64_t thick_rows() const final { return 2048; }

 private:
  int compute_capability_;
  bool epilogues_, runs_;
  GpuCard card_;
};

// Returns the matrix product over (innermost outer dimension, m, n, k). `alignments`: bytes that
// divide the buffers' addresses, by buffer; empty: unknown, taken as 16.
cuda::GemmShape gemm_shape(const Gemm& gemm, std::span<const std::int64_t> alignments);
// Returns sizes and flags; the caller adds strides and pointers.
cuda::AttentionCall attention_call(const Attention& attention);
cuda::ScatterCall scatter_call(const ScatterAdd& scatter);

}  // namespace logitless::ir
