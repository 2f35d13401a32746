// Vocabulary orders: permutations by strata, with similar entries in the same tile.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <filesystem>
#include <numeric>
#include <random>
#include <utility>

#include "head/far/order_sample.h"
#include "logitless/tensor_file.h"
#include "support/mirror.h"
#include "support/problem.h"
#include "support/refusal.h"
#include "support/temp_dir.h"

namespace logitless::test {
namespace {

constexpr std::int64_t kTile = 128;

struct RandomWeight {
  RandomWeight(std::int64_t vocab, std::int64_t dim, DType dtype = DType::f32,
               std::uint64_t seed = 1)
      : weight(dtype, {vocab, dim}) {
    std::mt19937_64 random(seed);
    std::normal_distribution<double> normal;
    for (std::int64_t i = 0; i < weight.numel(); ++i) weight.set(i, normal(random));
    for (std::int64_t j = 0; j < vocab; ++j)
      average.push_back(static_cast<float>(std::exp(normal(random))));
  }
  ConstTensorView view() const { return weight.view(); }
  Tensor weight;
  std::vector<float> average;
};

std::vector<std::int64_t> vocab_of(const VocabOrder& order) {
  return {order.vocab_ids().begin(), order.vocab_ids().end()};
}

// Expects a permutation, its inverse, and shares that sum to 1 in every tile.
void expect_valid(const VocabOrder& order, std::int64_t vocab) {
  ASSERT_EQ(order.vocab(), vocab);
  ASSERT_FALSE(order.empty());
  std::vector<std::int64_t> sorted = vocab_of(order);
  std::sort(sorted.begin(), sorted.end());
  for (std::int64_t j = 0; j < vocab; ++j) ASSERT_EQ(sorted[j], j);
  for (std::int64_t at = 0; at < vocab; ++at)
    ASSERT_EQ(order.positions()[order.vocab_ids()[at]], at);
  for (std::int64_t first = 0; first < vocab; first += kTile) {
    const std::int64_t end = std::min(vocab, first + kTile);
    double average = 0, share = 0;
    for (std::int64_t at = first; at < end; ++at) {
      average += static_cast<double>(order.average()[order.vocab_ids()[at]]);
      share += static_cast<double>(order.share()[at]);
    }
    EXPECT_NEAR(share, 1.0, 1e-5);
    for (std::int64_t at = first; at < end && average > 0; ++at) {
      const double expected = static_cast<double>(order.average()[order.vocab_ids()[at]]) / average;
      EXPECT_NEAR(order.share()[at], expected, 1e-6 * expected + 1e-30);
    }
  }
}

// Orders made by the context of a kernel: the first tested one of the CPU and of a GPU, since all
// kernels of a device make the same.
class Orders : public testing::TestWithParam<std::string> {
 protected:
  VocabOrder make(const RandomWeight& weights, const OrderOptions& options = {},
                  int threads = 2) const {
    Mirror mirror(GetParam());
    return make_vocab_order(make_context(GetParam(), threads), mirror.in(weights.view()),
                            weights.average, options);
  }
};

TEST_P(Orders, IsAPermutationForAnySizes) {
  for (const std::int64_t vocab : {1, 2, 127, 128, 129, 255, 256, 257, 2048, 2049, 5000}) {
    for (const std::int64_t strata : {1, 3, 16, 4096}) {
      SCOPED_TRACE(testing::Message() << vocab << " vocabulary entries, " << strata << " strata");
      const RandomWeight weights(vocab, vocab % 2 == 0 ? 5 : 1);
      expect_valid(make(weights, {strata, 3}), vocab);
    }
  }
}

// Strata consist of full tiles, as many as requested if the vocabulary suffices.
TEST_P(Orders, AveragesFallFromStratumToStratum) {
  for (const std::int64_t vocab : {4096, 5000, 16 * 128 + 1}) {
    const RandomWeight weights(vocab, 6);
    const std::int64_t strata = 8;
    const VocabOrder order = make(weights, {strata, 0});
    const std::int64_t per = ((vocab + strata - 1) / strata + kTile - 1) / kTile * kTile;
    float lowest = INFINITY;
    std::int64_t descents = 0;
    for (std::int64_t first = 0; first < vocab; first += per) {
      float low = INFINITY, high = 0.0f;
      for (std::int64_t at = first; at < std::min(vocab, first + per); ++at) {
        const float average = weights.average[order.vocab_ids()[at]];
        low = std::min(low, average);
        high = std::max(high, average);
        if (at > first && average > weights.average[order.vocab_ids()[at - 1]]) ++descents;
      }
      EXPECT_LE(high, lowest) << "stratum at " << first;
      lowest = low;
    }
    EXPECT_GT(descents, 0) << "sorted by average alone";
  }
}

TEST_P(Orders, OneStratumOfATileEachIsByAverage) {
  const RandomWeight weights(1000, 4);
  const VocabOrder order = make(weights, {4096, 0});
  std::vector<std::int64_t> by_average(1000);
  std::iota(by_average.begin(), by_average.end(), 0);
  std::sort(by_average.begin(), by_average.end(), [&](std::int64_t a, std::int64_t b) {
    return weights.average[a] > weights.average[b];
  });
  for (std::int64_t first = 0; first < 1000; first += kTile) {
    const auto end = std::min<std::int64_t>(1000, first + kTile);
    std::vector<std::int64_t> expected(by_average.begin() + first, by_average.begin() + end);
    std::sort(expected.begin(), expected.end());  // a tile is ordered by id
    EXPECT_TRUE(std::equal(expected.begin(), expected.end(), order.vocab_ids().begin() + first));
  }
}

// Shuffled clusters of 128 entries, far apart along one line, or each half along its own line.
struct Clusters : RandomWeight {
  Clusters(std::int64_t clusters, bool line, DType dtype)
      : RandomWeight(clusters * kTile, kDim, dtype, 7), cluster(average.size()) {
    std::mt19937_64 random(11);
    std::normal_distribution<double> normal;
    std::vector<double> direction(kDim);
    for (double& d : direction) d = normal(random) / std::sqrt(static_cast<double>(kDim));
    std::vector<std::int64_t> vocab_ids(cluster.size());
    std::iota(vocab_ids.begin(), vocab_ids.end(), 0);
    std::shuffle(vocab_ids.begin(), vocab_ids.end(), random);
    for (std::size_t i = 0; i < vocab_ids.size(); ++i) {
      const std::int64_t c = static_cast<std::int64_t>(i) / kTile;
      cluster[vocab_ids[i]] = c;
      for (std::int64_t k = 0; k < kDim; ++k) {
        double center = line ? 3.0 * static_cast<double>(c) * direction[k] : 0.0;
        for (std::int64_t bit = clusters / 2, far = 16; !line && bit > 0; bit /= 2, far /= 4) {
          if (k == (5 * (c / (2 * bit)) + bit) % kDim)
            center = (c / bit) % 2 == 0 ? static_cast<double>(far) : -static_cast<double>(far);
        }
        weight.set(vocab_ids[i] * kDim + k, center + 0.1 * normal(random));
      }
    }
    std::fill(average.begin(), average.end(), 1.0f);
  }
  static constexpr std::int64_t kDim = 24;
  std::vector<std::int64_t> cluster;
};

TEST_P(Orders, ATileGathersACluster) {
  for (const bool line : {true, false}) {
    for (const DType dtype : {DType::f32, DType::bf16, DType::f16}) {
      const std::int64_t count = line ? 11 : 8;
      const Clusters weights(count, line, dtype);
      const VocabOrder order = make(weights, {1, 0});
      std::vector<int> seen(count, 0);
      for (std::int64_t tile = 0; tile < count; ++tile) {
        const std::int64_t cluster = weights.cluster[order.vocab_ids()[tile * kTile]];
        ++seen[cluster];
        for (std::int64_t at = tile * kTile; at < (tile + 1) * kTile; ++at)
          ASSERT_EQ(weights.cluster[order.vocab_ids()[at]], cluster) << line << ", tile " << tile;
      }
      for (const int n : seen) EXPECT_EQ(n, 1);
    }
  }
}

// Equal averages and distinguishable rows: the result does not depend on memory layout.
TEST_P(Orders, AreTheSameForThreadsRunsDtypesAndRowsApart) {
  const RandomWeight weights(6000, 17, DType::bf16);
  RandomWeight wide(6000, 17, DType::f32);
  for (std::int64_t i = 0; i < wide.weight.numel(); ++i) wide.weight.set(i, weights.weight.get(i));
  const VocabOrder first = make(weights, {5, 42}, 1);
  for (const int threads : {1, 2, 3, 7}) {
    EXPECT_EQ(vocab_of(make(weights, {5, 42}, threads)), vocab_of(first));
    EXPECT_EQ(vocab_of(make(wide, {5, 42}, threads)), vocab_of(first));
  }
  RandomWeight apart(6000, 24, DType::bf16);
  apart.weight.fill(NAN);
  for (std::int64_t j = 0; j < 6000; ++j)
    for (std::int64_t k = 0; k < 17; ++k)
      apart.weight.set(j * 24 + k, weights.weight.get(j * 17 + k));
  const std::int64_t shape[] = {6000, 17}, strides[] = {24, 1};
  Mirror mirror(GetParam());
  const ConstTensorView view(apart.view().data(), DType::bf16, shape, strides);
  EXPECT_EQ(vocab_of(make_vocab_order(make_context(GetParam()), mirror.in(view), weights.average,
                                      {5, 42})),
            vocab_of(first));
}

TEST(VocabOrder, IsTheSameForColumnsApart) {
  const RandomWeight weights(6000, 17, DType::bf16);
  const VocabOrder first =
      make_vocab_order(make_context("", 1), weights.view(), weights.average, {5, 42});
  // Rows and columns have gaps with NaN.
  const std::int64_t shape[] = {6000, 17};
  for (const auto& [row, column] : {std::pair<std::int64_t, std::int64_t>{40, 2}, {1, 6001}}) {
    Tensor apart(DType::bf16, {6000 * row + 17 * column});
    for (std::int64_t i = 0; i < apart.numel(); ++i) apart.set(i, NAN);
    for (std::int64_t j = 0; j < 6000; ++j)
      for (std::int64_t k = 0; k < 17; ++k)
        apart.set(j * row + k * column, weights.weight.get(j * 17 + k));
    const std::int64_t strides[] = {row, column};
    const ConstTensorView view(apart.view().data(), DType::bf16, shape, strides);
    EXPECT_EQ(vocab_of(make_vocab_order(make_context("", 2), view, weights.average, {5, 42})),
              vocab_of(first))
        << row;
  }
}

TEST_P(Orders, OddWeightsDoNotCrash) {
  for (const double value : {0.0, 1.0, static_cast<double>(NAN), static_cast<double>(INFINITY)}) {
    RandomWeight weights(1000, 9);
    weights.weight.fill(value);
    expect_valid(make(weights), 1000);
    std::fill(weights.average.begin(), weights.average.end(), 0.0f);
    expect_valid(make(weights, {1, 0}), 1000);
  }
  RandomWeight weights(1500, 9);
  for (std::int64_t j = 0; j < 1500; j += 3) weights.weight.set(j * 9 + j % 9, NAN);
  for (std::int64_t j = 1; j < 1500; j += 7)
    weights.weight.set(j * 9, j % 2 == 0 ? INFINITY : -INFINITY);
  const VocabOrder order = make(weights, {2, 0});
  expect_valid(order, 1500);
  EXPECT_EQ(vocab_of(make(weights, {2, 0}, 3)), vocab_of(order));
}

// Random rows in a few directions: a tile's residuals are those of a bisection on any device.
TEST_P(Orders, AreAsGoodAsTheCpus) {
  constexpr std::int64_t kVocab = 64 * kTile, kDim = 16;
  RandomWeight weights(kVocab, kDim, DType::bf16, 5);
  for (std::int64_t j = 0; j < kVocab; ++j) {
    for (std::int64_t k = 0; k < kDim; ++k)
      weights.weight.set(j * kDim + k,
                         weights.weight.get(j * kDim + k) / static_cast<double>(1 + k));
  }
  const auto residual = [&](const VocabOrder& order) {
    double sum = 0;
    for (std::int64_t first = 0; first < kVocab; first += kTile) {
      for (std::int64_t k = 0; k < kDim; ++k) {
        double mean = 0, square = 0;
        for (std::int64_t at = first; at < first + kTile; ++at) {
          const double v = weights.weight.get(order.vocab_ids()[at] * kDim + k);
          mean += v / kTile;
          square += v * v;
        }
        sum += square - kTile * mean * mean;
      }
    }
    return sum;
  };
  std::vector<std::int64_t> given(kVocab);
  std::iota(given.begin(), given.end(), 0);
  const double cpu =
      residual(make_vocab_order(make_context(""), weights.view(), weights.average, {1, 0}));
  const double got = residual(make(weights, {1, 0}));
  EXPECT_NEAR(got, cpu, 0.03 * cpu);
  EXPECT_LT(got, 0.5 * residual(VocabOrder(given, weights.average)));
}

std::vector<std::string> order_kernels() {
  std::vector<std::string> kernels = tested_kernels();
  kernels.resize(std::min<std::size_t>(kernels.size(), 1));
  return kernels;
}
GTEST_ALLOW_UNINSTANTIATED_PARAMETERIZED_TEST(Orders);  // without a GPU
INSTANTIATE_TEST_SUITE_P(FirstKernel, Orders, testing::ValuesIn(order_kernels()),
                         [](const auto& kernel) { return kernel.param; });

TEST(VocabOrder, ShareOfATileWithoutProbabilityIsEven) {
  std::vector<std::int64_t> vocab_ids(300);
  std::iota(vocab_ids.begin(), vocab_ids.end(), 0);
  std::vector<float> average(300, 0.0f);
  for (int j = 128; j < 256; ++j) average[j] = static_cast<float>(j);
  const VocabOrder order(vocab_ids, average);
  expect_valid(order, 300);
  EXPECT_EQ(order.share()[5], 1.0f / 128.0f);
  EXPECT_EQ(order.share()[299], 1.0f / 44.0f);
}

TEST(VocabOrder, BadArgumentsAreNamed) {
  const auto make = [](std::vector<std::int64_t> vocab_ids, std::vector<float> average) {
    return message_of([&] { VocabOrder(vocab_ids, average); });
  };
  EXPECT_EQ(make({}, {}), "vocab_ids: expected 1 to 2147483519 vocabulary entries, got 0");
  EXPECT_EQ(make({0, 1}, {1.0f}), "average: expected 2 values, got 1");
  EXPECT_EQ(make({0, 2}, {1.0f, 1.0f}), "vocab_ids: 2 at position 1 is outside [0, 2)");
  EXPECT_EQ(make({-1, 0}, {1.0f, 1.0f}), "vocab_ids: -1 at position 0 is outside [0, 2)");
  EXPECT_EQ(make({1, 1}, {1.0f, 1.0f}), "vocab_ids: 1 stands at position 0 and at 1");
  EXPECT_EQ(make({1, 0}, {1.0f, -2.0f}),
            "average: expected numbers >= 0, got -2 for vocabulary entry 1");
  EXPECT_EQ(make({1, 0}, {INFINITY, 1.0f}),
            "average: expected numbers >= 0, got inf for vocabulary entry 0");
  EXPECT_NE(make({1, 0}, {NAN, 1.0f}).find("average: expected numbers >= 0, got"),
            std::string::npos);
  EXPECT_EQ(make({1, 0}, {0.0f, 1.0f}), "accepted");

  const RandomWeight weights(300, 4);
  const Context context = make_context("");
  const auto order = [&](const ConstTensorView& weight, std::vector<float> average,
                         OrderOptions options = {}) {
    return message_of([&] { make_vocab_order(context, weight, average, options); });
  };
  EXPECT_EQ(order(weights.view(), std::vector<float>(299, 1.0f)),
            "average: expected 300 values, got 299");
  EXPECT_EQ(order(weights.view(), weights.average, {0, 0}), "strata: expected 1 to 4096, got 0");
  EXPECT_EQ(order(weights.view(), weights.average, {4097, 0}),
            "strata: expected 1 to 4096, got 4097");
  EXPECT_EQ(order({}, weights.average), "weight: expected [V, D] of f32, bf16 or f16, got none");
  const Tensor integers(DType::i32, {300, 4});
  EXPECT_EQ(order(integers.view(), weights.average),
            "weight: expected [V, D] of f32, bf16 or f16, got i32[300, 4]");
  std::vector<float> negative = weights.average;
  negative[7] = -1.0f;
  EXPECT_EQ(order(weights.view(), negative),
            "average: expected numbers >= 0, got -1 for vocabulary entry 7");
}

class OrderFiles : public testing::Test {
 protected:
  std::string path(const char* name) const { return folder_.file(name); }
  const TempDir folder_;
};

TEST_F(OrderFiles, RoundTrip) {
  const RandomWeight weights(700, 5);
  const VocabOrder order = make_vocab_order(make_context(""), weights.view(), weights.average);
  order.save(path("order"));
  const VocabOrder back = VocabOrder::load(path("order"));
  EXPECT_EQ(vocab_of(back), vocab_of(order));
  EXPECT_TRUE(std::equal(order.average().begin(), order.average().end(), back.average().begin()));
  EXPECT_TRUE(std::equal(order.share().begin(), order.share().end(), back.share().begin()));
  EXPECT_TRUE(
      std::equal(order.positions().begin(), order.positions().end(), back.positions().begin()));
}

TEST_F(OrderFiles, BadOnesAreRefused) {
  EXPECT_EQ(message_of([&] { VocabOrder().save(path("empty")); }),
            "order: expected one that was made or loaded, got an empty one");
  EXPECT_FALSE(std::filesystem::exists(path("empty")));
  EXPECT_THROW(VocabOrder::load(path("missing")), Error);
  EXPECT_THROW((VocabOrder({{0}}, {{1.0f}}).save(path("no/such/folder"))), Error);

  const auto refused = [&](DType vocab_type, std::vector<double> vocab_ids, DType average_type,
                           std::vector<double> average, const char* name = "average") {
    const Tensor w(vocab_type, {static_cast<std::int64_t>(vocab_ids.size())}, vocab_ids);
    const Tensor a(average_type, {static_cast<std::int64_t>(average.size())}, average);
    const NamedTensor tensors[] = {{"vocab_ids", w.view()}, {name, a.view()}};
    write_safetensors(path("bad"), tensors, {});
    return message_of<Error>([&] { VocabOrder::load(path("bad")); });
  };
  EXPECT_EQ(refused(DType::i64, {1, 0}, DType::f32, {1, 1}), "accepted");
  EXPECT_EQ(refused(DType::i32, {1, 0}, DType::f32, {1, 1}),
            path("bad") + ": vocab_ids: expected i64[vocab], got i32[2]");
  EXPECT_EQ(refused(DType::i64, {1, 0}, DType::bf16, {1, 1}),
            path("bad") + ": average: expected f32[2], got bf16[2]");
  EXPECT_EQ(refused(DType::i64, {1, 1}, DType::f32, {1, 1}),
            "vocab_ids: 1 stands at position 0 and at 1");
  EXPECT_EQ(refused(DType::i64, {1, 0}, DType::f32, {1}),
            path("bad") + ": average: expected f32[2], got f32[1]");
  EXPECT_NE(refused(DType::i64, {1, 0}, DType::f32, {1, 1}, "mean").find("average"),
            std::string::npos);
  // A truncated file is an error, not a crash.
  VocabOrder({{0}}, {{1.0f}}).save(path("torn"));
  std::filesystem::resize_file(path("torn"), std::filesystem::file_size(path("torn")) - 1);
  EXPECT_THROW(VocabOrder::load(path("torn")), Error);
}

// An order of 4096 entries has 32 tiles. Sizes whose products overflow to 0 in 64 bits are no empty
// moments.
TEST_F(OrderFiles, MomentsOfOtherSizesAreRefused) {
  std::vector<std::int64_t> vocab_ids(4096);
  std::iota(vocab_ids.begin(), vocab_ids.end(), 0);
  const std::vector<float> values(vocab_ids.size(), 1.0f);
  const auto refused = [&](std::initializer_list<std::int64_t> axes,
                           std::initializer_list<std::int64_t> variance,
                           std::initializer_list<std::int64_t> caution) {
    const NamedTensor tensors[] = {
        {"vocab_ids", ConstTensorView(vocab_ids.data(), DType::i64, {4096})},
        {"average", ConstTensorView(values.data(), DType::f32, {4096})},
        {"axes", ConstTensorView(values.data(), DType::f32, axes)},
        {"variance", ConstTensorView(values.data(), DType::f32, variance)},
        {"log2_caution", ConstTensorView(values.data(), DType::f32, caution)}};
    write_safetensors(path("bad"), tensors, {});
    return message_of<Error>([&] { VocabOrder::load(path("bad")); });
  };
  const std::string bad = path("bad") + ": ";
  constexpr std::int64_t kHuge = std::int64_t{1} << 59;
  EXPECT_EQ(refused({2, 2}, {32, 2}, {32}), "accepted");
  EXPECT_EQ(refused({2, 2}, {2, 32}, {32}),
            bad + "variance: expected f32[32, dim], got f32[2, 32]");
  EXPECT_EQ(refused({2, 3}, {32, 2}, {32}), bad + "axes: expected f32[2, 2], got f32[2, 3]");
  EXPECT_EQ(refused({2, 2}, {32, 2}, {31}), bad + "log2_caution: expected f32[32], got f32[31]");
  EXPECT_NE(refused({kHuge, 0}, {32, 0}, {32}), "accepted");
  EXPECT_NE(refused({kHuge, 0}, {0, kHuge}, {32}), "accepted");
  EXPECT_NE(refused({0, 0}, {32, 0}, {32}), "accepted");
  const VocabOrder order(vocab_ids, values);
  EXPECT_EQ(message_of([&] { order.with_moments(kHuge, {}, {}, std::span(values).first(32)); }),
            "dim: expected 1 to 2147483647, got 576460752303423488");
}

struct AverageCase {
  std::int64_t tokens, vocab;
  float scale, softcap;
  bool bias;
  std::size_t budget;
};

class AverageProbability : public testing::TestWithParam<std::string> {
 protected:
  // Checks the mean softmax over the tokens, for every dtype that the kernel takes.
  void check(const AverageCase& c) const {
    for (const DType dtype : {DType::f32, DType::bf16, DType::f16}) {
      HeadSpec spec;
      spec.tokens = c.tokens;
      spec.vocab = c.vocab;
      spec.dim = 7;
      spec.dtype = dtype;
      spec.bias = c.bias;
      spec.softcap = c.softcap;
      spec.logit_scale = c.scale;
      spec.weight_scale = 2.0;
      if (!accepts(GetParam(), spec)) continue;
      SCOPED_TRACE(describe(spec));
      HeadProblem problem(spec);
      if (c.bias && c.softcap == 0.0f && c.scale > 0.0f) {
        for (std::int64_t j = 0; j < c.vocab; j += 5) problem.bias.set(j, -INFINITY);
        problem.refresh_oracle();
      }
      const CrossEntropyInputs in = problem.inputs();
      Mirror mirror(GetParam());
      const std::vector<float> got = average_probability(
          make_context(GetParam()), mirror.in(in.hidden), mirror.in(in.weight), mirror.in(in.bias),
          c.scale, c.softcap, is_device_kernel(GetParam()) ? 0 : c.budget);
      const OracleLogits logits = oracle_logits(problem.oracle);
      std::vector<double> exact(c.vocab, 0.0);
      for (std::int64_t i = 0; i < c.tokens; ++i) {
        for (std::int64_t j = 0; j < c.vocab; ++j) {
          const double z = logits.z[i * c.vocab + j];
          const double r = c.softcap == 0.0f ? 0.0 : z / static_cast<double>(c.softcap);
          exact[j] += std::exp(z - logits.lse[i]) * (1.0 - r * r) / static_cast<double>(c.tokens);
        }
      }
      EXPECT_LE(relative_error({got.begin(), got.end()}, exact), gradient_bound(dtype));
      for (std::int64_t j = 0; j < c.vocab; ++j) {
        EXPECT_GE(got[j], 0.0f);
        if (exact[j] == 0.0) {
          EXPECT_EQ(got[j], 0.0f) << "a masked vocabulary entry";
        }
      }
    }
  }
};

TEST_P(AverageProbability, IsThatOfFloat64) {
  const AverageCase cases[] = {{70, 391, 1.0f, 0.0f, false, 0},
                               {200, 300, -1.5f, 0.0f, true, 0},
                               {5, 1, 1.0f, 0.0f, false, 0},
                               {33, 130, 2.0f, 0.0f, true, 0},
                               {700, 300, 1.0f, 0.0f, true, 600000}};
  for (const AverageCase& c : cases) check(c);
}

// Includes the softcap's slope, like the gradients of the weight.
TEST_P(AverageProbability, UnderASoftcap) {
  check({33, 257, 0.6f, 4.0f, true, 0});
  check({1, 130, 2.0f, 3.0f, false, 0});
}

GTEST_ALLOW_UNINSTANTIATED_PARAMETERIZED_TEST(AverageProbability);  // without a GPU
INSTANTIATE_TEST_SUITE_P(AllKernels, AverageProbability, testing::ValuesIn(tested_kernels()),
                         [](const auto& kernel) { return kernel.param; });

TEST(AverageProbabilityErrors, AreNamed) {
  HeadSpec spec;
  const HeadProblem problem(spec);
  const CrossEntropyInputs in = problem.inputs();
  const Context context = make_context("");
  const auto call = [&](const ConstTensorView& hidden, float scale, float cap) {
    return message_of([&] { average_probability(context, hidden, in.weight, {}, scale, cap); });
  };
  EXPECT_EQ(call(in.hidden, 1.0f, 0.0f), "accepted");
  const Tensor none(DType::f32, {0, spec.dim});
  EXPECT_EQ(call(none.view(), 1.0f, 0.0f),
            "hidden: expected tokens to average over, got f32[0, 5]");
  EXPECT_EQ(call(in.hidden, 1.0f, -1.0f), "softcap: expected a number > 0, or 0 for none, got -1");
  EXPECT_NE(call(in.hidden, 0.0f, 0.0f).find("logit_scale"), std::string::npos);
  EXPECT_NE(call({}, 1.0f, 0.0f).find("hidden"), std::string::npos);
}

// The caller may change its tensors while another thread makes an order of a sample.
TEST(OrderSample, CopiesDoNotChangeWithTheTensorsOfTheStep) {
  Tensor hidden(DType::f32, {6, 2}), weight(DType::f32, {5, 2}), bias(DType::f32, {5});
  const auto fill = [&](double first) {
    for (Tensor* t : {&hidden, &weight, &bias})
      for (std::int64_t i = 0; i < t->numel(); ++i) t->set(i, first + static_cast<double>(i));
  };
  const auto expect = [](const ConstTensorView& view, const std::vector<float>& values) {
    for (std::size_t i = 0; i < values.size(); ++i)
      EXPECT_EQ(static_cast<const float*>(view.data())[i], values[i]);
  };
  fill(1.0);
  const OrderSource source{.hidden = std::as_const(hidden).view(),
                           .weight = std::as_const(weight).view(),
                           .bias = std::as_const(bias).view()};
  MemoryMeter meter;
  const OrderSample copy = sample_of(source, 3, /*copy=*/true, &meter);
  const OrderSample view = sample_of(source, 3, /*copy=*/false, &meter);
  fill(101.0);
  ASSERT_EQ(copy.bias.rank(), 1);
  ASSERT_EQ(copy.bias.size(0), 5);
  expect(copy.hidden, {1, 2, 5, 6, 9, 10});
  expect(copy.weight, {1, 2, 3, 4, 5, 6, 7, 8, 9, 10});
  expect(copy.bias, {1, 2, 3, 4, 5});
  expect(view.hidden, {1, 2, 5, 6, 9, 10});
  expect(view.weight, {101, 102, 103, 104, 105, 106, 107, 108, 109, 110});
  expect(view.bias, {101, 102, 103, 104, 105});
}

}  // namespace
}  // namespace logitless::test
