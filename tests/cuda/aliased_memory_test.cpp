// Plans that store the first chunk's exponentials in d_weight's own memory (aliased until d_weight
// is written): the same numbers as plans that save them in the workspace.
#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <string>
#include <vector>

#include "kernels/device/kernel.h"
#include "support/mirror.h"
#include "support/problem.h"

namespace logitless::test {
namespace {

// Returns the kernels that save exponentials in ranges of the vocabulary.
std::vector<std::string> kernels_of_ranges() {
  std::vector<std::string> kernels = tested_kernels();
  std::erase_if(kernels, [](const std::string& kernel) {
    return !cuda::find_device_kernel(kernel).takes_ranges;
  });
  return kernels;
}
const std::string& tested() { return testing::WithParamInterface<std::string>::GetParam(); }

class AliasedMemory : public testing::TestWithParam<std::string> {
 protected:
  static DType narrow() { return narrow_dtype(tested()); }
  static HeadSpec spec_of(std::int64_t tokens, std::int64_t dim, std::int64_t vocab) {
    HeadSpec s;
    s.tokens = tokens;
    s.dim = dim;
    s.vocab = vocab;
    s.dtype = narrow();
    s.weight_scale = 3.0;
    s.ignored = 0.1;
    return s;
  }
  static RunSpec dense_of(DType gradient) {
    RunSpec run;
    run.kernel = tested();
    run.plan = PlanKind::dense;
    run.gradient_dtype = gradient;
    run.budget = std::size_t{1} << 30;
    return run;
  }
};

// cuBLAS takes another kernel for other sizes, whose sums have another order.
bool sums_by_cublas() { return cuda::find_device_kernel(tested()).missing != nullptr; }

// Expects the bits, or of cuBLAS's sums those that differ by a rounding of some elements.
void expect_sums(const Tensor& a, const Tensor& b) {
  if (!sums_by_cublas()) {
    EXPECT_EQ(a.bytes(), b.bytes());
  } else {
    EXPECT_LE(relative_error(a.values(), b.values()), a.view().dtype() == DType::f32 ? 1e-5 : 1e-3);
  }
}
// The same for elements [begin, end) of the bytes of two d_weight.
void expect_sums(const std::vector<std::byte>& a, const std::vector<std::byte>& b, DType dtype,
                 std::size_t begin, std::size_t end) {
  const auto part = [&](const std::vector<std::byte>& of) {
    Tensor t(dtype, {static_cast<std::int64_t>((end - begin) / size_of(dtype))});
    std::memcpy(t.view().data(), of.data() + begin, end - begin);
    return t;
  };
  expect_sums(part(a), part(b));
}

void expect_equal_bits(const HeadResult& a, const HeadResult& b) {
  EXPECT_EQ(a.loss.bytes(), b.loss.bytes());
  EXPECT_EQ(a.lse.bytes(), b.lse.bytes());
  expect_sums(a.d_hidden, b.d_hidden);
  expect_sums(a.d_weight, b.d_weight);
  EXPECT_EQ(a.d_bias.bytes(), b.d_bias.bytes());
  EXPECT_EQ(a.entropy.bytes(), b.entropy.bytes());
  EXPECT_EQ(a.argmax.bytes(), b.argmax.bytes());
}

// Every option that saves exponentials, and sizes with ragged tiles and ranges: the bits of the
// plan with everything in the workspace.
TEST_P(AliasedMemory, OneChunkHasTheBitsOfAllInTheWorkspace) {
  std::vector<HeadSpec> specs = {
      spec_of(700, 320, 2100),                            // eight vocabulary tiles and a rest
      spec_of(1030, 264, 6145),                           // one entry in the last tile
      spec_of(1030, 256, 6400), spec_of(2048, 64, 9000),  // few columns: split-K of d_hidden
      spec_of(900, 256, 6144),
  };
  specs[0].bias = true;
  specs[0].softcap = 20.0f;
  specs[1].label_smoothing = 0.1f;
  specs[1].class_weight = true;
  specs[1].bias = true;
  specs[2].per_token = 3;
  specs[3].z_loss = 1e-3f;
  specs[3].token_weight = true;
  specs[4].ignored = 0.0;
  specs[4].reduction = Reduction::sum;
  specs[4].logit_scale = 0.5f;
  for (const HeadSpec& spec : specs) {
    HeadProblem problem(spec);
    for (std::int64_t i = 256; i < 512; ++i)  // a pair of tiles that is skipped
      for (int k = 0; k < spec.per_token; ++k) problem.targets.set(i * spec.per_token + k, -100.0);
    problem.refresh_oracle();
    for (const DType gradient : {narrow(), DType::f32}) {
      SCOPED_TRACE(describe(spec) + " " + std::string(name_of(gradient)));
      RunSpec run = dense_of(gradient);
      run.extras = spec.per_token == 1;
      const HeadResult all = run_head(problem, run);
      ASSERT_EQ(all.plan.weight_ranges, 0);
      ASSERT_GE(all.plan.chunk_tokens, spec.tokens);
      int aliased = 0;
      for (run.budget = all.plan.workspace_bytes() - 1;;) {
        const HeadResult some = run_head(problem, run);
        if (some.plan.weight_ranges == 0 || some.plan.first_tokens < spec.tokens) break;
        SCOPED_TRACE(some.plan.explain());
        expect_equal_bits(some, all);
        EXPECT_LT(some.plan.workspace_bytes(), all.plan.workspace_bytes());
        run.budget = some.plan.workspace_bytes() - 1;
        ++aliased;
      }
      EXPECT_GT(aliased, 0);
    }
  }
}

TEST_P(AliasedMemory, FirstOfSeveralChunks) {
  int several = 0;
  for (const auto& [tokens, dim, vocab] : {std::tuple{800, 520, 1537}, {1030, 512, 1300}}) {
    HeadSpec spec = spec_of(tokens, dim, vocab);
    spec.bias = true;
    const HeadProblem problem(spec);
    for (const DType gradient : {narrow(), DType::f32}) {
      RunSpec run = dense_of(gradient);
      std::size_t bytes = run_head(problem, run).plan.workspace_bytes();
      std::size_t before = 0;
      for (int step = 0; step < 48; ++step) {
        bytes -= bytes / 16;
        run.budget = bytes;
        LossPlan plan;
        try {
          plan = run_head(problem, run).plan;
        } catch (const InvalidArgument&) {
          break;
        }
        if (plan.weight_ranges == 0 || plan.first_tokens >= spec.tokens ||
            plan.workspace_bytes() == before)
          continue;
        before = plan.workspace_bytes();
        SCOPED_TRACE(describe(spec) + " " + plan.explain());
        expect_matches_oracle(problem, run);
        const HeadResult once = run_head(problem, run);
        expect_equal_bits(run_head(problem, run), once);
        ++several;
      }
    }
  }
  EXPECT_GT(several, 1);
}

// A call on the device with its own memory.
struct Call {
  Call(const HeadProblem& p, DType weight, const std::string& kernel = tested())
      : problem(p),
        mirror(kernel),
        in(mirror.in(p.inputs())),
        context(make_context(kernel)),
        loss(4),
        d_hidden(static_cast<std::size_t>(p.spec.tokens * p.spec.dim) * 4),
        d_weight(2 * kGuard + weight_bytes(weight)) {
    out.loss = TensorView(loss.data(), DType::f32, {});
    out.d_hidden = TensorView(d_hidden.data(), DType::f32, {p.spec.tokens, p.spec.dim});
    out.d_weight = TensorView(static_cast<std::byte*>(d_weight.data()) + kGuard, weight,
                              {p.spec.vocab, p.spec.dim});
  }
  static constexpr std::size_t kGuard = 1 << 20;
  std::size_t weight_bytes(DType weight) const {
    return static_cast<std::size_t>(problem.spec.vocab * problem.spec.dim) * size_of(weight);
  }
  LossPlan plan(std::size_t budget, PlanKind kind = PlanKind::dense) const {
    return plan_cross_entropy(problem.options(), in, out, {context.device(), budget, kind, 0.0});
  }
  // Plans with less and less memory, by 1 / `parts` each, that alias d_weight's.
  std::vector<LossPlan> aliased_plans(PlanKind kind, std::size_t parts = 64) const {
    std::vector<LossPlan> found;
    std::size_t bytes = plan(std::size_t{1} << 30).workspace_bytes();
    for (std::size_t before = 0; bytes > 0; bytes -= bytes / parts + 1) {
      LossPlan made;
      try {
        made = plan(bytes - 1, kind);
      } catch (const InvalidArgument&) {  // no plan fits into so little
        break;
      }
      if (made.weight_ranges > 0 && made.workspace_bytes() != before) found.push_back(made);
      before = made.workspace_bytes();
    }
    return found;
  }
  void run(const LossPlan& plan) const {
    const Workspace workspace(context, plan);
    cross_entropy(context, plan, problem.options(), in, out, workspace);
    cuda::synchronize(nullptr);
  }
  static std::vector<std::byte> bytes_of(const cuda::DeviceMemory& memory) {
    std::vector<std::byte> bytes(memory.bytes());
    cuda::copy_to_host(bytes.data(), memory.data(), bytes.size(), nullptr);
    return bytes;
  }
  std::vector<float> hidden_gradient() const { return floats_of(d_hidden, 0, d_hidden.bytes()); }
  // d_weight is in fp32.
  std::vector<float> weight_gradient() const {
    return floats_of(d_weight, kGuard, weight_bytes(DType::f32));
  }
  static std::vector<float> floats_of(const cuda::DeviceMemory& memory, std::size_t begin,
                                      std::size_t bytes) {
    std::vector<float> values(bytes / 4);
    cuda::copy_to_host(values.data(), static_cast<const std::byte*>(memory.data()) + begin, bytes,
                       nullptr);
    return values;
  }

