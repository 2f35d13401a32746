// The largest flow through a network, and so its smallest cut.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <numeric>
#include <queue>
#include <span>
#include <vector>

namespace logitless::ir {

// Capacity of an edge that is never cut.
inline constexpr std::int64_t kInfinite = std::numeric_limits<std::int64_t>::max() / 4;

// Largest flow by shortest augmenting layers (Dinitz, 1970).
class Flow {
 public:
  explicit Flow(int nodes) : begin_(static_cast<std::size_t>(nodes) + 1) {}

  void add(int from, int to, std::int64_t capacity) {
    edges_.push_back({to, capacity});
    edges_.push_back({from, 0});
    ++begin_[static_cast<std::size_t>(from) + 1];
    ++begin_[static_cast<std::size_t>(to) + 1];
  }

  // Once, when all edges are there.
  void run(int source, int sink) {
    sort_edges();
    while (layer(source, sink)) {
      next_.assign(begin_.begin(), begin_.end() - 1);
      while (push(source, sink, kInfinite) > 0) {
      }
    }
  }

  // Nodes from which the sink can still be reached.
  std::vector<bool> reaching(int sink) const {
    std::vector<bool> seen(begin_.size() - 1);
    std::queue<int> queue;
    queue.push(sink);
    seen[static_cast<std::size_t>(sink)] = true;
    while (!queue.empty()) {
      const int v = queue.front();
      queue.pop();
      for (const int e : edges_of(v)) {
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
  std::vector<Edge> edges_;         // each before the one that gives its flow back
  std::vector<std::size_t> begin_;  // of each node's edges, in sorted_
  std::vector<int> sorted_;         // edges by the node they leave, then as they came
  std::vector<int> level_;
  std::vector<std::size_t> next_;

  std::span<const int> edges_of(int node) const {
    const auto at = static_cast<std::size_t>(node);
    return std::span(sorted_).subspan(begin_[at], begin_[at + 1] - begin_[at]);
  }
  void sort_edges() {
    std::partial_sum(begin_.begin(), begin_.end(), begin_.begin());
    sorted_.resize(edges_.size());
    std::vector<std::size_t> place = begin_;
    for (std::size_t e = 0; e < edges_.size(); ++e) {
      const auto from = static_cast<std::size_t>(edges_[e ^ 1].to);
      sorted_[place[from]++] = static_cast<int>(e);
    }
  }

  bool layer(int source, int sink) {
    level_.assign(begin_.size() - 1, -1);
    level_[static_cast<std::size_t>(source)] = 0;
    std::queue<int> queue;
    queue.push(source);
    while (!queue.empty()) {
      const int v = queue.front();
      queue.pop();
      for (const int e : edges_of(v)) {
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
    for (; next_[at] < begin_[at + 1]; ++next_[at]) {
      const int e = sorted_[next_[at]];
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
