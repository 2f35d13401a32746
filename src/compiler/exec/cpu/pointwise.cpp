// Elementwise loops and reductions.
#include <algorithm>
#include <array>
#include <cmath>
#include <cstring>
#include <limits>
#include <type_traits>

#include "compiler/exec/cpu/block.h"
#include "compiler/exec/cpu/exact_block.h"
#include "compiler/exec/cpu/row_result.h"
#include "compiler/exec/cpu/run.h"
#include "core/check.h"
#include "core/element.h"
#include "core/parallel.h"
#include "kernels/cpu_tensor.h"

namespace logitless::ir {
namespace {

constexpr std::int64_t kTask = 1 << 15;  // elements of a task, approximately
constexpr std::int64_t kNarrow = 16;     // elements of a row that is reduced beside others, at most

// Stores n numbers.
template <typename R>
void put(const View& view, std::byte* at, std::int64_t stride, const R* from, std::int64_t n,
         bool accumulate) {
  if (std::is_same_v<R, float> && stride == 1 && view.dtype == DType::f32) {
    auto* to = reinterpret_cast<float*>(at);
    if (accumulate) {
      add_to(reinterpret_cast<const float*>(from), to, n);
    } else {
      std::memmove(to, from, static_cast<std::size_t>(n) * sizeof(float));
    }
  } else if (std::is_same_v<R, float> && stride == 1 && is_float32_like(view.dtype) &&
             !accumulate) {
    from_f32(view.dtype, reinterpret_cast<const float*>(from), at, n);
  } else {
    store_numbers(view.dtype, at, stride, from, n, accumulate);
  }
}

template <typename R>
void put_rows(const View& view, std::byte* at, const R* from, std::int64_t rows, std::int64_t n,
              bool accumulate) {
  const std::size_t rank = view.strides.size();
  const std::int64_t stride = rank > 0 ? view.strides[rank - 1] : 1;
  const std::int64_t step = rows > 1 ? view.strides[rank - 2] : n;
  if (stride == 1 && step == n) return put(view, at, stride, from, rows * n, accumulate);
  const auto bytes = step * static_cast<std::int64_t>(size_of(view.dtype));
  for (std::int64_t r = 0; r < rows; ++r)
    put(view, at + r * bytes, stride, from + r * n, n, accumulate);
}

// Computes the coordinates of element `flat` over `dims` dimensions from `first` on.
void unravel(const std::vector<std::int64_t>& shape, std::size_t first, std::size_t dims,
             std::int64_t flat, std::int64_t* coordinates) {
  for (std::size_t d = first + dims; d-- > first;) {
    coordinates[d] = flat % shape[d];
    flat /= shape[d];
  }
}
bool advance(const std::vector<std::int64_t>& shape, std::size_t first, std::size_t dims,
             std::int64_t* coordinates) {
  for (std::size_t d = first + dims; d-- > first;) {
    if (++coordinates[d] < shape[d]) return true;
    coordinates[d] = 0;
  }
  return false;
}
std::int64_t product_of(const std::vector<std::int64_t>& shape, std::size_t first,
                        std::size_t dims) {
  std::int64_t n = 1;
  for (std::size_t d = first; d < first + dims; ++d) n *= shape[d];
  return n;
}

// B: what computes blocks of numbers R.
template <typename R, class B>
void elementwise(const Pointwise& loop, const Frame& frame, int threads) {
  const std::size_t rank = loop.shape.size(), outer = rank > 2 ? rank - 2 : 0;
  const std::int64_t inner = rank > 0 ? loop.shape[rank - 1] : 1;
  const std::int64_t lines = rank > 1 ? loop.shape[rank - 2] : 1;
  if (product_of(loop.shape, 0, rank) == 0) return;
  const BlockShape shape(loop);
  const std::int64_t across = count_of_blocks(inner, shape.columns),
                     down = count_of_blocks(lines, shape.rows);
  const std::int64_t items = product_of(loop.shape, 0, outer) * down * across;
  const std::int64_t per_task = std::max<std::int64_t>(kTask / (shape.rows * shape.columns), 1);
  const Pointwise::Store& to = loop.store;
  const bool dense =
      rank == 0 ||
      (to.view.strides[rank - 1] == 1 &&
       (shape.rows == 1 || (to.view.strides[rank - 2] == inner && shape.columns == inner)));
  // The sum of one element is no -0, as no sum is: it starts from 0.
  const bool sums = loop.reduction && loop.reduce == Reduce::sum;
  const bool direct = B::kWritesDirectly && dense && !sums &&
                      to.view.dtype == register_dtype<R>() && !to.accumulate &&
                      !loop.steps.empty() &&
                      to.source == static_cast<int>(loop.leaves.size() + loop.steps.size()) - 1;
  parallel_for(threads, count_of_blocks(items, per_task), [&](std::int64_t task, int) {
    B block(loop, frame);
    std::array<std::int64_t, kMaxDims> at{};
    const std::int64_t end = std::min(items, (task + 1) * per_task);
    std::int64_t last = -1;  // the item's index over the outer dimensions
    for (std::int64_t item = task * per_task; item < end; ++item) {
      const std::int64_t index = item / (down * across);
      if (last < 0) {
        unravel(loop.shape, 0, outer, index, at.data());
      } else if (index != last) {
        advance(loop.shape, 0, outer, at.data());
      }
      last = index;
      const std::int64_t line = item / across % down * shape.rows;
      const std::int64_t first = item % across * shape.columns;
      const std::int64_t rows = std::min(shape.rows, lines - line);
      const std::int64_t n = std::min(shape.columns, inner - first);
      if (rank > 1) at[rank - 2] = line;
      if (rank > 0) at[rank - 1] = first;
      std::byte* memory = block.stored(at.data());
      const R* values =
          block.run(at.data(), rows, n, direct ? reinterpret_cast<R*>(memory) : nullptr);
      if (sums) {
        alignas(64) std::array<R, kBlock> sum;
        for (std::int64_t i = 0; i < rows * n; ++i)
          sum[static_cast<std::size_t>(i)] = values[i] + R(0);
        put_rows(to.view, memory, sum.data(), rows, n, to.accumulate);
      } else if (!direct) {
        put_rows(to.view, memory, values, rows, n, to.accumulate);
      }
    }
  });
}

// Stores one result.
void finish(const Pointwise::Store& to, std::byte* memory, std::int64_t value) {
  store_numbers(to.view.dtype, memory, 1, &value, 1, to.accumulate);
}
void finish(const Pointwise::Store& to, std::byte* memory, double value) {
  store_element(memory, to.view.dtype, 0,
                to.accumulate ? load_element(memory, to.view.dtype, 0) + value : value);
}

template <typename R>
void merge_block(Reduce kind, const R* x, R* top, R* sum, std::int64_t n) {
  if constexpr (std::is_same_v<R, float>) {
    if (kind == Reduce::sum) return add_to(x, sum, n);
    if (kind == Reduce::max) return max_to(x, sum, n);
    if (kind == Reduce::lse) return add_exponentials(x, top, sum, n);
  }
  if constexpr (std::is_integral_v<R>) {
    for (std::int64_t i = 0; i < n; ++i)
      sum[i] = kind == Reduce::sum ? wrapped_sum(sum[i], x[i]) : std::max(sum[i], x[i]);
    return;
  }
  switch (kind) {
    case Reduce::product:
      for (std::int64_t i = 0; i < n; ++i) sum[i] *= x[i];
      break;
    case Reduce::sum:
      for (std::int64_t i = 0; i < n; ++i) sum[i] += x[i];
      break;
    case Reduce::max:
      for (std::int64_t i = 0; i < n; ++i)
        sum[i] = std::isnan(x[i]) || std::isnan(sum[i]) ? x[i] + sum[i] : std::max(sum[i], x[i]);
      break;
    default:
      for (std::int64_t i = 0; i < n; ++i) add_exponential(x[i], top[i], sum[i]);
  }
}

// Writes the log-sum-exps of n columns, of which `top` and `sum` are as in add_exponential.
template <typename R>
void finish_lse(const R* top, const R* sum, double* lse, std::int64_t n) {
  alignas(64) std::array<R, kBlock> logs;
  block_function<R>(Function::log)(sum, nullptr, nullptr, logs.data(), n);
  for (std::int64_t i = 0; i < n; ++i)
    lse[i] = static_cast<double>(logs[static_cast<std::size_t>(i)]) + static_cast<double>(top[i]);
}

// Reduces the rows of a block `values` [rows, n], of up to kNarrow elements each, and stores them
// `step` elements apart. All rows take an element at a time: one by one they would leave most lanes
// of a vector empty.
template <typename R>
void reduce_narrow(const Pointwise& loop, const R* values, std::int64_t rows, std::int64_t n,
                   std::byte* memory, std::int64_t step) {
  const Pointwise::Store& to = loop.store;
  alignas(64) std::array<R, kBlock> top, sum, column;
  std::fill_n(top.data(), rows, least<R>(to.view.dtype));
  std::fill_n(sum.data(), rows, first_of<R>(loop.reduce, to.view.dtype));
  for (std::int64_t k = 0; k < n; ++k) {
    for (std::int64_t r = 0; r < rows; ++r) column[static_cast<std::size_t>(r)] = values[r * n + k];
    merge_block(loop.reduce, column.data(), top.data(), sum.data(), rows);
  }
  if constexpr (!std::is_integral_v<R>) {
    if (loop.reduce == Reduce::lse) {
      alignas(64) std::array<double, kBlock> lse;
      finish_lse(top.data(), sum.data(), lse.data(), rows);
      return store_numbers(to.view.dtype, memory, step, lse.data(), rows, to.accumulate);
    }
  }
  store_numbers(to.view.dtype, memory, step, sum.data(), rows, to.accumulate);
}

// Reduces several short rows at a time along one dimension.
template <typename R, class B>
void reduce_short_rows(const Pointwise& loop, const BlockShape& shape, const Frame& frame,
                       int threads) {
  const std::size_t rank = loop.shape.size(), outer = rank - 2;
  const std::int64_t inner = loop.shape[rank - 1], lines = loop.shape[rank - 2];
  const std::int64_t down = count_of_blocks(lines, shape.rows);
  const std::int64_t items = product_of(loop.shape, 0, outer) * down;
  const std::int64_t per_task = std::max<std::int64_t>(kTask / (shape.rows * shape.columns), 1);
  const Pointwise::Store& to = loop.store;
  const std::int64_t step = to.view.strides[outer];
  const auto step_bytes = step * static_cast<std::int64_t>(size_of(to.view.dtype));
  const bool narrow = inner <= kNarrow && loop.reduce != Reduce::product;  // products are of f64
  parallel_for(threads, count_of_blocks(items, per_task), [&](std::int64_t task, int) {
    B block(loop, frame);
    std::array<std::int64_t, kMaxDims> at{};
    const std::int64_t end = std::min(items, (task + 1) * per_task);
    for (std::int64_t item = task * per_task; item < end; ++item) {
      unravel(loop.shape, 0, outer, item / down, at.data());
      at[outer] = item % down * shape.rows;
      const std::int64_t rows = std::min(shape.rows, lines - at[outer]);
      const R* values = block.run(at.data(), rows, inner);
      std::byte* const memory = block.stored(at.data());
      if (narrow) {
        reduce_narrow(loop, values, rows, inner, memory, step);
        continue;
      }
      for (std::int64_t r = 0; r < rows; ++r) {
        Sum<R> sum(loop.reduce, to.view.dtype);
        sum.add(values + r * inner, inner);
        finish(to, memory + r * step_bytes, sum.value());
      }
    }
  });
}

// Adds up the elements of a row whose first reduced index is in [begin, end).
template <typename R, class B>
void add_row(const Pointwise& loop, const BlockShape& shape, B& block, std::int64_t begin,
             std::int64_t end, std::int64_t* at, Sum<R>& sum) {
  const std::size_t rank = loop.shape.size(), reduced = static_cast<std::size_t>(loop.reduced),
                    kept = rank - reduced;
  if (reduced == 1) {
    for (std::int64_t x = begin; x < end; x += kBlock) {
      at[kept] = x;
      const std::int64_t n = std::min(kBlock, end - x);
      sum.add(block.run(at, 1, n), n);
    }
    return;
  }
  if (product_of(loop.shape, kept + 1, reduced - 1) == 0) return;
  const std::int64_t inner = loop.shape[rank - 1];
  const auto lines = [&](std::int64_t first, std::int64_t last) {
    for (std::int64_t line = first; line < last; line += shape.rows) {
      at[rank - 2] = line;
      const std::int64_t rows = std::min(shape.rows, last - line);
      for (std::int64_t y = 0; y < inner; y += shape.columns) {
        at[rank - 1] = y;
        const std::int64_t n = std::min(shape.columns, inner - y);
        sum.add(block.run(at, rows, n), rows * n);
      }
    }
  };
  if (reduced == 2) return lines(begin, end);
  for (std::int64_t x = begin; x < end; ++x) {
    at[kept] = x;
    do {
      lines(0, loop.shape[rank - 2]);
    } while (advance(loop.shape, kept + 1, reduced - 3, at));
  }
}

template <typename R, class B>
void reduce_rows(const Pointwise& loop, const Frame& frame, int threads) {
  const std::size_t rank = loop.shape.size(), reduced = static_cast<std::size_t>(loop.reduced),
                    kept = rank - reduced;
  const BlockShape shape(loop.shape, reduced > 1 || kept > 0);
  const std::int64_t parts = loop.parts;
  const bool narrow = kept > 0 && loop.shape[kept] <= kNarrow;  // also one row: the same bits
  if (reduced == 1 && (shape.rows > 1 || narrow) && parts == 1)
    return reduce_short_rows<R, B>(loop, shape, frame, threads);
  const std::int64_t rows = product_of(loop.shape, 0, kept);
  const std::int64_t first_size = loop.shape[kept];
  const Pointwise::Store& to = loop.store;
  const std::int64_t length =
      product_of(loop.shape, kept, reduced) / std::max<std::int64_t>(parts, 1);
  const std::int64_t per_task =
      std::max<std::int64_t>(kTask / std::max<std::int64_t>(length, 1), 1);
  const std::int64_t items = rows * parts;
  R* const sums = parts > 1 ? reinterpret_cast<R*>(frame.address(loop.scratch)) : nullptr;
  parallel_for(threads, (items + per_task - 1) / per_task, [&](std::int64_t task, int) {
    B block(loop, frame);
    std::array<std::int64_t, kMaxDims> at{};
    const std::int64_t end = std::min(items, (task + 1) * per_task);
    for (std::int64_t item = task * per_task; item < end; ++item) {
      const std::int64_t row = item / parts, part = item % parts;
      unravel(loop.shape, 0, kept, row, at.data());
      const auto first = at.begin() + static_cast<std::ptrdiff_t>(kept),
                 last = at.begin() + static_cast<std::ptrdiff_t>(rank);
      std::fill(first, last, 0);
      Sum<R> sum(loop.reduce, to.view.dtype);
      add_row(loop, shape, block, first_size * part / parts, first_size * (part + 1) / parts,
              at.data(), sum);
      std::fill(first, last, 0);
      if (parts > 1) {
        sums[item] = static_cast<R>(sum.value());
      } else {
        finish(to, block.stored(at.data()), sum.value());
      }
    }
  });
  if (parts <= 1) return;
  const std::int64_t rows_per_task = std::max<std::int64_t>(kTask / parts, 1);
  parallel_for(threads, (rows + rows_per_task - 1) / rows_per_task, [&](std::int64_t task, int) {
    std::array<std::int64_t, kMaxDims> at{};
    const std::int64_t end = std::min(rows, (task + 1) * rows_per_task);
    for (std::int64_t row = task * rows_per_task; row < end; ++row) {
      unravel(loop.shape, 0, kept, row, at.data());
      Sum<R> sum(loop.reduce, to.view.dtype);
      for (std::int64_t part = 0; part < parts; ++part) sum.merge_value(sums[row * parts + part]);
      std::int64_t offset = to.view.offset;
      for (std::size_t d = 0; d < kept; ++d) offset += at[d] * to.view.strides[d];
      finish(to,
             frame.address(to.view.buffer) +
                 offset * static_cast<std::int64_t>(size_of(to.view.dtype)),
             sum.value());
    }
  });
}

// Adds up a block of columns from `at` on. The block has several short rows of kept elements if
// more than the last dimension is kept, else several short rows of reduced ones.
template <typename R, class B>
void add_columns(const Pointwise& loop, const BlockShape& shape, B& block, std::int64_t begin,
                 std::int64_t end, std::int64_t rows, std::int64_t n, std::int64_t* at, R* top,
                 R* sum) {
  const auto reduced = static_cast<std::size_t>(loop.reduced);
  const bool kept_rows = reduced + 1 < loop.shape.size();
  if (kept_rows || shape.rows == 1) {
    if (product_of(loop.shape, 1, reduced - 1) == 0) return;
    for (std::int64_t x = begin; x < end; ++x) {
      at[0] = x;
      do {
        merge_block(loop.reduce, block.run(at, rows, n), top, sum, rows * n);
      } while (advance(loop.shape, 1, reduced - 1, at));
    }
    return;
  }
  const auto lines = [&](std::int64_t first, std::int64_t last) {
    for (std::int64_t line = first; line < last; line += shape.rows) {
      at[reduced - 1] = line;
      const std::int64_t count = std::min(shape.rows, last - line);
      const R* values = block.run(at, count, n);
      for (std::int64_t r = 0; r < count; ++r)
        merge_block(loop.reduce, values + r * n, top, sum, n);
    }
  };
  if (reduced == 1) return lines(begin, end);
  if (product_of(loop.shape, 1, reduced - 2) == 0) return;
  for (std::int64_t x = begin; x < end; ++x) {
    at[0] = x;
    do {
      lines(0, loop.shape[reduced - 1]);
    } while (advance(loop.shape, 1, reduced - 2, at));
  }
}

template <typename R, class B>
void reduce_columns(const Pointwise& loop, const Frame& frame, int threads) {
  const std::size_t rank = loop.shape.size(), reduced = static_cast<std::size_t>(loop.reduced),
                    kept = rank - reduced;
  const BlockShape shape(loop.shape, true);
  const bool several = kept > 1;  // a block has several rows of kept elements
  const std::int64_t inner = loop.shape[rank - 1], lines = several ? loop.shape[rank - 2] : 1;
  const std::int64_t height = several ? shape.rows : 1;
  const std::int64_t across = count_of_blocks(inner, shape.columns),
                     down = count_of_blocks(lines, height);
  const std::size_t outer_dims = several ? kept - 2 : 0;
  const std::int64_t outer = product_of(loop.shape, reduced, outer_dims);
  const std::int64_t columns = outer * lines * inner;
  const std::int64_t parts = loop.parts, first_size = loop.shape[0];
  const Pointwise::Store& to = loop.store;
  R* const sums = parts > 1 ? reinterpret_cast<R*>(frame.address(loop.scratch)) : nullptr;
  const R start = first_of<R>(loop.reduce, to.view.dtype);
  // Finds a block of columns: its coordinates, its first column, its rows and the numbers in each
  // row.
  const auto place = [&](std::int64_t item, std::int64_t* at) {
    struct Found {
      std::int64_t column, rows, n;
    };
    const std::int64_t line = item / across % down * height, first = item % across * shape.columns,
                       index = item / (across * down);
    unravel(loop.shape, reduced, outer_dims, index, at);
    if (several) at[rank - 2] = line;
    at[rank - 1] = first;
    return Found{(index * lines + line) * inner + first, std::min(height, lines - line),
                 std::min(shape.columns, inner - first)};
  };
  const std::int64_t items = outer * down * across;
  parallel_for(threads, parts * items, [&](std::int64_t task, int) {
    B block(loop, frame);
    alignas(64) std::array<R, kBlock> sum, top;
    std::array<std::int64_t, kMaxDims> at{};
    const std::int64_t part = task / items;
    const auto [column, rows, n] = place(task % items, at.data());
    sum.fill(start);
    top.fill(least<R>(to.view.dtype));
    add_columns(loop, shape, block, first_size * part / parts, first_size * (part + 1) / parts,
                rows, n, at.data(), top.data(), sum.data());
    if (loop.reduce == Reduce::lse) {
      alignas(64) std::array<double, kBlock> lse;
      if constexpr (!std::is_integral_v<R>)
        finish_lse(top.data(), sum.data(), lse.data(), rows * n);
      for (std::size_t d = 0; d < reduced; ++d) at[d] = 0;
      put_rows(to.view, block.stored(at.data()), lse.data(), rows, n, to.accumulate);
    } else if (parts > 1) {
      std::copy_n(sum.data(), rows * n, sums + part * columns + column);
    } else {
      for (std::size_t d = 0; d < reduced; ++d) at[d] = 0;
      put_rows(to.view, block.stored(at.data()), sum.data(), rows, n, to.accumulate);
    }
  });
  if (parts <= 1) return;
  parallel_for(threads, items, [&](std::int64_t task, int) {
    alignas(64) std::array<R, kBlock> sum;
    std::array<std::int64_t, kMaxDims> at{};
    const auto [column, rows, n] = place(task, at.data());
    sum.fill(start);
    for (std::int64_t part = 0; part < parts; ++part)
      merge_block<R>(loop.reduce, sums + part * columns + column, nullptr, sum.data(), rows * n);
    std::int64_t offset = to.view.offset;
    for (std::size_t d = reduced; d < rank; ++d) offset += at[d] * to.view.strides[d];
    put_rows(
        to.view,
        frame.address(to.view.buffer) + offset * static_cast<std::int64_t>(size_of(to.view.dtype)),
        sum.data(), rows, n, to.accumulate);
  });
}

template <typename R, class B = Block<R>>
void run(const Pointwise& loop, const Frame& frame, int threads) {
  check(loop.shape.size() <= kMaxDims, "a loop over ", loop.shape.size(), " dimensions");
  if (!loop.reduction || loop.reduced == 0) {  // one element is reduced
    elementwise<R, B>(loop, frame, threads);
  } else if (loop.columns && loop.reduced < static_cast<int>(loop.shape.size())) {
    reduce_columns<R, B>(loop, frame, threads);
  } else {
    reduce_rows<R, B>(loop, frame, threads);
  }
}

}  // namespace

void run_pointwise(const Pointwise& loop, const Frame& frame, int threads) {
  if (loop.exact) {
    if (holds_integers(loop, loop.store.source)) {
      run<std::int64_t, ExactBlock<double, std::int64_t>>(loop, frame, threads);
    } else if (loop.wide) {
      run<double, ExactBlock<double, double>>(loop, frame, threads);
    } else {
      run<float, ExactBlock<float, float>>(loop, frame, threads);
    }
  } else if (loop.wide) {
    run<double>(loop, frame, threads);
  } else {
    run<float>(loop, frame, threads);
  }
}

}  // namespace logitless::ir
