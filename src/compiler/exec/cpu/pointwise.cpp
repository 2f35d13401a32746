// Elementwise loops and reductions: blocks of the innermost dimension in registers of kBlock
// numbers, one vector function a step.
#include <algorithm>
#include <array>
#include <cmath>
#include <cstring>
#include <limits>
#include <type_traits>

#include "compiler/exec/cpu/row_result.h"
#include "compiler/exec/cpu/run.h"
#include "core/check.h"
#include "core/element.h"
#include "core/half.h"
#include "core/parallel.h"
#include "kernels/cpu_tensor.h"

namespace logitless::ir {
namespace {

constexpr std::int64_t kBlock = 512;     // numbers of a register
constexpr std::int64_t kTask = 1 << 15;  // elements of a task, about
constexpr int kMaxDims = 12;

VectorOp vector_op(Function function) {
  switch (function) {
    case Function::neg:
      return VectorOp::neg;
    case Function::abs:
      return VectorOp::abs;
    case Function::exp:
      return VectorOp::exp;
    case Function::log:
      return VectorOp::log;
    case Function::log1p:
      return VectorOp::log1p;
    case Function::expm1:
      return VectorOp::expm1;
    case Function::sqrt:
      return VectorOp::sqrt;
    case Function::rsqrt:
      return VectorOp::rsqrt;
    case Function::tanh:
      return VectorOp::tanh;
    case Function::erf:
      return VectorOp::erf;
    case Function::sigmoid:
      return VectorOp::sigmoid;
    case Function::sin:
      return VectorOp::sin;
    case Function::cos:
      return VectorOp::cos;
    case Function::floor:
      return VectorOp::floor;
    case Function::sign:
      return VectorOp::sign;
    case Function::add:
      return VectorOp::add;
    case Function::sub:
      return VectorOp::sub;
    case Function::mul:
      return VectorOp::mul;
    case Function::div:
      return VectorOp::div;
    case Function::pow:
      return VectorOp::pow;
    case Function::max:
      return VectorOp::max;
    case Function::min:
      return VectorOp::min;
    case Function::eq:
      return VectorOp::eq;
    case Function::ne:
      return VectorOp::ne;
    case Function::lt:
      return VectorOp::lt;
    case Function::le:
      return VectorOp::le;
    case Function::gt:
      return VectorOp::gt;
    case Function::ge:
      return VectorOp::ge;
    case Function::logical_and:
      return VectorOp::logical_and;
    case Function::logical_or:
      return VectorOp::logical_or;
    case Function::logical_not:
      return VectorOp::logical_not;
    case Function::select:
      return VectorOp::select;
    case Function::random:
      break;  // random.cpp
  }
  throw InternalError("a function without a vector form");
}

bool is_float32_like(DType dtype) {
  return dtype == DType::f32 || dtype == DType::bf16 || dtype == DType::f16;
}

template <typename R>
constexpr DType register_dtype() {
  return std::is_same_v<R, float> ? DType::f32 : DType::f64;
}

// n numbers from memory with a stride.
template <typename R>
void gather(const View& view, const std::byte* at, std::int64_t stride, R* to, std::int64_t n) {
  if (stride == 0) {
    std::fill_n(to, n, static_cast<R>(load_element(at, view.dtype, 0)));
  } else if (std::is_same_v<R, float> && stride == 1 && is_float32_like(view.dtype)) {
    to_f32(view.dtype, at, reinterpret_cast<float*>(to), n);
  } else if (view.dtype == DType::f32) {
    const auto* from = reinterpret_cast<const float*>(at);
    for (std::int64_t i = 0; i < n; ++i) to[i] = static_cast<R>(from[i * stride]);
  } else if (view.dtype == DType::i64) {
    const auto* from = reinterpret_cast<const std::int64_t*>(at);
    for (std::int64_t i = 0; i < n; ++i) to[i] = static_cast<R>(from[i * stride]);
  } else {
    for (std::int64_t i = 0; i < n; ++i)
      to[i] = static_cast<R>(load_element(at, view.dtype, i * stride));
  }
}

template <typename R>
void round_to(DType dtype, const R* from, R* to, std::int64_t n) {
  if constexpr (std::is_same_v<R, float>) {
    if (is_float32_like(dtype)) return round_f32(dtype, from, to, n);
  }
  switch (dtype) {
    case DType::bf16:
      for (std::int64_t i = 0; i < n; ++i)
        to[i] = bf16_to_float(float_to_bf16(static_cast<float>(from[i])));
      break;
    case DType::f16:
      for (std::int64_t i = 0; i < n; ++i)
        to[i] = f16_to_float(float_to_f16(static_cast<float>(from[i])));
      break;
    case DType::f32:
      for (std::int64_t i = 0; i < n; ++i) to[i] = static_cast<float>(from[i]);
      break;
    case DType::f64:
      std::copy_n(from, n, to);
      break;
    default:
      for (std::int64_t i = 0; i < n; ++i) to[i] = std::trunc(from[i]);
  }
}

// Evaluates blocks of one loop; one for each thread's task, on its stack.
template <typename R>
class Block {
 public:
  Block(const Pointwise& loop, const Frame& frame)
      : loop_(loop), out_(frame.address(loop.store.view.buffer)) {
    const int leaves = static_cast<int>(loop.leaves.size());
    for (int i = 0; i < leaves; ++i) {
      const Pointwise::Leaf& leaf = loop.leaves[static_cast<std::size_t>(i)];
      if (leaf.kind == Pointwise::Leaf::Kind::memory) {
        memory_[static_cast<std::size_t>(i)] = frame.address(leaf.view.buffer);
      } else if (leaf.kind != Pointwise::Leaf::Kind::iota) {
        const double number = leaf.kind == Pointwise::Leaf::Kind::constant
                                  ? leaf.number
                                  : static_cast<double>(frame.first);
        std::fill_n(own(i), kBlock, static_cast<R>(number));
        at_[static_cast<std::size_t>(i)] = own(i);
      }
    }
    for (std::size_t s = 0; s < loop.steps.size(); ++s) {
      const Pointwise::Step& step = loop.steps[s];
      if (step.kind == Pointwise::Step::Kind::round) continue;
      if constexpr (std::is_same_v<R, float>) {
        functions_[s] = vector_function(vector_op(step.function));
      } else {
        functions_[s] = step.function == Function::random
                            ? &random_numbers
                            : vector_function_f64(vector_op(step.function));
      }
    }
  }

