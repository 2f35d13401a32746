#include "compiler/epilogue_cases.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <random>

#include "compiler/epilogue_program.h"
#include "core/check.h"
#include "core/element.h"

namespace logitless::test {
namespace {

using ir::Function;
using ir::FunctionKind;

// Returns f32 values [N, V], one for each function of the product: of x = z, of a positive p and of
// operands along rows and columns.
std::vector<std::string> values_of_functions(EpilogueProgram& t, std::size_t first,
                                             std::size_t count) {
  const std::string x = "%z";
  const std::string p = t.add("add", {t.add("mul", {x, x}), t.constant(0.5)});
  const std::string r = t.row(DType::f32), c = t.column(DType::f32);
  const auto less = [&] { return t.add("lt", {x, r}); };
  std::vector<std::string> values;
  const auto value_of = [&](const ir::FunctionInfo& info) -> std::string {
    const std::string name(info.name);
    switch (info.kind) {
      case FunctionKind::compare:
        return t.cast(t.add(name, {x, r}), DType::f32);
      case FunctionKind::logical:
        return t.cast(
            info.operands == 1 ? t.add(name, {less()}) : t.add(name, {less(), t.add("gt", {x, c})}),
            DType::f32);
      case FunctionKind::choose:
        return t.add(name, {less(), x, p});
      default:
        break;
    }
    switch (info.function) {
      case Function::log:
      case Function::log1p:
      case Function::sqrt:
      case Function::rsqrt:
      case Function::lgamma:
      case Function::digamma:
      case Function::trigamma:
        return t.add(name, {p});
      case Function::div:
      case Function::fmod:
        return t.add(name, {x, p});
      case Function::pow:
        return t.add(name, {p, c});
      default:
        return info.operands == 1 ? t.add(name, {x}) : t.add(name, {x, r});
    }
  };
  constexpr std::size_t kFunctions = static_cast<std::size_t>(Function::random);
  constexpr DType kCasts[] = {DType::i8, DType::i32, DType::i64};
  for (std::size_t f = first; f < first + count && f < kFunctions + std::size(kCasts); ++f) {
    values.push_back(f < kFunctions ? value_of(ir::info_of(static_cast<Function>(f)))
                                    : t.cast(t.cast(x, kCasts[f - kFunctions]), DType::f32));
  }
  return values;
}

// Adds a result whose columns 8 i to 8 i + 7 have value i mod 8.
void add_by_columns(EpilogueProgram& t, const std::string& which,
                    const std::vector<std::string>& values) {
  std::string chosen = values.at(0);
  for (std::size_t i = 1; i < values.size(); ++i) {
    const std::string is = t.add("eq", {which, t.constant(static_cast<double>(i), DType::i32)});
    chosen = t.add("select", {is, values[i], chosen});
  }
  t.result(chosen);
}

// Each function and each cast in two results of a program.
void add_functions(DType dtype, std::vector<EpilogueCase>& list) {
  constexpr std::size_t kValues = 8, kResults = 2;
  for (std::size_t first = 0;; first += kResults * kValues) {
    EpilogueProgram t(dtype);
    const std::string which = t.column(DType::i32, "which");
    std::size_t results = 0;
    for (; results < kResults; ++results) {
      const auto values = values_of_functions(t, first + results * kValues, kValues);
      if (values.empty()) break;
      add_by_columns(t, which, values);
    }
    if (results == 0) return;
    list.push_back({concat("functions_", first), t.text()});
  }
}

// Operands of each dtype: elements, rows, columns and a number; sums of each kind behind them.
void add_operands(DType dtype, std::vector<EpilogueCase>& list) {
  const std::pair<const char*, std::vector<DType>> kinds[] = {
      {"floats", {DType::f32, DType::bf16, DType::f16}},
      {"integers", {DType::i32, DType::i64, DType::i8}}};
  for (const auto& [name, dtypes] : kinds) {
    EpilogueProgram t(dtype);
    std::string sum = "%z";
    const auto add = [&](DType of, const std::string& v) {
      sum = t.add("add", {sum, of == DType::f32 ? v : t.cast(v, DType::f32)});
    };
    for (const DType of : dtypes) {
      add(of, t.element(of));
      add(of, t.row(of));
      add(of, t.column(of));
      add(of, t.one(of));
    }
    t.result(sum);
    t.result(t.reduced("sum", sum));
    t.result(t.reduced("max", sum));
    t.result(t.reduced("lse", sum));
    list.push_back({concat("operands_", name), t.text()});
  }
}

// Sums of each kind after one operand of each class, and picks of the product.
void add_sums(DType dtype, std::vector<EpilogueCase>& list) {
  EpilogueProgram t(dtype);
  const std::string operands[] = {t.row(DType::bf16), t.column(DType::f16), t.element(DType::bf16)};
  const char* const kinds[] = {"lse", "max", "sum"};
  for (std::size_t i = 0; i < std::size(kinds); ++i)
    t.result(t.reduced(kinds[i], t.add("mul", {"%z", t.cast(operands[i], DType::f32)})));
  const std::string lse = t.wide_lse("%z"), pick = t.pick(DType::i32);
  t.result(t.pick(DType::i64));
  // values of rows behind the sums and before them
  const std::string scale = t.add("exp", {t.parameter(DType::f32, "[N]")});
  t.result(t.reduced("sum", t.add("mul", {"%z", t.along(scale, 0)})));
  t.result(t.add("sub", {t.cast(lse, DType::f32, "[N]"), pick}));
  list.push_back({"sums", t.text()});
}

// Rows whose elements are masked: one element, all or none are left.
void add_masked(DType dtype, std::vector<EpilogueCase>& list) {
  EpilogueProgram t(dtype);
  const std::string left = t.add("lt", {t.iota(1, DType::i32), t.row(DType::i32)});
  const std::string z = t.add("select", {left, "%z", t.constant(-HUGE_VAL)});
  t.result(t.reduced("lse", z));
  t.result(t.reduced("max", z));
  t.result(t.reduced("sum", t.add("exp", {z})));
  const std::string below = t.add("le", {t.iota(0, DType::i64), t.iota(1, DType::i64)});
  t.result(t.cast(t.add("select", {below, "%z", t.constant(0.0)}), dtype));
  list.push_back({"masked", t.text()});
}

// Views with odd strides and offsets; 16-bit results and results inside of larger ones.
void add_layouts(DType dtype, std::vector<EpilogueCase>& list) {
  EpilogueProgram t(dtype, EpilogueProgram::Operands::slices);
  const std::string odd = t.slice(DType::f32, "[N, V + 3]", "0, 1", "N, V + 1");
  const std::string narrow =
      t.cast(t.slice(DType::bf16, "[N, V + 5]", "0, 3", "N, V + 3"), DType::f32);
  const std::string low = t.slice(DType::f32, "[N + 2, V]", "1, 0", "N + 1, V");
  const std::string second = t.slice(DType::f32, "[N, 3]", "0, 1", "N, 2");
  const std::string of_three = t.along(t.statement("reshape " + second + " : f32[N]"), 0);
  const std::string behind = t.along(t.slice(DType::f16, "[V + 1]", "1", "V + 1"), 1, DType::f16);
  const std::string x = t.add("add", {t.add("mul", {"%z", odd}), t.add("mul", {narrow, low})});
  const std::string y = t.add("add", {t.add("mul", {x, of_three}), t.cast(behind, DType::f32)});
  t.result(t.cast(y, dtype));
  t.result(x);
  list.push_back({"layouts", t.text()});

  EpilogueProgram packed(dtype, EpilogueProgram::Operands::depth_first);
  const std::string e = packed.cast(packed.add("tanh", {"%z"}), dtype);
  const std::string beside = packed.parameter(dtype, "[N, 8]");
  packed.result(packed.statement(concat("concat ", beside, ", ", e, " axis(1)")));
  packed.result(packed.reduced("max", "%z"));
  list.push_back({"inside", packed.text()});
}

// Rows in two dimensions, arithmetic in 16 bits, two products.
void add_products(DType dtype, std::vector<EpilogueCase>& list) {
  const std::string d(name_of(dtype));
  list.push_back({"rows_in_two_dimensions",
                  "graph g(%h: " + d + "[N, 2, D], %w: " + d +
                      "[V, D], %c: f32[V], %r: f32[N, 2]) {\n" +
                      "  %z = dot %h, %w contract(2; 1) : f32[N, 2, V]\n"
                      "  %b = broadcast %c dims(2) : f32[N, 2, V]\n  %e = add %z, %b\n"
                      "  %p = broadcast %r dims(0, 1) : f32[N, 2, V]\n"
                      "  %f = mul %e, %p\n  %s = reduce_lse %f dims(2)\n  %g = cast %e : " +
                      d + "[N, 2, V]\n  return s: %s, g: %g\n}\n"});
  EpilogueProgram t(dtype, EpilogueProgram::Operands::rows, dtype);
  const std::string x = t.add("mul", {"%z", t.element(dtype)});
  const std::string y = t.add("sub", {t.add("tanh", {x}), t.column(dtype)});
  const DType other = dtype == DType::bf16 ? DType::f16 : DType::bf16;
  t.result(y);
  t.result(t.reduced("sum", t.cast(t.cast(t.cast(y, DType::f32), other), DType::f32)));
  list.push_back({"narrow", t.text(), Pair::none, true});
  const std::string pair =
      "graph g(%h: " + d + "[N, D], %w: " + d + "[V, D], %u: " + d +
      "[V, D], %x: bf16[N, V + 1], %c: f16[V], %r: i64[N]) {\n"
      "  %a = dot %h, %w contract(1; 1) : f32[N, V]\n"
      "  %b = dot %h, %u contract(1; 1) : f32[N, V]\n"
      "  %o = slice %x begin(0, 1) end(N, V + 1)\n"
      "  %of = cast %o : f32[N, V]\n  %m = mul %a, %b\n  %e = add %m, %of\n"
      "  %cb = broadcast %c dims(1) : f16[N, V]\n  %cf = cast %cb : f32[N, V]\n"
      "  %f = mul %e, %cf\n  %l = reduce_lse %f dims(1)\n"
      "  %i = iota axis(1) : i64[N, V]\n  %rb = broadcast %r dims(0) : i64[N, V]\n"
      "  %q = eq %i, %rb\n  %v = select %q, %a, %f\n"
      "  return e: %e, l: %l, v: %v\n}\n";
  list.push_back({"two_products", pair, Pair::beside});
}

// Writes a chain of functions of the product and of random operands, with sums of some of its
// values.
class RandomChain {
  template <typename T, std::size_t N>
  T one_of(const T (&list)[N]) {
    return list[below(N)];
  }
  std::size_t below(std::size_t n) { return rng_() % n; }

