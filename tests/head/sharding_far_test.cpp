// The far field of words spread over ranks against float64 and against one rank: the same tiles in
// one order.
#include <gtest/gtest.h>

#include <cmath>
#include <string>
#include <vector>

#include "head/far_shards.h"
#include "kernels/cpu_head.h"
#include "support/far_both.h"
#include "support/far_cases.h"
#include "support/mirror.h"

namespace logitless::test {
namespace {

// One block of tokens, so that every rank has the same ones in it.
HeadSpec spec_of(std::int64_t tokens = 120, std::int64_t tiles = 28) {
  HeadSpec spec;
  spec.tokens = tokens;
  spec.dim = 9;
  spec.vocab = tiles * 128 + 37;
  spec.seed = 3;
  return spec;
}

struct Option {
  const char* name;
  void (*change)(HeadSpec&);
};
const Option kPlain = {"plain", [](HeadSpec&) {}};
const Option kBf16 = {"bf16", [](HeadSpec& s) { s.dtype = DType::bf16; }};
const Option kSmoothing = {"smoothing_of_classes", [](HeadSpec& s) {
                             s.label_smoothing = 0.2f;
                             s.class_weight = s.token_weight = s.bias = true;
                             s.ignored = 0.3;
                           }};
const Option kBackward[] = {
    kPlain,
    kBf16,
    kSmoothing,
    {"softcap_scale_bias",
     [](HeadSpec& s) {
       s.softcap = 4.0f;
       s.logit_scale = 1.3f;
       s.bias = true;
       s.z_loss = 0.01f;
     }},
    {"several_targets",
     [](HeadSpec& s) {
       s.per_token = 3;
       s.ignored = 0.2;
     }},
    {"reduction_none", [](HeadSpec& s) { s.reduction = Reduction::none; }},
};
const Option kBoth[] = {
    kPlain,
    kBf16,
    kSmoothing,
    {"scale_z_loss",
     [](HeadSpec& s) {
       s.logit_scale = 0.8f;
       s.z_loss = 0.01f;
     }},
};

// All on all ranks; uneven; none on some.
std::vector<TokenSplit> tokens_of(int ranks, std::int64_t tokens) {
  if (ranks == 1) return {{"replicated"}};
  return token_splits(ranks, tokens, false);
}

// All of them for the first option, and for the others by turns.
std::vector<int> ranks_of(const Option& option, const Option* first) {
  if (&option == first) return {1, 2, 4};
  return {(&option - first) % 2 == 0 ? 2 : 4};
}

std::string trace(const char* option, int ranks, const TokenSplit& tokens) {
  return std::string(option) + " on " + std::to_string(ranks) + ", tokens " + tokens.name;
}

TEST(ShardingFar, BackwardIsTheOraclesForEachOption) {
  for (const Option& option : kBackward) {
    for (const int ranks : ranks_of(option, kBackward)) {
      HeadSpec spec = spec_of();
      option.change(spec);
      FarProblem problem(spec);
      const FarSplit split = deal_tiles(problem.order, ranks);
      problem.order = split.whole;
      FarGrid grid;
      RunSpec run;
      for (const TokenSplit& tokens : tokens_of(ranks, spec.tokens)) {
        SCOPED_TRACE(trace(option.name, ranks, tokens));
        run.chunk_tokens = spec.tokens * ranks;  // one chunk, whichever rank the tokens are on
        if (run.tau == 0.0f) {                   // the cut into blocks does not depend on it
          run.tau = 0.02f;
          grid = far_grid(call_sharded_far(problem, split, run, tokens));
          ASSERT_FALSE(HasFailure());
          run.tau = far_tau(problem.oracle, upstream_of(problem, run), problem.order, grid, 0.3);
        }
        FarAnswer a = call_sharded_far(problem, split, run, tokens);
        ASSERT_FALSE(HasFailure());
        a.oracle = far_oracle(problem.oracle, upstream_of(problem, run), problem.order, far_grid(a),
                              a.tau);
        EXPECT_LT(a.statistics.far.kept, 0.6);
        expect_far_field(problem, run, a);
        EXPECT_GE(a.statistics.far.imbalance, 1.0);
        EXPECT_LE(a.statistics.far.imbalance, ranks);
      }
    }
  }
}

TEST(ShardingFar, BothWaysIsTheOraclesForEachOption) {
  for (const Option& option : kBoth) {
    for (const int ranks : ranks_of(option, kBoth)) {
      HeadSpec spec = spec_of();
      option.change(spec);
      FarBothProblem problem(spec);
      const FarSplit split = deal_tiles(problem.order, ranks);
      problem.order = split.whole;
      for (const TokenSplit& tokens : tokens_of(ranks, spec.tokens)) {
        SCOPED_TRACE(trace(option.name, ranks, tokens));
        RunSpec run;
        run.plan = PlanKind::far_both;
        run.chunk_tokens = spec.tokens * ranks;
        run.tau = 0.02f;
        run.kernel = call_far_both(problem, run).plan.kernel;
        run.tau = 0.0f;
        run.tau = static_cast<float>(run_far_both(problem, run).tau);  // in a gap of the masses
        FarBothAnswer a;
        static_cast<HeadAnswer&>(a) = call_sharded_far(problem, split, run, tokens);
        ASSERT_FALSE(HasFailure());
        a.tau = static_cast<double>(run.tau);
        const FarGrid grid = far_grid(a);
        a.oracle = far_both_oracle(problem.oracle, upstream_of(problem, run), problem.order, grid,
                                   find_head_kernel(a.plan.kernel).far_dtype, a.tau);
        expect_far_both(problem, run, a);
      }
    }
  }
}

}  // namespace
}  // namespace logitless::test