  // Registers of n elements from `coordinates` on along the innermost dimension. The last step
  // writes to `direct` if that is not null.
  const R* run(const std::int64_t* coordinates, std::int64_t n, R* direct = nullptr) {
    const std::size_t rank = loop_.shape.size();
    const std::size_t leaves = loop_.leaves.size();
    for (std::size_t i = 0; i < leaves; ++i) {
      const Pointwise::Leaf& leaf = loop_.leaves[i];
      if (leaf.kind == Pointwise::Leaf::Kind::constant || leaf.kind == Pointwise::Leaf::Kind::first)
        continue;
      R* const to = own(static_cast<int>(i));
      at_[i] = to;
      if (leaf.kind == Pointwise::Leaf::Kind::iota) {
        const auto dim = static_cast<std::size_t>(leaf.dim);
        const auto first = static_cast<R>(coordinates[dim]);
        if (dim + 1 == rank) {
          for (std::int64_t k = 0; k < n; ++k) to[k] = first + static_cast<R>(k);
        } else {
          std::fill_n(to, n, first);
        }
        continue;
      }
      const std::byte* memory = address(memory_[i], leaf.view, coordinates);
      const std::int64_t stride = rank > 0 ? leaf.view.strides[rank - 1] : 0;
      if (stride == 1 && leaf.view.dtype == register_dtype<R>()) {
        at_[i] = reinterpret_cast<const R*>(memory);
      } else {
        gather(leaf.view, memory, stride, to, n);
      }
    }
    for (std::size_t s = 0; s < loop_.steps.size(); ++s) {
      const Pointwise::Step& step = loop_.steps[s];
      R* const to = direct != nullptr && s + 1 == loop_.steps.size()
                        ? direct
                        : own(static_cast<int>(leaves + s));
      const R* a = at_[static_cast<std::size_t>(step.a)];
      const R* b = step.b >= 0 ? at_[static_cast<std::size_t>(step.b)] : nullptr;
      const R* c = step.c >= 0 ? at_[static_cast<std::size_t>(step.c)] : nullptr;
      if (step.kind == Pointwise::Step::Kind::round) {
        round_to(step.dtype, a, to, n);
      } else {
        functions_[s](a, b, c, to, n);
      }
      at_[leaves + s] = to;
    }
    return at_[static_cast<std::size_t>(loop_.store.source)];
  }

