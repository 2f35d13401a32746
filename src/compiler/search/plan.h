// Plans, which the search for programs of less memory works on, and moves, which make plans from
// plans. A kind of move is one entry of move_kinds().
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "compiler/ir/graph.h"
#include "compiler/plan/program.h"
#include "compiler/target/target.h"

namespace logitless::ir {

struct ChunkedRegion {
  std::string seed;   // the big value that the region was grown around
  std::string cut;    // "dimension 0"
  std::string group;  // name of its loops (form_loops.h)
  int count = 1;      // equal regions, as in the layers of a network
  std::int64_t extent = 0, chunk = 0;
  int phases = 1;
  bool unit_cotangents = false;
  std::int64_t before = 0, after = 0;  // bytes of values before and after the move
  double extra_work = 0.0;             // additional multiply-adds as a fraction of all
  std::vector<std::string> boundaries;
};

// A graph, its program and their cost.
struct Plan {
  Graph graph;
  Program program;
  // Costs of the program. They remain when a beaten plan drops its graph and program.
  std::int64_t bytes = 0;        // of values
  std::int64_t arena_bytes = 0;  // values and kernel scratch; 0 until the search ends or asks
  double seconds = 0.0;          // predicted time of a run
  double work = 0.0;             // multiply-adds
  std::vector<ChunkedRegion> regions;
  int from = -1;  // the plan it was derived from by a move; -1: none
  // Known once the moves have been proposed. `refusals`: values at the peak that no move makes
  // smaller, and the reasons. `paid_for`: values that moves make smaller at the cost of time or
  // work, which only a budget allows.
  std::vector<std::string> refusals, paid_for;
};

// The node of moves that serve no node's value: this number and those below it.
inline constexpr int kNoNode = -1;

// The instruction at which a plan's values take the most memory.
struct Peak {
  int instruction = -1;
  std::vector<int> live;  // buffers, the biggest first
};

// A graph that computes the same as the plan's, perhaps in less memory.
struct Move {
  Graph graph;
  std::vector<ChunkedRegion> regions;  // all of the graph's; the search fills in before and after
};

// The interface through which a kind of move proposes moves to the search.
class MoveSink {
 public:
  virtual ~MoveSink() = default;
  virtual const Target& target() const = 0;
  virtual std::int64_t chunks() const = 0;  // of every loop; 0: to be chosen
  // Begins the moves that serve the value of a node; returns whether they are wanted. A plan may be
  // asked for its moves more than once. `role` is equal for nodes alike: a role whose moves were in
  // vain is tried last for its other nodes.
  virtual bool begin(int node, std::uint64_t role) = 0;
  // Lowers and plans the move. Returns false when the search takes no more plans.
  virtual bool consider(Move move) = 0;
  // Returns whether the last move took less memory than the plan.
  virtual bool lowered() const = 0;
  // Returns whether the search has capacity for variants of successful moves.
  virtual bool spacious() const = 0;
  // Ends the moves of a node; returns whether moves for other values are wanted.
  virtual bool end(int node) = 0;
  // Records why the value of a node stays as it is.
  virtual void refuse(int node, const std::string& why) = 0;
};

struct MoveKind {
  std::string_view name;  // "form-loops"
  bool of_instructions;   // serves memory that instructions take themselves; false: values
  // Proposes moves that lower the peak of a plan, the most promising first. Deterministic and the
  // same for every budget.
  void (*propose)(const Plan& plan, const Peak& peak, MoveSink& sink);
};
std::span<const MoveKind> move_kinds();

// The kinds of moves; each is in a file of its name.
void propose_loops(const Plan& plan, const Peak& peak, MoveSink& sink);
void propose_chunks(const Plan& plan, const Peak& peak, MoveSink& sink);
void propose_heads(const Plan& plan, const Peak& peak, MoveSink& sink);

// Returns a node as reports name it: "gelu %h f32[N, V]".
std::string shown(const Graph& graph, int node);

// Returns the chunk size that cuts an axis into `rounds` chunks. Large chunks are rounded to
// multiples that the target prefers, and the last one is shorter.
std::int64_t chunk_of(std::int64_t extent, std::int64_t rounds, const Target& target);

// Returns the move that changes a region's chunks to `chunk` elements.
Move resized(const Plan& plan, std::size_t region, std::int64_t chunk);

// A value below this fraction of the peak is not worth a move.
inline constexpr std::int64_t kLeastShare = 256;

// --- alike.cpp: nodes that play the same role in repeated parts, as in the layers of a network

// Returns a hash for each node. Nodes have equal hashes if they have the same operation, dimensions
// and types, and operands and readers with equal hashes. Different nodes may collide, so
// conclusions from equal hashes must be harmless for any nodes.
std::vector<std::uint64_t> roles_of(const Graph& graph);

// Returns whether two graphs are equal node by node, with the bodies of loops. Names and source
// locations may differ. May return false for equal graphs with fused_dot or with loops of other
// symbols.
bool same_graph(const Graph& a, const Graph& b);

}  // namespace logitless::ir
