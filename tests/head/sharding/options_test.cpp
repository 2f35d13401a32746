// Sharded vocabulary and tokens: every option and kernel against float64 and against one rank.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <functional>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "head/sharding/sharded.h"
#include "support/infinite_logits.h"
#include "support/mirror.h"
#include "support/sanitizers.h"

namespace logitless::test {
namespace {

struct Option {
  std::string name;
  std::function<void(HeadSpec&, RunSpec&)> set;
};
const std::vector<Option>& options() {
  static const std::vector<Option> table = {
      {"plain", [](HeadSpec&, RunSpec&) {}},
      {"scale_bias", [](HeadSpec& s, RunSpec&) { s.bias = true, s.logit_scale = -0.7f; }},
      {"softcap", [](HeadSpec& s, RunSpec&) { s.softcap = 2.0f; }},
      {"smoothing", [](HeadSpec& s, RunSpec&) { s.label_smoothing = 0.2f; }},
      {"smoothing_softcap",
       [](HeadSpec& s, RunSpec&) { s.label_smoothing = 0.2f, s.softcap = 3.0f; }},
      {"class_weight", [](HeadSpec& s, RunSpec&) { s.class_weight = true; }},
      {"smoothing_class_weight",
       [](HeadSpec& s, RunSpec&) { s.class_weight = true, s.label_smoothing = 0.1f; }},
      {"token_weight", [](HeadSpec& s, RunSpec&) { s.token_weight = true, s.ignored = 0.3; }},
      {"z_loss", [](HeadSpec& s, RunSpec& r) { s.z_loss = 0.01f, r.grad_loss = 1.5; }},
      {"targets",
       [](HeadSpec& s, RunSpec& r) { s.per_token = 3, s.ignored = 0.2, r.chunk_tokens = 8; }},
      {"all_ignored", [](HeadSpec& s, RunSpec&) { s.ignored = 1.0, s.bias = true; }},
      {"none", [](HeadSpec& s, RunSpec&) { s.reduction = Reduction::none; }},
      {"grad_losses",
       [](HeadSpec& s, RunSpec& r) {
         s.reduction = Reduction::none;
         for (std::int64_t i = 0; i < s.tokens; ++i) r.grad_losses.push_back(0.25 * (i % 11) - 1.0);
       }},
      {"sum", [](HeadSpec& s, RunSpec& r) { s.reduction = Reduction::sum, r.chunk_tokens = 8; }},
      {"extras", [](HeadSpec& s, RunSpec& r) { s.ignored = 0.2, r.extras = true; }},
      {"recompute", [](HeadSpec&, RunSpec& r) { r.plan = PlanKind::recompute; }},
      {"stored", [](HeadSpec&, RunSpec& r) { r.plan = PlanKind::stored; }},
      {"bf16", [](HeadSpec& s, RunSpec&) { s.dtype = DType::bf16; }},
      {"f16_out",
       [](HeadSpec& s, RunSpec& r) {
         s.dtype = DType::f16, r.gradient_dtype = DType::f16, r.chunk_tokens = 8;
       }},
      {"forward", [](HeadSpec& s, RunSpec& r) { s.bias = true, r.gradients = false; }},
      {"everything",
       [](HeadSpec& s, RunSpec& r) {
         s.bias = s.class_weight = s.token_weight = true;
         s.per_token = 2, s.ignored = 0.2, s.label_smoothing = 0.1f, s.z_loss = 0.01f;
         s.softcap = 4.0f, s.logit_scale = 1.2f, r.extras = true, r.chunk_tokens = 9;
       }},
  };
  return table;
}

void expect_extras(const HeadProblem& problem, const HeadResult& result) {
  const OracleProblem& p = problem.oracle;
  const OracleLogits exact = oracle_logits(p);
  for (std::int64_t i = 0; i < p.tokens; ++i) {
    const double* const z = exact.z.data() + i * p.vocab;
    const bool ignored = oracle_ignored(p, i);
    if (result.entropy.defined()) {
      double entropy = 0.0;
      for (std::int64_t j = 0; j < p.vocab; ++j)
        entropy -= std::exp(z[j] - exact.lse[i]) * (z[j] - exact.lse[i]);
      EXPECT_NEAR(result.entropy.get(i), ignored ? 0.0 : entropy,
                  2e-6 * (1 + std::abs(exact.lse[i])));
      const auto best = std::max_element(z, z + p.vocab) - z;
      EXPECT_EQ(result.argmax.get(i), ignored ? -1.0 : static_cast<double>(best));
    }
    if (!result.log_prob.defined()) continue;
    const double log_prob = ignored ? 0.0 : z[p.targets[i]] - exact.lse[i];
    EXPECT_NEAR(result.log_prob.get(i), log_prob, 4e-6 * (1 + std::abs(log_prob)));
  }
}

// Expects two results of the same head to agree within their error bounds.
void expect_close(const HeadResult& a, const HeadResult& b, DType dtype) {
  EXPECT_LE(relative_error(a.lse.values(), b.lse.values()), kLseBound);
  EXPECT_LE(relative_error(a.loss.values(), b.loss.values()), 1e-5);
  for (Tensor HeadResult::*field :
       {&HeadResult::d_hidden, &HeadResult::d_weight, &HeadResult::d_bias})
    EXPECT_LE(relative_error((a.*field).values(), (b.*field).values()), 2 * gradient_bound(dtype));
}

// A GPU's kernels take 16-bit heads and split tokens at pairs of tiles.
struct Sizes {
  std::int64_t tokens, dim, vocab, chunk;
};
constexpr Sizes kOfCpu{11, 6, 300, 8}, kOfGpu{300, 24, 1100, 256};

// Returns the machine's default kernel on the CPU, or those of a GPU that take ranks.
std::vector<std::string> kernels_of_options() {
  const std::vector<std::string> kernels = tested_kernels();
  HeadSpec spec{.tokens = kOfGpu.tokens, .dim = kOfGpu.dim, .vocab = kOfGpu.vocab};
  std::vector<std::string> names;
  for (const std::string& kernel : kernels) {
    if (!is_device_kernel(kernel)) continue;
    spec.dtype = narrow_dtype(kernel);
    if (takes_shards(kernel, spec)) names.push_back(kernel);
  }
  if (!kernels.empty() && !is_device_kernel(kernels.front())) names.emplace_back();
  return names;
}

class ShardingOptions : public testing::TestWithParam<std::tuple<std::string, Option>> {};

TEST_P(ShardingOptions, MatchFloat64AndOneRank) {
  const auto& [kernel, option] = GetParam();
  const bool gpu = is_device_kernel(kernel);
  const Sizes& sizes = gpu ? kOfGpu : kOfCpu;
  HeadSpec spec{.tokens = sizes.tokens,
                .dim = sizes.dim,
                .vocab = sizes.vocab,
                .dtype = gpu ? narrow_dtype(kernel) : DType::f32,
                .weight_scale = 2.0,
                .seed = 4};
  RunSpec run;
  run.kernel = kernel;
  run.threads = 1;
  option.set(spec, run);
  if (gpu && run.chunk_tokens > 0) run.chunk_tokens = sizes.chunk;
  if (!takes_shards(kernel, spec)) GTEST_SKIP() << kernel << " takes no such head";
  const HeadProblem problem(spec);
  const HeadResult alone = run_head(problem, run);
  for (const int ranks : {1, 2, 3, 8}) {
    if (gpu && ranks == 8) continue;  // one GPU runs the ranks one after another
    // Options decide what ranks exchange, their number how they wait for each other: bits_test.cpp
    // has 2, 4 and 8 under ThreadSanitizer.
    if (kThreadSanitizer && ranks != 3) continue;
    for (const VocabSplit& vocab_shards : vocab_splits(ranks, spec.vocab)) {
      for (const TokenSplit& tokens : token_splits(ranks, spec.tokens)) {
        if (!takes_shards(kernel, spec, vocab_shards, tokens.exchange)) continue;
        // exp(z) is not saved
        if (tokens.exchange == ExchangeMode::weights && run.plan == PlanKind::stored) continue;
        SCOPED_TRACE(testing::Message() << ranks << " ranks, vocabulary entries "
                                        << vocab_shards.name << ", tokens " << tokens.name);
        ShardedRun sharded{.vocab = vocab_shards, .tokens = tokens, .run = run};
        if (gpu && tokens.sharded()) sharded.run.chunk_tokens *= ranks;
        const HeadResult result = run_sharded(problem, sharded);
        if (HasFailure()) return;
        expect_matches_oracle(problem, run, result);
        expect_extras(problem, result);
        expect_close(result, alone, spec.dtype);
        EXPECT_EQ(result.statistics.valid_tokens, alone.statistics.valid_tokens);
        EXPECT_EQ(result.statistics.correct, alone.statistics.correct);
        EXPECT_NEAR(result.statistics.mean_lse, alone.statistics.mean_lse, 1e-5);
        if (HasFailure()) return;
      }
    }
  }
}

std::string name_of_case(const testing::TestParamInfo<std::tuple<std::string, Option>>& of) {
  const std::string& kernel = std::get<0>(of.param);
  const std::string& option = std::get<1>(of.param).name;
  return kernel.empty() ? option : kernel + "_" + option;
}

INSTANTIATE_TEST_SUITE_P(All, ShardingOptions,
                         testing::Combine(testing::ValuesIn(kernels_of_options()),
                                          testing::ValuesIn(options())),
                         name_of_case);
GTEST_ALLOW_UNINSTANTIATED_PARAMETERIZED_TEST(ShardingOptions);  // without a GPU

class ShardingKernels : public testing::TestWithParam<std::string> {};

TEST_P(ShardingKernels, MatchFloat64) {
  for (const DType dtype : tested_dtypes(GetParam())) {
    HeadSpec spec{.tokens = 70,
                  .dim = 40,
                  .vocab = 700,
                  .dtype = dtype,
                  .bias = true,
                  .ignored = 0.1,
                  .weight_scale = 3.0,
                  .label_smoothing = 0.1f};
    if (!takes_shards(GetParam(), spec)) continue;
    const HeadProblem problem(spec);
    RunSpec run;
    run.kernel = GetParam();
    run.extras = true;
    const TokenSplit spread{"spread", {50, 0, 20}};
    for (const TokenSplit& tokens :
         {TokenSplit{"replicated"}, spread, with_weights_moving(spread, 256)}) {
      SCOPED_TRACE(tokens.name);
      const HeadResult result = run_sharded(
          problem, {.vocab = vocab_at("uneven", {0, 129, 130, 700}), .tokens = tokens, .run = run});
      if (HasFailure()) return;
      expect_matches_oracle(problem, run, result);
      expect_extras(problem, result);
    }
  }
}

// Few tokens count: chunks, and all tokens of a rank, may have none.
TEST_P(ShardingKernels, HeavyMasksMatchFloat64) {
  HeadSpec spec{.tokens = 70,
                .dim = 40,
                .vocab = 700,
                .dtype = tested_dtypes(GetParam()).back(),
                .bias = true,
                .weight_scale = 3.0};
  if (!takes_shards(GetParam(), spec)) return;
  const TokenSplit spread{"spread", {50, 0, 20}};
  const std::pair<const char*, bool (*)(std::int64_t)> masks[] = {
      {"one token", [](std::int64_t i) { return i == 61; }},
      {"none on rank 0", [](std::int64_t i) { return i >= 50; }},
      {"none on rank 2", [](std::int64_t i) { return i < 50; }},
      {"no token of a chunk", [](std::int64_t i) { return i < 16 || (i >= 32 && i < 50); }},
      {"a quarter", [](std::int64_t i) { return i % 4 == 1; }},
      {"a tenth", [](std::int64_t i) { return i % 10 == 3; }}};
  for (const auto& [name, counts] : masks) {
    HeadProblem problem(spec);
    for (std::int64_t i = 0; i < spec.tokens; ++i) {
      if (counts(i)) continue;
      problem.targets.set(i, -100.0);
      problem.oracle.targets[static_cast<std::size_t>(i)] = -100;
    }
    RunSpec run;
    run.kernel = GetParam();
    run.extras = true;
    run.chunk_tokens = is_device_kernel(GetParam()) ? 0 : 16;
    for (const TokenSplit& tokens :
         {TokenSplit{"replicated"}, spread, with_weights_moving(spread, 256)}) {
      SCOPED_TRACE(testing::Message() << name << ", " << tokens.name);
      const HeadResult result = run_sharded(
          problem, {.vocab = vocab_at("uneven", {0, 129, 130, 700}), .tokens = tokens, .run = run});
      if (HasFailure()) return;
      expect_matches_oracle(problem, run, result);
      expect_extras(problem, result);
      if (HasFailure()) return;
    }
  }
}

TEST_P(ShardingKernels, ALogitOfInfinityIsThatOfPyTorch) {
  for (const DType dtype : {DType::f32, DType::bf16}) {  // products of f16 stay finite
    const HeadProblem problem = infinite_problem(dtype);
    if (!takes_shards(GetParam(), problem.spec)) continue;
    RunSpec run;
    run.kernel = GetParam();
    run.extras = true;
    for (const bool gradients : {false, true}) {
      run.gradients = gradients;
      for (const std::vector<std::int64_t>& borders :
           {std::vector<std::int64_t>{0, 139, 140, 300}, {0, 141, 141, 300}}) {
        for (const TokenSplit& tokens : token_splits(3, problem.spec.tokens)) {
          SCOPED_TRACE(testing::Message() << tokens.name << ' ' << borders[1] << ' ' << gradients);
          const VocabSplit vocab_shards = vocab_at("uneven", borders);
          if (!takes_shards(GetParam(), problem.spec, vocab_shards, tokens.exchange)) continue;
          const HeadResult result =
              run_sharded(problem, {.vocab = vocab_shards, .tokens = tokens, .run = run});
          if (HasFailure()) return;
          expect_infinite(problem, run, result);
          if (HasFailure()) return;
        }
      }
    }
  }
}

INSTANTIATE_TEST_SUITE_P(AllKernels, ShardingKernels, testing::ValuesIn(tested_kernels()),
                         [](const auto& kernel) { return kernel.param; });
GTEST_ALLOW_UNINSTANTIATED_PARAMETERIZED_TEST(ShardingKernels);

}  // namespace
}  // namespace logitless::test
