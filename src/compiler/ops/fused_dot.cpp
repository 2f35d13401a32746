// fused_dot: a dot and what its product adds to the sums before it stores them. Made by
// fuse_epilogues.
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
  return concat(e.bias ? "bias" : "", e.bias && e.residual ? ", " : "",
                e.residual ? "residual" : "");
}

namespace {

std::vector<Type> fused_dot_type(const Typing& r) {
  const Epilogue& e = r.a.epilogue;
  r.count(std::size_t{2} + (e.bias ? 1 : 0) + (e.residual ? 1 : 0));
  const std::vector<const Type*> factors(r.operands.begin(), r.operands.begin() + 2);
  const Type value = dot_type({r.what, factors, r.a})[0];
  r.expect(r.a.batch_a.empty() && value.rank() > 0, "an epilogue of a batch of products");
  if (e.bias) {
    const Type bias{value.dtype, {value.shape.back()}};
    r.expect(r.in(2) == bias, "bias is ", r.in(2), ", expected ", bias);
  }
  r.expect(!e.residual || *r.operands.back() == value, "residual is ", *r.operands.back(),
           ", expected ", value);
  return {value};
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
                             flag<&Epilogue::bias>("bias"), flag<&Epilogue::residual>("residual")};

// --- float64

std::vector<Tensor> fused_dot_value(const Evaluation& e) {
  const Epilogue& epilogue = e.node.attributes->epilogue;
  std::vector<Tensor> results = dot_value(e);
  std::vector<double>& value = results[0].data;
  const auto columns = static_cast<std::size_t>(results[0].shape.back());
  for (std::size_t i = 0; i < value.size(); ++i) {
    if (epilogue.bias) value[i] += e.in(2).data[i % columns];
    if (epilogue.residual) value[i] += e.operands.back()->data[i];
  }
  return results;
}

// --- instruction

// Elements from row to row of a view whose rows begin at multiples of 16 bytes, equally far apart:
// what cuBLASLt's epilogues take; 0 of another.
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

// The product at one index of its outer dimensions. Rows of the residual are r_step apart where
// those of the result are c_step.
Gemm at_outer(const Gemm& gemm, std::int64_t index, std::int64_t c_step, std::int64_t r_step) {
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
  one.residual.offset += (one.c.offset - gemm.c.offset) / c_step * r_step;
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
  const std::int64_t c_step = row_step(l.memory_of({id, 0}));
  if (c_step == 0)
    throw Unsupported(concat("fused_dot: the result is ", text_of(n.results[0]),
                             ", expected rows of a multiple of 8 elements"));
  std::int64_t r_step = 0;
  if (gemm.epilogue.residual) {
    View view = l.memory_of(n.operands.back());
    if (row_step(view) == 0) view = l.copied(view, l.name_of_node(id) + " residual");
    r_step = row_step(view);
    const std::int64_t m_stride = gemm.c.strides[gemm.outer.size()];  // 0 of one row
    view.strides = {m_stride > 0 ? m_stride / c_step * r_step : r_step, 1};
    gemm.residual = view;
  }
  std::int64_t rounds = 1;
  for (const std::int64_t size : gemm.outer) rounds *= size;
  for (std::int64_t r = 0; r < rounds; ++r) l.push(id, at_outer(gemm, r, c_step, r_step));
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
