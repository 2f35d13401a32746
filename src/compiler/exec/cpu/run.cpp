#include "compiler/exec/cpu/run.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstring>
#include <type_traits>
#include <vector>

#include "compiler/exec/head.h"
#include "compiler/target/cpu.h"
#include "core/check.h"
#include "core/element.h"
#include "core/half.h"
#include "core/parallel.h"
#include "kernels/cpu_tensor.h"

namespace logitless::ir {
namespace {

constexpr std::int64_t kTask = 1 << 15;  // elements of a task, approximately

void run_gemm(const Gemm& g, const Frame& frame, int threads) {
  GemmProblem p = gemm_problem(g, threads);
  std::byte* scratch = g.scratch >= 0 ? frame.address(g.scratch) : nullptr;
  for_each_batch(g, frame, [&](const std::byte* a, const std::byte* b, std::byte* c) {
    p.a.data = a;
    p.b.data = b;
    p.c.data = c;
    gemm(p, scratch);
  });
}

void run_take(const Take& t, const Frame& frame, int threads) {
  const std::int64_t rows = t.table.shape[0];
  const std::int64_t count = elements_of(t.index);
  const std::int64_t width = count > 0 ? elements_of(t.out) / count : 0;
  const std::size_t bytes = static_cast<std::size_t>(width) * size_of(t.out.dtype);
  const std::byte* from = frame.address(t.table);
  const std::byte* index = frame.address(t.index);
  std::byte* to = frame.address(t.out);
  const std::int64_t per_task = std::max<std::int64_t>(kTask / std::max<std::int64_t>(width, 1), 1);
  parallel_for(threads, (count + per_task - 1) / per_task, [&](std::int64_t task, int) {
    for (std::int64_t i = task * per_task; i < std::min(count, (task + 1) * per_task); ++i) {
      const std::int64_t row = load_index(index, t.index.dtype, i);
      std::byte* out = to + static_cast<std::size_t>(i) * bytes;
      if (row >= 0 && row < rows) {
        std::memcpy(out, from + static_cast<std::size_t>(row) * bytes, bytes);
      } else {
        std::memset(out, 0, bytes);
      }
    }
  });
}

// Each task owns columns of the result and goes through all indices in order.
template <typename T>
void scatter(const ScatterAdd& s, const Frame& frame, int threads) {
  const std::int64_t rows = s.out.shape[0];
  const std::int64_t count = elements_of(s.index);
  const std::int64_t width = rows > 0 ? elements_of(s.out) / rows : 0;
  const std::byte* index = frame.address(s.index);
  const std::byte* updates = frame.address(s.updates);
  T* out = reinterpret_cast<T*>(frame.address(s.out));
  constexpr std::int64_t kColumns = 64;
  parallel_for(threads, (width + kColumns - 1) / kColumns, [&](std::int64_t task, int) {
    const std::int64_t first = task * kColumns, n = std::min(kColumns, width - first);
    for (std::int64_t i = 0; i < count; ++i) {
      const std::int64_t row = load_index(index, s.index.dtype, i);
      if (row < 0 || row >= rows) continue;
      T* to = out + row * width + first;
      const std::int64_t at = i * width + first;
      switch (s.updates.dtype) {
        case DType::bf16:
          for (std::int64_t k = 0; k < n; ++k)
            to[k] += static_cast<T>(
                bf16_to_float(reinterpret_cast<const std::uint16_t*>(updates)[at + k]));
          break;
        case DType::f16:
          for (std::int64_t k = 0; k < n; ++k)
            to[k] += static_cast<T>(
                f16_to_float(reinterpret_cast<const std::uint16_t*>(updates)[at + k]));
          break;
        case DType::f64:
          for (std::int64_t k = 0; k < n; ++k)
            to[k] += static_cast<T>(reinterpret_cast<const double*>(updates)[at + k]);
          break;
        case DType::f32:
          for (std::int64_t k = 0; k < n; ++k)
            to[k] += static_cast<T>(reinterpret_cast<const float*>(updates)[at + k]);
          break;
        case DType::i32:
          for (std::int64_t k = 0; k < n; ++k)
            to[k] += static_cast<T>(reinterpret_cast<const std::int32_t*>(updates)[at + k]);
          break;
        case DType::i64:
          for (std::int64_t k = 0; k < n; ++k)
            to[k] += static_cast<T>(reinterpret_cast<const std::int64_t*>(updates)[at + k]);
          break;
        case DType::i8:
          throw InternalError("scatter_add of conditions");
      }
    }
  });
}

void run_scatter(const ScatterAdd& s, const Frame& frame, int threads) {
  switch (s.out.dtype) {
    case DType::f32:
      return scatter<float>(s, frame, threads);
    case DType::f64:
      return scatter<double>(s, frame, threads);
    case DType::i32:
      return scatter<std::int32_t>(s, frame, threads);
    case DType::i64:
      return scatter<std::int64_t>(s, frame, threads);
    default:
      throw InternalError("scatter_add into a narrow result");
  }
}

void copy_element(DType dtype, std::byte* to, std::int64_t i, const std::byte* from,
                  std::int64_t j) {
  const std::size_t size = size_of(dtype);
  if (from != nullptr) {
    std::memcpy(to + static_cast<std::size_t>(i) * size, from + j * static_cast<std::int64_t>(size),
                size);
  } else {
    std::memset(to + static_cast<std::size_t>(i) * size, 0, size);
  }
}

// Returns the offsets of element `flat` of a shape for several strides.
template <std::size_t N>
std::array<std::int64_t, N> offsets(
    const std::vector<std::int64_t>& shape, std::int64_t flat,
    const std::array<const std::vector<std::int64_t>*, N>& strides) {
  std::array<std::int64_t, N> at{};
  for (std::size_t d = shape.size(); d-- > 0;) {
    const std::int64_t i = flat % shape[d];
    flat /= shape[d];
    for (std::size_t k = 0; k < N; ++k) at[k] += i * (*strides[k])[d];
  }
  return at;
}

// The strides of x without one dimension, in a fixed array, so nothing is allocated.
struct Strides {
  std::array<std::int64_t, 12> values{};
  std::size_t count = 0;
};
Strides without(const View& x, int axis) {
  Strides s;
  for (std::size_t d = 0; d < x.strides.size(); ++d) {
    if (static_cast<int>(d) != axis) s.values[s.count++] = x.strides[d];
  }
  return s;
}

void run_pick(const Pick& p, const Frame& frame, int threads) {
  const std::int64_t count = elements_of(p.out);
  const std::byte* x = frame.address(p.x);
  const std::byte* index = frame.address(p.index);
  std::byte* out = frame.address(p.out);
  // With several indices the row begins at index 0 of the axis, and each index counts along it.
  const bool several = p.out.shape.size() == p.x.shape.size();
  Strides rows = without(p.x, several ? -1 : p.axis);
  if (several) rows.values[static_cast<std::size_t>(p.axis)] = 0;
  const std::int64_t size = p.x.shape[static_cast<std::size_t>(p.axis)],
                     step = p.x.strides[static_cast<std::size_t>(p.axis)];
  constexpr std::int64_t kRows = 1024;
  parallel_for(threads, (count + kRows - 1) / kRows, [&](std::int64_t task, int) {
    const std::int64_t first = task * kRows, end = std::min(count, first + kRows);
    std::array<std::int64_t, 12> place{};
    std::int64_t rest = first;
    for (std::size_t d = p.out.shape.size(); d-- > 0; rest /= p.out.shape[d])
      place[d] = rest % p.out.shape[d];
    for (std::int64_t i = first; i < end; ++i) {
      std::int64_t at_x = 0, at_index = 0, at_out = 0;
      for (std::size_t d = 0; d < p.out.shape.size(); ++d) {
        at_x += place[d] * rows.values[d];
        at_index += place[d] * p.index.strides[d];
        at_out += place[d] * p.out.strides[d];
      }
      const std::int64_t k = load_index(index, p.index.dtype, at_index);
      const bool inside = k >= 0 && k < size;
      copy_element(p.x.dtype, out, at_out, inside ? x : nullptr, at_x + (inside ? k * step : 0));
      for (std::size_t d = p.out.shape.size(); d-- > 0 && ++place[d] == p.out.shape[d];)
        place[d] = 0;
    }
  });
}

// Each row is processed by one task, with its updates in order. Sum: of elements of Element.
template <typename Element, typename Sum = Element>
void put(const Put& p, const Frame& frame, int threads) {
  const auto axis = static_cast<std::size_t>(p.axis);
  const std::vector<std::int64_t>& shape = p.updates.shape;
  const std::int64_t count = shape[axis], size = p.out.shape[axis];
  const std::int64_t rows = count > 0 ? elements_of(p.updates) / count : 0;
  const std::byte* index = frame.address(p.index);
  const std::byte* updates = frame.address(p.updates);
  Element* out = reinterpret_cast<Element*>(frame.address(p.out));
  const std::int64_t per_task = std::max<std::int64_t>(1024 / std::max<std::int64_t>(count, 1), 1);
  parallel_for(threads, (rows + per_task - 1) / per_task, [&](std::int64_t task, int) {
    for (std::int64_t i = task * per_task; i < std::min(rows, (task + 1) * per_task); ++i) {
      std::int64_t at_index = 0, at_update = 0, at_out = 0, rest = i;
      for (std::size_t d = shape.size(); d-- > 0;) {
        if (d == axis) continue;
        const std::int64_t n = rest % shape[d];
        rest /= shape[d];
        at_index += n * p.index.strides[d];
        at_update += n * p.updates.strides[d];
        at_out += n * p.out.strides[d];
      }
      for (std::int64_t k = 0; k < count; ++k) {
        const std::int64_t to =
            load_index(index, p.index.dtype, at_index + k * p.index.strides[axis]);
        if (to < 0 || to >= size) continue;
        const std::int64_t from = at_update + k * p.updates.strides[axis],
                           there = at_out + to * p.out.strides[axis];
        if constexpr (std::is_integral_v<Sum>) {
          const Element old = p.whole ? Element{0} : out[there];
          out[there] = static_cast<Element>(old + load_index(updates, p.updates.dtype, from));
        } else if constexpr (std::is_same_v<Element, Sum>) {
          const Element old = p.whole ? Element{0} : out[there];
          out[there] = old + static_cast<Element>(load_element(updates, p.updates.dtype, from));
        } else {
          auto* const data = reinterpret_cast<std::byte*>(out);
          const double old = p.whole ? 0.0 : load_element(data, p.out.dtype, there);
          store_element(data, p.out.dtype, there,
                        old + load_element(updates, p.updates.dtype, from));
        }
      }
    }
  });
}

void run_put(const Put& p, const Frame& frame, int threads) {
  if (p.out.dtype == DType::f64) return put<double>(p, frame, threads);
  if (p.out.dtype == DType::i32) return put<std::int32_t>(p, frame, threads);
  if (p.out.dtype == DType::i64) return put<std::int64_t>(p, frame, threads);
  if (size_of(p.out.dtype) == 2) return put<std::uint16_t, double>(p, frame, threads);
  check(p.out.dtype == DType::f32, "put into ", name_of(p.out.dtype));
  put<float>(p, frame, threads);
}

// The first index of a row's maximum; a NaN is greater than all numbers.
std::int64_t first_greatest(const float* x, std::int64_t n, float top) {
  const auto is_top = [&](float v) { return v == top || (v != v && top != top); };
  return std::find_if(x, x + n, is_top) - x;
}

// Returns the index of the maximum of a contiguous row of f32, bf16 or f16.
std::int64_t argmax_of_floats(DType dtype, const std::byte* row, std::int64_t size) {
  constexpr std::int64_t kPart = 512;  // numbers that are searched together
  alignas(64) std::array<float, kPart> part;
  std::int64_t best = 0;
  float top = 0.0f;
  for (std::int64_t first = 0; first < size && top == top; first += kPart) {
    const std::int64_t n = std::min(kPart, size - first);
    const auto* x = reinterpret_cast<const float*>(row) + first;
    if (dtype != DType::f32) {
      to_f32(dtype, row + first * static_cast<std::int64_t>(size_of(dtype)), part.data(), n);
      x = part.data();
    }
    const float most = row_max(x, n);
    if (first > 0 && most <= top) continue;
    top = most;
    best = first + first_greatest(x, n, most);
  }
  return best;
}

// Number: what the elements are compared as.
template <typename Number>
void argmax(const ArgMax& m, const Frame& frame, int threads) {
  const std::int64_t count = elements_of(m.out);
  const std::byte* x = frame.address(m.x);
  std::byte* out = frame.address(m.out);
  const int last = static_cast<int>(m.x.shape.size()) - 1;
  const Strides rows = without(m.x, last);
  const std::int64_t size = m.x.shape.back(), step = m.x.strides.back();
  const bool floats = m.x.dtype == DType::f32 || size_of(m.x.dtype) == 2;
  const std::int64_t per_task = std::max<std::int64_t>(kTask / std::max<std::int64_t>(size, 1), 1);
  parallel_for(threads, (count + per_task - 1) / per_task, [&](std::int64_t task, int) {
    for (std::int64_t i = task * per_task; i < std::min(count, (task + 1) * per_task); ++i) {
      const auto [at_out] = offsets<1>(m.out.shape, i, {&m.out.strides});
      std::int64_t at = 0, rest = i;
      for (std::size_t d = m.out.shape.size(); d-- > 0;) {
        at += rest % m.out.shape[d] * rows.values[d];
        rest /= m.out.shape[d];
      }
      auto& best = reinterpret_cast<std::int64_t*>(out)[at_out];
      if (floats && step == 1) {
        best = argmax_of_floats(m.x.dtype, x + at * static_cast<std::int64_t>(size_of(m.x.dtype)),
                                size);
        continue;
      }
      best = 0;
      Number top{0};
      for (std::int64_t k = 0; k < size; ++k) {
        Number v;
        if constexpr (std::is_integral_v<Number>) {
          v = load_index(x, m.x.dtype, at + k * step);
        } else {
          v = load_element(x, m.x.dtype, at + k * step);
        }
        // Takes the first of equal elements; a NaN is greater than all numbers.
        if (k == 0 || v > top || (v != v && top == top)) {
          top = v;
          best = k;
        }
      }
    }
  });
}

void run_argmax(const ArgMax& m, const Frame& frame, int threads) {
  if (is_index(m.x.dtype)) return argmax<std::int64_t>(m, frame, threads);
  argmax<double>(m, frame, threads);
}

void run_fill(const Fill& f, const Frame& frame, int threads) {
  const std::int64_t count = elements_of(f.out);
  std::byte* out = frame.address(f.out);
  const std::size_t size = size_of(f.out.dtype);
  const std::int64_t inner = f.out.shape.empty() ? 1 : f.out.shape.back();
  const std::int64_t step = f.out.shape.empty() ? 1 : f.out.strides.back();
  if (count == 0) return;
  const std::int64_t rows = count / inner, per_task = std::max<std::int64_t>(kTask / inner, 1);
  parallel_for(threads, (rows + per_task - 1) / per_task, [&](std::int64_t task, int) {
    for (std::int64_t r = task * per_task; r < std::min(rows, (task + 1) * per_task); ++r) {
      const auto [at] = offsets<1>(f.out.shape, r * inner, {&f.out.strides});
      std::byte* row = out + at * static_cast<std::int64_t>(size);
      if (f.number == 0.0 && step == 1) {
        std::memset(row, 0, static_cast<std::size_t>(inner) * size);
        continue;
      }
      for (std::int64_t i = 0; i < inner; ++i) store_element(row, f.out.dtype, i * step, f.number);
    }
  });
}

void run_attention(const Attention& a, const Frame& frame, int threads) {
  AttentionShape shape = attention_shape(a, threads);
  if (shape.bias) shape.bias->rows.data = frame.address(a.bias);
  if (shape.segments) {
    shape.segments->queries = frame.address(a.query_segments);
    shape.segments->keys = frame.address(a.key_segments);
  }
  const auto in = [&](const View& v) {
    return AttentionOperand{frame.address(v), v.strides[0], v.strides[1], v.strides[2]};
  };
  const auto out = [&](const View& v) {
    return AttentionOutput{frame.address(v), v.strides[0], v.strides[1], v.strides[2]};
  };
  std::byte* scratch = a.scratch >= 0 ? frame.address(a.scratch) : nullptr;
  auto* lse = reinterpret_cast<float*>(frame.address(a.lse));
  if (a.gradient) {
    attention_backward(shape, in(a.q), in(a.k), in(a.v), in(a.out), in(a.d_out), lse, out(a.d_q),
                       out(a.d_k), out(a.d_v), scratch);
  } else {
    attention_forward(shape, in(a.q), in(a.k), in(a.v), out(a.out), lse, scratch);
  }
}

void run_loop(const LoopRun& loop, const Frame& frame, int threads, Observer* observer) {
  std::byte* arena = loop.arena >= 0 ? frame.address(loop.arena) : nullptr;
  for (std::int64_t first = 0; first < loop.extent; first += loop.chunk) {
    const Program& body = first + loop.chunk <= loop.extent ? *loop.body : *loop.tail;
    // Loops contain no heads.
    run_program({body, arena, {}, {}, &loop, &frame, first}, threads, {}, observer);
  }
}

struct Runner {
  const Frame& frame;
  int threads;
  const HeadUnder& under;
  Observer* observer;

