// Cutting of GEMMs whose sizes are no multiples of 8: every multiply-add happens once, the first
// part is aligned, and sums of a 16-bit result are not rounded in between.
#include <gtest/gtest.h>

#include <vector>

#include "kernels/cuda/tensor/product_form.h"

namespace logitless::cuda {
namespace {

constexpr std::int64_t kVocabCount = 50257, kApart = 50264, kRows = 512, kDim = 768;

MatrixLayout layout(DType dtype, std::int64_t row_stride, std::int64_t col_stride) {
  return {dtype, 0, row_stride, col_stride, 16};
}
GemmShape shape(std::int64_t m, std::int64_t n, std::int64_t k, const MatrixLayout& a,
                const MatrixLayout& b, const MatrixLayout& c) {
  GemmShape s;
  s.m = m;
  s.n = n;
  s.k = k;
  s.a = a;
  s.b = b;
  s.c = c;
  return s;
}
// GEMM of logits whose rows start at multiples of `stride` elements.
GemmShape logits(std::int64_t stride) {
  return shape(kRows, kVocabCount, kDim, layout(DType::bf16, kDim, 1), layout(DType::bf16, 1, kDim),
               layout(DType::f32, stride, 1));
}
GemmShape d_hidden(DType to) {
  return shape(kRows, kDim, kVocabCount, layout(DType::bf16, kApart, 1),
               layout(DType::bf16, kDim, 1), layout(to, kDim, 1));
}

std::int64_t work_of(const std::vector<GemmPart>& parts) {
  std::int64_t work = 0;
  for (const GemmPart& p : parts) work += p.shape.m * p.shape.n * p.shape.k;
  return work;
}

TEST(GemmParts, OfLogitsAreTheLastIds) {
  const std::vector<GemmPart> parts = parts_of(logits(kApart));
  ASSERT_EQ(parts.size(), 2u);
  EXPECT_EQ(parts[0].shape.n, kVocabCount - 1);
  EXPECT_EQ(parts[1].shape.n, 1);
  EXPECT_EQ(parts[1].a, 0);
  EXPECT_EQ(parts[1].b, (kVocabCount - 1) * kDim * 2);
  EXPECT_EQ(parts[1].c, (kVocabCount - 1) * 4);
  EXPECT_FALSE(parts[1].shape.accumulate);
  EXPECT_EQ(work_of(parts), kRows * kVocabCount * kDim);
}

TEST(GemmParts, OfSumsOverVocabAreAddedWhereNothingIsRounded) {
  const std::vector<GemmPart> parts = parts_of(d_hidden(DType::f32));
  ASSERT_EQ(parts.size(), 2u);
  EXPECT_EQ(parts[0].shape.k, kVocabCount - 1);
  EXPECT_FALSE(parts[0].shape.accumulate);
  EXPECT_EQ(parts[1].shape.k, 1);
  EXPECT_TRUE(parts[1].shape.accumulate);
  EXPECT_EQ(parts[1].a, (kVocabCount - 1) * 2);
  EXPECT_EQ(parts[1].b, (kVocabCount - 1) * kDim * 2);
  EXPECT_EQ(parts[1].c, 0);
  EXPECT_EQ(work_of(parts), kRows * kVocabCount * kDim);
  EXPECT_EQ(parts_of(d_hidden(DType::bf16)).size(), 1u);
}

TEST(GemmParts, OfAllDimensionsMeetOnce) {
  const GemmShape s = shape(1003, 1005, 1007, layout(DType::bf16, 1, 1008),
                            layout(DType::bf16, 1, 1008), layout(DType::f32, 1008, 1));
  const std::vector<GemmPart> parts = parts_of(s);
  ASSERT_EQ(parts.size(), 4u);
  EXPECT_EQ(work_of(parts), s.m * s.n * s.k);
  EXPECT_EQ(parts[0].shape.m, 1000);
  EXPECT_EQ(parts[0].shape.n, 1000);
  EXPECT_EQ(parts[0].shape.k, 1000);
  EXPECT_EQ(parts[3].shape.m, 1000);  // only where the first one is
  for (const GemmPart& p : parts) {
    EXPECT_LE(gemm_workspace_bytes(p.shape), gemm_workspace_bytes(s));
    EXPECT_EQ(p.c % 4, 0);
  }
}

TEST(GemmParts, OthersStayWhole) {
  EXPECT_EQ(parts_of(logits(kVocabCount)).size(), 1u);  // rows at odd addresses
  GemmShape even = logits(kApart);
  even.n = kApart;
  EXPECT_EQ(parts_of(even).size(), 1u);
  GemmShape little = logits(kApart);
  little.m = little.k = 64;
  EXPECT_EQ(parts_of(little).size(), 1u);
  GemmShape rows = d_hidden(DType::f32);
  rows.m = 511;  // contiguous in none of the matrices
  rows.k = kApart;
  EXPECT_EQ(parts_of(rows).size(), 1u);
}

}  // namespace
}  // namespace logitless::cuda
