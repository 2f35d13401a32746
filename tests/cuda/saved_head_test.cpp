// Exponentials saved from a forward to its backward: outputs equal those of head_forward, and
// gradients have the bits of head_backward with the same plan.
#include "logitless/saved_head.h"

#include <gtest/gtest.h>

#include <cmath>
#include <string>
#include <utility>
#include <vector>

#include "support/mirror.h"
#include "support/problem.h"

namespace logitless::test {
namespace {

// A head with its tensors, on the kernel's device.
struct Head {
  Head(const std::string& name, const HeadSpec& spec) : kernel(name), problem(spec) {
    options.softcap = spec.softcap;
    options.logit_scale = spec.logit_scale;
  }
  std::vector<std::int64_t> slots() const {
    std::vector<std::int64_t> shape = {problem.spec.tokens};
    if (problem.spec.per_token > 1) shape.push_back(problem.spec.per_token);
    return shape;
  }
  HeadInputs inputs(Mirror& mirror) const {
    HeadInputs in;
    in.hidden = mirror.in(problem.hidden.view());
    in.weight = mirror.in(problem.weight.view());
    in.targets = mirror.in(problem.targets.view());
    in.bias = mirror.in(problem.bias.view());
    return in;
  }
  std::string kernel;
  HeadProblem problem;
  HeadOptions options;
};

struct Result {
  explicit Result(const Head& head)
      : lse(DType::f32, {head.problem.spec.tokens}),
        entropy(DType::f32, {head.problem.spec.tokens}),
        log_prob(DType::f32, head.slots()),
        target_logit(DType::f32, head.slots()),
        argmax(DType::i32, {head.problem.spec.tokens}),
        d_hidden(head.problem.spec.hidden_dtype.value_or(head.problem.spec.dtype),
                 {head.problem.spec.tokens, head.problem.spec.dim}),
        d_weight(head.problem.spec.weight_dtype.value_or(head.problem.spec.dtype),
                 {head.problem.spec.vocab, head.problem.spec.dim}) {
    if (head.problem.spec.bias) d_bias = Tensor(DType::f32, {head.problem.spec.vocab});
  }
  HeadOutputs outputs(Mirror& mirror, bool all) {
    HeadOutputs out;
    out.lse = mirror.out(lse.view());
    out.log_prob = mirror.out(log_prob.view());
    out.target_logit = mirror.out(target_logit.view());
    if (!all) return out;
    out.entropy = mirror.out(entropy.view());
    out.argmax = mirror.out(argmax.view());
    return out;
  }
  HeadGradients gradients(Mirror& mirror) {
    return {mirror.out(d_hidden.view()), mirror.out(d_weight.view()), mirror.out(d_bias.view())};
  }
  Tensor lse, entropy, log_prob, target_logit, argmax, d_hidden, d_weight, d_bias;
};

struct Upstream {
  explicit Upstream(const Head& head)
      : lse(DType::f32, {head.problem.spec.tokens}), log_prob(DType::f32, head.slots()) {
    for (std::int64_t i = 0; i < lse.numel(); ++i) lse.set(i, 0.3 * std::cos(0.7 * double(i)));
    for (std::int64_t i = 0; i < log_prob.numel(); ++i) log_prob.set(i, std::sin(double(i)));
  }
  HeadCotangents cotangents(Mirror& mirror) const {
    HeadCotangents g;
    g.lse = mirror.in(lse.view());
    g.log_prob = mirror.in(log_prob.view());
    return g;
  }
  Tensor lse, log_prob;
};

PlanRequest request_of(const Context& context, std::size_t budget = std::size_t{1} << 30) {
  PlanRequest request;
  request.device = context.device();
  request.memory_budget = budget;
  return request;
}

// all: also with the optional outputs, on which bits and gradients depend. share: part of the
// plan's memory that is offered, where a plan fits into it.
Result kept(const Head& head, const Upstream& upstream, bool all, double share = 1.0) {
  Result result(head);
  Mirror mirror(head.kernel);
  const HeadInputs in = head.inputs(mirror);
  const HeadOutputs out = result.outputs(mirror, all);
  const HeadGradients to = result.gradients(mirror);
  const Context c = make_context(head.kernel);
  LossPlan plan = plan_head_saved(head.options, in, out, to, request_of(c));
  EXPECT_EQ(plan.kind, PlanKind::dense);
  if (share < 1.0) {
    const auto less = static_cast<std::size_t>(share * static_cast<double>(plan.workspace_bytes()));
    try {
      plan = plan_head_saved(head.options, in, out, to, request_of(c, less));
      EXPECT_GT(plan.weight_ranges, 0);
    } catch (const InvalidArgument&) {
    }
  }
  const Workspace workspace(c, plan);
  head_forward_saved(c, plan, head.options, in, out, to, workspace);
  head_backward_saved(c, plan, head.options, in, upstream.cotangents(mirror), to, workspace);
  mirror.finish();
  return result;
}

// Two separate calls, the backward with the plan that saves exponentials.
Result apart(const Head& head, const Upstream& upstream) {
  Result result(head);
  Mirror mirror(head.kernel);
  const HeadInputs in = head.inputs(mirror);
  const HeadOutputs out = result.outputs(mirror, true);
  const HeadGradients to = result.gradients(mirror);
  const HeadCotangents g = upstream.cotangents(mirror);
  const Context c = make_context(head.kernel);
  const LossPlan forward = plan_head_forward(head.options, in, out, request_of(c));
  const Workspace workspace(c, forward);
  head_forward(c, forward, head.options, in, out, workspace);
  const LossPlan backward = plan_head_saved(head.options, in, {}, to, request_of(c));
  const Workspace backward_workspace(c, backward);
  head_backward(c, backward, head.options, in, g, to, backward_workspace);
  mirror.finish();
  return result;
}

// Two plans sum in fp32 in different orders: the products of a logit where cuBLAS splits them by
// the size of the chunk, and the sums of each tile. Of 20000 logits of 320 products with a sum of
// size 3 the greatest difference between two orders is 3.7e-6 (1 + |z|), and 9e-7 in the mean.
void expect_near(const Tensor& a, const Tensor& b) {
  for (std::int64_t i = 0; i < a.numel(); ++i)
    ASSERT_NEAR(a.get(i), b.get(i), 4e-6 * (1 + std::abs(b.get(i)))) << i;
}

HeadSpec spec_of(std::int64_t tokens, std::int64_t dim, std::int64_t vocab, DType dtype) {
  HeadSpec s;
  s.tokens = tokens;
  s.dim = dim;
  s.vocab = vocab;
  s.dtype = dtype;
  s.weight_scale = 3.0;
  s.ignored = 0.1;
  return s;
}

class SavedHead : public testing::TestWithParam<std::string> {};

TEST_P(SavedHead, GradientsHaveTheBitsOfOneCallAndOutputsThoseOfTheForward) {
  for (const DType dtype : tested_dtypes(GetParam())) {
    std::vector<HeadSpec> specs = {spec_of(700, 320, 2100, dtype), spec_of(1030, 264, 4097, dtype),
                                   spec_of(130, 64, 9000, dtype), spec_of(0, 64, 500, dtype)};
    specs[0].bias = true;
    specs[0].softcap = 20.0f;
    specs[1].per_token = 3;
    specs[2].logit_scale = 0.5f;
    if (dtype == DType::f32) {  // beside 16 bits
      specs.push_back(spec_of(310, 40, 1300, dtype));
      specs.push_back(specs.back());
      specs[4].weight_dtype = DType::bf16;
      specs[5].hidden_dtype = DType::f16;
    }
    for (const HeadSpec& spec : specs) {
      if (!accepts(GetParam(), spec)) continue;
      SCOPED_TRACE(testing::Message() << name_of(dtype) << " " << spec.tokens << " tokens");
      const Head head(GetParam(), spec);
      const Upstream upstream(head);
      const Result b = apart(head, upstream);
      for (const double share : {1.0, 0.75}) {
        const Result same = kept(head, upstream, false, share);
        EXPECT_TRUE(same.d_hidden.bytes() == b.d_hidden.bytes()) << share;
        EXPECT_TRUE(same.d_weight.bytes() == b.d_weight.bytes()) << share;
        EXPECT_TRUE(same.d_bias.bytes() == b.d_bias.bytes()) << share;
      }
      const Result a = kept(head, upstream, true);
      if (spec.tokens > 0) {
        EXPECT_LE(relative_error(a.d_hidden.values(), b.d_hidden.values()),
                  gradient_bound(spec.hidden_dtype.value_or(dtype)));
        EXPECT_LE(relative_error(a.d_weight.values(), b.d_weight.values()),
                  gradient_bound(spec.weight_dtype.value_or(dtype)));
      }
      EXPECT_EQ(a.argmax.bytes(), b.argmax.bytes());
      expect_near(a.lse, b.lse);
      expect_near(a.log_prob, b.log_prob);
      expect_near(a.target_logit, b.target_logit);
      expect_near(a.entropy, b.entropy);
    }
  }
}

// Tensors of a pair of calls on the device, and their plan.
struct Pair {
  explicit Pair(const Head& of)
      : head(of),
        upstream(of),
        result(of),
        mirror(of.kernel),
        in(of.inputs(mirror)),
        out(result.outputs(mirror, true)),
        to(result.gradients(mirror)),
        context(make_context(of.kernel)),
        plan(plan_head_saved(of.options, in, out, to, request_of(context))),
        workspace(context, plan) {}
  void forward(const LossPlan& with) {
    head_forward_saved(context, with, head.options, in, out, to, workspace);
  }
  void backward(const HeadCotangents& g) {
    head_backward_saved(context, plan, head.options, in, g, to, workspace);
  }
  const Head& head;
  Upstream upstream;
  Result result;
  Mirror mirror;
  HeadInputs in;
  HeadOutputs out;
  HeadGradients to;
  Context context;
  LossPlan plan;
  Workspace workspace;
};

TEST_P(SavedHead, OutputsMayChangeInBetween) {
  const HeadSpec spec = spec_of(300, 64, 1000, narrow_dtype(GetParam()));
  const Head head(GetParam(), spec);
  Pair pair(head);
  pair.forward(pair.plan);
  for (const TensorView& view : {pair.out.lse, pair.out.log_prob, pair.out.entropy})
    cuda::fill_device(view.data(), 255, static_cast<std::size_t>(view.bytes()),
                      pair.context.stream());
  pair.backward(pair.upstream.cotangents(pair.mirror));
  pair.mirror.finish();
  const Result expected = kept(head, pair.upstream, true);
  EXPECT_EQ(pair.result.d_hidden.bytes(), expected.d_hidden.bytes());
  EXPECT_EQ(pair.result.d_weight.bytes(), expected.d_weight.bytes());
}

TEST_P(SavedHead, WhatItCannotDoIsNamed) {
  const HeadSpec spec = spec_of(300, 64, 1000, narrow_dtype(GetParam()));
  const Head head(GetParam(), spec);
  Pair pair(head);
  HeadCotangents g;
  g.weighted_logit_sum = pair.upstream.cotangents(pair.mirror).lse;
  EXPECT_THROW(pair.backward(g), InvalidArgument);
  EXPECT_THROW(
      pair.forward(plan_head_forward(head.options, pair.in, pair.out, request_of(pair.context))),
      InvalidArgument);
  g = {};
  g.entropy = pair.upstream.cotangents(pair.mirror).lse;
  pair.plan = plan_head_saved(head.options, pair.in, {}, pair.to, request_of(pair.context));
  EXPECT_THROW(pair.backward(g), InvalidArgument);  // the forward has no entropy
  HeadSpec capped = spec;
  capped.softcap = 20.0f;
  const Head other(GetParam(), capped);
  Pair under_softcap(other);
  EXPECT_THROW(under_softcap.backward(g), InvalidArgument);
}

GTEST_ALLOW_UNINSTANTIATED_PARAMETERIZED_TEST(SavedHead);  // without a GPU
INSTANTIATE_TEST_SUITE_P(AllKernels, SavedHead, testing::ValuesIn(tested_kernels()),
                         [](const auto& kernel) { return kernel.param; });

}  // namespace
}  // namespace logitless::test
