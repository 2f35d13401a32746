// Parts of GEMMs whose sizes are no multiples of 8 or whose rows are not aligned: every
// multiply-add happens once, all that the library multiplies is aligned, and sums of a 16-bit
// result are not rounded in between.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <vector>

#include "kernels/cuda/tensor/product_form.h"
#include "kernels/cuda/tensor/product_parts.h"

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

std::vector<MultiplyPart> multiplied(const GemmShape& s) {
  std::vector<MultiplyPart> list;
  for (const GemmPart& p : parts_of(s))
    if (const auto* multiply = std::get_if<MultiplyPart>(&p)) list.push_back(*multiply);
  return list;
}

// Multiply-adds of all parts, those of the finishing kernel included.
std::int64_t work_of(const GemmShape& s) {
  std::int64_t work = 0;
  for (const GemmPart& p : parts_of(s)) {
    if (const auto* multiply = std::get_if<MultiplyPart>(&p))
      work += multiply->shape.m * multiply->shape.n * multiply->shape.k;
    if (const auto* finish = std::get_if<FinishPart>(&p))
      work += finish->rows * finish->columns * (s.k - finish->first_k);
  }
  return work;
}

bool aligned(const MatrixLayout& m) {
  const std::int64_t apart = m.col_stride == 1 ? m.row_stride : m.col_stride;
  return m.alignment == 16 && apart * static_cast<std::int64_t>(size_of(m.dtype)) % 16 == 0;
}

// Checks a GEMM in blocks: each element of c is finished once, all that the library reads is
// aligned, and no part is outside the workspace.
void check_blocks(const GemmShape& s) {
  const auto bytes = static_cast<std::int64_t>(gemm_workspace_bytes(s));
  const auto lt_bytes = static_cast<std::int64_t>(lt_bytes_of_parts(s));
  std::int64_t finished = 0, copied = 0;
  EXPECT_EQ(work_of(s), s.batch * s.m * s.n * s.k);
  for (const GemmPart& p : parts_of(s)) {
    if (const auto* multiply = std::get_if<MultiplyPart>(&p)) {
      EXPECT_TRUE(suits_lt(multiply->shape));
      EXPECT_TRUE(aligned(multiply->shape.a) && aligned(multiply->shape.b) &&
                  aligned(multiply->shape.c));
      for (const PartPlace& place : {multiply->a, multiply->b, multiply->c}) {
        EXPECT_TRUE(!place.in_workspace || place.bytes >= lt_bytes);
        EXPECT_LT(place.bytes, place.in_workspace ? bytes : INT64_MAX);
      }
    } else if (const auto* copy = std::get_if<CopyPart>(&p)) {
      EXPECT_EQ(copy->to_stride, (copy->length + 7) / 8 * 8);
      EXPECT_LE(copy->to + copy->lines * copy->to_stride * 2, bytes);
      copied += copy->lines * copy->length * (copy->of_a ? 0 : 1);
    } else {
      const auto& finish = std::get<FinishPart>(p);
      EXPECT_GE(finish.sums, lt_bytes);
      EXPECT_GE(finish.sums_stride, finish.columns);
      EXPECT_LE(finish.sums + finish.rows * finish.sums_stride * 4, bytes);
      finished += finish.rows * finish.columns;
    }
  }
  EXPECT_TRUE(finished == 0 || finished == s.batch * s.m * s.n);
  EXPECT_TRUE(copied == 0 || copied == s.batch * s.k * s.n);
}

TEST(GemmParts, OfLogitsAreTheLastIds) {
  const std::vector<MultiplyPart> parts = multiplied(logits(kApart));
  ASSERT_EQ(parts.size(), 2u);
  EXPECT_EQ(parts[0].shape.n, kVocabCount - 1);
  EXPECT_EQ(parts[1].shape.n, 1);
  EXPECT_EQ(parts[1].a, (PartPlace{false, 0}));
  EXPECT_EQ(parts[1].b, (PartPlace{false, (kVocabCount - 1) * kDim * 2}));
  EXPECT_EQ(parts[1].c, (PartPlace{false, (kVocabCount - 1) * 4}));
  EXPECT_FALSE(parts[1].shape.accumulate);
  EXPECT_EQ(work_of(logits(kApart)), kRows * kVocabCount * kDim);
}

