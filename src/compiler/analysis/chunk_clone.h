// A node written into the body of a loop, to run on one chunk.
#pragma once

#include <vector>

#include "compiler/analysis/split.h"
#include "compiler/ir/graph.h"

namespace logitless::ir {

// Dimensions of a cut value that stand together become one of the chunk's size.
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

// What the rule of an operation changes: attributes and operands, before add().
class ChunkClone {
 public:
  // `first`: the number of the chunk's first element. small: the result is a few numbers a row.
  ChunkClone(Loop& loop, Value first, const Node& node, const Chunked& how,
             std::vector<Value> inputs, bool small);

  const Node& n;
  const Chunked& how;
  Collapse result;             // of result 0
  std::vector<Collapse> from;  // of the operands
  Attributes a;
  std::vector<Value> operands;

  // An index counted from the chunk's first element instead of the axis's, or back.
  Value shift(Value index, std::int64_t factor, Function f);
  Dim size(std::int64_t factor) const { return chunk_size(loop_, factor); }

  // The node. What is to be summed over the chunks is wide.
  Value add();
  // `value`, in f64 where it is merged and small: merging rounds once a chunk.
  Value merged(Value value);

 private:
  Loop& loop_;
  const Value first_;
  const bool small_;
  bool is_sum() const;  // over the chunks
};

}  // namespace logitless::ir
