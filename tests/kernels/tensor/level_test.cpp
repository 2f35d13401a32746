// Tensor kernels of each instruction set that this processor supports.
#include "kernels/cpu/tensor/level.h"

#include <gtest/gtest.h>

#include <cmath>
#include <cstdlib>
#include <limits>
#include <map>
#include <string>
#include <string_view>
#include <vector>

#include "kernels/forced_kernel.h"
#include "kernels/tensor/checks.h"
#include "logitless/context.h"
#include "support/mirror.h"
#include "support/sanitizers.h"

namespace logitless::test {
namespace {

// Selects the kernels of a name for its lifetime.
class Forced {
 public:
  explicit Forced(const std::string& kernel) : before_(cpu::tensor_level()) {
    cpu::set_tensor_level(cpu::tensor_level_of(kernel));
  }
  ~Forced() { cpu::set_tensor_level(before_); }
  Forced(const Forced&) = delete;
  Forced& operator=(const Forced&) = delete;

 private:
  const cpu::TensorLevel before_;
};

constexpr double kNan = std::numeric_limits<double>::quiet_NaN();

// Returns the kernels to compare. The reference divides its work among threads as avx2 does, which
// is all that ThreadSanitizer sees of it.
std::vector<std::string> levels() {
  std::vector<std::string> all = tested_kernels();
  if (kThreadSanitizer && all.size() > 1) std::erase(all, "reference");
  return all;
}

// Highway's name of plain C++ depends on the compiler.
bool portable(std::string_view target) { return target == "EMU128" || target == "SCALAR"; }

TEST(TensorLevel, RunsTheInstructionSetOfItsName) {
  const std::map<std::string, std::string> targets = {{"amx_bf16", "AVX3"},
                                                      {"avx512_bf16", "AVX3"},
                                                      {"avx512", "AVX3"},
                                                      {"avx2", "AVX2"},
                                                      {"neon", "NEON"}};
  for (const std::string& name : tested_kernels()) {
    const Forced forced(name);
    if (targets.count(name) != 0) {
      EXPECT_EQ(cpu::tensor_target(), targets.at(name)) << name;
    }
    if (name == "scalar") {
      EXPECT_TRUE(portable(cpu::tensor_target())) << cpu::tensor_target();
    }
  }
}

// Runs once more under ctest with LOGITLESS_CPU set.
TEST(TensorLevel, IsThatOfTheEnvironment) {
  const cpu::TensorLevel expected = cpu::tensor_level_of(forced_kernel());
  EXPECT_EQ(cpu::tensor_level().targets, expected.targets);
  EXPECT_EQ(cpu::tensor_level().tiles, expected.tiles);
  EXPECT_EQ(cpu::tensor_level().dot, expected.dot);
  EXPECT_EQ(cpu::tensor_level().emulated, expected.emulated);
#if defined(__x86_64__)
  if (forced_kernel() == "reference") {
    EXPECT_TRUE(portable(cpu::tensor_target())) << cpu::tensor_target();
  }
#endif
}

TEST(TensorLevel, MultipliesAlike) {
  for (const std::string& name : levels()) {
    SCOPED_TRACE(name);
    const Forced forced(name);
    for (const DType dtype : kFloats) {
      for (int t = 0; t < 4; ++t) {
        check_gemm({.batch = 2,
                    .m = 37,
                    .n = 50,
                    .k = 70,
                    .transposed_a = (t & 1) != 0,
                    .transposed_b = (t & 2) != 0,
                    .dtype = dtype,
                    .out = t % 2 == 0 ? DType::f32 : dtype,
                    .accumulate = t == 1});
      }
      check_gemm({.m = 40, .n = 33, .k = 600, .dtype = dtype, .out = dtype});
    }
  }
}

TEST(TensorLevel, AttendsAlike) {
  for (const std::string& name : levels()) {
    SCOPED_TRACE(name);
    const Forced forced(name);
    for (const DType dtype : kFloats) {
      check_attention({1, 4, 2, 33, 70, 40, dtype, true, 0.3f, 1});
      check_attention({1, 1, 1, 150, 90, 8, dtype, false, 0.7f, 1});
    }
    // Blocks of queries and keys, full and ragged; heads that share keys, enough of them for three
    // threads and not; one query; queries that see no key.
    for (const bool causal : {false, true}) {
      check_attention({1, 2, 1, 300, 270, 24, DType::bf16, causal, 0.5f, 1});
      check_attention({3, 1, 1, 290, 128, 72, DType::bf16, causal, -0.25f, 1});
      check_attention({2, 2, 2, 1, 129, 32, DType::bf16, causal, 0.5f, 1});
      check_attention({1, 2, 2, 31, 3, 33, DType::bf16, causal, 0.5f, 1});
      check_attention({1, 3, 3, 256, 384, 16, DType::bf16, causal, 0.0f, 1});
    }
  }
}

// Softcap, window, bias and segments, each alone and all together: blocks outside of a window,
// windows longer than everything, queries whose segment has no key.
TEST(TensorLevel, ChangesScoresAlike) {
  const auto all = [](AttentionShape shape) {
    const AttentionShape plain = shape;
    shape.softcap = 0.8f;
    check_attention(shape);
    shape = plain;
    for (const std::int64_t window : {1, 30, 5000}) {
      shape.window = window;
      check_attention(shape);
    }
    shape = plain;
    shape.segments = {.dtype = plain.causal ? DType::i32 : DType::i64};
    check_attention(shape);
    shape = plain;
    shape.bias = {{nullptr, 0, 1, plain.causal ? 1 : 0}, plain.dtype};
    check_attention(shape);
    shape.bias = {{nullptr, 1, 0, 1}, DType::f32};
    shape.softcap = 2.0f;
    shape.window = 150;
    shape.segments = {.dtype = DType::i32};
    check_attention(shape);
  };
  for (const std::string& name : levels()) {
    SCOPED_TRACE(name);
    const Forced forced(name);
    all({1, 2, 1, 200, 210, 8, DType::f32, true, 0.7f, 1});
    all({2, 1, 1, 33, 70, 8, DType::f16, false, 0.5f, 1});
    all({1, 1, 1, 270, 270, 8, DType::bf16, true, 0.5f, 1});
    all({3, 1, 1, 40, 150, 8, DType::bf16, false, -0.5f, 1});
  }
}

// Scores of -inf have no weight; a row of only these gives 0 and -inf. NaN in gives NaN out.
TEST(TensorLevel, AttendsToInfinityAndNan) {
  const AttentionShape shape{1, 1, 1, 40, 150, 8, DType::bf16, false, 0.5f, 1};
  for (const std::string& name : tested_kernels()) {
    SCOPED_TRACE(name);
    const Forced forced(name);
    AttentionTensors x(shape);
    // Row 0 has a score of -inf with every key, row 1 with the keys from 60 on, the others with
    // none.
    for (std::int64_t t = 0; t < 40; ++t) {
      for (std::int64_t i = 0; i < 8; ++i) x.q.set(x.at(true, 0, 0, t) + i, i == 7 ? 1.0 : 0.0);
      x.q.set(x.at(true, 0, 0, t), t == 0 ? 1e30 : 0.0);
      x.q.set(x.at(true, 0, 0, t) + 1, t == 1 ? 1e30 : 0.0);
    }
    for (std::int64_t s = 0; s < 150; ++s) {
      x.k.set(x.at(false, 0, 0, s), -1e30);
      x.k.set(x.at(false, 0, 0, s) + 1, s < 60 ? 0.0 : -1e30);
    }
    x.q.set(x.at(true, 0, 0, 2) + 3, kNan);
    const AttentionResult r = run_attention(x, 1);
    EXPECT_EQ(r.lse[0], static_cast<float>(-kInf));
    double sum = 0.0, out = 0.0;
    for (std::int64_t s = 0; s < 60; ++s) {
      const double p = std::exp(0.5 * x.k[x.at(false, 0, 0, s) + 7]);
      sum += p;
      out += p * x.v[x.at(false, 0, 0, s) + 2];
    }
    EXPECT_NEAR(static_cast<double>(r.lse[1]), std::log(sum), 1e-5);
    EXPECT_NEAR(r.out[x.at(true, 0, 0, 1) + 2], out / sum, 0x1p-8);
    EXPECT_TRUE(std::isnan(r.lse[2]));
    for (std::int64_t i = 0; i < 8; ++i) {
      EXPECT_EQ(r.out[x.at(true, 0, 0, 0) + i], 0.0);
      EXPECT_TRUE(std::isnan(r.out[x.at(true, 0, 0, 2) + i]));
      EXPECT_TRUE(std::isnan(r.dq[x.at(true, 0, 0, 2) + i]));
      EXPECT_FALSE(std::isnan(r.out[x.at(true, 0, 0, 3) + i]));
    }
  }
}

TEST(TensorLevel, EvaluatesAlike) {
  constexpr std::int64_t kCount = 203;
  std::vector<float> x(kCount), y(kCount), exponentials(kCount);
  for (std::int64_t i = 0; i < kCount; ++i)
    x[static_cast<std::size_t>(i)] = std::sin(static_cast<float>(i)) * 5.0f;
  double sum = 0.0, total = 0.0;
  for (const float value : x) {
    sum += value;
    total += std::exp(static_cast<double>(value));
  }
  for (const std::string& name : tested_kernels()) {
    SCOPED_TRACE(name);
    const Forced forced(name);
    EXPECT_NEAR(row_sum(x.data(), kCount), sum, 1e-4);
    EXPECT_EQ(row_max(x.data(), kCount), *std::max_element(x.begin(), x.end()));
    const LseState lse = row_lse(x.data(), kCount);
    EXPECT_NEAR(value(lse), std::log(total), 1e-5);
    vector_function(VectorOp::exp)(x.data(), nullptr, nullptr, exponentials.data(), kCount);
    for (std::size_t i = 0; i < x.size(); ++i) {
      const double expected = std::exp(static_cast<double>(x[i]));
      ASSERT_NEAR(exponentials[i], expected, 1e-6 * expected) << x[i];
    }
  }
}

}  // namespace
}  // namespace logitless::test