TEST(GemmParts, OfSumsOverVocabAreAddedWhereNothingIsRounded) {
  const std::vector<MultiplyPart> parts = multiplied(d_hidden(DType::f32));
  ASSERT_EQ(parts.size(), 2u);
  EXPECT_EQ(parts[0].shape.k, kVocabCount - 1);
  EXPECT_FALSE(parts[0].shape.accumulate);
  EXPECT_EQ(parts[1].shape.k, 1);
  EXPECT_TRUE(parts[1].shape.accumulate);
  EXPECT_EQ(parts[1].a.bytes, (kVocabCount - 1) * 2);
  EXPECT_EQ(parts[1].b.bytes, (kVocabCount - 1) * kDim * 2);
  EXPECT_EQ(parts[1].c.bytes, 0);
  EXPECT_EQ(work_of(d_hidden(DType::f32)), kRows * kVocabCount * kDim);
  EXPECT_EQ(gemm_additional_bytes(d_hidden(DType::f32)), 0);
}

// A 16-bit gradient of the hidden states: strips of fp32 sums, to which a kernel adds the last
// term.
TEST(GemmParts, OfNarrowSumsOverVocabAreFinished) {
  GemmShape s = d_hidden(DType::bf16);
  check_blocks(s);
  EXPECT_EQ(parts_of(s).size(), 2u);  // 1.5 MiB of sums
  EXPECT_EQ(multiplied(s)[0].shape.k, kVocabCount - 1);
  EXPECT_EQ(multiplied(s)[0].shape.c.dtype, DType::f32);
  EXPECT_EQ(std::get<FinishPart>(parts_of(s)[1]).first_k, kVocabCount - 1);
  EXPECT_EQ(gemm_additional_bytes(s), 8 * kRows * kDim);

  s.m = 32768;  // strips of at most 16 MiB
  check_blocks(s);
  EXPECT_EQ(multiplied(s).size(), 7u);
  EXPECT_EQ(multiplied(s)[0].shape.m, 4736);
  EXPECT_LE(gemm_workspace_bytes(s), kLtWorkspaceBytes);  // as without strips

  s.epilogue.bias = true;  // the kernel adds it
  check_blocks(s);
  EXPECT_FALSE(multiplied(s)[0].shape.epilogue.any());
  s.epilogue.bias = false;
  s.accumulate = true;
  check_blocks(s);
  EXPECT_FALSE(multiplied(s)[0].shape.accumulate);
  s.k = kApart;  // a 16-bit c is added to by the kernel in any case
  check_blocks(s);
  EXPECT_EQ(std::get<FinishPart>(parts_of(s)[1]).first_k, kApart);
  s.accumulate = false;
  EXPECT_EQ(parts_of(s).size(), 1u);
  EXPECT_EQ(gemm_additional_bytes(s), 0);
}

// Rows of an odd length side by side, as of parameters and results.
TEST(GemmParts, OfUnalignedRowsAreCopiedOrFinished) {
  const MatrixLayout hidden = layout(DType::bf16, kDim, 1),
                     weight = layout(DType::bf16, kVocabCount, 1),
                     across = layout(DType::bf16, 1, kVocabCount);
  for (const DType to : {DType::bf16, DType::f32}) {
    // Logits by a weight [D, V], in rows with and without gaps.
    for (const std::int64_t stride : {kVocabCount, kApart}) {
      const GemmShape s = shape(kRows, kVocabCount, kDim, hidden, weight, layout(to, stride, 1));
      check_blocks(s);
      const auto finishes = [](const GemmPart& p) { return std::holds_alternative<FinishPart>(p); };
      const std::vector<GemmPart> parts = parts_of(s);
      EXPECT_EQ(std::any_of(parts.begin(), parts.end(), finishes), stride == kVocabCount);
    }
    // Their gradients: of the hidden states, with the weight transposed, and of the weight.
    check_blocks(shape(kRows, kDim, kVocabCount, layout(DType::bf16, kApart, 1), across,
                       layout(to, kDim, 1)));
    check_blocks(shape(kDim, kVocabCount, kRows, layout(DType::bf16, 1, kDim),
                       layout(DType::bf16, kApart, 1), layout(to, kVocabCount, 1)));
    // Both operands with rows at odd addresses, and a batch.
    GemmShape both = shape(1000, 333, 20001, layout(DType::bf16, 20001, 1),
                           layout(DType::bf16, 333, 1), layout(to, 333, 1));
    check_blocks(both);
    EXPECT_GT(parts_of(both).size(), 3u);
    both.batch = 3;
    both.a.batch_stride = 1000 * 20001;
    both.b.batch_stride = 333 * 20001;
    both.c.batch_stride = 333 * 1000;
    check_blocks(both);
    EXPECT_EQ(parts_of(both).size() % 3, 0u);
  }
}

