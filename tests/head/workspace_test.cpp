// Guarantees about memory: the workspace has the predicted size, nothing else is written or
// allocated, and none of it grows with the size of the logits.
#include <gtest/gtest.h>

#include <cstdlib>
#include <cstring>
#include <functional>
#include <new>

#include "support/problem.h"

namespace {
// Counts allocations by anything that calls operator new. (Inlined, they would look mismatched to
// the compiler.)
thread_local bool counting = false;
thread_local int allocations = 0;
}  // namespace

[[gnu::noinline]] void* operator new(std::size_t bytes) {
  if (counting) ++allocations;
  if (void* p = std::malloc(bytes != 0 ? bytes : 1)) return p;
  throw std::bad_alloc();
}
[[gnu::noinline]] void* operator new(std::size_t bytes, std::align_val_t align) {
  if (counting) ++allocations;
  const auto to = static_cast<std::size_t>(align);
  if (void* p = std::aligned_alloc(to, (bytes + to - 1) / to * to)) return p;
  throw std::bad_alloc();
}
[[gnu::noinline]] void operator delete(void* p) noexcept { std::free(p); }
[[gnu::noinline]] void operator delete(void* p, std::size_t) noexcept { std::free(p); }
[[gnu::noinline]] void operator delete(void* p, std::align_val_t) noexcept { std::free(p); }
[[gnu::noinline]] void operator delete(void* p, std::size_t, std::align_val_t) noexcept {
  std::free(p);
}

namespace logitless::test {
namespace {

constexpr std::size_t kGuard = 4096;

// All state of one call, so that it can be repeated.
struct Call {
  Call(const HeadSpec& spec, const std::string& kernel, std::optional<PlanKind> kind)
      : problem(spec) {
    const DType gradient = spec.dtype;
    loss = Tensor(DType::f32, {});
    lse = Tensor(DType::f32, {spec.tokens});
    entropy = Tensor(DType::f32, {spec.tokens});
    argmax = Tensor(DType::i64, {spec.tokens});
    d_hidden = Tensor(gradient, {spec.tokens, spec.dim});
    d_weight = Tensor(gradient, {spec.vocab, spec.dim});
    if (spec.bias) d_bias = Tensor(DType::f32, {spec.vocab});
    in = problem.inputs();
    out.loss = loss.view();
    out.lse = lse.view();
    out.entropy = entropy.view();
    out.argmax = argmax.view();
    if (kind != PlanKind::forward) {
      out.d_hidden = d_hidden.view();
      out.d_weight = d_weight.view();
      out.d_bias = d_bias.view();
    }
    ContextOptions options;
    options.kernel = kernel;
    options.threads = 1;  // the counters are per thread
    context = Context(options);
    request.device = context.device();
    request.kind = kind;
  }
  LossPlan plan() const { return plan_cross_entropy(problem.options(), in, out, request); }
  void run(const LossPlan& p, const Workspace& workspace) {
    cross_entropy(context, p, problem.options(), in, out, workspace);
  }
  std::vector<std::byte> outputs() const {
    std::vector<std::byte> all;
    for (const Tensor* t : {&loss, &lse, &entropy, &argmax, &d_hidden, &d_weight, &d_bias})
      all.insert(all.end(), t->bytes().begin(), t->bytes().end());
    return all;
  }
  std::vector<std::byte> inputs() const {
    std::vector<std::byte> all;
    for (const Tensor* t : {&problem.hidden, &problem.weight, &problem.targets, &problem.bias})
      all.insert(all.end(), t->bytes().begin(), t->bytes().end());
    return all;
  }

