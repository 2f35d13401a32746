// Maximum flow through a network, which also gives its minimum cut.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <numeric>
#include <span>
#include <vector>

namespace logitless::ir {

// Capacity of an edge that is never cut.
inline constexpr std::int64_t kInfinite = std::numeric_limits<std::int64_t>::max() / 4;

// Maximum flow by shortest augmenting layers (Dinitz, 1970).
class Flow {
 public:
  explicit Flow(int nodes) : begin_(static_cast<std::size_t>(nodes) + 1) {}

  // Adds an edge and returns its index.
  std::size_t add(int from, int to, std::int64_t capacity) {
    edges_.push_back({to, capacity});
    edges_.push_back({from, 0});
    ++begin_[static_cast<std::size_t>(from) + 1];
    ++begin_[static_cast<std::size_t>(to) + 1];
    return edges_.size() - 2;
  }
  // Must be called before run().
  void set_capacity(std::size_t edge, std::int64_t capacity) { edges_[edge].capacity = capacity; }

  // Returns whether both have the same edges in the same order.
  bool operator==(const Flow& other) const {
    return begin_.size() == other.begin_.size() && edges_ == other.edges_;
  }

  // Must be called after the last edge; run() calls it if needed. Copies of a prepared network are
  // prepared.
  void prepare() {
    if (sorted_.empty()) sort_edges();
  }
  // Runs once.
  void run(int source, int sink) {
    prepare();
    while (layer(source, sink)) {
      next_.assign(begin_.begin(), begin_.end() - 1);
      while (push(source, sink, kInfinite) > 0) {
      }
    }
  }

  // Returns the nodes from which the sink is reachable in the residual network.
  std::vector<bool> reaching(int sink) const {
    std::vector<bool> seen(begin_.size() - 1);
    std::vector<int> queue = {sink};
    seen[static_cast<std::size_t>(sink)] = true;
    for (std::size_t next = 0; next < queue.size(); ++next) {
      const int v = queue[next];
      for (const int e : edges_of(v)) {
        const int from = edges_[static_cast<std::size_t>(e)].to;
        const bool open = edges_[static_cast<std::size_t>(e ^ 1)].capacity > 0;
        if (!open || seen[static_cast<std::size_t>(from)]) continue;
        seen[static_cast<std::size_t>(from)] = true;
        queue.push_back(from);
      }
    }
    return seen;
  }

 private:
  struct Edge {
    int to;
    std::int64_t capacity;
    bool operator==(const Edge&) const = default;
  };
  std::vector<Edge> edges_;         // each edge precedes its reverse edge
  std::vector<std::size_t> begin_;  // by node: begin of its edges in sorted_
  std::vector<int> sorted_;         // edges by the node that they leave, then by their order
  std::vector<int> level_, queue_;
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
    queue_.assign(1, source);
    for (std::size_t next = 0; next < queue_.size(); ++next) {
      const int v = queue_[next];
      for (const int e : edges_of(v)) {
        const Edge& edge = edges_[static_cast<std::size_t>(e)];
        if (edge.capacity <= 0 || level_[static_cast<std::size_t>(edge.to)] >= 0) continue;
        level_[static_cast<std::size_t>(edge.to)] = level_[static_cast<std::size_t>(v)] + 1;
        // Later nodes have the same distance from the source, so no shortest path passes through
        // them.
        if (edge.to == sink) return true;
        queue_.push_back(edge.to);
      }
    }
    return false;
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
