// A FarController of a small head on one thread. Its steps are not computed: the test supplies
// their statistics.
#pragma once

#include <gtest/gtest.h>

#include <cstdint>
#include <optional>
#include <vector>

#include "head/far/controller.h"
#include "head/far/step.h"
#include "logitless/error.h"

namespace logitless::test {

class FarControllerTest : public testing::Test {
 protected:
  static constexpr std::int64_t kVocabCount = 300, kTokens = 8, kDim = 4;

  FarControllerTest() {
    for (std::size_t i = 0; i < weight_.size(); ++i)
      weight_[i] = static_cast<float>((i * 37 + i / 13) % 17) - 8.0f;
    for (std::size_t i = 0; i < hidden_.size(); ++i) hidden_[i] = static_cast<float>(i % 3) - 1.0f;
    far_.kind = PlanKind::far_backward;
    options_.refresh_every = 10;
    options_.refresh_delay = 0;
    options_.audit_every = 4;
  }
  FarStep begin(FarController& c) const {
    LossPlan plan = far_;
    if (c.request({.far = true}).accuracy == Accuracy::far_both) plan.kind = PlanKind::far_both;
    return c.begin(plan, source());
  }
  // Begins steps until one uses the far field, and returns the number of dense ones.
  int until_far(FarController& c, FarStep& step) const {
    int dense = 0;
    for (step = begin(c); !step.far && dense < 1000; step = begin(c)) ++dense;
    return dense;
  }
  OrderSource source() const {
    return {ConstTensorView(hidden_.data(), DType::f32, {kTokens, kDim}),
            ConstTensorView(weight_.data(), DType::f32, {kVocabCount, kDim}),
            {}};
  }
  static FarFieldStatistics error(double e, double selected = 0.1) {
    FarFieldStatistics s;
    s.selected = selected;
    s.audited_tokens = kTokens;
    s.audited_error = e;
    return s;
  }
  // Returns the statistics of a batch whose tokens are all ignored.
  static FarFieldStatistics without_tokens() {
    FarFieldStatistics s;
    s.audited_error = -1.0;
    return s;
  }
  // Takes a step that throws before it has computed anything.
  void fail(FarController& c, const OrderSource& from) const {
    const auto thrown = [] { throw InvalidArgument("no such target"); };
    take_far_step(
        c, from, true, [&](const FarStep&) -> const LossPlan& { return far_; },
        [&](const FarStep&) {
          thrown();
          return std::optional<FarFieldStatistics>();
        },
        thrown);
  }
  // Returns tokens whose dim differs from that of the weight, so that no order can be made.
  OrderSource mismatched() const {
    OrderSource bad = source();
    bad.hidden = ConstTensorView(hidden_.data(), DType::f32, {kTokens, kDim / 2});
    return bad;
  }
  static FarFieldStatistics unaudited() {
    FarFieldStatistics s;
    s.selected = 0.1;
    return s;
  }

  ContextOptions one_ = [] {
    ContextOptions o;
    o.threads = 1;
    return o;
  }();
  Context context_{one_};
  std::vector<float> weight_ = std::vector<float>(kVocabCount * kDim);
  std::vector<float> hidden_ = std::vector<float>(kTokens * kDim);
  FarFieldOptions options_;
  LossPlan far_, exact_;
};

}  // namespace logitless::test
