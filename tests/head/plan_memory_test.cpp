// The memory of a plan: the least at its speed, and the planner's messages about it.
#include <gtest/gtest.h>

#include <cmath>
#include <stdexcept>
#include <string>

#include "logitless/logitless.h"

namespace logitless::test {
namespace {

HeadFeatures gradients(DType dtype = DType::f32) {
  HeadFeatures f;
  f.d_hidden = f.d_weight = true;
  f.d_hidden_dtype = f.d_weight_dtype = dtype;
  return f;
}

// Returns a request with a kernel that any machine plans for.
PlanRequest request_of(std::size_t budget, std::optional<PlanKind> kind = std::nullopt,
                       const std::string& kernel = "amx_bf16_emulated") {
  return {.device = {.threads = 2, .kernel = kernel}, .memory_budget = budget, .kind = kind};
}

const PlanCandidate& candidate(const LossPlan& plan, PlanKind kind) {
  for (const PlanCandidate& c : plan.candidates) {
    if (c.kind == kind) return c;
  }
  throw std::logic_error("no such candidate");
}

std::size_t number_after(const std::string& text, const std::string& before) {
  const std::size_t at = text.find(before);
  if (at == std::string::npos) throw std::logic_error("no '" + before + "' in " + text);
  return static_cast<std::size_t>(
      std::stod(text.substr(at + before.size())) *
      (text.find("GiB", at) < text.find("MiB", at) ? 1073741824.0 : 1048576.0));
}

TEST(PlanMemory, Holds16BitSumsAndSaysWhatF32Needs) {
  const HeadShape head{16384, 4096, 128256, DType::bf16};
  for (const PlanKind kind : {PlanKind::dense, PlanKind::stored}) {
    std::string text;
    try {
      plan_head(head, gradients(DType::bf16), request_of(300_MiB, kind));
      FAIL();
    } catch (const InvalidArgument& e) {
      text = e.what();
    }
    EXPECT_NE(text.find("1002.0 MiB of it what bf16 leaves of the sums of d_weight over several "
                        "chunks ("),
              std::string::npos)
        << text;
    EXPECT_NE(text.find(" with d_weight_dtype f32)"), std::string::npos) << text;
    // The message is true, up to its number of digits.
    const std::size_t least = number_after(text, "several chunks (");
    const LossPlan f32 = plan_head(head, gradients(), request_of(least + 64_KiB, kind));
    EXPECT_LE(f32.workspace_bytes(), least + 64_KiB);
    EXPECT_LT(least, 64_MiB);
  }
  // A requested fraction does not interfere.
  PlanRequest stored = request_of(300_MiB, PlanKind::stored);
  stored.stored_fraction = 0.5;
  try {
    plan_head(head, gradients(DType::bf16), stored);
    FAIL();
  } catch (const InvalidArgument& e) {
    EXPECT_EQ(std::string(e.what()).rfind("memory_budget: 300.0 MiB (314572800 bytes) is below the "
                                          "least plan, stored, which needs",
                                          0),
              0u)
        << e.what();
  }
}

TEST(PlanMemory, StoredIsNotCalledSlowerThanTheDensePlanItIs) {
  const LossPlan plan =
      plan_head({1024, 768, 40000, DType::bf16}, gradients(), request_of(512_MiB));
  EXPECT_EQ(plan.kind, PlanKind::dense);
  const PlanCandidate& stored = candidate(plan, PlanKind::stored);
  EXPECT_EQ(stored.predicted_seconds, candidate(plan, PlanKind::dense).predicted_seconds);
  EXPECT_FALSE(stored.possible);
  EXPECT_EQ(stored.reason, "all of exp(z) fits: that is dense");
  // Requested by kind, it is available nevertheless.
  EXPECT_EQ(
      plan_head({1024, 768, 40000, DType::bf16}, gradients(), request_of(512_MiB, PlanKind::stored))
          .kind,
      PlanKind::stored);
}

// A candidate's memory is what its time requires: with less it is slower or does not fit.
TEST(PlanMemory, ACandidateHoldsTheLeastAtItsSpeed) {
  for (const std::string kernel : {"amx_bf16_emulated", "scalar", "avx2"}) {
    for (const HeadShape& shape :
         {HeadShape{1024, 768, 40000, DType::bf16}, HeadShape{5000, 300, 70000, DType::bf16},
          HeadShape{20000, 1024, 32000, DType::bf16}}) {
      for (const DType dtype : {DType::f32, DType::bf16}) {
        PlanRequest request = request_of(2_GiB, {}, kernel);
        request.device.threads = 1;
        const LossPlan plan = plan_head(shape, gradients(dtype), request);
        SCOPED_TRACE(kernel + " " + plan.explain());
        for (const PlanKind kind : {PlanKind::dense, PlanKind::recompute}) {
          const PlanCandidate& c = candidate(plan, kind);
          ASSERT_GT(c.workspace_bytes, 0u);
          const auto with = [&](std::size_t budget) {
            request.memory_budget = budget;
            request.kind = kind;
            return plan_head(shape, gradients(dtype), request);
          };
          EXPECT_LE(with(c.workspace_bytes).predicted_seconds, c.predicted_seconds * 1.01);
          // The speed is that of the budget, within 1 %.
          EXPECT_LE(c.predicted_seconds, with(64_GiB).predicted_seconds * 1.01);
          try {
            EXPECT_GT(with(c.workspace_bytes - 1).predicted_seconds, c.predicted_seconds);
          } catch (const InvalidArgument&) {
          }
        }
        EXPECT_LE(candidate(plan, PlanKind::recompute).workspace_bytes,
                  candidate(plan, PlanKind::dense).workspace_bytes);
      }
    }
  }
}

TEST(PlanMemory, MoreThanTheLogitsIsExplained) {
  // A chunk of exp(z) in 16 bits is half of the logits, and the vocabulary blocks are the rest.
  const HeadShape head{64, 1024, 2048, DType::bf16};
  const LossPlan plan =
      plan_head(head, gradients(), request_of(16_MiB, PlanKind::recompute, "scalar"));
  ASSERT_GT(plan.workspace_bytes(), plan.logits_bytes()) << plan.explain();
  EXPECT_EQ(plan.note.rfind("the fp32 logits would be less", 0), 0u);
  EXPECT_NE(plan.explain().find(plan.note), std::string::npos);
  // The logits are so small that any plan holds more.
  const LossPlan tiny =
      plan_head({2, 64, 100, DType::f32}, gradients(), request_of(0, {}, "scalar"));
  EXPECT_EQ(tiny.note, "the fp32 logits would be less: any plan of this head holds more");
}

// Parts of a workspace are named with their sizes, which are correct.
TEST(PlanMemory, SaysWhatIsKept) {
  const HeadShape head{1024, 768, 40000, DType::bf16};
  const LossPlan plan = plan_head(head, gradients(), request_of(0));
  const PlanCandidate& dense = candidate(plan, PlanKind::dense);
  const std::string start = "exp(z) of " + std::to_string(plan.chunk_tokens) +
                            " tokens x 40000 vocabulary entries in 16 bits, ";
  ASSERT_EQ(dense.keeps.rfind(start, 0), 0u) << dense.keeps;
  const std::size_t exponentials = number_after(dense.keeps, start);
  const std::size_t rest = number_after(dense.keeps, "the rest, chunks and vocabulary blocks, ");
  EXPECT_GE(exponentials, static_cast<std::size_t>(plan.chunk_tokens) * 40000 * 2 - 64_KiB);
  EXPECT_NEAR(static_cast<double>(exponentials + rest), static_cast<double>(dense.workspace_bytes),
              static_cast<double>(256_KiB));
  EXPECT_EQ(candidate(plan, PlanKind::recompute).keeps.rfind("chunks and vocabulary blocks, ", 0),
            0u);
  for (const PlanKind kind : {PlanKind::dense, PlanKind::recompute})
    EXPECT_NE(plan.explain().find("keeps " + candidate(plan, kind).keeps), std::string::npos);
}

}  // namespace
}  // namespace logitless::test
