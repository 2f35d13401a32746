// Evaluates elementwise loops whose integers floats would round: beside registers of floats there
// are registers of 64-bit integers, which wrap, those of i32 at 32 bits.
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <numeric>
#include <type_traits>
#include <vector>

#include "compiler/exec/cpu/block.h"
#include "compiler/plan/integers.h"

namespace logitless::ir {

// One step of integers; a, b and c as the function has them.
inline void run_integers(Function function, DType dtype, const std::int64_t* a,
                         const std::int64_t* b, std::int64_t* to, std::int64_t n) {
  const auto each = [&](auto&& f) {
    for (std::int64_t i = 0; i < n; ++i) to[i] = f(i);
  };
  const auto bits = [](std::int64_t x) { return static_cast<std::uint64_t>(x); };
  switch (function) {
    case Function::neg:
      return each([&](std::int64_t i) { return wrapped(-bits(a[i]), dtype); });
    case Function::abs:
      return each([&](std::int64_t i) { return a[i] < 0 ? wrapped(-bits(a[i]), dtype) : a[i]; });
    case Function::sign:
      return each([&](std::int64_t i) {
        return static_cast<std::int64_t>(a[i] > 0) - static_cast<std::int64_t>(a[i] < 0);
      });
    case Function::add:
      return each([&](std::int64_t i) { return wrapped(bits(a[i]) + bits(b[i]), dtype); });
    case Function::sub:
      return each([&](std::int64_t i) { return wrapped(bits(a[i]) - bits(b[i]), dtype); });
    case Function::mul:
      return each([&](std::int64_t i) { return wrapped(bits(a[i]) * bits(b[i]), dtype); });
    case Function::max:
      return each([&](std::int64_t i) { return std::max(a[i], b[i]); });
    case Function::min:
      return each([&](std::int64_t i) { return std::min(a[i], b[i]); });
    default:
      throw InternalError("a function without a form of integers");
  }
}

// R: the floats; Out: the type of the result's register, R or std::int64_t.
template <typename R, typename Out>
class ExactBlock {
 public:
  static constexpr bool kWritesDirectly = false;

  ExactBlock(const Pointwise& loop, const Frame& frame)
      : loop_(loop),
        frame_(frame),
        out_(frame.address(loop.store.view.buffer)),
        count_(loop.leaves.size() + loop.steps.size()) {
    reals_.resize(std::max(reals_.size(), count_ * kBlock));
    integers_.resize(std::max(integers_.size(), count_ * kBlock));
    is_integer_.clear();
    memory_.clear();
    functions_.clear();
    for (std::size_t i = 0; i < count_; ++i) {
      is_integer_.push_back(holds_integers(loop, static_cast<int>(i)));
      if (i >= loop.leaves.size()) continue;
      const Pointwise::Leaf& leaf = loop.leaves[i];
      memory_.push_back(leaf.kind == Pointwise::Leaf::Kind::memory ? frame.address(leaf.view.buffer)
                                                                   : nullptr);
    }
    at_.resize(count_);
    for (std::size_t i = 0; i < count_; ++i) at_[i] = integers(i);
    for (std::size_t i = 0; i < loop.leaves.size(); ++i) fill(i);
    for (const Pointwise::Step& step : loop.steps) {
      const bool real = step.kind == Pointwise::Step::Kind::function && !is_index(step.dtype);
      functions_.push_back(real ? block_function<R>(step.function) : nullptr);
    }
  }

  // Registers of `rows` times n elements from `coordinates` on, along the innermost dimension and
  // the one before it.
  const Out* run(const std::int64_t* coordinates, std::int64_t rows, std::int64_t n,
                 Out* /*direct*/ = nullptr) {
    const std::int64_t count = rows * n;
    for (std::size_t i = 0; i < loop_.leaves.size(); ++i) load(i, coordinates, rows, n);
    for (std::size_t s = 0; s < loop_.steps.size(); ++s) step(s, count);
    if constexpr (std::is_same_v<Out, std::int64_t>) {
      return integer(loop_.store.source, count);
    } else {
      return real(loop_.store.source, count);
    }
  }

  // Returns the address of the result.
  std::byte* stored(const std::int64_t* coordinates) const {
    return address(out_, loop_.store.view, coordinates);
  }

 private:
  using Real = std::conditional_t<std::is_same_v<R, float>, VectorFunction, VectorFunctionF64>;

  const Pointwise& loop_;
  const Frame& frame_;
  std::byte* const out_;
  const std::size_t count_;  // of registers
  // Registers of a thread, which later loops reuse: a run allocates no memory.
  struct Scratch {
    std::vector<R> reals;
    std::vector<std::int64_t> integers;
    std::vector<const std::int64_t*> at;
    std::vector<bool> is_integer;
    std::vector<std::byte*> memory;
    std::vector<Real> functions;
  };
  static Scratch& scratch_of_thread() {
    static thread_local Scratch scratch;
    return scratch;
  }
  Scratch& scratch_ = scratch_of_thread();
  std::vector<R>& reals_ = scratch_.reals;
  std::vector<std::int64_t>& integers_ = scratch_.integers;
  std::vector<const std::int64_t*>& at_ = scratch_.at;  // the integers of each register
  std::vector<bool>& is_integer_ = scratch_.is_integer;
  std::vector<std::byte*>& memory_ = scratch_.memory;  // buffers of leaves in memory
  std::vector<Real>& functions_ = scratch_.functions;  // of the steps that compute floats

  static std::byte* address(std::byte* buffer, const View& view, const std::int64_t* coordinates) {
    std::int64_t offset = view.offset;
    for (std::size_t d = 0; d < view.strides.size(); ++d)
      offset += coordinates[d] * view.strides[d];
    return buffer + offset * static_cast<std::int64_t>(size_of(view.dtype));
  }
  R* reals(std::size_t i) { return reals_.data() + i * kBlock; }
  std::int64_t* integers(std::size_t i) { return integers_.data() + i * kBlock; }

