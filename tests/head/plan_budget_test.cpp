// A memory budget is a ceiling: a plan takes no more of it than its speed is worth. This holds for
// every kernel and kind, and for token-dispatched and weight-gathered heads. All inputs are
// recorded, so nothing depends on the machine.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <string>
#include <utility>
#include <vector>

#include "head/plan/choose.h"
#include "head/plan/default_plan.h"
#include "kernels/cpu_facts.h"
#include "kernels/device/far.h"
#include "logitless/logitless.h"

namespace logitless::test {
namespace {

constexpr std::size_t kPlenty = std::size_t{1} << 40;
const HeadShape kLlama{8192, 4096, 128256, DType::bf16};

HeadFeatures gradients(DType dtype = DType::f32) {
  HeadFeatures f;
  f.d_hidden = f.d_weight = true;
  f.d_hidden_dtype = f.d_weight_dtype = dtype;
  return f;
}

PlanRequest on_cpu(const std::string& kernel, int threads, std::size_t budget) {
  return {.device = {.threads = threads, .kernel = kernel}, .memory_budget = budget};
}
PlanRequest on_gpu(int capability, std::size_t budget) {
  PlanRequest request;
  request.device.kind = DeviceKind::cuda;
  request.device.compute_capability = capability;
  request.memory_budget = budget;
  return request;
}

// Returns the kernels of all machines that take fp32.
std::vector<std::string> wide_kernels() {
  std::vector<std::string> names;
  for (const std::string& name : kernel_names(false)) {
    try {
      plan_head({64, 64, 1000, DType::f32}, gradients(), on_cpu(name, 1, 0));
      names.push_back(name);
    } catch (const Unsupported&) {
    }
  }
  return names;
}

// Checks that a plan fits, is fast, and takes no more memory than its speed is worth.
void expect_worth_it(const HeadShape& shape, const HeadFeatures& features,
                     const PlanRequest& request, std::size_t ceiling) {
  const auto with = [&](std::size_t budget) {
    PlanRequest r = request;
    r.memory_budget = budget;
    return LocalPlanner().plan(shape, features, r);
  };
  const LossPlan plan = with(request.memory_budget), free = with(0);
  SCOPED_TRACE(plan.explain());
  EXPECT_EQ(plan.memory_budget, request.memory_budget);
  EXPECT_LE(plan.workspace_bytes(), std::min(request.memory_budget, ceiling));
  // No plan within the ceiling is more than 1 % faster.
  double best = plan.predicted_seconds;
  for (std::size_t budget = plan.workspace_bytes() / 4; budget <= request.memory_budget;
       budget += budget / 2) {
    try {
      const LossPlan other = with(budget);
      EXPECT_LE(other.workspace_bytes(), budget);
      if (other.workspace_bytes() <= ceiling) best = std::min(best, other.predicted_seconds);
    } catch (const InvalidArgument&) {
      EXPECT_LT(budget, plan.workspace_bytes());
    }
    if (budget > 2 * ceiling) break;
  }
  EXPECT_LE(plan.predicted_seconds, 1.01 * best);
  // A default that is as fast is not smaller, up to the resolution of the bisection.
  if (free.predicted_seconds <= plan.predicted_seconds &&
      free.workspace_bytes() <= request.memory_budget) {
    EXPECT_LE(plan.workspace_bytes(),
              free.workspace_bytes() + std::max(64_KiB, free.workspace_bytes() / 32));
  }
}

// The head of 1024 tokens, 64 columns and a vocabulary of 8192 took 37.3 MiB of a budget of 256,
// and 10.4 without one. Its logits are 32 MiB.
TEST(PlanBudget, OfASmallHeadIsTheDefaultWhereThatFits) {
  const HeadShape head{1024, 64, 8192, DType::f32};
  for (const std::string& kernel : wide_kernels()) {
    for (const int threads : {1, 2, 16}) {
      const LossPlan free = plan_head(head, gradients(), on_cpu(kernel, threads, 0));
      SCOPED_TRACE(kernel + " " + free.explain());
      EXPECT_LT(free.workspace_bytes(), free.logits_bytes());
      for (const std::size_t budget : {free.workspace_bytes(), 64_MiB, 256_MiB, kPlenty}) {
        const LossPlan plan = plan_head(head, gradients(), on_cpu(kernel, threads, budget));
        EXPECT_LE(plan.workspace_bytes(), free.workspace_bytes());
        EXPECT_LE(plan.predicted_seconds, 1.01 * free.predicted_seconds);
        EXPECT_EQ(plan.memory_budget, budget);
        if (!plan.budget_is_plenty) continue;
        EXPECT_NE(plan.explain().find("  below the budget: the least workspace within 3 % of the "
                                      "best predicted time below 16.0 MiB\n"),
                  std::string::npos)
            << plan.explain();
      }
      try {
        const std::size_t less = free.workspace_bytes() - 1;
        const LossPlan plan = plan_head(head, gradients(), on_cpu(kernel, threads, less));
        EXPECT_LE(plan.workspace_bytes(), less);
      } catch (const InvalidArgument&) {
        EXPECT_EQ(kernel, "reference") << "only its default is the least plan";
      }
    }
  }
}

// A wide head with few tokens has few logits, and saving their exponentials saves a GEMM. That is
// worth more than the 16 MiB of a default.
TEST(PlanBudget, OfFewTokensBuysAPass) {
  const HeadShape head{128, 4096, 128256, DType::bf16};
  const PlanRequest none = on_cpu("amx_bf16_emulated", 2, 0);
  const LossPlan free = plan_head(head, gradients(), none);
  PlanRequest some = none;
  some.memory_budget = 256_MiB;
  const LossPlan plan = plan_head(head, gradients(), some);
  EXPECT_EQ(plan.kind, PlanKind::dense) << plan.explain();
  EXPECT_LE(plan.workspace_bytes(), plan.logits_bytes());
  EXPECT_LT(1.06 * plan.predicted_seconds, free.predicted_seconds) << free.explain();
}

TEST(PlanBudget, OfRecordedProcessorsIsNoLargerThanADefaultAsFast) {
  CpuFacts none, avx2, all;
  avx2.avx2.clear();
  all.avx2.clear();
  all.avx512.clear();
  all.avx512_bf16.clear();
  all.amx_bf16.clear();
  for (const CpuFacts& facts : {none, avx2, all}) {
    const AssumedCpu assumed(facts);
    for (const HeadShape& shape : {HeadShape{1024, 64, 8192, DType::f32},
                                   {700, 512, 40000, DType::bf16},
                                   {2048, 512, 65536, DType::bf16},
                                   kLlama}) {
      const std::size_t logits = static_cast<std::size_t>(shape.tokens * shape.vocab * 4);
      for (const DType dtype : {DType::f32, shape.dtype})
        expect_worth_it(shape, gradients(dtype), on_cpu("", 2, 8_GiB), logits);
    }
  }
}

// Llama-3-8B's head in 256 MiB, with gradients as in explain(), on each kernel of any machine.
TEST(PlanBudget, OfLlamasHeadHasAPlanOnEveryKernelOfACpu) {
  for (const std::string& kernel : kernel_names(false)) {
    for (const int threads : {1, 2, 16}) {
      SCOPED_TRACE(kernel + " " + std::to_string(threads));
      const LossPlan plan =
          plan_head(kLlama, gradients(DType::bf16), on_cpu(kernel, threads, 256_MiB));
      EXPECT_LE(plan.workspace_bytes(), 256_MiB);
      EXPECT_EQ(plan.default_limit, 256_MiB);
      EXPECT_NE(
          plan.explain().find("  budget 256.0 MiB: within 1 % of the best predicted time below "
                              "256.0 MiB, for that much of the time at least 10 % less "
                              "workspace\n"),
          std::string::npos)
          << plan.explain();
    }
  }
}

// Sums have the same bits for any number of threads whose scratch fits.
TEST(PlanBudget, HasTheSameChunksForAnyThreadsThatFit) {
  for (const std::string kernel : {"amx_bf16_emulated", "scalar"}) {
    for (const HeadShape& shape : {HeadShape{2048, 512, 65536, DType::bf16}, kLlama}) {
      for (const std::size_t budget : {1_GiB, 8_GiB}) {
        const LossPlan one = plan_head(shape, gradients(), on_cpu(kernel, 1, budget));
        for (const int threads : {2, 7, 64}) {
          const LossPlan plan = plan_head(shape, gradients(), on_cpu(kernel, threads, budget));
          EXPECT_EQ(plan.threads, threads);
          EXPECT_LE(plan.workspace_bytes(), plan.default_limit);
          EXPECT_EQ(plan.kind, one.kind) << plan.explain();
          EXPECT_EQ(plan.chunk_tokens, one.chunk_tokens);
          EXPECT_EQ(plan.block_vocab, one.block_vocab);
          EXPECT_EQ(plan.stored_vocab, one.stored_vocab);
          EXPECT_NEAR(plan.predicted_seconds, one.predicted_seconds / threads, 1e-12);
        }
      }
    }
  }
}

// Plans for GPUs that need not be present: heads of docs/develop/benchmarks.md and a small one.
TEST(PlanBudget, HoldsOnGpus) {
  for (const int capability : {80, 90}) {
    for (const HeadShape& shape :
         {kLlama, HeadShape{32768, 768, 50304, DType::bf16}, {1024, 64, 8192, DType::bf16}}) {
      const std::size_t logits = static_cast<std::size_t>(shape.tokens * shape.vocab * 4);
      for (const DType dtype : {DType::f32, shape.dtype}) {
        SCOPED_TRACE(capability);
        const PlanRequest request = on_gpu(capability, 16_GiB);
        // cuBLAS plans hold a chunk's fp32 logits and the GEMM operands.
        const bool wide = capability == 80;
        expect_worth_it(shape, gradients(dtype), request, wide ? 16_GiB : std::max(logits, 16_MiB));
      }
    }
  }
}

// Stored plans save as much of exp(z) as speed is worth, and do not fill the budget.
TEST(PlanBudget, OfStoredExponentialsIsNotFilled) {
  HeadFeatures f = gradients(DType::bf16);
  int stored = 0;
  for (const std::size_t budget : {256_MiB, 400_MiB, 700_MiB}) {
    const LossPlan plan = plan_head(kLlama, f, on_gpu(90, budget));
    SCOPED_TRACE(plan.explain());
    EXPECT_LE(plan.workspace_bytes(), budget);
    stored += plan.kind == PlanKind::stored;
    PlanRequest asked = on_gpu(90, budget);
    asked.kind = plan.kind;
    const LossPlan fastest = plan_head(kLlama, f, asked);
    EXPECT_EQ(fastest.default_limit, 0u) << "a kind that is asked for is the fastest of it";
    EXPECT_LE(fastest.predicted_seconds, plan.predicted_seconds);
    EXPECT_LE(plan.predicted_seconds, 1.01 * fastest.predicted_seconds);
    EXPECT_LE(plan.workspace_bytes(), fastest.workspace_bytes());
  }
  EXPECT_GT(stored, 0);
}

// Token-dispatched plans of one of four ranks.
TEST(PlanBudget, HoldsWhereTokensMove) {
  HeadShape shape = kLlama;
  shape.vocab = 32064;
  shape.global_vocab = kLlama.vocab;
  const std::size_t logits = 4 * 8192 * 32064ull;
  for (const bool spread : {false, true}) {
    for (const DType dtype : {DType::f32, DType::bf16}) {
      HeadFeatures f = gradients(dtype);
      f.vocab_ranks = 4;
      f.tokens_sharded = spread;
      expect_worth_it(shape, f, on_cpu("amx_bf16_emulated", 2, 16_GiB), logits);
      // Exchange buffers come on top, as in a default.
      expect_worth_it(shape, f, on_gpu(90, 16_GiB), logits + 16384ull * 4096 * 12);
    }
  }
}

// Weight-gathered plans of one of four ranks.
TEST(PlanBudget, HoldsWhereWeightsMove) {
  HeadShape shape = kLlama;
  shape.tokens = 2048;
  shape.global_vocab = shape.vocab;
  HeadFeatures f = gradients(DType::bf16);
  f.vocab_ranks = 4;
  f.tokens_sharded = true;
  f.gathered_rows = 32064;
  const std::size_t logits = 4 * 2048 * 128256ull;
  expect_worth_it(shape, f, on_cpu("amx_bf16_emulated", 2, 16_GiB), logits);
  expect_worth_it(shape, f, on_gpu(90, 16_GiB), logits + 2048ull * 4096 * 12);
}

// The kernels of all cards with a far field have it over ranks, too.
TEST(PlanBudget, OtherKernelsPlanAFarFieldOverRanks) {
  HeadShape shape{8192, 4096, 131072, DType::bf16};
  HeadFeatures f = gradients(DType::bf16);
  PlanRequest request = on_gpu(90, 1_GiB);
  request.device.kernel = "sm80";
  request.kind = PlanKind::far_backward;
  request.tau = 0.003f;
  f.vocab_ranks = 2;
  shape.global_vocab = std::exchange(shape.vocab, shape.vocab / 2);
  const LossPlan plan = LocalPlanner().plan(shape, f, request);
  EXPECT_EQ(plan.kernel, "sm80");
  EXPECT_EQ(plan.kind, PlanKind::far_backward);
  EXPECT_LE(plan.workspace_bytes(), request.memory_budget);
}

// Each kind is planned for the first kernel that has it: Hopper's of f16 has no far field.
TEST(PlanBudget, TheFarFieldMayTakeAnotherKernelThanExactPlans) {
  const HeadShape shape{8192, 4096, 131072, DType::f16};
  const auto seconds_of = [](const LossPlan& plan, PlanKind kind) {
    for (const PlanCandidate& c : plan.candidates)
      if (c.kind == kind) return c.predicted_seconds;
    return 0.0;
  };
  PlanRequest request = on_gpu(90, 4_GiB);
  const LossPlan exact = plan_head(shape, gradients(), request);
  EXPECT_EQ(exact.kernel, "hopper_f16");
  // A build without CUDA has no masses estimated on a GPU.
  const bool has_estimates = cuda::estimates_unsupported().empty();
  for (const Accuracy accuracy : {Accuracy::far_backward, Accuracy::far_both}) {
    request.accuracy = accuracy;
    const LossPlan plan = plan_head(shape, gradients(), request);
    SCOPED_TRACE(plan.explain());
    EXPECT_EQ(plan.kind, accuracy == Accuracy::far_both && has_estimates ? PlanKind::far_both
                                                                         : PlanKind::far_backward);
    EXPECT_EQ(plan.kernel, "sm80");
    EXPECT_NE(plan.kernel_reasons.find("hopper_f16: does not have the far field\n"),
              std::string::npos);
    // Exact plans stay candidates of their own kernel; those of sm80 take 1.2 times as long.
    EXPECT_LE(seconds_of(plan, PlanKind::dense), seconds_of(exact, PlanKind::dense));
    request.audit_rows = 100;
    const LossPlan audited = plan_head(shape, gradients(), request);
    ASSERT_NE(audited.audit, nullptr);
    EXPECT_EQ(audited.audit->kernel, "sm80");
    request.audit_rows = 0;
  }
  // An exact plan stays with the kernel of exact plans.
  const LossPlan small = plan_head({8192, 4096, 8192, DType::f16}, gradients(), request);
  EXPECT_EQ(small.kind, PlanKind::dense);
  EXPECT_EQ(small.kernel, "hopper_f16");
  EXPECT_EQ(small.kernel_reasons.find("far field"), std::string::npos);
  request.accuracy = Accuracy::exact;
  request.kind = PlanKind::far_backward;
  EXPECT_EQ(plan_head(shape, gradients(), request).kernel, "sm80");
  for (const auto& [kernel, reason] :
       {std::pair{"hopper_f16", "kernel hopper_f16 does not have it"},
        std::pair{"cublas", "kernel cublas does not have it"}}) {
    request.device.kernel = kernel;
    try {
      plan_head(shape, gradients(), request);
      FAIL() << kernel;
    } catch (const Unsupported& error) {
      EXPECT_NE(std::string(error.what()).find(reason), std::string::npos) << error.what();
    }
  }
}

// The far field takes its fastest sizes below the same ceiling: it selects fewer tiles with larger
// chunks, which predictions do not model.
TEST(PlanBudget, OfAFarFieldHasTheSameCeiling) {
  const HeadShape shapes[] = {{8192, 1024, 131072, DType::bf16}, {512, 512, 131072, DType::bf16}};
  for (const HeadShape& shape : shapes) {
    const std::size_t logits = static_cast<std::size_t>(shape.tokens * shape.vocab * 4);
    for (PlanRequest request : {on_cpu("amx_bf16_emulated", 2, 64_GiB), on_gpu(90, 64_GiB)}) {
      request.accuracy = Accuracy::far_backward;
      for (const std::optional<PlanKind> kind :
           {std::optional<PlanKind>(), std::optional<PlanKind>(PlanKind::far_backward)}) {
        request.kind = kind;
        request.memory_budget = 64_GiB;
        const LossPlan plan = plan_head(shape, gradients(), request);
        SCOPED_TRACE(plan.explain());
        EXPECT_LE(plan.workspace_bytes(), std::max(logits, 512_MiB));
        request.memory_budget = std::max(logits, 512_MiB);
        EXPECT_EQ(plan_head(shape, gradients(), request).predicted_seconds, plan.predicted_seconds);
      }
    }
  }
}

// 1 % of the time is not given up for a few percent of the memory, but for half of it.
TEST(PlanBudget, GivesUpNoTimeForLittleMemory) {
  const std::vector<std::string> known = kernel_names(false);
  if (std::find(known.begin(), known.end(), "amx_bf16") != known.end()) {
    // A stored plan without the exponentials of 2304 entries would take 3 % less.
    const LossPlan dense =
        plan_head({2048, 512, 65536, DType::bf16}, gradients(), on_cpu("amx_bf16", 2, 2_GiB));
    EXPECT_EQ(dense.kind, PlanKind::dense) << dense.explain();
    EXPECT_EQ(dense.chunk_tokens, 2048);
  }
  PlanRequest asked = on_gpu(90, 2_GiB);
  asked.kind = PlanKind::dense;
  const LossPlan fastest = plan_head(kLlama, gradients(), asked);
  const LossPlan plan = plan_head(kLlama, gradients(), on_gpu(90, 2_GiB));
  EXPECT_LT(plan.workspace_bytes(), fastest.workspace_bytes() / 2) << plan.explain();
  EXPECT_LE(plan.predicted_seconds, 1.01 * fastest.predicted_seconds);
}

}  // namespace
}  // namespace logitless::test
