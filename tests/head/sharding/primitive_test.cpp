// head_forward and head_backward with a sharded vocabulary: every output and cotangent against one
// rank, which primitive_test.cpp compares with float64.
#include <gtest/gtest.h>

#include <cmath>
#include <random>
#include <string>
#include <vector>

#include "head/sharding/sharded.h"
#include "support/mirror.h"

namespace logitless::test {
namespace {

// A GPU's kernels take 16-bit heads, and have tiles of 128 tokens.
struct Sizes {
  std::int64_t tokens, dim, vocab;
  std::vector<std::int64_t> tokens_of_ranks, first_entries;
};
const Sizes kOfCpu{10, 8, 300, {7, 0, 3}, {0, 1, 120, 300}};
const Sizes kOfGpu{300, 24, 1100, {140, 0, 160}, {0, 1, 520, 1100}};

// Outputs, cotangents and gradients of one rank's tokens and vocabulary shard.
struct Primitive {
  Primitive(const RankProblem& rank, const std::vector<double>& cotangents)
      : s(rank.part.spec), per_slot(s.tokens * s.per_token) {
    const auto tensor = [&] { return Tensor(DType::f32, {s.tokens}); };
    const auto slots = [&] { return Tensor(DType::f32, {s.tokens, s.per_token}); };
    lse = tensor(), entropy = tensor(), weighted = tensor();
    argmax = Tensor(DType::i32, {s.tokens});
    target_logit = slots(), log_prob = slots();
    g_lse = tensor(), g_entropy = tensor(), g_weighted = tensor();
    g_target = slots(), g_log_prob = slots();
    d_hidden = Tensor(DType::f32, {s.tokens, s.dim});
    d_weight = Tensor(DType::f32, {s.vocab, s.dim});
    d_bias = Tensor(DType::f32, {s.vocab});
    // The cotangents of each token of the full problem: 3 numbers, and 2 for each target.
    const std::int64_t each = 3 + 2 * s.per_token;
    for (std::int64_t i = 0; i < s.tokens; ++i) {
      const double* const g = cotangents.data() + (rank.first_token + i) * each;
      g_lse.set(i, g[0]), g_entropy.set(i, g[1]), g_weighted.set(i, g[2]);
      for (int k = 0; k < s.per_token; ++k) {
        g_target.set(i * s.per_token + k, g[3 + 2 * k]);
        g_log_prob.set(i * s.per_token + k, g[4 + 2 * k]);
      }
    }
  }

  void run(const std::string& kernel, const RankProblem& rank, const Sharding& sharding) {
    Mirror mirror(kernel);
    const CrossEntropyInputs from = mirror.in(rank.part.inputs());
    HeadInputs in{.hidden = from.hidden,
                  .weight = from.weight,
                  .targets = from.targets,
                  .bias = from.bias,
                  .vocab_weight = from.class_weight,
                  .sharding = sharding};
    const HeadOptions options{.softcap = s.softcap, .logit_scale = s.logit_scale};
    const Context context = make_context(kernel, 2);
    const HeadOutputs out{.lse = mirror.out(lse.view()),
                          .target_logit = mirror.out(target_logit.view()),
                          .log_prob = mirror.out(log_prob.view()),
                          .entropy = mirror.out(entropy.view()),
                          .weighted_logit_sum = mirror.out(weighted.view()),
                          .argmax = mirror.out(argmax.view())};
    const LossPlan forward = plan_head_forward(context, options, in, out);
    head_forward(context, forward, options, in, out, Workspace(context, forward));
    const auto& c = *this;
    const HeadCotangents g{.lse = mirror.in(c.g_lse.view()),
                           .target_logit = mirror.in(c.g_target.view()),
                           .log_prob = mirror.in(c.g_log_prob.view()),
                           .entropy = mirror.in(c.g_entropy.view()),
                           .weighted_logit_sum = mirror.in(c.g_weighted.view())};
    const HeadGradients to{mirror.out(d_hidden.view()), mirror.out(d_weight.view()),
                           mirror.out(d_bias.view())};
    const LossPlan backward = plan_head_backward(context, options, in, g, to);
    const Workspace workspace(context, backward);
    head_backward(context, backward, options, in, g, to, workspace);
    mirror.finish();
    const std::vector<std::byte> first = d_weight.bytes();
    head_backward(context, backward, options, in, g, to, workspace);  // same results again
    mirror.finish();
    EXPECT_EQ(d_weight.bytes(), first);
  }

