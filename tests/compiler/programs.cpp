#include "compiler/programs.h"

#include <random>

namespace logitless::test {
namespace {

struct Head {
  Graph graph;
  Value hidden, weight, targets, logits;
};

// Returns a head: logits [N, V] of hidden [N, D] and weight [V, D].
Head head(DType dtype, bool f32_logits = true) {
  Head h{Graph("head"), {}, {}, {}, {}};
  const Dim n = Dim::symbol("N"), d = Dim::symbol("D"), v = Dim::symbol("V");
  h.hidden = h.graph.parameter("hidden", dtype, {n, d});
  h.weight = h.graph.parameter("weight", dtype, {v, d});
  h.targets = h.graph.parameter("targets", DType::i64, {n});
  DotOptions options{{1}, {1}};
  options.f32_result = f32_logits && dtype != DType::f64;
  h.logits = dot(h.hidden, h.weight, options);
  return h;
}
Value nll(Value logits, Value targets) { return logsumexp(logits, {1}) - pick(logits, targets, 1); }

// Adds the loss and its gradients as results.
Graph finish(Head h, Value loss, std::vector<Value> more = {}) {
  h.graph.result("loss", loss);
  std::vector<Value> wrt = {h.hidden, h.weight};
  wrt.insert(wrt.end(), more.begin(), more.end());
  const std::vector<Value> grads = h.graph.gradients({loss}, wrt);
  for (std::size_t i = 0; i < grads.size(); ++i) h.graph.result("d" + std::to_string(i), grads[i]);
  return std::move(h.graph);
}

Graph mean_loss(DType dtype) {
  Head h = head(dtype);
  return finish(std::move(h), mean(nll(h.logits, h.targets), {0}));
}

Graph per_token(DType dtype) {  // reduction none, with a cotangent for each token
  Head h = head(dtype);
  const Value loss = nll(h.logits, h.targets);
  const Value g = h.graph.parameter("upstream", loss.dtype(), loss.shape());
  h.graph.result("loss", loss);
  const std::vector<Value> grads = h.graph.gradients({loss}, {h.hidden, h.weight}, {g});
  h.graph.result("d0", grads[0]);
  h.graph.result("d1", grads[1]);
  return std::move(h.graph);
}

Graph masked(DType dtype) {  // weighted by a mask, divided by its sum
  Head h = head(dtype);
  const Value loss = nll(h.logits, h.targets);
  const Value mask = h.graph.parameter("mask", loss.dtype(), loss.shape());
  return finish(std::move(h), sum(loss * mask, {0}) / (sum(mask * mask, {0}) + 1.0));
}

Graph grpo(DType dtype) {  // clipped importance ratios against old log probabilities
  Head h = head(dtype);
  const Value logp = -nll(h.logits, h.targets);
  const Value old = h.graph.parameter("old_logp", logp.dtype(), logp.shape());
  const Value advantage = h.graph.parameter("advantage", logp.dtype(), logp.shape());
  const Value ratio = exp((logp - old) * 0.1);
  const Value low = h.graph.constant(0.8, logp.dtype(), logp.shape()),
              high = h.graph.constant(1.2, logp.dtype(), logp.shape());
  const Value clipped = apply("min", {apply("max", {ratio, low}), high});
  const Value objective = apply("min", {ratio * advantage, clipped * advantage});
  return finish(std::move(h), -mean(objective, {0}));
}

Graph dpo(
    DType dtype) {  // sequences: chosen in the first half of the batch, rejected in the second
  Head h{Graph("dpo"), {}, {}, {}, {}};
  const Dim p = Dim::symbol("P"), t = Dim::symbol("T"), d = Dim::symbol("D"), v = Dim::symbol("V");
  const Dim b = p * Dim(2);
  h.hidden = h.graph.parameter("hidden", dtype, {b, t, d});
  h.weight = h.graph.parameter("weight", dtype, {v, d});
  h.targets = h.graph.parameter("targets", DType::i64, {b, t});
  DotOptions options{{1}, {1}};
  options.f32_result = dtype != DType::f64;
  h.logits = dot(reshape(h.hidden, {b * t, d}), h.weight, options);
  const Value logp = reshape(-nll(h.logits, reshape(h.targets, {b * t})), {b, t});
  const Value sequence = sum(logp, {1});
  const Value reference = h.graph.parameter("reference", sequence.dtype(), {b});
  const Value ratio = (sequence - reference) * 0.05;
  const Value margin = slice(ratio, 0, 0, p) - slice(ratio, 0, p, b);
  return finish(std::move(h), -mean(log(sigmoid(margin)), {0}));
}

Graph softcap(DType dtype) {
  Head h = head(dtype);
  const Value z = tanh(h.logits / 5.0) * 5.0;
  return finish(std::move(h), mean(nll(z, h.targets), {0}));
}

Graph z_loss(DType dtype) {
  Head h = head(dtype);
  const Value lse = logsumexp(h.logits, {1});
  return finish(std::move(h), mean(lse - pick(h.logits, h.targets, 1) + square(lse) * 1e-2, {0}));
}

Graph distillation(DType dtype) {  // KL against a teacher's head
  Head h = head(dtype);
  const Value th = h.graph.parameter("teacher_hidden", dtype, h.hidden.shape());
  const Value tw = h.graph.parameter("teacher_weight", dtype, h.weight.shape());
  DotOptions options{{1}, {1}};
  options.f32_result = dtype != DType::f64;
  const Value teacher = stop_gradient(log_softmax(dot(th, tw, options), 1));
  const Value student = log_softmax(h.logits, 1);
  return finish(std::move(h), mean(sum(exp(teacher) * (teacher - student), {1}), {0}));
}

Graph label_smoothing(DType dtype) {
  Head h = head(dtype);
  const Value logp = log_softmax(h.logits, 1);
  const Value smooth = mean(logp, {1});
  return finish(std::move(h), -mean(pick(logp, h.targets, 1) * 0.9 + smooth * 0.1, {0}));
}

Graph shifted(DType dtype) {  // logits of every position, labels of the next
  Head h{Graph("shifted"), {}, {}, {}, {}};
  const Dim b = Dim::symbol("B"), t = Dim::symbol("T"), d = Dim::symbol("D"), v = Dim::symbol("V");
  h.hidden = h.graph.parameter("hidden", dtype, {b, t, d});
  h.weight = h.graph.parameter("weight", dtype, {v, d});
  h.targets = h.graph.parameter("targets", DType::i64, {b, t});
  DotOptions options{{2}, {1}};
  options.f32_result = dtype != DType::f64;
  h.logits = dot(h.hidden, h.weight, options);
  const Dim n = b * (t - Dim(1));
  const Value z = reshape(slice(h.logits, 1, 0, t - Dim(1)), {n, v});
  const Value y = reshape(slice(h.targets, 1, 1, t), {n});
  return finish(std::move(h), mean(nll(z, y), {0}));
}

Graph upcast_between_views(DType dtype) {
  Head h = head(dtype, false);
  const Dim n = Dim::symbol("N"), v = Dim::symbol("V");
  const DType wide = dtype == DType::f64 ? DType::f64 : DType::f32;
  const Value z = reshape(cast(reshape(h.logits, {1, n, v}), wide), {n, v});
  return finish(std::move(h), mean(nll(z, h.targets), {0}));
}

Graph clip(DType dtype) {  // both softmaxes of one matrix
  Graph g("clip");
  const Dim n = Dim::symbol("N"), d = Dim::symbol("D");
  const Value image = g.parameter("image", dtype, {n, d}),
              text = g.parameter("text", dtype, {n, d});
  DotOptions options{{1}, {1}};
  options.f32_result = dtype != DType::f64;
  const Value z = dot(image, text, options) * 0.5;
  const Value diagonal = pick(z, g.iota({n}, 0), 1);
  const Value loss = mean((logsumexp(z, {1}) + logsumexp(z, {0})) * 0.5 - diagonal, {0});
  g.result("loss", loss);
  const std::vector<Value> grads = g.gradients({loss}, {image, text});
  g.result("d0", grads[0]);
  g.result("d1", grads[1]);
  return g;
}

Graph mlp(DType dtype) {  // the big value is inside, read again by the backward
  Graph g("mlp");
  const Dim n = Dim::symbol("N"), d = Dim::symbol("D"), f = Dim::symbol("V");
  const Value x = g.parameter("x", dtype, {n, d}), up = g.parameter("up", dtype, {d, f}),
              down = g.parameter("down", dtype, {f, d});
  const Value y = matmul(relu(matmul(x, up)), down);
  const Value loss = mean(square(y), {0, 1});
  g.result("loss", loss);
  const std::vector<Value> grads = g.gradients({loss}, {x, up, down});
  for (std::size_t i = 0; i < grads.size(); ++i) g.result("d" + std::to_string(i), grads[i]);
  return g;
}

Graph returning_logits(DType dtype) {
  Head h = head(dtype);
  h.graph.result("logits", h.logits);
  return finish(std::move(h), mean(nll(h.logits, h.targets), {0}));
}

Graph accuracy(DType dtype) {
  Head h = head(dtype);
  const Value hit = cast(equal(argmax(h.logits, 1), h.targets), DType::f32);
  h.graph.result("accuracy", mean(hit, {0}));
  return finish(std::move(h), mean(nll(h.logits, h.targets), {0}));
}

Graph two_heads(DType dtype) {  // two vocabularies, one hidden state, losses summed
  Head h = head(dtype);
  const Value w2 =
      h.graph.parameter("weight2", dtype, {Dim::symbol("V") + Dim(5), Dim::symbol("D")});
  DotOptions options{{1}, {1}};
  options.f32_result = dtype != DType::f64;
  const Value z2 = dot(h.hidden, w2, options);
  const Value loss = mean(nll(h.logits, h.targets), {0}) + mean(nll(z2, h.targets), {0}) * 0.3;
  return finish(std::move(h), loss, {w2});
}

Graph auxiliary(DType dtype) {  // a penalty on the hidden states beside the loss
  Head h = head(dtype);
  const Value penalty = cast(mean(square(h.hidden), {0, 1}), h.logits.dtype());
  return finish(std::move(h), mean(nll(h.logits, h.targets), {0}) + penalty * 0.01);
}

Graph squared(DType dtype) {  // the loss is squared, so the cotangent depends on it
  Head h = head(dtype);
  const Value loss = mean(nll(h.logits, h.targets), {0});
  return finish(std::move(h), loss * loss);
}

Graph focal(DType dtype) {  // each row's cotangent depends on the row's own loss
  Head h = head(dtype);
  const Value loss = nll(h.logits, h.targets);
  return finish(std::move(h), mean(square(1.0 - exp(-loss)) * loss, {0}));
}

Graph naive_softmax(DType dtype) {  // maximum, exponentials and sum written out
  Head h = head(dtype);
  const Dim n = Dim::symbol("N"), v = Dim::symbol("V");
  const Value top = stop_gradient(max(h.logits, {1}));
  const Value shifted_logits = h.logits - broadcast(top, {n, v}, {0});
  const Value lse = log(sum(exp(shifted_logits), {1}));
  return finish(std::move(h), mean(lse - pick(shifted_logits, h.targets, 1), {0}));
}

Graph attention_scores(DType dtype) {  // softmax(q k^T) v as usually written
  Graph g("attention_scores");
  const Dim b = Dim::symbol("B"), n = Dim::symbol("H"), t = Dim::symbol("T"), d = Dim::symbol("D");
  const Value q = g.parameter("q", dtype, {b, n, t, d}), k = g.parameter("k", dtype, {b, n, t, d}),
              v = g.parameter("v", dtype, {b, n, t, d});
  DotOptions scores{{3}, {3}, {0, 1}, {0, 1}}, values{{3}, {2}, {0, 1}, {0, 1}};
  scores.f32_result = values.f32_result = dtype != DType::f64;
  const Value p = cast(softmax(dot(q, k, scores) * 0.4, 3), dtype);
  const Value loss = mean(square(dot(p, v, values)), {0, 1, 2, 3});
  g.result("loss", loss);
  const std::vector<Value> grads = g.gradients({loss}, {q, k, v});
  for (std::size_t i = 0; i < grads.size(); ++i) g.result("d" + std::to_string(i), grads[i]);
  return g;
}

Graph two_losses(DType dtype) {  // two scalars, each with its own cotangent
  Head h = head(dtype);
  const Value lse = logsumexp(h.logits, {1});
  const Value ce = mean(lse - pick(h.logits, h.targets, 1), {0}), z = mean(square(lse), {0});
  const Value g1 = h.graph.parameter("g1", ce.dtype(), {}),
              g2 = h.graph.parameter("g2", ce.dtype(), {});
  h.graph.result("loss", ce);
  h.graph.result("z", z);
  const std::vector<Value> grads = h.graph.gradients({ce, z}, {h.hidden, h.weight}, {g1, g2});
  h.graph.result("d0", grads[0]);
  h.graph.result("d1", grads[1]);
  return std::move(h.graph);
}

Graph tied(DType dtype) {  // the weights are looked up as well
  Graph g("tied");
  const Dim n = Dim::symbol("N"), d = Dim::symbol("D"), v = Dim::symbol("V");
  const Value w = g.parameter("weight", dtype, {v, d});
  const Value in = g.parameter("inputs", DType::i64, {n}),
              targets = g.parameter("targets", DType::i64, {n});
  const Value h = tanh(take(w, in));
  DotOptions options{{1}, {1}};
  options.f32_result = dtype != DType::f64;
  const Value loss = mean(nll(dot(h, w, options), targets), {0});
  g.result("loss", loss);
  g.result("d0", g.gradients({loss}, {w})[0]);
  return g;
}

Graph transposed_logits(DType dtype) {  // [V, N]: the rows are the columns
  Head h = head(dtype);
  DotOptions options{{1}, {1}};
  options.f32_result = dtype != DType::f64;
  const Value z = dot(h.weight, h.hidden, options);
  const Value loss = mean(logsumexp(z, {0}) - pick(z, h.targets, 0), {0});
  return finish(std::move(h), loss);
}

}  // namespace

const std::vector<NamedProgram>& programs() {
  const Bindings sizes = {{"N", 149}, {"D", 6}, {"V", 307}};
  const std::int64_t logits = 149 * 307;
  static const std::vector<NamedProgram> list = {
      {"mean_loss", mean_loss, sizes, logits},
      {"per_token", per_token, sizes, logits},
      {"masked", masked, sizes, logits},
      {"grpo", grpo, sizes, logits},
      {"dpo", dpo, {{"P", 6}, {"T", 13}, {"D", 6}, {"V", 307}}, 156 * 307},
      {"softcap", softcap, sizes, logits},
      {"z_loss", z_loss, sizes, logits},
      {"distillation", distillation, sizes, logits},
      {"label_smoothing", label_smoothing, sizes, logits},
      {"shifted", shifted, {{"B", 13}, {"T", 12}, {"D", 6}, {"V", 307}}, 143 * 307},
      {"shifted_one_sequence", shifted, {{"B", 1}, {"T", 150}, {"D", 6}, {"V", 307}}, 149 * 307},
      {"upcast_between_views", upcast_between_views, sizes, logits},
      {"clip", clip, {{"N", 211}, {"D", 6}}, 211 * 211},
      {"mlp", mlp, sizes, logits},
      {"returning_logits", returning_logits, sizes, 0},
      {"accuracy", accuracy, sizes, logits},
      {"two_heads", two_heads, sizes, logits},
      {"auxiliary", auxiliary, sizes, logits},
      {"squared", squared, sizes, logits},
      {"focal", focal, sizes, logits},
      {"naive_softmax", naive_softmax, sizes, logits},
      {"attention_scores",
       attention_scores,
       {{"B", 3}, {"H", 4}, {"T", 61}, {"D", 5}},
       12 * 61 * 61},
      {"two_losses", two_losses, sizes, logits},
      {"tied", tied, sizes, logits},
      {"transposed_logits", transposed_logits, sizes, logits},
      {"few_rows", mean_loss, {{"N", 2}, {"D", 6}, {"V", 19997}}, 0},
  };
  return list;
}

Graph random_program(std::uint64_t seed) {
  std::mt19937_64 rng(seed);
  const auto below = [&](std::uint64_t n) { return static_cast<int>(rng() % n); };
  Graph g("random");
  const int rows = 5 + below(150), dim = 1 + below(6), cols = 9 + below(200);
  const Value x = g.parameter("x", DType::f64, {rows, dim}),
              w = g.parameter("w", DType::f64, {cols, dim});
  const Value t = g.parameter("t", DType::i64, {rows}), m = g.parameter("m", DType::f64, {rows});
  const Value b = g.parameter("b", DType::f64, {cols});
  std::vector<Value> big = {dot(x, w, {{1}, {1}}) * 0.3};
  std::vector<Value> by_row = {m}, by_col = {b};
  const auto spread = [&](Value v, int dim_of) { return broadcast(v, {rows, cols}, {dim_of}); };
  for (int step = 3 + below(9); step > 0; --step) {
    const Value z = big[static_cast<std::size_t>(below(big.size()))];
    switch (below(12)) {
      case 0:
        big.push_back(tanh(z));
        break;
      case 1:
        big.push_back(z * big[static_cast<std::size_t>(below(big.size()))] * 0.2);
        break;
      case 2:
        by_row.push_back(logsumexp(z, {1}));
        break;
      case 3:
        by_row.push_back(sum(z, {1}) * 0.1);
        break;
      case 4:
        by_row.push_back(pick(z, t, 1));
        break;
      case 5:
        by_col.push_back(logsumexp(z, {0}));
        break;
      case 6:
        by_col.push_back(mean(z, {0}));
        break;
      case 7:
        big.push_back(z - spread(by_row[static_cast<std::size_t>(below(by_row.size()))], 0));
        break;
      case 8:
        big.push_back(z + spread(by_col[static_cast<std::size_t>(below(by_col.size()))], 1) * 0.5);
        break;
      case 9:
        big.push_back(sigmoid(z) * 0.7);
        break;
      case 10:
        big.push_back(transpose(sigmoid(transpose(z, {1, 0})), {1, 0}));
        break;
      default:
        by_row.push_back(tanh(by_row.back() * 0.5));
    }
  }
  Value loss = sum(big.back() * 0.01, {0, 1});
  for (const Value v : by_row) loss = loss + mean(v * v, {0}) * 0.1;
  for (const Value v : by_col) loss = loss + sum(tanh(v), {0}) * 0.05;
  if (below(3) == 0) loss = loss * loss;
  g.result("loss", loss);
  if (below(4) == 0) g.result("kept", big[static_cast<std::size_t>(below(big.size()))]);
  const std::vector<Value> grads = g.gradients({loss}, {x, w, b});
  for (std::size_t i = 0; i < grads.size(); ++i) g.result("d" + std::to_string(i), grads[i]);
  return g;
}

Graph long_rows(std::int64_t rows, std::int64_t columns, DType dtype) {
  Graph graph("long_rows");
  const Value x = graph.parameter("x", dtype, {rows, columns});
  const Value target = graph.parameter("target", DType::i64, {rows});
  const Value z = cast(x, DType::f32);
  const Value log_prob = log_softmax(z, 1);
  const Value entropy = -logitless::sum(exp(log_prob) * log_prob, {1});
  const Value loss = logitless::sum(pick(log_prob, target, 1) + entropy * 0.1, {0}) +
                     logitless::sum(sigmoid(z) * 1e-3, {0, 1});
  graph.result("entropy", entropy);
  graph.result("loss", loss);
  graph.result("d_x", graph.gradients({loss}, {x})[0]);
  return graph;
}

}  // namespace logitless::test
