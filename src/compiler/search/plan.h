// What the search for programs of less memory works on: plans, and the moves that make others of
// them. A kind of move is one row of move_kinds(): forming loops is one, others may join it.
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
  std::string seed;   // the big value it was grown around
  std::string cut;    // "dimension 0"
  std::string group;  // of its loops: form_loops.h
  int count = 1;      // regions alike, as of the layers of a network
  std::int64_t extent = 0, chunk = 0;
  int phases = 1;
  bool unit_tangents = false;
  std::int64_t before = 0, after = 0;  // bytes of values, when it was made
  double extra_work = 0.0;             // multiply-adds more, as a fraction of all
  std::vector<std::string> boundaries;
};

// A graph, and what it takes.
struct Plan {
  Graph graph;
  Program program;
  // Of the program; they stay when a plan that another one beats gives up its graph and program.
  std::int64_t bytes = 0;        // of values
  std::int64_t arena_bytes = 0;  // with the scratch of kernels; 0 until the search ends or asks
  double seconds = 0.0;          // predicted, of a run
  double work = 0.0;             // multiply-adds
  std::vector<ChunkedRegion> regions;
  int from = -1;  // the plan that a move made it of; -1: none
  // When its moves have been asked for: values at its peak that no move makes smaller, and why; and
  // those that moves make smaller for time or work, which a budget would allow.
  std::vector<std::string> refusals, paid_for;
};

// For moves that serve no node's value: this, and numbers below it.
inline constexpr int kNoNode = -1;

// Where a plan's values take the most memory.
struct Peak {
  int instruction = -1;
  std::vector<int> live;  // buffers, the biggest first
};

// A graph that computes the same as the plan's, perhaps in less memory.
struct Move {
  Graph graph;
  std::vector<ChunkedRegion> regions;  // all of the graph's; the search fills in before and after
};

// What a kind of move asks of the search.
class MoveSink {
 public:
  virtual ~MoveSink() = default;
  virtual const Target& target() const = 0;
  virtual std::int64_t chunks() const = 0;  // of every loop; 0: to be chosen
  // Before the moves that serve the value of a node: whether they are wanted. A plan may be asked
  // for its moves more than once. `role`: equal for nodes alike; what was in vain for one of them
  // comes last for the others.
  virtual bool begin(int node, std::uint64_t role) = 0;
  // Lowers and plans the move. False when there is no room for more.
  virtual bool consider(Move move) = 0;
  // Whether the last one took less memory than the plan.
  virtual bool lowered() const = 0;
  // Whether there is room for variants of moves that did.
  virtual bool spacious() const = 0;
  // After those moves: whether moves for other values are wanted.
  virtual bool end(int node) = 0;
  // Says why the value of a node stays as it is.
  virtual void refuse(int node, const std::string& why) = 0;
};

struct MoveKind {
  std::string_view name;  // "form-loops"
  bool of_instructions;   // serves what instructions take for themselves; false: values
  // The moves that lower the peak of a plan, those that promise the most first. Deterministic, and
  // the same for every budget.
  void (*propose)(const Plan& plan, const Peak& peak, MoveSink& sink);
};
std::span<const MoveKind> move_kinds();

// The rows: each in a file of its name.
void propose_loops(const Plan& plan, const Peak& peak, MoveSink& sink);
void propose_chunks(const Plan& plan, const Peak& peak, MoveSink& sink);
void propose_heads(const Plan& plan, const Peak& peak, MoveSink& sink);

// "gelu %h f32[N, V]": a node as reports name it.
std::string shown(const Graph& graph, int node);

// An axis in so many rounds: equal ones, or where chunks are large as many as the target wants
// multiples of, and a shorter one at the end.
std::int64_t chunk_of(std::int64_t extent, std::int64_t rounds, const Target& target);

// The plan's region of this group with chunks of `chunk` elements.
Move resized(const Plan& plan, std::size_t region, std::int64_t chunk);

// A value below this part of the peak is not worth a move.
inline constexpr std::int64_t kLeastShare = 256;

}  // namespace logitless::ir
