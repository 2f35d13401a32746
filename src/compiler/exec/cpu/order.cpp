// Operations along one axis of strided tensors: running sums, sorting, and adding by index. A row
// holds the elements along the axis. Threads share the rows, and each row is processed in order.
#include <algorithm>
#include <array>
#include <cmath>
#include <limits>
#include <optional>
#include <type_traits>
#include <utility>

#include "compiler/exec/cpu/packed_sort.h"
#include "compiler/exec/cpu/run.h"
#include "core/element.h"
#include "core/parallel.h"

namespace logitless::ir {
namespace {

constexpr std::int64_t kTask = 1 << 15;  // elements of a task, approximately

// Calls f.template operator()<dtype>() with the dtype as a constant.
template <class F>
void with_dtype(DType dtype, F&& f) {
  switch (dtype) {
    case DType::f32:
      return f.template operator()<DType::f32>();
    case DType::f64:
      return f.template operator()<DType::f64>();
    case DType::bf16:
      return f.template operator()<DType::bf16>();
    case DType::f16:
      return f.template operator()<DType::f16>();
    case DType::i32:
      return f.template operator()<DType::i32>();
    case DType::i64:
      return f.template operator()<DType::i64>();
    case DType::i8:
      return f.template operator()<DType::i8>();
  }
}

// The type of sums; integers are summed exactly.
template <DType kType>
using Sum = std::conditional_t<kType == DType::i32 || kType == DType::i64, std::int64_t, double>;

template <DType kType>
Sum<kType> load(const std::byte* data, std::int64_t at) {
  if constexpr (std::is_same_v<Sum<kType>, std::int64_t>) {
    return load_index(data, kType, at);
  } else {
    return load_element(data, kType, at);
  }
}
template <DType kType>
void store(std::byte* data, std::int64_t at, Sum<kType> value) {
  if constexpr (kType == DType::i64) {
    reinterpret_cast<std::int64_t*>(data)[at] = value;
  } else {
    store_element(data, kType, at, static_cast<double>(value));
  }
}

// The rows of tensors that agree in all dimensions but the axis.
struct Rows {
  const View& like;
  std::size_t axis;

  std::int64_t count() const {
    std::int64_t n = 1;
    for (std::size_t d = 0; d < like.shape.size(); ++d) n *= d == axis ? 1 : like.shape[d];
    return n;
  }
  // Returns the offset of row `flat` in each view, in elements.
  template <std::size_t N>
  std::array<std::int64_t, N> offsets(std::int64_t flat,
                                      const std::array<const View*, N>& views) const {
    std::array<std::int64_t, N> at{};
    for (std::size_t d = like.shape.size(); d-- > 0;) {
      if (d == axis) continue;
      const std::int64_t i = flat % like.shape[d];
      flat /= like.shape[d];
      for (std::size_t k = 0; k < N; ++k) at[k] += i * views[k]->strides[d];
    }
    return at;
  }
  std::int64_t step(const View& v) const { return v.strides[axis]; }
  std::int64_t size(const View& v) const { return v.shape[axis]; }

  // Calls visit(first, end) with the rows of each task.
  template <class F>
  void share(std::int64_t elements_of_row, std::int64_t least, int threads, F&& visit) const {
    const std::int64_t rows = count();
    const std::int64_t per_task =
        std::max(kTask / std::max<std::int64_t>(elements_of_row, 1), least);
    parallel_for(threads, (rows + per_task - 1) / per_task, [&](std::int64_t task, int) {
      visit(task * per_task, std::min(rows, (task + 1) * per_task));
    });
  }
};

constexpr std::int64_t kSide = 16;  // adjacent rows that are processed together
// The same of rows that are contiguous: a power of two apart, more would share the sets of a cache.
constexpr std::int64_t kContiguousSide = 4;

// Returns log(exp(a) + exp(b)); -inf is its neutral element.
double log_sum(double a, double b) {
  const double top = std::isnan(a) || a > b ? a : b;
  if (std::isinf(top)) return top;
  return top + std::log(std::exp(a - top) + std::exp(b - top));
}

// Returns the greater; of equal numbers the second, and NaN if one is.
template <typename T>
T greater(T a, T b) {
  if constexpr (std::is_floating_point_v<T>) {
    if (std::isnan(a) || std::isnan(b)) return a + b;
  }
  return b >= a ? b : a;
}

// The elements of neighbouring rows at one index along the axis.
template <DType kType>
using Side = std::array<Sum<kType>, kSide>;

// Keeps the next results of neighbouring rows and stores them row by row: stored one index after
// the other, rows a power of two apart would share the sets of a cache.
template <DType kType>
class StoredRows {
 public:
  StoredRows(std::byte* out, std::int64_t step) : out_(out), step_(step) {}

