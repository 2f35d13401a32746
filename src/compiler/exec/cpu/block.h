// Evaluates elementwise loops block by block: each register holds kBlock numbers, and each step is
// one vectorised function.
#pragma once

#include <algorithm>
#include <array>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <type_traits>
#include <vector>

#include "compiler/exec/cpu/elements.h"
#include "compiler/exec/cpu/run.h"
#include "compiler/plan/integers.h"
#include "core/check.h"
#include "core/element.h"
#include "core/half.h"
#include "kernels/cpu_tensor.h"

namespace logitless::ir {

inline constexpr std::int64_t kBlock = 512;    // numbers in a register
inline constexpr std::int64_t kTileRows = 16;  // 64 bytes of f32
inline constexpr int kMaxDims = 12;

inline VectorOp vector_op(Function function) {
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
    case Function::atan:
      return VectorOp::atan;
    case Function::erfc:
      return VectorOp::erfc;
    case Function::lgamma:
      return VectorOp::lgamma;
    case Function::digamma:
      return VectorOp::digamma;
    case Function::trigamma:
      return VectorOp::trigamma;
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
    case Function::fmod:
    case Function::random:
    case Function::uniform:
      break;  // block_function()
  }
  throw InternalError("a function without a vector form");
}

// Remainders of quotients cut toward 0, one by one: they are exact. c is not read.
template <typename R>
void remainders(const R* a, const R* b, const R* /*c*/, R* out, std::int64_t n) {
  for (std::int64_t i = 0; i < n; ++i) out[i] = std::fmod(a[i], b[i]);
}

// Returns the function of n numbers in R.
template <typename R>
auto block_function(Function function) {
  if constexpr (std::is_same_v<R, float>) {
    return function == Function::fmod ? VectorFunction{&remainders<float>}
                                      : vector_function(vector_op(function));
  } else {
    if (function == Function::fmod) return VectorFunctionF64{&remainders<double>};
    return is_random(function) ? VectorFunctionF64{random_function(function)}
                               : vector_function_f64(vector_op(function));
  }
}

inline bool is_float32_like(DType dtype) {
  return dtype == DType::f32 || dtype == DType::bf16 || dtype == DType::f16;
}

template <typename R>
constexpr DType register_dtype() {
  return std::is_same_v<R, float> ? DType::f32 : DType::f64;
}

// Loads n numbers from memory with a stride.
template <typename R>
void gather(const View& view, const std::byte* at, std::int64_t stride, R* to, std::int64_t n) {
  if (stride == 0) {
    load_numbers(view.dtype, at, 1, to, 1);
    std::fill_n(to + 1, n - 1, *to);
  } else if (std::is_same_v<R, float> && stride == 1 && is_float32_like(view.dtype)) {
    to_f32(view.dtype, at, reinterpret_cast<float*>(to), n);
  } else {
    load_numbers(view.dtype, at, stride, to, n);
  }
}

// Loads rows of n numbers. step, stride: between rows and within one, in elements.
template <typename R>
void gather_rows(const View& view, const std::byte* at, std::int64_t step, std::int64_t stride,
                 R* to, std::int64_t rows, std::int64_t n) {
  if (rows > 1 && step == 1 && stride != 0)
    return load_transposed(view.dtype, at, stride, to, rows, n);
  const auto bytes = step * static_cast<std::int64_t>(size_of(view.dtype));
  for (std::int64_t r = 0; r < rows; ++r) gather(view, at + r * bytes, stride, to + r * n, n);
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
    case DType::i8:
      for (std::int64_t i = 0; i < n; ++i) to[i] = std::trunc(from[i]);
      break;
    default:
      const auto most = static_cast<R>(most_of(dtype));
      for (std::int64_t i = 0; i < n; ++i)
        to[i] = from[i] >= -most && from[i] < most ? std::trunc(from[i]) : -most;
  }
}

