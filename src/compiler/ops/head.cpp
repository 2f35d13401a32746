// head: log-sum-exp and target's logit of each row over a large vocabulary, their difference, and
// their gradients, by the head engine. Made by lower-heads.
#include "compiler/ir/derivation.h"
#include "compiler/ir/evaluation.h"
#include "compiler/ir/typing.h"
#include "compiler/ops/families.h"
#include "compiler/ops/text_key.h"
#include "compiler/plan/lowering.h"

namespace logitless::ir {
namespace {

std::vector<Type> head_types(const Typing& r) {
  const Head& h = r.a.head;
  r.count(std::size_t{3} + (h.bias ? 1 : 0) + (h.gradients ? 2 : 0));
  const Type &x = r.in(0), &w = r.in(1);
  r.floating(0);
  r.index(2);
  r.expect(x.dtype != DType::f64 && x.dtype == w.dtype, "x is ", x, " and w ", w,
           ", expected f32, bf16 or f16, equal");
  r.expect(x.rank() >= 1 && x.rank() <= 4 && w.rank() == 2 && x.shape.back() == w.shape[1], "x is ",
           x, " and w ", w, ", expected [..., D] and [V, D]");
  const Type token{DType::f32, Shape(x.shape.begin(), x.shape.end() - 1)};
  r.expect(r.in(2).shape == token.shape, "targets are ", r.in(2), ", expected the shape ",
           token.shape);
  const Type bias{h.bias ? r.in(3).dtype : x.dtype, {w.shape[0]}};
  r.expect(!h.bias || (r.in(3) == bias && (bias.dtype == DType::f32 || bias.dtype == x.dtype)),
           "bias is ", r.in(h.bias ? 3 : 0), ", expected ", bias);
  for (std::size_t i = r.operands.size() - 2; h.gradients && i < r.operands.size(); ++i)
    r.expect(*r.operands[i] == token, "a gradient is ", *r.operands[i], ", expected ", token);
  std::vector<Type> types(static_cast<std::size_t>(h.first_gradient()), token);
  const std::size_t without = types.size();
  const auto gradient = [&](DType dtype, Type type, std::string_view name) {
    if (dtype == DType::i8) return;
    r.expect(h.gradients && (dtype == DType::f32 || dtype == type.dtype), name, " is ",
             name_of(dtype), ", expected f32 or ", name_of(type.dtype));
    type.dtype = dtype;
    types.push_back(std::move(type));
  };
  gradient(h.d_x, x, "d_x");
  gradient(h.d_w, w, "d_w");
  gradient(h.d_bias, bias, "d_bias");
  r.expect(h.gradients == (types.size() > without),
           "gradients are asked for with and without d_lse");
  return types;
}

// --- text

void read_scale(TextReader& in, Attributes& a) {
  a.number = a.head.scale = in.real();  // eliminate-common compares `number`
}
void read_gradients(TextReader& in, Attributes& a) {
  a.head.gradients = true;
  a.head.d_x = in.gradient_dtype();
  in.symbol(",");
  a.head.d_w = in.gradient_dtype();
  in.symbol(",");
  a.head.d_bias = in.gradient_dtype();
}
std::string write_gradients(const Attributes& a) {
  if (!a.head.gradients) return {};
  const auto asked = [](DType d) { return d == DType::i8 ? "none" : name_of(d); };
  return concat(asked(a.head.d_x), ", ", asked(a.head.d_w), ", ", asked(a.head.d_bias));
}
void read_log_prob(TextReader& in, Attributes& a) { a.head.log_prob = in.integer() != 0; }
std::string write_log_prob(const Attributes& a) { return a.head.log_prob ? "1" : ""; }
void read_ignored(TextReader& in, Attributes& a) { a.head.ignored = in.signed_integer(); }
std::string write_ignored(const Attributes& a) {
  return a.head.ignored ? std::to_string(*a.head.ignored) : std::string();
}
constexpr TextKey kKeys[] = {
    head_key<&Head::bias>("bias"),
    {"scale", read_scale, [](const Attributes& a) { return written(a.head.scale); }},
    head_key<&Head::softcap>("softcap"),
    {"log_prob", read_log_prob, write_log_prob, false},
    {"gradients", read_gradients, write_gradients, false},
    {"ignored", read_ignored, write_ignored, false},
    head_key<&Head::workspace>("workspace")};

// --- float64

// The logits of one row and their derivatives with respect to the softcap's argument.
struct Row {
  std::vector<double> z, slope;
};

class HeadValue {
 public:
  explicit HeadValue(const Evaluation& e)
      : e_(e),
        h_(e.node.attributes->head),
        vocab_(static_cast<std::size_t>(e.in(1).shape[0])),
        dim_(static_cast<std::size_t>(e.in(1).shape[1])) {
    for (const Type& type : e.node.results) results_.push_back(oracle::tensor_of(type));
    auto next = static_cast<std::size_t>(h_.first_gradient());
    if (h_.d_x != DType::i8) dx_ = &results_[next++];
    if (h_.d_w != DType::i8) dw_ = &results_[next++];
    if (h_.d_bias != DType::i8) db_ = &results_[next++];
  }

