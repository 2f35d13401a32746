// Guarantees of calls on a GPU beyond the numbers: the caller's stream, no synchronisation or
// allocation, bad targets by the status, determinism, refusals.
#include <cuda_runtime_api.h>
#include <gtest/gtest.h>

#include <cmath>
#include <cstdlib>
#include <string>
#include <thread>

#include "kernels/device/kernel.h"
#include "support/mirror.h"
#include "support/problem.h"

namespace logitless::test {
namespace {

class CudaCrossEntropy : public testing::Test {
 protected:
  void SetUp() override {
    const std::string reason = cuda::device_missing(0);
    if (!reason.empty()) GTEST_SKIP() << reason;
  }
  static HeadSpec spec_of(DType dtype) {
    HeadSpec s;
    s.tokens = 700;
    s.dim = 72;
    s.vocab = 1100;
    s.dtype = dtype;
    s.bias = true;
    s.weight_scale = 3.0;
    s.ignored = 0.1;
    return s;
  }
  static HeadSpec spec_of(const std::string& kernel) { return spec_of(narrow_dtype(kernel)); }
};

// Tensors of a call on the device.
struct DeviceRun {
  DeviceRun(const HeadProblem& problem, const std::string& kernel, void* stream)
      : mirror(kernel),
        loss(DType::f32, {}),
        d_hidden(DType::f32, {problem.spec.tokens, problem.spec.dim}),
        d_weight(DType::f32, {problem.spec.vocab, problem.spec.dim}),
        d_bias(DType::f32, {problem.spec.vocab}),
        options(problem.options()) {
    ContextOptions o;
    o.device = DeviceKind::cuda;
    o.kernel = kernel;
    o.stream = stream;
    context = Context(o);
    in = mirror.in(problem.inputs());
    out.loss = mirror.out(loss.view());
    out.d_hidden = mirror.out(d_hidden.view());
    out.d_weight = mirror.out(d_weight.view());
    out.d_bias = mirror.out(d_bias.view());
    plan = plan_cross_entropy(options, in, out, {context.device(), 0, {}, 0.0});
    workspace = Workspace(context, plan);
  }
  void enqueue() { cross_entropy(context, plan, options, in, out, workspace); }
  // Waits, and copies the outputs to the host.
  void finish(cudaStream_t stream) {
    ASSERT_EQ(cudaStreamSynchronize(stream), cudaSuccess);
    mirror.finish();
  }
  void expect_same(const DeviceRun& other) const {
    EXPECT_EQ(loss.bytes(), other.loss.bytes());
    EXPECT_EQ(d_hidden.bytes(), other.d_hidden.bytes());
    EXPECT_EQ(d_weight.bytes(), other.d_weight.bytes());
    EXPECT_EQ(d_bias.bytes(), other.d_bias.bytes());
    EXPECT_NE(loss.get(0), 0.0);
  }

