// attention and its gradient: softmax(z) v, where z is scale q k^T with a mask, a bias and a
// softcap. Operands are [batch, heads, length, dim]. Keys and values may have fewer heads, each
// shared by a group of query heads.
#include <cmath>
#include <cstdlib>

#include "compiler/analysis/cut.h"
#include "compiler/ir/derivation.h"
#include "compiler/ir/evaluation.h"
#include "compiler/ir/typing.h"
#include "compiler/ops/families.h"
#include "compiler/ops/text_key.h"
#include "compiler/plan/lowering.h"

namespace logitless::ir {

std::string text_of(const Scores& s) {
  std::string text;
  const auto part = [&](bool there, std::string_view name) {
    if (there) text += concat(text.empty() ? "" : " ", name);
  };
  part(s.causal, "causal");
  part(s.softcap != 0.0, "softcap");
  part(s.window != 0, "window");
  part(s.bias, "bias");
  part(s.segments, "segments");
  return text;
}

namespace {

using oracle::at;
using oracle::each;
using oracle::Index;
using oracle::offset;
using oracle::tensor_of;

// --- types

// Checks Scores and its operands, which begin at operand i.
void scores_types(const Typing& r, int i) {
  const Scores& s = r.a.scores;
  const Type &q = r.in(0), &k = r.in(1);
  r.expect(s.softcap >= 0.0 && std::isfinite(s.softcap), "softcap is ", s.softcap,
           ", expected a positive number, or 0 for none");
  r.expect(s.window >= 0, "window is ", s.window, ", expected a positive number, or 0 for none");
  if (s.bias) {
    const Type& bias = r.in(i++);
    bool fits = bias.rank() == 4 && bias.shape[3] == k.shape[2];
    for (std::size_t d = 0; fits && d < 3; ++d)
      fits = bias.shape[d] == q.shape[d] || bias.shape[d] == Dim(1);
    r.expect(fits && (bias.dtype == q.dtype || (bias.dtype == DType::f32 && q.dtype != DType::f64)),
             "bias is ", bias, ", expected ",
             Type{q.dtype, {q.shape[0], q.shape[1], q.shape[2], k.shape[2]}},
             ", f32 and any of the first three sizes 1 allowed");
  }
  if (s.segments) {
    const Type &queries = r.in(i), &keys = r.in(i + 1);
    r.index(i);
    r.expect(queries.shape == Shape{q.shape[0], q.shape[2]} &&
                 keys == Type{queries.dtype, {k.shape[0], k.shape[2]}},
             "segments are ", queries, " and ", keys, ", expected ",
             Type{queries.dtype, {q.shape[0], q.shape[2]}}, " and ",
             Type{queries.dtype, {k.shape[0], k.shape[2]}});
  }
}

// Checks q, k, v, and for the gradient out, lse and d_out; returns the type of lse.
Type lse_type(const Typing& r, std::size_t operands) {
  r.count(operands + r.a.scores.operands());
  const Type &q = r.in(0), &k = r.in(1);
  r.floating(0);
  r.expect(q.rank() == 4 && k.rank() == 4, "q is ", q, " and k is ", k,
           ", expected [batch, heads, length, dim]");
  r.expect(r.in(2) == k, "v is ", r.in(2), ", expected the type of k, ", k);
  r.expect(q.dtype == k.dtype && q.shape[0] == k.shape[0] && q.shape[3] == k.shape[3], "q is ", q,
           " but k is ", k);
  r.expect(!q.shape[1].is_constant() || !k.shape[1].is_constant() ||
               (k.shape[1].value() > 0 && q.shape[1].value() % k.shape[1].value() == 0),
           "the heads of q, ", q.shape[1].text(), ", are no multiple of those of k, ",
           k.shape[1].text());
  const Type lse{q.dtype == DType::f64 ? DType::f64 : DType::f32,
                 {q.shape[0], q.shape[1], q.shape[2]}};
  if (operands > 3) {
    r.expect(r.in(3) == q && r.in(5) == q, "out and d_out are ", r.in(3), " and ", r.in(5),
             ", expected the type of q");
    r.expect(r.in(4) == lse, "lse is ", r.in(4), ", expected ", lse);
  }
  scores_types(r, static_cast<int>(operands));
  return lse;
}
std::vector<Type> attention_types(const Typing& r) {
  const Type lse = lse_type(r, 3);
  return {r.in(0), lse};
}
std::vector<Type> gradient_types(const Typing& r) {
  lse_type(r, 6);
  return {r.in(0), r.in(1), r.in(2)};
}

constexpr TextKey kKeys[] = {
    scores_key<&Scores::causal, true>("causal"), key<&Attributes::number>("scale"),
    scores_key<&Scores::softcap>("softcap"),     scores_key<&Scores::window>("window"),
    scores_key<&Scores::bias>("bias"),           scores_key<&Scores::segments>("segments")};

// --- float64

// Returns the number of query heads for each head of keys and values.
std::int64_t group_of(const Tensor& q, const Tensor& k) {
  return q.shape[1] / std::max<std::int64_t>(k.shape[1], 1);
}

// The scores of an attention; the operands of Scores begin at operand `first`.
class ScoresValue {
 public:
  ScoresValue(const Evaluation& e, std::size_t first)
      : q_(e.in(0)), k_(e.in(1)), scale_(e.node.attributes->number), s_(e.node.attributes->scores) {
    if (s_.bias) bias_ = &e.in(first++);
    if (s_.segments) queries_ = &e.in(first), keys_ = &e.in(first + 1);
  }

