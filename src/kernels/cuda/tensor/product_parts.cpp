#include "kernels/cuda/tensor/product_parts.h"

#include <algorithm>
#include <optional>

#include "kernels/cuda/device/tile_sizes.h"
#include "kernels/cuda/tensor/product_form.h"
#include "kernels/cuda/tensor/split_k.h"

namespace logitless::cuda {
namespace {

constexpr std::int64_t kVector = 8;             // 16-bit elements in 16 bytes
constexpr double kLeastWorthCutting = 1 << 28;  // multiply-adds that take as long as two launches
constexpr double kLeastOfBatch = 16 * kLeastWorthCutting;  // where GEMMs of a batch run in turn
// Blocks: multiply-adds of each element of a sum, and of each copied element of an operand. With
// fewer, the additional memory traffic takes as long as the library's slow kernel.
constexpr std::int64_t kLeastReuse = 128;
constexpr std::int64_t kLeastSide = 64;  // of c; reading the other operand takes longer below
constexpr std::int64_t kSumBytes = std::int64_t{16} << 20;   // of a block: stays in L2
constexpr std::int64_t kCopyBytes = std::int64_t{32} << 20;  // of an operand's block
constexpr std::int64_t kMostWholeColumns = 8192, kBlockColumns = 4096;
constexpr std::int64_t kTile = 128;  // blocks are multiples of it
constexpr std::int64_t kMostBatches = 64;

std::int64_t up(std::int64_t size, std::int64_t multiple) {
  return ceil_div(size, multiple) * multiple;
}
std::int64_t element_bytes(const MatrixLayout& m) {
  return static_cast<std::int64_t>(size_of(m.dtype));
}
bool has_lines(const MatrixLayout& m) { return m.col_stride == 1 || m.row_stride == 1; }
bool begins_aligned(const MatrixLayout& m) {
  const std::int64_t apart = m.col_stride == 1 ? m.row_stride : m.col_stride;
  return m.alignment % 16 == 0 && has_lines(m) && apart * element_bytes(m) % 16 == 0;
}
bool is_odd(std::int64_t size, bool contiguous) {
  return contiguous && size % kVector != 0 && size > kVector;
}
bool is_odd_k(const GemmShape& s) {
  return is_odd(s.k, s.a.col_stride == 1 || s.b.row_stride == 1);
}

double work_of(const GemmShape& s) {
  return 1.0 * static_cast<double>(s.m) * static_cast<double>(s.n) * static_cast<double>(s.k);
}

void move(PartPlace& place, const MatrixLayout& m, std::int64_t elements) {
  place.bytes += elements * element_bytes(m);
}

// Cuts the last few elements of one dimension off `whole`.
MultiplyPart take_last(MultiplyPart& whole, std::int64_t GemmShape::*size) {
  MultiplyPart last = whole;
  const std::int64_t first = whole.shape.*size / kVector * kVector;
  last.shape.*size -= first;
  whole.shape.*size = first;
  const GemmShape& s = whole.shape;
  if (size == &GemmShape::m) {
    move(last.a, s.a, first * s.a.row_stride);
    move(last.c, s.c, first * s.c.row_stride);
  } else if (size == &GemmShape::n) {
    move(last.b, s.b, first * s.b.col_stride);
    move(last.c, s.c, first * s.c.col_stride);
  } else {
    move(last.a, s.a, first * s.a.col_stride);
    move(last.b, s.b, first * s.b.row_stride);
    last.shape.accumulate = true;
  }
  return last;
}

// Adds a GEMM, cut at multiples of 8 where that is faster.
void add_cut(std::vector<GemmPart>& parts, MultiplyPart whole) {
  const GemmShape s = whole.shape;
  const bool cuts = suits_lt(s) && size_of(s.a.dtype) == 2 && s.batch == 1 && !s.epilogue.any() &&
                    work_of(s) >= kLeastWorthCutting && begins_aligned(s.a) &&
                    begins_aligned(s.b) && begins_aligned(s.c);
  std::vector<MultiplyPart> last;
  if (cuts && is_odd(s.m, s.a.row_stride == 1 || s.c.row_stride == 1))
    last.push_back(take_last(whole, &GemmShape::m));
  if (cuts && is_odd(s.n, s.b.col_stride == 1 || s.c.col_stride == 1))
    last.push_back(take_last(whole, &GemmShape::n));
  // With a 16-bit c the sums would be rounded in between.
  if (cuts && is_odd_k(s) && size_of(s.c.dtype) >= 4)
    last.push_back(take_last(whole, &GemmShape::k));
  parts.emplace_back(std::move(whole));
  parts.insert(parts.end(), last.begin(), last.end());
}

// Blocks of c, and their part of the workspace.
struct Blocks {
  bool sums = false, copies_a = false, copies_b = false;
  std::int64_t rows = 0, columns = 0;  // of a block
  std::int64_t k = 0;                  // contracted before the sums are finished
  std::int64_t sums_stride = 0;
  std::int64_t sums_at = 0, b_at = 0, a_at = 0, bytes = 0;  // in the workspace
};

// Elements of `lines` lines of an operand's copy.
struct CopySize {
  std::int64_t lines = 0, length = 0, stride = 0;
};
CopySize copy_size(const MatrixLayout& m, std::int64_t rows, std::int64_t columns) {
  CopySize size;
  size.lines = m.col_stride == 1 ? rows : columns;
  size.length = m.col_stride == 1 ? columns : rows;
  size.stride = up(size.length, kVector);
  return size;
}
std::int64_t copy_bytes(const MatrixLayout& m, std::int64_t rows, std::int64_t columns) {
  const CopySize size = copy_size(m, rows, columns);
  return up(size.lines * size.stride * element_bytes(m), 256);
}

// Returns the size of a block, a multiple of kTile, of which no more than `most` fit.
std::int64_t block_of(std::int64_t size, std::int64_t most) {
  if (size <= most) return size;
  most = std::max(most / kTile, std::int64_t{1}) * kTile;
  return std::min(up(ceil_div(size, ceil_div(size, most)), kTile), most);
}

GemmShape block_shape(const GemmShape& s, const Blocks& blocks, std::int64_t rows,
                      std::int64_t columns) {
  GemmShape block = s;
  block.batch = 1;
  block.m = rows;
  block.n = columns;
  block.k = blocks.k;
  const auto copied = [&](MatrixLayout& m, std::int64_t m_rows, std::int64_t m_columns) {
    (m.col_stride == 1 ? m.row_stride : m.col_stride) = copy_size(m, m_rows, m_columns).stride;
    m.batch_stride = 0;
    m.alignment = 16;
  };
  if (blocks.copies_a) copied(block.a, rows, s.k);
  if (blocks.copies_b) copied(block.b, s.k, columns);
  if (!blocks.sums) return block;
  block.c = {DType::f32, 0, blocks.sums_stride, 1, 16};
  block.accumulate = false;
  block.epilogue = {};
  return block;
}

// Returns the blocks that the GEMM is divided into. Nothing: it has a fast kernel, perhaps after a
// cut at multiples of 8, or blocks do not pay.
std::optional<Blocks> blocks_of(const GemmShape& s) {
  const bool types = size_of(s.a.dtype) == 2 && s.b.dtype == s.a.dtype && size_of(s.c.dtype) <= 4;
  const double least = s.batch > 1 ? kLeastOfBatch : kLeastWorthCutting;
  if (!types || s.batch > kMostBatches || work_of(s) < least || std::min(s.m, s.n) < kLeastSide ||
      !has_lines(s.a) || !has_lines(s.b) || s.c.col_stride != 1)
    return {};
  const bool narrow = size_of(s.c.dtype) == 2;
  const bool odd = is_odd(s.n, true) || is_odd(s.m, s.a.row_stride == 1) || is_odd_k(s);
  Blocks blocks;
  blocks.copies_a = !begins_aligned(s.a);
  blocks.copies_b = !begins_aligned(s.b);
  blocks.sums = !begins_aligned(s.c) ||
                (narrow && (s.accumulate || s.c.dtype != s.a.dtype || is_odd_k(s))) ||
                (s.epilogue.any() && (odd || blocks.copies_a || blocks.copies_b));
  const bool batches = s.batch > 1 && odd;
  if (!blocks.sums && !blocks.copies_a && !blocks.copies_b && !batches) return {};
  if ((blocks.sums && s.k < kLeastReuse) || (blocks.copies_a && s.n < kLeastReuse) ||
      (blocks.copies_b && s.m < kLeastReuse))
    return {};
  blocks.k = blocks.sums && is_odd_k(s) ? s.k / kVector * kVector : s.k;
  const std::int64_t line = up(s.k, kVector) * element_bytes(s.a);
  blocks.columns = s.n;
  if (blocks.sums && s.n > kMostWholeColumns) blocks.columns = block_of(s.n, kBlockColumns);
  if (blocks.copies_b) blocks.columns = std::min(blocks.columns, block_of(s.n, kCopyBytes / line));
  blocks.rows = s.m;
  blocks.sums_stride = up(blocks.columns, kVector);
  if (blocks.sums) blocks.rows = block_of(s.m, kSumBytes / (4 * blocks.sums_stride));
  if (blocks.copies_a) blocks.rows = std::min(blocks.rows, block_of(s.m, kCopyBytes / line));

  const std::int64_t sum_bytes = blocks.sums ? up(blocks.rows * blocks.sums_stride * 4, 256) : 0;
  const auto most = static_cast<std::int64_t>(kLtWorkspaceBytes) - sum_bytes;
  const GemmShape block = block_shape(s, blocks, blocks.rows, blocks.columns);
  if (!suits_lt(block)) return {};
  blocks.sums_at = std::clamp<std::int64_t>(static_cast<std::int64_t>(lt_workspace_bytes(block)), 0,
                                            std::max<std::int64_t>(most, 0));
  blocks.b_at = blocks.sums_at + sum_bytes;
  blocks.a_at = blocks.b_at + (blocks.copies_b ? copy_bytes(s.b, s.k, blocks.columns) : 0);
  blocks.bytes = blocks.a_at + (blocks.copies_a ? copy_bytes(s.a, blocks.rows, s.k) : 0);
  return blocks;
}

// Blocks that fit the workspace.
std::optional<Blocks> blocks_within(const GemmShape& s) {
  std::optional<Blocks> blocks = blocks_of(s);
  if (blocks && s.workspace >= 0 && blocks->bytes > s.workspace) blocks.reset();
  return blocks;
}

// Lists the parts of one batch's blocks.
class Listing {
 public:
  Listing(const GemmShape& shape, const Blocks& blocks, std::vector<GemmPart>& parts)
      : s_(shape), blocks_(blocks), parts_(parts) {}

