// Every invalid argument is refused with a message that names it, before anything is written.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <functional>
#include <utility>

#include "kernels/cpu_facts.h"
#include "support/problem.h"

namespace logitless::test {
namespace {

constexpr std::int64_t kTokens = 6, kDim = 4, kVocab = 9;

// A valid call; each table entry makes one argument invalid.
struct Call {
  Call() : problem(spec()) {
    in = problem.inputs();
    options = problem.options();
    out.loss = loss.view();
    out.lse = lse.view();
    out.log_prob = log_prob.view();
    out.argmax = argmax.view();
    out.d_hidden = d_hidden.view();
    out.d_weight = d_weight.view();
    out.d_bias = d_bias.view();
  }
  static HeadSpec spec() {
    HeadSpec s;
    s.tokens = kTokens;
    s.dim = kDim;
    s.vocab = kVocab;
    s.bias = true;
    return s;
  }
  static ConstTensorView shaped(const ConstTensorView& v, std::initializer_list<std::int64_t> s) {
    return {v.data(), v.dtype(), s};
  }
  static ConstTensorView typed(const ConstTensorView& v, DType dtype) {
    return {v.data(), dtype, {v.size(0)}};
  }
  const std::vector<Tensor*> outputs() {
    return {&loss, &lse, &log_prob, &argmax, &d_hidden, &d_weight, &d_bias};
  }

