// Compares the optimiser with its definition in double.
#include "train/optimizer/adamw.h"

#include <gtest/gtest.h>

#include <cmath>
#include <vector>

#include "train/hash.h"

namespace logitless::train {
namespace {

using Floats = std::vector<float>;

Floats noise(std::size_t size, std::uint64_t seed) {
  Floats values(size);
  for (std::size_t i = 0; i < size; ++i) values[i] = normal(seed, i);
  return values;
}

TEST(AdamWTest, FollowsItsDefinition) {
  constexpr std::size_t kSize = 300;
  for (const bool decay : {false, true}) {
    Floats value = noise(kSize, 1), m(kSize), v(kSize);
    std::vector<double> x(value.begin(), value.end()), dm(kSize), dv(kSize);
    const AdamWOptions options{0.9, 0.98, 1e-6, 0.2};
    for (std::int64_t step = 1; step <= 5; ++step) {
      const Floats gradient = noise(kSize, 10 + static_cast<std::uint64_t>(step));
      const double rate = 0.01 * static_cast<double>(step), scale = 0.5;
      const AdamWSlot slot{value, gradient, m, v, decay};
      adamw_step(options, {&slot, 1}, step, rate, scale, 2);
      for (std::size_t i = 0; i < kSize; ++i) {
        const double g = scale * gradient[i];
        dm[i] = 0.9 * dm[i] + 0.1 * g;
        dv[i] = 0.98 * dv[i] + 0.02 * g * g;
        const double m_hat = dm[i] / (1.0 - std::pow(0.9, static_cast<double>(step)));
        const double v_hat = dv[i] / (1.0 - std::pow(0.98, static_cast<double>(step)));
        x[i] -= rate * (m_hat / (std::sqrt(v_hat) + 1e-6) + (decay ? 0.2 * x[i] : 0.0));
        ASSERT_NEAR(value[i], x[i], 2e-6 * (1.0 + std::abs(x[i]))) << step << " " << i;
        ASSERT_NEAR(m[i], dm[i], 1e-6);
        ASSERT_NEAR(v[i], dv[i], 1e-6);
      }
    }
  }
}

TEST(AdamWTest, IsTheSameForAnyNumberOfThreads) {
  const std::size_t sizes[] = {40000, 7, 0, 16384, 16385};
  const auto run = [&](int threads) {
    std::vector<Floats> values, gradients, ms, vs;
    for (std::size_t t = 0; t < std::size(sizes); ++t) {
      values.push_back(noise(sizes[t], 20 + t));
      gradients.push_back(noise(sizes[t], 30 + t));
      ms.emplace_back(sizes[t]);
      vs.emplace_back(sizes[t]);
    }
    std::vector<AdamWSlot> slots;
    std::vector<std::span<const float>> spans;
    for (std::size_t t = 0; t < std::size(sizes); ++t) {
      slots.push_back({values[t], gradients[t], ms[t], vs[t], t % 2 == 0});
      spans.emplace_back(gradients[t]);
    }
    const double norm = global_norm(spans, threads);
    adamw_step({}, slots, 1, 0.1, clip_scale(norm, 1.0), threads);
    const std::span<float> cleared[] = {ms[0], vs[0]};
    clear(cleared, threads);
    EXPECT_EQ(ms[0], Floats(sizes[0]));
    EXPECT_EQ(vs[0], Floats(sizes[0]));
    values.push_back({static_cast<float>(norm)});
    return values;
  };
  EXPECT_EQ(run(1), run(3));
  EXPECT_EQ(run(1), run(8));
}

TEST(ClipTest, ScalesToTheNorm) {
  const Floats a = {3.0f, 0.0f}, b = {0.0f, -4.0f, 12.0f};
  const std::span<const float> spans[] = {a, b};
  EXPECT_DOUBLE_EQ(global_norm(spans, 1), 13.0);
  EXPECT_DOUBLE_EQ(clip_scale(13.0, 1.0), 1.0 / 13.0);
  EXPECT_EQ(clip_scale(0.5, 1.0), 1.0);
  EXPECT_EQ(clip_scale(13.0, 0.0), 1.0);
  const Floats large(100000, 2.0f);
  const std::span<const float> one[] = {large};
  EXPECT_DOUBLE_EQ(global_norm(one, 2), 2.0 * std::sqrt(100000.0));
}

TEST(ScheduleTest, WarmsUpAndFallsToItsFloor) {
  const Schedule schedule{1.0, 0.1, 10, 111};
  EXPECT_DOUBLE_EQ(schedule.rate(0), 0.1);
  EXPECT_DOUBLE_EQ(schedule.rate(9), 1.0);
  EXPECT_DOUBLE_EQ(schedule.rate(10), 1.0);
  EXPECT_DOUBLE_EQ(schedule.rate(60), 0.55);
  EXPECT_DOUBLE_EQ(schedule.rate(110), 0.1);
  EXPECT_DOUBLE_EQ(schedule.rate(500), 0.1);
  for (std::int64_t step = 10; step < 110; ++step) {
    EXPECT_GT(schedule.rate(step), schedule.rate(step + 1));
  }
  const Schedule plain{2.0, 2.0, 0, 1};
  EXPECT_DOUBLE_EQ(plain.rate(0), 2.0);
}

}  // namespace
}  // namespace logitless::train