  void add(std::int64_t batch) {
    a_ = b_ = c_ = {};
    move(a_, s_.a, batch * s_.a.batch_stride);
    move(b_, s_.b, batch * s_.b.batch_stride);
    move(c_, s_.c, batch * s_.c.batch_stride);
    for (std::int64_t column = 0; column < s_.n; column += blocks_.columns) {
      const std::int64_t columns = std::min(blocks_.columns, s_.n - column);
      if (blocks_.copies_b)
        copy(false, s_.b, b_.bytes, column * s_.b.col_stride, s_.k, columns, blocks_.b_at);
      for (std::int64_t row = 0; row < s_.m; row += blocks_.rows)
        add_block(row, std::min(blocks_.rows, s_.m - row), column, columns);
    }
  }

 private:
  void copy(bool of_a, const MatrixLayout& m, std::int64_t begin, std::int64_t elements,
            std::int64_t rows, std::int64_t columns, std::int64_t to) {
    const CopySize size = copy_size(m, rows, columns);
    CopyPart part;
    part.of_a = of_a;
    part.from = begin + elements * element_bytes(m);
    part.to = to;
    part.lines = size.lines;
    part.length = size.length;
    part.from_stride = m.col_stride == 1 ? m.row_stride : m.col_stride;
    part.to_stride = size.stride;
    parts_.emplace_back(part);
  }

