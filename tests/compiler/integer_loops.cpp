#include "compiler/integer_loops.h"

#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <limits>
#include <random>
#include <string>

#include "compiler/exec/cpu/run.h"
#include "compiler/ir/text.h"
#include "compiler/plan/lower.h"
#include "compiler/plan/pointwise_builder.h"
#include "compiler/target/cpu.h"
#include "compiler/target/cuda.h"
#include "core/check.h"
#include "core/element.h"

namespace logitless::test {
namespace {

using ir::Pointwise;
using ir::View;

// Fills n elements: integers at the ends of their range, beyond 2^24 and 2^53, and any others;
// floats that fit into no integer among others.
void fill(std::byte* to, std::int64_t n, DType dtype, std::mt19937_64& rng) {
  constexpr std::int64_t kLeast = std::numeric_limits<std::int64_t>::min();
  constexpr std::int64_t kIntegers[] = {kLeast,
                                        kLeast + 1,
                                        -(kLeast + 1),
                                        std::int64_t{1} << 62,
                                        (std::int64_t{1} << 53) + 1,
                                        std::int64_t{1} << 33,
                                        std::int64_t{1} << 31,
                                        -(std::int64_t{1} << 31) - 1,
                                        (1 << 24) + 1,
                                        1 << 24,
                                        (1 << 24) + 3,
                                        65536,
                                        7,
                                        1,
                                        0,
                                        -1};
  constexpr double kReals[] = {std::numeric_limits<double>::quiet_NaN(),
                               std::numeric_limits<double>::infinity(),
                               -std::numeric_limits<double>::infinity(),
                               1e20,
                               -1e20,
                               3e9,
                               -3e9,
                               0x1p31,
                               -0x1p31,
                               0x1p63,
                               -0x1p63,
                               1.9,
                               -1.9,
                               -0.0,
                               0.5,
                               16777216.0};
  for (std::int64_t i = 0; i < n; ++i) {
    const std::uint64_t bits = rng();
    const std::size_t some = bits % 16;
    std::int64_t integer = bits % 3 != 0 ? kIntegers[some] : static_cast<std::int64_t>(rng());
    if (dtype == DType::i32 && bits % 2 != 0) integer >>= 32;  // ends of i32
    if (dtype == DType::i32) {
      reinterpret_cast<std::int32_t*>(to)[i] = static_cast<std::int32_t>(integer);
    } else if (dtype == DType::i64) {
      reinterpret_cast<std::int64_t*>(to)[i] = integer;
    } else if (dtype == DType::i8) {
      store_element(to, dtype, i, static_cast<double>(bits % 2));
    } else {
      store_element(to, dtype, i, kReals[some]);
    }
  }
}

std::vector<std::byte> memory_of(const LoopCase& c, const std::vector<View>& views,
                                 std::uint64_t seed) {
  std::mt19937_64 rng(seed);
  std::vector<std::byte> arena(static_cast<std::size_t>(c.program.arena_bytes), std::byte{0xff});
  for (const View& view : views) {
    const ir::Buffer& b = c.program.buffers[static_cast<std::size_t>(view.buffer)];
    fill(arena.data() + b.offset, b.bytes / static_cast<std::int64_t>(size_of(view.dtype)),
         view.dtype, rng);
  }
  return arena;
}

void add_views(const Pointwise& loop, std::vector<View>& views) {
  for (const Pointwise::Leaf& leaf : loop.leaves) {
    if (leaf.kind == Pointwise::Leaf::Kind::memory) views.push_back(leaf.view);
  }
  views.push_back(loop.store.view);
}

void run_on_cpu(const LoopCase& c, const Pointwise& loop, std::vector<std::byte>& arena) {
  ir::Frame frame{c.program, arena.data()};
  frame.first = c.first;
  ir::run_pointwise(loop, frame, 2);
}

// Compares elements of a buffer. NaNs are equal, whatever their bits.
void expect_equal(const ir::Buffer& buffer, DType dtype, const std::vector<std::byte>& got,
                  const std::vector<std::byte>& want) {
  const std::byte *a = got.data() + buffer.offset, *b = want.data() + buffer.offset;
  const auto size = static_cast<std::int64_t>(size_of(dtype));
  int wrong = 0;
  for (std::int64_t i = 0; i < buffer.bytes / size && wrong < 3; ++i) {
    const bool nan = !is_index(dtype) && std::isnan(load_element(a, dtype, i)) &&
                     std::isnan(load_element(b, dtype, i));
    if (nan || std::memcmp(a + i * size, b + i * size, size_of(dtype)) == 0) continue;
    ++wrong;
    const auto text = [&](const std::byte* x) {
      return is_index(dtype) ? std::to_string(load_index(x, dtype, i))
                             : std::to_string(load_element(x, dtype, i));
    };
    ADD_FAILURE() << "element " << i << ": " << text(a) << ", not " << text(b);
  }
}

std::string replaced(std::string text, const std::string& from, const std::string& to) {
  for (std::size_t at = 0; (at = text.find(from, at)) != std::string::npos; at += to.size())
    text.replace(at, from.size(), to);
  return text;
}

// Adds the loops of a graph of x, y: T[...] and f: f32[...]; T, N and O stand for the dtype, the
// sizes and the other dtype of integers.
void add(const std::string& name, const std::string& body, const std::string& sizes,
         std::vector<LoopCase>& out) {
  for (const bool wide : {false, true}) {
    std::string text = "graph g(%x: T[N], %y: T[N], %f: f32[N]) {\n" + body + "\n  return o: %o\n}";
    text = replaced(text, "T[", wide ? "i64[" : "i32[");
    text = replaced(text, "O[", wide ? "i32[" : "i64[");
    text = replaced(text, "[N]", "[" + sizes + "]");
    for (LoopCase& c : cases_of(concat(name, wide ? " i64[" : " i32[", sizes, "]"),
                                ir::lower(ir::parse(text).graph, ir::CpuTarget(1))))
      out.push_back(std::move(c));
  }
}

// Adds the last loop once more, as one that adds to what is stored.
void add_accumulating(std::vector<LoopCase>& out) {
  for (std::size_t i = out.size() - 2, end = out.size(); i < end; ++i) {
    LoopCase c = out[i];
    c.name += " added";
    c.loop.store.accumulate = true;
    ir::choose_registers(c.loop);
    out.push_back(std::move(c));
  }
}

}  // namespace

std::vector<LoopCase> integer_cases() {
  std::vector<LoopCase> out;
  for (const char* sizes : {"3, 344", "16, 37"}) {
    const auto one = [&](const std::string& name, const std::string& body) {
      add(name, body, sizes, out);
    };
    for (const char* f : {"add", "sub", "mul", "max", "min", "eq", "ne", "lt", "le", "gt", "ge"})
      one(f, concat("  %o = ", f, " %x, %y"));
    for (const char* f : {"neg", "abs", "sign"}) one(f, concat("  %o = ", f, " %x"));
    one("select", "  %s = add %x, %y\n  %c = lt %s, %x\n  %o = select %c, %s, %y");
    one("constants",
        "  %c = constant value(65537) : T[N]\n  %d = constant value(-3) : T[N]\n  %m = mul %x, %c\n"
        "  %n = mul %m, %c\n  %e = max %n, %d\n  %o = sub %d, %e");
    one("the least constant",
        "  %c = constant value(-9223372036854775808) : i64[N]\n  %x8 = cast %x : i64[N]\n"
        "  %o = add %x8, %c");
    one("indices",
        "  %i = iota axis(1) : T[N]\n  %m = mul %i, %x\n  %s = add %m, %y\n  %o = sub %s, %i");
    one("cast", "  %s = add %x, %y\n  %c = cast %s : O[N]\n  %o = mul %c, %c");
    for (const char* to : {"f32", "f64", "bf16"}) {
      one(concat("cast to ", to), concat("  %s = add %x, %y\n  %o = cast %s : ", to, "[N]"));
      one(concat("read as ", to), concat("  %o = cast %x : ", to, "[N]"));
    }
    one("cast from floats", "  %o = cast %f : T[N]");
    one("computed from floats", "  %c = cast %f : T[N]\n  %o = add %c, %y");
    one("from floats and back", "  %c = cast %f : T[N]\n  %o = cast %c : f32[N]");
    one("from conditions", "  %c = gt %x, %y\n  %i = cast %c : T[N]\n  %o = sub %x, %i");
    one("beside floats",
        "  %c = constant value(3) : T[N]\n  %s = sub %x, %c\n  %e = eq %s, %y\n  %g = neg %f\n"
        "  %o = select %e, %f, %g");
    one("floats beside",
        "  %s = add %x, %y\n  %r = cast %s : f32[N]\n  %h = constant value(0.5) : f32[N]\n"
        "  %o = mul %r, %h");
    add_accumulating(out);
    one("sum", "  %o = add %x, %y");
    add_accumulating(out);
  }
  for (const char* kind : {"sum", "max"}) {
    for (const char* sizes : {"5, 1", "37, 7", "5, 768", "2, 9000", "900, 33"}) {
      for (const int dim : {0, 1}) {
        add(concat("reduce_", kind, dim == 0 ? " columns" : " rows"),
            concat("  %m = mul %x, %y\n  %o = reduce_", kind, " %m dims(", dim, ")"), sizes, out);
        add_accumulating(out);
      }
    }
  }
  return out;
}

void check_integer_case(const LoopCase& c, std::uint64_t seed, const KernelRunner& run) {
  SCOPED_TRACE(c.name);
  std::vector<View> views;
  add_views(c.loop, views);
  const std::vector<std::byte> memory = memory_of(c, views, seed);
  std::vector<std::byte> got = memory, want = memory;
  run(c, ir::generate(c.loop, c.alignments), ir::pointwise_scratch_bytes(c.loop), got);
  run_on_cpu(c, c.loop, want);
  const View& view = c.loop.store.view;
  const ir::Buffer& result = c.program.buffers[static_cast<std::size_t>(view.buffer)];
  expect_equal(result, view.dtype, got, want);
  // Everything else is unchanged.
  const auto at = static_cast<std::size_t>(result.offset),
             bytes = static_cast<std::size_t>(result.bytes);
  std::memcpy(got.data() + at, memory.data() + at, bytes);
  EXPECT_TRUE(got == memory) << "something beside the results was written";
}

GroupCase integer_group() {
  return group_case(R"(graph g(%y: i64[96], %x: f32[96, 16]) {
  %far = constant value(1099511627776) : i64[96, 16]
  %i = iota axis(1) : i64[96, 16]
  %b = broadcast %y dims(0) : i64[96, 16]
  %s = sub %b, %far
  %e = eq %s, %i
  %n = neg %x
  %m = select %e, %x, %n
  %sum = reduce_sum %m dims(1)
  %sums = broadcast %sum dims(0) : f32[96, 16]
  %t = add %sums, %m
  return t: %t, m: %m
})");
}

