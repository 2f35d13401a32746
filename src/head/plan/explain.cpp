// Text of a plan.
#include <cstdio>
#include <sstream>

#include "core/check.h"
#include "head/cuda/layout.h"
#include "head/plan/default_plan.h"
#include "head/plan/text.h"
#include "logitless/plan.h"

namespace logitless {

std::string_view name_of(PlanKind kind) {
  switch (kind) {
    case PlanKind::forward:
      return "forward";
    case PlanKind::dense:
      return "dense";
    case PlanKind::recompute:
      return "recompute";
    case PlanKind::stored:
      return "stored";
    case PlanKind::far_backward:
      return "far_backward";
    case PlanKind::far_both:
      return "far_both";
  }
  return "?";
}

std::string_view name_of(Accuracy accuracy) {
  switch (accuracy) {
    case Accuracy::exact:
      return "exact";
    case Accuracy::far_backward:
      return "far_backward";
    case Accuracy::far_both:
      return "far_both";
  }
  return "?";
}

namespace {

// Describes the effect of expected_ignored.
std::string expectation_text(const LossPlan& plan) {
  const std::string given = concat("expected_ignored ", plan.expected_ignored, ": ");
  if (plan.threads > 0) return given + "no effect, on a CPU ignored tokens cost nothing";
  const cuda::DeviceKernel& kernel = cuda::find_device_kernel(plan.kernel);
  if (!cuda::lists_tokens(kernel, plan.shape.tokens, plan.features, cuda::sizes_of(plan)))
    return given + "no effect, this plan keeps the order of the tokens";
  if (plan.kind == PlanKind::forward || kernel.gemms_skip == cuda::GemmsSkip::ignored)
    return given + "the predicted time is that of the other tokens";
  return concat(given, "gradients of ",
                cuda::expected_tokens(plan.shape.tokens, plan.expected_ignored),
                " tokens by cuBLAS, of more where they count by a slower kernel");
}

// Returns the dtypes of hidden and weight.
std::string operands_text(const LossPlan& plan) {
  const HeadFeatures& f = plan.features;
  const std::string dtype(name_of(plan.shape.dtype));
  if (f.narrow_hidden != DType::f32) return concat(name_of(f.narrow_hidden), " hidden x ", dtype);
  if (f.narrow_weight != DType::f32) return concat(dtype, " hidden x ", name_of(f.narrow_weight));
  return dtype;
}

}  // namespace

std::string LossPlan::explain() const {
  std::ostringstream out;
  char passes_text[32];
  std::snprintf(passes_text, sizeof(passes_text), "%.2f", passes);
  out << "plan " << name_of(kind) << ": " << passes_text << " passes over " << shape.tokens
      << " tokens x " << shape.vocab << " vocabulary entries x " << shape.dim << " ("
      << operands_text(*this)
      << (features.precision == Precision::ieee
              ? ""
              : concat(", GEMMs in ", name_of(features.precision)))
      << "), kernel " << kernel;
  if (threads > 0) out << ", " << threads << (threads == 1 ? " thread" : " threads");
  out << "\n";
  out << "  workspace " << format_bytes(workspace_bytes_) << "; the fp32 logits would be "
      << format_bytes(logits_bytes()) << "\n";
  if (features.vocab_ranks > 0) {
    out << "  " << shape.global_vocab << " vocabulary entries on " << features.vocab_ranks
        << " ranks; tokens "
        << (features.tokens_sharded ? "spread over them" : "the same on all of them") << "\n";
    if (exchange_bytes > 0)
      out << "  beside the workspace " << format_bytes(exchange_bytes)
          << " of the communicator's memory, which copy engines exchange\n";
  }
  std::istringstream movements(exchange_choice);
  for (std::string line; std::getline(movements, line);) out << "  " << line << "\n";
  if (default_limit != 0 && memory_budget != 0 && !budget_is_plenty) {
    out << "  budget " << format_bytes(memory_budget) << ": within " << kBudgetSlack * 100.0
        << " % of the best predicted time below " << format_bytes(default_limit)
        << ", for that much of the time at least " << kBudgetSlack * kBytesForTime * 100.0
        << " % less workspace\n";
  } else if (default_limit != 0) {
    out << (memory_budget == 0 ? "  no budget was given: the" : "  below the budget: the")
        << " least workspace within " << default_slack(features, threads > 0) * 100.0
        << " % of the best predicted time below " << format_bytes(default_limit) << "\n";
  } else if (memory_budget == 0) {
    out << "  no budget was given, and no plan takes less\n";
  }
  if (!note.empty()) out << "  " << note << "\n";
  for (const PlanCandidate& c : candidates) {
    if (c.kind == kind && !c.keeps.empty()) out << "  keeps " << c.keeps << "\n";
  }
  if (weight_ranges > 0 && first_tokens < shape.tokens) {
    out << "  a chunk of " << first_tokens << " tokens, then of " << chunk_tokens;
  } else {
    out << "  chunks of " << chunk_tokens << " tokens";
  }
  if (block_vocab > 0) out << ", gradients of " << block_vocab << " vocabulary entries at a time";
  if (stored_vocab > 0) {
    out << ", exp(z) kept for " << (stored_vocab < shape.vocab ? stored_vocab : shape.vocab)
        << " of " << shape.vocab << " vocabulary entries";
  }
  if (weight_vocab > 0)
    out << "\n  d_weight of " << weight_vocab
        << " vocabulary entries at a time, in a GEMM of its own";
  if (slice_rows > 0)
    out << "\n  weights in slices of " << slice_rows
        << " rows of each rank, gathered for each call";
  if (weight_ranges > 0 && stored_vocab > 0) {
    out << "\n  d_weight in " << weight_ranges
        << " ranges of vocabulary entries: until it is made, its memory holds exp(z) of all but "
           "the last";
    if (stored_vocab < shape.vocab)
      out << ", and gradients of vocabulary entries that are not saved";
  } else if (weight_ranges > 0) {
    out << "\n  until d_weight is made, its memory holds gradients of more vocabulary entries at a "
           "time";
  } else if (threads == 0 && stored_vocab > 0 && features.d_weight &&
             (features.accumulate || features.d_weight_strided)) {
    out << "\n  d_weight's memory holds no exp(z) meanwhile: "
        << (features.accumulate ? "d_weight is added to what it holds" : "it has gaps");
  }
  if (expected_ignored > 0.0f) out << "\n  " << expectation_text(*this);
  if (sample_every > 0)
    out << "\n  d_weight of far tiles corrected from one block of tokens in " << sample_every;
  out << "\n  predicted " << seconds_text(predicted_seconds)
      << (calibrated ? " at rates measured on this card\n" : " at the kernel's nominal rate\n");
  for (const PlanCandidate& c : candidates) {
    if (c.kind == kind) continue;
    out << "  not " << name_of(c.kind) << ": " << c.reason;
    if (c.possible && !c.keeps.empty()) out << "; keeps " << c.keeps;
    out << "\n";
  }
  std::istringstream reasons(kernel_reasons);
  for (std::string line; std::getline(reasons, line);) out << "  not kernel " << line << "\n";
  return std::move(out).str();
}

}  // namespace logitless
