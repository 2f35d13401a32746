#include "sample/formula.h"

#include <cmath>
#include <limits>

namespace logitless {
namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();

// Repeats a number [], or numbers of tokens [N], over `columns` of each of `rows`.
Value spread(Value x, std::int64_t rows, std::int64_t columns) {
  return broadcast(x, {rows, columns}, x.rank() == 0 ? std::vector<int>{} : std::vector<int>{0});
}

Value like(Graph& g, double number, Value x) { return g.constant(number, x.dtype(), x.shape()); }

Value logits_of(Graph& g, const LogitsForm& form) {
  const HeadShape& s = form.shape;
  Value hidden = g.parameter("hidden", form.hidden_dtype, {s.tokens, s.dim});
  Value weight = g.parameter("weight", form.weight_dtype, {s.vocab, s.dim});
  if (form.hidden_dtype != s.dtype) hidden = cast(hidden, s.dtype);
  if (form.weight_dtype != s.dtype) weight = cast(weight, s.dtype);
  Value z = dot(hidden, weight, {.contract_a = {1}, .contract_b = {1}, .f32_result = true});
  if (form.bias) {
    const Value bias = g.parameter("bias", form.bias_dtype, {s.vocab});
    z = z + cast(bias, DType::f32);
  }
  if (form.logit_scale != 1.0f) z = z * static_cast<double>(form.logit_scale);
  const double softcap = form.softcap;
  return form.softcap > 0.0f ? tanh(z / softcap) * softcap : z;
}

Value number_of(Graph& g, const char* name, Given given, std::int64_t tokens) {
  return g.parameter(name, DType::f32, given == Given::per_token ? Shape{tokens} : Shape{});
}

// Returns Gumbel noise f32 [N, V], -log(-log(1 - v)), v of the function `uniform`. The counter is
// added to the first number of the key, which is random.
Value noise_of(Graph& g, const SampleForm& form) {
  const std::int64_t tokens = form.logits.shape.tokens, vocab = form.logits.shape.vocab;
  const Value key = g.parameter("key", DType::i64, {2});
  const Value counter = form.counter
                            ? cast(g.parameter("counter", form.counter_dtype, {tokens}), DType::i64)
                            : g.iota({tokens}, 0);
  const Value first = reshape(slice(key, 0, 0, 1), {}), second = reshape(slice(key, 0, 1, 2), {});
  const Value row = spread(counter + first, tokens, vocab);
  const Value ids = broadcast(g.iota({vocab}, 0), {tokens, vocab}, {1});
  const Value v = apply("uniform", {row, spread(second, tokens, vocab), ids});
  return -log(-apply("log1p", {-v}));
}

// Returns the least s of the entries that top_k and top_p keep, [N].
Value least_kept(Graph& g, const SampleForm& form, Value s) {
  const std::int64_t tokens = form.logits.shape.tokens;
  const std::int64_t count = form.top_k > 0 ? form.top_k : form.logits.shape.vocab;
  const Value ordered = sort(s, 1, count, true).values;
  if (form.top_p == Given::none) return reshape(slice(ordered, 1, count - 1, count), {tokens});
  const Value p = softmax(ordered, 1);
  const Value top_p = number_of(g, "top_p", form.top_p, tokens);
  const Value before = cumsum(p, 1) - p;
  const Value all = apply("ge", {top_p, like(g, 1.0, top_p)});
  const Value kept =
      apply("logical_or", {less(before, spread(top_p, tokens, count)), spread(all, tokens, count)});
  return -max(-select(kept, ordered, like(g, kInfinity, ordered)), {1});
}

Value sampled(Graph& g, const SampleForm& form, Value z) {
  if (form.greedy) return argmax(z, 1);
  const std::int64_t tokens = form.logits.shape.tokens, vocab = form.logits.shape.vocab;
  const Value temperature = number_of(g, "temperature", form.temperature, tokens);
  const Value warm = apply("gt", {temperature, like(g, 0.0, temperature)});
  const Value divisor = select(warm, temperature, like(g, 1.0, temperature));
  // The largest becomes 0: a low temperature makes -inf, not inf.
  const Value s = (z - spread(max(z, {1}), tokens, vocab)) / spread(divisor, tokens, vocab);
  Value least;
  const bool ordered = form.top_k > 0 || form.top_p != Given::none;
  if (ordered) least = least_kept(g, form, s);
  if (form.min_p != Given::none) {
    const Value enough = max(s, {1}) + log(number_of(g, "min_p", form.min_p, tokens));
    least = ordered ? apply("max", {least, enough}) : enough;
  }
  const Value noise = noise_of(g, form);
  const Value chosen = s + select(spread(warm, tokens, vocab), noise, like(g, 0.0, noise));
  if (!ordered && form.min_p == Given::none) return argmax(chosen, 1);
  const Value kept = apply("ge", {s, spread(least, tokens, vocab)});
  return argmax(select(kept, chosen, like(g, -kInfinity, chosen)), 1);
}

}  // namespace

Graph sample_graph(const SampleForm& form) {
  Graph g("sample");
  if (form.of_head()) {
    const Value largest = g.parameter("largest", DType::i32, {form.logits.shape.tokens});
    g.result("tokens", cast(largest, form.token_dtype));
    return g;
  }
  Value z = logits_of(g, form.logits);
  if (form.logit_bias) z = z + g.parameter("logit_bias", DType::f32, {form.logits.shape.vocab});
  g.result("tokens", cast(sampled(g, form, z), form.token_dtype));
  return g;
}

Graph best_graph(const TopForm& form) {
  Graph g("best");
  const std::int64_t tokens = form.logits.shape.tokens;
  const Value best = sort(logits_of(g, form.logits), 1, form.k, true).index;
  Value wanted = sort(best, 1, form.k).values;
  if (form.target) {
    const Value target = g.parameter("targets", form.target_dtype, {tokens});
    wanted = concat({wanted, reshape(cast(target, DType::i64), {tokens, 1})}, 1);
  }
  g.result("wanted", wanted);
  return g;
}

Graph order_graph(const TopForm& form) {
  Graph g("order");
  const std::int64_t tokens = form.logits.shape.tokens, k = form.k, wide = form.wanted();
  const Value found = g.parameter("found", DType::f32, {tokens, wide});
  const Value wanted = g.parameter("wanted", DType::i64, {tokens, wide});
  // Stable: equal ones stay in the order of their ids.
  const Sorted sorted = sort(slice(found, 1, 0, k), 1, k, true);
  const Value row = spread(g.iota({tokens}, 0) * static_cast<double>(wide), tokens, k);
  const Value ids = take(reshape(wanted, {tokens * wide}), row + sorted.index);
  g.result("top_log_probs", sorted.values);
  g.result("top_ids", cast(ids, form.id_dtype));
  if (form.target) g.result("log_prob", reshape(slice(found, 1, k, k + 1), {tokens}));
  return g;
}

}  // namespace logitless
