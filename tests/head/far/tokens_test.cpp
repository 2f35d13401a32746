// The order of tokens in the far field. Its blocks select fewer tiles; on a GPU it is the
// documented one, by float64 masses. Also blocks of ignored tokens.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>

#include "support/far_cases.h"
#include "support/mirror.h"

namespace logitless::test {
namespace {

constexpr std::int64_t kTile = 128;

class FarTokens : public FarKernels {};

// Returns the keys of tokens by their masses above tau: first the part of the order (of 64) with
// the last such tile, then the mean position in 1024ths. Tokens that select nothing come after
// them, and ignored ones last.
std::vector<std::int64_t> keys_of(const FarProblem& problem, double tau) {
  const OracleProblem& p = problem.oracle;
  const OracleLogits logits = oracle_logits(p);
  const std::int64_t tiles = (p.vocab + kTile - 1) / kTile;
  std::vector<std::int64_t> keys;
  for (std::int64_t i = 0; i < p.tokens; ++i) {
    std::int64_t count = 0, last = 0, sum = 0;
    for (std::int64_t tile = 0; tile < tiles; ++tile) {
      double mass = 0;
      for (std::int64_t at = tile * kTile; at < std::min(p.vocab, (tile + 1) * kTile); ++at)
        mass += std::exp(logits.z[i * p.vocab + problem.order.vocab_ids()[at]] - logits.lse[i]);
      EXPECT_GT(std::abs(std::log(mass / tau)), 1e-6) << "too near tau for this test";
      if (mass <= tau) continue;
      ++count;
      last = tile;
      sum += tile;
    }
    keys.push_back(oracle_ignored(p, i) ? 1 << 20
                   : count == 0         ? 1 << 19
                                        : last * 64 / tiles * 1024 + sum * 1024 / (count * tiles));
  }
  return keys;
}

// Chunks are cut from the tokens sorted by target, with ignored ones last, and each is sorted.
std::vector<std::int64_t> expected_order(const FarProblem& problem, double tau,
                                         std::int64_t chunk_tokens) {
  std::vector<std::int64_t> order = far_tokens(problem.oracle, problem.order, FarGrid());
  for (std::int64_t i = 0; i < problem.oracle.tokens; ++i)
    if (oracle_ignored(problem.oracle, i)) order.push_back(i);
  const std::vector<std::int64_t> keys = keys_of(problem, tau);
  for (auto first = order.begin(); first != order.end();) {
    const auto end = first + std::min<std::ptrdiff_t>(chunk_tokens, order.end() - first);
    std::stable_sort(first, end, [&](std::int64_t a, std::int64_t b) { return keys[a] < keys[b]; });
    first = end;
  }
  return order;
}

TEST_P(FarTokens, AreInTheOrderOfWhatTheyKeep) {
  HeadSpec s = spec(1500, 16, 40 * kTile + 37, 9);
  s.ignored = 0.2;
  const FarProblem problem(s, 14.0);
  RunSpec r = run();
  r.tau = 0.004f;
  for (const bool chunks : {false, true}) {
    SCOPED_TRACE(chunks);
    r.chunk_tokens = chunks ? 0 : s.tokens;
    if (chunks) r.budget = least_far_budget(problem, r);
    const FarResult a = call_far(problem, r);
    EXPECT_EQ(a.plan.chunk_tokens < s.tokens, chunks);
    if (is_device_kernel(GetParam())) {
      EXPECT_EQ(a.order_of_tokens,
                expected_order(problem, static_cast<double>(r.tau), a.plan.chunk_tokens));
    } else {  // a 16-bit mass may be on either side of tau; only tokens that are not ignored
      std::vector<std::int64_t> taken = a.order_of_tokens;
      std::vector<std::int64_t> all = far_tokens(problem.oracle, problem.order, FarGrid());
      std::sort(taken.begin(), taken.end());
      std::sort(all.begin(), all.end());
      EXPECT_EQ(taken, all);
    }
    if (chunks) continue;  // of one block each
    EXPECT_FALSE(a.statistics.far.dense_fallback);
    // It selects less than the order by targets.
    FarGrid grid = far_grid(a);
    grid.order_of_tokens.clear();
    const FarOracle by_targets = far_oracle(problem.oracle, upstream_of(problem, r), problem.order,
                                            grid, static_cast<double>(r.tau));
    EXPECT_LT(a.statistics.far.selected, 0.95 * by_targets.selected);
  }
}

// If all tiles are selected, blocks of ignored tokens still are not: their logits do not exist.
TEST_P(FarTokens, IgnoredBlocksAreLeftOutWhereEverythingIsKept) {
  HeadSpec s = spec(1024, 16, 9 * kTile + 37, 4);
  s.bias = true;
  RunSpec r = run();
  r.tau = 1e-7f;
  const FarResult full = call_far(FarProblem(s), r);  // its values stay in the memory
  EXPECT_TRUE(full.statistics.far.dense_fallback);
  for (const double ignored : {0.3, 0.8}) {
    s.ignored = ignored;
    const FarProblem problem(s);
    const FarResult a = call_far(problem, r);
    expect_everything_selected(a, oracle_gradients(problem.oracle, upstream_of(problem, r)),
                               s.dtype);
  }
}

GTEST_ALLOW_UNINSTANTIATED_PARAMETERIZED_TEST(FarTokens);  // without a GPU
INSTANTIATE_TEST_SUITE_P(AllKernels, FarTokens, testing::ValuesIn(far_kernels()),
                         [](const auto& kernel) { return kernel.param; });

}  // namespace
}  // namespace logitless::test
