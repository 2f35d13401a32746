#include "compiler/passes/recompute_segments.h"

#include <algorithm>
#include <cmath>

#include "compiler/ir/build.h"
#include "compiler/ops/op.h"
#include "compiler/passes/passes.h"

namespace logitless::ir {
namespace {

// Among equal values the first one of a graph is this much more expensive to store than the last,
// so that prices distinguish them.
constexpr double kTilt = 0.25;
// Flow is counted in fractions of a byte.
constexpr double kParts = 1024.0;
constexpr double kMostFlow = 1e16;

std::int64_t parts(double bytes) {
  return static_cast<std::int64_t>(std::ceil(std::min(bytes * kParts, kMostFlow)));
}

double size_of_dim(const Type& type, int dim) {
  return static_cast<double>(type.shape[static_cast<std::size_t>(dim)].value());
}

double elements(const Type& type) { return static_cast<double>(elements_of(type)); }

// Returns the bytes that the node reads and writes.
double bytes_named(const Graph& graph, int node) {
  const Node& n = graph.node(node);
  auto bytes = static_cast<double>(bytes_of_node(n));
  if (n.op == Op::take || n.op == Op::pick) return 2.0 * bytes;
  for (const Value v : n.operands) bytes += static_cast<double>(bytes_of(graph.type(v)));
  return bytes;
}

bool is_sum_type(DType dtype) { return dtype == DType::f32 || dtype == DType::f64; }

double of_loop(const Loop& loop) {
  const auto of_chunk = [&](std::int64_t chunk) {
    const Graph body = bind(loop.body, {{loop.symbol, chunk}});
    double sum = 0.0;
    for (int id = 0; id < body.size(); ++id) sum += multiply_adds_of(body, id);
    return sum;
  };
  const std::int64_t rest = loop.extent % loop.chunk;
  const auto whole = static_cast<double>(loop.extent / loop.chunk);
  return (whole > 0 ? whole * of_chunk(loop.chunk) : 0.0) + (rest > 0 ? of_chunk(rest) : 0.0);
}

}  // namespace

std::int64_t bytes_of_node(const Node& n) {
  std::int64_t bytes = 0;
  for (const Type& t : n.results) bytes += bytes_of(t);
  return bytes;
}

int busiest(const Graph& graph) {
  std::vector<std::int64_t> change(static_cast<std::size_t>(graph.size()) + 1, 0);
  std::vector<int> last(static_cast<std::size_t>(graph.size()), -1);
  for (int id = 0; id < graph.size(); ++id) {
    for (const Value v : graph.node(id).operands) last[static_cast<std::size_t>(v.node)] = id;
  }
  for (int id = 0; id < graph.size(); ++id) {
    const Op op = graph.node(id).op;
    const bool memory = op != Op::parameter && row_of(op).work != Work::none;
    if (!memory || last[static_cast<std::size_t>(id)] < 0) continue;
    change[static_cast<std::size_t>(id)] += bytes_of_node(graph.node(id));
    change[static_cast<std::size_t>(last[static_cast<std::size_t>(id)])] -=
        bytes_of_node(graph.node(id));
  }
  std::int64_t live = 0, most = -1;
  int at = 0;
  for (int id = 0; id < graph.size(); ++id) {
    live += change[static_cast<std::size_t>(id)];
    if (live > most) {
      most = live;
      at = id;
    }
  }
  return at + 1;
}

double multiply_adds_of(const Graph& graph, int node) {
  const Node& n = graph.node(node);
  switch (n.op) {
    case Op::dot:
    case Op::fused_dot: {
      double work = elements(n.results[0]);
      for (const int d : n.attributes->contract_a)
        work *= size_of_dim(graph.type(n.operands[0]), d);
      return work;
    }
    case Op::attention:
    case Op::attention_grad: {
      const Type &q = graph.type(n.operands[0]), &k = graph.type(n.operands[1]);
      return elements(q) * size_of_dim(k, 2) * (n.op == Op::attention_grad ? 5.0 : 2.0);
    }
    case Op::extern_call:
      return extern_work(graph, n);
    case Op::loop:
      return of_loop(*n.attributes->loop);
    default:
      return 0.0;
  }
}

RecomputeCurve::RecomputeCurve(const Graph& graph, double multiply_adds_per_byte,
                               std::vector<bool> stored)
    : g_(graph),
      cut_(busiest(graph)),
      bytes_(static_cast<std::size_t>(cut_)),
      weight_(bytes_.size()),
      work_(bytes_.size()),
      multiply_adds_(bytes_.size()),
      free_(bytes_.size()),
      read_late_(bytes_.size()),
      stored_(std::move(stored)),
      pinned_(bytes_.size()),
      flow_(2 * cut_ + 2) {
  for (int id = 0; id < cut_; ++id) {
    const auto at = static_cast<std::size_t>(id);
    const Node& n = g_.node(id);
    bytes_[at] = bytes_of_node(n);
    weight_[at] = static_cast<double>(bytes_[at]) * (1.0 + kTilt * (1.0 - 1.0 * id / cut_));
    free_[at] = n.op == Op::parameter;
    multiply_adds_[at] = multiply_adds_of(g_, id);
    if (row_of(n.op).work == Work::full)
      work_[at] = multiply_adds_[at] + multiply_adds_per_byte * bytes_named(g_, id);
  }
  for (const Output& o : g_.outputs()) {
    if (o.value.node < cut_) free_[static_cast<std::size_t>(o.value.node)] = true;
  }
  for (int id = cut_; id < g_.size(); ++id) {
    for (const Value v : g_.node(id).operands) {
      if (v.node < cut_) read_late_[static_cast<std::size_t>(v.node)] = true;
    }
    pin_first(id);
  }
  make_flow();
}

// The earlier operand of an accumulating sum is written first, and the other one is added to it.
// Recomputed it would come last, so it is pinned.
void RecomputeCurve::pin_first(int id) {
  const Node& n = g_.node(id);
  if (!is_map(n, Function::add)) return;
  const int first = std::min(n.operands[0].node, n.operands[1].node);
  const bool sums =
      row_of(g_.node(n.operands[0]).op).sums || row_of(g_.node(n.operands[1]).op).sums;
  if (sums && first < cut_ && is_sum_type(n.results[0].dtype))
    pinned_[static_cast<std::size_t>(first)] = true;
}

bool RecomputeCurve::can_recompute(int node) const {
  const Op op = g_.node(node).op;
  return !pinned_[static_cast<std::size_t>(node)] && op != Op::parameter && op != Op::head &&
         op != Op::loop;
}

void RecomputeCurve::make_flow() {
  for (int id = 0; id < cut_; ++id) {
    const auto at = static_cast<std::size_t>(id);
    flow_.add(2 * id, 2 * id + 1, free_[at] ? 0 : parts(weight_[at]));
    if (read_late_[at]) flow_.add(2 * id + 1, sink(), kInfinite);
    if (!can_recompute(id)) {
      flow_.add(source(), 2 * id, kInfinite);
      continue;
    }
    if (row_of(g_.node(id).op).work == Work::full)
      priced_.push_back({flow_.add(source(), 2 * id, kInfinite), id});
    for (const Value v : g_.node(id).operands) flow_.add(2 * v.node + 1, 2 * id, kInfinite);
  }
  flow_.prepare();
}

RecomputeCurve::Point RecomputeCurve::cut_at(double price) const {
  Flow flow = flow_;
  for (const auto& [edge, node] : priced_) {
    if (price > 0.0) flow.set_capacity(edge, parts(work_[static_cast<std::size_t>(node)] / price));
  }
  flow.run(source(), sink());
  const std::vector<bool> late = flow.reaching(sink());
  Point point;
  point.again.resize(bytes_.size());
  for (int id = 0; id < cut_; ++id) {
    const auto at = static_cast<std::size_t>(id);
    point.again[at] = late[2 * at] && can_recompute(id);
    if (point.again[at]) {
      point.cost += work_[at];
      point.multiply_adds += multiply_adds_[at];
    } else if (late[2 * at + 1] && !free_[at]) {
      point.kept += bytes_[at];
      point.weight += weight_[at];
    }
  }
  return point;
}

RecomputeCurve::Point RecomputeCurve::at(double price) const { return cut_at(price); }
RecomputeCurve::Point RecomputeCurve::cheapest() const { return cut_at(0.0); }
RecomputeCurve::Point RecomputeCurve::smallest() const { return cut_at(HUGE_VAL); }

std::optional<RecomputeCurve::Point> RecomputeCurve::between(const Point& more,
                                                             const Point& less) const {
  const double bytes = more.weight - less.weight;
  if (bytes <= 0.0 || less.cost <= more.cost) return std::nullopt;
  Point point = cut_at((less.cost - more.cost) / bytes);
  if (point.again == more.again || point.again == less.again) return std::nullopt;
  return point;
}

bool RecomputeCurve::same_choices(const RecomputeCurve& other) const {
  return bytes_ == other.bytes_ && weight_ == other.weight_ && work_ == other.work_ &&
         multiply_adds_ == other.multiply_adds_ && free_ == other.free_ &&
         priced_ == other.priced_ && flow_ == other.flow_;
}

bool RecomputeCurve::is_rounded(int node) const {
  const Node& n = g_.node(node);
  return !stored_.empty() && stored_[static_cast<std::size_t>(node)] &&
         row_of(n.op).work == Work::elementwise && n.results.size() == 1 &&
         (n.results[0].dtype == DType::bf16 || n.results[0].dtype == DType::f16);
}

Graph RecomputeCurve::graph_of(const Point& point) const {
  std::vector<bool> rounded(point.again.size());
  for (std::size_t id = 0; id < rounded.size(); ++id)
    rounded[id] = point.again[id] && is_rounded(static_cast<int>(id));
  return recomputed_after(g_, cut_, point.again, rounded);
}

Graph recomputed_after(const Graph& graph, int cut, const std::vector<bool>& again,
                       const std::vector<bool>& rounded) {
  Graph out;
  out.name = graph.name;
  out.reserve(graph.size());
  std::vector<int> early(static_cast<std::size_t>(graph.size()), -1), copies(again.size(), -1);
  const auto copy = [&](int id, auto&& operand) {
    const Node& n = graph.node(id);
    std::vector<Value> operands;
    for (const Value v : n.operands) operands.push_back(operand(v));
    const Value made = out.copy(graph, id, std::move(operands));
    const bool round = id < cut && !rounded.empty() && rounded[static_cast<std::size_t>(id)];
    return round ? cast(out, cast(out, made, DType::f32), n.results[0].dtype).node : made.node;
  };
  // A value that is read after the cut is stored, or recomputed there from stored values.
  auto after = [&](auto&& self, Value v) -> Value {
    const auto at = static_cast<std::size_t>(v.node);
    if (v.node >= cut || !again[at]) return {early[at], v.index};
    if (copies[at] < 0) copies[at] = copy(v.node, [&](Value o) { return self(self, o); });
    return {copies[at], v.index};
  };
  for (int id = 0; id < graph.size(); ++id) {
    early[static_cast<std::size_t>(id)] = copy(id, [&](Value v) {
      return id < cut ? Value{early[static_cast<std::size_t>(v.node)], v.index} : after(after, v);
    });
  }
  for (const Output& o : graph.outputs())
    out.add_output(o.name, {early[static_cast<std::size_t>(o.value.node)], o.value.index});
  return eliminate_dead(std::move(out));
}

}  // namespace logitless::ir