  // Adds the results at index i; at: of each row's first element.
  void add(std::int64_t i, const std::array<std::int64_t, kSide>& at, const Side<kType>& results,
           std::int64_t rows) {
    if (filled_ == kPart) store_all(at, rows);
    places_[filled_] = i * step_;
    kept_[filled_++] = results;
  }
  void store_all(const std::array<std::int64_t, kSide>& at, std::int64_t rows) {
    for (std::size_t r = 0; r < static_cast<std::size_t>(rows); ++r) {
      for (std::size_t k = 0; k < filled_; ++k) store<kType>(out_, at[r] + places_[k], kept_[k][r]);
    }
    filled_ = 0;
  }

 private:
  static constexpr std::size_t kPart = 32;  // results of a row that are stored together
  std::byte* out_;
  std::int64_t step_;
  std::size_t filled_ = 0;
  std::array<std::int64_t, kPart> places_;
  std::array<Side<kType>, kPart> kept_;
};

// Scans rows: merge(so_far, x, factor) returns the next result. factor is 0 without factors.
template <DType kType, class Merge>
void scan_rows(const Scan& s, const Frame& frame, int threads, Sum<kType> start, Merge&& merge) {
  const Rows rows{s.x, static_cast<std::size_t>(s.axis)};
  const bool recurs = s.factors.buffer >= 0;
  const View& by_what = recurs ? s.factors : s.x;
  const std::byte* x = frame.address(s.x);
  const std::byte* factors = frame.address(by_what);
  std::byte* out = frame.address(s.out);
  const std::int64_t size = rows.size(s.x), from = s.reverse ? size - 1 : 0,
                     by = s.reverse ? -1 : 1;
  const std::int64_t side = rows.step(s.x) == 1 ? kContiguousSide : kSide;
  const bool later = side == kSide && rows.step(s.out) == 1;
  rows.share(size, kSide, threads, [&](std::int64_t first, std::int64_t end) {
    for (; first < end; first += side) {
      const std::int64_t n = std::min(side, end - first);
      std::array<std::int64_t, kSide> at_x{}, at_out{}, at_factors{};
      Side<kType> so_far;
      so_far.fill(start);
      StoredRows<kType> stored(out, rows.step(s.out));
      for (std::int64_t r = 0; r < n; ++r) {
        const auto i = static_cast<std::size_t>(r);
        const auto at = rows.offsets<3>(first + r, {&s.x, &s.out, &by_what});
        at_x[i] = at[0];
        at_out[i] = at[1];
        at_factors[i] = at[2];
      }
      for (std::int64_t k = 0, i = from; k < size; ++k, i += by) {
        for (std::size_t r = 0; r < static_cast<std::size_t>(n); ++r) {
          const Sum<kType> next = load<kType>(x, at_x[r] + i * rows.step(s.x));
          // The first factor has nothing to multiply.
          const Sum<kType> factor =
              recurs && k > 0 ? load<kType>(factors, at_factors[r] + i * rows.step(by_what)) : 0;
          so_far[r] = merge(so_far[r], next, factor);
          if (!later) store<kType>(out, at_out[r] + i * rows.step(s.out), so_far[r]);
        }
        if (later) stored.add(i, at_out, so_far, n);
      }
      stored.store_all(at_out, n);
    }
  });
}

template <DType kType>
void scan(const Scan& s, const Frame& frame, int threads) {
  using T = Sum<kType>;
  const auto run = [&](T start, auto&& merge) {
    scan_rows<kType>(s, frame, threads, start, merge);
  };
  if (s.kind == Reduce::max) {
    const T least =
        std::is_integral_v<T> ? std::numeric_limits<T>::min() : -std::numeric_limits<T>::infinity();
    return run(least, [](T a, T x, T) { return greater(a, x); });
  }
  if constexpr (std::is_same_v<T, double>) {
    if (s.factors.buffer >= 0) return run(-0.0, [](T a, T x, T factor) { return factor * a + x; });
    if (s.kind == Reduce::product) return run(1.0, [](T a, T x, T) { return a * x; });
    if (s.kind == Reduce::lse)
      return run(-std::numeric_limits<T>::infinity(), [](T a, T x, T) { return log_sum(a, x); });
  }
  run(T{0}, [](T a, T x, T) { return a + x; });
}

// A heap of indices of one row, the last in order at its root. It is stored in the result alone.
template <DType kType>
struct Heap {
  const std::byte* x;
  std::int64_t at_x, step_x;
  std::int64_t* index;
  std::int64_t step;
  bool descending;

