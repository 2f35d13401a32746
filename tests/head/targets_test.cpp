// Forms of targets and layouts of tensors: next token, K sparse targets, 3-D batches, strides.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <utility>
#include <vector>

#include "support/mirror.h"
#include "support/problem.h"

namespace logitless::test {
namespace {

constexpr std::int64_t kBatch = 3, kTime = 6, kDim = 5, kVocab = 140;

HeadSpec batch_spec() {
  HeadSpec spec;
  spec.tokens = kBatch * kTime;
  spec.dim = kDim;
  spec.vocab = kVocab;
  spec.weight_scale = 2.0;
  return spec;
}

TEST(NextToken, EqualsTargetsShiftedByHand) {
  const HeadSpec spec = batch_spec();
  HeadProblem problem(spec);
  problem.targets.set(8, -100);
  RunSpec run;
  run.extras = true;
  run.change = [&](CrossEntropyOptions& o, CrossEntropyInputs& in, CrossEntropyOutputs& out) {
    o.next_token = true;
    const auto three = [&](const auto& v, auto make) {
      return make(v.data(), v.dtype(), {kBatch, kTime, kDim});
    };
    const auto constant = [](const void* data, DType dtype, std::initializer_list<std::int64_t> s) {
      return ConstTensorView(data, dtype, s);
    };
    const auto writable = [](void* data, DType dtype, std::initializer_list<std::int64_t> s) {
      return TensorView(data, dtype, s);
    };
    in.hidden = three(in.hidden, constant);
    in.targets = ConstTensorView(in.targets.data(), in.targets.dtype(), {kBatch, kTime});
    out.d_hidden = three(out.d_hidden, writable);
    for (TensorView* view : {&out.lse, &out.log_prob, &out.target_logit, &out.entropy, &out.argmax})
      *view = TensorView(view->data(), view->dtype(), {kBatch, kTime});
  };
  const HeadResult shifted = run_head(problem, run);
  HeadProblem by_hand(spec);
  for (std::int64_t i = 0; i < spec.tokens; ++i)
    by_hand.targets.set(i, i % kTime == kTime - 1 ? -100 : problem.targets.get(i + 1));
  run.change = nullptr;
  const HeadResult plain = run_head(by_hand, run);
  EXPECT_EQ(shifted.loss.bytes(), plain.loss.bytes());
  EXPECT_EQ(shifted.d_hidden.bytes(), plain.d_hidden.bytes());
  EXPECT_EQ(shifted.d_weight.bytes(), plain.d_weight.bytes());
  EXPECT_EQ(shifted.argmax.bytes(), plain.argmax.bytes());
  EXPECT_EQ(shifted.log_prob.bytes(), plain.log_prob.bytes());
  EXPECT_EQ(shifted.statistics.valid_tokens, kBatch * (kTime - 1) - 1);
}

TEST(SparseTargets, EqualTheDenseMixture) {
  HeadSpec spec = batch_spec();
  spec.per_token = 4;
  HeadProblem problem(spec);
  // A repeated target, ignored targets, and an ignored token.
  problem.targets.set(1, problem.targets.get(0));
  problem.targets.set(4 * 5 + 2, -100);
  for (int k = 0; k < 4; ++k) problem.targets.set(4 * 7 + k, -100);
  problem.refresh_oracle();
  RunSpec run;
  for (const Reduction reduction : {Reduction::mean, Reduction::sum}) {
    problem.spec.reduction = reduction;
    expect_matches_oracle(problem, run);
  }
  // The mixture computed directly: sum_k w_k (lse - z_k), from one call with one target for each k.
  problem.spec.reduction = Reduction::none;
  const HeadResult mixed = run_head(problem, run);
  std::vector<double> expected(static_cast<std::size_t>(spec.tokens), 0.0);
  for (int k = 0; k < 4; ++k) {
    HeadProblem one(batch_spec());
    one.spec.reduction = Reduction::none;
    one.hidden = problem.hidden;
    one.weight = problem.weight;
    for (std::int64_t i = 0; i < spec.tokens; ++i)
      one.targets.set(i, problem.targets.get(i * 4 + k));
    RunSpec forward;
    forward.gradients = false;
    const HeadResult a = run_head(one, forward);
    for (std::int64_t i = 0; i < spec.tokens; ++i)
      expected[i] += problem.target_weight.get(i * 4 + k) * a.loss.get(i);
  }
  EXPECT_LE(relative_error(mixed.loss.values(), expected), 1e-6);
}

TEST(SparseTargets, KOfOneWithWeightEqualsTokenWeight) {
  HeadSpec spec = batch_spec();
  spec.reduction = Reduction::sum;
  HeadProblem problem(spec);
  Tensor weights(DType::f32, {spec.tokens, 1});
  for (std::int64_t i = 0; i < spec.tokens; ++i) weights.set(i, 0.125 * static_cast<double>(i));
  RunSpec run;
  run.change = [&](auto&, CrossEntropyInputs& in, CrossEntropyOutputs& out) {
    in.targets = ConstTensorView(in.targets.data(), in.targets.dtype(), {spec.tokens, 1});
    in.target_weight = std::as_const(weights).view();
    out.log_prob = out.target_logit = TensorView();
  };
  const HeadResult by_entry = run_head(problem, run);
  run.change = [&](auto&, CrossEntropyInputs& in, auto&) {
    in.token_weight = ConstTensorView(weights.view().data(), DType::f32, {spec.tokens});
  };
  const HeadResult by_token = run_head(problem, run);
  EXPECT_NEAR(by_entry.loss.get(0), by_token.loss.get(0), 1e-5);
  EXPECT_LE(relative_error(by_entry.d_weight.values(), by_token.d_weight.values()), 1e-6);
}

TEST(Targets, BothIndexTypesGiveTheSameBits) {
  HeadSpec spec = batch_spec();
  HeadProblem problem(spec);
  const HeadResult a = run_head(problem, {});
  const Tensor wide = problem.targets;
  for (const DType dtype : {DType::i32, DType::i64}) {
    problem.targets = Tensor(dtype, {spec.tokens}, wide.values());
    const HeadResult b = run_head(problem, {});
    EXPECT_EQ(a.loss.bytes(), b.loss.bytes());
    EXPECT_EQ(a.d_weight.bytes(), b.d_weight.bytes());
  }
}

TEST(Targets, IgnoreIndexMayBeAClass) {
  HeadSpec spec = batch_spec();
  HeadProblem problem(spec);
  for (const std::int64_t i : {2, 3}) problem.targets.set(i, 0);
  problem.oracle.ignore_index = 0;
  problem.refresh_oracle();
  RunSpec run;
  run.change = [](CrossEntropyOptions& o, auto&, auto&) { o.ignore_index = 0; };
  expect_matches_oracle(problem, run);
}

// A tensor with other strides: each element is at its strided offset, with NaN in the gaps.
struct Strided {
  Strided(const Tensor& t, std::int64_t row_count, std::int64_t column_count,
          std::int64_t rows_apart, std::int64_t columns_apart)
      : rows(row_count),
        columns(column_count),
        row_stride(rows_apart),
        column_stride(columns_apart) {
    const std::int64_t shift = std::min<std::int64_t>(0, row_stride * (rows - 1)) +
                               std::min<std::int64_t>(0, column_stride * (columns - 1));
    origin = -shift;
    const std::int64_t last = std::max<std::int64_t>(0, row_stride * (rows - 1)) +
                              std::max<std::int64_t>(0, column_stride * (columns - 1));
    memory = Tensor(t.view().dtype(), {origin + last + 1});
    for (std::int64_t i = 0; i < rows; ++i) {
      for (std::int64_t k = 0; k < columns; ++k) memory.set(place(i, k), t.get(i * columns + k));
    }
  }
  std::int64_t place(std::int64_t i, std::int64_t k) const {
    return origin + i * row_stride + k * column_stride;
  }
  TensorView view() {
    const TensorView flat = memory.view();
    const std::int64_t shape[] = {rows, columns};
    const std::int64_t strides[] = {row_stride, column_stride};
    return {static_cast<std::byte*>(flat.data()) + origin * size_of(flat.dtype()), flat.dtype(),
            shape, strides};
  }
  std::vector<double> values() const {
    std::vector<double> out;
    for (std::int64_t i = 0; i < rows; ++i) {
      for (std::int64_t k = 0; k < columns; ++k) out.push_back(memory.get(place(i, k)));
    }
    return out;
  }
  std::int64_t rows, columns, row_stride, column_stride, origin = 0;
  Tensor memory;
};

class StridesTest : public testing::TestWithParam<std::string> {};

TEST_P(StridesTest, AnyStridesGiveTheSameNumbers) {
  const std::int64_t strides[][2] = {{kDim + 3, 1}, {2 * kDim, 2}, {1, 200}, {-kDim, 1}, {9, -1}};
  for (const DType dtype : {DType::f32, DType::bf16}) {
    HeadSpec spec = batch_spec();
    spec.dtype = dtype;
    if (!accepts(GetParam(), spec)) continue;
    const HeadProblem problem(spec);
    RunSpec run;
    run.kernel = GetParam();
    const HeadResult plain = run_head(problem, run);
    for (const auto& s : strides) {
      SCOPED_TRACE(testing::Message() << "strides " << s[0] << ", " << s[1]);
      Strided hidden(problem.hidden, spec.tokens, kDim, s[0], s[1]);
      Strided weight(problem.weight, kVocab, kDim, s[0], s[1]);
      Strided d_hidden(plain.d_hidden, spec.tokens, kDim, s[0], s[1]);
      Strided d_weight(plain.d_weight, kVocab, kDim, s[0], s[1]);
      const std::vector<double> gaps = d_weight.memory.values();
      for (Strided* out : {&d_hidden, &d_weight}) {
        for (std::int64_t i = 0; i < out->rows; ++i) {
          for (std::int64_t k = 0; k < kDim; ++k) out->memory.set(out->place(i, k), 77.0);
        }
      }
      run.change = [&](auto&, CrossEntropyInputs& in, CrossEntropyOutputs& out) {
        in.hidden = hidden.view();
        in.weight = weight.view();
        out.d_hidden = d_hidden.view();
        out.d_weight = d_weight.view();
      };
      const HeadResult result = run_head(problem, run);
      EXPECT_EQ(result.loss.bytes(), plain.loss.bytes());
      EXPECT_EQ(d_hidden.values(), plain.d_hidden.values());
      EXPECT_EQ(d_weight.values(), plain.d_weight.values());
      for (std::size_t at = 0; at < gaps.size(); ++at) {
        EXPECT_EQ(std::isnan(gaps[at]),
                  std::isnan(d_weight.memory.get(static_cast<std::int64_t>(at))))
            << "written between elements";
      }
    }
  }
}

TEST_P(StridesTest, BroadcastHiddenIsRead) {
  HeadSpec spec = batch_spec();
  if (!accepts(GetParam(), spec)) spec.dtype = DType::bf16;
  HeadProblem problem(spec);
  for (std::int64_t i = 1; i < spec.tokens; ++i) {
    for (std::int64_t k = 0; k < kDim; ++k) problem.hidden.set(i * kDim + k, problem.hidden.get(k));
  }
  RunSpec run;
  run.kernel = GetParam();
  const HeadResult plain = run_head(problem, run);
  run.change = [&](auto&, CrossEntropyInputs& in, auto&) {
    const std::int64_t shape[] = {spec.tokens, kDim};
    const std::int64_t strides[] = {0, 1};
    in.hidden = ConstTensorView(in.hidden.data(), in.hidden.dtype(), shape, strides);
  };
  const HeadResult broadcast = run_head(problem, run);
  EXPECT_EQ(broadcast.loss.bytes(), plain.loss.bytes());
  EXPECT_EQ(broadcast.d_weight.bytes(), plain.d_weight.bytes());
}

INSTANTIATE_TEST_SUITE_P(AllKernels, StridesTest, testing::ValuesIn(tested_kernels()),
                         [](const auto& kernel) { return kernel.param; });

}  // namespace
}  // namespace logitless::test
