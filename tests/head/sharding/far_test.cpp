// The vocabulary-parallel far field against float64, and against one rank with the same tiles in
// one order.
#include <gtest/gtest.h>

#include <cmath>
#include <string>
#include <vector>

#include "head/sharding/far_shards.h"
#include "kernels/cpu_head.h"
#include "support/far_both.h"
#include "support/far_cases.h"
#include "support/mirror.h"

namespace logitless::test {
namespace {

// Returns a spec with one block of tokens, so that every rank has the same tokens in it.
HeadSpec spec_of(std::int64_t tokens = 120, std::int64_t tiles = 28) {
  HeadSpec spec;
  spec.tokens = tokens;
  spec.dim = 9;
  spec.vocab = tiles * 128 + 37;
  spec.seed = 3;
  return spec;
}

// Inserts bf16 after the first option.
std::vector<FarOption> with_bf16(std::vector<FarOption> options) {
  options.insert(options.begin() + 1, {"bf16", [](HeadSpec& s) { s.dtype = DType::bf16; }});
  return options;
}

// Returns splits of tokens: all on all ranks, uneven, and none on some.
std::vector<TokenSplit> tokens_of(int ranks, std::int64_t tokens) {
  if (ranks == 1) return {{"replicated"}};
  return token_splits(ranks, tokens, false);
}

// Returns all numbers of ranks for the first option, and one of them in turn for the others.
std::vector<int> ranks_of(std::size_t option) {
  if (option == 0) return {1, 2, 4};
  return {option % 2 == 0 ? 2 : 4};
}

std::string trace(const char* option, int ranks, const TokenSplit& tokens) {
  return std::string(option) + " on " + std::to_string(ranks) + ", tokens " + tokens.name;
}

TEST(ShardingFar, BackwardIsTheOraclesForEachOption) {
  const std::vector<FarOption> options = with_bf16(far_backward_options());
  for (std::size_t o = 0; o < options.size(); ++o) {
    const FarOption& option = options[o];
    for (const int ranks : ranks_of(o)) {
      HeadSpec spec = spec_of();
      option.change(spec);
      FarProblem problem(spec);
      const FarSplit split = interleave_tiles(problem.order, ranks);
      problem.order = split.whole;
      FarGrid grid;
      RunSpec run;
      for (const TokenSplit& tokens : tokens_of(ranks, spec.tokens)) {
        SCOPED_TRACE(trace(option.name, ranks, tokens));
        run.chunk_tokens = spec.tokens * ranks;  // one chunk, whichever rank has the tokens
        if (run.tau == 0.0f) {                   // the blocks do not depend on it
          run.tau = 0.02f;
          grid = far_grid(call_sharded_far(problem, split, run, tokens));
          ASSERT_FALSE(HasFailure());
          run.tau = far_tau(problem.oracle, upstream_of(problem, run), problem.order, grid, 0.3);
        }
        FarResult a = call_sharded_far(problem, split, run, tokens);
        ASSERT_FALSE(HasFailure());
        a.oracle = far_oracle(problem.oracle, upstream_of(problem, run), problem.order, far_grid(a),
                              a.tau);
        EXPECT_LT(a.statistics.far.selected, 0.6);
        expect_far_field(problem, run, a);
        EXPECT_GE(a.statistics.far.imbalance, 1.0);
        EXPECT_LE(a.statistics.far.imbalance, ranks);
      }
    }
  }
}

TEST(ShardingFar, BothWaysIsTheOraclesForEachOption) {
  const std::vector<FarOption> options = with_bf16(far_both_options());
  for (std::size_t o = 0; o < options.size(); ++o) {
    const FarOption& option = options[o];
    for (const int ranks : ranks_of(o)) {
      HeadSpec spec = spec_of();
      option.change(spec);
      FarBothProblem problem(spec);
      const FarSplit split = interleave_tiles(problem.order, ranks);
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
        FarBothResult a;
        static_cast<HeadResult&>(a) = call_sharded_far(problem, split, run, tokens);
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
