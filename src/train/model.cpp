#include "train/model.h"

#include <fmt/format.h>

#include <nlohmann/json.hpp>

#include "logitless/error.h"
#include "train/gpt.h"
#include "train/hash.h"
#include "train/llama.h"

namespace logitless::train {
namespace {

Shape shape_of(const std::vector<std::int64_t>& sizes) { return Shape(sizes.begin(), sizes.end()); }

// The loss of each target [N], 0 where it is ignored, and which are counted: 1 or 0.
struct Losses {
  Value loss, counted;
};
Losses losses(Graph& graph, Network& network) {
  const Value targets =
      reshape(graph.parameter("targets", DType::i64, {network.batch(), network.length()}),
              {network.rows()});
  const Value z = network.logits(network.hidden());
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
  const auto json = nlohmann::ordered_json::parse(config_text);
  return json.contains("model_type") ? parse_llama(json) : parse_gpt(json);
}

Network::Network(Graph& graph, const Model& model, const Dim& batch, const Dim& length)
    : graph_(graph),
      model_(model),
      activations_(model.sizes().activations),
      batch_(batch),
      length_(length) {
  for (const Parameter& p : model.parameters()) {
    parameters_.push_back(graph.parameter(p.name, DType::f32, shape_of(p.shape)));
    by_name_[p.name] = parameters_.back();
    names_.push_back(p.name);
  }
  const std::int64_t context = model.sizes().context;
  if (length.is_constant() && (length.value() < 1 || length.value() > context)) {
    throw InvalidArgument(
        fmt::format("length: expected 1 to context {}, got {}", context, length.value()));
  }
  tokens_ = graph.parameter("tokens", DType::i64, {batch, length});
  for (const PositionTable& table : model.tables(0))
    by_name_[table.name] = graph.parameter(table.name, DType::f32, {length, table.columns});
}

Value Network::weight(const std::string& name) const { return cast(master(name), activations_); }

Value Network::logits(Value hidden) const {
  return dot(hidden, weight(model_.head()),
             {.contract_a = {1}, .contract_b = {1}, .f32_result = true});
}

void Network::add_gradients(Value loss) {
  const std::vector<Value> gradients = graph_.gradients({loss}, parameters_);
  for (std::size_t i = 0; i < gradients.size(); ++i) graph_.result("d_" + names_[i], gradients[i]);
}

Graph build_step(const Model& model, const Dim& batch, const Dim& length) {
  Graph graph(model.type());
  Network network(graph, model, batch, length);
  const Value inverse_count = graph.parameter("inverse_count", DType::f32, {});
  const Value loss = sum(losses(graph, network).loss, {0}) * inverse_count;
  graph.result("loss", loss);
  network.add_gradients(loss);
  return graph;
}

Graph build_loss(const Model& model, const Dim& batch, const Dim& length) {
  Graph graph(model.type() + "_loss");
  Network network(graph, model, batch, length);
  const Losses result = losses(graph, network);
  graph.result("loss", sum(result.loss, {0}));
  graph.result("count", sum(result.counted, {0}));
  return graph;
}

Graph build_logits(const Model& model, const Dim& batch, const Dim& length) {
  if (!length.is_constant())
    throw InvalidArgument(fmt::format("length: expected a number, got {}", length.text()));
  Graph graph(model.type() + "_logits");
  Network network(graph, model, batch, length);
  const Value last = graph.parameter("last", DType::i64, {batch});
  const Value rows = graph.iota({batch}, 0) * static_cast<double>(length.value()) + last;
  graph.result("logits", network.logits(take(network.hidden(), rows)));
  return graph;
}

}  // namespace logitless::train
