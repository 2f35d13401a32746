// Cutting of GEMMs whose sizes are no multiples of 8: every multiply-add happens once, the first
// part is aligned, and sums of a 16-bit result are not rounded in between.
#include <gtest/gtest.h>

#include <vector>

#include "kernels/cuda/tensor/product_form.h"

namespace logitless::cuda {
namespace {

constexpr std::int64_t kWords = 50257, kApart = 50264, kRows = 512, kDim = 768;

MatrixLayout layout(DType dtype, std::int64_t row_stride, std::int64_t col_stride) {
  return {dtype, 0, row_stride, col_stride, 16};
}
ProductShape shape(std::int64_t m, std::int64_t n, std::int64_t k, const MatrixLayout& a,
                   const MatrixLayout& b, const MatrixLayout& c) {
  ProductShape s;
  s.m = m;
  s.n = n;
  s.k = k;
  s.a = a;
  s.b = b;
  s.c = c;
  return s;
}
// GEMM of logits whose rows start at multiples of `stride` elements.
ProductShape logits(std::int64_t stride) {
  return shape(kRows, kWords, kDim, layout(DType::bf16, kDim, 1), layout(DType::bf16, 1, kDim),
               layout(DType::f32, stride, 1));
}
ProductShape d_hidden(DType to) {
  return shape(kRows, kDim, kWords, layout(DType::bf16, kApart, 1), layout(DType::bf16, kDim, 1),
               layout(to, kDim, 1));
}

std::int64_t work_of(const std::vector<ProductPart>& parts) {
  std::int64_t work = 0;
  for (const ProductPart& p : parts) work += p.shape.m * p.shape.n * p.shape.k;
  return work;
}

TEST(ProductParts, OfLogitsAreTheLastWords) {
  const std::vector<ProductPart> parts = parts_of(logits(kApart));
  ASSERT_EQ(parts.size(), 2u);
  EXPECT_EQ(parts[0].shape.n, kWords - 1);
  EXPECT_EQ(parts[1].shape.n, 1);
  EXPECT_EQ(parts[1].a, 0);
  EXPECT_EQ(parts[1].b, (kWords - 1) * kDim * 2);
  EXPECT_EQ(parts[1].c, (kWords - 1) * 4);
  EXPECT_FALSE(parts[1].shape.accumulate);
  EXPECT_EQ(work_of(parts), kRows * kWords * kDim);
}

TEST(ProductParts, OfSumsOverWordsAreAddedWhereNothingIsRounded) {
  const std::vector<ProductPart> parts = parts_of(d_hidden(DType::f32));
  ASSERT_EQ(parts.size(), 2u);
  EXPECT_EQ(parts[0].shape.k, kWords - 1);
  EXPECT_FALSE(parts[0].shape.accumulate);
  EXPECT_EQ(parts[1].shape.k, 1);
  EXPECT_TRUE(parts[1].shape.accumulate);
  EXPECT_EQ(parts[1].a, (kWords - 1) * 2);
  EXPECT_EQ(parts[1].b, (kWords - 1) * kDim * 2);
  EXPECT_EQ(parts[1].c, 0);
  EXPECT_EQ(work_of(parts), kRows * kWords * kDim);
  EXPECT_EQ(parts_of(d_hidden(DType::bf16)).size(), 1u);
}

TEST(ProductParts, OfAllDimensionsMeetOnce) {
  const ProductShape s = shape(1003, 1005, 1007, layout(DType::bf16, 1, 1008),
                               layout(DType::bf16, 1, 1008), layout(DType::f32, 1008, 1));
  const std::vector<ProductPart> parts = parts_of(s);
  ASSERT_EQ(parts.size(), 4u);
  EXPECT_EQ(work_of(parts), s.m * s.n * s.k);
  EXPECT_EQ(parts[0].shape.m, 1000);
  EXPECT_EQ(parts[0].shape.n, 1000);
  EXPECT_EQ(parts[0].shape.k, 1000);
  EXPECT_EQ(parts[3].shape.m, 1000);  // only where the first one is
  for (const ProductPart& p : parts) {
    EXPECT_LE(product_workspace_bytes(p.shape), product_workspace_bytes(s));
    EXPECT_EQ(p.c % 4, 0);
  }
}

TEST(ProductParts, OthersStayWhole) {
  EXPECT_EQ(parts_of(logits(kWords)).size(), 1u);  // rows at odd addresses
  ProductShape even = logits(kApart);
  even.n = kApart;
  EXPECT_EQ(parts_of(even).size(), 1u);
  ProductShape little = logits(kApart);
  little.m = little.k = 64;
  EXPECT_EQ(parts_of(little).size(), 1u);
  ProductShape rows = d_hidden(DType::f32);
  rows.m = 511;  // contiguous in none of the matrices
  rows.k = kApart;
  EXPECT_EQ(parts_of(rows).size(), 1u);
}

}  // namespace
}  // namespace logitless::cuda
