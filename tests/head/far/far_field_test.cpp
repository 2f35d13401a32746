// The far field against float64: gradients from selected tiles and the masses of skipped ones, on
// every kernel that has it and with every option that changes the gradient.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <utility>

#include "kernels/cpu_head.h"
#include "support/far_cases.h"
#include "support/mirror.h"

namespace logitless::test {
namespace {

class FarField : public FarKernels {
 protected:
  // The vocabulary is no multiple of a tile, and D is odd.
  HeadSpec spec(std::int64_t tokens = 300, std::int64_t dim = 13) const {
    return FarKernels::spec(tokens, dim, 11 * 128 + 37, 3);
  }
};

void expect_some_selected(const FarResult& a) {
  EXPECT_GT(a.statistics.far.selected, 0.0);
  EXPECT_LT(a.statistics.far.selected, 2.0 / 3.0);
  EXPECT_FALSE(a.statistics.far.dense_fallback);
}

FarResult check(const FarProblem& problem, const RunSpec& run, double fraction = 0.4) {
  SCOPED_TRACE(describe(problem.spec));
  FarResult a = run_far(problem, run, fraction);
  expect_some_selected(a);
  expect_far_field(problem, run, a);
  return a;
}

TEST_P(FarField, IsTheOraclesForEachDtypeAndShape) {
  struct Shape {
    std::int64_t tokens, dim, vocab;
    bool of_gpu = false;  // larger than the CPU needs for its blocks
  };
  const Shape shapes[] = {
      {300, 13, 11 * 128 + 37},       // small last tile, small last block of tokens
      {128, 16, 8 * 128},             // full tiles, one full block
      {129, 1, 6 * 128 + 1},          // tile of one entry
      {1, 7, 9 * 128 + 127},          // one token
      {40, 3, 70 * 128 + 5},          // several tiles in a segment
      {17, 600, 5 * 128 + 64},        // more than one block of columns
      {600, 5, 6 * 128 + 7},          // three blocks of tokens on a CPU
      {700, 72, 13 * 128 + 7, true},  // several blocks of tokens on a GPU
  };
  for (const DType dtype : {DType::f32, DType::bf16, DType::f16}) {
    for (const Shape& shape : shapes) {
      if (shape.of_gpu && !is_device_kernel(GetParam())) continue;
      HeadSpec s = spec();
      s.tokens = shape.tokens;
      s.dim = shape.dim;
      s.vocab = shape.vocab;
      s.dtype = dtype;
      if (accepts_far(GetParam(), s)) check(FarProblem(s), run());
    }
  }
}

// Results are far from exact gradients: the comparison above would detect a plan that selects
// everything, and one that drops skipped tiles.
TEST_P(FarField, IsNeitherExactNorDropped) {
  HeadSpec spec = this->spec();
  spec.bias = true;
  const FarProblem problem(spec);
  const FarResult a = check(problem, run());
  const FarOracle& o = a.oracle;
  const double contract = gradient_bound(spec.dtype);
  if (spec.dtype == DType::f32) {  // in 16 bit, the skipped tiles' part of d_hidden is within its
                                   // rounding error
    EXPECT_GT(distance(o.exact.d_hidden, o.far.d_hidden),
              3 * (o.hidden_slack + contract * norm(o.far.d_hidden)));
  }
  EXPECT_GT(distance(o.exact.d_weight, o.far.d_weight),
            3 * (o.weight_slack + contract * norm(o.far.d_weight)));
  EXPECT_GT(distance(o.exact.d_bias, o.far.d_bias),
            3 * (o.bias_slack + contract * norm(o.far.d_bias)));
  // The mass is conserved: the sum of d_bias is 0, like that of the exact one, except for 16-bit
  // rounding.
  double total = 0, exact = 0, size = 0;
  for (std::int64_t j = 0; j < spec.vocab; ++j) {
    total += a.d_bias.get(j);
    exact += o.exact.d_bias[j];
    size += std::abs(o.exact.d_bias[j]);
  }
  EXPECT_LE(std::abs(total - exact), 1.5e-3 * o.far_mass + contract * size);
  EXPECT_GT(o.far_mass, 4 * (1.5e-3 * o.far_mass + contract * size)) << "dropping it would pass";
}

TEST_P(FarField, OptionsOneByOne) {
  for (const FarOption& option : far_options(/*softcap=*/true)) {
    SCOPED_TRACE(option.name);
    HeadSpec s = spec(150, 9);
    option.change(s);
    check(FarProblem(s), run());
  }
}

TEST_P(FarField, MaskedVocab) {
  HeadSpec spec = this->spec();
  spec.bias = true;
  spec.ignored = 0.8;  // enough to mask full tiles without a target
  spec.tokens = 60;
  FarProblem problem(spec);
  problem.mask_vocab();
  const FarResult a = check(problem, run());
  for (std::int64_t j = 0; j < spec.vocab; ++j) EXPECT_TRUE(std::isfinite(a.d_bias.get(j))) << j;
}

TEST_P(FarField, SeveralChunks) {
  for (const DType dtype : {DType::f32, DType::bf16, DType::f16}) {
    HeadSpec spec = this->spec();
    spec.tokens = 420;
    spec.dim = 6;
    spec.dtype = dtype;
    spec.bias = true;
    spec.ignored = 0.1;
    if (is_device_kernel(GetParam())) {  // its chunks have at least 256 tokens
      spec.tokens = 1100;
      spec.dim = 8;
    }
    if (!accepts_far(GetParam(), spec)) continue;
    const FarProblem problem(spec);
    RunSpec r = run();
    r.tau = 0.02f;
    r.budget = least_far_budget(problem, r);
    r.tau = 0.0f;
    const FarResult a = check(problem, r);
    EXPECT_LT(a.plan.chunk_tokens * 3, a.statistics.valid_tokens);
    // 16-bit gradients still need fp32 sums between chunks, which take memory.
    r.gradient_dtype = dtype;
    r.budget += static_cast<std::size_t>(4 * (spec.vocab + spec.tokens) * spec.dim) + 1024;
    EXPECT_LT(check(problem, r).plan.chunk_tokens * 2, a.statistics.valid_tokens);
  }
}

TEST_P(FarField, UpstreamGradients) {
  HeadSpec spec = this->spec();
  spec.tokens = 200;
  for (const Reduction reduction : {Reduction::mean, Reduction::sum}) {
    spec.reduction = reduction;
    RunSpec r = run();
    r.grad_loss = -2.5;
    check(FarProblem(spec), r);
  }
  spec.reduction = Reduction::none;
  const FarProblem problem(spec);
  RunSpec r = run();
  r.grad_losses = some_upstream(spec.tokens);
  check(problem, r);
  // A block without gradients selects nothing and gets 0.
  r.grad_losses.assign(static_cast<std::size_t>(spec.tokens), 0.0);
  r.grad_losses.back() = 1.0;
  const FarResult last = check(problem, r, 0.2);
  for (std::int64_t i = 0; i + 1 < spec.tokens; ++i)
    for (std::int64_t k = 0; k < spec.dim; ++k) ASSERT_EQ(last.d_hidden.get(i * spec.dim + k), 0.0);
}

TEST_P(FarField, FrozenSidesDoNotChangeTheOther) {
  HeadSpec spec = this->spec();
  spec.bias = true;
  spec.label_smoothing = 0.1f;
  const FarProblem problem(spec);
  for (const int wanted : {1, 2, 4, 5}) {
    SCOPED_TRACE(wanted);
    RunSpec r = run();
    set_wanted(r, wanted);
    const FarResult a = check(problem, r);
    EXPECT_EQ(a.d_hidden.defined(), r.d_hidden);
    EXPECT_EQ(a.d_weight.defined(), r.d_weight);
    EXPECT_EQ(a.d_bias.defined(), r.d_bias);
  }
}

TEST_P(FarField, Accumulates) {
  HeadSpec spec = this->spec();
  spec.bias = true;
  spec.ignored = 0.2;
  const FarProblem problem(spec);
  const FarResult plain = check(problem, run());
  RunSpec r = run();
  r.tau = static_cast<float>(plain.tau);
  r.audit_rows = 32;  // of this call's part only
  add_to_gradients(r);
  const FarResult added = call_far(problem, r);
  expect_added(added, plain);
  EXPECT_EQ(added.bound.bytes(), plain.bound.bytes());
  EXPECT_EQ(added.statistics.far.bound, plain.statistics.far.bound);
  r.change = nullptr;
  EXPECT_EQ(call_far(problem, r).statistics.far.audited_error, added.statistics.far.audited_error);
}

TEST_P(FarField, NextToken) {
  constexpr std::int64_t kBatch = 3, kTime = 50;
  HeadSpec spec = this->spec();
  spec.tokens = kBatch * kTime;
  FarProblem problem(spec);
  RunSpec r = run();
  r.audit_rows = 20;
  predict_next_tokens(problem, r, kBatch, kTime);
  const FarResult a = check(problem, r);
  EXPECT_EQ(a.statistics.valid_tokens, kBatch * (kTime - 1));
  EXPECT_EQ(a.statistics.far.audited_tokens, 20);
  EXPECT_GT(a.statistics.far.audited_error, 0.0);
}

// Weights with strides between rows and columns. Gaps of d_weight are not written.
TEST_P(FarField, StridedWeightsAndGradients) {
  HeadSpec spec = this->spec();
  const FarProblem problem(spec);
  const FarResult plain = check(problem, run());
  const std::int64_t shape[] = {spec.vocab, spec.dim};
  std::vector<std::pair<std::int64_t, std::int64_t>> strides_of = {
      {spec.dim + 3, 1}, {2 * spec.dim + 1, 2}, {1, spec.vocab + 5}};
  if (is_device_kernel(GetParam())) strides_of = {{spec.dim + 8, 1}};  // rows of full 16 bytes
  for (const auto& [row, column] : strides_of) {
    SCOPED_TRACE(row);
    const std::int64_t last = (spec.vocab - 1) * row + (spec.dim - 1) * column + 1;
    Tensor weight(spec.dtype, {last}), d_weight(DType::f32, {last});
    for (std::int64_t i = 0; i < last; ++i) {
      weight.set(i, NAN);
      d_weight.set(i, 77.0);
    }
    for (std::int64_t j = 0; j < spec.vocab; ++j)
      for (std::int64_t k = 0; k < spec.dim; ++k)
        weight.set(j * row + k * column, problem.weight.get(j * spec.dim + k));
    const std::int64_t strides[] = {row, column};
    RunSpec r = run();
    r.tau = static_cast<float>(plain.tau);
    r.change = [&](auto&, CrossEntropyInputs& in, CrossEntropyOutputs& out) {
      in.weight = ConstTensorView(weight.view().data(), spec.dtype, shape, strides);
      out.d_weight = TensorView(d_weight.view().data(), DType::f32, shape, strides);
    };
    const FarResult a = call_far(problem, r);
    EXPECT_EQ(a.loss.bytes(), plain.loss.bytes());
    EXPECT_EQ(a.d_hidden.bytes(), plain.d_hidden.bytes());
    for (std::int64_t j = 0; j < spec.vocab; ++j) {
      for (std::int64_t k = 0; k < spec.dim; ++k) {
        ASSERT_EQ(d_weight.get(j * row + k * column), plain.d_weight.get(j * spec.dim + k));
        d_weight.set(j * row + k * column, 77.0);
      }
    }
    for (std::int64_t i = 0; i < last; ++i) ASSERT_EQ(d_weight.get(i), 77.0) << "written between";
  }
}

// The library's order, and the identity.
TEST_P(FarField, OrdersOfTheLibraryAndOfTheVocab) {
  HeadSpec spec = this->spec();
  FarProblem problem(spec);
  const Context context;
  const std::vector<float> average = average_probability(
      context, std::as_const(problem.hidden).view(), std::as_const(problem.weight).view());
  problem.order =
      make_vocab_order(context, std::as_const(problem.weight).view(), average, OrderOptions{4, 9});
  const FarResult made = check(problem, run());
  const double error = distance(made.d_hidden.values(), made.oracle.exact.d_hidden);
  // Dropping the skipped tiles would lose about bias_slack / 1.5e-3 of the gradient. Their
  // centroids, over similar entries, lose a small part of that.
  const double dropped = made.oracle.hidden_slack / 1.5e-3;
  EXPECT_LT(error, 0.3 * dropped);

  // Ordered by id, tiles are mixtures with about equal masses: the selection is by token.
  std::vector<std::int64_t> vocab_ids(problem.order.vocab_ids().begin(),
                                      problem.order.vocab_ids().end());
  std::sort(vocab_ids.begin(), vocab_ids.end());
  problem.order = VocabOrder(vocab_ids, average);
  const FarResult a = run_far(problem, run(), 0.5);
  expect_far_field(problem, run(), a);
}

TEST_P(FarField, ExtraOutputsAreThoseOfVocabNotPositions) {
  HeadSpec spec = this->spec();
  const FarProblem problem(spec);
  RunSpec r = run();
  r.extras = true;
  const FarResult far = check(problem, r);
  r.plan = PlanKind::dense;
  const HeadResult dense = run_head(problem, r);
  EXPECT_EQ(far.argmax.bytes(), dense.argmax.bytes());
  EXPECT_EQ(far.statistics.correct, dense.statistics.correct);
  EXPECT_LE(relative_error(far.entropy.values(), dense.entropy.values()), 1e-6);
  EXPECT_LE(relative_error(far.target_logit.values(), dense.target_logit.values()), 1e-6);
  EXPECT_LE(relative_error(far.log_prob.values(), dense.log_prob.values()), 1e-6);
}

// The audit's memory follows all other buffers, and a call without an order is refused.
TEST_P(FarField, RefusesAWorkspaceWithoutItsAuditAndACallWithoutAnOrder) {
  HeadSpec spec = this->spec();
  const FarProblem problem(spec);
  Tensor lse(DType::f32, {spec.tokens}), d_hidden(DType::f32, {spec.tokens, spec.dim});
  CrossEntropyInputs in = problem.inputs();
  in.order = problem.order;
  CrossEntropyOutputs out;
  out.lse = lse.view();
  out.d_hidden = d_hidden.view();
  Mirror mirror(GetParam());
  in = mirror.in(in);
  out = mirror.out(out);
  const Context context = make_context(GetParam());
  const LossPlan plan = plan_cross_entropy(context, problem.options(), in, out,
                                           {.kind = PlanKind::far_backward, .audit_rows = 32});
  ASSERT_NE(plan.audit, nullptr);
  const Workspace whole(context, plan);
  EXPECT_THROW(cross_entropy(context, plan, problem.options(), in, out,
                             Workspace(whole.data(), plan.workspace_bytes() - 1)),
               InvalidArgument);

  HeadInputs head;
  head.hidden = in.hidden;
  head.weight = in.weight;
  head.targets = in.targets;
  HeadCotangents cotangents;
  cotangents.lse = out.lse;
  HeadGradients gradients;
  gradients.d_hidden = out.d_hidden;
  const LossPlan backward = plan_head_backward(context, {}, head, cotangents, gradients,
                                               {.kind = PlanKind::far_backward});
  EXPECT_THROW(head_backward(context, backward, {}, head, cotangents, gradients,
                             Workspace(context, backward)),
               InvalidArgument);
}

GTEST_ALLOW_UNINSTANTIATED_PARAMETERIZED_TEST(FarField);  // without a GPU
INSTANTIATE_TEST_SUITE_P(AllKernels, FarField, testing::ValuesIn(far_kernels()),
                         [](const auto& kernel) { return kernel.param; });

}  // namespace
}  // namespace logitless::test
