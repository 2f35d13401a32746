#include "compiler/row_groups.h"

#include <gtest/gtest.h>

#include <cmath>
#include <random>
#include <variant>

#include "compiler/compiled.h"
#include "compiler/exec/cpu/run.h"
#include "compiler/ir/text.h"
#include "compiler/passes/passes.h"
#include "compiler/plan/lower.h"
#include "compiler/target/cuda.h"
#include "core/check.h"
#include "core/element.h"

namespace logitless::test {
namespace {

std::string replaced(std::string text, const std::string& from, const std::string& to) {
  for (std::size_t at = 0; (at = text.find(from, at)) != std::string::npos; at += to.size())
    text.replace(at, from.size(), to);
  return text;
}

// The loss and the gradient of softcapped logits over a temperature for each row.
constexpr const char* kSoftcap = R"(graph g(%x: T[64, V], %t: f32[64], %y: i64[64]) {
  %z = cast %x : f32[64, V]
  %c = constant value(30) : f32[64, V]
  %q = div %z, %c
  %h = tanh %q
  %s = mul %h, %c
  %tb = broadcast %t dims(0) : f32[64, V]
  %st = div %s, %tb
  %l = reduce_lse %st dims(1) : f64[64]
  %lf = cast %l : f32[64]
  %lb = broadcast %lf dims(0) : f32[64, V]
  %d = sub %st, %lb
  %p = exp %d
  %i = iota axis(1) : i64[64, V]
  %yb = broadcast %y dims(0) : i64[64, V]
  %e = eq %i, %yb
  %m = constant value(-1) : f32[64, V]
  %n = constant value(0) : f32[64, V]
  %o = select %e, %m, %n
  %a = add %p, %o
  %f = constant value(1000) : f32[64, V]
  %af = mul %a, %f
  %g = div %af, %tb
  %r = cast %g : T[64, V]
  %sum = reduce_sum %d dims(1)
  return r: %r, l: %lf, sum: %sum
})";

// Entropy, a maximum, and rows divided by their norms.
constexpr const char* kNorms = R"(graph g(%x: T[64, V]) {
  %z = cast %x : f32[64, V]
  %u = mul %z, %z
  %w = reduce_sum %u dims(1)
  %n = sqrt %w
  %nb = broadcast %n dims(0) : f32[64, V]
  %v = div %z, %nb
  %k = constant value(40) : f32[64, V]
  %s = mul %v, %k
  %top = reduce_max %s dims(1)
  %l = reduce_lse %s dims(1)
  %lb = broadcast %l dims(0) : f32[64, V]
  %d = sub %s, %lb
  %p = exp %d
  %f = mul %p, %d
  %h = reduce_sum %f dims(1)
  %hb = broadcast %h dims(0) : f32[64, V]
  %j = add %d, %hb
  %pj = mul %p, %j
  %kk = constant value(1000) : f32[64, V]
  %g = mul %pj, %kk
  %r = cast %g : T[64, V]
  return r: %r, top: %top, h: %h
})";

std::int64_t count_of(const ir::Buffer& b, DType dtype) {
  return b.bytes / static_cast<std::int64_t>(size_of(dtype));
}

// Fills what the group reads: labels inside of the row, temperatures and logits.
void fill(const GroupCase& c, std::uint64_t seed, std::vector<std::byte>& arena) {
  std::mt19937_64 rng(seed);
  std::normal_distribution<double> normal(0.0, 3.0);
  std::uniform_int_distribution<std::int64_t> label(0, c.group.columns - 1);
  for (const ir::RowGroup::Stage& stage : c.group.stages) {
    for (const ir::Pointwise::Leaf& leaf : stage.loop.leaves) {
      if (leaf.kind != ir::Pointwise::Leaf::Kind::memory) continue;
      const ir::Buffer& b = c.memory.program.buffers[static_cast<std::size_t>(leaf.view.buffer)];
      const DType dtype = leaf.view.dtype;
      const std::int64_t n = count_of(b, dtype);
      std::byte* const to = arena.data() + b.offset;
      for (std::int64_t i = 0; i < n; ++i) {
        if (is_index(dtype))
          store_element(to, dtype, i, static_cast<double>(label(rng)));
        else
          store_element(to, dtype, i,
                        n == c.group.rows ? 0.5 + std::abs(normal(rng)) : normal(rng));
      }
    }
  }
}