  HeadProblem problem;
  Tensor loss, lse, entropy, argmax, d_hidden, d_weight, d_bias;
  CrossEntropyInputs in;
  CrossEntropyOutputs out;
  Context context;
  PlanRequest request;
};

std::vector<HeadSpec> specs() {
  std::vector<HeadSpec> all;
  for (const DType dtype : {DType::f32, DType::bf16, DType::f16}) {
    for (const bool options : {false, true}) {
      HeadSpec spec;
      spec.tokens = 67;
      spec.dim = 19;
      spec.vocab = 391;
      spec.dtype = dtype;
      if (options) {
        spec.bias = spec.class_weight = spec.token_weight = true;
        spec.label_smoothing = 0.1f;
        spec.z_loss = 1e-3f;
        spec.ignored = 0.3;
      }
      all.push_back(spec);
    }
  }
  return all;
}

class WorkspaceTest : public testing::TestWithParam<std::string> {
 protected:
  void each(const std::function<void(Call&)>& body) const {
    for (const HeadSpec& spec : specs()) {
      if (!accepts(GetParam(), spec)) continue;
      for (const PlanKind kind :
           {PlanKind::forward, PlanKind::dense, PlanKind::recompute, PlanKind::stored}) {
        if (GetParam() == "reference" && kind != PlanKind::forward && kind != PlanKind::recompute)
          continue;
        SCOPED_TRACE(describe(spec) + " " + std::string(name_of(kind)));
        Call call(spec, GetParam(), kind);
        body(call);
      }
    }
  }
};

TEST_P(WorkspaceTest, IsExactlyTheFormulaAndNothingBeyondIsTouched) {
  each([](Call& call) {
    const LossPlan plan = call.plan();
    EXPECT_EQ(Workspace(call.context, plan).bytes(), plan.workspace_bytes());
    EXPECT_EQ(call.context.memory().peak_bytes(), plan.workspace_bytes());
    EXPECT_EQ(call.context.memory().current_bytes(), 0u);

    const Buffer memory(kGuard + plan.workspace_bytes() + kGuard);
    auto* bytes = memory.as<unsigned char>();
    std::memset(bytes, 0x5a, memory.bytes());
    call.run(plan, Workspace(bytes + kGuard, plan.workspace_bytes()));
    for (std::size_t at = 0; at < kGuard; ++at) {
      ASSERT_EQ(bytes[at], 0x5a) << "before";
      ASSERT_EQ(bytes[kGuard + plan.workspace_bytes() + at], 0x5a) << "after";
    }
    EXPECT_THROW(call.run(plan, Workspace(bytes + kGuard, plan.workspace_bytes() - 1)),
                 InvalidArgument);
  });
}

// The workspace has no more parts than tasks that could use one: a vocabulary of 391 has four
// tiles.
TEST_P(WorkspaceTest, ThreadsBeyondTheTasksTakeNothing) {
  each([](Call& call) {
    if (call.problem.spec.dtype != DType::f32) return;
    const std::vector<std::byte> before = [&] {
      const LossPlan plan = call.plan();
      call.run(plan, Workspace(call.context, plan));
      return call.outputs();
    }();
    call.request.device.threads = 500;
    const std::size_t bytes = call.plan().workspace_bytes();
    ContextOptions many;
    many.threads = 1000;
    many.kernel = call.context.device().kernel;
    call.context = Context(many);
    call.request.device = call.context.device();
    const LossPlan plan = call.plan();
    EXPECT_EQ(plan.workspace_bytes(), bytes);
    const Buffer memory(plan.workspace_bytes() + kGuard);
    std::memset(memory.as<unsigned char>() + plan.workspace_bytes(), 0x5a, kGuard);
    call.run(plan, Workspace(memory.data(), plan.workspace_bytes()));
    EXPECT_EQ(call.outputs(), before);
    for (std::size_t at = 0; at < kGuard; ++at)
      ASSERT_EQ(memory.as<unsigned char>()[plan.workspace_bytes() + at], 0x5a);
  });
}

TEST_P(WorkspaceTest, CallsRepeatBitForBitWhateverTheMemoryHeld) {
  each([](Call& call) {
    const LossPlan plan = call.plan();
    const Workspace workspace(call.context, plan);
    const std::vector<std::byte> inputs = call.inputs();
    std::vector<std::byte> first;
    for (const int pattern : {0x00, 0xff, 0x7f}) {
      std::memset(workspace.data(), pattern, workspace.bytes());
      for (Tensor* t : {&call.loss, &call.lse, &call.entropy, &call.argmax, &call.d_hidden,
                        &call.d_weight, &call.d_bias}) {
        if (t->defined()) std::memset(t->view().data(), pattern, t->bytes().size());
      }
      const bool forward = plan.kind == PlanKind::forward;
      if (forward) {  // not requested: unchanged
        call.d_hidden.fill(0);
        call.d_weight.fill(0);
        if (call.d_bias.defined()) call.d_bias.fill(0);
      }
      call.run(plan, workspace);
      if (first.empty()) first = call.outputs();
      EXPECT_EQ(call.outputs(), first) << pattern;
    }
    EXPECT_EQ(call.inputs(), inputs);
  });
}

TEST_P(WorkspaceTest, ACallAllocatesNothing) {
  each([](Call& call) {
    const LossPlan plan = call.plan();
    const Workspace workspace(call.context, plan);
    call.run(plan, workspace);  // does any initialisation that happens once
    allocations = 0;
    counting = true;
    call.run(plan, workspace);
    counting = false;
    EXPECT_EQ(allocations, 0);
  });
  counting = true;
  allocations = 0;
  const std::vector<int> one(10);
  counting = false;
  EXPECT_EQ(allocations, 1) << "the count does not count";
}

INSTANTIATE_TEST_SUITE_P(AllKernels, WorkspaceTest, testing::ValuesIn(kernel_names()),
                         [](const auto& kernel) { return kernel.param; });

// 20 times the vocabulary has 20 times the logits, and a few bytes for each entry.
TEST(Memory, DoesNotGrowWithTheLogits) {
  for (const PlanKind kind : {PlanKind::forward, PlanKind::recompute}) {
    std::size_t peak[2] = {};
    std::size_t logits[2] = {};
    for (const int large : {0, 1}) {
      HeadSpec spec;
      spec.tokens = 256;
      spec.dim = 8;
      spec.vocab = large != 0 ? 200000 : 10000;
      Call call(spec, "", kind);
      const LossPlan plan = call.plan();
      call.run(plan, Workspace(call.context, plan));
      peak[large] = call.context.memory().peak_bytes();
      logits[large] = plan.logits_bytes();
    }
    EXPECT_LE(peak[1], peak[0] + 16 * 190000) << name_of(kind);
    EXPECT_LT(peak[1] * 20, logits[1]);
  }
}

// More tokens with the same budget take more chunks, not more memory: O(N) is a few bytes a token.
TEST(Memory, OfDensePlansIsTheBudgetsForAnyNumberOfTokens) {
  std::size_t peak[2] = {};
  for (const int large : {0, 1}) {
    HeadSpec spec;
    spec.tokens = large != 0 ? 8192 : 1024;
    spec.dim = 8;
    spec.vocab = 3000;
    Call call(spec, "", PlanKind::dense);
    call.request.memory_budget = 10_MiB;
    const LossPlan plan = call.plan();
    call.run(plan, Workspace(call.context, plan));
    peak[large] = call.context.memory().peak_bytes();
  }
  EXPECT_LE(peak[1], 10_MiB);
  EXPECT_GT(peak[1], peak[0] / 2);
}

}  // namespace
}  // namespace logitless::test
