#include <algorithm>
#include <map>
#include <set>
#include <vector>

#include "compiler/analysis/split.h"
#include "compiler/ir/build.h"
#include "compiler/passes/find_heads.h"

namespace logitless::ir {
namespace {

constexpr int kMostSteps = 12;  // between lse or pick and the select that masks it

// A condition on a row: `value` is true, or `value` equals the number; or the opposite.
struct Condition {
  Value value;
  std::optional<double> number;
  bool negated = false;
  bool operator==(const Condition&) const = default;
};

class RowMasks {
 public:
  RowMasks(const Graph& graph, const Lists<int>& users, const FoundHead& f, const HeadGradients& to)
      : g_(graph), users_(users), f_(f), to_(to), rows_(elements_of(graph.type(f.targets))) {
    find_replaced();
  }

  std::optional<IgnoredRows> run() {
    std::optional<IgnoredRows> rows = by_select();
    return rows ? rows : by_product();
  }

 private:
  // Rows whose results a select drops.
  std::optional<IgnoredRows> by_select() {
    for (int id = 0; id < g_.size(); ++id) {
      const Node& n = g_.node(id);
      if (!is_row_map(n, Function::select)) continue;
      // The row counts where the select takes a value and not a constant.
      for (const bool first : {true, false}) {
        const Condition c = condition_of(n.operands[0], first);
        if (!is_constant(n.operands[first ? 2 : 1]) || !masks(c)) continue;
        IgnoredRows rows;
        rows.target = target_of(c);
        rows.counts = n.operands[0];
        rows.negated = !first;
        rows.products = products_;
        return rows;
      }
    }
    return std::nullopt;
  }
  // Rows whose results are multiplied by a weight of 0.
  std::optional<IgnoredRows> by_product() {
    for (int id = 0; id < g_.size(); ++id) {
      const Node& n = g_.node(id);
      if (!is_row_map(n, Function::mul)) continue;
      for (const Value weight : n.operands) {
        const Value v = plain(weight);
        const Condition c{v, 0.0, /*negated=*/true};
        if (is_constant(v) || g_.node(v).op == Op::broadcast || needs_head(v) || !masks(c))
          continue;
        IgnoredRows rows;
        rows.counts = weight;
        rows.products = products_;
        return rows;
      }
    }
    return std::nullopt;
  }
  bool is_row_map(const Node& n, Function function) const {
    return is_map(n, function) && elements_of(n.results[0]) == rows_;
  }
  // Returns whether the value is computed from the head's results or logits.
  bool needs_head(Value v) const {
    std::set<int> seen;
    std::vector<int> work = {v.node};
    while (!work.empty()) {
      const int id = work.back();
      work.pop_back();
      if (id == f_.lse || id == f_.pick || id == f_.dot) return true;
      if (id < f_.dot || !seen.insert(id).second) continue;
      for (const Value o : g_.node(id).operands) work.push_back(o.node);
    }
    return false;
  }

  const Graph& g_;
  const Lists<int>& users_;
  const FoundHead& f_;
  const HeadGradients& to_;
  const std::int64_t rows_;
  std::set<int> replaced_;  // nodes that the operation replaces, which read lse as well
  // These belong to the condition that is tried: products with its weight, nodes that unread() has
  // visited, and whether values are 0.
  std::vector<int> products_;
  std::set<int> visited_;
  std::map<Value, bool> zero_;

  void find_replaced() {
    std::vector<int> work;
    for (const int id : {to_.d_x, to_.d_w, to_.d_bias, f_.pick_log_prob ? f_.pick : -1}) {
      if (id >= 0) work.push_back(id);
    }
    const std::vector<int> roots = work;
    while (!work.empty()) {
      const int id = work.back();
      work.pop_back();
      const bool big = g_.node(id).results[0].shape == g_.node(f_.z).results[0].shape;
      const bool root = std::find(roots.begin(), roots.end(), id) != roots.end();
      if (!(big || root) || !replaced_.insert(id).second) continue;
      for (const Value o : g_.node(id).operands) work.push_back(o.node);
    }
  }

  // Returns the value before reshapes that leave the rows' order.
  Value plain(Value v) const {
    while (g_.node(v).op == Op::reshape) v = g_.node(v).operands[0];
    return v;
  }
  const Node* constant_of(Value v) const {
    while (g_.node(v).op == Op::broadcast || g_.node(v).op == Op::reshape)
      v = g_.node(v).operands[0];
    const Node& n = g_.node(v);
    return n.op == Op::constant && n.attributes->begin.empty() ? &n : nullptr;
  }
  bool is_constant(Value v) const { return constant_of(v) != nullptr; }
  bool is_zero(Value v) const {
    const Node* const n = constant_of(v);
    return n != nullptr && n->attributes->number == 0.0;
  }