void check_integer_group(const GroupCase& c, std::uint64_t seed, const KernelRunner& run) {
  std::vector<View> views;
  bool exact = false;
  for (const ir::RowGroup::Stage& stage : c.group.stages) {
    add_views(stage.loop, views);
    exact = exact || stage.loop.exact;
  }
  EXPECT_TRUE(exact);
  std::vector<std::byte> got = memory_of(c.memory, views, seed);
  // Every fourth label is one that is compared with a position.
  for (const View& view : views) {
    if (view.dtype != DType::i64) continue;
    const ir::Buffer& b = c.memory.program.buffers[static_cast<std::size_t>(view.buffer)];
    auto* const labels = reinterpret_cast<std::int64_t*>(got.data() + b.offset);
    for (std::int64_t i = 0; i < b.bytes / 8; i += 4) labels[i] = (std::int64_t{1} << 40) + i % 16;
  }
  for (const View& view : views) {
    if (view.dtype != DType::f32) continue;
    const ir::Buffer& b = c.memory.program.buffers[static_cast<std::size_t>(view.buffer)];
    auto* const x = reinterpret_cast<float*>(got.data() + b.offset);
    for (std::int64_t i = 0; i < b.bytes / 4; ++i) x[i] = static_cast<float>(i % 17 - 8);
  }
  std::vector<std::byte> want = got;
  run(c.memory, ir::generate(c.group, c.memory.alignments), ir::row_group_scratch_bytes(c.group),
      got);
  for (const ir::RowGroup::Stage& stage : c.group.stages) run_on_cpu(c.memory, stage.loop, want);
  for (const ir::RowGroup::Stage& stage : c.group.stages) {
    if (!stage.stored) continue;
    const View& view = stage.loop.store.view;
    expect_equal(c.memory.program.buffers[static_cast<std::size_t>(view.buffer)], view.dtype, got,
                 want);
  }
}

}  // namespace logitless::test
