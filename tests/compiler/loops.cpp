#include "compiler/loops.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <map>
#include <random>

#include "compiler/exec/cpu/run.h"
#include "core/element.h"

namespace logitless::test {
namespace {

using ir::Pointwise;
using ir::Reduce;
using ir::View;

std::int64_t bytes_of(const View& view, const std::vector<std::int64_t>& shape) {
  std::int64_t last = view.offset;
  for (std::size_t d = 0; d < shape.size(); ++d) {
    if (view.strides[d] == 0) continue;
    if (shape[d] == 0) return 0;
    last += (shape[d] - 1) * view.strides[d];
  }
  return (last + 1) * static_cast<std::int64_t>(size_of(view.dtype));
}

void random_fill(std::byte* to, std::int64_t bytes, DType dtype, bool special,
                 std::mt19937_64& rng) {
  constexpr double kInfinity = std::numeric_limits<double>::infinity();
  constexpr double kSpecial[] = {std::numeric_limits<double>::quiet_NaN(),
                                 kInfinity,
                                 -kInfinity,
                                 0.0,
                                 -0.0,
                                 1e-40,
                                 0x1p-20,
                                 -0x1p-20,
                                 1.0,
                                 -1.0,
                                 2.5,
                                 -88.0,
                                 88.0,
                                 100.0,
                                 -100.0,
                                 65519.0};
  std::normal_distribution<float> normal;
  constexpr std::int64_t kDistinct = 65521;  // numbers repeat after so many
  const auto size = static_cast<std::int64_t>(size_of(dtype));
  const std::int64_t n = bytes / size, distinct = std::min(n, kDistinct);
  for (std::int64_t i = 0; i < distinct; ++i) {
    const std::uint64_t bits = rng();
    double value = static_cast<double>(normal(rng));
    if (dtype == DType::i8) {
      value = static_cast<double>(bits % 2);
    } else if (is_index(dtype)) {
      value = static_cast<double>(bits % 7) - 1.0;
    } else if (special && bits % 3 == 0) {
      value = kSpecial[bits / 3 % std::size(kSpecial)];
    }
    store_element(to, dtype, i, value);
  }
  for (std::int64_t i = distinct; i < n; i += distinct)
    std::copy_n(to, std::min(distinct, n - i) * size, to + i * size);
}

// Calls f(element) for each distinct element of the view.
template <typename F>
void each_element(const View& view, const std::vector<std::int64_t>& shape, F&& f) {
  std::vector<std::int64_t> at(shape.size(), 0);
  for (std::size_t d = 0; d < shape.size(); ++d) {
    if (shape[d] == 0 && view.strides[d] != 0) return;
  }
  for (;;) {
    std::int64_t element = view.offset;
    for (std::size_t d = 0; d < shape.size(); ++d) element += at[d] * view.strides[d];
    f(element);
    std::size_t d = shape.size();
    while (d > 0) {
      --d;
      if (view.strides[d] != 0 && ++at[d] < shape[d]) break;
      at[d] = 0;
      if (d == 0) return;
    }
    if (shape.empty()) return;
  }
}

// Returns the values that the loop reduces or stores in double, contiguous over the index space.
std::vector<double> elements_in_double(const LoopCase& c, const std::vector<std::byte>& arena) {
  LoopCase wide = c;
  Pointwise& loop = wide.loop;
  loop.wide = true;
  loop.reduction = false;
  loop.store.accumulate = false;
  std::int64_t count = 1;
  for (const std::int64_t n : loop.shape) count *= n;
  std::vector<double> out(static_cast<std::size_t>(count));
  ir::Buffer result;
  result.place = ir::Place::external;
  result.slot = 0;
  wide.program.buffers.push_back(result);
  loop.store.view = {static_cast<int>(wide.program.buffers.size()) - 1, DType::f64, 0, loop.shape,
                     ir::contiguous_strides(loop.shape)};
  std::vector<std::byte> copy = arena;
  void* results[] = {out.data()};
  ir::Frame frame{wide.program, copy.data()};
  frame.results = results;
  frame.first = c.first;
  ir::run_pointwise(loop, frame, 2);
  return out;
}

// Calls f(position, element) for each element of the view over the index space, in order.
template <typename F>
void each_position(const View& view, const std::vector<std::int64_t>& shape, F&& f) {
  std::vector<std::int64_t> at(shape.size(), 0);
  std::int64_t count = 1, element = view.offset;
  for (const std::int64_t n : shape) count *= n;
  for (std::int64_t position = 0; position < count; ++position) {
    f(static_cast<std::size_t>(position), static_cast<std::size_t>(element));
    for (std::size_t d = shape.size(); d-- > 0;) {
      element += view.strides[d];
      if (++at[d] < shape[d]) break;
      element -= shape[d] * view.strides[d];
      at[d] = 0;
    }
  }
}

// Returns the results by element of the result's buffer, without values that they are added to. A
// NaN makes the maximum and the log-sum-exp of its row NaN; otherwise an infinite maximum is the
// log-sum-exp.
std::vector<double> in_double(const LoopCase& c, const std::vector<std::byte>& arena) {
  const Pointwise& loop = c.loop;
  const View& view = loop.store.view;
  const std::vector<double> x = elements_in_double(c, arena);
  const auto elements =
      static_cast<std::size_t>(c.program.buffers[static_cast<std::size_t>(view.buffer)].bytes) /
      size_of(view.dtype);
  const auto each = [&](auto&& f) { each_position(view, loop.shape, f); };
  std::vector<double> out(elements, 0.0);
  if (!loop.reduction) {
    each([&](std::size_t i, std::size_t to) { out[to] = x[i]; });
    return out;
  }
  if (loop.reduce == Reduce::sum) {
    each([&](std::size_t i, std::size_t to) { out[to] += x[i]; });
    return out;
  }
  if (loop.reduce == Reduce::product) {
    std::fill(out.begin(), out.end(), 1.0);
    each([&](std::size_t i, std::size_t to) { out[to] *= x[i]; });
    return out;
  }
  std::vector<double> top(elements, -std::numeric_limits<double>::infinity());
  each([&](std::size_t i, std::size_t to) {
    if (!(x[i] <= top[to]) && !std::isnan(top[to])) top[to] = x[i];
  });
  if (loop.reduce == Reduce::max) return top;
  each([&](std::size_t i, std::size_t to) {
    if (!std::isinf(top[to])) out[to] += std::exp(x[i] - top[to]);
  });
  for (std::size_t i = 0; i < elements; ++i)
    out[i] = std::isinf(top[i]) ? top[i] : top[i] + std::log(out[i]);
  return out;
}

double tolerance_of(const LoopCase& c) {
  const DType stored = c.loop.store.view.dtype;
  if (c.rounds || stored == DType::bf16) return 0x1p-7;
  if (stored == DType::f16) return 0x1p-10;
  return c.loop.wide ? 1e-12 : 2e-6;
}

// Returns the distance of the smallest numbers of the dtype.
double least_of(DType dtype) {
  switch (dtype) {
    case DType::f16:
      return 0x1p-24;
    case DType::bf16:
      return 0x1p-133;
    case DType::f32:
      return 0x1p-149;
    default:
      return 0.0;
  }
}

}  // namespace

LoopCase make_case(const std::string& name, const Pointwise& loop,
                   std::span<const std::int64_t> alignments) {
  LoopCase c{name, loop, {}, {}, 12};
  std::map<int, int> buffers;
  const auto move = [&](View& view) {
    const auto [at, added] = buffers.emplace(view.buffer, static_cast<int>(buffers.size()));
    if (added) {
      c.program.buffers.emplace_back();
      const std::int64_t alignment =
          alignments.empty() ? 256 : alignments[static_cast<std::size_t>(view.buffer)];
      c.alignments.push_back(std::gcd<std::int64_t>(alignment, 256));
    }
    view.buffer = at->second;
    std::int64_t& bytes = c.program.buffers[static_cast<std::size_t>(view.buffer)].bytes;
    bytes = std::max(bytes, bytes_of(view, c.loop.shape));
  };
  for (Pointwise::Leaf& leaf : c.loop.leaves) {
    if (leaf.kind == Pointwise::Leaf::Kind::memory) move(leaf.view);
  }
  move(c.loop.store.view);
  c.loop.scratch = -1;
  c.loop.parts = 1;
  const auto narrow = [](DType dtype) { return dtype == DType::bf16 || dtype == DType::f16; };
  for (const Pointwise::Step& s : c.loop.steps)
    c.rounds = c.rounds || (s.kind == Pointwise::Step::Kind::round && narrow(s.dtype));
  std::int64_t end = 0;
  for (std::size_t b = 0; b < c.program.buffers.size(); ++b) {
    ir::Buffer& buffer = c.program.buffers[b];
    buffer.place = ir::Place::arena;
    // Buffers have gaps between them and no better alignment than promised.
    buffer.offset = (end + 64 + 255) / 256 * 256 + c.alignments[b] % 256;
    end = buffer.offset + buffer.bytes;
  }
  c.program.arena_bytes = end + 64;
  return c;
}

namespace {

void add_cases(const std::string& name, const ir::Program& program,
               const std::vector<std::int64_t>& alignments, std::vector<LoopCase>& out) {
  for (const ir::Instruction& i : program.instructions) {
    if (const auto* loop = std::get_if<Pointwise>(&i.what))
      out.push_back(make_case(name + "/" + i.name, *loop, alignments));
    if (const auto* rounds = std::get_if<ir::LoopRun>(&i.what)) {
      for (const auto& body : {rounds->body, rounds->tail}) {
        if (body != nullptr)
          add_cases(name + "/" + i.name, *body, buffer_alignments(*rounds, *body, alignments), out);
      }
    }
  }
}

}  // namespace

std::vector<LoopCase> cases_of(const std::string& name, const ir::Program& program) {
  std::vector<LoopCase> out;
  add_cases(name, program, ir::buffer_alignments(program), out);
  return out;
}

Memory random_memory(const LoopCase& c, std::uint64_t seed) {
  std::mt19937_64 rng(seed);
  Memory memory;
  memory.arena.assign(static_cast<std::size_t>(c.program.arena_bytes), std::byte{0xff});
  const auto fill = [&](const View& view) {
    const ir::Buffer& b = c.program.buffers[static_cast<std::size_t>(view.buffer)];
    random_fill(memory.arena.data() + b.offset, b.bytes, view.dtype, c.special, rng);
  };
  fill(c.loop.store.view);
  for (const Pointwise::Leaf& leaf : c.loop.leaves) {
    if (leaf.kind == Pointwise::Leaf::Kind::memory) fill(leaf.view);
  }
  return memory;
}

void check_case(const LoopCase& c, std::uint64_t seed, const KernelRunner& run) {
  SCOPED_TRACE(c.name);
  const Memory memory = random_memory(c, seed);
  const std::vector<ir::GeneratedKernel> kernels = ir::generate(c.loop, c.alignments);
  const std::int64_t scratch = ir::pointwise_scratch_bytes(c.loop);
  std::vector<std::byte> one = memory.arena, two = memory.arena;
  run(c, kernels, scratch, one);
  run(c, kernels, scratch, two);
  EXPECT_TRUE(one == two) << "two runs differ";

  const std::vector<double> expected = in_double(c, memory.arena);
  const View& view = c.loop.store.view;
  const std::int64_t at = c.program.buffers[static_cast<std::size_t>(view.buffer)].offset;
  double squares = 0.0;
  std::int64_t count = 0;
  each_element(view, c.loop.shape, [&](std::int64_t i) {
    const double e = expected[static_cast<std::size_t>(i)];
    if (std::isfinite(e)) squares += e * e;
    ++count;
  });
  const double scale = count > 0 && (!c.special || c.loop.reduction)
                           ? std::sqrt(squares / static_cast<double>(count))
                           : 0.0;
  const double least = 4 * least_of(view.dtype);
  const double tolerance = tolerance_of(c);
  int wrong = 0;
  each_element(view, c.loop.shape, [&](std::int64_t i) {
    const double old = load_element(memory.arena.data() + at, view.dtype, i);
    const double got = load_element(one.data() + at, view.dtype, i);
    std::byte stored[8];
    double want = expected[static_cast<std::size_t>(i)] + (c.loop.store.accumulate ? old : 0.0);
    store_element(stored, view.dtype, 0, want);
    want = load_element(stored, view.dtype, 0);
    const bool same = std::isnan(want) ? std::isnan(got)
                      : std::isinf(want)
                          ? got == want
                          : std::abs(got - want) <= tolerance * (scale + std::abs(want)) + least;
    if (!same && ++wrong <= 3) ADD_FAILURE() << "element " << i << ": " << got << ", not " << want;
    // Erases the result, so that the rest of `one` must be unchanged.
    const std::size_t size = size_of(view.dtype),
                      from = static_cast<std::size_t>(at) + static_cast<std::size_t>(i) * size;
    std::copy_n(memory.arena.begin() + static_cast<std::ptrdiff_t>(from), size,
                one.begin() + static_cast<std::ptrdiff_t>(from));
  });
  EXPECT_EQ(wrong, 0) << "of " << count << " results";
  EXPECT_TRUE(one == memory.arena) << "something beside the results was written";
}

}  // namespace logitless::test