  std::vector<Tensor> run() && {
    Row row{std::vector<double>(vocab_), std::vector<double>(vocab_, 1.0)};
    const std::vector<double>& targets = e_.in(2).data;
    for (std::size_t i = 0; i < targets.size(); ++i) {
      const double target = targets[i];
      if (h_.ignored && target == static_cast<double>(*h_.ignored)) continue;
      double top = oracle::start(Reduce::max), sum = 0.0;
      for (std::size_t j = 0; j < vocab_; ++j) {
        logit(i, j, row);
        top = oracle::merged(Reduce::max, top, row.z[j]);
      }
      for (const double v : row.z) sum += std::exp(v - top);
      const double lse = top + std::log(sum);
      const bool hit = target >= 0.0 && target < static_cast<double>(vocab_);
      results_[0].data[i] = lse;
      const double z = hit ? row.z[static_cast<std::size_t>(target)] : 0.0;
      results_[1].data[i] = z;
      if (h_.log_prob) results_[2].data[i] = hit ? z - lse : 0.0;
      if (h_.gradients) gradients(i, target, lse, row);
    }
    return std::move(results_);
  }

 private:
  const Evaluation& e_;
  const Head& h_;
  const std::size_t vocab_, dim_;
  std::vector<Tensor> results_;
  Tensor *dx_ = nullptr, *dw_ = nullptr, *db_ = nullptr;