 public:
  RandomChain(DType dtype, std::uint64_t seed) : dtype_(dtype), rng_(seed), t_(dtype) {}

  std::string text() && {
    std::string v = "%z";
    for (int step = 0; step < 8; ++step) {
      v = next(v);
      if (step % 3 == 2) t_.result(t_.reduced(one_of(kSums), v));
    }
    t_.result(below(2) == 0 ? v : t_.cast(v, dtype_));
    return t_.text();
  }

 private:
  static constexpr const char* kSums[] = {"sum", "max", "lse"};
  static constexpr const char* kOfOne[] = {"tanh", "sigmoid", "erf", "sin", "atan", "neg", "abs"};
  static constexpr const char* kOfTwo[] = {"add", "sub", "mul", "max", "min"};
  static constexpr DType kDtypes[] = {DType::f32, DType::bf16, DType::f16,
                                      DType::i32, DType::i64,  DType::i8};
  const DType dtype_;
  std::mt19937_64 rng_;
  EpilogueProgram t_;

  std::string operand() {
    const DType dtype = one_of(kDtypes);
    const std::size_t kind = below(5);
    const std::string v = kind == 0   ? t_.row(dtype)
                          : kind == 1 ? t_.column(dtype)
                          : kind == 2 ? t_.one(dtype)
                          : kind == 3 ? t_.element(dtype)
                                      : t_.slice(dtype, "[N, V + 1]", "0, 1", "N, V + 1");
    return dtype == DType::f32 ? v : t_.cast(v, DType::f32);
  }
  std::string next(const std::string& v) {
    if (below(3) == 0) return t_.add(one_of(kOfOne), {v});
    if (below(4) > 0) return t_.add(one_of(kOfTwo), {v, operand()});
    const std::string is = t_.add("lt", {t_.iota(1, DType::i64), t_.row(DType::i64)});
    return t_.add("select", {is, operand(), v});
  }
};

}  // namespace

std::vector<EpilogueCase> epilogue_cases(DType dtype) {
  std::vector<EpilogueCase> list;
  add_functions(dtype, list);
  add_operands(dtype, list);
  add_sums(dtype, list);
  add_masked(dtype, list);
  add_layouts(dtype, list);
  add_products(dtype, list);
  for (const std::uint64_t seed : {1, 2, 3})
    list.push_back({concat("random_", seed), RandomChain(dtype, seed).text()});
  return list;
}

ir::Tensors exact_inputs(const ir::Graph& graph, std::uint64_t seed) {
  std::mt19937_64 rng(seed);
  ir::Tensors inputs;
  for (const int id : graph.parameters()) {
    const ir::Node& n = graph.node(id);
    const DType dtype = n.results[0].dtype;
    const bool which = n.attributes->name.starts_with("which");
    ir::Tensor t;
    std::size_t count = 1;
    for (const Dim& dim : n.results[0].shape) {
      t.shape.push_back(dim.value());
      count *= static_cast<std::size_t>(dim.value());
    }
    for (std::size_t i = 0; i < count; ++i) {
      const std::uint64_t bits = rng();
      t.data.push_back(which                ? static_cast<double>(i / 8 % 8)
                       : is_index(dtype)    ? static_cast<double>(bits % 7)
                       : dtype == DType::i8 ? static_cast<double>(bits % 2)
                                            : (static_cast<double>(bits % 17) - 8.0) / 8.0);
    }
    inputs[n.attributes->name] = std::move(t);
  }
  return inputs;
}

void expect_near(const EpilogueCase& c, const ir::Graph& graph, const ir::Tensors& got,
                 const ir::Tensors& want) {
  for (const ir::Output& o : graph.outputs()) {
    const DType dtype = graph.type(o.value).dtype;
    const double tolerance = c.rounds               ? 0x1p-6
                             : dtype == DType::f16  ? 0x1p-10
                             : dtype == DType::bf16 ? 0x1p-7
                                                    : 1e-5;
    const std::vector<double>&x = got.at(o.name).data, &y = want.at(o.name).data;
    ASSERT_EQ(x.size(), y.size()) << o.name;
    double squares = 0.0;
    for (const double v : y) squares += std::isfinite(v) ? v * v : 0.0;
    const double usual = std::sqrt(squares / static_cast<double>(y.size()));
    EXPECT_GT(usual, 0.0) << o.name;
    int wrong = 0;
    for (std::size_t i = 0; i < y.size(); ++i) {
      const bool near = std::isfinite(y[i])
                            ? std::abs(x[i] - y[i]) <= tolerance * (usual + std::abs(y[i]))
                            : x[i] == y[i];
      if (!near && ++wrong <= 3)
        ADD_FAILURE() << o.name << '[' << i << "]: " << x[i] << ", not " << y[i];
    }
    EXPECT_EQ(wrong, 0) << o.name << ", of " << y.size();
  }
}

}  // namespace logitless::test
