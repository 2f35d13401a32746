// Activation checkpointing: recomputes values that the forward would store for the backward, also
// by matrix products and attention. Chooses values, not only layers.
#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include "compiler/ir/graph.h"
#include "compiler/passes/max_flow.h"

namespace logitless::ir {

// Returns the bytes of all results of a node.
std::int64_t bytes_of_node(const Node& node);

// Returns the node before which the most bytes are live, if every value but views has separate
// memory. Sizes are bound.
int busiest(const Graph& graph);

// Returns the graph in which nodes from `cut` on read copies of the nodes `again` before it, with
// the copies before their first readers. Results stay. Nodes in `rounded` are rounded to their
// dtype by casts; empty: none.
Graph recomputed_after(const Graph& graph, int cut, const std::vector<bool>& again,
                       const std::vector<bool>& rounded = {});

// Returns the multiply-adds of a node as lowering counts them, loops in full; 0 for heads and for
// operations without products. Sizes are bound.
double multiply_adds_of(const Graph& graph, int node);

// The trade-off between bytes that are live at the peak and the work to recompute them.
//
// A price, the multiply-adds that a stored byte is worth, determines a choice. It is the set of
// stored values with the least bytes * price + work, found by a minimum cut. A higher price gives
// up a superset of values. Among equal values, like those of the layers of a network, the first are
// given up first: they are needed last.
class RecomputeCurve {
 public:
  // multiply_adds_per_byte: multiply-adds in the time of one byte of traffic; they count as work of
  // operations that multiply little. stored: by node, whether its value is in memory and so rounded
  // to its dtype; empty: none is.
  RecomputeCurve(const Graph& graph, double multiply_adds_per_byte, std::vector<bool> stored = {});

  struct Point {
    std::vector<bool> again;   // nodes before the peak that are recomputed after it
    std::int64_t kept = 0;     // bytes live at the peak
    double multiply_adds = 0;  // beyond those of the graph
    double cost = 0.0;         // work plus the price of stored bytes
    double weight = 0.0;
  };
  Point at(double price) const;
  Point cheapest() const;  // only elementwise operations are recomputed
  Point smallest() const;  // everything but heads and loops is recomputed
  // Returns the choice at the price at which both cost the same; nothing if it is one of them.
  // Repeated bisection finds all choices.
  std::optional<Point> between(const Point& more, const Point& less) const;

  // Returns whether the other curve, of another graph, has the same choices.
  bool same_choices(const RecomputeCurve& other) const;

  // Returns the graph of a choice. It has copies of nodes before their first readers; results stay.
  // With fewer readers a 16-bit value may no longer be stored. If it was stored before, casts round
  // it, so that results have the same bits.
  Graph graph_of(const Point& point) const;

 private:
  const Graph& g_;
  int cut_;                             // nodes below this one precede the peak
  std::vector<std::int64_t> bytes_;     // to store a node's results
  std::vector<double> weight_, work_;   // to store it, to recompute it
  std::vector<double> multiply_adds_;   // to recompute it
  std::vector<bool> free_, read_late_;  // needs no memory of the arena; is read after the cut
  std::vector<bool> stored_, pinned_;   // is in memory; precedes the value it is added to

  // The network whose minimum cut is a choice. Each node before the cut has two flow nodes. Cutting
  // the edge between them stores the value, cutting the edge from the source recomputes it. The
  // latter edge gets its capacity from the price.
  Flow flow_;
  struct Priced {
    std::size_t edge;
    int node;
    bool operator==(const Priced&) const = default;
  };
  std::vector<Priced> priced_;

  int source() const { return 2 * cut_; }
  int sink() const { return 2 * cut_ + 1; }
  void make_flow();
  Point cut_at(double price) const;
  void pin_first(int id);
  bool can_recompute(int node) const;
  bool is_rounded(int node) const;
};

}  // namespace logitless::ir
