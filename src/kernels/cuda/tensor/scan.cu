// Running sums, products, maxima and recurrences of rows.
#include <cmath>
#include <type_traits>

#include "core/check.h"
#include "kernels/cuda/device/error.cuh"
#include "kernels/cuda/device/kernels_of_file.cuh"
#include "kernels/cuda/device/numbers.cuh"
#include "kernels/cuda/tensor/strided.cuh"
#include "kernels/device/sort.h"

namespace logitless::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kItems = 8;  // neighbouring elements of a thread

// Each kind has the State of a part of a row, made of its elements, and the number that it stands
// for. merge(a, b): b comes after a.

// Sums of integers are unsigned, since those wrap.
template <typename Number>
struct RunningSum {
  using State = Number;
  __device__ static State of(Number x, Number) { return x; }
  __device__ static State merge(State a, State b) { return a + b; }
  __device__ static Number value(State s) { return s; }
};

// The state of f64 elements. Exponentials and logarithms of f64 take several times as long as
// memory does.
struct RunningLogSum {
  using State = double;
  __device__ static State of(double x, double) { return x; }
  __device__ static State merge(State a, State b) {
    const double top = isnan(a) || a > b ? a : b;
    return isinf(top) ? top : top + log(exp(a - top) + exp(b - top));
  }
  __device__ static double value(State s) { return s; }
};

// The number sum * exp(top). top is finite: that of -inf has the sum 0, that of inf the sum inf and
// that of NaN the sum NaN.
struct ScaledSum {
  float top;
  double sum;
};

struct RunningScaledSum {
  using State = ScaledSum;
  __device__ static State of(float x, float) {
    constexpr float kMost = 3.40282347e38f;
    const float top = fminf(fmaxf(x, -kMost), kMost);
    return {top, x == top ? 1.0 : x < top ? 0.0 : static_cast<double>(x - top)};
  }
  // The larger sum keeps its top, and is at least 1 for ever. Near 1 an exponential in float is off
  // by more than the sum of many rounded ones may be.
  __device__ static State merge(State a, State b) {
    const float apart = fabsf(a.top - b.top);
    const double less = apart < 0.5f ? 1.0 + static_cast<double>(expm1f(-apart)) : expf(-apart);
    return b.top > a.top ? State{b.top, a.sum * less + b.sum} : State{a.top, a.sum + b.sum * less};
  }
  __device__ static float value(State s) { return s.top + log1pf(static_cast<float>(s.sum - 1.0)); }
};

// The last of equal numbers stays, and a NaN.
template <typename Number>
struct RunningMax {
  using State = Number;
  __device__ static State of(Number x, Number) { return x; }
  __device__ static State merge(State a, State b) {
    if constexpr (std::is_same_v<Number, double>) {
      if (isnan(a) || isnan(b)) return a + b;
    }
    return b >= a ? b : a;
  }
  __device__ static Number value(State s) { return s; }
};

// The product fraction * 2^exponent. The fraction is in [1, 2) by magnitude, 0, infinite or NaN.
struct Scaled {
  double fraction;
  int exponent;
};

// Parts of a row overflow where its products up to there do not, and would make NaN of a 0 before.
struct RunningProduct {
  using State = Scaled;
  __device__ static State of(double x, double) {
    int exponent = 0;
    const double fraction = frexp(x, &exponent);  // in [0.5, 1), or special
    return {2.0 * fraction, exponent - 1};
  }
  __device__ static State merge(State a, State b) {
    constexpr int kMost = 1 << 28;  // far beyond the range; sums of two do not wrap
    const double product = a.fraction * b.fraction;
    const bool carries = fabs(product) >= 2.0;
    const int exponent = a.exponent + b.exponent + (carries ? 1 : 0);
    return {carries ? 0.5 * product : product, max(-kMost, min(exponent, kMost))};
  }
  __device__ static double value(State s) { return scalbn(s.fraction, s.exponent); }
};

// The map from the result before a part to its last result: y -> slope * y + offset.
struct Linear {
  double slope, offset;
};

struct Recurrence {
  using State = Linear;
  __device__ static State of(double x, double factor) { return {factor, x}; }
  __device__ static State merge(State a, State b) {
    return {product(a.slope, b.slope), b.slope * a.offset + b.offset};
  }
  __device__ static double value(State s) { return s.offset; }