  void add_block(std::int64_t row, std::int64_t rows, std::int64_t column, std::int64_t columns) {
    if (blocks_.copies_a)
      copy(true, s_.a, a_.bytes, row * s_.a.row_stride, rows, s_.k, blocks_.a_at);
    MultiplyPart multiply{block_shape(s_, blocks_, rows, columns), a_, b_, c_};
    move(multiply.a, s_.a, row * s_.a.row_stride);
    move(multiply.b, s_.b, column * s_.b.col_stride);
    move(multiply.c, s_.c, row * s_.c.row_stride + column * s_.c.col_stride);
    if (blocks_.copies_a) multiply.a = {true, blocks_.a_at};
    if (blocks_.copies_b) multiply.b = {true, blocks_.b_at};
    if (blocks_.sums) multiply.c = {true, blocks_.sums_at};
    add_cut(parts_, std::move(multiply));
    if (!blocks_.sums) return;
    FinishPart finish;
    finish.a = a_.bytes;
    finish.b = b_.bytes;
    finish.c = c_.bytes;
    finish.sums = blocks_.sums_at;
    finish.sums_stride = blocks_.sums_stride;
    finish.first_row = row;
    finish.rows = rows;
    finish.first_column = column;
    finish.columns = columns;
    finish.first_k = blocks_.k;
    parts_.emplace_back(finish);
  }

