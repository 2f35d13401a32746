#include "compiler/analysis/same_dims.h"

#include "compiler/analysis/split.h"
#include "compiler/ir/build.h"

namespace logitless::ir {
namespace {

std::vector<int> joined(std::vector<int> first, const std::vector<int>& second) {
  first.insert(first.end(), second.begin(), second.end());
  return first;
}

void add_all(std::vector<SameDim>& list, std::size_t operand, int rank) {
  for (int d = 0; d < rank; ++d) list.push_back({operand, d, d});
}

// Adds dimensions with equally many elements before them in both shapes, and after them.
void add_reshaped(std::vector<SameDim>& list, const std::vector<std::int64_t>& from,
                  const std::vector<std::int64_t>& to) {
  std::size_t i = 0, j = 0;
  std::int64_t before = 1, before_to = 1;
  while (i < from.size() && j < to.size()) {
    if (before == before_to && from[i] == to[j] && from[i] > 1) {
      list.push_back({0, static_cast<int>(i), static_cast<int>(j)});
      before *= from[i++];
      before_to *= to[j++];
    } else if (before <= before_to && (before < before_to || from[i] == 1 || from[i] < to[j])) {
      before *= from[i++];
    } else {
      before_to *= to[j++];
    }
  }
}

void add_dot(std::vector<SameDim>& list, const Graph& graph, const Node& n) {
  const Attributes& a = n.attributes;
  const auto side = [&](std::size_t operand, const std::vector<int>& batch,
                        const std::vector<int>& contract, int next) {
    for (std::size_t i = 0; i < batch.size(); ++i)
      list.push_back({operand, batch[i], static_cast<int>(i)});
    for (const int d : other_dims(graph.type(n.operands[operand]).rank(), joined(batch, contract)))
      list.push_back({operand, d, next++});
    return next;
  };
  const int next = side(0, a.batch_a, a.contract_a, static_cast<int>(a.batch_a.size()));
  side(1, a.batch_b, a.contract_b, next);
}

}  // namespace

std::vector<SameDim> same_dims(const Graph& graph, int node) {
  const Node& n = graph.node(node);
  const Attributes& a = n.attributes;
  const int rank = n.results[0].rank();
  std::vector<SameDim> list;
  switch (n.op) {
    case Op::map:
    case Op::cast:
    case Op::stop_gradient:
      for (std::size_t i = 0; i < n.operands.size(); ++i) add_all(list, i, rank);
      break;
    case Op::broadcast:
      for (std::size_t i = 0; i < a.dims.size(); ++i)
        list.push_back({0, static_cast<int>(i), a.dims[i]});
      break;
    case Op::transpose:
      for (std::size_t i = 0; i < a.dims.size(); ++i)
        list.push_back({0, a.dims[i], static_cast<int>(i)});
      break;
    case Op::reduce: {
      int to = 0;
      for (const int d : other_dims(graph.type(n.operands[0]).rank(), a.dims))
        list.push_back({0, d, to++});
      break;
    }
    case Op::reshape:
      add_reshaped(list, sizes_of(graph.type(n.operands[0])), sizes_of(n.results[0]));
      break;
    case Op::slice:
    case Op::pad:
      for (int d = 0; d < rank; ++d) {
        if (graph.type(n.operands[0]).shape[static_cast<std::size_t>(d)] ==
            n.results[0].shape[static_cast<std::size_t>(d)])
          list.push_back({0, d, d});
      }
      break;
    case Op::concat:
      for (std::size_t i = 0; i < n.operands.size(); ++i) {
        for (int d = 0; d < rank; ++d) {
          if (d != a.axis) list.push_back({i, d, d});
        }
      }
      break;
    case Op::pick: {
      const bool several = graph.type(n.operands[0]).rank() == rank;
      int to = 0;
      for (const int d : other_dims(several ? rank : rank + 1, {a.axis})) {
        list.push_back({0, d, several ? d : to});
        ++to;
      }
      add_all(list, 1, rank);
      break;
    }
    case Op::dot:
      add_dot(list, graph, n);
      break;
    default:
      break;
  }
  return list;
}

std::vector<std::pair<int, int>> summed_dims(const Node& dot) {
  std::vector<std::pair<int, int>> pairs;
  for (std::size_t i = 0; i < dot.attributes->contract_a.size(); ++i)
    pairs.emplace_back(dot.attributes->contract_a[i], dot.attributes->contract_b[i]);
  return pairs;
}

double product_work(const Graph& graph) {
  double work = 0.0;
  for (const Node& n : graph.nodes()) {
    if (n.op != Op::dot) continue;
    double of_one = static_cast<double>(elements_of(n.results[0]));
    for (const int d : n.attributes->contract_a)
      of_one *=
          static_cast<double>(graph.type(n.operands[0]).shape[static_cast<std::size_t>(d)].value());
    work += of_one;
  }
  return work;
}

}  // namespace logitless::ir