// Fills the operands of a product, so that its elements are of size 1.
void fill_operands(const GroupCase& c, const ir::Gemm& g, std::uint64_t seed,
                   std::vector<std::byte>& arena) {
  std::mt19937_64 rng(seed);
  std::normal_distribution<double> normal(0.0, std::pow(static_cast<double>(g.k), -0.25));
  for (const ir::View* v : {&g.a, &g.b}) {
    const ir::Buffer& b = c.memory.program.buffers[static_cast<std::size_t>(v->buffer)];
    for (std::int64_t i = 0; i < count_of(b, v->dtype); ++i)
      store_element(arena.data() + b.offset, v->dtype, i, normal(rng));
  }
}

// Stores a product, summed in float64.
void store_product(const GroupCase& c, const ir::Gemm& g, std::vector<std::byte>& arena) {
  const auto at = [&](const ir::View& v) {
    return arena.data() + c.memory.program.buffers[static_cast<std::size_t>(v.buffer)].offset;
  };
  const auto index = [](const ir::View& v, std::int64_t i, std::int64_t j) {
    return v.offset + i * v.strides[0] + j * v.strides[1];
  };
  for (std::int64_t i = 0; i < g.m; ++i) {
    for (std::int64_t j = 0; j < g.n; ++j) {
      double sum = 0.0;
      for (std::int64_t k = 0; k < g.k; ++k)
        sum += load_element(at(g.a), g.a.dtype, index(g.a, i, k)) *
               load_element(at(g.b), g.b.dtype, index(g.b, k, j));
      store_element(at(g.c), g.c.dtype, index(g.c, i, j), sum);
    }
  }
}

// Stores the difference of the group's products in place of the first.
void subtract_other(const GroupCase& c, std::vector<std::byte>& arena) {
  const ir::View &from = c.group.product->c, &what = c.group.other->c;
  const auto at = [&](const ir::View& v) {
    return arena.data() + c.memory.program.buffers[static_cast<std::size_t>(v.buffer)].offset;
  };
  for (std::int64_t i = 0; i < c.group.rows; ++i) {
    for (std::int64_t j = 0; j < c.group.columns; ++j) {
      const std::int64_t to = from.offset + i * from.strides[0] + j * from.strides[1];
      const std::int64_t other = what.offset + i * what.strides[0] + j * what.strides[1];
      store_element(
          at(from), from.dtype, to,
          load_element(at(from), from.dtype, to) - load_element(at(what), what.dtype, other));
    }
  }
}

// Gives each buffer memory of its own.
void place_buffers(LoopCase& memory) {
  std::int64_t end = 64;
  for (ir::Buffer& b : memory.program.buffers) {
    b.place = ir::Place::arena;
    b.offset = (end + 255) / 256 * 256;
    end = b.offset + b.bytes;
    memory.alignments.push_back(16);
  }
  memory.program.arena_bytes = end + 64;
}

}  // namespace

GroupCase group_case(const std::string& text) {
  GroupCase c;
  c.memory.program = ir::lower(ir::mark_near_results(ir::parse(text).graph), ir::CudaTarget(90));
  for (const ir::Instruction& i : c.memory.program.instructions) {
    if (const auto* group = std::get_if<ir::RowGroup>(&i.what)) c.group = *group;
  }
  check(!c.group.stages.empty(), "no row group in ", text);
  place_buffers(c.memory);
  return c;
}