  Mirror mirror;
  Tensor loss, d_hidden, d_weight, d_bias;
  CrossEntropyOptions options;
  Context context;
  CrossEntropyInputs in;
  CrossEntropyOutputs out;
  LossPlan plan;
  Workspace workspace{nullptr, 0};
};

// Also with other targets than those that were captured, of which four in five are ignored.
TEST_F(CudaCrossEntropy, ACapturedGraphGivesTheSameBits) {
  for (const std::string& kernel : tested_kernels()) {
    SCOPED_TRACE(kernel);
    const HeadProblem problem(spec_of(kernel));
    cudaStream_t stream;
    ASSERT_EQ(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), cudaSuccess);
    DeviceRun plain(problem, kernel, stream);
    plain.enqueue();
    plain.finish(stream);
    HeadProblem masked(spec_of(kernel));
    for (std::int64_t i = 0; i < masked.spec.tokens; ++i)
      if (i % 5 != 3) masked.targets.set(i, -100);
    DeviceRun other(masked, kernel, stream);
    other.enqueue();
    other.finish(stream);

    DeviceRun captured(problem, kernel, stream);
    cudaGraph_t graph;
    cudaGraphExec_t exec;
    ASSERT_EQ(cudaStreamBeginCapture(stream, cudaStreamCaptureModeGlobal), cudaSuccess);
    captured.enqueue();
    ASSERT_EQ(cudaStreamEndCapture(stream, &graph), cudaSuccess);
    ASSERT_EQ(cudaGraphInstantiate(&exec, graph, 0), cudaSuccess);
    for (int replay = 0; replay < 3; ++replay)
      ASSERT_EQ(cudaGraphLaunch(exec, stream), cudaSuccess);
    captured.finish(stream);
    captured.expect_same(plain);
    ASSERT_EQ(
        cudaMemcpyAsync(const_cast<void*>(captured.in.targets.data()), other.in.targets.data(),
                        masked.targets.bytes().size(), cudaMemcpyDeviceToDevice, stream),
        cudaSuccess);
    ASSERT_EQ(cudaGraphLaunch(exec, stream), cudaSuccess);
    captured.finish(stream);
    captured.expect_same(other);
    EXPECT_NE(captured.loss.get(0), plain.loss.get(0));
    cudaGraphExecDestroy(exec);
    cudaGraphDestroy(graph);
    cudaStreamDestroy(stream);
  }
}

TEST_F(CudaCrossEntropy, ACallAllocatesNothingOnTheDevice) {
  for (const std::string& kernel : tested_kernels()) {
    SCOPED_TRACE(kernel);
    const HeadProblem problem(spec_of(kernel));
    DeviceRun run(problem, kernel, nullptr);
    run.enqueue();
    cuda::synchronize(nullptr);
    const std::size_t before = cuda::memory_in_use();
    for (int call = 0; call < 5; ++call) run.enqueue();
    cuda::synchronize(nullptr);
    EXPECT_EQ(cuda::memory_in_use(), before);
    EXPECT_EQ(run.context.memory().current_bytes(), run.plan.workspace_bytes());
  }
}

TEST_F(CudaCrossEntropy, ThreadsThatEndLeaveNoMemoryBehind) {
  for (const std::string& kernel : tested_kernels()) {
    SCOPED_TRACE(kernel);
    const HeadProblem problem(spec_of(kernel));
    const auto call_in_a_thread = [&] {
      std::thread([&] {
        DeviceRun run(problem, kernel, nullptr);
        run.enqueue();
        cuda::synchronize(nullptr);
      }).join();
    };
    call_in_a_thread();
    const std::size_t before = cuda::memory_in_use();
    for (int thread = 0; thread < 8; ++thread) call_in_a_thread();
    EXPECT_LE(cuda::memory_in_use(), before);
  }
}

TEST_F(CudaCrossEntropy, TwentyRunsGiveTheSameBits) {
  for (const std::string& kernel : tested_kernels()) {
    for (const PlanKind kind : {PlanKind::dense, PlanKind::recompute, PlanKind::stored}) {
      if (!offers(kernel, kind)) continue;
      SCOPED_TRACE(kernel + " " + std::string(name_of(kind)));
      const HeadProblem problem(spec_of(kernel));
      RunSpec run;
      run.kernel = kernel;
      run.plan = kind;
      run.gradient_dtype = problem.spec.dtype;
      const HeadResult first = run_head(problem, run);
      for (int again = 0; again < 19; ++again) {
        const HeadResult next = run_head(problem, run);
        ASSERT_EQ(first.loss.bytes(), next.loss.bytes());
        ASSERT_EQ(first.lse.bytes(), next.lse.bytes());
        ASSERT_EQ(first.d_hidden.bytes(), next.d_hidden.bytes());
        ASSERT_EQ(first.d_weight.bytes(), next.d_weight.bytes());
        ASSERT_EQ(first.d_bias.bytes(), next.d_bias.bytes());
      }
    }
  }
}

TEST_F(CudaCrossEntropy, BadTargetsAreReportedAndPoisonTheLossAlone) {
  for (const std::string& kernel : tested_kernels()) {
    SCOPED_TRACE(kernel);
    HeadProblem problem(spec_of(kernel));
    problem.targets.set(523, 1100.0);
    problem.targets.set(611, -3.0);
    DeviceRun run(problem, kernel, nullptr);
    run.enqueue();
    try {
      device_statistics(run.context, run.plan, run.workspace);
      ADD_FAILURE() << "no error";
    } catch (const InvalidArgument& error) {
      EXPECT_NE(std::string(error.what()).find("position 523"), std::string::npos) << error.what();
    }
    run.mirror.finish();
    EXPECT_TRUE(std::isnan(run.loss.get(0)));
    for (const double g : run.d_weight.values()) ASSERT_TRUE(std::isfinite(g));
  }
}

TEST_F(CudaCrossEntropy, StatisticsAreTheCpus) {
  for (const std::string& kernel : tested_kernels()) {
    SCOPED_TRACE(kernel);
    HeadSpec spec = spec_of(kernel);
    spec.token_weight = spec.class_weight = true;
    const HeadProblem problem(spec);
    RunSpec run;
    run.extras = true;
    const LossStatistics cpu = run_head(problem, run).statistics;
    run.kernel = kernel;
    const HeadResult result = run_head(problem, run);
    const LossStatistics& gpu = result.statistics;
    EXPECT_EQ(gpu.tokens, cpu.tokens);
    EXPECT_EQ(gpu.valid_tokens, cpu.valid_tokens);
    EXPECT_EQ(gpu.correct, cpu.correct);
    EXPECT_NEAR(gpu.normalizer, cpu.normalizer, 1e-9 * cpu.normalizer);
    EXPECT_NEAR(gpu.mean_lse, cpu.mean_lse, 1e-5);
    EXPECT_NEAR(gpu.mean_log_prob, cpu.mean_log_prob, 1e-5);
  }
}

TEST_F(CudaCrossEntropy, NextTokenShiftsTheTargets) {
  constexpr std::int64_t kBatch = 5, kTime = 61;
  for (const std::string& kernel : tested_kernels()) {
    SCOPED_TRACE(kernel);
    HeadSpec spec = spec_of(kernel);
    spec.tokens = kBatch * kTime;
    spec.ignored = 0.0;
    const HeadProblem problem(spec);
    HeadProblem shifted(spec);
    for (std::int64_t i = 0; i < spec.tokens; ++i)
      shifted.targets.set(i, i % kTime == kTime - 1 ? -100.0 : problem.targets.get(i + 1));
    RunSpec run;
    run.kernel = kernel;
    const HeadResult expected = run_head(shifted, run);
    run.change = [&](CrossEntropyOptions& o, CrossEntropyInputs& in, CrossEntropyOutputs& out) {
      o.next_token = true;
      const auto batched = [&](auto view) {
        return decltype(view)(view.data(), view.dtype(), {kBatch, kTime, spec.dim});
      };
      in.hidden = batched(in.hidden);
      out.d_hidden = batched(out.d_hidden);
      in.targets = ConstTensorView(in.targets.data(), in.targets.dtype(), {kBatch, kTime});
      for (TensorView* view : {&out.lse, &out.log_prob, &out.target_logit})
        *view = TensorView(view->data(), view->dtype(), {kBatch, kTime});
    };
    const HeadResult result = run_head(problem, run);
    EXPECT_EQ(result.loss.bytes(), expected.loss.bytes());
    EXPECT_EQ(result.d_hidden.bytes(), expected.d_hidden.bytes());
    EXPECT_EQ(result.d_weight.bytes(), expected.d_weight.bytes());
  }
}

// Blocks of 256 ignored tokens are skipped, and plans that save exponentials do not depend on their
// hidden states.
TEST_F(CudaCrossEntropy, IgnoredTokensLeaveNoTrace) {
  for (const std::string& kernel : tested_kernels()) {
    SCOPED_TRACE(kernel);
    HeadSpec spec = spec_of(kernel);
    spec.tokens = 1500;
    spec.ignored = 0.0;
    HeadProblem problem(spec);
    for (std::int64_t i = 0; i < spec.tokens; ++i)
      if ((i >= 200 && i < 1100) || i % 7 == 0) problem.targets.set(i, -100.0);
    problem.refresh_oracle();
    RunSpec run;
    run.kernel = kernel;
    run.plan = PlanKind::dense;
    expect_matches_oracle(problem, run);
    const HeadResult clean = run_head(problem, run);
    for (const std::int64_t row : {0, 250, 1449}) {
      problem.targets.set(row, -100.0);
      problem.hidden.set(row * spec.dim + 3, NAN);
    }
    const HeadResult result = run_head(problem, run);
    for (const double g : result.d_weight.values()) ASSERT_TRUE(std::isfinite(g));
    EXPECT_EQ(result.lse.get(250), 0.0);
  }
}

// More targets in a chunk than are sorted by comparing all pairs, some of them many times.
TEST_F(CudaCrossEntropy, ManyTargetsAToken) {
  for (const std::string& kernel : tested_kernels()) {
    HeadSpec spec = spec_of(kernel);
    spec.tokens = 300;
    spec.per_token = 64;
    ASSERT_GT(spec.tokens * spec.per_token, cuda::kFewTargets);
    HeadProblem problem(spec);
    for (std::int64_t slot = 0; slot < spec.tokens * spec.per_token; slot += 5)
      if (problem.targets.get(slot) >= 0) problem.targets.set(slot, 7);
    problem.refresh_oracle();
    for (const PlanKind kind : {PlanKind::dense, PlanKind::recompute}) {
      if (!offers(kernel, kind)) continue;
      SCOPED_TRACE(kernel + " " + std::string(name_of(kind)));
      RunSpec run;
      run.kernel = kernel;
      run.plan = kind;
      expect_matches_oracle(problem, run);
      run.gradient_dtype = spec.dtype;
      const HeadResult first = run_head(problem, run);
      const HeadResult again = run_head(problem, run);
      EXPECT_EQ(first.d_weight.bytes(), again.d_weight.bytes());
    }
  }
}

// Masks runs of vocabulary entries that a thread or tile handles alone, where all other logits are
// far below 0.
TEST_F(CudaCrossEntropy, MaskedRunsOfVocabAreNeverTheArgmax) {
  for (const DType dtype : {DType::f32, DType::bf16, DType::f16}) {
    HeadProblem problem(spec_of(dtype));
    for (std::int64_t j = 0; j < problem.spec.vocab; ++j)
      problem.bias.set(j, j % 256 < 128 || j < 300 ? -INFINITY : -2000.0);
    for (std::int64_t i = 0; i < problem.spec.tokens; ++i)
      problem.targets.set(i, static_cast<double>(384 + i % 128));
    problem.refresh_oracle();
    RunSpec run;
    run.extras = true;
    const HeadResult cpu = run_head(problem, run);
    for (const std::string& kernel : tested_kernels()) {
      if (!accepts(kernel, problem.spec)) continue;
      SCOPED_TRACE(kernel + " " + std::string(name_of(dtype)));
      run.kernel = kernel;
      const HeadResult result = run_head(problem, run);
      EXPECT_LE(relative_error(result.lse.values(), cpu.lse.values()), kLseBound);
      EXPECT_NEAR(result.loss.get(0), cpu.loss.get(0), 2e-4);  // logits are near 2000
      for (std::int64_t i = 0; i < problem.spec.tokens; ++i) {
        const double vocab_id = result.argmax.get(i);
        ASSERT_GE(vocab_id, 300.0);
        ASSERT_GE(std::fmod(vocab_id, 256.0), 128.0);
      }
      for (const double g : result.d_weight.values()) ASSERT_TRUE(std::isfinite(g));
    }
  }
}

TEST_F(CudaCrossEntropy, ExplainsWhichKernelAndWhyNotTheOther) {
  if (const char* kernels = std::getenv("LOGITLESS_GPU_KERNELS");
      kernels != nullptr && *kernels != 0) {
    GTEST_SKIP() << "of all kernels";
  }
  HeadShape shape{100, 20, 300, DType::bf16};
  HeadFeatures features;
  features.d_weight = true;
  ContextOptions o;
  o.device = DeviceKind::cuda;
  const Context context(o);
  const LossPlan plan = plan_head(shape, features, {context.device(), 0, {}, 0.0});
  EXPECT_EQ(plan.kernel, "sm80");
  EXPECT_NE(plan.explain().find("hopper: dim: expected a multiple of 8, got 20"), std::string::npos)
      << plan.explain();
  DeviceLimits ampere = context.device();
  ampere.compute_capability = 80;
  shape.dim = 64;
  const LossPlan other = plan_head(shape, features, {ampere, 0, {}, 0.0});
  EXPECT_EQ(other.kernel, "sm80");
  EXPECT_NE(other.explain().find("9.0"), std::string::npos);
}

TEST_F(CudaCrossEntropy, RefusesWhatAGpuDoesNotTake) {
  const auto message = [](auto run) -> std::string {
    try {
      run();
    } catch (const Error& error) {
      return error.what();
    }
    return "no error";
  };
  ContextOptions o;
  o.stream = &o;
  EXPECT_NE(message([&] { Context context(o); }).find("stream"), std::string::npos);
  o = ContextOptions();
  o.device = DeviceKind::cuda;
  o.device_index = 99;
  EXPECT_NE(message([&] { Context context(o); }).find("99"), std::string::npos);
  o.device_index = 0;
  o.kernel = "avx2";
  EXPECT_NE(message([&] { Context context(o); }).find("hopper"), std::string::npos);

  const HeadProblem problem(spec_of(tested_kernels().front()));
  RunSpec run;
  run.kernel = tested_kernels().front();
  run.change = [](auto&, CrossEntropyInputs& in, auto&) {
    const std::int64_t shape[] = {700};
    const std::int64_t strides[] = {0};
    in.targets = ConstTensorView(in.targets.data(), in.targets.dtype(), shape, strides);
  };
  EXPECT_NE(message([&] { run_head(problem, run); }).find("targets"), std::string::npos);
}

}  // namespace
}  // namespace logitless::test
