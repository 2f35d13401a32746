// Plans of the cublas kernel: strips of logits leave a plan to every budget.
#include <gtest/gtest.h>

#include <string>

#include "core/check.h"
#include "logitless/error.h"
#include "logitless/logitless.h"

namespace logitless::test {
namespace {

constexpr HeadShape kHeads[] = {{8192, 4096, 128256, DType::f16},
                                {8192, 2304, 256000, DType::f16},
                                {32768, 768, 50304, DType::f16}};

LossPlan plan(HeadShape shape, DType dtype, std::size_t budget, int capability = 75,
              Precision precision = Precision::ieee, DType narrow_weight = DType::f32) {
  shape.dtype = dtype;
  HeadFeatures f;
  f.d_hidden = f.d_weight = true;
  f.d_hidden_dtype = f.d_weight_dtype = dtype;
  if (narrow_weight != DType::f32) f.narrow_weight = f.d_weight_dtype = narrow_weight;
  f.precision = precision;
  PlanRequest request;
  request.device.kind = DeviceKind::cuda;
  request.device.compute_capability = capability;
  request.device.kernel = precision == Precision::bf16x3 ? "cublas_bf16x3" : "cublas";
  request.memory_budget = budget;
  return plan_head(shape, f, request);
}

class CublasPlan : public testing::Test {
 protected:
  void SetUp() override {
    try {
      plan(kHeads[0], DType::f16, 0);
    } catch (const Unsupported& e) {
      GTEST_SKIP() << e.what();
    }
  }
};

TEST_F(CublasPlan, AnyBudgetFrom64MiB) {
  for (const HeadShape& shape : kHeads) {
    for (const DType dtype : {DType::f16, DType::f32}) {
      double before = 1e9;
      for (const std::size_t mib : {64, 96, 128, 256, 512, 1024, 2048, 4096}) {
        SCOPED_TRACE(std::to_string(shape.dim) + " " + std::string(name_of(dtype)) + " " +
                     std::to_string(mib) + " MiB");
        const LossPlan made = plan(shape, dtype, mib << 20);
        EXPECT_LE(made.workspace_bytes(), mib << 20);
        EXPECT_LE(made.predicted_seconds, before * 1.02) << made.explain();
        before = made.predicted_seconds;
      }
    }
  }
}

// A 16-bit weight beside f32: 32 MiB of its rows in f32, and strips of d_hidden of as much.
TEST_F(CublasPlan, AnyBudgetFrom128MiBBeside16Bits) {
  for (const HeadShape& shape : kHeads) {
    double before = 1e9;
    for (const std::size_t mib : {128, 256, 1024, 4096}) {
      const LossPlan made = plan(shape, DType::f32, mib << 20, 80, Precision::tf32, DType::bf16);
      EXPECT_LE(made.workspace_bytes(), mib << 20);
      EXPECT_LE(made.predicted_seconds, before * 1.02) << made.explain();
      before = made.predicted_seconds;
    }
  }
}

// Below the sums of a 16-bit d_weight over chunks, it is made apart by a fifth GEMM.
TEST_F(CublasPlan, ASmallBudgetMakesDWeightApart) {
  const LossPlan made = plan(kHeads[0], DType::f16, 64 << 20);
  EXPECT_EQ(made.kind, PlanKind::recompute);
  EXPECT_GT(made.weight_vocab, 0);
  EXPECT_EQ(made.passes, 5.0);
  EXPECT_NE(made.explain().find("in a GEMM of its own"), std::string::npos) << made.explain();
  EXPECT_EQ(plan(kHeads[0], DType::f32, 64 << 20).weight_vocab, 0);
}

// The default takes three GEMMs.
TEST_F(CublasPlan, TheDefaultStoresExponentials) {
  for (const HeadShape& shape : kHeads) {
    const LossPlan made = plan(shape, DType::f16, 0);
    EXPECT_LE(made.passes, 3.5) << made.explain();
    EXPECT_LE(made.workspace_bytes(), made.logits_bytes() * 3 / 10);
  }
}

// Kernels that skip ignored tokens are predicted for the others, cublas for all. Only cuBLAS's
// gradients of tokens that count are planned otherwise.
TEST_F(CublasPlan, ExpectedIgnoredTokensTakeNoTime) {
  const auto plan_with = [](const char* kernel, float ignored) {
    HeadFeatures f;
    f.d_hidden = f.d_weight = true;
    f.d_hidden_dtype = f.d_weight_dtype = DType::bf16;
    HeadShape shape = kHeads[0];
    shape.dtype = DType::bf16;
    PlanRequest request;
    request.device.kind = DeviceKind::cuda;
    request.device.compute_capability = 90;
    request.device.kernel = kernel;
    request.expected_ignored = ignored;
    return plan_head(shape, f, request);
  };
  for (const char* kernel : {"sm80", "hopper", "cublas"}) {
    SCOPED_TRACE(kernel);
    const LossPlan all = plan_with(kernel, 0.0f), some = plan_with(kernel, 0.75f);
    const double ratio = some.predicted_seconds / all.predicted_seconds;
    const bool skips = kernel != std::string("cublas");
    EXPECT_LT(ratio, skips ? 0.35 : 1.01);
    EXPECT_GT(ratio, skips ? 0.25 : 0.99);
    EXPECT_EQ(all.explain().find("expected_ignored"), std::string::npos);
    const char* const says = kernel == std::string("sm80") ? "gradients of 2048 tokens by cuBLAS"
                             : skips                       ? "that of the other tokens"
                                                           : "no effect";
    EXPECT_NE(some.explain().find(says), std::string::npos) << some.explain();
  }
  EXPECT_NE(plan_with("sm80", 1.0f).explain().find("gradients of 0 tokens"), std::string::npos);
}

TEST_F(CublasPlan, TuringMultipliesF16AndF32) {
  EXPECT_EQ(plan(kHeads[0], DType::f32, 0).kernel, "cublas");
  try {
    plan(kHeads[0], DType::bf16, 0);
    FAIL();
  } catch (const Unsupported& e) {
    EXPECT_NE(std::string(e.what()).find("multiplies bf16 from compute capability 8.0 on"),
              std::string::npos)
        << e.what();
  }
  EXPECT_EQ(plan(kHeads[0], DType::bf16, 0, 80).kernel, "cublas");
}

template <typename E, typename F>
std::string message_of(const F& run) {
  try {
    run();
  } catch (const E& e) {
    return e.what();
  }
  return "no such error";
}

TEST_F(CublasPlan, ExpectedIgnoredIsAShare) {
  for (const float share : {-0.5f, 1.5f}) {
    PlanRequest request;
    request.expected_ignored = share;
    EXPECT_EQ(message_of<InvalidArgument>([&] {
                plan_head({8, 8, 8, DType::f32}, {}, request);
              }),
              concat("expected_ignored: expected a number in [0, 1], got ", share));
  }
}

TEST_F(CublasPlan, Tf32IsOfF32OnAGpuThatHasIt) {
  const LossPlan wide = plan(kHeads[0], DType::f32, 0, 80);
  const LossPlan made = plan(kHeads[0], DType::f32, 0, 80, Precision::tf32);
  EXPECT_NE(made.explain().find("(f32, GEMMs in tf32), kernel cublas"), std::string::npos)
      << made.explain();
  EXPECT_EQ(wide.explain().find("tf32"), std::string::npos) << wide.explain();
  EXPECT_LT(made.predicted_seconds, wide.predicted_seconds / 3);
  EXPECT_NE(message_of<Unsupported>([] {
              plan(kHeads[0], DType::f32, 0, 75, Precision::tf32);
            }).find("precision: multiplies tf32 from compute capability 8.0 on"),
            std::string::npos);
  EXPECT_EQ(
      message_of<InvalidArgument>([] { plan(kHeads[0], DType::bf16, 0, 80, Precision::tf32); }),
      "precision: tf32 rounds f32 tensors, hidden and weight are bf16");
  HeadFeatures f;
  f.precision = Precision::tf32;
  EXPECT_EQ(message_of<InvalidArgument>([&] {
              plan_head({8, 8, 8, DType::f32}, f, {});
            }),
            "precision: tf32 is for a GPU, the device is a CPU");
}

TEST_F(CublasPlan, Bf16x3IsAKernelOfItsOwn) {
  const LossPlan wide = plan(kHeads[0], DType::f32, 0, 80);
  const LossPlan made = plan(kHeads[0], DType::f32, 0, 80, Precision::bf16x3);
  EXPECT_NE(made.explain().find("(f32, GEMMs in bf16x3), kernel cublas_bf16x3"), std::string::npos)
      << made.explain();
  EXPECT_LT(made.predicted_seconds, wide.predicted_seconds / 2);
  EXPECT_NE(message_of<Unsupported>([] {
              plan(kHeads[0], DType::f32, 0, 75, Precision::bf16x3);
            }).find("runs on compute capability 8.0 and up, the GPU has 7.5"),
            std::string::npos);
  EXPECT_EQ(
      message_of<InvalidArgument>([] { plan(kHeads[0], DType::f16, 0, 80, Precision::bf16x3); }),
      "precision: bf16x3 rounds f32 tensors, hidden and weight are f16");
}

}  // namespace
}  // namespace logitless::test
