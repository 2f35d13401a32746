// The far field on heads of a trained language model, at the default tau: the table of
// docs/use/far_field.md. Order and averages come from other tokens. The files are in
// LOGITLESS_DATA_DIR; the tests are skipped without them.
#include "support/real_head.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <filesystem>
#include <string>

#include "support/mirror.h"

namespace logitless::test {
namespace {

constexpr std::int64_t kTokens = 1536;  // the last ones; the order is made from the first

struct Head {
  const char* name;
  double selected, d_hidden_error, d_weight_error;  // far_field_figures.md, at tau 0.003
};

ConstTensorView rows_of(const ConstTensorView& view, std::int64_t first) {
  const std::int64_t columns = view.rank() == 2 ? view.size(1) : 1;
  const auto* data = static_cast<const std::byte*>(view.data()) +
                     static_cast<std::size_t>(first * columns) * size_of(view.dtype());
  return view.rank() == 2 ? ConstTensorView(data, view.dtype(), {kTokens, columns})
                          : ConstTensorView(data, view.dtype(), {kTokens});
}

double difference(const Tensor& a, const Tensor& b) {
  const auto* x = static_cast<const float*>(a.view().data());
  const auto* y = static_cast<const float*>(b.view().data());
  double error = 0, size = 0;
  for (std::int64_t i = 0; i < a.numel(); ++i) {
    const double d = static_cast<double>(x[i]) - static_cast<double>(y[i]);
    error += d * d;
    size += static_cast<double>(y[i]) * static_cast<double>(y[i]);
  }
  return std::sqrt(error / size);
}

struct Result {
  Tensor loss{DType::f32, {}}, lse{DType::f32, {kTokens}}, d_hidden, d_weight;
  LossStatistics statistics;
};

// Checks far_both: lse of tokens that were used neither for the order nor for its moments.
void expect_both(const Result& exact, const Result& both) {
  double squares = 0, most = 0;
  for (std::int64_t i = 0; i < kTokens; ++i) {
    const double off = both.lse.get(i) - exact.lse.get(i);
    squares += off * off;
    most = std::max(most, std::abs(off));
  }
  const double rms = std::sqrt(squares / static_cast<double>(kTokens));
  const double d_hidden = difference(both.d_hidden, exact.d_hidden);
  const double d_weight = difference(both.d_weight, exact.d_weight);
  const FarFieldStatistics& s = both.statistics.far;
  std::printf(
      "far_both: %.2f %% kept, lse rms %.5f, at most %.4f; d_hidden %.3f %%, d_weight %.3f %%\n",
      100 * s.selected, rms, most, 100 * d_hidden, 100 * d_weight);
  testing::Test::RecordProperty("both_kept", std::to_string(s.selected));
  testing::Test::RecordProperty("both_lse_rms", std::to_string(rms));
  testing::Test::RecordProperty("both_d_hidden_error", std::to_string(d_hidden));
  testing::Test::RecordProperty("both_d_weight_error", std::to_string(d_weight));
  // The table of docs/use/far_field.md, tau 0.003: 7.4 % of the tiles are selected early in
  // training, 12.2 % late.
  EXPECT_LE(rms, 0.005);
  EXPECT_LE(most, 0.1);
  EXPECT_GT(rms, 1e-5) << "exact";
  EXPECT_LE(d_hidden, 0.0065);
  EXPECT_LE(d_weight, 0.004);
  EXPECT_LT(s.selected, 0.25);
  EXPECT_GT(s.selected, 0.03);
  EXPECT_LT(s.passes, 1.2);
  EXPECT_EQ(s.bound, -1.0);
  EXPECT_FALSE(s.dense_fallback);
  // Errors of lse average out over 1536 tokens.
  EXPECT_NEAR(both.loss.get(0), exact.loss.get(0), rms);
}

class FarRealHead : public testing::TestWithParam<Head> {};

TEST_P(FarRealHead, IsAsInTheTable) {
  const std::string path = real_head_path(GetParam().name);
  if (!std::filesystem::exists(path)) GTEST_SKIP() << path << " is not there";
  const TensorFile file(path);
  const Tensor weight = dequantised_weight(file);
  const ConstTensorView hidden = file.tensor("hidden");
  const Context context = make_context("");

  CrossEntropyInputs in;
  in.hidden = rows_of(hidden, hidden.size(0) - kTokens);
  in.targets = rows_of(file.tensor("targets"), hidden.size(0) - kTokens);
  in.weight = weight.view();
  in.order = make_vocab_order(context, in.weight,
                              average_probability(context, rows_of(hidden, 0), in.weight));

  const auto run = [&](PlanKind kind) {
    Result r;
    r.d_hidden = Tensor(DType::f32, {kTokens, in.hidden.size(1)});
    r.d_weight = Tensor(DType::f32, {in.weight.size(0), in.weight.size(1)});
    CrossEntropyOutputs out;
    out.loss = r.loss.view();
    out.lse = r.lse.view();
    out.d_hidden = r.d_hidden.view();
    out.d_weight = r.d_weight.view();
    PlanRequest request;
    request.device = context.device();
    request.kind = kind;
    const LossPlan plan = plan_cross_entropy({}, in, out, request);
    const Workspace workspace(context, plan);
    r.statistics = cross_entropy(context, plan, {}, in, out, workspace);
    return r;
  };
  const Result exact = run(PlanKind::dense);
  const Result far = run(PlanKind::far_backward);
  in.order = measure_tiles(context, in.order, rows_of(hidden, 0), in.weight);
  expect_both(exact, run(PlanKind::far_both));
  EXPECT_NEAR(far.loss.get(0), exact.loss.get(0), 1e-6 * exact.loss.get(0));
  EXPECT_LE(difference(far.lse, exact.lse), kLseBound);

  const FarFieldStatistics& s = far.statistics.far;
  const double d_hidden = difference(far.d_hidden, exact.d_hidden);
  const double d_weight = difference(far.d_weight, exact.d_weight);
  RecordProperty("kept", std::to_string(s.selected));
  RecordProperty("d_hidden_error", std::to_string(d_hidden));
  RecordProperty("d_weight_error", std::to_string(d_weight));
  EXPECT_LE(s.selected, 1.2 * GetParam().selected);
  EXPECT_GE(s.selected, 0.5 * GetParam().selected) << "keeps too little to be the same rule";
  EXPECT_LE(d_hidden, 1.2 * GetParam().d_hidden_error);
  EXPECT_LE(d_weight, 1.2 * GetParam().d_weight_error);
  EXPECT_GT(d_hidden, 0.0);
  EXPECT_LE(d_hidden, s.bound);
  EXPECT_LT(s.bound, 1.0);
  EXPECT_LT(s.passes, 1.5);
  EXPECT_FALSE(s.dense_fallback);
}

INSTANTIATE_TEST_SUITE_P(Files, FarRealHead,
                         testing::Values(Head{"late", 0.061, 0.0038, 0.0034},
                                         Head{"early", 0.056, 0.0034, 0.0026}),
                         [](const auto& head) { return std::string(head.param.name); });

}  // namespace
}  // namespace logitless::test
