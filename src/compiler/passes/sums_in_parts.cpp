#include <algorithm>
#include <map>
#include <utility>
#include <vector>

#include "compiler/ir/build.h"
#include "compiler/passes/form_loops.h"

namespace logitless::ir {
namespace {

// A sum over chunks, and the dimension that is divided: of the operand with the least elements that
// the product does not contract.
struct Divided {
  std::size_t operand = 0;
  int dim = 0, of_result = 0;
  std::int64_t size = 0;
};

std::vector<int> free_dims(const Node& n, std::size_t operand, int rank) {
  const auto& batch = operand == 0 ? n.attributes->batch_a : n.attributes->batch_b;
  const auto& contract = operand == 0 ? n.attributes->contract_a : n.attributes->contract_b;
  std::vector<int> taken = batch;
  taken.insert(taken.end(), contract.begin(), contract.end());
  return other_dims(rank, taken);
}

class Divider {
 public:
  Divider(const Graph& graph, const Region& region, int parts)
      : g_(graph), region_(region), parts_(parts) {}

  std::optional<SumsInParts> run(std::int64_t least) {
    const std::optional<LargeSums> sums = large_sums(g_, region_, least);
    if (!sums) return std::nullopt;
    for (const int node : sums->nodes) {
      const std::optional<Divided> divided = divided_of(node);
      if (!divided) return std::nullopt;
      sums_[node] = *divided;
    }
    made_.region = region_;
    made_.region.nodes.clear();
    made_.bytes = sums->bytes / parts_;
    write();
    return std::move(made_);
  }

 private:
  const Graph& g_;
  const Region& region_;
  const int parts_;
  std::map<int, Divided> sums_;  // by node of the graph
  std::vector<int> place_;       // by node: its new index
  std::map<int, int> phases_;    // by new index of a node inside
  SumsInParts made_;

  int phase(int node) const { return region_.phase[static_cast<std::size_t>(node)]; }
  Value moved(Value v) const { return {place_[static_cast<std::size_t>(v.node)], v.index}; }

  std::optional<Divided> divided_of(int node) const {
    const Node& n = g_.node(node);
    if (n.op != Op::dot) return std::nullopt;
    std::optional<Divided> best;
    int result = static_cast<int>(n.attributes->batch_a.size());
    for (std::size_t i = 0; i < 2; ++i) {
      const Type& type = g_.type(n.operands[i]);
      const bool less = elements_of(type) <= elements_of(g_.type(n.operands[1 - i]));
      for (const int dim : free_dims(n, i, type.rank())) {
        const std::int64_t size = sizes_of(type)[static_cast<std::size_t>(dim)];
        if (less && size % parts_ == 0 && (!best || size > best->size))
          best = Divided{i, dim, result, size};
        ++result;
      }
    }
    return best;
  }

  void write() {
    Graph& out = made_.graph;
    out.name = g_.name;
    for (int id = 0; id < g_.size(); ++id) {
      const auto divided = sums_.find(id);
      if (divided != sums_.end()) {
        place_.push_back(divide(id, divided->second));
        continue;
      }
      std::vector<Value> operands;
      for (const Value v : g_.node(id).operands) operands.push_back(moved(v));
      place_.push_back(out.copy(g_, id, std::move(operands)).node);
      if (region_.inside(id)) enter(place_.back(), region_.nodes.at(id), phase(id));
    }
    for (const Output& o : g_.outputs()) out.add_output(o.name, moved(o.value));
    Region& region = made_.region;
    region.seed = moved(region_.seed);
    region.nodes.sort();
    region.phases += parts_ - 1;
    region.phase.assign(static_cast<std::size_t>(out.size()), 0);
    for (const auto& [node, phase] : phases_) region.phase[static_cast<std::size_t>(node)] = phase;
  }

  void enter(int node, const Chunked& how, int phase) {
    made_.region.nodes.emplace(node, how);
    phases_[node] = phase;
  }

  // Writes the parts of a sum, each of a loop of its own, and returns the node that joins them.
  int divide(int id, const Divided& d) {
    Graph& out = made_.graph;
    const Node& n = g_.node(id);
    const Value operand = n.operands[d.operand];
    const std::int64_t size = d.size / parts_;
    std::vector<Value> parts;
    for (int k = 0; k < parts_; ++k) {
      const int phase = region_.phases - 1 + k;
      Shape begin(sizes_of(g_.type(operand)).size(), Dim(0)), end = g_.type(operand).shape;
      begin[static_cast<std::size_t>(d.dim)] = Dim(k * size);
      end[static_cast<std::size_t>(d.dim)] = Dim((k + 1) * size);
      const Value slice = ir::slice(out, moved(operand), std::move(begin), std::move(end));
      if (const Split* split = region_.split(operand)) {
        // A chunk computes the operand itself: its part is inside, too.
        enter(slice.node, *chunked_by_result(out, slice.node, *split), phase);
      }
      std::vector<Value> operands = {moved(n.operands[0]), moved(n.operands[1])};
      operands[d.operand] = slice;
      Attributes attributes = n.attributes;
      attributes.type.shape = {};
      const Value part = out.add(Op::dot, std::move(operands), std::move(attributes), n.name);
      enter(part.node, region_.nodes.at(id), phase);
      parts.push_back(part);
    }
    Attributes joined;
    joined.axis = d.of_result;
    joined.location = n.attributes->location;
    return out.add(Op::concat, std::move(parts), std::move(joined), n.name).node;
  }
};

}  // namespace

std::optional<SumsInParts> sums_in_parts(const Graph& graph, const Region& region, int parts,
                                         std::int64_t least) {
  return Divider(graph, region, parts).run(least);
}

}  // namespace logitless::ir