// Evaluates blocks of one loop; each task has one on its stack.
template <typename R>
class Block {
 public:
  static constexpr bool kWritesDirectly = true;  // run() may write where the result is stored

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
      functions_[s] = block_function<R>(step.function);
    }
  }

  // Evaluates `rows` times n elements from `coordinates` on, along the last two dimensions. The
  // last step writes to `direct` unless that is null.
  const R* run(const std::int64_t* coordinates, std::int64_t rows, std::int64_t n,
               R* direct = nullptr) {
    const std::size_t rank = loop_.shape.size();
    const std::int64_t count = rows * n;
    const std::size_t leaves = loop_.leaves.size();
    for (std::size_t i = 0; i < leaves; ++i) {
      const Pointwise::Leaf& leaf = loop_.leaves[i];
      if (leaf.kind == Pointwise::Leaf::Kind::constant || leaf.kind == Pointwise::Leaf::Kind::first)
        continue;
      R* const to = own(static_cast<int>(i));
      at_[i] = to;
      if (leaf.kind == Pointwise::Leaf::Kind::iota) {
        fill_numbers(static_cast<std::size_t>(leaf.dim), coordinates, rows, n, to);
        continue;
      }
      const std::byte* memory = address(memory_[i], leaf.view, coordinates);
      const std::int64_t stride = rank > 0 ? leaf.view.strides[rank - 1] : 0;
      const std::int64_t step = rows > 1 ? leaf.view.strides[rank - 2] : n;
      if (stride == 1 && step == n && leaf.view.dtype == register_dtype<R>()) {
        at_[i] = reinterpret_cast<const R*>(memory);
        continue;
      }
      gather_rows(leaf.view, memory, step, stride, to, rows, n);
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
        round_to(step.dtype, a, to, count);
      } else {
        functions_[s](a, b, c, to, count);
      }
      at_[leaves + s] = to;
    }
    return at_[static_cast<std::size_t>(loop_.store.source)];
  }

  // Returns the address of the result's element.
  std::byte* stored(const std::int64_t* coordinates) const {
    return address(out_, loop_.store.view, coordinates);
  }

 private:
  const Pointwise& loop_;
  std::byte* const out_;                                // the result's buffer
  std::array<const std::byte*, kMaxRegisters> memory_;  // buffers of leaves in memory
  std::array<std::conditional_t<std::is_same_v<R, float>, VectorFunction, VectorFunctionF64>,
             kMaxRegisters>
      functions_;  // by step
  std::array<const R*, kMaxRegisters> at_;
  alignas(
      // Not initialised: only used registers are written.
      64) std::array<R, kMaxRegisters * kBlock> storage_;
  template <typename Byte>
  static Byte* address(Byte* buffer, const View& view, const std::int64_t* coordinates) {
    std::int64_t offset = view.offset;
    for (std::size_t d = 0; d < view.strides.size(); ++d)
      offset += coordinates[d] * view.strides[d];
    return buffer + offset * static_cast<std::int64_t>(size_of(view.dtype));
  }
  // Fills a register with the indices along a dimension.
  void fill_numbers(std::size_t dim, const std::int64_t* coordinates, std::int64_t rows,
                    std::int64_t n, R* to) const {
    const std::size_t rank = loop_.shape.size();
    for (std::int64_t r = 0; r < rows; ++r, to += n) {
      const auto first = static_cast<R>(coordinates[dim] + (dim + 2 == rank ? r : 0));
      if (dim + 1 == rank) {
        for (std::int64_t k = 0; k < n; ++k) to[k] = first + static_cast<R>(k);
      } else {
        std::fill_n(to, n, first);
      }
    }
  }
  R* own(int i) { return storage_.data() + static_cast<std::int64_t>(i) * kBlock; }
};

inline std::int64_t count_of_blocks(std::int64_t n, std::int64_t block) {
  return (n + block - 1) / block;
}

// Returns whether neighbours along the last dimension but one, and no others, are neighbours in
// memory.
inline bool is_transposed(const View& view) {
  const std::size_t rank = view.strides.size();
  return rank > 1 && view.strides[rank - 2] == 1 && view.strides[rank - 1] != 0 &&
         view.strides[rank - 1] != 1;
}

// The block size over a loop's last dimensions: several short rows, or a part of a long one.
struct BlockShape {
  std::int64_t rows = 1, columns = kBlock;

  BlockShape(const std::vector<std::int64_t>& shape, bool several) {
    const std::size_t rank = shape.size();
    columns = std::clamp<std::int64_t>(rank > 0 ? shape[rank - 1] : 1, 1, kBlock);
    if (several && rank > 1 && 2 * columns <= kBlock)
      rows = std::clamp<std::int64_t>(shape[rank - 2], 1, kBlock / columns);
  }

  // A tile of an elementwise loop: of a transposed operand it has whole lines of the cache.
  explicit BlockShape(const Pointwise& loop) : BlockShape(loop.shape, true) {
    const std::size_t rank = loop.shape.size();
    const auto transposed = [](const Pointwise::Leaf& leaf) {
      return leaf.kind == Pointwise::Leaf::Kind::memory && is_transposed(leaf.view);
    };
    if (rank < 2 || loop.shape[rank - 2] < kTileRows || columns < kBlock / kTileRows ||
        rows >= kTileRows || std::ranges::none_of(loop.leaves, transposed))
      return;
    rows = kTileRows;
    columns = kBlock / kTileRows;
  }
};

}  // namespace logitless::ir
