// Moments of an order's tiles: the estimated masses, their cautions, and equal results for any
// threads, dtype and file.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <numeric>
#include <random>
#include <utility>

#include "logitless/tensor_file.h"
#include "support/problem.h"
#include "support/temp_dir.h"

namespace logitless::test {
namespace {

constexpr std::int64_t kTile = 128;
constexpr float kTau = 0.01f;

// Tiles whose entries are isotropically scattered about a mean, in a shuffled order.
struct Head {
  Head(std::int64_t n, std::int64_t v, std::int64_t d, double spread, DType dtype,
       bool with_bias = false)
      : rows(n), vocab(v), dim(d), hidden(dtype, {n, d}), weight(dtype, {v, d}) {
    std::mt19937_64 random(9);
    std::normal_distribution<double> normal;
    std::vector<std::int64_t> vocab_ids(vocab);
    std::iota(vocab_ids.begin(), vocab_ids.end(), 0);
    std::shuffle(vocab_ids.begin(), vocab_ids.end(), random);
    order = VocabOrder(vocab_ids, std::vector<float>(vocab, 1.0f));
    // Numbers that bf16 represents exactly, so that heads of both dtypes are the same.
    Tensor as_bf16(DType::bf16, {1});
    const auto draw = [&](double mean, double deviation) {
      as_bf16.set(0, mean + deviation * normal(random));
      return as_bf16.get(0);
    };
    for (std::int64_t i = 0; i < rows * dim; ++i) hidden.set(i, draw(0.0, 1.0));
    for (std::int64_t first = 0; first < vocab; first += kTile) {
      for (std::int64_t k = 0; k < dim; ++k) {
        const double mean = draw(0.0, 1.0 / std::sqrt(static_cast<double>(dim)));
        for (std::int64_t at = first; at < std::min(vocab, first + kTile); ++at)
          weight.set(vocab_ids[at] * dim + k,
                     draw(mean, spread / std::sqrt(static_cast<double>(dim))));
      }
    }
    if (!with_bias) return;
    bias = Tensor(DType::f32, {vocab});
    for (std::int64_t j = 0; j < vocab; ++j) bias.set(j, j % 19 == 0 ? -INFINITY : draw(0.0, 0.4));
  }
  VocabOrder measured(int threads = 2) const {
    ContextOptions options;
    options.threads = threads;
    return measure_tiles(Context(options), order, hidden.view(), weight.view(),
                         bias.defined() ? bias.view() : ConstTensorView(), scale, kTau);
  }
  std::int64_t rows, vocab, dim;
  float scale = 1.0f;
  Tensor hidden, weight, bias;
  VocabOrder order;
};

// log2 of masses and their estimates as documented in the header, [rows, tiles].
struct Masses {
  Masses(const Head& h, const VocabOrder& order) : tiles((h.vocab + kTile - 1) / kTile) {
    const double s = h.scale;
    for (std::int64_t i = 0; i < h.rows; ++i) {
      std::vector<double> squares;
      for (std::int64_t a = 0; a < h.dim; ++a) {
        double along = 0;
        for (std::int64_t k = 0; k < h.dim; ++k)
          along += h.hidden.get(i * h.dim + k) * static_cast<double>(order.axes()[a * h.dim + k]);
        squares.push_back(along * along);
      }
      for (std::int64_t tile = 0; tile < tiles; ++tile) {
        double mass = 0, base = 0, linear = 0, form = 0;
        for (std::int64_t at = tile * kTile; at < std::min(h.vocab, (tile + 1) * kTile); ++at) {
          const std::int64_t j = order.vocab_ids()[at];
          const double share = h.bias.defined() ? std::exp(s * h.bias.get(j)) : 1.0;
          double dot = 0;
          for (std::int64_t k = 0; k < h.dim; ++k)
            dot += h.hidden.get(i * h.dim + k) * h.weight.get(j * h.dim + k);
          mass += share * std::exp(s * dot);
          base += share;
          linear += share * s * dot;
        }
        for (std::int64_t a = 0; a < h.dim; ++a)
          form += squares[a] * static_cast<double>(order.variance()[tile * h.dim + a]);
        exact.push_back(std::log2(mass));
        flat.push_back(std::log2(base) + linear / base / std::log(2.0));
        estimate.push_back(flat.back() + 0.5 * s * s * form / std::log(2.0));
      }
    }
  }
  double total(const std::vector<double>& of, std::int64_t row) const {
    double sum = 0;
    for (std::int64_t j = 0; j < tiles; ++j) sum += std::exp2(of[row * tiles + j]);
    return std::log2(sum);
  }
  std::int64_t tiles;
  std::vector<double> exact, estimate, flat;  // flat: without the quadratic form
};

bool same(std::span<const float> a, std::span<const float> b) {
  return std::equal(a.begin(), a.end(), b.begin(), b.end());
}
void expect_same(const VocabOrder& a, const VocabOrder& b) {
  EXPECT_EQ(a.dim(), b.dim());
  EXPECT_TRUE(std::equal(a.vocab_ids().begin(), a.vocab_ids().end(), b.vocab_ids().begin(),
                         b.vocab_ids().end()));
  EXPECT_TRUE(same(a.axes(), b.axes()));
  EXPECT_TRUE(same(a.variance(), b.variance()));
  EXPECT_TRUE(same(a.log2_caution(), b.log2_caution()));
}
void expect_moments(const VocabOrder& order, std::int64_t vocab, std::int64_t dim) {
  const auto tiles = static_cast<std::size_t>((vocab + kTile - 1) / kTile);
  EXPECT_TRUE(order.has_moments());
  EXPECT_EQ(order.dim(), dim);
  EXPECT_EQ(order.axes().size(), static_cast<std::size_t>(dim * dim));
  EXPECT_EQ(order.variance().size(), tiles * static_cast<std::size_t>(dim));
  EXPECT_EQ(order.log2_caution().size(), tiles);
  for (const float v : order.axes()) ASSERT_TRUE(std::isfinite(v));
  for (const float v : order.variance()) ASSERT_TRUE(std::isfinite(v) && v >= 0.0f);
  for (const float v : order.log2_caution()) ASSERT_TRUE(std::isfinite(v) && v >= 0.0f);
}

// Logits of a tile have a standard deviation of about 0.8, so the form contributes 0.32 nats (0.46
// bits). Two errors remain. The skewness of 128 draws is 0.8^3 / 6 sqrt(6 / 128). The sample's
// covariances between the shared axes are 0.8^2 / 2 sqrt(2 / 128). Together that is 0.05 nats or
// 0.07 bits, and 4 times as much and more for the longest tokens.
TEST(TileMoments, EstimatesOfGaussianTilesAreClose) {
  for (const bool bias : {false, true}) {
    const Head head(60, 20 * kTile + 50, 9, 0.8, DType::f32, bias);
    const VocabOrder order = head.measured();
    expect_moments(order, head.vocab, head.dim);
    const Masses m(head, order);
    double error = 0, without = 0;
    for (std::size_t i = 0; i < m.exact.size(); ++i) {
      error += std::abs(m.estimate[i] - m.exact[i]) / static_cast<double>(m.exact.size());
      without += std::abs(m.flat[i] - m.exact[i]) / static_cast<double>(m.exact.size());
    }
    EXPECT_LT(error, 0.1) << "bits, on average";
    EXPECT_GT(without, 0.3);
  }
}

// With one dimension, the form is the tile's variance, whose entries are weighted by exp(s bias).
TEST(TileMoments, OfOneDimensionAreTheVariance) {
  for (const bool bias : {false, true}) {
    Head head(30, 3 * kTile + 1, 1, 0.7, DType::f32, bias);
    head.scale = 1.4f;
    const VocabOrder order = head.measured();
    const double axis = static_cast<double>(order.axes()[0]);
    for (std::int64_t tile = 0; tile < 4; ++tile) {
      double total = 0, mean = 0, square = 0;
      for (std::int64_t at = tile * kTile; at < std::min(head.vocab, (tile + 1) * kTile); ++at) {
        const std::int64_t j = order.vocab_ids()[at];
        const double share =
            bias ? std::exp(static_cast<double>(head.scale) * head.bias.get(j)) : 1.0;
        total += share;
        mean += share * head.weight.get(j);
        square += share * head.weight.get(j) * head.weight.get(j);
      }
      const double variance = total > 0 ? square / total - mean / total * mean / total : 0.0;
      EXPECT_NEAR(static_cast<double>(order.variance()[tile]) * axis * axis, variance,
                  1e-5 * (1 + variance))  // fp32 sums of 128
          << tile;
    }
  }
}

// The caution is the largest ratio of a mass to its estimate, relative to their totals: no more and
// no less.
TEST(TileMoments, TheCautionCoversTheSample) {
  Head head(80, 16 * kTile + 9, 7, 0.6, DType::f32);
  // Entries that differ from their tiles: for some tokens they are all of its mass.
  for (const std::int64_t tile : {1, 5, 11})
    for (std::int64_t k = 0; k < head.dim; ++k)
      head.weight.set(head.order.vocab_ids()[tile * kTile + 3] * head.dim + k,
                      (k + tile) % 3 == 0 ? 3.0 : -1.0);
  const VocabOrder order = head.measured();
  const Masses m(head, order);
  std::vector<double> needed(m.tiles, 0.0);
  const double floor = std::log2(static_cast<double>(kTau) / 3);
  for (std::int64_t i = 0; i < head.rows; ++i) {
    const double total = m.total(m.exact, i), estimated = m.total(m.estimate, i);
    for (std::int64_t j = 0; j < m.tiles; ++j) {
      const double mass = m.exact[i * m.tiles + j] - total;
      const double short_by = mass - (m.estimate[i * m.tiles + j] - estimated);
      if (std::abs(mass - floor) < 1e-3) continue;  // either side of tau / 3
      if (mass > floor) needed[j] = std::max(needed[j], short_by);
    }
  }
  for (std::int64_t j = 0; j < m.tiles; ++j) {
    // 2^1.4e-3 is 1e-3.
    EXPECT_NEAR(order.log2_caution()[j], needed[j], 1.4e-3) << "tile " << j;
  }
  EXPECT_GT(*std::max_element(needed.begin(), needed.end()), 1.0);
  // Tokens below tau / 3 in a tile do not count: with a tau near 1 hardly any do.
  const VocabOrder bold = measure_tiles(Context(), head.order, std::as_const(head.hidden).view(),
                                        std::as_const(head.weight).view(), {}, 1.0f, 0.999f);
  EXPECT_TRUE(same(bold.variance(), order.variance()));
  double sum = 0, bold_sum = 0;
  for (std::int64_t j = 0; j < m.tiles; ++j) {
    EXPECT_LE(bold.log2_caution()[j], order.log2_caution()[j]);
    sum += static_cast<double>(order.log2_caution()[j]);
    bold_sum += static_cast<double>(bold.log2_caution()[j]);
  }
  EXPECT_LT(bold_sum, 0.7 * sum);
}

TEST(TileMoments, AreTheSameForThreadsDtypesAndFiles) {
  const Head head(50, 40 * kTile + 77, 11, 0.5, DType::f32, true);
  const VocabOrder first = head.measured(2);
  expect_same(head.measured(1), first);
  expect_same(head.measured(3), first);
  expect_same(Head(50, 40 * kTile + 77, 11, 0.5, DType::bf16, true).measured(), first);
  const TempDir directory;
  const std::string path = directory.file("moments.safetensors");
  first.save(path);
  const VocabOrder loaded = VocabOrder::load(path);
  expect_same(loaded, first);
  EXPECT_TRUE(same(loaded.average(), first.average()));
  // Strides of hidden: the same rows with twice the row stride.
  Tensor wide(DType::f32, {50, 22});
  wide.fill(NAN);
  for (std::int64_t i = 0; i < 50; ++i)
    for (std::int64_t k = 0; k < 11; ++k) wide.set(i * 22 + k, head.hidden.get(i * 11 + k));
  const std::int64_t sizes[] = {50, 11}, strides[] = {22, 1};
  expect_same(
      measure_tiles(Context(), head.order,
                    ConstTensorView(wide.view().data(), DType::f32, sizes, strides),
                    std::as_const(head.weight).view(), std::as_const(head.bias).view(), 1.0f, kTau),
      first);
}

TEST(TileMoments, NaNsAndMaskedTilesGiveFiniteMoments) {
  const Head clean(40, 6 * kTile + 5, 6, 0.5, DType::f32, true);
  for (const int what : {0, 1, 2, 3}) {
    SCOPED_TRACE(what);
    Head head = clean;
    if (what == 0) head.hidden.set(17 * head.dim + 2, NAN);
    if (what == 1) head.weight.set(100 * head.dim, NAN);
    if (what == 2) head.hidden.fill(0.0);
    for (std::int64_t at = 2 * kTile; at < 3 * kTile && what == 3; ++at)
      head.bias.set(head.order.vocab_ids()[at], -INFINITY);
    const VocabOrder order = head.measured();
    expect_moments(order, head.vocab, head.dim);
    if (what != 3) continue;
    for (std::int64_t a = 0; a < head.dim; ++a) EXPECT_EQ(order.variance()[2 * head.dim + a], 0.0f);
    EXPECT_EQ(order.log2_caution()[2], 0.0f);
  }
  // All entries are equal: there are no residuals, and the estimate is exact.
  Head equal = clean;
  equal.bias = Tensor();
  equal.weight.fill(0.25);
  const VocabOrder order = equal.measured();
  expect_moments(order, equal.vocab, equal.dim);
  for (const float v : order.variance()) EXPECT_NEAR(v, 0.0f, 1e-12f);
  for (const float v : order.log2_caution()) EXPECT_NEAR(v, 0.0f, 1e-5f);
}

TEST(TileMoments, ErrorsAreNamed) {
  const Head head(10, 300, 4, 0.5, DType::f32);
  const auto message = [](auto&& call) -> std::string {
    try {
      call();
    } catch (const InvalidArgument& e) {
      return e.what();
    }
    return "accepted";
  };
  const auto expect = [](const std::string& text, const std::string& part) {
    EXPECT_NE(text.find(part), std::string::npos) << text << "\nexpected: " << part;
  };
  const ConstTensorView hidden = head.hidden.view(), weight = head.weight.view();
  const Context context;
  for (const float tau : {0.0f, 1.0f, -1.0f, static_cast<float>(NAN)}) {
    expect(message([&] { measure_tiles(context, head.order, hidden, weight, {}, 1.0f, tau); }),
           "tau: expected a number in (0, 1), got");
  }
  for (const float scale : {0.0f, static_cast<float>(NAN), static_cast<float>(INFINITY)}) {
    expect(message([&] { measure_tiles(context, head.order, hidden, weight, {}, scale); }),
           "logit_scale");
  }
  const VocabOrder other(std::vector<std::int64_t>{1, 0}, std::vector<float>{1.0f, 1.0f});
  expect(message([&] { measure_tiles(context, other, hidden, weight); }),
         "order: made for 2 vocabulary entries, the weights have 300");
  expect(message([&] { measure_tiles(context, VocabOrder(), hidden, weight); }), "order:");
  const ConstTensorView none(hidden.data(), DType::f32, {0, 4});
  expect(message([&] { measure_tiles(context, head.order, none, weight); }),
         "hidden: expected tokens to measure with");
  const ConstTensorView narrow(hidden.data(), DType::f32, {10, 3});
  EXPECT_NE(message([&] { measure_tiles(context, head.order, narrow, weight); }), "accepted");
  EXPECT_NE(message([&] {
              measure_tiles(context, head.order, hidden, weight,
                            ConstTensorView(hidden.data(), DType::f32, {7}));
            }),
            "accepted");

  // Moments given explicitly.
  const std::vector<float> axes(16, 1.0f), variance(12, 1.0f), caution(3, 0.0f);
  const auto with = [&](std::int64_t dim, std::vector<float> a, std::vector<float> v,
                        std::vector<float> c) {
    return message([&] { (void)head.order.with_moments(dim, a, v, c); });
  };
  EXPECT_EQ(with(4, axes, variance, caution), "accepted");
  expect(with(0, axes, variance, caution), "dim: expected 1 to 2147483647, got 0");
  expect(with(4, caution, variance, caution), "axes: expected 16 values for 3 tiles of dim 4");
  expect(with(4, axes, axes, caution), "variance: expected 12 values");
  expect(with(4, axes, variance, axes), "log2_caution: expected 3 values");
  EXPECT_EQ(with(4, std::vector<float>(16, -1.0f), variance, caution), "accepted");
  expect(with(4, std::vector<float>(16, NAN), variance, caution), "axes: expected finite numbers");
  expect(with(4, axes, std::vector<float>(12, -1.0f), caution), "variance: expected finite");
  expect(with(4, axes, variance, std::vector<float>(3, INFINITY)), "log2_caution: expected finite");
  expect(message([&] { (void)VocabOrder().with_moments(4, axes, variance, caution); }), "order:");
}

}  // namespace
}  // namespace logitless::test