  // Returns the score, or -inf if query t does not see key s. slope: derivative of the softcap.
  double at(const Index& row, std::int64_t s, double* slope = nullptr) const {
    if (!sees(row, s)) return -std::numeric_limits<double>::infinity();
    double z = 0.0;
    for (std::int64_t d = 0; d < q_.shape[3]; ++d)
      z += oracle::at(q_, {row[0], row[1], row[2], d}) *
           oracle::at(k_, {row[0], row[1] / group_of(q_, k_), s, d});
    z *= scale_;
    if (s_.softcap != 0.0) {
      const double t = std::tanh(z / s_.softcap);
      if (slope != nullptr) *slope = 1.0 - t * t;
      z = s_.softcap * t;
    }
    if (bias_ == nullptr) return z;
    Index place = {row[0], row[1], row[2], s};
    for (std::size_t d = 0; d < 3; ++d) place[d] = bias_->shape[d] == 1 ? 0 : place[d];
    return z + oracle::at(*bias_, place);
  }

 private:
  const Tensor &q_, &k_;
  double scale_;
  const Scores& s_;
  const Tensor *bias_ = nullptr, *queries_ = nullptr, *keys_ = nullptr;

  bool sees(const Index& row, std::int64_t s) const {
    const std::int64_t p = row[2] + k_.shape[2] - q_.shape[2];
    if (s_.causal && s > p) return false;
    if (s_.window > 0 && std::abs(p - s) >= s_.window) return false;
    return queries_ == nullptr ||
           oracle::at(*queries_, {row[0], row[2]}) == oracle::at(*keys_, {row[0], s});
  }
};

// Returns the probabilities [B, H, T, S] of the scores, and lse if it is not null.
Tensor probabilities(const ScoresValue& scores, const Tensor& q, const Tensor& k, Tensor* lse) {
  Tensor p{{q.shape[0], q.shape[1], q.shape[2], k.shape[2]}, {}};
  p.data.resize(static_cast<std::size_t>(oracle::count(p.shape)));
  const std::int64_t keys = k.shape[2];
  each({q.shape[0], q.shape[1], q.shape[2]}, [&](const Index& row) {
    std::vector<double> z(static_cast<std::size_t>(keys));
    double top = oracle::start(Reduce::max);
    for (std::int64_t s = 0; s < keys; ++s)
      top = oracle::merged(Reduce::max, top, z[static_cast<std::size_t>(s)] = scores.at(row, s));
    double total = 0.0;
    for (double& x : z) total += x = std::isinf(top) ? 0.0 : std::exp(x - top);
    for (std::int64_t s = 0; s < keys; ++s)
      at(p, {row[0], row[1], row[2], s}) =
          total > 0.0 || std::isnan(total) ? z[static_cast<std::size_t>(s)] / total : 0.0;
    if (lse != nullptr) at(*lse, row) = std::isinf(top) ? top : top + std::log(total);
  });
  return p;
}

std::vector<Tensor> attention_value(const Evaluation& e) {
  const Tensor &q = e.in(0), &k = e.in(1), &v = e.in(2);
  Tensor out = tensor_of(e.node.results[0]), lse = tensor_of(e.node.results[1]);
  const Tensor p = probabilities(ScoresValue(e, 3), q, k, &lse);
  const std::int64_t group = group_of(q, k);
  each(p.shape, [&](const Index& i) {
    const double weight = at(p, i);
    for (std::int64_t d = 0; d < q.shape[3]; ++d)
      at(out, {i[0], i[1], i[2], d}) += weight * at(v, {i[0], i[1] / group, i[3], d});
  });
  return {out, lse};
}

std::vector<Tensor> gradient_value(const Evaluation& e) {
  const Tensor &q = e.in(0), &k = e.in(1), &v = e.in(2), &out = e.in(3), &d_out = e.in(5);
  const double scale = e.node.attributes->number;
  Tensor dq = tensor_of(e.node.results[0]), dk = tensor_of(e.node.results[1]),
         dv = tensor_of(e.node.results[2]);
  const ScoresValue scores(e, 6);
  const Tensor p = probabilities(scores, q, k, nullptr);
  const std::int64_t group = group_of(q, k);
  const auto dim = static_cast<std::size_t>(q.shape[3]);
  each(p.shape, [&](const Index& i) {
    const double weight = at(p, i);
    const std::size_t iq = offset(q.shape, {i[0], i[1], i[2], 0});
    const std::size_t ik = offset(k.shape, {i[0], i[1] / group, i[3], 0});
    double dp = 0.0, row = 0.0;
    for (std::size_t d = 0; d < dim; ++d) {
      dp += d_out.data[iq + d] * v.data[ik + d];
      row += d_out.data[iq + d] * out.data[iq + d];
      dv.data[ik + d] += weight * d_out.data[iq + d];
    }
    double slope = 1.0;
    scores.at(i, i[3], &slope);
    const double dz = weight * (dp - row) * slope * scale;
    for (std::size_t d = 0; d < dim; ++d) {
      dq.data[iq + d] += dz * k.data[ik + d];
      dk.data[ik + d] += dz * q.data[iq + d];
    }
  });
  return {dq, dk, dv};
}

// --- gradient

std::vector<Value> attention_gradient(Derivation& d) {
  require(!d.results[1].valid(), "attention: lse has no gradient rule; use out alone");
  const Scores& scores = d.n.attributes->scores;
  require(!scores.bias || !d.wanted(3),
          "attention: bias has no gradient rule; take stop_gradient of it");
  Attributes same;
  same.scores = scores;
  same.number = d.n.attributes->number;
  std::vector<Value> operands = {d.x(0), d.x(1), d.x(2), d.y(0), d.y(1), d.dy};
  for (std::size_t i = 3; i < d.n.operands.size(); ++i) operands.push_back(d.x(i));
  const Value v = d.g.add(Op::attention_grad, std::move(operands), same);
  std::vector<Value> gradients = d.none();
  for (std::int32_t i = 0; i < 3; ++i) gradients[static_cast<std::size_t>(i)] = {v.node, i};
  return gradients;
}

// --- chunks: along the batch, or along groups of heads

std::int64_t group_of(const CutNode& c) {
  return c.shape(0)[1] / std::max<std::int64_t>(c.shape(1)[1], 1);
}

// Returns the number of operands before those of Scores.
std::size_t plain_operands(const CutNode& c) { return c.node.op == Op::attention_grad ? 6 : 3; }

// Returns the part of operand i of Scores that a cut of the queries' batch or heads reads.
Need scores_need(const CutNode& c, std::size_t i, const Split& s) {
  const bool bias = c.node.attributes->scores.bias && i == plain_operands(c);
  if (bias) return c.shape(i)[static_cast<std::size_t>(s.dim)] == 1 ? Need{} : part(s);
  return s.dim == 0 ? part(s) : Need{};
}
std::optional<Chunked> attention_cut(const CutNode& c, const Split& s) {
  if (s.count != 1 || s.dim > 1) return std::nullopt;
  Split kv = s;
  if (s.dim == 1) {
    if (s.factor % group_of(c) != 0) return std::nullopt;
    kv.factor = s.factor / group_of(c);
  }
  const bool gradient = c.node.op == Op::attention_grad;
  Chunked chunked;
  for (std::size_t i = 0; i < plain_operands(c); ++i)
    chunked.needs.push_back(part(i == 1 || i == 2 ? kv : s));
  for (std::size_t i = plain_operands(c); i < c.node.operands.size(); ++i)
    chunked.needs.push_back(scores_need(c, i, s));
  for (std::size_t i = 0; i < c.node.results.size(); ++i)
    chunked.results.push_back(gradient && i > 0 ? kv : s);
  return chunked;
}
Lead attention_lead(const CutNode& c, std::size_t i, const Split& s) {
  const bool segments = i >= plain_operands(c) && c.rank(i) == 2;
  if (segments && s.dim != 0) return {};
  Split q = s;
  if (s.dim == 1 && (i == 1 || i == 2)) q.factor *= group_of(c);
  return {q};
}

// --- instructions

// Kernels write rows of contiguous elements at any strides, and a contiguous log-sum-exp.
bool has_rows(const View& view) { return view.strides[3] == 1 || view.shape[3] == 1; }
bool attention_place(Lowering& l, Value v, const Destination& to) {
  const bool can = to.view.shape.size() == 4 ? has_rows(to.view) : is_contiguous(to.view);
  return to.kind == Destination::Kind::write && can && l.write_there(v, to);
}
void attention_emit(Lowering& l, int id) {
  const Node& n = l.node(id);
  const auto rows = [&](std::size_t i) {
    const View view = l.memory_of(n.operands[i]);
    return has_rows(view) ? view : l.copied(view, l.name_of_node(id) + " operand");
  };
  Attention a;
  a.gradient = n.op == Op::attention_grad;
  a.scores = n.attributes->scores;
  a.scale = n.attributes->number;
  a.q = rows(0);
  a.k = rows(1);
  a.v = rows(2);
  if (a.gradient) {
    a.out = rows(3);
    a.lse = l.contiguous(n.operands[4]);
    a.d_out = rows(5);
    a.d_q = l.result_of({id, 0});
    a.d_k = l.result_of({id, 1});
    a.d_v = l.result_of({id, 2});
  } else {
    a.out = l.result_of({id, 0});
    a.lse = l.result_of({id, 1});
  }
  std::size_t next = a.gradient ? 6 : 3;
  if (a.scores.bias) {
    a.bias = rows(next++);
    for (std::size_t d = 0; d < 3; ++d) a.bias.strides[d] *= a.bias.shape[d] == 1 ? 0 : 1;
  }
  if (a.scores.segments) {
    a.query_segments = l.contiguous(n.operands[next]);
    a.key_segments = l.contiguous(n.operands[next + 1]);
  }
  const std::vector<std::int64_t>& q = a.q.shape;
  l.count_work(static_cast<double>(q[0] * q[1] * q[2]) * static_cast<double>(a.k.shape[2] * q[3]) *
               (a.gradient ? 5.0 : 2.0));
  l.push(id, std::move(a));
}

constexpr Operation kOperations[] = {
    {
        .op = Op::attention,
        .name = "attention",
        .infer = attention_types,
        .keys = kKeys,
        .evaluate = attention_value,
        .gradient = attention_gradient,
        .zero_sign = zeros<ZeroSign::loses>,
        .rounding = rounds<Rounding::loses>,
        .cut_by_result = attention_cut,
        .cut_by_operand = attention_lead,
        .place = attention_place,
        .emit = attention_emit,
    },
    {
        .op = Op::attention_grad,
        .name = "attention_grad",
        .infer = gradient_types,
        .keys = kKeys,
        .evaluate = gradient_value,
        .zero_sign = zeros<ZeroSign::loses>,
        .rounding = rounds<Rounding::loses>,
        .cut_by_result = attention_cut,
        .cut_by_operand = attention_lead,
        .place = attention_place,
        .emit = attention_emit,
    },
};

}  // namespace

std::span<const Operation> attention_operations() { return kOperations; }

}  // namespace logitless::ir