  // Where the result is stored.
  std::byte* stored(const std::int64_t* coordinates) const {
    return address(out_, loop_.store.view, coordinates);
  }

 private:
  const Pointwise& loop_;
  std::byte* const out_;                                // the result's buffer
  std::array<const std::byte*, kMaxRegisters> memory_;  // buffers of leaves in memory
  std::array<std::conditional_t<std::is_same_v<R, float>, VectorFunction, VectorFunctionF64>,
             kMaxRegisters>
      functions_;  // of the steps
  std::array<const R*, kMaxRegisters> at_;
  alignas(
      64) std::array<R, kMaxRegisters * kBlock> storage_;  // not set: only used ones are written
  template <typename Byte>
  static Byte* address(Byte* buffer, const View& view, const std::int64_t* coordinates) {
    std::int64_t offset = view.offset;
    for (std::size_t d = 0; d < view.strides.size(); ++d)
      offset += coordinates[d] * view.strides[d];
    return buffer + offset * static_cast<std::int64_t>(size_of(view.dtype));
  }
  R* own(int i) { return storage_.data() + static_cast<std::int64_t>(i) * kBlock; }
};

// n numbers to memory.
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
    for (std::int64_t i = 0; i < n; ++i) {
      const double old = accumulate ? load_element(at, view.dtype, i * stride) : 0.0;
      store_element(at, view.dtype, i * stride, old + static_cast<double>(from[i]));
    }
  }
}

// Coordinates of element `flat` of the first `dims` dimensions.
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

template <typename R>
void elementwise(const Pointwise& loop, const Frame& frame, int threads) {
  const std::size_t rank = loop.shape.size();
  const std::int64_t inner = rank > 0 ? loop.shape[rank - 1] : 1;
  const std::int64_t outer = rank > 0 ? product_of(loop.shape, 0, rank - 1) : 1;
  if (inner == 0 || outer == 0) return;
  const std::int64_t blocks = (inner + kBlock - 1) / kBlock;
  const std::int64_t items = outer * blocks;
  const std::int64_t per_task = std::max<std::int64_t>(kTask / std::min(inner, kBlock), 1);
  const Pointwise::Store& to = loop.store;
  const std::int64_t stride = rank > 0 ? to.view.strides[rank - 1] : 1;
  const bool direct = stride == 1 && to.view.dtype == register_dtype<R>() && !to.accumulate &&
                      !loop.steps.empty() &&
                      to.source == static_cast<int>(loop.leaves.size() + loop.steps.size()) - 1;
  parallel_for(threads, (items + per_task - 1) / per_task, [&](std::int64_t task, int) {
    Block<R> block(loop, frame);
    std::array<std::int64_t, kMaxDims> at{};
    const std::int64_t end = std::min(items, (task + 1) * per_task);
    std::int64_t row = -1;
    for (std::int64_t item = task * per_task; item < end; ++item) {
      if (row < 0) {
        if (rank > 0) unravel(loop.shape, 0, rank - 1, item / blocks, at.data());
      } else if (item / blocks != row) {
        advance(loop.shape, 0, rank - 1, at.data());
      }
      row = item / blocks;
      const std::int64_t first = item % blocks * kBlock;
      const std::int64_t n = std::min(kBlock, inner - first);
      if (rank > 0) at[rank - 1] = first;
      std::byte* memory = block.stored(at.data());
      const R* values = block.run(at.data(), n, direct ? reinterpret_cast<R*>(memory) : nullptr);
      if (!direct) put(to.view, memory, stride, values, n, to.accumulate);
    }
  });
}