  void logit(std::size_t i, std::size_t j, Row& row) const {
    double u = h_.bias ? e_.in(3).data[j] : 0.0;
    for (std::size_t d = 0; d < dim_; ++d)
      u += e_.in(0).data[i * dim_ + d] * e_.in(1).data[j * dim_ + d];
    u *= h_.scale;
    row.z[j] = h_.softcap > 0.0 ? h_.softcap * std::tanh(u / h_.softcap) : u;
    if (h_.softcap > 0.0) row.slope[j] = 1.0 - row.z[j] * row.z[j] / (h_.softcap * h_.softcap);
  }
  void gradients(std::size_t i, double target, double lse, const Row& row) {
    const double d_lse = e_.in(e_.operands.size() - 2).data[i];
    const double d_logit = e_.in(e_.operands.size() - 1).data[i];
    for (std::size_t j = 0; j < vocab_; ++j) {
      double dz = d_lse * std::exp(row.z[j] - lse);
      if (static_cast<double>(j) == target) dz += d_logit;
      dz *= row.slope[j] * h_.scale;
      if (db_ != nullptr) db_->data[j] += dz;
      for (std::size_t d = 0; d < dim_; ++d) {
        if (dx_ != nullptr) dx_->data[i * dim_ + d] += dz * e_.in(1).data[j * dim_ + d];
        if (dw_ != nullptr) dw_->data[j * dim_ + d] += dz * e_.in(0).data[i * dim_ + d];
      }
    }
  }
};

std::vector<Tensor> head_value(const Evaluation& e) { return HeadValue(e).run(); }

// --- instruction

bool head_place(Lowering& l, Value v, const Destination& to) {
  const std::int32_t first = l.node(v.node).attributes->head.first_gradient();
  const bool dense = v.index > first || is_contiguous(to.view);
  // Results from `first` on are gradients; those that are added to are f32.
  const bool adds = to.kind == Destination::Kind::sum && v.index >= first && l.target().heads_add();
  return dense && (adds || to.kind == Destination::Kind::write) && l.write_there(v, to);
}

// The engine adds to all gradients or to none, so gradients that are not added to are zeroed first.
bool begin_sums(Lowering& l, int id, std::int32_t results, const HeadRun& run) {
  const View* const views[] = {&run.d_x, &run.d_w, &run.d_bias};
  std::vector<const View*> fresh;
  bool any = false;
  std::int32_t at = results;
  for (const View* view : views) {
    if (view->buffer < 0) continue;
    const bool adds = l.accumulates({id, at++});
    any = any || adds;
    if (!adds) fresh.push_back(view);
  }
  for (const View* view : fresh) {
    if (any) l.fill(*view, 0.0);
  }
  return any;
}

HeadFeatures features_of(const Head& h) {
  HeadFeatures features;
  features.bias = h.bias;
  features.logit_scale = static_cast<float>(h.scale);
  features.softcap = static_cast<float>(h.softcap);
  features.d_hidden = h.d_x != DType::i8;
  features.d_weight = h.d_w != DType::i8;
  features.d_bias = h.d_bias != DType::i8;
  if (features.d_hidden) features.d_hidden_dtype = h.d_x;
  if (features.d_weight) features.d_weight_dtype = h.d_w;
  return features;
}

void head_emit(Lowering& l, int id) {
  const Node& n = l.node(id);
  const Head& h = n.attributes->head;
  HeadRun run;
  std::size_t next = 0;
  run.x = l.contiguous(n.operands[next++]);
  run.w = l.memory_of(n.operands[next++]);
  run.targets = l.contiguous(n.operands[next++]);
  if (h.bias) run.bias = l.memory_of(n.operands[next++]);
  if (h.gradients) {
    run.d_lse = l.contiguous(n.operands[next++]);
    run.d_logit = l.contiguous(n.operands[next++]);
  }
  std::int32_t result = 0;
  run.lse = l.result_of({id, result++});
  run.logit = l.result_of({id, result++});
  if (h.log_prob) run.log_prob = l.result_of({id, result++});
  if (h.d_x != DType::i8) run.d_x = l.result_of({id, result++});
  if (h.d_w != DType::i8) run.d_w = l.result_of({id, result++});
  if (h.d_bias != DType::i8) run.d_bias = l.result_of({id, result++});
  run.ignored = h.ignored;
  HeadFeatures features = features_of(h);
  features.accumulate = begin_sums(l, id, h.first_gradient(), run);

  HeadShape shape;
  shape.dim = run.w.shape[1];
  shape.vocab = run.w.shape[0];
  shape.tokens = elements_of(run.targets);
  shape.dtype = run.x.dtype;
  HeadPlan head = l.target().head_plan(shape, features, h.workspace);
  run.scratch_bytes = head.bytes;
  run.scratch =
      l.add_buffer(Place::arena, head.bytes, l.name_of_node(id) + " workspace", head.value_bytes);
  l.count_work(head.plan->passes * static_cast<double>(shape.tokens) *
               static_cast<double>(shape.vocab) * static_cast<double>(shape.dim));
  run.plan = std::move(head.plan);
  run.context = std::move(head.context);
  l.push(id, std::move(run));
}

constexpr Operation kOperations[] = {{
    .op = Op::head,
    .name = "head",
    .infer = head_types,
    .keys = kKeys,
    .evaluate = head_value,
    .gradient = compiled_gradient,
    .place = head_place,
    .emit = head_emit,
}};

}  // namespace

std::span<const Operation> head_operations() { return kOperations; }

}  // namespace logitless::ir
