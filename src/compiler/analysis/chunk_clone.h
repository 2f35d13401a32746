// Copies a node into the body of a loop, where it runs on one chunk.
#pragma once

#include <vector>

#include "compiler/analysis/split.h"
#include "compiler/ir/graph.h"

namespace logitless::ir {

// How the adjacent dimensions of a cut value collapse into one of the chunk's size.
struct Collapse {
  bool cut = false;
  Split s;
  Dim size;

  int dim(int d) const {
    return !cut || d < s.dim ? d : d < s.dim + s.count ? s.dim : d - s.count + 1;
  }
  std::vector<int> dims(const std::vector<int>& list) const;
  Shape shape(const Shape& from, Dim group) const;
  Shape shape(const Shape& from) const { return shape(from, size); }
};
Dim chunk_size(const Loop& loop, std::int64_t factor);
Collapse collapse(const Loop& loop, const Split& split);

// The interface for clone rules: a rule changes attributes and operands and then calls add().
class ChunkClone {
 public:
  // `first`: index of the chunk's first element. `small`: the result is a few numbers for each row.
  ChunkClone(Loop& loop, Value first, const Node& node, const Chunked& how,
             std::vector<Value> inputs, bool small);

  const Node& n;
  const Chunked& how;
  Collapse result;             // of result 0
  std::vector<Collapse> from;  // of the operands
  Attributes a;
  std::vector<Value> operands;

  // Converts an index along the axis to one from the chunk's first element, or back.
  Value shift(Value index, std::int64_t factor, Function f);
  Dim size(std::int64_t factor) const { return chunk_size(loop_, factor); }

  // Adds the node; sums over the chunks get a wide dtype.
  Value add();
  // Returns `value`, in f64 if it is small and merged over chunks, since each merge rounds.
  Value merged(Value value);

 private:
  Loop& loop_;
  const Value first_;
  const bool small_;
  bool is_sum() const;  // over the chunks
};

}  // namespace logitless::ir
