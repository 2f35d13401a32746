// Results have the same bits for any number of ranks and any split of the vocabulary.
#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "head/sharding/sharded.h"
#include "support/mirror.h"
#include "support/sanitizers.h"

namespace logitless::test {
namespace {

class ShardingBits : public testing::TestWithParam<std::string> {};

TEST_P(ShardingBits, OfLogProbabilitiesDoNotDependOnTheNumberOfRanks) {
  if (kThreadSanitizer && GetParam() == "reference")
    GTEST_SKIP() << "its ranks exchange what those of other kernels do";
  for (const DType dtype : tested_dtypes(GetParam())) {
    // A peaked distribution, and a partial last tile.
    HeadSpec spec{.tokens = 37,
                  .dim = 24,
                  .vocab = 2040,
                  .dtype = dtype,
                  .bias = true,
                  .ignored = 0.1,
                  .weight_scale = 6.0};
    if (!takes_shards(GetParam(), spec)) continue;
    const HeadProblem problem(spec);
    RunSpec run;
    run.kernel = GetParam();
    run.threads = 1;
    run.chunk_tokens = is_device_kernel(GetParam()) ? 0 : 40;  // a GPU takes all in one chunk
    const HeadResult one = run_sharded(problem, {.vocab = even_vocab(1, 2040), .run = run});
    // On a GPU, exponentials have another reference if weights are gathered.
    const TokenSplit alone = with_weights_moving({"one rank", {37}}, 256);
    const HeadResult one_moving =
        run_sharded(problem, {.vocab = even_vocab(1, 2040), .tokens = alone, .run = run});
    ASSERT_FALSE(HasFailure());
    std::vector<VocabSplit> splits = {
        vocab_at("2", {0, 1024, 2040}), vocab_at("2, uneven", {0, 256, 2040}),
        vocab_at("4", {0, 512, 1024, 1536, 2040}),
        vocab_at("8", {0, 256, 512, 768, 1024, 1280, 1536, 1792, 2040})};
    splits.push_back(splits[2]);  // interleaved blocks of 256 entries
    splits.back().table = true;
    splits.back().name = "4, a table";
    for (auto& vocab_ids : splits.back().ranks) vocab_ids.clear();
    for (std::int32_t j = 0; j < 2040; ++j) splits.back().ranks[j / 256 * 3 % 4].push_back(j);
    for (const VocabSplit& vocab_shards : splits) {
      TokenSplit spread{"tokens spread", std::vector<std::int64_t>(vocab_shards.ranks.size(), 0)};
      for (int i = 0; i < 37; ++i) ++spread.counts[i % 3 % vocab_shards.ranks.size()];
      for (const TokenSplit& tokens :
           {TokenSplit{"tokens the same"}, spread, with_weights_moving(spread, 256),
            with_columns(spread, 256)}) {
        if (!takes_shards(GetParam(), spec, vocab_shards, tokens.exchange)) continue;
        SCOPED_TRACE(vocab_shards.name + ", " + tokens.name);
        const HeadResult result =
            run_sharded(problem, {.vocab = vocab_shards, .tokens = tokens, .run = run});
        ASSERT_FALSE(HasFailure());
        const bool apart = tokens.exchange == ExchangeMode::weights && is_device_kernel(GetParam());
        const HeadResult& expected = apart ? one_moving : one;
        EXPECT_EQ(result.lse.bytes(), expected.lse.bytes());
        EXPECT_EQ(result.log_prob.bytes(), expected.log_prob.bytes());
        EXPECT_EQ(result.target_logit.bytes(), expected.target_logit.bytes());
        if (!tokens.sharded()) {  // their order is the same
          EXPECT_EQ(result.loss.bytes(), one.loss.bytes());
          for (Tensor HeadResult::*field : {&HeadResult::d_weight, &HeadResult::d_bias}) {
            // Each rank brings exponentials into the range of f16 by its own greatest logit.
            if (dtype == DType::f16)
              EXPECT_LE(relative_error((result.*field).values(), (one.*field).values()), 1e-3);
            else
              EXPECT_EQ((result.*field).bytes(), (one.*field).bytes());
          }
        }
      }
    }
  }
}

INSTANTIATE_TEST_SUITE_P(AllKernels, ShardingBits, testing::ValuesIn(tested_kernels()),
                         [](const auto& kernel) { return kernel.param; });
GTEST_ALLOW_UNINSTANTIATED_PARAMETERIZED_TEST(ShardingBits);  // without a GPU

}  // namespace
}  // namespace logitless::test
