#include "train/model/model.h"

#include <fmt/format.h>

#include "json/json.h"
#include "logitless/error.h"
#include "train/hash.h"
#include "train/model/gpt.h"
#include "train/model/llama.h"

namespace logitless::train {
namespace {

Shape shape_of(const std::vector<std::int64_t>& sizes) { return Shape(sizes.begin(), sizes.end()); }

// The loss of each target [N], 0 where it is ignored, and 1 for counted targets, 0 for ignored
// ones.
struct Losses {
  Value loss, counted;
};
Losses losses(Graph& graph, Network& network) {
  const Value targets =
      reshape(graph.parameter("targets", DType::i64, {network.batch(), network.length()}),
              {network.rows()});
  const Value z = network.logits(network.hidden());
  const Scope scope = network.scope("loss");
  const Value loss = logsumexp(z, {1}) - pick(z, targets, 1);
  const Value ignored =
      equal(targets, graph.constant(static_cast<double>(kIgnoredTarget), DType::i64));
  return {select(ignored, graph.constant(0.0), loss),
          select(ignored, graph.constant(0.0), graph.constant(1.0))};
}

}  // namespace

std::int64_t Parameter::numel() const {
  std::int64_t count = 1;
  for (const std::int64_t size : shape) count *= size;
  return count;
}

void initialise(const Parameter& parameter, std::size_t index, std::uint64_t seed,
                std::span<float> values) {
  const std::uint64_t stream = mix(mix(seed, 0x696e6974), index);
  for (std::size_t i = 0; i < values.size(); ++i) {
    const double noise = parameter.deviation == 0.0 ? 0.0 : parameter.deviation * normal(stream, i);
    values[i] = static_cast<float>(parameter.constant + noise);
  }
}

ModelPtr parse_model(const std::string& config_text) {
  const auto json = Json::parse(config_text);
  return json.contains("model_type") ? parse_llama(json) : parse_gpt(json);
}

std::string rounded_name(const std::string& name) { return name + ".rounded"; }

Network::Network(Graph& graph, const Model& model, const Dim& batch, const Dim& length,
                 Weights weights)
    : graph_(graph),
      model_(model),
      activations_(model.sizes().activations),
      rounded_(weights == Weights::rounded && activations_ != DType::f32),
      batch_(batch),
      length_(length) {
  for (const Parameter& p : model.parameters()) shapes_[p.name] = shape_of(p.shape);
  const std::int64_t context = model.sizes().context;
  if (length.is_constant() && (length.value() < 1 || length.value() > context)) {
    throw InvalidArgument(
        fmt::format("length: expected 1 to context {}, got {}", context, length.value()));
  }
  tokens_ = graph.parameter("tokens", DType::i64, {batch, length});
  for (const PositionTable& table : model.tables(0))
    by_name_[table.name] = graph.parameter(table.name, DType::f32, {length, table.columns});
}

Value Network::parameter(const std::string& name, const std::string& of, DType dtype) {
  const auto found = by_name_.find(name);
  if (found != by_name_.end()) return found->second;
  return by_name_[name] = graph_.parameter(name, dtype, shapes_.at(of));
}
Value Network::master(const std::string& name) { return parameter(name, name, DType::f32); }
Value Network::weight(const std::string& name) {
  const Scope weight = scope(name.ends_with(".bias") ? "bias" : "weight");
  return rounded_ ? parameter(rounded_name(name), name, activations_)
                  : cast(master(name), activations_);
}

Value Network::residual(Value x, Value y) {
  const Scope sum = scope("residual");
  return x + y;
}

Value Network::logits(Value hidden) {
  const Scope logits = scope("logits");
  return dot(hidden, weight(model_.head()),
             {.contract_a = {1}, .contract_b = {1}, .f32_result = true});
}

void Network::set_head_vocab(std::int64_t vocab_count) {
  shapes_[model_.head()] = {vocab_count, model_.sizes().dim};
}

void Network::add_gradients(Value loss) {
  const std::vector<Parameter> list = model_.parameters();
  std::vector<Value> read;
  std::vector<std::size_t> counts;  // number of `read` values for each parameter
  for (const Parameter& p : list) {
    const std::size_t before = read.size();
    const auto rounded = by_name_.find(rounded_name(p.name));
    if (rounded != by_name_.end()) read.push_back(rounded->second);
    if (rounded == by_name_.end() || by_name_.contains(p.name)) read.push_back(master(p.name));
    counts.push_back(read.size() - before);
  }
  const std::vector<Value> gradients = graph_.gradients({loss}, read);
  std::size_t next = 0;
  for (std::size_t i = 0; i < list.size(); ++i) {
    Value sum = cast(gradients[next++], DType::f32);
    if (counts[i] > 1) sum = sum + gradients[next++];
    graph_.result("d_" + list[i].name, sum);
  }
}

Graph build_step(const Model& model, const Dim& batch, const Dim& length, Weights weights) {
  Graph graph(model.type());
  Network network(graph, model, batch, length, weights);
  const Value inverse_count = graph.parameter("inverse_count", DType::f32, {});
  const Value loss = sum(losses(graph, network).loss, {0}) * inverse_count;
  graph.result("loss", loss);
  network.add_gradients(loss);
  return graph;
}

Graph build_loss(const Model& model, const Dim& batch, const Dim& length, Weights weights) {
  Graph graph(model.type() + "_loss");
  Network network(graph, model, batch, length, weights);
  const Losses result = losses(graph, network);
  graph.result("loss", sum(result.loss, {0}));
  graph.result("count", sum(result.counted, {0}));
  return graph;
}

Graph build_logits(const Model& model, const Dim& batch, const Dim& length, Weights weights,
                   std::int64_t head_vocab) {
  if (!length.is_constant())
    throw InvalidArgument(fmt::format("length: expected a number, got {}", length.text()));
  Graph graph(model.type() + "_logits");
  Network network(graph, model, batch, length, weights);
  if (head_vocab > 0) network.set_head_vocab(head_vocab);
  const Value last = graph.parameter("last", DType::i64, {batch});
  const Value rows = graph.iota({batch}, 0) * static_cast<double>(length.value()) + last;
  graph.result("logits", network.logits(take(network.hidden(), rows)));
  return graph;
}

}  // namespace logitless::train