  HeadProblem problem;
  Tensor loss{DType::f32, {}}, lse{DType::f32, {kTokens}}, log_prob{DType::f32, {kTokens}};
  Tensor argmax{DType::i64, {kTokens}}, d_hidden{DType::f32, {kTokens, kDim}};
  Tensor d_weight{DType::f32, {kVocab, kDim}}, d_bias{DType::f32, {kVocab}};
  Tensor vector{DType::f32, {kTokens}, std::vector<double>(kTokens, 1.0)};
  Tensor pairs{DType::f32, {kTokens, 2}, std::vector<double>(2 * kTokens, 0.5)};
  Tensor of_vocab{DType::f32, {kVocab}, std::vector<double>(kVocab, 1.0)};
  CrossEntropyInputs in;
  CrossEntropyOptions options;
  CrossEntropyOutputs out;
  std::size_t budget = 0;
};

struct Row {
  const char* message;  // the full message, or its beginning if it ends in "..."
  void (*change)(Call&);
};

const Row kRows[] = {
    {"hidden: expected a tensor [..., D], got none", [](Call& c) { c.in.hidden = {}; }},
    {"weight: expected a tensor [V, D], got none", [](Call& c) { c.in.weight = {}; }},
    {"targets: expected a tensor, got none", [](Call& c) { c.in.targets = {}; }},
    {"hidden: expected [..., D], got a scalar",
     [](Call& c) { c.in.hidden = Call::shaped(c.in.hidden, {}); }},
    {"weight: expected [V, D], got f32[36]",
     [](Call& c) { c.in.weight = Call::shaped(c.in.weight, {36}); }},
    {"hidden: expected f32, bf16 or f16, got i32",
     [](Call& c) {
       c.in.hidden = {c.in.hidden.data(), DType::i32, {kTokens, kDim}};
     }},
    {"weight: expected f32 as hidden or 16 bits, got i32",
     [](Call& c) {
       c.in.weight = {c.in.weight.data(), DType::i32, {kVocab, kDim}};
     }},
    {"weight: expected bf16 as hidden or f32, got f16",
     [](Call& c) {
       c.in.hidden = {c.in.hidden.data(), DType::bf16, {kTokens, kDim}};
       c.in.weight = {c.in.weight.data(), DType::f16, {kVocab, kDim}};
     }},
    {"d_weight: expected f32, got f16",
     [](Call& c) {
       c.in.hidden = {c.in.hidden.data(), DType::bf16, {kTokens, kDim}};
       c.out.d_weight = {c.out.d_weight.data(), DType::f16, {kVocab, kDim}};
     }},
    {"weight: f32[12, 3] does not go with hidden f32[6, 4]: their last dimensions differ",
     [](Call& c) {
       c.in.weight = Call::shaped(c.in.weight, {12, 3});
     }},
    {"hidden: f32[6, 4] has no data",
     [](Call& c) {
       c.in.hidden = {nullptr, DType::f32, {kTokens, kDim}};
     }},
    {"bias: expected shape [9], got f32[8]",
     [](Call& c) { c.in.bias = Call::shaped(c.in.bias, {8}); }},
    {"bias: expected f32, got f16",
     [](Call& c) { c.in.bias = Call::typed(c.in.bias, DType::f16); }},
    {"targets: expected shape [6] to go with hidden f32[6, 4], got i64[5]",
     [](Call& c) { c.in.targets = Call::shaped(c.in.targets, {5}); }},
    {"targets: expected i32 or i64, got f32",
     [](Call& c) { c.in.targets = Call::typed(c.in.targets, DType::f32); }},
    {"targets: 9 at position 3 is outside [0, 9) and not ignore_index -100",
     [](Call& c) { c.problem.targets.set(3, 9); }},
    {"targets: -1 at position 5 is outside [0, 9) and not ignore_index -100",
     [](Call& c) { c.problem.targets.set(5, -1); }},
    {"class_weight: expected shape [9], got f32[6]",
     [](Call& c) { c.in.class_weight = std::as_const(c.vector).view(); }},
    {"token_weight: expected shape [6] to go with hidden f32[6, 4], got f32[9]",
     [](Call& c) { c.in.token_weight = std::as_const(c.of_vocab).view(); }},
    {"token_weight: expected f32, got bf16",
     [](Call& c) { c.in.token_weight = Call::typed(std::as_const(c.vector).view(), DType::bf16); }},
    {"targets: expected shape [6, 2] to go with hidden f32[6, 4], got i64[6]",
     [](Call& c) { c.in.target_weight = std::as_const(c.pairs).view(); }},
    {"target_logit, log_prob: defined for one target a token; ...",
     [](Call& c) {
       c.in.target_weight = std::as_const(c.pairs).view();
       c.in.targets = {c.pairs.view().data(), DType::i32, {kTokens, 2}};
     }},
    {"label_smoothing: expected a number in [0, 1], got 1.5",
     [](Call& c) { c.options.label_smoothing = 1.5f; }},
    {"label_smoothing: expected a number in [0, 1], got -0.5",
     [](Call& c) { c.options.label_smoothing = -0.5f; }},
    {"label_smoothing: expected a number in [0, 1], got nan",
     [](Call& c) { c.options.label_smoothing = NAN; }},
    {"z_loss: expected a number >= 0, got -1", [](Call& c) { c.options.z_loss = -1.0f; }},
    {"z_loss: expected a number >= 0, got nan", [](Call& c) { c.options.z_loss = NAN; }},
    {"softcap: expected a number > 0, or 0 for none, got -30",
     [](Call& c) { c.options.softcap = -30.0f; }},
    {"softcap: expected a number > 0, or 0 for none, got inf",
     [](Call& c) { c.options.softcap = INFINITY; }},
    {"logit_scale: expected a finite number other than 0, got 0",
     [](Call& c) { c.options.logit_scale = 0.0f; }},
    {"normalizer: expected a number > 0, got 0", [](Call& c) { c.options.normalizer = 0.0; }},
    {"normalizer: only reduction mean divides by it",
     [](Call& c) {
       c.options.normalizer = 3.0;
       c.options.reduction = Reduction::sum;
     }},
    {"grad_losses: only reduction none has a gradient for each token; give grad_loss",
     [](Call& c) { c.in.grad_losses = std::as_const(c.vector).view(); }},
    {"grad_loss: expected a finite number, got inf", [](Call& c) { c.in.grad_loss = INFINITY; }},
    {"next_token: expected hidden [B, T, D], got f32[6, 4]",
     [](Call& c) { c.options.next_token = true; }},
    {"loss: expected one f32, got f32[6]", [](Call& c) { c.out.loss = c.lse.view(); }},
    {"loss: expected shape [6] to go with hidden f32[6, 4], got f32[]",
     [](Call& c) { c.options.reduction = Reduction::none; }},
    {"lse: expected shape [6] to go with hidden f32[6, 4], got f32[9]",
     [](Call& c) { c.out.lse = c.d_bias.view(); }},
    {"argmax: expected i32 or i64, got f32", [](Call& c) { c.out.argmax = c.lse.view(); }},
    {"d_hidden: expected the shape of f32[6, 4], got f32[9, 4]",
     [](Call& c) { c.out.d_hidden = c.d_weight.view(); }},
    {"d_weight: expected f32, got bf16",
     [](Call& c) {
       c.out.d_weight = {c.d_weight.view().data(), DType::bf16, {kVocab, kDim}};
     }},
    {"d_weight: f32[9, 4] ...",
     [](Call& c) {
       const std::int64_t shape[] = {kVocab, kDim};
       const std::int64_t strides[] = {0, 1};
       c.out.d_weight = {c.d_weight.view().data(), DType::f32, shape, strides};
     }},
    {"d_bias: asked for without a bias", [](Call& c) { c.in.bias = {}; }},
    {"memory_budget: 100 B (100 bytes) is below the least plan, ...",
     [](Call& c) { c.budget = 100; }},
};

void expect_message(const std::string& got, const std::string& expected) {
  if (expected.size() > 3 && expected.substr(expected.size() - 3) == "...") {
    const std::string beginning = expected.substr(0, expected.size() - 3);
    EXPECT_EQ(got.substr(0, beginning.size()), beginning) << got;
  } else {
    EXPECT_EQ(got, expected);
  }
}

std::string refusal(const std::function<void()>& body) {
  try {
    body();
  } catch (const InvalidArgument& e) {
    return e.what();
  }
  return "accepted";
}

TEST(Errors, EachBadArgumentIsNamedAndNothingIsWritten) {
  const Context context;
  const Call good;
  const LossPlan plan = plan_cross_entropy(context, good.options, good.in, good.out);
  const Workspace workspace(context, plan);
  for (const Row& row : kRows) {
    SCOPED_TRACE(row.message);
    Call call;
    for (Tensor* t : call.outputs()) t->fill(7.0);
    row.change(call);
    expect_message(
        refusal([&] { cross_entropy(Context(), call.options, call.in, call.out, call.budget); }),
        row.message);
    // more tokens than needed are fine
    if (call.budget == 0) {
      EXPECT_NE(refusal([&] {
                  cross_entropy(context, plan, call.options, call.in, call.out, workspace);
                }),
                "accepted");
    }
    for (Tensor* t : call.outputs()) {
      for (const double value : t->values()) EXPECT_EQ(value, 7.0);
    }
  }
}

TEST(Errors, TheUnchangedCallIsAccepted) {
  Call call;
  EXPECT_EQ(refusal([&] { cross_entropy(Context(), call.options, call.in, call.out); }),
            "accepted");
}

TEST(Errors, PlansAndWorkspacesOfOtherCalls) {
  Call call;
  const Context context;
  const PlanRequest request{context.device(), 0, {}, 0.0};
  const auto run = [&](const LossPlan& plan, const Workspace& workspace) {
    return refusal(
        [&] { cross_entropy(context, plan, call.options, call.in, call.out, workspace); });
  };
  const LossPlan plan = plan_cross_entropy(call.options, call.in, call.out, request);
  const Workspace workspace(context, plan);
  EXPECT_EQ(run(plan, workspace), "accepted");

  HeadFeatures features = plan.features;
  features.argmax = !features.argmax;
  EXPECT_EQ(run(plan_head(plan.shape, features, request), workspace),
            "plan: made for other options, inputs or outputs than this call's; plan again with the "
            "same arguments");
  HeadShape shape = plan.shape;
  shape.vocab = kVocab + 1;
  EXPECT_EQ(run(plan_head(shape, plan.features, request), workspace),
            "plan: made for f32 [*, 4] x [10, 4], called with f32 [*, 4] x [9, 4]");
  shape = plan.shape;
  shape.tokens = kTokens - 1;
  EXPECT_EQ(run(plan_head(shape, plan.features, request), workspace),
            "plan: made for at most 5 tokens, called with 6");
  shape.tokens = kTokens + 100;  // A plan may be made for another machine, but is refused when it
                                 // is used here. The machine of this test has no vector
                                 // instructions, so most kernels are those of other machines.
  const LossPlan larger = plan_head(shape, plan.features, request);
  EXPECT_EQ(run(larger, Workspace(context, larger)), "accepted");

  expect_message(run(plan, Workspace(workspace.data(), 64)), "workspace: 64 bytes, the plan ...");
  EXPECT_EQ(
      run(plan, Workspace(static_cast<std::byte*>(workspace.data()) + 4, plan.workspace_bytes())),
      "workspace: expected an address aligned to 64 bytes");
}

TEST(Errors, Contexts) {
  const auto make = [](ContextOptions options) {
    return refusal([&] { Context context(std::move(options)); });
  };
  ContextOptions options;
  options.threads = -3;
  EXPECT_EQ(make(options), "threads: expected 0 (all cores) to 1024, got -3");
  options = {};
  options.kernel = "abacus";
  expect_message(make(options), "kernel: 'abacus' is unknown; expected one of ...");
  setenv("LOGITLESS_CPU", "slide_rule", 1);
  expect_message(make({}), "LOGITLESS_CPU: 'slide_rule' is unknown; expected one of ...");
  setenv("LOGITLESS_CPU", "scalar", 1);
  EXPECT_EQ(Context().device().kernel, "scalar");
  unsetenv("LOGITLESS_CPU");
  for (const std::string& name : kernel_names(false)) {
    const std::vector<std::string> runnable = kernel_names();
    if (std::find(runnable.begin(), runnable.end(), name) != runnable.end()) continue;
    options.kernel = name;
    expect_message(make(options), ("kernel: " + name + " cannot run here: ...").c_str());
  }
}

// there is one instruction set, which every machine has
TEST(Errors, KernelsOfOtherMachines) {
  const AssumedCpu plain{CpuFacts{}};
  const std::vector<std::string> runnable = kernel_names();
  int refused = 0;
  for (const std::string& name : kernel_names(false)) {
    if (std::find(runnable.begin(), runnable.end(), name) != runnable.end()) continue;
    HeadSpec spec = Call::spec();
    spec.dtype = DType::bf16;
    const HeadProblem problem(spec);
    Tensor loss(DType::f32, {});
    CrossEntropyOutputs out;
    out.loss = loss.view();
    PlanRequest request{DeviceLimits{}, 0, {}, 0.0};
    request.device.kernel = name;
    const LossPlan plan = plan_cross_entropy({}, problem.inputs(), out, request);
    EXPECT_EQ(plan.kernel, name);
    const Context context;
    try {
      cross_entropy(context, plan, {}, problem.inputs(), out, Workspace(context, plan));
      FAIL() << name;
    } catch (const Unsupported& e) {
      expect_message(e.what(),
                     "plan: kernel " + name + " cannot run here: the processor has no ...");
      ++refused;
    }
    try {
      ContextOptions options;
      options.kernel = name;
      const Context other(std::move(options));
      FAIL() << name;
    } catch (const InvalidArgument& e) {
      expect_message(e.what(), "kernel: " + name + " cannot run here: the processor has no ...");
    }
  }
#if defined(__x86_64__)
  EXPECT_EQ(refused, 4);
#else
  EXPECT_EQ(refused, 0);  // one instruction set, which every machine has
#endif
}

TEST(Errors, OfThePrimitive) {
  Call call;
  const Context context;
  HeadInputs in;
  in.hidden = call.in.hidden;
  in.weight = call.in.weight;
  in.targets = call.in.targets;
  HeadOutputs out;
  out.lse = call.lse.view();
  const auto forward = [&](const HeadOptions& options) {
    return refusal([&] { plan_head_forward(options, in, out); });
  };
  EXPECT_EQ(forward({}), "accepted");
  HeadOptions options;
  options.softcap = -1.0f;
  EXPECT_EQ(forward(options), "softcap: expected a number > 0, or 0 for none, got -1");
  out.entropy = call.d_bias.view();
  EXPECT_EQ(forward({}), "entropy: expected shape [6] to go with hidden f32[6, 4], got f32[9]");
  out.entropy = {};
  in.vocab_weight = std::as_const(call.vector).view();
  EXPECT_EQ(forward({}), "vocab_weight: expected shape [9], got f32[6]");
  in.vocab_weight = {};
  in.targets = {};
  EXPECT_EQ(forward({}), "targets: expected a tensor, got none");
  in.targets = call.in.targets;

  HeadCotangents cotangents;
  HeadGradients gradients;
  const auto backward = [&] {
    return refusal([&] { plan_head_backward({}, in, cotangents, gradients); });
  };
  EXPECT_EQ(backward(), "gradients: expected d_hidden, d_weight or d_bias, got none");
  gradients.d_hidden = call.d_hidden.view();
  cotangents.lse = std::as_const(call.of_vocab).view();
  EXPECT_EQ(backward(),
            "cotangent of lse: expected shape [6] to go with hidden f32[6, 4], got f32[9]");
  cotangents.lse = std::as_const(call.vector).view();
  EXPECT_EQ(backward(), "accepted");
  gradients.d_bias = call.d_bias.view();
  EXPECT_EQ(backward(), "d_bias: asked for without a bias");
}

TEST(Errors, StridesThatDoNotCollapse) {
  Call call;
  Tensor hidden(DType::f32, {2, 3, 8});
  hidden.fill(0.5);
  const std::int64_t shape[] = {2, 3, kDim};
  const std::int64_t strides[] = {8, 16, 1};
  call.in.hidden = {hidden.view().data(), DType::f32, shape, strides};
  call.in.targets = Call::shaped(call.in.targets, {2, 3});
  CrossEntropyOutputs out;
  out.loss = call.loss.view();
  const std::string text = refusal([&] { cross_entropy(Context(), call.options, call.in, out); });
  EXPECT_NE(text.find("hidden: f32[2, 3, 4]"), std::string::npos) << text;
  EXPECT_NE(text.find("do not collapse to one row stride; make it contiguous"), std::string::npos)
      << text;
}

}  // namespace
}  // namespace logitless::test