// Elements of a host array: [batch, rows, columns] of a layout.
struct Elements {
  float* data;
  MatrixLayout layout;
  float& at(std::int64_t batch, std::int64_t row, std::int64_t column) const {
    return data[batch * layout.batch_stride + row * layout.row_stride + column * layout.col_stride];
  }
};

// Runs the parts of an fp32 GEMM on the host.
void run_parts(const GemmShape& s, std::vector<float>& a, std::vector<float>& b,
               std::vector<float>& c) {
  std::vector<float> workspace(gemm_workspace_bytes(s) / 4, 1e30F);
  const auto address = [&](const PartPlace& place, std::vector<float>& callers) {
    return (place.in_workspace ? workspace : callers).data() + place.bytes / 4;
  };
  for (const GemmPart& p : parts_of(s)) {
    if (const auto* multiply = std::get_if<MultiplyPart>(&p)) {
      const GemmShape& m = multiply->shape;
      const Elements x{address(multiply->a, a), m.a}, y{address(multiply->b, b), m.b},
          z{address(multiply->c, c), m.c};
      for (std::int64_t batch = 0; batch < m.batch; ++batch) {
        for (std::int64_t i = 0; i < m.m; ++i) {
          for (std::int64_t j = 0; j < m.n; ++j) {
            double sum = m.accumulate ? z.at(batch, i, j) : 0.0;
            for (std::int64_t k = 0; k < m.k; ++k)
              sum += static_cast<double>(x.at(batch, i, k)) * y.at(batch, k, j);
            z.at(batch, i, j) = static_cast<float>(sum);
          }
        }
      }
    } else {
      const auto& finish = std::get<FinishPart>(p);
      const Elements z{c.data() + finish.c / 4, s.c};
      const MatrixLayout stored = {DType::f32, finish.rows * finish.sums_stride, finish.sums_stride,
                                   1, 16};
      const Elements sums{workspace.data() + finish.sums / 4, stored};
      EXPECT_EQ(finish.first_k, s.k);
      for (std::int64_t i = 0; i < finish.rows; ++i) {
        for (std::int64_t j = 0; j < finish.columns; ++j) {
          double sum = s.accumulate ? z.at(0, i, j) : 0.0;
          for (std::int64_t part = 0; part < finish.parts; ++part) sum += sums.at(part, i, j);
          z.at(0, i, j) = static_cast<float>(sum);
        }
      }
    }
  }
}