GroupCase repeated_group(const std::string& dtype) {
  return group_case(replaced(R"(graph g(%x: f32[96, 272], %y: f32[96, 272]) {
  %e = erf %x
  %g = mul %e, %x
  %h = cast %g : T[96, 272]
  %w = cast %h : f32[96, 272]
  %e1 = erf %x
  %q = add %e1, %y
  %l = reduce_sum %w dims(1)
  %b = broadcast %l dims(0) : f32[96, 272]
  %e2 = erf %x
  %g2 = mul %e2, %x
  %h2 = cast %g2 : T[96, 272]
  %w2 = cast %h2 : f32[96, 272]
  %d = sub %w2, %b
  %p = mul %d, %y
  %s = reduce_sum %p dims(1)
  return h: %h, q: %q, s: %s
})",
                             "T[", dtype + "["));
}

GroupCase product_group(const ProductProgram& program, const ProductSizes& sizes) {
  DeviceLimits device;
  device.compute_capability = 80;
  CompileOptions options = slow_memory(sizes, device);
  options.device.card.copy_bytes_per_second /= 100.0;  // every epilogue of few elements pays
  const CompiledProgram compiled = compile(Graph::parse(program.text), options);
  GroupCase c;
  c.memory.program = CompilerAccess::state(compiled).program;
  for (const ir::Instruction& i : c.memory.program.instructions) {
    const auto* group = std::get_if<ir::RowGroup>(&i.what);
    if (group != nullptr && group->product) c.group = *group;
  }
  check(c.group.product.has_value(), "no product with an epilogue in ", program.name);
  place_buffers(c.memory);
  return c;
}

std::vector<GroupCase> long_row_groups() {
  const auto of = [](const char* text, const std::string& columns, const std::string& dtype) {
    return group_case(replaced(replaced(text, "V]", columns + "]"), "T[", dtype + "["));
  };
  return {of(kNorms, "8200", "bf16"), of(kSoftcap, "16384", "f32"), of(kNorms, "16400", "f32")};
}

void check_group(const GroupCase& c, std::uint64_t seed, const KernelRunner& run) {
  std::vector<std::byte> got(static_cast<std::size_t>(c.memory.program.arena_bytes),
                             std::byte{0xff});
  fill(c, seed, got);
  if (c.group.other) fill_operands(c, *c.group.other, seed + 1000, got);
  if (c.group.product) fill_operands(c, *c.group.product, seed, got);
  std::vector<std::byte> want = got;
  const auto kernels = ir::generate(c.group, c.memory.alignments);
  const std::int64_t scratch = ir::row_group_scratch_bytes(c.group);
  run(c.memory, kernels, scratch, got);
  if (c.group.other) store_product(c, *c.group.other, want);
  if (c.group.product) store_product(c, *c.group.product, want);
  if (c.group.difference) subtract_other(c, want);
  for (const ir::RowGroup::Stage& stage : c.group.stages) {
    ir::Frame frame{c.memory.program, want.data()};
    ir::run_pointwise(stage.loop, frame, 2);
  }
  for (const ir::RowGroup::Stage& stage : c.group.stages) {
    if (!stage.stored) continue;
    const ir::View& view = stage.loop.store.view;
    const ir::Buffer& b = c.memory.program.buffers[static_cast<std::size_t>(view.buffer)];
    const std::int64_t n = count_of(b, view.dtype);
    double squares = 0.0, worst = 0.0;
    const auto at = [&](const std::vector<std::byte>& arena, std::int64_t i) {
      return load_element(arena.data() + b.offset, view.dtype, i);
    };
    for (std::int64_t i = 0; i < n; ++i) squares += at(want, i) * at(want, i);
    const double usual = std::sqrt(squares / static_cast<double>(n));
    ASSERT_GT(usual, 0.0);
    for (std::int64_t i = 0; i < n; ++i) {
      const double error = std::abs(at(got, i) - at(want, i)) / (usual + std::abs(at(want, i)));
      worst = std::isfinite(error) ? std::max(worst, error) : INFINITY;
    }
    // Elements that are rounded on the way may be a unit apart.
    const bool rounded = c.group.product && size_of(c.group.product->c.dtype) == 2;
    EXPECT_LE(worst, rounded                    ? 0x1p-6
                     : size_of(view.dtype) == 2 ? 0x1p-7
                                                : 1e-5)
        << "columns " << c.group.columns << ", " << n << " of " << name_of(view.dtype);
  }
}

}  // namespace logitless::test
