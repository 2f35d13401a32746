#include "compiler/loop_grid.h"

#include <logitless/compiler.h>

#include <algorithm>
#include <set>
#include <string>

#include "compiler/ir/function.h"
#include "compiler/ir/text.h"
#include "compiler/plan/lower.h"
#include "compiler/programs.h"
#include "compiler/target/cpu.h"
#include "core/check.h"

namespace logitless::test {
namespace {

using ir::Function;
using ir::FunctionKind;
using ir::Pointwise;
using ir::Reduce;
using ir::View;
using Sizes = std::vector<std::int64_t>;

constexpr DType kFloats[] = {DType::f32, DType::bf16, DType::f16, DType::f64};
constexpr DType kAll[] = {DType::f32, DType::bf16, DType::f16, DType::f64,
                          DType::i32, DType::i64,  DType::i8};

// Builds one loop; buffers are numbered in order.
class LoopBuilder {
 public:
  explicit LoopBuilder(Sizes shape) { loop_.shape = std::move(shape); }

  int memory(DType dtype, Sizes strides, std::int64_t offset = 0) {
    Pointwise::Leaf leaf;
    leaf.view = {buffers_++, dtype, offset, loop_.shape, std::move(strides)};
    loop_.leaves.push_back(leaf);
    return static_cast<int>(loop_.leaves.size()) - 1;
  }
  int memory(DType dtype) { return memory(dtype, ir::contiguous_strides(loop_.shape)); }
  int leaf(Pointwise::Leaf::Kind kind, double number = 0.0, int dim = 0) {
    Pointwise::Leaf leaf;
    leaf.kind = kind;
    leaf.number = number;
    leaf.dim = dim;
    loop_.leaves.push_back(leaf);
    return static_cast<int>(loop_.leaves.size()) - 1;
  }
  // Must follow all leaves.
  int step(Function f, int a, int b = -1, int c = -1) {
    loop_.steps.push_back({Pointwise::Step::Kind::function, f, DType::f32, a, b, c});
    return static_cast<int>(loop_.leaves.size() + loop_.steps.size()) - 1;
  }
  int round(DType dtype, int a) {
    loop_.steps.push_back({Pointwise::Step::Kind::round, Function::neg, dtype, a, -1, -1});
    return static_cast<int>(loop_.leaves.size() + loop_.steps.size()) - 1;
  }
  void store(int source, DType dtype, Sizes strides, std::int64_t offset = 0,
             bool accumulate = false) {
    loop_.store = {
        source, {buffers_++, dtype, offset, loop_.shape, std::move(strides)}, accumulate};
    loop_.wide = dtype == DType::f64 || is_index(dtype);
    for (const Pointwise::Leaf& l : loop_.leaves)
      loop_.wide =
          loop_.wide || (l.kind == Pointwise::Leaf::Kind::memory && l.view.dtype == DType::f64);
  }
  void store(int source, DType dtype) { store(source, dtype, ir::contiguous_strides(loop_.shape)); }
  Pointwise& loop() { return loop_; }