  const HeadProblem& problem;
  Mirror mirror;
  CrossEntropyInputs in;
  CrossEntropyOutputs out;
  Context context;
  cuda::DeviceMemory loss, d_hidden, d_weight;
};

double relative_difference(const std::vector<float>& a, const std::vector<float>& b) {
  double difference = 0.0;
  double size = 0.0;
  for (std::size_t i = 0; i < a.size(); ++i) {
    difference += std::pow(static_cast<double>(a[i]) - static_cast<double>(b[i]), 2);
    size += std::pow(static_cast<double>(b[i]), 2);
  }
  return std::sqrt(difference / size);
}

// Saves exponentials of some entries in d_weight's memory, and recomputes blocks of the others
// there. d_weight has the bits of the dense plan for the saved entries and of recompute for the
// others. d_hidden sums in other parts.
TEST_P(AliasedMemory, SomeVocabSavedOrNone) {
  std::vector<HeadSpec> specs = {spec_of(1030, 64, 12000), spec_of(1030, 264, 6145),
                                 spec_of(300, 320, 3300), spec_of(1500, 64, 20000)};
  specs[0].bias = true;
  specs[1].per_token = 3;
  specs[1].label_smoothing = 0.1f;
  specs[2].softcap = 20.0f;
  for (const PlanKind kind : {PlanKind::stored, PlanKind::recompute}) {
    int aliased = 0;
    for (const HeadSpec& spec : specs) {
      const HeadProblem problem(spec);
      for (const DType weight : {narrow(), DType::f32}) {
        Call call(problem, weight);
        const std::vector<LossPlan> plans = call.aliased_plans(kind);
        if (plans.empty()) continue;
        const LossPlan one_chunk = call.plan(std::size_t{1} << 30);
        ASSERT_GE(one_chunk.chunk_tokens, spec.tokens) << one_chunk.explain();
        call.run(one_chunk);
        const std::vector<std::byte> dense = Call::bytes_of(call.d_weight);
        const std::vector<float> d_hidden = call.hidden_gradient();
        const LossPlan recompute = call.plan(std::size_t{1} << 30, PlanKind::recompute);
        ASSERT_EQ(recompute.weight_ranges, 0);
        call.run(recompute);
        const std::vector<std::byte> again = Call::bytes_of(call.d_weight);
        const std::vector<float> d_hidden_again = call.hidden_gradient();
        for (const LossPlan& plan : plans) {
          SCOPED_TRACE(describe(spec) + " " + plan.explain());
          EXPECT_LT(plan.block_vocab, spec.vocab);
          EXPECT_EQ(plan.first_tokens, spec.tokens);
          EXPECT_EQ(plan.stored_vocab > 0, kind == PlanKind::stored);
          cuda::fill_device(call.d_weight.data(), 0, call.d_weight.bytes(), nullptr);
          cuda::fill_device(call.d_hidden.data(), 0, call.d_hidden.bytes(), nullptr);
          call.run(plan);
          const std::vector<std::byte> some = Call::bytes_of(call.d_weight);
          const std::size_t kept =
              Call::kGuard +
              static_cast<std::size_t>(plan.stored_vocab * spec.dim) * size_of(weight);
          const std::size_t end = Call::kGuard + call.weight_bytes(weight);
          if (kept > Call::kGuard) expect_sums(some, dense, weight, Call::kGuard, kept);
          expect_sums(some, again, weight, kept, end);
          EXPECT_LT(relative_difference(call.hidden_gradient(), d_hidden_again),
                    kind == PlanKind::stored ? 4e-3 : 1e-5);
          EXPECT_LT(relative_difference(call.hidden_gradient(), d_hidden), 4e-3);
          ++aliased;
        }
      }
    }
    EXPECT_GT(aliased, 5) << name_of(kind);
  }
}

void expect_untouched(const std::vector<std::byte>& bytes, std::size_t begin, std::size_t end) {
  for (std::size_t at = begin; at < end; ++at)
    ASSERT_EQ(bytes[at], std::byte{0x5a}) << "byte " << at;
}

TEST_P(AliasedMemory, WritesNothingBesideDWeightAndTheWorkspace) {
  for (const auto& [weight, kind] : {std::pair{narrow(), PlanKind::dense},
                                     {DType::f32, PlanKind::dense},
                                     {narrow(), PlanKind::stored},
                                     {narrow(), PlanKind::recompute}}) {
    SCOPED_TRACE(name_of(kind));
    const HeadProblem problem(kind == PlanKind::dense ? spec_of(1030, 264, 4097)
                                                      : spec_of(1500, 64, 20000));
    Call call(problem, weight);
    const std::vector<LossPlan> plans = call.aliased_plans(kind);
    ASSERT_FALSE(plans.empty());
    const LossPlan& plan = plans.front();
    const std::size_t size = plan.workspace_bytes();
    const cuda::DeviceMemory memory(size + 2 * Call::kGuard);
    cuda::fill_device(memory.data(), 0x5a, memory.bytes(), nullptr);
    cuda::fill_device(call.d_weight.data(), 0x5a, call.d_weight.bytes(), nullptr);
    const Workspace workspace(static_cast<std::byte*>(memory.data()) + Call::kGuard, size);
    cross_entropy(call.context, plan, problem.options(), call.in, call.out, workspace);
    cuda::synchronize(nullptr);
    const std::vector<std::byte> around = Call::bytes_of(memory);
    expect_untouched(around, 0, Call::kGuard);
    expect_untouched(around, Call::kGuard + size, around.size());
    const std::vector<std::byte> rows = Call::bytes_of(call.d_weight);
    expect_untouched(rows, 0, Call::kGuard);
    expect_untouched(rows, Call::kGuard + call.weight_bytes(weight), rows.size());
  }
}

// Every kernel computes blocks in d_weight's memory, of 16 and 32 bits.
TEST(AliasedBlocks, AreThoseOfTheWorkspace) {
  const std::string reason = cuda::device_missing(0);
  if (!reason.empty()) GTEST_SKIP() << reason;
  for (const std::string& kernel : tested_kernels()) {
    for (const DType dtype : {DType::bf16, DType::f16, DType::f32}) {
      HeadSpec spec{.tokens = 300, .dim = 320, .vocab = 3300, .dtype = dtype, .ignored = 0.1};
      if (!accepts(kernel, spec)) continue;
      SCOPED_TRACE(kernel + " " + std::string(name_of(dtype)));
      const HeadProblem problem(spec);
      Call call(problem, DType::f32, kernel);
      const LossPlan apart = call.plan(std::size_t{1} << 30, PlanKind::recompute);
      ASSERT_EQ(apart.weight_ranges, 0);
      call.run(apart);
      const std::vector<float> weight = call.weight_gradient(), hidden = call.hidden_gradient();
      const std::vector<LossPlan> plans = call.aliased_plans(PlanKind::recompute, 6);
      EXPECT_FALSE(plans.empty());
      for (const LossPlan& plan : plans) {
        SCOPED_TRACE(plan.explain());
        cuda::fill_device(call.d_weight.data(), 0x5a, call.d_weight.bytes(), nullptr);
        cuda::fill_device(call.d_hidden.data(), 0xff, call.d_hidden.bytes(), nullptr);
        call.run(plan);
        EXPECT_LT(relative_difference(call.weight_gradient(), weight), 1e-5);
        EXPECT_LT(relative_difference(call.hidden_gradient(), hidden), 1e-5);
        const std::vector<std::byte> rows = Call::bytes_of(call.d_weight);
        expect_untouched(rows, 0, Call::kGuard);
        expect_untouched(rows, Call::kGuard + call.weight_bytes(DType::f32), rows.size());
      }
    }
  }
}

TEST_P(AliasedMemory, ServesFewerTokensThanItIsMadeFor) {
  const HeadProblem problem(spec_of(1500, 264, 4097));
  for (const std::int64_t tokens : {1, 256, 700, 1400}) {
    SCOPED_TRACE(tokens);
    Call call(problem, narrow());
    const LossPlan all = call.plan(std::size_t{1} << 30);
    const LossPlan aliased = call.plan(all.workspace_bytes() - 1);
    ASSERT_EQ(all.weight_ranges, 0);
    ASSERT_GT(aliased.weight_ranges, 0);
    call.in.hidden = ConstTensorView(call.in.hidden.data(), narrow(), {tokens, 264});
    call.in.targets = ConstTensorView(call.in.targets.data(), call.in.targets.dtype(), {tokens});
    call.out.d_hidden = TensorView(call.out.d_hidden.data(), DType::f32, {tokens, 264});
    std::vector<std::byte> d_hidden, d_weight;
    for (const LossPlan& plan : {all, aliased}) {
      cuda::fill_device(call.d_hidden.data(), 0, call.d_hidden.bytes(), nullptr);
      cuda::fill_device(call.d_weight.data(), 0, call.d_weight.bytes(), nullptr);
      const Workspace workspace(call.context, plan);
      cross_entropy(call.context, plan, problem.options(), call.in, call.out, workspace);
      cuda::synchronize(nullptr);
      if (plan.weight_ranges == 0) {
        d_hidden = Call::bytes_of(call.d_hidden);
        d_weight = Call::bytes_of(call.d_weight);
      }
    }
    const std::size_t rows = static_cast<std::size_t>(tokens) * 264 * 4;
    expect_sums(Call::bytes_of(call.d_hidden), d_hidden, DType::f32, 0, rows);
    expect_sums(Call::bytes_of(call.d_weight), d_weight, narrow(), Call::kGuard,
                Call::kGuard + call.weight_bytes(narrow()));
  }
}

// d_weight cannot be aliased if its rows have gaps or it accumulates.
TEST_P(AliasedMemory, NotWhereDWeightHasGapsOrIsAddedTo) {
  const HeadProblem problem(spec_of(1030, 264, 4097));
  Call call(problem, narrow());
  const std::size_t budget = call.plan(std::size_t{1} << 30).workspace_bytes() - 1;
  const LossPlan aliased = call.plan(budget);
  ASSERT_GT(aliased.weight_ranges, 0);
  const cuda::DeviceMemory rows(4097 * 272 * 2);
  const std::int64_t shape[] = {4097, 264};
  const std::int64_t strides[] = {272, 1};
  call.out.d_weight = TensorView(rows.data(), narrow(), shape, strides);
  const Workspace workspace(call.context, aliased);
  try {
    cross_entropy(call.context, aliased, problem.options(), call.in, call.out, workspace);
    FAIL();
  } catch (const InvalidArgument& error) {
    EXPECT_NE(std::string(error.what()).find("d_weight: expected rows that follow one another"),
              std::string::npos)
        << error.what();
  }
  const LossPlan strided = call.plan(budget);
  EXPECT_EQ(strided.weight_ranges, 0);
  EXPECT_NE(strided.explain().find("holds no exp(z) meanwhile: it has gaps"), std::string::npos)
      << strided.explain();
  const Workspace own(call.context, strided);
  cross_entropy(call.context, strided, problem.options(), call.in, call.out, own);
  cuda::synchronize(nullptr);
}

GTEST_ALLOW_UNINSTANTIATED_PARAMETERIZED_TEST(AliasedMemory);  // without a GPU
INSTANTIATE_TEST_SUITE_P(AllKernels, AliasedMemory, testing::ValuesIn(kernels_of_ranges()),
                         [](const auto& kernel) { return kernel.param; });

}  // namespace
}  // namespace logitless::test
