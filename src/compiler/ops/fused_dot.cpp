// fused_dot: a dot with an epilogue on its sums before they are stored. Made by fuse_epilogues.
#include <cmath>
#include <numbers>

#include "compiler/ir/derivation.h"
#include "compiler/ir/evaluation.h"
#include "compiler/ir/typing.h"
#include "compiler/ops/contraction.h"
#include "compiler/ops/families.h"
#include "compiler/ops/text_key.h"
#include "compiler/plan/lowering.h"
#include "core/check.h"

namespace logitless::ir {

std::string text_of(const Epilogue& e) {
  std::string text;
  const auto add = [&](bool has, const char* name) {
    if (has) text += concat(text.empty() ? "" : ", ", name);
  };
  add(e.bias, "bias");
  add(e.residual, "residual");
  add(e.gelu, "gelu");
  add(e.gelu_gradient, "gelu gradient");
  return text;
}

namespace {

std::vector<Type> fused_dot_type(const Typing& r) {
  const Epilogue& e = r.a.epilogue;
  r.count(std::size_t{2} + (e.bias ? 1 : 0) + (e.residual || e.gelu_gradient ? 1 : 0));
  const std::vector<const Type*> factors(r.operands.begin(), r.operands.begin() + 2);
  const Type value = dot_type({r.what, factors, r.a})[0];
  r.expect(r.a.batch_a.empty() && value.rank() > 0, "an epilogue of a batch of products");
  if (e.bias) {
    const Type bias{value.dtype, {value.shape.back()}};
    r.expect(r.in(2) == bias, "bias is ", r.in(2), ", expected ", bias);
  }
  r.expect(!e.residual || *r.operands.back() == value, "residual is ", *r.operands.back(),
           ", expected ", value);
  r.expect(!e.gelu || !e.residual, "a residual beside gelu");
  r.expect(!e.gelu_gradient || (!e.bias && !e.residual && !e.gelu),
           "another epilogue beside the gradient of gelu");
  r.expect(!e.gelu_gradient || *r.operands.back() == value, "x is ", *r.operands.back(),
           ", expected ", value);
  return std::vector<Type>(e.gelu ? 2 : 1, value);
}

// --- text

template <auto kMember>
constexpr TextKey flag(std::string_view name) {
  return {
      name, [](TextReader& in, Attributes& a) { read_text(in, a.epilogue.*kMember); },
      [](const Attributes& a) { return a.epilogue.*kMember ? std::string("1") : std::string(); },
      false};
}
constexpr TextKey kKeys[] = {pair_key<&Attributes::contract_a, &Attributes::contract_b>("contract"),
                             flag<&Epilogue::bias>("bias"), flag<&Epilogue::residual>("residual"),
                             flag<&Epilogue::gelu>("gelu"),
                             flag<&Epilogue::gelu_gradient>("gelu_gradient")};

// --- float64

const double kScale = std::sqrt(2.0 * std::numbers::inv_pi);
constexpr double kCube = 0.044715;

double gelu(double x) { return 0.5 * x * (1.0 + std::tanh(kScale * (x + kCube * x * x * x))); }
double gelu_derivative(double x) {
  const double t = std::tanh(kScale * (x + kCube * x * x * x));
  return 0.5 * (1.0 + t) + 0.5 * x * (1.0 - t * t) * kScale * (1.0 + 3.0 * kCube * x * x);
}

std::vector<Tensor> fused_dot_value(const Evaluation& e) {
  const Epilogue& epilogue = e.node.attributes->epilogue;
  std::vector<Tensor> results = dot_value(e);
  std::vector<double>& value = results[0].data;
  const auto columns = static_cast<std::size_t>(results[0].shape.back());
  for (std::size_t i = 0; i < value.size(); ++i) {
    if (epilogue.bias) value[i] += e.in(2).data[i % columns];
    if (epilogue.residual) value[i] += e.operands.back()->data[i];
    if (epilogue.gelu_gradient) value[i] *= gelu_derivative(e.operands.back()->data[i]);
  }
  if (epilogue.gelu) {
    results.push_back(results[0]);
    for (double& x : results[0].data) x = gelu(x);
  }
  return results;
}

// --- instruction

// Returns the row stride in elements of a view that cuBLASLt's epilogues accept, or 0. Its rows
// must begin at multiples of 16 bytes with a constant stride.
std::int64_t row_step(const View& v) {
  constexpr std::int64_t kMultiple = 8;  // elements of 16 bits
  View rows = v;
  rows.shape.pop_back();
  rows.strides.pop_back();
  merge_dims(rows.shape, {&rows.strides}, std::vector<bool>(rows.shape.size(), false));
  const std::int64_t step = rows.shape.empty() ? v.shape.back() : rows.strides[0];
  const bool fits = rows.shape.size() <= 1 && v.strides.back() == 1 && step >= v.shape.back() &&
                    step % kMultiple == 0 && v.offset % kMultiple == 0;
  return fits ? step : 0;
}

// Row strides in elements: of the result, of the residual and of aux.
struct Steps {
  std::int64_t c = 0, residual = 0, aux = 0;
};

// Returns the product at one index of its batch dimensions.
Gemm at_outer(const Gemm& gemm, std::int64_t index, const Steps& steps) {
  if (gemm.outer.empty()) return gemm;
  Gemm one = gemm;
  const auto shift = [&](View& v) {
    std::int64_t rest = index;
    for (std::size_t d = gemm.outer.size(); d-- > 0;) {
      v.offset += rest % gemm.outer[d] * v.strides[d];
      rest /= gemm.outer[d];
    }
    v.strides.erase(v.strides.begin(),
                    v.strides.begin() + static_cast<std::ptrdiff_t>(gemm.outer.size()));
  };
  shift(one.a);
  shift(one.b);
  shift(one.c);
  one.outer.clear();
  const std::int64_t row = (one.c.offset - gemm.c.offset) / steps.c;
  one.residual.offset += row * steps.residual;
  one.aux.offset += row * steps.aux;
  return one;
}

bool fused_dot_place(Lowering& l, Value v, const Destination& to) {
  return row_step(to.view) > 0 && to.kind == Destination::Kind::write && l.write_there(v, to);
}

void fused_dot_emit(Lowering& l, int id) {
  const Node& n = l.node(id);
  Gemm gemm = dot_gemm(l, id);
  gemm.epilogue = n.attributes->epilogue;
  if (gemm.epilogue.bias) gemm.bias = l.contiguous(n.operands[2]);
  Steps steps;
  steps.c = row_step(l.memory_of({id, 0}));
  if (steps.c == 0)
    throw Unsupported(concat("fused_dot: the result is ", text_of(n.results[0]),
                             ", expected rows of a multiple of 8 elements"));
  const std::int64_t m_stride = gemm.c.strides[gemm.outer.size()];  // 0 for a single row
  // Returns the view with the product's strides over (m, n).
  const auto beside = [&](View view, std::int64_t& step) {
    step = row_step(view);
    view.strides = {m_stride > 0 ? m_stride / steps.c * step : step, 1};
    return view;
  };
  const auto read = [&](std::int64_t& step, const char* name) {
    View view = l.memory_of(n.operands.back());
    if (row_step(view) == 0) view = l.copied(view, concat(l.name_of_node(id), " ", name));
    return beside(std::move(view), step);
  };
  const Epilogue& epilogue = gemm.epilogue;
  if (epilogue.residual) gemm.residual = read(steps.residual, "residual");
  if (epilogue.gelu_gradient) gemm.aux = read(steps.aux, "x");
  if (epilogue.gelu) gemm.aux = beside(l.result_of({id, 1}), steps.aux);
  std::int64_t rounds = 1;
  for (const std::int64_t size : gemm.outer) rounds *= size;
  for (std::int64_t r = 0; r < rounds; ++r) l.push(id, at_outer(gemm, r, steps));
}

constexpr Operation kOperations[] = {{
    .op = Op::fused_dot,
    .name = "fused_dot",
    .sums = true,
    .infer = fused_dot_type,
    .keys = kKeys,
    .evaluate = fused_dot_value,
    .gradient = compiled_gradient,
    .place = fused_dot_place,
    .emit = fused_dot_emit,
}};

}  // namespace

std::span<const Operation> fused_dot_operations() { return kOperations; }

}  // namespace logitless::ir