  // A register as floats, and as integers: each holds what it is, and the other on demand.
  const R* real(int reg, std::int64_t n) {
    if (reg < 0) return nullptr;
    const auto i = static_cast<std::size_t>(reg);
    if (is_integer_[i]) std::copy_n(at_[i], n, reals(i));
    return reals(i);
  }
  const std::int64_t* integer(int reg, std::int64_t n) {
    if (reg < 0) return nullptr;
    const auto i = static_cast<std::size_t>(reg);
    if (!is_integer_[i] && !is_constant(i)) cast(i, DType::i64, n, integers(i));
    return at_[i];
  }
  bool is_constant(std::size_t i) const {
    return i < loop_.leaves.size() && loop_.leaves[i].kind == Pointwise::Leaf::Kind::constant;
  }
  // Fills the register of a leaf that is the same number in all blocks.
  void fill(std::size_t i) {
    const Pointwise::Leaf& leaf = loop_.leaves[i];
    if (leaf.kind == Pointwise::Leaf::Kind::constant) {
      std::fill_n(reals(i), kBlock, static_cast<R>(leaf.number));
      std::fill_n(integers(i), kBlock, integer_of(leaf.number, DType::i64));
    } else if (leaf.kind == Pointwise::Leaf::Kind::first) {
      std::fill_n(integers(i), kBlock, frame_.first);
    }
  }
  void cast(std::size_t from, DType dtype, std::int64_t n, std::int64_t* to) {
    const R* x = reals(from);
    for (std::int64_t k = 0; k < n; ++k) to[k] = integer_of(static_cast<double>(x[k]), dtype);
  }

  void load(std::size_t i, const std::int64_t* coordinates, std::int64_t rows, std::int64_t n) {
    const Pointwise::Leaf& leaf = loop_.leaves[i];
    const std::size_t rank = loop_.shape.size();
    if (leaf.kind == Pointwise::Leaf::Kind::iota)
      return count(coordinates, static_cast<std::size_t>(leaf.dim), rows, n, integers(i));
    if (leaf.kind != Pointwise::Leaf::Kind::memory) return;  // fill()
    const std::byte* memory = address(memory_[i], leaf.view, coordinates);
    const std::int64_t stride = rank > 0 ? leaf.view.strides[rank - 1] : 0;
    const std::int64_t step = rows > 1 ? leaf.view.strides[rank - 2] : n;
    if (!is_integer_[i]) {
      gather_rows(leaf.view, memory, step, stride, reals(i), rows, n);
    } else if (stride == 1 && step == n && leaf.view.dtype == DType::i64) {
      at_[i] = reinterpret_cast<const std::int64_t*>(memory);
    } else {
      at_[i] = integers(i);
      gather_rows(leaf.view, memory, step, stride, integers(i), rows, n);
    }
  }
  // Writes the indices along a dimension.
  void count(const std::int64_t* coordinates, std::size_t dim, std::int64_t rows, std::int64_t n,
             std::int64_t* to) const {
    const std::size_t rank = loop_.shape.size();
    for (std::int64_t r = 0; r < rows; ++r, to += n) {
      const std::int64_t first = coordinates[dim] + (dim + 2 == rank ? r : 0);
      if (dim + 1 == rank) {
        std::iota(to, to + n, first);
      } else {
        std::fill_n(to, n, first);
      }
    }
  }

  void step(std::size_t s, std::int64_t n) {
    const Pointwise::Step& step = loop_.steps[s];
    const std::size_t to = loop_.leaves.size() + s;
    if (step.kind == Pointwise::Step::Kind::round) return round(step, to, n);
    const auto is_integer = [&](int reg) {
      return reg >= 0 && is_integer_[static_cast<std::size_t>(reg)];
    };
    if (is_integer_[to]) {
      if (step.function == Function::select) return select(step, to, n);
      return run_integers(step.function, step.dtype, integer(step.a, n), integer(step.b, n),
                          integers(to), n);
    }
    const bool compares = step.function >= Function::eq && step.function <= Function::ge;
    if (compares && (is_integer(step.a) || is_integer(step.b))) {
      return compare_i64(vector_op(step.function), integer(step.a, n), integer(step.b, n),
                         reals(to), n);
    }
    functions_[s](real(step.a, n), real(step.b, n), real(step.c, n), reals(to), n);
  }
  void select(const Pointwise::Step& step, std::size_t to, std::int64_t n) {
    const R* which = real(step.a, n);
    const std::int64_t *b = integer(step.b, n), *c = integer(step.c, n);
    for (std::int64_t k = 0; k < n; ++k) integers(to)[k] = which[k] != R(0) ? b[k] : c[k];
  }
  void round(const Pointwise::Step& step, std::size_t to, std::int64_t n) {
    const auto from = static_cast<std::size_t>(step.a);
    if (!is_integer_[to]) {
      // Integers are rounded once: to a double before f32 would be twice.
      if (is_integer_[from] && is_float32_like(step.dtype)) {
        for (std::int64_t k = 0; k < n; ++k) reals(from)[k] = static_cast<float>(at_[from][k]);
      } else {
        real(step.a, n);
      }
      round_to(step.dtype, reals(from), reals(to), n);
    } else if (!is_integer_[from]) {
      cast(from, step.dtype, n, integers(to));
    } else {
      for (std::int64_t k = 0; k < n; ++k)
        integers(to)[k] = wrapped(static_cast<std::uint64_t>(at_[from][k]), step.dtype);
    }
  }
};

}  // namespace logitless::ir