  // Keeps products of numbers that are finite and not 0 so: an infinite slope would make NaN of
  // a result that is 0, and a slope of 0 of one that is infinite.
  __device__ static double product(double a, double b) {
    constexpr double kMost = 1.7976931348623157e308, kLeast = 4.9406564584124654e-324;
    const double c = a * b;
    if (isinf(c) && !isinf(a) && !isinf(b)) return copysign(kMost, c);
    return c == 0.0 && a != 0.0 && b != 0.0 ? copysign(kLeast, c) : c;
  }
};

// --- the state of another lane

template <typename Number>
__device__ Number from_lane(Number x, int lane) {
  return __shfl_sync(0xffffffffu, x, lane);
}
__device__ Scaled from_lane(Scaled s, int lane) {
  return {from_lane(s.fraction, lane), from_lane(s.exponent, lane)};
}
__device__ ScaledSum from_lane(ScaledSum s, int lane) {
  return {from_lane(s.top, lane), from_lane(s.sum, lane)};
}
__device__ Linear from_lane(Linear s, int lane) {
  return {from_lane(s.slope, lane), from_lane(s.offset, lane)};
}

// Returns the state of the warp's elements up to this lane's.
template <typename Kind>
__device__ typename Kind::State state_up_to(typename Kind::State state) {
  const int lane = static_cast<int>(threadIdx.x) % 32;
  for (int apart = 1; apart < 32; apart *= 2) {
    const typename Kind::State before = from_lane(state, max(lane - apart, 0));
    if (lane >= apart) state = Kind::merge(before, state);
  }
  return state;
}

// Merges the states of all warps, each given by its last lane, and returns that of all. `before`
// becomes that of the warps before this one, if there are any.
template <typename Kind>
__device__ typename Kind::State over_warps(typename Kind::State state,
                                           typename Kind::State& before) {
  __shared__ typename Kind::State of_warp[kThreads / 32];
  const int warp = static_cast<int>(threadIdx.x) / 32, warps = static_cast<int>(blockDim.x) / 32;
  __syncthreads();
  if (threadIdx.x % 32 == 31) of_warp[warp] = state;
  __syncthreads();
  typename Kind::State total = of_warp[0];
  for (int w = 1; w < warps; ++w) {
    if (w == warp) before = total;
    total = Kind::merge(total, of_warp[w]);
  }
  return total;
}

// --- kernels

// Numbers are floats or integers, elements of any dtype.
template <typename Number, typename T>
__device__ Number number_of(T x) {
  if constexpr (std::is_integral_v<T> || std::is_same_v<T, double>) {
    return static_cast<Number>(x);
  } else {
    return static_cast<Number>(as_float(x));
  }
}
template <typename T, typename Number>
__device__ T element_of(Number x) {
  if constexpr (std::is_integral_v<T> || std::is_same_v<T, double>) {
    return static_cast<T>(x);
  } else {
    return rounded<T>(static_cast<float>(x));
  }
}

// A thread's elements.
template <typename T>
struct alignas(16) Items {
  T of[kItems];
};

// One row of a call, in the order of the scan.
template <typename Kind, typename Number, typename T>
class Row {
 public:
  using State = typename Kind::State;

  __device__ Row(const ScanRowsCall& c, std::int64_t row, bool packed)
      : size_(c.size), reverse_(c.reverse), packed_(packed) {
    x_ = {static_cast<T*>(const_cast<void*>(c.x)) + offset_of(c.rows, c.x_strides, row),
          c.x_strides.of[c.axis]};
    out_ = {static_cast<T*>(c.out) + offset_of(c.rows, c.out_strides, row),
            c.out_strides.of[c.axis]};
    if constexpr (kRecurs)
      factors_ = {
          static_cast<T*>(const_cast<void*>(c.factors)) + offset_of(c.rows, c.factor_strides, row),
          c.factor_strides.of[c.axis]};
  }

  struct Loaded {
    Items<T> x, factors;
  };
  // Loads elements from `first` on. Beyond the row's end the last one is repeated.
  __device__ Loaded load(std::int64_t first) const {
    Loaded made;
    made.x = load_items(x_, first);
    if constexpr (kRecurs) made.factors = load_items(factors_, first);
    return made;
  }
  __device__ static State state(const Loaded& loaded, int j) {
    return Kind::of(number_of<Number>(loaded.x.of[j]),
                    kRecurs ? number_of<Number>(loaded.factors.of[j]) : Number{});
  }
  __device__ State state(std::int64_t k) const {
    return Kind::of(number_of<Number>(*x_.at(index(k))),
                    kRecurs && k > 0 ? number_of<Number>(*factors_.at(index(k))) : Number{});
  }

