#include <algorithm>
#include <map>
#include <optional>
#include <utility>
#include <vector>

#include "compiler/analysis/dim_parts.h"
#include "compiler/analysis/split.h"
#include "compiler/ir/build.h"
#include "compiler/passes/passes.h"
#include "compiler/passes/rewriter.h"

namespace logitless::ir {
namespace {

using Sizes = std::vector<std::int64_t>;

class PartProducts {
 public:
  explicit PartProducts(const Graph& graph) : g_(graph), to_(graph) {}

  Graph run() {
    return to_.run([&](int id) -> Value {
      const Value made = g_.node(id).op == Op::dot ? parted(id) : Value{};
      if (g_.node(id).op != Op::reshape) return made;
      std::vector<Value> operands = to_.operands_of(id);
      operands[0] = before_reshapes(operands[0]);
      return to_.out.copy(g_, id, std::move(operands));
    });
  }

 private:
  const Graph& g_;
  Rewriter to_;
  std::map<Value, std::optional<std::vector<DimParts>>> known_;

  // Skips reshapes of a value of the new graph.
  Value before_reshapes(Value v) const {
    while (to_.out.node(v).op == Op::reshape) v = to_.out.node(v).operands[0];
    return v;
  }

  // Returns the value's dimensions in terms of the value below its reshapes and transposes.
  const std::optional<std::vector<DimParts>>& parts(Value v) {
    const auto found = known_.find(v);
    if (found != known_.end()) return found->second;
    const Node& n = g_.node(v);
    std::optional<std::vector<DimParts>> made;
    if (n.op == Op::reshape || n.op == Op::transpose) {
      made = parts(n.operands[0]);
      if (made && n.op == Op::transpose) made = transposed_parts(*made, n.attributes->dims);
      if (made && n.op == Op::reshape) made = reshaped_parts(*made, sizes_of(n.results[0]));
      // Attention writes any layout.
    } else if (n.op != Op::attention && n.op != Op::attention_grad) {
      made = parts_of(sizes_of(g_.type(v)));
    }
    return known_[v] = std::move(made);
  }

  // Returns the sizes into which each dimension of an operand should be split: those that are
  // contiguous in memory. Kernels read rows by vectors, so a copy is better if no row is long.
  std::vector<Sizes> wanted(Value v, const std::vector<int>& batch) {
    constexpr std::int64_t kLeastRow = 8;
    const Sizes shape = sizes_of(g_.type(v));
    std::vector<Sizes> sizes;
    for (const std::int64_t size : shape) sizes.push_back({size});
    const auto& dims = parts(v);
    if (!dims || elements_of(g_.type(v)) == 0) return sizes;
    std::vector<Sizes> found;
    bool row = false;
    for (std::size_t d = 0; d < shape.size(); ++d) {
      Sizes& of = found.emplace_back();
      const DimParts joined = joined_parts((*dims)[d]);
      const bool outside =
          std::find(batch.begin(), batch.end(), static_cast<int>(d)) != batch.end();
      for (const DimPart& part : joined) {
        of.push_back(part.size);
        row = row || (part.stride == 1 && part.size >= kLeastRow && !outside);
      }
      if (joined.empty()) of = {1};
    }
    return row ? found : sizes;
  }

  // Returns the rewritten dot, or an invalid value if it stays.
  Value parted(int id) {
    const Node& n = g_.node(id);
    Attributes a = n.attributes;
    std::vector<Sizes> x = wanted(n.operands[0], a.batch_a), y = wanted(n.operands[1], a.batch_b);
    const auto agree = [&](const std::vector<int>& of_x, const std::vector<int>& of_y) {
      for (std::size_t i = 0; i < of_x.size(); ++i) {
        Sizes &one = x[static_cast<std::size_t>(of_x[i])],
              &other = y[static_cast<std::size_t>(of_y[i])];
        if (one.size() < other.size()) one = other;
        other = one;
      }
    };
    agree(a.batch_a, a.batch_b);
    agree(a.contract_a, a.contract_b);
    if (is_whole(x) && is_whole(y)) return {};
    const Origin origin(to_.out, {}, n.attributes->location);
    const Value left = reshaped(n.operands[0], x), right = reshaped(n.operands[1], y);
    a.batch_a = places(x, a.batch_a);
    a.batch_b = places(y, a.batch_b);
    a.contract_a = places(x, a.contract_a);
    a.contract_b = places(y, a.contract_b);
    const Value made = to_.out.add(Op::dot, {left, right}, std::move(a), n.name);
    return reshape(to_.out, made, n.results[0].shape);
  }
  static bool is_whole(const std::vector<Sizes>& dims) {
    for (const Sizes& sizes : dims) {
      if (sizes.size() > 1) return false;
    }
    return true;
  }
  Value reshaped(Value v, const std::vector<Sizes>& dims) {
    Shape shape;
    for (const Sizes& sizes : dims) {
      for (const std::int64_t size : sizes) shape.emplace_back(size);
    }
    return reshape(to_.out, before_reshapes(to_(v)), std::move(shape));
  }
  // Returns the indices of dimensions after the split.
  static std::vector<int> places(const std::vector<Sizes>& dims, const std::vector<int>& of) {
    std::vector<int> first(dims.size() + 1, 0), to;
    for (std::size_t d = 0; d < dims.size(); ++d)
      first[d + 1] = first[d] + static_cast<int>(dims[d].size());
    for (const int d : of) {
      const auto at = static_cast<std::size_t>(d);
      for (int k = first[at]; k < first[at + 1]; ++k) to.push_back(k);
    }
    return to;
  }
};

}  // namespace

Graph part_products(const Graph& graph) { return eliminate_dead(PartProducts(graph).run()); }

}  // namespace logitless::ir
