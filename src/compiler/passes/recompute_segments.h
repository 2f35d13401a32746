// Values that the forward would keep for the backward, computed again by products and attention,
// too: checkpoints of layers, and finer.
#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include "compiler/ir/graph.h"
#include "compiler/passes/max_flow.h"

namespace logitless::ir {

// Multiply-adds of a node as lowering counts them, loops in full; 0 of what multiplies nothing and
// of heads. Sizes are bound.
double multiply_adds_of(const Graph& graph, int node);

// What a graph can give up of what lives over the peak, between the nodes before and after, and
// what it costs to compute it again. A price, the multiply-adds that a byte kept there is worth,
// makes a choice: of all sets of values kept the one of the least bytes * price + work, by a
// minimum cut. A dearer byte gives up all that a cheaper one does, and more. Of values alike, those
// of the layers of a network, the first are given up first: theirs are the last to be needed again.
class RecomputeCurve {
 public:
  // multiply_adds_per_byte: those that the target could do while a byte is read or written, which
  // counts as work of operations that multiply little. stored: by node, whether its value is in
  // memory, and so rounded to its dtype; empty: none is.
  RecomputeCurve(const Graph& graph, double multiply_adds_per_byte, std::vector<bool> stored = {});

  struct Point {
    std::vector<bool> again;   // nodes before the peak that are computed again after it
    std::int64_t kept = 0;     // bytes over the peak
    double multiply_adds = 0;  // more than the graph's
    double cost = 0.0;         // work and, by what they cost in the choice, bytes kept
    double weight = 0.0;
  };
  Point at(double price) const;
  Point cheapest() const;  // elementwise operations alone are run again
  Point smallest() const;  // all but heads and loops are
  // The choice at the price at which both are equal; none where it is one of them. Together these
  // are all choices there are.
  std::optional<Point> between(const Point& more, const Point& less) const;

  // Whether the other curve, of another graph, has the same choices.
  bool same_choices(const RecomputeCurve& other) const;

  // The graph of a choice. Nodes are the given ones and copies of them, before what first reads
  // them; results are kept. With fewer readers a value of 16 bits may need no memory any more:
  // where it was stored it is rounded by casts, so that results have the same bits.
  Graph graph_of(const Point& point) const;

 private:
  const Graph& g_;
  int cut_;                             // nodes before it come before the peak
  std::vector<std::int64_t> bytes_;     // to keep a node's results
  std::vector<double> weight_, work_;   // to keep it, to compute it again
  std::vector<double> multiply_adds_;   // to compute it again
  std::vector<bool> free_, read_late_;  // needs no memory of the arena; is read behind the cut
  std::vector<bool> stored_, pinned_;   // is in memory; stays before what it is added to

  // Its smallest cut is a choice. Two flow nodes for each node before the cut: its edge in to out
  // is cut where it is kept, the one from the source where it is run again; that one has its
  // capacity from the price.
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
  bool can_run_again(int node) const;
  bool is_rounded(int node) const;
};

}  // namespace logitless::ir