  __device__ void write(std::int64_t k, State state) const {
    *out_.at(index(k)) = element_of<T>(Kind::value(state));
  }
  __device__ void write(std::int64_t first, const State (&states)[kItems]) const {
    if (!packed_) {
#pragma unroll
      for (int j = 0; j < kItems; ++j) {
        if (first + j < size_) write(first + j, states[j]);
      }
    } else if (first < size_) {
      Items<T> items;
#pragma unroll
      for (int j = 0; j < kItems; ++j) items.of[j] = element_of<T>(Kind::value(states[j]));
      *reinterpret_cast<Items<T>*>(out_.at(least_index(first))) = turned(items);
    }
  }

 private:
  static constexpr bool kRecurs = std::is_same_v<Kind, Recurrence>;

  struct Line {
    T* begin = nullptr;
    std::int64_t step = 0;
    __device__ T* at(std::int64_t i) const { return begin + i * step; }
  };

  Line x_, factors_, out_;
  std::int64_t size_;
  bool reverse_, packed_;

  __device__ std::int64_t index(std::int64_t k) const { return reverse_ ? size_ - 1 - k : k; }
  // Returns the least index of a thread's elements.
  __device__ std::int64_t least_index(std::int64_t first) const {
    return reverse_ ? size_ - first - kItems : first;
  }

  __device__ Items<T> load_items(const Line& line, std::int64_t first) const {
    Items<T> items;
    if (!packed_) {
#pragma unroll
      for (int j = 0; j < kItems; ++j) items.of[j] = *line.at(index(min(first + j, size_ - 1)));
      return items;
    }
    const std::int64_t at = least_index(min(first, size_ - kItems));
    items = *reinterpret_cast<const Items<T>*>(line.at(at));
    return turned(items);
  }
  // Returns elements in the other order if the scan is reversed. Indices are constants, so that
  // elements stay in registers.
  __device__ Items<T> turned(const Items<T>& items) const {
    Items<T> made;
#pragma unroll
    for (int j = 0; j < kItems; ++j) made.of[j] = reverse_ ? items.of[kItems - 1 - j] : items.of[j];
    return made;
  }
};

// A block for each row, of which each thread owns kItems neighbouring elements at a time. It loads
// the next ones before it scans those that it has.
template <typename Kind, typename Number, typename T>
__global__ void __launch_bounds__(kThreads)
    scan_kernel(const ScanRowsCall c, std::int64_t rows, bool packed) {
  using State = typename Kind::State;
  const int lane = static_cast<int>(threadIdx.x) % 32, warp = static_cast<int>(threadIdx.x) / 32;
  const std::int64_t step = std::int64_t{blockDim.x} * kItems;
  for (std::int64_t at = blockIdx.x; at < rows; at += gridDim.x) {
    const Row<Kind, Number, T> row(c, at, packed);
    State carried{};
    auto next = row.load(threadIdx.x * kItems);
    for (std::int64_t begin = 0; begin < c.size; begin += step) {
      const std::int64_t first = begin + threadIdx.x * kItems;
      const auto loaded = next;
      if (begin + step < c.size) next = row.load(first + step);
      State states[kItems];
      states[0] = row.state(loaded, 0);
#pragma unroll
      for (int j = 1; j < kItems; ++j) states[j] = Kind::merge(states[j - 1], row.state(loaded, j));

      const State up_to = state_up_to<Kind>(states[kItems - 1]);
      const State of_lanes = from_lane(up_to, max(lane - 1, 0));
      State before{};  // of the elements before this thread's
      const State total = over_warps<Kind>(up_to, before);
      if (begin > 0) before = warp > 0 ? Kind::merge(carried, before) : carried;
      const bool follows = begin > 0 || warp > 0;
      if (lane > 0) before = follows ? Kind::merge(before, of_lanes) : of_lanes;
      if (follows || lane > 0) {
#pragma unroll
        for (int j = 0; j < kItems; ++j) states[j] = Kind::merge(before, states[j]);
      }
      row.write(first, states);
      carried = begin > 0 ? Kind::merge(carried, total) : total;
    }
  }
}