  HeadSpec s;
  std::int64_t per_slot;
  Tensor lse, entropy, weighted, argmax, target_logit, log_prob;
  Tensor g_lse, g_entropy, g_weighted, g_target, g_log_prob;
  Tensor d_hidden, d_weight, d_bias;
};

void append(std::vector<double>& all, const Tensor& part) {
  for (const double v : part.values()) all.push_back(v);
}

class ShardingPrimitive : public testing::TestWithParam<std::string> {};

TEST_P(ShardingPrimitive, EqualsThatOfOneRank) {
  const std::string& kernel = GetParam();
  const bool gpu = is_device_kernel(kernel);
  const Sizes& sizes = gpu ? kOfGpu : kOfCpu;
  for (const float softcap : {0.0f, 3.0f}) {
    HeadSpec spec{.tokens = sizes.tokens,
                  .dim = sizes.dim,
                  .vocab = sizes.vocab,
                  .dtype = gpu ? narrow_dtype(kernel) : DType::f32,
                  .per_token = 2,
                  .bias = true,
                  .class_weight = true,
                  .ignored = 0.2,
                  .softcap = softcap,
                  .logit_scale = 1.3f};
    if (!takes_shards(kernel, spec)) GTEST_SKIP() << kernel << " takes no such head";
    const HeadProblem problem(spec);
    std::mt19937 random(9);
    std::normal_distribution<double> normal;
    std::vector<double> cotangents(sizes.tokens * (3 + 2 * 2));
    for (double& g : cotangents) g = normal(random);

    const RankProblem whole(problem, {.vocab = even_vocab(1, sizes.vocab)}, 0);
    Primitive alone(whole, cotangents);
    alone.run(kernel, whole, {});
    const TokenSplit spread{"spread", sizes.tokens_of_ranks};
    for (const TokenSplit& tokens : {TokenSplit{"the same"}, spread, with_weights_moving(spread)}) {
      const std::vector<std::int64_t>& counts = tokens.counts;
      SCOPED_TRACE(tokens.name);
      const ShardedRun run{.vocab = vocab_at("uneven", sizes.first_entries), .tokens = tokens};
      const Ranks group = make_group(kernel, 3);
      std::vector<RankProblem> ranks;
      std::vector<Primitive> made;
      for (int r = 0; r < 3; ++r) {
        ranks.emplace_back(problem, run, r);
        made.emplace_back(ranks.back(), cotangents);
      }
      const std::vector<Outcome> outcomes = run_ranks(group, [&](Communicator& me) {
        const auto r = static_cast<std::size_t>(me.rank());
        made[r].run(kernel, ranks[r], ranks[r].sharding(group[r]));
      });
      for (const Outcome& o : outcomes) ASSERT_EQ(o.text, "");
      const double exact = gpu ? 2e-5 : 2e-6;
      const double rounded = gpu ? gradient_bound(DType::bf16) : exact;
      const auto expect_equal = [&](const char* name, Tensor Primitive::*field, bool of_vocab,
                                    double bound) {
        std::vector<double> all;
        for (std::size_t r = 0; r < 3; ++r) {
          if (of_vocab || !counts.empty() || r == 0) append(all, made[r].*field);
          if (of_vocab || !counts.empty()) continue;
          EXPECT_EQ((made[r].*field).bytes(), (made[0].*field).bytes()) << name;
        }
        EXPECT_LE(relative_error(all, (alone.*field).values()), bound) << name;
      };
      expect_equal("lse", &Primitive::lse, false, exact);
      expect_equal("entropy", &Primitive::entropy, false, exact);
      expect_equal("weighted", &Primitive::weighted, false, exact);
      expect_equal("argmax", &Primitive::argmax, false, exact);
      expect_equal("target_logit", &Primitive::target_logit, false, exact);
      expect_equal("log_prob", &Primitive::log_prob, false, exact);
      expect_equal("d_hidden", &Primitive::d_hidden, false, rounded);
      expect_equal("d_weight", &Primitive::d_weight, true, rounded);
      expect_equal("d_bias", &Primitive::d_bias, true, rounded);
    }
  }
}

INSTANTIATE_TEST_SUITE_P(AllKernels, ShardingPrimitive, testing::ValuesIn(tested_kernels()),
                         [](const auto& kernel) { return kernel.param; });
GTEST_ALLOW_UNINSTANTIATED_PARAMETERIZED_TEST(ShardingPrimitive);  // without a GPU

}  // namespace
}  // namespace logitless::test