  // Returns the condition that v is true, or that it is false.
  Condition condition_of(Value v, bool truth) const {
    v = plain(v);
    const Node& n = g_.node(v);
    if (n.op == Op::map) {
      const Function f = n.attributes->function;
      if (f == Function::logical_not) return condition_of(n.operands[0], !truth);
      if (f == Function::eq || f == Function::ne) {
        for (const std::size_t i : {0u, 1u}) {
          if (const Node* const c = constant_of(n.operands[1 - i]))
            return {plain(n.operands[i]), c->attributes->number, (f == Function::ne) == truth};
        }
      }
    }
    return {v, std::nullopt, !truth};
  }
  // Returns the target of which no row counts, if the condition is that the target is another.
  std::optional<std::int64_t> target_of(const Condition& c) const {
    if (!c.number || !c.negated || c.value != plain(f_.targets)) return std::nullopt;
    const double vocab = static_cast<double>(sizes_of(g_.type(f_.w))[0]);
    if (*c.number >= 0.0 && *c.number < vocab) return std::nullopt;
    return static_cast<std::int64_t>(*c.number);
  }

  // Returns whether the select takes operand `of` where the condition holds, and zero or anything
  // else where it does not.
  bool selects(const Node& n, const Condition& c, std::size_t of) const {
    return is_map(n, Function::select) && condition_of(n.operands[0], of == 1) == c;
  }

  bool masks(const Condition& c) {
    products_.clear();
    visited_.clear();
    zero_.clear();
    return zero_without(to_.d_lse, c) && zero_without(to_.d_pick, c) &&
           unread(f_.lse, c, kMostSteps) && unread(f_.pick, c, kMostSteps);
  }

  // Returns whether the value is 0 in the rows that do not count, by the condition itself.
  bool is_weight(Value v, const Condition& c) const {
    return c.number == 0.0 && c.negated && plain(v) == c.value;
  }

  // Returns whether a gradient is 0 in the rows that do not count.
  bool zero_without(const Cotangent& cotangent, const Condition& c) {
    if (!cotangent.value.valid() || is_zero(cotangent.value)) return true;
    return is_identity(cotangent.dims) && elements_of(g_.type(cotangent.value)) == rows_ &&
           zero_without(cotangent.value, c, kMostSteps);
  }
  bool zero_without(Value v, const Condition& c, int steps) {
    v = plain(v);
    if (const auto known = zero_.find(v); known != zero_.end()) return known->second;
    return zero_[v] = found_zero(v, c, steps);
  }
  bool found_zero(Value v, const Condition& c, int steps) {
    const Node& n = g_.node(v);
    if (is_zero(v) || is_weight(v, c)) return true;
    if (steps == 0 || n.op != Op::map) return false;
    // A product with a number that is not finite is NaN in the program, and 0 where it is skipped.
    const auto zero = [&](std::size_t i) { return zero_without(n.operands[i], c, steps - 1); };
    switch (n.attributes->function) {
      case Function::select:
        return (selects(n, c, 1) && is_zero(n.operands[2])) ||
               (selects(n, c, 2) && is_zero(n.operands[1])) || (zero(1) && zero(2));
      case Function::neg:
      case Function::div:
        return zero(0);
      case Function::mul:
        return zero(0) || zero(1);
      case Function::add:
      case Function::sub:
        return zero(0) && zero(1);
      default:
        return false;
    }
  }

  // Returns whether nothing reads the rows of this value that do not count.
  bool unread(int id, const Condition& c, int steps) {
    // A visit that failed has ended the whole search.
    if (id < 0 || !visited_.insert(id).second) return true;
    for (const Output& o : g_.outputs()) {
      if (o.value.node == id) return false;
    }
    for (const int u : users_[static_cast<std::size_t>(id)]) {
      if (replaced_.contains(u)) continue;
      const Node& n = g_.node(u);
      if (steps == 0 || n.results.size() != 1 || elements_of(n.results[0]) != rows_) return false;
      const auto reads = [&](std::size_t i) { return n.operands[i].node == id; };
      if ((selects(n, c, 1) && reads(1) && !reads(0) && !reads(2)) ||
          (selects(n, c, 2) && reads(2) && !reads(0) && !reads(1)))
        continue;
      if (is_row_map(n, Function::mul) &&
          (is_weight(n.operands[0], c) || is_weight(n.operands[1], c))) {
        products_.push_back(u);
        continue;
      }
      const bool row_by_row = n.op == Op::map || n.op == Op::cast || n.op == Op::reshape;
      if (!row_by_row || !unread(u, c, steps - 1)) return false;
    }
    return true;
  }
};

}  // namespace

std::optional<IgnoredRows> ignored_rows(const Graph& graph, const Lists<int>& users,
                                        const FoundHead& head, const HeadGradients& gradients) {
  return RowMasks(graph, users, head, gradients).run();
}

}  // namespace logitless::ir