template <typename R>
void reduce_rows(const Pointwise& loop, const Frame& frame, int threads) {
  const std::size_t rank = loop.shape.size(), reduced = static_cast<std::size_t>(loop.reduced),
                    kept = rank - reduced;
  const std::int64_t rows = product_of(loop.shape, 0, kept);
  const std::int64_t inner = reduced > 0 ? loop.shape[rank - 1] : 1;
  const std::int64_t first_size = reduced > 0 ? loop.shape[kept] : 1;
  const Pointwise::Store& to = loop.store;
  const std::int64_t parts = loop.parts;
  const std::int64_t length =
      product_of(loop.shape, kept, reduced) / std::max<std::int64_t>(parts, 1);
  const std::int64_t per_task =
      std::max<std::int64_t>(kTask / std::max<std::int64_t>(length, 1), 1);
  const std::int64_t items = rows * parts;
  R* const sums = parts > 1 ? reinterpret_cast<R*>(frame.address(loop.scratch)) : nullptr;
  const auto finish = [&](std::byte* memory, double value) {
    store_element(memory, to.view.dtype, 0,
                  to.accumulate ? load_element(memory, to.view.dtype, 0) + value : value);
  };
  parallel_for(threads, (items + per_task - 1) / per_task, [&](std::int64_t task, int) {
    Block<R> block(loop, frame);
    std::array<std::int64_t, kMaxDims> at{};
    const std::int64_t end = std::min(items, (task + 1) * per_task);
    for (std::int64_t item = task * per_task; item < end; ++item) {
      const std::int64_t row = item / parts, part = item % parts;
      unravel(loop.shape, 0, kept, row, at.data());
      const std::int64_t begin = first_size * part / parts, stop = first_size * (part + 1) / parts;
      Sum<R> sum(loop.reduce);
      std::fill(at.begin() + static_cast<std::ptrdiff_t>(kept),
                at.begin() + static_cast<std::ptrdiff_t>(rank), 0);
      if (reduced == 0) {
        sum.add(block.run(at.data(), 1), 1);
      } else if (reduced == 1) {
        for (std::int64_t x = begin; x < stop; x += kBlock) {
          at[kept] = x;
          const std::int64_t n = std::min(kBlock, stop - x);
          sum.add(block.run(at.data(), n), n);
        }
      } else if (product_of(loop.shape, kept + 1, reduced - 1) > 0) {
        for (std::int64_t x = begin; x < stop; ++x) {
          at[kept] = x;
          do {
            for (std::int64_t y = 0; y < inner; y += kBlock) {
              at[rank - 1] = y;
              const std::int64_t n = std::min(kBlock, inner - y);
              sum.add(block.run(at.data(), n), n);
            }
            at[rank - 1] = 0;
          } while (advance(loop.shape, kept + 1, reduced - 2, at.data()));
        }
      }
      std::fill(at.begin() + static_cast<std::ptrdiff_t>(kept),
                at.begin() + static_cast<std::ptrdiff_t>(rank), 0);
      if (parts > 1) {
        sums[item] = static_cast<R>(sum.value());
      } else {
        finish(block.stored(at.data()), sum.value());
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
      Sum<R> sum(loop.reduce);
      for (std::int64_t part = 0; part < parts; ++part)
        sum.merge_value(static_cast<double>(sums[row * parts + part]));
      std::int64_t offset = to.view.offset;
      for (std::size_t d = 0; d < kept; ++d) offset += at[d] * to.view.strides[d];
      finish(frame.address(to.view.buffer) +
                 offset * static_cast<std::int64_t>(size_of(to.view.dtype)),
             sum.value());
    }
  });
}

template <typename R>
void merge_block(Reduce kind, const R* x, R* top, R* sum, std::int64_t n) {
  if constexpr (std::is_same_v<R, float>) {
    if (kind == Reduce::sum) return add_to(x, sum, n);
    if (kind == Reduce::max) return max_to(x, sum, n);
  }
  switch (kind) {
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

template <typename R>
void reduce_columns(const Pointwise& loop, const Frame& frame, int threads) {
  const std::size_t rank = loop.shape.size(), reduced = static_cast<std::size_t>(loop.reduced),
                    kept = rank - reduced;
  const std::int64_t inner = loop.shape[rank - 1];
  const std::int64_t outer = product_of(loop.shape, reduced, kept - 1);
  const std::int64_t blocks = (inner + kBlock - 1) / kBlock;
  const std::int64_t columns = outer * inner;
  const std::int64_t parts = loop.parts, first_size = loop.shape[0];
  const std::int64_t rest = product_of(loop.shape, 1, reduced - 1);
  const Pointwise::Store& to = loop.store;
  const std::int64_t stride = to.view.strides[rank - 1];
  R* const sums = parts > 1 ? reinterpret_cast<R*>(frame.address(loop.scratch)) : nullptr;
  const R start = loop.reduce == Reduce::max ? -std::numeric_limits<R>::infinity() : R(0);
  parallel_for(threads, parts * outer * blocks, [&](std::int64_t task, int) {
    Block<R> block(loop, frame);
    alignas(64) std::array<R, kBlock> sum, top;
    std::array<std::int64_t, kMaxDims> at{};
    const std::int64_t part = task / (outer * blocks), kept_row = task / blocks % outer;
    const std::int64_t first = task % blocks * kBlock, n = std::min(kBlock, inner - first);
    unravel(loop.shape, reduced, kept - 1, kept_row, at.data());
    at[rank - 1] = first;
    sum.fill(start);
    top.fill(-std::numeric_limits<R>::infinity());
    const std::int64_t begin = first_size * part / parts, end = first_size * (part + 1) / parts;
    for (std::int64_t x = begin; x < end && rest > 0; ++x) {
      at[0] = x;
      do {
        merge_block(loop.reduce, block.run(at.data(), n), top.data(), sum.data(), n);
      } while (advance(loop.shape, 1, reduced - 1, at.data()));
    }
    if (loop.reduce == Reduce::lse) {
      for (std::int64_t i = 0; i < n; ++i)
        sum[static_cast<std::size_t>(i)] =
            std::log(sum[static_cast<std::size_t>(i)]) + top[static_cast<std::size_t>(i)];
    }
    if (parts > 1) {
      std::copy_n(sum.data(), n, sums + part * columns + kept_row * inner + first);
    } else {
      for (std::size_t d = 0; d < reduced; ++d) at[d] = 0;
      put(to.view, block.stored(at.data()), stride, sum.data(), n, to.accumulate);
    }
  });
  if (parts <= 1) return;
  parallel_for(threads, outer * blocks, [&](std::int64_t task, int) {
    alignas(64) std::array<R, kBlock> sum;
    std::array<std::int64_t, kMaxDims> at{};
    const std::int64_t kept_row = task / blocks, first = task % blocks * kBlock,
                       n = std::min(kBlock, inner - first);
    sum.fill(start);
    for (std::int64_t part = 0; part < parts; ++part)
      merge_block<R>(loop.reduce, sums + part * columns + kept_row * inner + first, nullptr,
                     sum.data(), n);
    unravel(loop.shape, reduced, kept - 1, kept_row, at.data());
    at[rank - 1] = first;
    std::int64_t offset = to.view.offset;
    for (std::size_t d = reduced; d < rank; ++d) offset += at[d] * to.view.strides[d];
    put(to.view,
        frame.address(to.view.buffer) + offset * static_cast<std::int64_t>(size_of(to.view.dtype)),
        stride, sum.data(), n, to.accumulate);
  });
}

template <typename R>
void run(const Pointwise& loop, const Frame& frame, int threads) {
  check(loop.shape.size() <= kMaxDims, "a loop over ", loop.shape.size(), " dimensions");
  if (!loop.reduction) {
    elementwise<R>(loop, frame, threads);
  } else if (loop.columns && loop.reduced > 0 &&
             loop.reduced < static_cast<int>(loop.shape.size())) {
    reduce_columns<R>(loop, frame, threads);
  } else {
    reduce_rows<R>(loop, frame, threads);
  }
}

}  // namespace

void run_pointwise(const Pointwise& loop, const Frame& frame, int threads) {
  if (loop.wide) {
    run<double>(loop, frame, threads);
  } else {
    run<float>(loop, frame, threads);
  }
}

}  // namespace logitless::ir