// Few rows and columns in fp32, whose sums the library would leave to one SM.
TEST(GemmParts, OfLongInnerDimensionsAreABatch) {
  for (const bool across : {false, true}) {
    GemmShape s = shape(3, 5, 2100, layout(DType::f32, 2100, 1), layout(DType::f32, 5, 1),
                        layout(DType::f32, 5, 1));
    if (across) {
      s.a = layout(DType::f32, 1, 3);
      s.b = layout(DType::f32, 1, 2100);
    }
    s.batch = 2;
    s.a.batch_stride = 3 * 2100;
    s.b.batch_stride = 5 * 2100;
    s.c.batch_stride = 3 * 5;
    s.accumulate = across;
    EXPECT_EQ(parts_of(s).size(), 6u);  // 4 parts of 520 terms, the last 20, and their sum; twice
    EXPECT_EQ(multiplied(s)[0].shape.batch, 4);
    EXPECT_EQ(gemm_additional_bytes(s), 2 * 2 * 4 * 4 * 3 * 5);
    std::vector<float> a(2 * 3 * 2100), b(2 * 5 * 2100), c(2 * 3 * 5, 0.5F);
    for (std::size_t i = 0; i < a.size(); ++i) a[i] = static_cast<float>((i * 37) % 101) - 50.0F;
    for (std::size_t i = 0; i < b.size(); ++i) b[i] = static_cast<float>((i * 53) % 97) - 48.0F;
    run_parts(s, a, b, c);
    for (std::int64_t i = 0; i < 2 * 3 * 5; ++i) {
      const std::int64_t batch = i / 15, row = i / 5 % 3, column = i % 5;
      double sum = across ? 0.5 : 0.0;
      for (std::int64_t k = 0; k < s.k; ++k)
        sum += static_cast<double>(Elements{a.data(), s.a}.at(batch, row, k)) *
               Elements{b.data(), s.b}.at(batch, k, column);
      EXPECT_NEAR(c[static_cast<std::size_t>(i)], sum, 1e-6 * std::abs(sum) + 1e-6);
    }
    s.workspace = static_cast<std::int64_t>(gemm_workspace_bytes(s)) - 256;
    EXPECT_EQ(parts_of(s).size(), 1u);  // too little for four parts
    EXPECT_LE(gemm_workspace_bytes(s), static_cast<std::size_t>(s.workspace));
  }
  // A chunk of MoCo's gradient: 16 tiles of 132 SMs' work.
  GemmShape s = shape(256, 1024, 32768, layout(DType::f32, 32768, 1), layout(DType::f32, 1024, 1),
                      layout(DType::f32, 1024, 1));
  EXPECT_EQ(multiplied(s)[0].shape.batch, 16);
  EXPECT_EQ(multiplied(s).size(), 1u);
  EXPECT_EQ(gemm_workspace_bytes(s), (std::size_t{16} << 20) + (256 << 10));
  s.m = 2048;
  EXPECT_EQ(parts_of(s).size(), 1u);  // enough tiles
  EXPECT_EQ(multiplied(s)[0].shape.batch, 1);
}

TEST(GemmParts, FitTheWorkspaceThatThereIs) {
  GemmShape s = d_hidden(DType::bf16);
  s.workspace = static_cast<std::int64_t>(gemm_workspace_bytes(s));
  EXPECT_EQ(parts_of(s).size(), 2u);
  s.workspace -= 256;
  EXPECT_EQ(parts_of(s).size(), 1u);
  EXPECT_LE(gemm_workspace_bytes(s), static_cast<std::size_t>(s.workspace));
  s.workspace = 1000;
  EXPECT_EQ(lt_bytes_of_parts(s), 1000u);
}

TEST(GemmParts, OfAllDimensionsMeetOnce) {
  const GemmShape s = shape(1003, 1005, 1007, layout(DType::bf16, 1, 1008),
                            layout(DType::bf16, 1, 1008), layout(DType::f32, 1008, 1));
  const std::vector<MultiplyPart> parts = multiplied(s);
  ASSERT_EQ(parts.size(), 4u);
  EXPECT_EQ(work_of(s), s.m * s.n * s.k);
  EXPECT_EQ(parts[0].shape.m, 1000);
  EXPECT_EQ(parts[0].shape.n, 1000);
  EXPECT_EQ(parts[0].shape.k, 1000);
  EXPECT_EQ(parts[3].shape.m, 1000);  // only where the first one is
  for (const MultiplyPart& p : parts) {
    EXPECT_LE(lt_workspace_bytes(p.shape), gemm_workspace_bytes(s));
    EXPECT_EQ(p.c.bytes % 4, 0);
  }
}

TEST(GemmParts, OthersStayWhole) {
  GemmShape even = logits(kApart);
  even.n = kApart;
  EXPECT_EQ(parts_of(even).size(), 1u);
  GemmShape little = logits(kVocabCount);
  little.m = 4;  // too few rows to copy or to add to for
  EXPECT_EQ(parts_of(little).size(), 1u);
  little.m = little.k = 64;
  EXPECT_EQ(parts_of(little).size(), 1u);
  GemmShape rows = d_hidden(DType::f32);
  rows.m = 511;  // contiguous in none of the matrices
  rows.k = kApart;
  EXPECT_EQ(parts_of(rows).size(), 1u);
}

}  // namespace
}  // namespace logitless::cuda