 private:
  Pointwise loop_;
  int buffers_ = 0;
};

void add_function(const ir::FunctionInfo& info, DType dtype, std::vector<LoopCase>& out) {
  LoopBuilder b({3, 344});
  const DType choice = info.kind == FunctionKind::choose ? DType::i8 : dtype;
  int operands[3] = {-1, -1, -1};
  for (int i = 0; i < info.operands; ++i) operands[i] = b.memory(i == 0 ? choice : dtype);
  const int r = b.step(info.function, operands[0], operands[1], operands[2]);
  b.store(r, info.kind == FunctionKind::compare || info.kind == FunctionKind::logical ? DType::i8
                                                                                      : dtype);
  LoopCase c = make_case(concat(info.name, "/", name_of(dtype)), b.loop());
  c.special = !is_index(dtype);
  out.push_back(std::move(c));
}

struct Layout {
  const char* name;
  Sizes strides;
  std::int64_t offset;
};

void add_reduction(Reduce kind, DType dtype, bool columns, Sizes shape, int reduced,
                   std::vector<LoopCase>& out, bool special = false, bool accumulate = false) {
  LoopBuilder b(shape);
  const int x = b.memory(dtype), y = b.memory(dtype);
  const int one = b.leaf(Pointwise::Leaf::Kind::constant, 1.0),
            small = b.leaf(Pointwise::Leaf::Kind::constant, 0x1p-6);
  // With special values one operand is reduced: products would be NaN too often. Factors are near
  // 1, so that their products have no overflow.
  const int r = special ? x
                : kind == Reduce::product
                    ? b.step(Function::add, one, b.step(Function::mul, x, small))
                    : b.step(Function::add, x, b.step(Function::mul, y, y));
  Sizes strides(shape.size(), 0);
  std::int64_t below = 1;
  const auto first = static_cast<std::size_t>(columns ? reduced : 0);
  const std::size_t last =
      columns ? shape.size() : shape.size() - static_cast<std::size_t>(reduced);
  for (std::size_t d = last; d-- > first;) {
    strides[d] = below;
    below *= shape[d];
  }
  b.store(r, dtype == DType::f64 ? DType::f64 : DType::f32, strides, 0, accumulate);
  b.loop().reduction = true;
  b.loop().reduce = kind;
  b.loop().reduced = reduced;
  b.loop().columns = columns;
  std::string sizes;
  for (const std::int64_t n : shape) sizes += concat(sizes.empty() ? "" : ",", n);
  LoopCase c =
      make_case(concat(ir::name_of(kind), columns ? " columns " : " rows ", name_of(dtype), "[",
                       sizes, "]", special ? " special" : "", accumulate ? " added" : ""),
                b.loop());
  c.special = special;
  out.push_back(std::move(c));
}

// Adds maps with operands that are contiguous along another dimension than the result, and are too
// large for the caches.
void add_turned(std::vector<LoopCase>& out) {
  struct {
    Sizes shape, turned, result;
  } const layouts[] = {
      {{3, 300, 260}, {78000, 1, 300}, {78000, 260, 1}},
      {{2, 501, 217}, {108717, 1, 501}, {108717, 217, 1}},
      {{300, 550}, {550, 1}, {1, 300}},  // the result is the other way
      {{20, 33, 250}, {1, 5000, 20}, {8250, 250, 1}},
  };
  for (const auto& l : layouts) {
    for (const DType dtype : {DType::bf16, DType::f32, DType::i64}) {
      for (const bool accumulate : {false, true}) {
        if (dtype != DType::bf16 && accumulate) continue;
        LoopBuilder b(l.shape);
        const int rank = static_cast<int>(l.shape.size());
        const int x = b.memory(dtype, l.turned), y = b.memory(DType::f32, l.result);
        Sizes row(l.shape.size(), 0);
        row.back() = 1;
        const int z = b.memory(DType::f32, row);
        const int place = b.leaf(Pointwise::Leaf::Kind::iota, 0.0, rank - 1);
        const int r =
            b.step(Function::add, b.step(Function::mul, x, y), b.step(Function::add, z, place));
        b.store(r, dtype == DType::i64 ? DType::f32 : dtype, l.result, 0, accumulate);
        out.push_back(make_case(
            concat(name_of(dtype), " turned, rank ", rank, accumulate ? " added" : ""), b.loop()));
      }
    }
  }
  // Two turned operands of 8 bytes are read from tiles of half the side; five from memory.
  for (const int count : {2, 5}) {
    LoopBuilder b({250, 200});
    for (int i = 0; i < count; ++i) b.memory(DType::f64, {1, 250});
    int r = 0;
    for (int i = 1; i < count; ++i) r = b.step(Function::add, r, i);
    b.store(r, DType::f64, {200, 1});
    out.push_back(make_case(concat(count, " turned operands"), b.loop()));
  }
}

// Adds reductions whose operands are contiguous along kept dimensions where rows are reduced, and
// the reverse.
void add_turned_reductions(std::vector<LoopCase>& out) {
  for (const Reduce kind : {Reduce::sum, Reduce::max, Reduce::lse}) {
    for (const bool columns : {false, true}) {
      LoopBuilder b(columns ? Sizes{130, 3, 300} : Sizes{130, 300, 3});
      const Sizes strides = columns ? Sizes{1, 39000, 130} : Sizes{1, 130, 39000};
      const int x = b.memory(DType::f32, strides);
      const int place = b.leaf(Pointwise::Leaf::Kind::iota, 0.0, 1);
      b.store(b.step(Function::add, x, place), DType::f32,
              columns ? Sizes{0, 300, 1} : Sizes{1, 0, 0});
      b.loop().reduction = true;
      b.loop().reduce = kind;
      b.loop().reduced = columns ? 1 : 2;
      b.loop().columns = columns;
      out.push_back(make_case(
          concat(ir::name_of(kind), columns ? " turned columns" : " turned rows"), b.loop()));
    }
    // A few rows of many columns.
    add_reduction(kind, DType::bf16, true, {2, 5000}, 1, out);
    add_reduction(kind, DType::f32, true, {16, 3001}, 1, out, true);
  }
}

// Adds products of rows and of columns: none, one, a few, and in parts.
void add_products(std::vector<LoopCase>& out) {
  for (const DType dtype : {DType::f32, DType::bf16, DType::f64}) {
    for (const std::int64_t length : {0, 1, 7, 70}) {
      add_reduction(Reduce::product, dtype, false, {37, length}, 1, out);
      add_reduction(Reduce::product, dtype, true, {length, 37}, 1, out);
    }
  }
  add_reduction(Reduce::product, DType::f64, false, {2, 9000}, 1, out);
  add_reduction(Reduce::product, DType::f64, true, {9000, 3}, 1, out);
}

}  // namespace

std::vector<LoopCase> function_cases() {
  std::vector<LoopCase> out;
  for (int f = 0; f <= static_cast<int>(Function::select); ++f) {
    const ir::FunctionInfo& info = ir::info_of(static_cast<Function>(f));
    if (info.kind == FunctionKind::logical) {
      add_function(info, DType::i8, out);
    } else {
      for (const DType dtype : kFloats) add_function(info, dtype, out);
      if (info.kind == FunctionKind::real) continue;
      for (const DType dtype : {DType::i32, DType::i64}) add_function(info, dtype, out);
    }
  }
  for (const Function drawn : {Function::random, Function::uniform}) {
    LoopBuilder b({3, 344});
    const int key0 = b.memory(DType::i64), key1 = b.memory(DType::i64),
              counter = b.memory(DType::i64);
    b.store(b.step(drawn, key0, key1, counter), DType::f64);
    out.push_back(make_case(std::string(ir::info_of(drawn).name), b.loop()));
  }
  for (const double exponent : {5.0, 7.0, -1.0, -5.0, -7.0, 1.5}) {
    for (const DType dtype : {DType::f32, DType::f64}) {
      LoopBuilder b({3, 344});
      const int x = b.memory(dtype), n = b.leaf(Pointwise::Leaf::Kind::constant, exponent);
      b.store(b.step(Function::pow, x, n), dtype);
      LoopCase c = make_case(concat("pow ", exponent, "/", name_of(dtype)), b.loop());
      c.special = true;
      out.push_back(std::move(c));
    }
  }
  for (const DType from : kAll) {
    for (const DType to : kAll) {
      LoopBuilder b({3, 344});
      b.store(b.memory(from), to);
      out.push_back(make_case(concat("cast ", name_of(from), " to ", name_of(to)), b.loop()));
      out.back().special = !is_index(to) && to != DType::i8;
    }
  }
  for (const DType rounded : {DType::bf16, DType::f16, DType::i32}) {
    for (const DType dtype : {DType::f32, DType::f64}) {
      LoopBuilder b({1000});
      const int x = b.memory(dtype);
      b.store(b.round(rounded, b.step(Function::add, x, x)), dtype);
      out.push_back(
          make_case(concat("round ", name_of(dtype), " to ", name_of(rounded)), b.loop()));
    }
  }
  return out;
}

std::vector<LoopCase> layout_cases() {
  std::vector<LoopCase> out;
  const Sizes shape = {64, 96};
  const Layout layouts[] = {
      {"contiguous", {96, 1}, 0},   {"beside", {96, 1}, 1},          {"padded", {104, 1}, 8},
      {"oddly padded", {97, 1}, 0}, {"every other", {192, 2}, 0},    {"transposed", {1, 64}, 0},
      {"rows repeated", {0, 1}, 0}, {"columns repeated", {1, 0}, 0}, {"one number", {0, 0}, 3}};
  for (const DType dtype : {DType::bf16, DType::f32, DType::f64, DType::i8}) {
    for (const Layout& in : layouts) {
      for (int to = 0; to < 6; ++to) {
        if (to > 0 && dtype != DType::bf16) continue;
        const Layout& result = layouts[to];
        LoopBuilder b(shape);
        const int x = b.memory(dtype, in.strides, in.offset), y = b.memory(DType::f32);
        const int r = b.step(Function::mul, x, y);
        b.store(r, dtype == DType::i8 ? DType::f32 : dtype, result.strides, result.offset);
        out.push_back(
            make_case(concat(name_of(dtype), " ", in.name, " to ", result.name), b.loop()));
      }
    }
  }
  // Vectors across rows of odd length, with operands that repeat along them.
  for (const Sizes& odd : {Sizes{16, 37}, Sizes{8, 3, 5}}) {
    LoopBuilder b(odd);
    Sizes along(odd.size(), 0);
    along[0] = 1;
    const int x = b.memory(DType::bf16), row = b.memory(DType::f32, along);
    const int place = b.leaf(Pointwise::Leaf::Kind::iota, 0.0, static_cast<int>(odd.size()) - 1);
    const int r = b.step(Function::add, b.step(Function::mul, x, row), place);
    b.store(r, DType::bf16, ir::contiguous_strides(odd), 0, true);
    out.push_back(make_case(concat("odd rows of rank ", odd.size()), b.loop()));
  }
  // Rows of odd length with gaps behind them, which vector items read and must not change.
  for (const bool accumulate : {false, true}) {
    for (const Sizes& odd : {Sizes{16, 37}, Sizes{3, 5, 41}}) {
      LoopBuilder b(odd);
      Sizes apart(odd.size(), 0), along(odd.size(), 0);
      apart.back() = along[0] = 1;
      for (std::size_t d = odd.size() - 1, below = 48; d-- > 0;
           below *= static_cast<std::size_t>(odd[d]))
        apart[d] = static_cast<std::int64_t>(below);
      const int x = b.memory(DType::f32, apart), row = b.memory(DType::f32, along);
      const int place = b.leaf(Pointwise::Leaf::Kind::iota, 0.0, static_cast<int>(odd.size()) - 1);
      const int r = b.step(Function::add, b.step(Function::mul, x, row), place);
      b.store(r, DType::bf16, apart, 8, accumulate);
      out.push_back(
          make_case(concat("gaps behind odd rows of rank ", odd.size(), accumulate ? " added" : ""),
                    b.loop()));
    }
  }
  for (const Sizes& size : {Sizes{}, Sizes{0}, Sizes{4, 0}, Sizes{1}, Sizes{7}, Sizes{1 << 17},
                            Sizes{3, 5, 7, 8}, Sizes{2, 300, 256}}) {
    for (const bool accumulate : {false, true}) {
      for (const DType dtype : {DType::f32, DType::bf16, DType::i64}) {
        LoopBuilder b(size);
        const int x = b.memory(dtype), two = b.leaf(Pointwise::Leaf::Kind::constant, 2.5);
        const int first = b.leaf(Pointwise::Leaf::Kind::first);
        const int place = size.empty() ? two : b.leaf(Pointwise::Leaf::Kind::iota, 0.0, 0);
        const int inner = size.empty() ? two
                                       : b.leaf(Pointwise::Leaf::Kind::iota, 0.0,
                                                static_cast<int>(size.size()) - 1);
        const int r = b.step(Function::add, b.step(Function::mul, x, two),
                             b.step(Function::sub, place, b.step(Function::add, first, inner)));
        b.store(r, dtype, ir::contiguous_strides(size), 0, accumulate);
        out.push_back(
            make_case(concat(name_of(dtype), " of rank ", size.size(), accumulate ? " added" : ""),
                      b.loop()));
      }
    }
  }
  add_turned(out);
  // This loop is as large as the grid of the widest elementwise kernels.
  LoopBuilder b({2048, 4096});
  b.store(b.memory(DType::bf16), DType::bf16);
  out.push_back(make_case("a copy of 16 MiB", b.loop()));
  // Addresses are aligned to 16 bytes, or to one element only.
  for (const std::int64_t alignment : {16, 8, 2}) {
    LoopBuilder loop({40, 64});
    loop.store(loop.memory(DType::bf16), DType::bf16);
    const std::int64_t alignments[] = {alignment, 16};
    out.push_back(make_case(concat("aligned to ", alignment), loop.loop(), alignments));
  }
  return out;
}

std::vector<LoopCase> reduction_cases(bool large) {
  std::vector<LoopCase> out;
  add_turned_reductions(out);
  add_products(out);
  for (const Reduce kind : {Reduce::sum, Reduce::max, Reduce::lse}) {
    for (const DType dtype : {DType::f32, DType::bf16, DType::f64}) {
      // Reduces both rows and columns.
      const auto add = [&](std::int64_t rows, std::int64_t length) {
        add_reduction(kind, dtype, false, {rows, length}, 1, out);
        add_reduction(kind, dtype, true, {length, rows}, 1, out);
      };
      for (const std::int64_t length : {0, 1, 7, 70, 768, 1023, 1032}) {
        add(1, length);
        if (dtype == DType::f32 || large) add(37, length);
      }
      add(0, 5);
      add(dtype == DType::f32 ? 2 : 1, 50257);
      if (kind == Reduce::sum && dtype == DType::f32) add(1, 300000);
      if (large && dtype != DType::f64 && (dtype == DType::f32 || kind == Reduce::sum)) {
        for (const Sizes& s : {Sizes{65536, 1}, Sizes{65536, 7}, Sizes{65536, 768},
                               Sizes{1000, 1023}, Sizes{300, 50257}, Sizes{70, 140000}})
          add(s[0], s[1]);
        add_reduction(kind, dtype, true, {65536, 768}, 1, out);
        add_reduction(kind, dtype, false, {1, 40000000}, 1, out);
      }
      add_reduction(kind, dtype, false, {37, 64}, 1, out, true);
      add_reduction(kind, dtype, true, {5, 640}, 1, out, true);
      add_reduction(kind, dtype, false, {6, 2, 3, 8}, 2, out, false, true);
      add_reduction(kind, dtype, true, {4, 50, 3, 24}, 2, out, false, true);
      add_reduction(kind, dtype, false, {20, 30}, 2, out);
      add_reduction(kind, dtype, true, {900, 33}, 1, out, false, true);
      add_reduction(kind, dtype, false, {2, 9000}, 1, out, false, true);
    }
  }
  return out;
}

std::vector<LoopCase> program_cases(std::span<const DType> dtypes) {
  std::vector<LoopCase> out;
  std::set<std::string> seen;
  for (const NamedProgram& p : programs()) {
    for (const DType dtype : dtypes) {
      for (const bool chunk : {false, true}) {
        CompileOptions options;
        options.sizes = p.sizes;
        options.threads = 1;
        options.chunk = chunk;
        options.memory_budget = chunk ? 1 : 0;
        const CompiledProgram compiled = compile(p.make(dtype), options);
        const ir::Program program = ir::lower(ir::parse(compiled.text()).graph, ir::CpuTarget(1));
        for (LoopCase& c :
             cases_of(concat(p.name, "/", name_of(dtype), chunk ? "/chunked" : ""), program)) {
          std::string text;
          for (const ir::GeneratedKernel& kernel : ir::generate(c.loop, c.alignments))
            text += kernel.entry + " ";
          if (seen.insert(text).second) out.push_back(std::move(c));
        }
      }
    }
  }
  return out;
}

}  // namespace logitless::test
