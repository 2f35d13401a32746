#include <algorithm>
#include <utility>
#include <vector>

#include "compiler/analysis/split.h"
#include "compiler/ir/build.h"
#include "compiler/passes/passes.h"
#include "compiler/passes/rewriter.h"

namespace logitless::ir {
namespace {

constexpr std::int64_t kLeastElements = 1 << 20, kLeastColumns = 1024;

bool is_whole(const Graph& graph, const Node& n) {
  if (n.op != Op::reduce || n.attributes->dims.size() < 2) return false;
  const Type& type = graph.type(n.operands[0]);
  const int last = type.rank() - 1;
  const std::vector<int>& dims = n.attributes->dims;
  return std::find(dims.begin(), dims.end(), last) != dims.end() &&
         elements_of(type) >= kLeastElements && sizes_of(type).back() >= kLeastColumns;
}

}  // namespace

Graph rows_first(const Graph& graph) {
  Rewriter to(graph);
  return to.run([&](int id) -> Value {
    const Node& n = graph.node(id);
    if (!is_whole(graph, n)) return {};
    const int last = graph.type(n.operands[0]).rank() - 1;
    const DType dtype = n.results[0].dtype;
    const DType between = size_of(dtype) == 2 ? DType::f32 : dtype;
    std::vector<int> rest = n.attributes->dims;
    std::erase(rest, last);
    const Reduce kind = n.attributes->reduce;
    const Value rows = reduce(to.out, kind, to(n.operands[0]), {last}, between);
    return cast(to.out, reduce(to.out, kind, rows, rest, between), dtype);
  });
}

}  // namespace logitless::ir
