// The largest flow through a network, and so its smallest cut.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <queue>
#include <vector>

namespace logitless::ir {

// Capacity of an edge that is never cut.
inline constexpr std::int64_t kInfinite = std::numeric_limits<std::int64_t>::max() / 4;

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

}  // namespace logitless::ir
