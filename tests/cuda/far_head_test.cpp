// Far field of a training run on a GPU: moments of tiles against the CPU's, and the controller with
// orders made on the GPU.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>

#include "cuda/far_training.h"
#include "kernels/device/order.h"
#include "support/temp_dir.h"

namespace logitless::test {
namespace {

VocabOrder measured(const Training& t, const VocabOrder& order, const std::string& kernel,
                    bool bias) {
  Mirror mirror(kernel);
  return measure_tiles(make_context(kernel), order, mirror.in(t.hidden.view()),
                       mirror.in(t.weight.view()),
                       bias ? mirror.in(t.bias.view()) : ConstTensorView(), 0.9f, 0.01f);
}

// Quadratic forms sum_a (x . u_a)^2 v_Ja of tokens and tiles: unlike axes, they do not depend on
// sign and order.
std::vector<double> forms(const Training& t, const VocabOrder& order) {
  std::vector<double> all;
  const std::int64_t tiles = (t.vocab + kTile - 1) / kTile;
  for (std::int64_t i = 0; i < t.tokens; i += 37) {
    std::vector<double> squares;
    for (std::int64_t a = 0; a < t.dim; ++a) {
      double along = 0;
      for (std::int64_t k = 0; k < t.dim; ++k)
        along += t.hidden.get(i * t.dim + k) * static_cast<double>(order.axes()[a * t.dim + k]);
      squares.push_back(along * along);
    }
    for (std::int64_t tile = 0; tile < tiles; ++tile) {
      double form = 0;
      for (std::int64_t a = 0; a < t.dim; ++a)
        form += squares[a] * static_cast<double>(order.variance()[tile * t.dim + a]);
      all.push_back(form);
    }
  }
  return all;
}

TEST(CudaMoments, AreTheCpus) {
  if (far_kernel().empty()) GTEST_SKIP() << "no GPU kernel with a far field";
  if (!cuda::moments_unsupported().empty()) GTEST_SKIP() << cuda::moments_unsupported();
  for (const bool bias : {false, true}) {
    const Training t(70 * kTile + 37, 64, 300, 0.1);
    const VocabOrder order(t.vocab_ids, std::vector<float>(t.vocab_ids.size(), 1.0f));
    const VocabOrder cpu = measured(t, order, "", bias);
    const VocabOrder gpu = measured(t, order, far_kernel(), bias);
    EXPECT_EQ(gpu.dim(), t.dim);
    // The GPU rounds its residuals to bf16 once.
    EXPECT_LE(relative_error(forms(t, gpu), forms(t, cpu)), 0x1p-8);
    for (std::size_t tile = 0; tile < cpu.log2_caution().size(); ++tile)
      EXPECT_NEAR(gpu.log2_caution()[tile], cpu.log2_caution()[tile], 0.02) << tile;
    const VocabOrder again = measured(t, order, far_kernel(), bias);
    EXPECT_TRUE(std::ranges::equal(again.axes(), gpu.axes()));
    EXPECT_TRUE(std::ranges::equal(again.variance(), gpu.variance()));
    EXPECT_TRUE(std::ranges::equal(again.log2_caution(), gpu.log2_caution()));
  }
}

TEST(CudaMoments, NaNsGiveFiniteOnes) {
  if (far_kernel().empty()) GTEST_SKIP() << "no GPU kernel with a far field";
  if (!cuda::moments_unsupported().empty()) GTEST_SKIP() << cuda::moments_unsupported();
  for (const int what : {0, 1, 2}) {
    Training t(6 * kTile + 5, 16, 40);
    if (what == 0) t.hidden.set(17 * t.dim + 2, NAN);
    if (what == 1) t.weight.set(100 * t.dim, INFINITY);
    if (what == 2) t.hidden.fill(0.0);
    const VocabOrder order(t.vocab_ids, std::vector<float>(t.vocab_ids.size(), 1.0f));
    EXPECT_TRUE(measured(t, order, far_kernel(), true).has_moments())
        << what;  // checks all moments
  }
}

TEST(CudaMoments, OtherHeadsAreRefused) {
  if (far_kernel().empty()) GTEST_SKIP() << "no GPU kernel with a far field";
  const Training t(6 * kTile, 12, 40);
  const VocabOrder order(t.vocab_ids, std::vector<float>(t.vocab_ids.size(), 1.0f));
  EXPECT_THROW(measured(t, order, far_kernel(), false), Unsupported);
}

class CudaFarHead : public testing::TestWithParam<Accuracy> {
 protected:
  void SetUp() override {
    if (far_kernel().empty()) GTEST_SKIP() << "no GPU kernel with a far field";
    if (GetParam() == Accuracy::far_both && !cuda::moments_unsupported().empty())
      GTEST_SKIP() << cuda::moments_unsupported();
  }
  const Context context_ = make_context(far_kernel());
};

TEST_P(CudaFarHead, TrainsAndFallsBack) {
  FarFieldHead head(context_, quick(GetParam()));
  EXPECT_THROW(head.statistics(), InvalidArgument);
  Training t;
  bool audited = false;
  for (std::int64_t step = 1; step <= 14; ++step) {
    SCOPED_TRACE(step);
    const Training exact = t.dense();
    LossStatistics all;
    const LossStatistics s = t.step(head, &all);
    EXPECT_EQ(s.tokens, t.tokens);
    EXPECT_EQ(all.valid_tokens, t.tokens);
    const bool far = all.far.passes > 0.0;
    // An order is made at step 5, adopted and tried at step 8, and again with a smaller tau.
    if (step < 8 || step >= 10) {
      EXPECT_EQ(far, step >= 8) << head.explain();
    }
    EXPECT_EQ(head.order().empty(), step < 8);
    EXPECT_EQ(head.report().steps, step);
    if (!far) {
      EXPECT_TRUE(t.results() == exact.results());
    } else {
      EXPECT_LT(all.far.selected, 0.6);
      EXPECT_GT(all.far.sampled, 0.0);
      EXPECT_LE(relative_error(t.d_hidden.values(), exact.d_hidden.values()), 0.15);
      EXPECT_EQ(all.far.audited_error >= 0.0, s.far.audited_error >= 0.0);
    }
    if (s.far.audited_error >= 0.0) {
      audited = true;
      EXPECT_EQ(s.far.audited_tokens, 100);
      EXPECT_LE(s.far.audited_error, 0.1);
      EXPECT_EQ(head.order().has_moments(), GetParam() == Accuracy::far_both);
    }
    t.move();
  }
  EXPECT_TRUE(audited);
  EXPECT_TRUE(head.report().far) << head.explain();
  EXPECT_GT(head.report().mean_selected, 0.0);
  const std::int64_t repeated = head.report().repeated_steps;
  t.shake();
  for (int step = 0; step < 4 && head.report().far; ++step) t.step(head);
  EXPECT_FALSE(head.report().far) << "an audit every 3 steps";
  const Training exact = t.dense();
  if (head.report().repeated_steps > repeated) {
    EXPECT_TRUE(t.results() == exact.results()) << "done again densely";
  } else {  // most tiles were selected, so all of them were
    EXPECT_NE(head.explain().find("two thirds"), std::string::npos) << head.explain();
    EXPECT_LE(relative_error(t.d_hidden.values(), exact.d_hidden.values()),
              gradient_bound(DType::bf16));
  }
}

TEST_P(CudaFarHead, RunsRepeatToTheBitAndResume) {
  const TempDir directory;
  const std::string path = directory.file("state.safetensors");
  constexpr std::int64_t kLast = 11;
  std::vector<std::vector<std::vector<std::byte>>> whole;
  {
    FarFieldHead head(context_, quick(GetParam()));
    Training t;
    for (std::int64_t step = 1; step <= kLast; ++step) {
      t.step(head);
      whole.push_back(t.results());
      t.move();
    }
    EXPECT_TRUE(head.report().far) << head.explain();
  }
  for (const std::int64_t at : {6, 9}) {  // before its order is adopted, and after
    FarFieldHead head(context_, quick(GetParam()));
    Training t;
    for (std::int64_t step = 1; step <= at; ++step) {
      t.step(head);
      EXPECT_TRUE(t.results() == whole[static_cast<std::size_t>(step - 1)]) << step;
      t.move();
    }
    head.save(path);
    FarFieldHead resumed(context_, quick(GetParam()));
    resumed.load(path);
    for (std::int64_t step = at + 1; step <= kLast; ++step) {
      t.step(resumed);
      EXPECT_TRUE(t.results() == whole[static_cast<std::size_t>(step - 1)]) << step;
      t.move();
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Accuracies, CudaFarHead,
                         testing::Values(Accuracy::far_backward, Accuracy::far_both),
                         [](const auto& a) { return std::string(name_of(a.param)); });

}  // namespace
}  // namespace logitless::test
