// The planner as a pure function: a table of choices, invariants for any problem, and messages.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <random>
#include <stdexcept>
#include <tuple>

#include "head/cuda/layout.h"
#include "kernels/device/gradient.h"
#include "logitless/logitless.h"

namespace logitless::test {
namespace {

HeadFeatures gradients() {
  HeadFeatures f;
  f.d_hidden = f.d_weight = true;
  return f;
}

PlanRequest request_of(std::size_t budget, std::optional<PlanKind> kind = std::nullopt,
                       const std::string& kernel = "amx_bf16_emulated") {
  PlanRequest r;
  r.device.threads = 2;
  r.device.kernel = kernel;  // the table holds on any machine
  r.memory_budget = budget;
  r.kind = kind;
  return r;
}

const PlanCandidate& candidate(const LossPlan& plan, PlanKind kind) {
  for (const PlanCandidate& c : plan.candidates) {
    if (c.kind == kind) return c;
  }
  throw std::logic_error("no such candidate");
}

TEST(Plan, Table) {
  const std::vector<std::string> known = kernel_names(false);
  if (std::find(known.begin(), known.end(), "amx_bf16") == known.end())
    GTEST_SKIP() << "the table is made for the rates of a kernel that is not built in";
  const HeadShape head{2048, 512, 65536, DType::bf16};
  struct Row {
    const char* name;
    HeadShape shape;
    HeadFeatures features;
    std::size_t budget;
    std::optional<PlanKind> asked;
    PlanKind kind;
    double least_passes, most_passes;
  };
  HeadFeatures hidden_alone;
  hidden_alone.d_hidden = true;
  HeadFeatures entropy_gradient = gradients();
  entropy_gradient.entropy_gradient = true;
  HeadFeatures capped = gradients();
  capped.softcap = 30.0f;
  capped.label_smoothing = true;
  HeadFeatures softcap = gradients();
  softcap.softcap = 30.0f;
  const Row table[] = {
      {"no gradients", head, {}, 0, {}, PlanKind::forward, 1, 1},
      {"enough memory", head, gradients(), 512_MiB, {}, PlanKind::dense, 3, 3},
      {"one gradient", head, hidden_alone, 512_MiB, {}, PlanKind::dense, 2, 2},
      {"little memory", head, gradients(), 48_MiB, {}, PlanKind::stored, 3.85, 4},
      // Saving 768 entries of exp(z) would save 0.1 % of the time and take 7 % more memory.
      {"very little", head, gradients(), 24_MiB, {}, PlanKind::recompute, 4, 4},
      {"between", head, gradients(), 100_MiB, PlanKind::stored, PlanKind::stored, 3.01, 3.99},
      {"asked for", head, gradients(), 0, PlanKind::recompute, PlanKind::recompute, 4, 4},
      {"entropy gradient", head, entropy_gradient, 0, {}, PlanKind::recompute, 4, 4},
      {"softcap and smoothing", head, capped, 0, {}, PlanKind::recompute, 4, 4},
      {"softcap", head, softcap, 512_MiB, {}, PlanKind::dense, 3, 3},
      {"one token", {1, 8, 100, DType::bf16}, gradients(), 0, {}, PlanKind::dense, 3, 3},
      {"no token", {0, 8, 100, DType::bf16}, gradients(), 0, {}, PlanKind::dense, 3, 3},
  };
  for (const Row& row : table) {
    SCOPED_TRACE(row.name);
    const LossPlan plan =
        plan_head(row.shape, row.features, request_of(row.budget, row.asked, "amx_bf16"));
    EXPECT_EQ(plan.kind, row.kind) << plan.explain();
    EXPECT_GE(plan.passes, row.least_passes);
    EXPECT_LE(plan.passes, row.most_passes);
    EXPECT_GT(plan.workspace_bytes(), 0u);
    if (row.budget > 0) {
      EXPECT_LE(plan.workspace_bytes(), row.budget);
    }
    EXPECT_EQ(candidate(plan, plan.kind).reason, "chosen");
  }
}

TEST(Plan, RefusalsSayWhy) {
  const HeadShape head{256, 64, 4096, DType::bf16};
  HeadFeatures features = gradients();
  const auto reason = [&](PlanKind kind, const HeadFeatures& f, const std::string& kernel) {
    return candidate(plan_head(head, f, request_of(0, {}, kernel)), kind).reason;
  };
  const std::string tiles = "amx_bf16_emulated";
  EXPECT_EQ(reason(PlanKind::forward, features, tiles), "gradients are wanted");
  EXPECT_EQ(reason(PlanKind::dense, {}, tiles), "no gradient is wanted");
  EXPECT_EQ(reason(PlanKind::dense, features, "reference"),
            "kernel reference does not store exp(z)");
  features.entropy_gradient = true;
  EXPECT_EQ(reason(PlanKind::dense, features, tiles),
            "a gradient through the entropy needs the logits again");
  features.entropy_gradient = false;
  features.softcap = 1.0f;
  features.label_smoothing = true;
  EXPECT_EQ(reason(PlanKind::stored, features, tiles),
            "label smoothing under a softcap needs the logits again");
  try {
    plan_head(head, features, request_of(0, PlanKind::dense));
    FAIL();
  } catch (const Unsupported& e) {
    EXPECT_STREQ(e.what(),
                 "no plan: dense: label smoothing under a softcap needs the logits again");
  }
}

TEST(Plan, BudgetBelowEveryPlanNamesTheLeastOne) {
  const HeadShape head{2048, 512, 65536, DType::bf16};
  std::string text;
  try {
    plan_head(head, gradients(), request_of(1000));
    FAIL();
  } catch (const InvalidArgument& e) {
    text = e.what();
  }
  EXPECT_EQ(text.rfind("memory_budget: 1000 B (1000 bytes) is below the least plan, recompute", 0),
            0u)
      << text;
  // The budget that it names is enough, and one byte less is not.
  const std::size_t open = text.rfind('(');
  const std::size_t least = std::stoull(text.substr(open + 1));
  EXPECT_EQ(plan_head(head, gradients(), request_of(least)).workspace_bytes(), least);
  EXPECT_THROW(plan_head(head, gradients(), request_of(least - 1)), InvalidArgument);
}

// Without a budget, the plan is the least workspace within 3 % of the best time. Plans may take at
// most a quarter of the fp32 logits, or three tenths for a dense plan in one chunk.
TEST(Plan, DefaultIsTheLeastWorkspaceNearTheBestTime) {
  for (const DeviceKind device : {DeviceKind::cpu, DeviceKind::cuda}) {
    for (const HeadShape& shape : {HeadShape{8192, 4096, 128256, DType::bf16},
                                   {8192, 2304, 256000, DType::bf16},
                                   {32768, 768, 50304, DType::bf16},
                                   {2048, 512, 65536, DType::bf16},
                                   {4096, 1024, 32768, DType::f32}}) {
      HeadFeatures f = gradients();
      f.d_weight_dtype = f.d_hidden_dtype = shape.dtype;
      PlanRequest request = request_of(0);
      request.device.kind = device;
      request.device.threads = 1;
      if (device == DeviceKind::cuda || shape.dtype == DType::f32) request.device.kernel.clear();
      LossPlan plan;
      try {
        plan = plan_head(shape, f, request);
      } catch (const Unsupported&) {
        ASSERT_EQ(device, DeviceKind::cuda);  // a build without CUDA
        continue;
      }
      SCOPED_TRACE(plan.explain());
      const bool one_chunk = plan.kind == PlanKind::dense &&
                             std::max(plan.first_tokens, plan.chunk_tokens) >= shape.tokens;
      std::size_t limit = plan.logits_bytes() / 4;
      if (one_chunk && plan.workspace_bytes() > limit) limit += limit / 5;
      EXPECT_EQ(plan.default_limit, limit);
      EXPECT_EQ(plan.memory_budget, 0u);
      EXPECT_LE(plan.workspace_bytes(), limit);
      request.memory_budget = limit;
      double best = plan_head(shape, f, request).predicted_seconds;
      // With a budget above the limit, the search may find a faster plan below it.
      request.memory_budget = plan.logits_bytes() / 4 + plan.logits_bytes() / 4 / 5;
      const LossPlan above = plan_head(shape, f, request);
      if (above.workspace_bytes() <= limit) best = std::min(best, above.predicted_seconds);
      // Each search tries sizes of its own, so the fastest plans that two of them know differ a
      // little.
      EXPECT_LE(plan.predicted_seconds, 1.002 * 1.03 * best);
      // A tenth less memory would be slower than that, if possible at all.
      request.memory_budget = plan.workspace_bytes() * 9 / 10;
      try {
        EXPECT_GT(plan_head(shape, f, request).predicted_seconds, 1.03 * best);
      } catch (const InvalidArgument&) {
      }
      EXPECT_NE(
          plan.explain().find("no budget was given: the least workspace within 3 % of the best "
                              "predicted time below " +
                              format_bytes(limit)),
          std::string::npos);
    }
  }
}

// With little memory, half of Llama-3-8B's vocabulary is saved in the rows of the other half, with
// few vocabulary blocks.
TEST(Plan, DWeightsMemoryIsAliasedToSomeVocabAndToBlocks) {
  const HeadShape llama{8192, 4096, 128256, DType::bf16};
  HeadFeatures f = gradients();
  f.d_weight_dtype = f.d_hidden_dtype = DType::bf16;
  PlanRequest request;
  request.memory_budget = 256_MiB;
  request.device.kind = DeviceKind::cuda;
  LossPlan plan;
  try {
    plan = plan_head(llama, f, request);
  } catch (const Unsupported&) {
    GTEST_SKIP() << "a build without CUDA";
  }
  SCOPED_TRACE(plan.explain());
  EXPECT_EQ(plan.kind, PlanKind::stored);
  EXPECT_LE(plan.workspace_bytes(), 256_MiB);
  EXPECT_GT(plan.stored_vocab, llama.vocab * 45 / 100);
  EXPECT_LT(plan.block_vocab, plan.stored_vocab);
  EXPECT_EQ(plan.first_tokens, llama.tokens);
  EXPECT_NE(plan.explain().find("and gradients of vocabulary entries that are not saved"),
            std::string::npos);
  request.kind = PlanKind::recompute;
  const LossPlan recompute = plan_head(llama, f, request);
  EXPECT_EQ(recompute.weight_ranges, 1);
  EXPECT_NE(
      recompute.explain().find("its memory holds gradients of more vocabulary entries at a time"),
      std::string::npos);
  EXPECT_LT(plan.predicted_seconds, 0.9 * recompute.predicted_seconds);
  f.accumulate = true;
  EXPECT_EQ(plan_head(llama, f, request).weight_ranges, 0);
}

// Kernels without GEMMs of their own compute each logit at most twice within 256 MiB as well.
TEST(Plan, DWeightsMemoryIsAliasedByEveryKernel) {
  const HeadShape llama{8192, 4096, 128256, DType::bf16};
  HeadFeatures f = gradients();
  f.d_weight_dtype = f.d_hidden_dtype = DType::bf16;
  for (const char* const kernel : {"sm80", "cublas"}) {
    PlanRequest request;
    request.memory_budget = 256_MiB;
    request.device = {.kind = DeviceKind::cuda, .kernel = kernel};
    LossPlan plan;
    try {
      plan = plan_head(llama, f, request);
    } catch (const Unsupported&) {
      GTEST_SKIP() << "a build without CUDA";
    }
    SCOPED_TRACE(plan.explain());
    EXPECT_LE(plan.passes, 4.0);
    EXPECT_GT(plan.weight_ranges, 0);
    EXPECT_EQ(plan.first_tokens, llama.tokens);
    EXPECT_LE(plan.workspace_bytes(), 256_MiB);
  }
}

// On a GPU, a pass over the saved exponentials makes the gradient through the entropy.
TEST(Plan, EntropyGradientsComeFromSavedExponentialsOnAGpu) {
  const HeadShape llama{8192, 4096, 128256, DType::bf16};
  HeadFeatures f = gradients();
  f.d_weight_dtype = f.d_hidden_dtype = DType::bf16;
  f.entropy = true;
  PlanRequest request;
  request.device.kind = DeviceKind::cuda;
  const auto made = [&] { return plan_head(llama, f, request); };
  double without = 0.0;
  try {
    without = made().predicted_seconds;
  } catch (const Unsupported&) {
    GTEST_SKIP() << "a build without CUDA";
  }
  f.entropy_gradient = true;
  const LossPlan plan = made();
  EXPECT_EQ(plan.kind, PlanKind::dense) << plan.explain();
  EXPECT_EQ(plan.passes, 3.0);
  // 2.1 GB read and written, at 3 to 5 TB/s
  EXPECT_GT(plan.predicted_seconds, without + 0.8e-3);
  EXPECT_LT(plan.predicted_seconds, without + 1.5e-3);
  request.memory_budget = 256_MiB;
  EXPECT_EQ(made().kind, PlanKind::stored) << made().explain();
  f.softcap = 30.0f;
  EXPECT_EQ(made().kind, PlanKind::recompute);
  EXPECT_EQ(candidate(made(), PlanKind::dense).reason,
            "a gradient through the entropy under a softcap needs the logits again");
  f.entropy_gradient = false;
  EXPECT_EQ(made().kind, PlanKind::stored) << made().explain();
}

// A GPU's dense plan may store exponentials of its first chunk in d_weight's memory.
TEST(Plan, DWeightsMemoryIsAliasedWhereItCanBe) {
  const HeadShape llama{8192, 4096, 128256, DType::bf16};
  HeadFeatures f = gradients();
  f.d_weight_dtype = f.d_hidden_dtype = DType::bf16;
  const auto dense = [&](std::size_t budget) {
    PlanRequest request;
    request.memory_budget = budget;
    request.kind = PlanKind::dense;
    request.device.kind = DeviceKind::cuda;
    return plan_head(llama, f, request);
  };
  try {
    dense(4_GiB);
  } catch (const Unsupported&) {
    GTEST_SKIP() << "a build without CUDA";
  }
  EXPECT_EQ(dense(4_GiB).weight_ranges, 0);  // enough memory without it
  const LossPlan half = dense(1200_MiB);
  EXPECT_GT(half.weight_ranges, 0);
  EXPECT_EQ(half.first_tokens, llama.tokens);
  EXPECT_LE(half.predicted_seconds, 1.01 * dense(4_GiB).predicted_seconds);
  EXPECT_NE(half.explain().find("d_weight in " + std::to_string(half.weight_ranges) +
                                " ranges of vocabulary entries"),
            std::string::npos)
      << half.explain();
  const LossPlan several = dense(900_MiB);
  EXPECT_GT(several.weight_ranges, 0);
  EXPECT_LT(several.first_tokens, llama.tokens);
  EXPECT_GT(several.first_tokens, several.chunk_tokens);
  EXPECT_NE(several.explain().find("a chunk of " + std::to_string(several.first_tokens) +
                                   " tokens, then of " + std::to_string(several.chunk_tokens)),
            std::string::npos)
      << several.explain();
  f.d_weight_dtype = DType::f32;  // twice the memory
  EXPECT_EQ(dense(400_MiB).first_tokens, llama.tokens);
  const auto refuses = [&](const std::string& reason) {
    const LossPlan plan = dense(1200_MiB);
    EXPECT_EQ(plan.weight_ranges, 0);
    EXPECT_EQ(plan.first_tokens, 0);
    EXPECT_NE(plan.explain().find(reason), std::string::npos) << plan.explain();
  };
  f.d_weight_strided = true;
  refuses("holds no exp(z) meanwhile: it has gaps");
  f.d_weight_strided = false;
  f.accumulate = true;
  refuses("holds no exp(z) meanwhile: d_weight is added to what it holds");
}

// The forward of a GPU's far field gathers as much at a time as fits before the backward's blocks,
// and never less than they hold.
TEST(Plan, FarForwardsGatherAtLeastABlock) {
  for (const auto& [tokens, dim, vocab] :
       {std::tuple{16, 1024, 100}, std::tuple{1, 8, 1}, std::tuple{40, 4096, 300},
        std::tuple{8192, 4096, 131072}}) {
    const HeadShape shape{tokens, dim, vocab, DType::bf16};
    PlanRequest request;
    request.device.kind = DeviceKind::cuda;
    request.kind = PlanKind::far_backward;
    LossPlan plan;
    try {
      plan = plan_head(shape, gradients(), request);
    } catch (const Unsupported&) {
      GTEST_SKIP() << "a build without CUDA";
    }
    const auto& layout = LossPlanAccess::layout<cuda::Layout>(plan);
    const cuda::Sizes& sizes = layout.sizes;
    EXPECT_GE(layout.far.swept, sizes.vocab_block) << vocab;
    EXPECT_LE(
        layout.far.gathered + static_cast<std::size_t>(
                                  std::min<std::int64_t>(layout.far.swept, shape.vocab) * dim * 2),
        layout.total)
        << vocab;
  }
}

TEST(Plan, DefaultHasTheSameChunksForAnyThreads) {
  for (const HeadShape& shape : {HeadShape{8192, 4096, 128256, DType::bf16},
                                 {2048, 512, 65536, DType::bf16},
                                 {1200, 24, 520, DType::bf16}}) {
    PlanRequest request = request_of(0);
    request.device.threads = 1;
    const LossPlan one = plan_head(shape, gradients(), request);
    for (const int threads : {2, 7, 64}) {
      request.device.threads = threads;
      const LossPlan plan = plan_head(shape, gradients(), request);
      EXPECT_EQ(plan.threads, threads);
      EXPECT_EQ(plan.kind, one.kind);
      EXPECT_EQ(plan.chunk_tokens, one.chunk_tokens);
      EXPECT_EQ(plan.block_vocab, one.block_vocab);
      EXPECT_EQ(plan.stored_vocab, one.stored_vocab);
      EXPECT_GE(plan.workspace_bytes(), one.workspace_bytes());
      EXPECT_EQ(candidate(plan, plan.kind).workspace_bytes, plan.workspace_bytes());
      EXPECT_NEAR(plan.predicted_seconds, one.predicted_seconds / threads, 1e-12);
    }
  }
}

TEST(Plan, DefaultOfASmallProblemIsNotStarved) {
  const HeadShape small{64, 64, 1000, DType::f32};  // 250 KiB of logits
  const LossPlan plan = plan_head(small, gradients(), request_of(0, {}, ""));
  EXPECT_EQ(plan.default_limit, 16_MiB);
  EXPECT_EQ(plan.kind, PlanKind::dense);
}

TEST(Plan, DefaultBudgetGivesWayWhereNothingFits) {
  const HeadShape large{1 << 20, 4096, 131072, DType::bf16};
  const LossPlan plan = plan_head(large, gradients(), request_of(0));
  EXPECT_GT(plan.workspace_bytes(), 0u);
  EXPECT_THROW(plan_head(large, gradients(), request_of(1_MiB)), InvalidArgument);
  // Memory per vocabulary entry alone exceeds the logits of one token.
  const HeadShape wide{1, 64, 4'000'000, DType::bf16};
  HeadFeatures with_bias = gradients();
  with_bias.bias = with_bias.d_bias = true;
  const LossPlan least = plan_head(wide, with_bias, request_of(0));
  EXPECT_GT(least.workspace_bytes(), 16_MiB);
  EXPECT_EQ(least.default_limit, 0u);
  EXPECT_NE(least.explain().find("no budget was given, and no plan takes less"), std::string::npos)
      << least.explain();
}

TEST(Plan, MoreMemoryIsNeverSlowerAndNeverExceeded) {
  std::mt19937_64 random(11);
  const auto draw = [&](std::int64_t low, std::int64_t high) {
    return low + static_cast<std::int64_t>(random() % static_cast<std::uint64_t>(high - low + 1));
  };
  const std::vector<std::string> kernels = kernel_names();
  int planned = 0;
  for (int trial = 0; trial < 120; ++trial) {
    HeadShape shape{draw(1, 5000), draw(1, 700), draw(1, 70000),
                    draw(0, 1) == 0 ? DType::bf16 : DType::f32};
    HeadFeatures f;
    f.d_hidden = draw(0, 1) == 0;
    f.d_weight = draw(0, 1) == 0;
    f.bias = draw(0, 1) == 0;
    f.d_bias = f.bias && draw(0, 1) == 0;
    f.entropy = draw(0, 1) == 0;
    f.argmax = draw(0, 1) == 0;
    f.label_smoothing = draw(0, 2) == 0;
    if (shape.dtype == DType::bf16 && draw(0, 1) == 0) f.d_weight_dtype = DType::bf16;
    const std::string& kernel =
        kernels[static_cast<std::size_t>(draw(0, static_cast<std::int64_t>(kernels.size()) - 1))];
    try {
      const LossPlan plan = plan_head(shape, f, request_of(0, {}, kernel));
      ASSERT_TRUE(plan.default_limit == 0 || plan.chunk_tokens > 0) << plan.explain();
    } catch (const Unsupported&) {
    }
    double before = INFINITY;
    for (std::size_t budget = 64_KiB; budget <= 4_GiB; budget = budget * 3 / 2) {
      LossPlan plan;
      try {
        plan = plan_head(shape, f, request_of(budget, {}, kernel));
      } catch (const InvalidArgument&) {
        EXPECT_EQ(before, INFINITY) << "less memory was enough";
        continue;
      } catch (const Unsupported&) {
        break;  // the kernel does not take the dtype
      }
      ++planned;
      ASSERT_LE(plan.workspace_bytes(), budget) << plan.explain();
      // The time is within 1 % of the best below the budget. Heads with few logits take the plan
      // without a budget, which is within 3 %.
      if (plan.budget_is_plenty) continue;
      ASSERT_LE(plan.predicted_seconds, before * 1.01) << plan.explain();
      before = std::min(before, plan.predicted_seconds);
    }
  }
  EXPECT_GT(planned, 1000);
}

// One panel of tokens and one vocabulary tile suffice beyond inputs and outputs. So any budget that
// holds them has a plan, on any kernel and for any head.
TEST(Plan, AnyBudgetHasAPlan) {
  const HeadShape head{8192, 4096, 128256, DType::bf16};
  for (const std::string& kernel : kernel_names(false)) {
    for (const bool options : {false, true}) {
      for (const DType dtype : {DType::bf16, DType::f16, DType::f32}) {
        HeadShape shape = head;
        shape.dtype = dtype;
        HeadFeatures f = gradients();
        f.d_hidden_dtype = f.d_weight_dtype = dtype;
        f.bias = f.d_bias = f.label_smoothing = f.vocab_weight = f.entropy = options;
        SCOPED_TRACE(kernel + " " + std::string(name_of(dtype)));
        try {
          for (const std::size_t budget : {256_MiB, 64_MiB, 24_MiB}) {
            const LossPlan plan = plan_head(shape, f, request_of(budget, {}, kernel));
            EXPECT_LE(plan.workspace_bytes(), budget);
            EXPECT_EQ(candidate(plan, plan.kind).passes, plan.passes);
          }
        } catch (const Unsupported&) {
          EXPECT_NE(dtype, DType::bf16) << "a kernel without bf16";
        }
      }
    }
  }
}

// A separate d_weight costs time, and no plan has it that fits without it.
TEST(Plan, DWeightHasAPassOfItsOwnWhereItsSumsDoNotFit) {
  HeadFeatures f = gradients();
  f.d_weight_dtype = DType::bf16;
  const HeadShape head{2048, 512, 65536, DType::bf16};
  const LossPlan small = plan_head(head, f, request_of(6_MiB));
  EXPECT_GT(small.weight_vocab, 0);
  EXPECT_EQ(small.kind, PlanKind::recompute);
  EXPECT_EQ(small.passes, 5.0);
  EXPECT_NE(small.explain().find(" vocabulary entries at a time, in a GEMM of its own"),
            std::string::npos);
  EXPECT_EQ(plan_head(head, f, request_of(256_MiB)).weight_vocab, 0);
  EXPECT_EQ(plan_head(head, f, request_of(0)).weight_vocab, 0);
  EXPECT_EQ(plan_head(head, gradients(), request_of(6_MiB)).weight_vocab, 0);
}

TEST(Plan, ExplainSaysEverything) {
  const LossPlan plan = plan_head({2048, 512, 65536, DType::bf16}, gradients(), request_of(64_MiB));
  const std::string text = plan.explain();
  EXPECT_NE(text.find("plan " + std::string(name_of(plan.kind))), std::string::npos);
  EXPECT_NE(text.find("kernel amx_bf16_emulated, 2 threads"), std::string::npos);
  EXPECT_NE(text.find("workspace " + format_bytes(plan.workspace_bytes())), std::string::npos);
  EXPECT_NE(text.find("logits would be 512.0 MiB"), std::string::npos) << text;
  for (const PlanCandidate& c : plan.candidates) {
    if (c.kind == plan.kind) continue;
    EXPECT_FALSE(c.reason.empty());
    EXPECT_NE(text.find("not " + std::string(name_of(c.kind)) + ": " + c.reason), std::string::npos)
        << text;
  }
}

TEST(Plan, IsPure) {
  const HeadShape head{300, 40, 5000, DType::f32};
  PlanRequest request = request_of(0, {}, "scalar");
  const LossPlan a = plan_head(head, gradients(), request);
  const LossPlan b = plan_head(head, gradients(), request);
  EXPECT_EQ(a.explain(), b.explain());
  EXPECT_EQ(a.workspace_bytes(), b.workspace_bytes());
}

TEST(Plan, BadRequests) {
  const HeadShape good{4, 4, 4, DType::f32};
  const auto message = [&](HeadShape shape, HeadFeatures features, PlanRequest request) {
    try {
      plan_head(shape, features, request);
    } catch (const InvalidArgument& e) {
      return std::string(e.what());
    }
    return std::string("accepted");
  };
  HeadShape shape = good;
  shape.tokens = -1;
  EXPECT_EQ(message(shape, {}, {}), "tokens: expected 0 or more, got -1");
  shape = good;
  shape.dim = 0;
  EXPECT_EQ(message(shape, {}, {}), "dim: expected 1 or more, got 0");
  shape = good;
  shape.vocab = 0;
  EXPECT_EQ(message(shape, {}, {}), "vocab: expected 1 to 2147483519, got 0");
  shape = good;
  shape.dtype = DType::i32;
  EXPECT_EQ(message(shape, {}, {}), "dtype: expected f32, bf16 or f16, got i32");
  shape = good;
  shape.tokens = std::int64_t{1} << 40;
  shape.dim = std::int64_t{1} << 40;
  EXPECT_NE(message(shape, {}, {}).find("overflow the address space"), std::string::npos);
  HeadFeatures features;
  features.targets_per_token = 0;
  EXPECT_EQ(message(good, features, {}), "targets_per_token: expected 1 to 65536, got 0");
  PlanRequest request;
  request.stored_fraction = 1.5;
  EXPECT_EQ(message(good, {}, request), "stored_fraction: expected 0 to 1, got 1.5");
  request = {};
  request.device.threads = -2;
  EXPECT_EQ(message(good, {}, request), "threads: expected 0 or more, got -2");
}

TEST(Bytes, ParsedAndPrinted) {
  const std::pair<const char*, std::size_t> good[] = {{"0", 0},
                                                      {"4096", 4096},
                                                      {"1KiB", 1024},
                                                      {"1.5 KiB", 1536},
                                                      {"512MiB", 512_MiB},
                                                      {"2GiB", 2_GiB},
                                                      {"1.5GB", 1500000000},
                                                      {"10kB", 10000},
                                                      {"3 MB", 3000000},
                                                      {"7B", 7}};
  for (const auto& [text, bytes] : good) EXPECT_EQ(parse_bytes(text), bytes) << text;
  for (const char* text : {"", " ", "MiB", "-1", "1..5MiB", "12 parsecs", "99999999999999GiB",
                           "nan", "inf", "1e400", "0x10"}) {
    EXPECT_THROW(parse_bytes(text), InvalidArgument) << text;
  }
  EXPECT_EQ(format_bytes(1536), "1.5 KiB");
  EXPECT_EQ(format_bytes(512_MiB), "512.0 MiB");
  EXPECT_EQ(format_bytes(3), "3 B");
}

}  // namespace
}  // namespace logitless::test