// A thread for each row, where neighbouring rows are neighbours in memory.
template <typename Kind, typename Number, typename T>
__global__ void __launch_bounds__(kThreads)
    scan_columns_kernel(const ScanRowsCall c, std::int64_t rows) {
  const std::int64_t threads = std::int64_t{gridDim.x} * kThreads;
  for (std::int64_t at = std::int64_t{blockIdx.x} * kThreads + threadIdx.x; at < rows;
       at += threads) {
    const Row<Kind, Number, T> row(c, at, false);
    typename Kind::State state = row.state(0);
    row.write(0, state);
    for (std::int64_t k = 1; k < c.size; ++k) {
      state = Kind::merge(state, row.state(k));
      row.write(k, state);
    }
  }
}

// Returns whether rows are contiguous, begin at multiples of 16 bytes and have whole Items.
bool is_packed(const ScanRowsCall& c) {
  const std::int64_t multiple = 16 / static_cast<std::int64_t>(size_of(c.dtype));
  const auto fits = [&](const void* data, const Strides& strides) {
    bool even = strides.of[c.axis] == 1 && reinterpret_cast<std::uintptr_t>(data) % 16 == 0;
    for (int d = 0; d < c.rows.rank; ++d)
      even = even && (c.rows.sizes[d] == 1 || strides.of[d] % multiple == 0);
    return even;
  };
  return c.size % kItems == 0 && fits(c.x, c.x_strides) && fits(c.out, c.out_strides) &&
         (c.kind != ScanKind::recurrence || fits(c.factors, c.factor_strides));
}

template <typename Kind, typename Number, typename T>
void scan_as(const ScanRowsCall& c) {
  constexpr std::int64_t kShort = 32, kMany = 4096;
  const std::int64_t rows = count_of(c.rows);
  const cudaStream_t stream = stream_of(c.stream);
  if (c.size <= kShort || (rows >= kMany && c.x_strides.of[c.axis] != 1)) {
    scan_columns_kernel<Kind, Number, T>
        <<<blocks_of(rows, kThreads), kThreads, 0, stream>>>(c, rows);
  } else {
    const std::int64_t warps = (c.size + 32 * kItems - 1) / (32 * kItems);
    const auto threads = static_cast<unsigned>(std::min<std::int64_t>(32 * warps, kThreads));
    scan_kernel<Kind, Number, T><<<blocks_of(rows, 1), threads, 0, stream>>>(c, rows, is_packed(c));
  }
}

template <typename T>
void scan_floats(const ScanRowsCall& c) {
  switch (c.kind) {
    case ScanKind::sum:
      return scan_as<RunningSum<double>, double, T>(c);
    case ScanKind::log_sum_exp:
      if constexpr (std::is_same_v<T, double>) {
        return scan_as<RunningLogSum, double, T>(c);
      } else {
        return scan_as<RunningScaledSum, float, T>(c);
      }
    case ScanKind::product:
      return scan_as<RunningProduct, double, T>(c);
    case ScanKind::max:
      return scan_as<RunningMax<double>, double, T>(c);
    case ScanKind::recurrence:
      return scan_as<Recurrence, double, T>(c);
  }
}

template <typename T>
void scan_integers(const ScanRowsCall& c) {
  check(c.kind == ScanKind::sum || c.kind == ScanKind::max, "a running result of integers");
  if (c.kind == ScanKind::max) return scan_as<RunningMax<std::int64_t>, std::int64_t, T>(c);
  scan_as<RunningSum<std::uint64_t>, std::uint64_t, T>(c);
}

}  // namespace

void scan_rows(const ScanRowsCall& c) {
  if (count_of(c.rows) == 0 || c.size == 0) return;
  switch (c.dtype) {
    case DType::f32:
      scan_floats<float>(c);
      break;
    case DType::f64:
      scan_floats<double>(c);
      break;
    case DType::bf16:
      scan_floats<__nv_bfloat16>(c);
      break;
    case DType::f16:
      scan_floats<__half>(c);
      break;
    case DType::i32:
      scan_integers<std::int32_t>(c);
      break;
    case DType::i64:
      scan_integers<std::int64_t>(c);
      break;
    case DType::i8:
      throw InternalError("a running result of i8");
  }
  require_cuda(cudaGetLastError(), "running sums");
}

}  // namespace logitless::cuda
