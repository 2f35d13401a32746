// scale_gradients on every device, dtype and layout: products are fp32 and rounded once.
#include <gtest/gtest.h>

#include <cmath>
#include <random>

#include "support/mirror.h"
#include "support/problem.h"
#include "support/refusal.h"

namespace logitless::test {
namespace {

class ScaleGradientsTest : public testing::TestWithParam<std::string> {};

// Returns the number in a dtype, rounded to nearest even.
double rounded(double value, DType dtype) {
  Tensor t(dtype, {1});
  t.set(0, value);
  return t.get(0);
}

TEST_P(ScaleGradientsTest, ProductsAreRoundedOnce) {
  std::mt19937 random(5);
  std::normal_distribution<double> normal;
  for (const DType dtype : {DType::f32, DType::bf16, DType::f16}) {
    for (const double factor : {1.0, 0.3, -2.5, 0.0, static_cast<double>(NAN)}) {
      SCOPED_TRACE(std::string(name_of(dtype)) + " " + std::to_string(factor));
      Tensor d_hidden(dtype, {3, 5, 24}), d_weight(dtype, {70, 41}), d_bias(DType::f32, {70});
      for (Tensor* t : {&d_hidden, &d_weight, &d_bias}) {
        for (std::int64_t at = 0; at < t->numel(); ++at) t->set(at, normal(random));
      }
      const Tensor before[] = {d_hidden, d_weight, d_bias};
      Tensor by(DType::f32, {});
      by.set(0, factor);
      const double f = by.get(0);
      Mirror mirror(GetParam());
      const Context context = make_context(GetParam());
      scale_gradients(
          context, mirror.in(ConstTensorView(by.view())),
          {mirror.out(d_hidden.view()), mirror.out(d_weight.view()), mirror.out(d_bias.view())});
      mirror.finish();
      const Tensor* const after[] = {&d_hidden, &d_weight, &d_bias};
      for (int i = 0; i < 3; ++i) {
        for (std::int64_t at = 0; at < before[i].numel(); ++at) {
          const double product = rounded(before[i].get(at) * f, DType::f32);
          const double expected = rounded(product, i == 2 ? DType::f32 : dtype);
          if (std::isnan(f)) {
            ASSERT_TRUE(std::isnan(after[i]->get(at)));
          } else {
            ASSERT_EQ(after[i]->get(at), expected) << at;
          }
        }
      }
    }
  }
}

// Rows have gaps, and none begins at a multiple of 16 bytes. The gaps are not written.
TEST_P(ScaleGradientsTest, RowsMayLieApart) {
  for (const DType dtype : {DType::f32, DType::bf16}) {
    Tensor memory(dtype, {20, 33});
    for (std::int64_t at = 0; at < memory.numel(); ++at)
      memory.set(at, static_cast<double>(at % 50) - 20.0);
    const Tensor before = memory;
    Tensor by(DType::f32, {});
    by.set(0, 3.0);
    Mirror mirror(GetParam());
    const TensorView whole = mirror.out(memory.view());
    const std::int64_t shape[] = {20, 30}, strides[] = {33, 1};
    const TensorView rows(static_cast<std::byte*>(whole.data()) + size_of(dtype), dtype, shape,
                          strides);
    scale_gradients(make_context(GetParam()), mirror.in(ConstTensorView(by.view())),
                    {{}, rows, {}});
    mirror.finish();
    for (std::int64_t at = 0; at < memory.numel(); ++at) {
      const bool inside = at % 33 >= 1 && at % 33 <= 30;
      ASSERT_EQ(memory.get(at), before.get(at) * (inside ? 3.0 : 1.0)) << at;
    }
  }
}

TEST_P(ScaleGradientsTest, RefusesByName) {
  const Context context = make_context(GetParam());
  Tensor by(DType::f32, {}), two(DType::f32, {2}), integers(DType::i32, {4, 4}),
      vector(DType::f32, {4});
  EXPECT_EQ(message_of([&] { scale_gradients(context, {}, {}); }),
            "factor: expected an f32 scalar, got none");
  EXPECT_NE(message_of([&] {
              scale_gradients(context, ConstTensorView(two.view()), {});
            }).find("factor: expected an f32 scalar"),
            std::string::npos);
  EXPECT_EQ(message_of([&] {
              scale_gradients(context, ConstTensorView(by.view()), {{}, integers.view(), {}});
            }),
            "d_weight: expected f32, bf16 or f16, got i32");
  EXPECT_NE(message_of([&] {
              scale_gradients(context, ConstTensorView(by.view()), {vector.view(), {}, {}});
            }).find("d_hidden: expected 2 dimensions or more"),
            std::string::npos);
}

TEST_P(ScaleGradientsTest, RefusesSharedMemory) {
  const Context context = make_context(GetParam());
  Tensor by(DType::f32, {}), weight(DType::f32, {4, 4});
  EXPECT_NE(
      message_of([&] {
        scale_gradients(context, ConstTensorView(by.view()), {weight.view(), weight.view(), {}});
      }).find("d_weight"),
      std::string::npos);
  EXPECT_NE(message_of([&] {
              scale_gradients(context, ConstTensorView(weight.view().data(), DType::f32, {}),
                              {{}, weight.view(), {}});
            }).find("factor"),
            std::string::npos);
}

GTEST_ALLOW_UNINSTANTIATED_PARAMETERIZED_TEST(ScaleGradientsTest);  // without a GPU
INSTANTIATE_TEST_SUITE_P(AllKernels, ScaleGradientsTest, testing::ValuesIn(tested_kernels()),
                         [](const auto& kernel) { return kernel.param; });

}  // namespace
}  // namespace logitless::test
