#include "compiler/plan/row_alignment.h"

#include <algorithm>
#include <map>
#include <memory>

#include "compiler/ops/op.h"

namespace logitless::ir {
namespace {

constexpr std::int64_t kLeastColumns = 256;

bool is_product(const Node& n) { return n.op == Op::dot || n.op == Op::fused_dot; }
bool is_elementwise(const Node& n) { return row_of(n.op).work == Work::elementwise; }
bool moves(const Node& n) { return n.op == Op::reshape || n.op == Op::transpose; }

// Returns whether the reader, which is no loop, accepts rows with gaps between them.
bool takes_gaps(const Graph& g, const Node& reader, Value v) {
  switch (reader.op) {
    case Op::reshape: {
      // A broadcast of the dimensions before the last one.
      const Shape &from = g.type(v).shape, &to = reader.results[0].shape;
      return !to.empty() && !from.empty() && to.back() == from.back();
    }
    case Op::dot:
    case Op::fused_dot:
    case Op::reduce:
    case Op::transpose:
      return true;
    case Op::pick:
      return reader.operands[0] == v;
    default:
      return is_elementwise(reader);
  }
}

// Requirements of the readers of a value on its rows.
struct Rows {
  bool wanted = false;  // a matrix product makes or reads it, also through views and in loops
  bool gaps = true;     // all of them accept gaps
};

// The rows of all values of a graph, and of the bodies of its loops.
class RowsOf {
 public:
  // gaps_in_outputs: the memory of outputs may have gaps, too.
  RowsOf(const Graph& g, bool gaps_in_outputs) : g_(g) {
    for (const Node& n : g.nodes()) {
      first_.push_back(rows_.size());
      rows_.resize(rows_.size() + n.results.size());
    }
    for (const Output& o : g.outputs()) at(o.value).gaps = gaps_in_outputs;
    // Iterates from readers to operands.
    for (int id = g.size() - 1; id >= 0; --id) {
      const Node& n = g.node(id);
      if (is_product(n)) at({id, 0}).wanted = true;
      n.op == Op::loop ? read_by_loop(id) : read_by(id);
    }
  }

  const Rows& operator[](Value v) const { return rows_[number(v)]; }

  // Returns whether the instruction that makes the value writes rows with gaps between them.
  bool writes_gaps(Value v) const {
    const Node& n = g_.node(v);
    if (moves(n)) return takes_gaps(g_, n, n.operands[0]) && writes_gaps(n.operands[0]);
    if (n.op != Op::loop) return is_product(n) || is_elementwise(n);
    const auto result = static_cast<std::size_t>(v.index);
    const Loop& loop = *n.attributes->loop;
    return loop.outputs[result].kind == Loop::Out::stack &&
           bodies_.at(&loop)->writes_gaps(loop.body.outputs()[result].value);
  }

 private:
  const Graph& g_;
  std::vector<std::size_t> first_;  // by node: index of its first value
  std::vector<Rows> rows_;          // by value
  std::map<const Loop*, std::unique_ptr<const RowsOf>> bodies_;

  std::size_t number(Value v) const {
    return first_[static_cast<std::size_t>(v.node)] + static_cast<std::size_t>(v.index);
  }
  Rows& at(Value v) { return rows_[number(v)]; }

  void read_by(int id) {
    const Node& n = g_.node(id);
    for (const Value v : n.operands) {
      const Rows of_view = moves(n) ? at({id, 0}) : Rows{};
      at(v).wanted = at(v).wanted || is_product(n) || of_view.wanted;
      at(v).gaps = at(v).gaps && takes_gaps(g_, n, v) && of_view.gaps;
    }
  }

  // A value that a body reads has the rows of the body's parameter, and a stacked result those of
  // the body's output.
  void read_by_loop(int id) {
    const Node& n = g_.node(id);
    const Loop& loop = *n.attributes->loop;
    std::unique_ptr<const RowsOf>& kept = bodies_[&loop];
    if (kept == nullptr) kept = std::make_unique<const RowsOf>(loop.body, /*gaps_in_outputs=*/true);
    const RowsOf& body = *kept;
    const std::vector<int> parameters = loop.body.parameters();
    for (std::size_t i = 0; i < n.operands.size(); ++i) {
      const Rows& inside = body[{parameters[i + 1], 0}];
      Rows& rows = at(n.operands[i]);
      rows = {rows.wanted || inside.wanted, rows.gaps && inside.gaps};
    }
    for (std::size_t i = 0; i < n.results.size(); ++i) {
      const Rows& inside = body[loop.body.outputs()[i].value];
      Rows& rows = at({id, static_cast<std::int32_t>(i)});
      rows = {rows.wanted || inside.wanted, rows.gaps && inside.gaps};
    }
  }
};

// Returns whether rows are long, and begin between multiples of `bytes`.
bool are_unaligned(const Type& type, std::int64_t bytes) {
  if (type.rank() < 2) return false;
  const std::int64_t columns = type.shape.back().value();
  const auto size = static_cast<std::int64_t>(size_of(type.dtype));
  return columns >= kLeastColumns && columns * size % bytes != 0 && bytes % size == 0;
}

}  // namespace

std::vector<Value> values_of_products(const Graph& g, std::int64_t bytes) {
  const RowsOf rows(g, /*gaps_in_outputs=*/false);
  std::vector<Value> list;
  for (int id = 0; id < g.size(); ++id) {
    const Node& n = g.node(id);
    if (n.op == Op::parameter || moves(n) || (n.results.size() != 1 && n.op != Op::loop)) continue;
    for (std::int32_t i = 0; i < static_cast<std::int32_t>(n.results.size()); ++i) {
      const Value v{id, i};
      if (rows[v].wanted && rows[v].gaps && are_unaligned(g.type(v), bytes) && rows.writes_gaps(v))
        list.push_back(v);
    }
  }
  return list;
}

}  // namespace logitless::ir