  std::int64_t& place(std::int64_t i) const { return index[i * step]; }
  Sum<kType> key(std::int64_t i) const { return load<kType>(x, at_x + i * step_x); }
  // Returns whether element a precedes b: a NaN is greater than all numbers, equal elements stay in
  // order.
  bool before(std::int64_t a, std::int64_t b) const {
    const Sum<kType> p = key(a), q = key(b);
    if (p < q) return !descending;
    if (p > q) return descending;
    if constexpr (std::is_same_v<Sum<kType>, double>) {
      if (std::isnan(p) != std::isnan(q)) return std::isnan(p) == descending;
    }
    return a < b;
  }
  void sink(std::int64_t i, std::int64_t count) const {
    const std::int64_t moved = place(i);
    for (std::int64_t child = 2 * i + 1; child < count; child = 2 * i + 1) {
      if (child + 1 < count && before(place(child), place(child + 1))) ++child;
      if (!before(moved, place(child))) break;
      place(i) = place(child);
      i = child;
    }
    place(i) = moved;
  }
  // Sorts the first `kept` of `size` elements.
  void sort(std::int64_t size, std::int64_t kept) const {
    for (std::int64_t i = 0; i < kept; ++i) place(i) = i;
    for (std::int64_t i = kept / 2; i-- > 0;) sink(i, kept);
    for (std::int64_t i = kept; i < size; ++i) {
      if (!before(i, place(0))) continue;
      place(0) = i;
      sink(0, kept);
    }
    for (std::int64_t last = kept - 1; last > 0; --last) {
      std::swap(place(0), place(last));
      sink(0, last);
    }
  }
};

// Keys of 32 bits and indices are sorted as one number, in the result's memory.
template <DType kType>
constexpr bool kPacks = size_of(kType) <= 4 || kType == DType::i64;

// Returns the least element of a row of i64 whose elements differ by less than 2^32, else nothing.
std::optional<std::int64_t> least_of_near(const Heap<DType::i64>& row, std::int64_t size) {
  std::int64_t least = row.key(0), most = least;
  for (std::int64_t i = 1; i < size; ++i) {
    least = std::min(least, row.key(i));
    most = std::max(most, row.key(i));
  }
  const auto spread = static_cast<std::uint64_t>(most) - static_cast<std::uint64_t>(least);
  if (spread > std::numeric_limits<std::uint32_t>::max()) return std::nullopt;
  return least;
}

// least: that of the row's integers of 64 bits.
template <DType kType>
std::uint32_t key_at(const Heap<kType>& row, std::int64_t i, std::int64_t least) {
  if constexpr (kType == DType::i64) {
    return static_cast<std::uint32_t>(row.key(i) - least);
  } else if constexpr (kType == DType::i32) {
    return key_of(static_cast<std::int32_t>(row.key(i)));
  } else {
    return key_of(static_cast<float>(row.key(i)));
  }
}

template <DType kType>
void sort_row(const Heap<kType>& row, std::int64_t size, std::int64_t kept) {
  if constexpr (!kPacks<kType>) return row.sort(size, kept);
  if (size > std::numeric_limits<std::uint32_t>::max()) return row.sort(size, kept);
  std::int64_t smallest = 0;
  if constexpr (kType == DType::i64) {
    const std::optional<std::int64_t> found = least_of_near(row, size);
    if (!found) return row.sort(size, kept);
    smallest = *found;
  }
  const PackedRow to{reinterpret_cast<Packed*>(row.index), kept, row.step};
  LeastPacked least(to);
  for (std::int64_t i = 0; i < size; ++i) {
    const Packed x = packed(key_at(row, i, smallest), i, row.descending);
    if (kept == size) {
      to[i] = x;
    } else {
      least.add(x);
    }
  }
  sort_packed(to);
  for (std::int64_t i = 0; i < kept; ++i) row.place(i) = index_of(to[i]);
}

template <DType kType>
void sort(const Sort& s, const Frame& frame, int threads) {
  const Rows rows{s.x, static_cast<std::size_t>(s.axis)};
  const std::byte* x = frame.address(s.x);
  std::byte* values = frame.address(s.values);
  auto* index = reinterpret_cast<std::int64_t*>(frame.address(s.index));
  const std::int64_t size = rows.size(s.x), kept = rows.size(s.values);
  if (kept == 0) return;
  rows.share(size, 1, threads, [&](std::int64_t first, std::int64_t end) {
    for (; first < end; ++first) {
      const auto [at_x, at_values, at_index] = rows.offsets<3>(first, {&s.x, &s.values, &s.index});
      const Heap<kType> heap{
          x, at_x, rows.step(s.x), index + at_index, rows.step(s.index), s.descending};
      sort_row(heap, size, kept);
      for (std::int64_t i = 0; i < kept; ++i)
        store<kType>(values, at_values + i * rows.step(s.values), heap.key(heap.place(i)));
    }
  });
}

}  // namespace

void run_scan(const Scan& s, const Frame& frame, int threads) {
  with_dtype(s.x.dtype, [&]<DType kType>() { scan<kType>(s, frame, threads); });
}
void run_sort(const Sort& s, const Frame& frame, int threads) {
  with_dtype(s.x.dtype, [&]<DType kType>() { sort<kType>(s, frame, threads); });
}

}  // namespace logitless::ir