  void operator()(const Pointwise& p) const { run_pointwise(p, frame, threads); }
  void operator()(const Gemm& g) const { run_gemm(g, frame, threads); }
  void operator()(const Take& t) const { run_take(t, frame, threads); }
  void operator()(const ScatterAdd& s) const { run_scatter(s, frame, threads); }
  void operator()(const Pick& p) const { run_pick(p, frame, threads); }
  void operator()(const ArgMax& m) const { run_argmax(m, frame, threads); }
  void operator()(const Scan& s) const { run_scan(s, frame, threads); }
  void operator()(const Sort& s) const { run_sort(s, frame, threads); }
  void operator()(const ExternRun&) const { throw InternalError("an extern on a CPU"); }
  void operator()(const Put& p) const { run_put(p, frame, threads); }
  void operator()(const Fill& f) const { run_fill(f, frame, threads); }
  void operator()(const Attention& a) const { run_attention(a, frame, threads); }
  void operator()(const LoopRun& l) const { run_loop(l, frame, threads, observer); }
  void operator()(const HeadRun& h) const { run_head(h, frame, *h.context, under); }
  void operator()(const RowGroup&) const { throw InternalError("a row group on a CPU"); }
};

}  // namespace

void run_program(const Frame& frame, int threads, const HeadUnder& under, Observer* observer) {
  const Runner runner{frame, threads, under, observer};
  for (const Instruction& i : frame.program.instructions) {
    std::visit(runner, i.what);
    if (observer == nullptr) continue;
    if (std::holds_alternative<LoopRun>(i.what)) {
      observer->after_loop(i);
    } else {
      observer->after(i);
    }
  }
}

}  // namespace logitless::ir