  const GemmShape& s_;
  const Blocks& blocks_;
  std::vector<GemmPart>& parts_;
  PartPlace a_, b_, c_;  // of the batch
};

// Adds the parts of one batch's inner dimension, what is left of it, and their sum.
void add_split(std::vector<GemmPart>& parts, const GemmShape& s, const SplitK& split,
               std::int64_t batch) {
  MultiplyPart all{shape_of_parts(s, split), {}, {}, {true, split.sums_at}};
  move(all.a, s.a, batch * s.a.batch_stride);
  move(all.b, s.b, batch * s.b.batch_stride);
  FinishPart finish;
  finish.a = all.a.bytes;
  finish.b = all.b.bytes;
  finish.c = batch * s.c.batch_stride * element_bytes(s.c);
  finish.sums = split.sums_at;
  finish.sums_stride = s.n;
  finish.parts = split.parts;
  finish.rows = s.m;
  finish.columns = s.n;
  finish.first_k = s.k;
  MultiplyPart rest = all;
  rest.shape.batch = 1;
  rest.shape.k = s.k - split.parts * split.k;
  rest.shape.accumulate = true;
  move(rest.a, s.a, split.parts * split.k * s.a.col_stride);
  move(rest.b, s.b, split.parts * split.k * s.b.row_stride);
  parts.emplace_back(std::move(all));
  if (rest.shape.k > 0) parts.emplace_back(std::move(rest));
  parts.emplace_back(finish);
}

}  // namespace

std::vector<GemmPart> parts_of(const GemmShape& s) {
  std::vector<GemmPart> parts;
  if (const std::optional<SplitK> split = split_k_of(s)) {
    for (std::int64_t batch = 0; batch < s.batch; ++batch) add_split(parts, s, *split, batch);
    return parts;
  }
  const std::optional<Blocks> blocks = blocks_within(s);
  if (!blocks) {
    add_cut(parts, {s, {}, {}, {}});
    return parts;
  }
  Listing listing(s, *blocks, parts);
  for (std::int64_t batch = 0; batch < s.batch; ++batch) listing.add(batch);
  return parts;
}

std::size_t lt_bytes_of_parts(const GemmShape& s) {
  if (const std::optional<SplitK> split = split_k_of(s))
    return static_cast<std::size_t>(split->sums_at);
  if (const std::optional<Blocks> blocks = blocks_within(s))
    return static_cast<std::size_t>(blocks->sums_at);
  const std::size_t bytes = lt_workspace_bytes(s);
  return s.workspace < 0 ? bytes : std::min(bytes, static_cast<std::size_t>(s.workspace));
}

std::size_t gemm_workspace_bytes(const GemmShape& s) {
  if (const std::optional<SplitK> split = split_k_of(s))
    return static_cast<std::size_t>(split->bytes);
  if (const std::optional<Blocks> blocks = blocks_within(s))
    return static_cast<std::size_t>(blocks->bytes);
  return lt_bytes_of_parts(s);
}

std::int64_t gemm_additional_bytes(const GemmShape& s) {
  if (const std::optional<SplitK> split = split_k_of(s))
    return s.batch * 2 * 4 * split->parts * s.m * s.n;
  const std::optional<Blocks> blocks = blocks_within(s);
  if (!blocks) return 0;
  const std::int64_t sums = blocks->sums ? 2 * 4 * s.m * s.n : 0;
  const std::int64_t of_b = blocks->copies_b ? 2 * element_bytes(s.b) * s.k * s.n : 0;
  const std::int64_t of_a =
      blocks->copies_a ? 2 * element_bytes(s.a) * s.m * s.k * ceil_div(s.n, blocks->columns) : 0;
  return s.batch * (sums + of_b + of_a);
}

}  // namespace logitless::cuda
