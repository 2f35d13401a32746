#include "compiler/passes/recompute_cheap.h"

#include <algorithm>
#include <limits>
#include <queue>
#include <set>

#include "compiler/ops/op.h"
#include "compiler/passes/eliminate.h"

namespace logitless::ir {
namespace {

constexpr std::int64_t kInfinite = std::numeric_limits<std::int64_t>::max() / 4;

// Largest flow by shortest augmenting layers (Dinitz, 1970).
class Flow {
 public:
  explicit Flow(int nodes) : edges_of_(static_cast<std::size_t>(nodes)) {}

  void add(int from, int to, std::int64_t capacity) {
    edges_of_[static_cast<std::size_t>(from)].push_back(static_cast<int>(edges_.size()));
    edges_.push_back({to, capacity});
    edges_of_[static_cast<std::size_t>(to)].push_back(static_cast<int>(edges_.size()));
    edges_.push_back({from, 0});
  }

  void run(int source, int sink) {
    while (layer(source, sink)) {
      next_.assign(edges_of_.size(), 0);
      while (push(source, sink, kInfinite) > 0) {
      }
    }
  }

  // Nodes from which the sink can still be reached.
  std::vector<bool> reaching(int sink) const {
    std::vector<bool> seen(edges_of_.size());
    std::queue<int> queue;
    queue.push(sink);
    seen[static_cast<std::size_t>(sink)] = true;
    while (!queue.empty()) {
      const int v = queue.front();
      queue.pop();
      for (const int e : edges_of_[static_cast<std::size_t>(v)]) {
        const int from = edges_[static_cast<std::size_t>(e)].to;
        const bool open = edges_[static_cast<std::size_t>(e ^ 1)].capacity > 0;
        if (!open || seen[static_cast<std::size_t>(from)]) continue;
        seen[static_cast<std::size_t>(from)] = true;
        queue.push(from);
      }
    }
    return seen;
  }

 private:
  struct Edge {
    int to;
    std::int64_t capacity;
  };
  std::vector<Edge> edges_;
  std::vector<std::vector<int>> edges_of_;
  std::vector<int> level_;
  std::vector<std::size_t> next_;

  bool layer(int source, int sink) {
    level_.assign(edges_of_.size(), -1);
    level_[static_cast<std::size_t>(source)] = 0;
    std::queue<int> queue;
    queue.push(source);
    while (!queue.empty()) {
      const int v = queue.front();
      queue.pop();
      for (const int e : edges_of_[static_cast<std::size_t>(v)]) {
        const Edge& edge = edges_[static_cast<std::size_t>(e)];
        if (edge.capacity <= 0 || level_[static_cast<std::size_t>(edge.to)] >= 0) continue;
        level_[static_cast<std::size_t>(edge.to)] = level_[static_cast<std::size_t>(v)] + 1;
        queue.push(edge.to);
      }
    }
    return level_[static_cast<std::size_t>(sink)] >= 0;
  }
  std::int64_t push(int v, int sink, std::int64_t limit) {
    if (v == sink) return limit;
    const auto at = static_cast<std::size_t>(v);
    for (; next_[at] < edges_of_[at].size(); ++next_[at]) {
      const int e = edges_of_[at][next_[at]];
      Edge& edge = edges_[static_cast<std::size_t>(e)];
      if (edge.capacity <= 0 || level_[static_cast<std::size_t>(edge.to)] != level_[at] + 1)
        continue;
      const std::int64_t sent = push(edge.to, sink, std::min(limit, edge.capacity));
      if (sent == 0) continue;
      edge.capacity -= sent;
      edges_[static_cast<std::size_t>(e ^ 1)].capacity += sent;
      return sent;
    }
    return 0;
  }
};

bool is_cheap(Op op) { return row_of(op).work != Work::full; }

std::int64_t bytes_of_node(const Node& n) {
  std::int64_t bytes = 0;
  for (const Type& t : n.results) bytes += bytes_of(t);
  return bytes;
}

// The node before which the most bytes live.
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

}  // namespace

Graph recompute_cheap(const Graph& graph) {
  const int cut = busiest(graph);
  std::set<int> results;
  for (const Output& o : graph.outputs()) results.insert(o.value.node);
  // Two flow nodes for each node before the cut: its edge in to out is cut where it is kept.
  Flow flow(2 * cut + 2);
  const int source = 2 * cut, sink = 2 * cut + 1;
  for (int id = 0; id < cut; ++id) {
    const Node& n = graph.node(id);
    const bool free = n.op == Op::parameter || results.contains(id);
    flow.add(2 * id, 2 * id + 1, free ? 0 : bytes_of_node(n));
    if (!is_cheap(n.op)) {
      flow.add(source, 2 * id, kInfinite);
      continue;
    }
    for (const Value v : n.operands) flow.add(2 * v.node + 1, 2 * id, kInfinite);
  }
  std::vector<bool> read_after(static_cast<std::size_t>(cut));
  for (int id = cut; id < graph.size(); ++id) {
    for (const Value v : graph.node(id).operands) {
      if (v.node < cut) read_after[static_cast<std::size_t>(v.node)] = true;
    }
  }
  for (int id = 0; id < cut; ++id) {
    if (read_after[static_cast<std::size_t>(id)]) flow.add(2 * id + 1, sink, kInfinite);
  }
  flow.run(source, sink);
  const std::vector<bool> late = flow.reaching(sink);

  Graph out;
  out.name = graph.name;
  std::vector<int> early(static_cast<std::size_t>(graph.size()), -1),
      again(static_cast<std::size_t>(cut), -1);
  const auto copy = [&](int id, auto&& operand) {
    const Node& n = graph.node(id);
    std::vector<Value> operands;
    for (const Value v : n.operands) operands.push_back(operand(v));
    return out.add(n.op, std::move(operands), n.attributes, n.name).node;
  };
  // A value read after the cut: kept, or computed there from what is.
  auto after = [&](auto&& self, Value v) -> Value {
    const auto at = static_cast<std::size_t>(v.node);
    if (v.node >= cut || !late[2 * at] || !is_cheap(graph.node(v).op)) return {early[at], v.index};
    if (again[at] < 0) again[at] = copy(v.node, [&](Value o) { return self(self, o); });
    return {again[at], v.index};
  };
  for (int id = 0; id < graph.size(); ++id) {
    early[static_cast<std::size_t>(id)] = copy(id, [&](Value v) {
      return id < cut ? Value{early[static_cast<std::size_t>(v.node)], v.index} : after(after, v);
    });
  }
  for (const Output& o : graph.outputs())
    out.add_output(o.name, {early[static_cast<std::size_t>(o.value.node)], o.value.index});
  return eliminate_dead(out);
}

}  // namespace logitless::ir
