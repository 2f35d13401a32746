#include "compiler/plan/fuse.h"

#include <algorithm>
#include <array>
#include <utility>

#include "compiler/analysis/values.h"
#include "compiler/ops/op.h"

namespace logitless::ir {
namespace {

// The most registers of one loop, with a margin for leaves of a reduction.
constexpr int kMostSteps = 40;
// Registers of a final loop, where shared values count once; merging into a result takes some more.
constexpr std::size_t kMostRegistersUsed = 48;

bool reads_elementwise(const Node& user, Value v) {
  if (is_elementwise(user)) return true;
  return user.op == Op::reduce && user.attributes->reduce != Reduce::argmax &&
         user.operands[0] == v;
}

// Random numbers and casts from f64 need f64 registers, which the readers' loops may not have. The
// readers' f32 results then have the same bits whatever is fused.
bool needs_wide(const Graph& graph, const Node& n) {
  if (n.op == Op::map) return is_random(n.attributes->function);
  return n.op == Op::cast && n.results[0].dtype == DType::f32 &&
         graph.type(n.operands[0]).dtype == DType::f64;
}

// The first few of a set of values.
class FirstValues {
 public:
  static constexpr std::size_t kMatter = 3;  // more than a cheap loop reads
  void add(Value v) {
    const auto end = values_.begin() + size_;
    if (size_ == kMatter || std::find(values_.begin(), end, v) != end) return;
    values_[size_++] = v;
  }
  void add(const FirstValues& other) {
    for (std::size_t i = 0; i < other.size_; ++i) add(other.values_[i]);
  }
  std::size_t size() const { return size_; }

 private:
  std::array<Value, kMatter> values_;
  std::size_t size_ = 0;
};

struct Cost {
  int steps = 0;
  bool costly = false;
  FirstValues memory;  // values of the full shape that it reads
};

// A value in a register, and its reversed dimensions: bit d. Results of a loop are several values.
using Register = std::pair<Value, unsigned>;

// Collects the registers of a node's loop: its result, the values it computes, and those it reads.
void find_registers(const Graph& graph, const std::vector<bool>& inlined, int id,
                    std::vector<Register>& used) {
  const auto computed = [&](int node) {
    return node == id ||
           (inlined[static_cast<std::size_t>(node)] && is_elementwise(graph.node(node)));
  };
  used.assign(1, {{id, 0}, 0u});
  for (std::size_t next = 0; next < used.size(); ++next) {
    auto [value, backwards] = used[next];
    if (!computed(value.node)) continue;
    const Node& n = graph.node(value);
    if (n.op == Op::flip) backwards ^= 1u << static_cast<unsigned>(n.attributes->axis);
    for (const Value v : n.operands) {
      const Register read{v, backwards};
      if (std::find(used.begin(), used.end(), read) == used.end()) used.push_back(read);
    }
  }
}

}  // namespace

bool is_elementwise(const Node& n) { return row_of(n.op).work == Work::elementwise; }

namespace {

class Inliner {
 public:
  Inliner(const Graph& graph, const std::vector<int>& again)
      : g_(graph),
        again_(again),
        users_(graph.users()),
        inlined_(static_cast<std::size_t>(graph.size())),
        output_(inlined_.size()),
        cost_(inlined_.size()) {
    for (const Output& o : g_.outputs()) output_[static_cast<std::size_t>(o.value.node)] = true;
  }

  std::vector<bool> run() && {
    inline_cheap();
    inline_shared();
    shorten();
    return std::move(inlined_);
  }

 private:
  const Graph& g_;
  const std::vector<int>& again_;
  const Lists<int> users_;
  std::vector<bool> inlined_, output_;
  std::vector<Cost> cost_;
  std::vector<Register> used_;  // memory of count()

  // Returns whether every reader could compute the node.
  bool readable(int id) const {
    const auto at = static_cast<std::size_t>(id);
    const std::span<const int> readers = users_[at];
    return !output_[at] && !readers.empty() && !needs_wide(g_, g_.node(id)) &&
           std::all_of(readers.begin(), readers.end(), [&](int u) {
             return reads_elementwise(g_.node(u), {id, 0});
           });
  }

  // Computes the cost of an elementwise node, including operands without memory.
  void count(int id) {
    const Node& n = g_.node(id);
    Cost& c = cost_[static_cast<std::size_t>(id)];
    c.steps = 1;
    c.costly = is_costly(n);
    for (const Value v : n.operands) {
      const auto from = static_cast<std::size_t>(v.node);
      c.steps += rounds_operand(g_, n, v) ? 2 : 1;
      if (row_of(g_.node(v).op).of_nothing) continue;
      if (inlined_[from]) {
        c.steps += cost_[from].steps - 1;
        c.costly = c.costly || cost_[from].costly;
        c.memory.add(cost_[from].memory);
      } else if (g_.node(v).op != Op::broadcast) {
        c.memory.add(v);
      }
    }
    if (c.steps <= kMostSteps) return;
    // The sum counts shared operands once for each reader; a loop computes them once.
    find_registers(g_, inlined_, id, used_);
    if (const auto used = static_cast<int>(registers_of(used_)); used <= kMostSteps) {
      c.steps = used;
      return;
    }
    // The loop is too long, so the longest operand gets memory.
    const auto steps = [&](Value v) { return cost_[static_cast<std::size_t>(v.node)].steps; };
    Value longest = n.operands[0];
    for (const Value v : n.operands) {
      if (steps(v) > steps(longest)) longest = v;
    }
    inlined_[static_cast<std::size_t>(longest.node)] = false;
    c.steps -= steps(longest);
  }

  void inline_cheap() {
    for (int id = 0; id < g_.size(); ++id) {
      const auto at = static_cast<std::size_t>(id);
      if (row_of(g_.node(id).op).of_nothing) {
        inlined_[at] = true;
        continue;
      }
      if (!is_elementwise(g_.node(id))) continue;
      count(id);
      if (!readable(id)) continue;
      const Cost& c = cost_[at];
      const bool cheap = !c.costly && c.steps <= kCheapSteps && c.memory.size() <= 2;
      const bool again = std::find(again_.begin(), again_.end(), id) != again_.end();
      inlined_[at] = users_[at].size() == 1 || cheap || (again && c.steps <= kMostSteps / 2);
    }
  }

  // Fuses several readers into one loop if they all end in the same stored value.
  void inline_shared() {
    constexpr int kNone = -1, kSeveral = -2;
    std::vector<int> loop(inlined_.size(), kNone);  // by node: the loop that computes it
    for (int id = g_.size() - 1; id >= 0; --id) {
      const auto at = static_cast<std::size_t>(id);
      if (!is_elementwise(g_.node(id))) {
        loop[at] = id;
        continue;
      }
      int in = kNone;
      for (const int u : users_[at]) {
        const int of_user = loop[static_cast<std::size_t>(u)];
        if (of_user != kNone) in = in == kNone || in == of_user ? of_user : kSeveral;
      }
      if (readable(id) && !inlined_[at] && in >= 0 && cost_[at].steps <= kMostSteps / 2)
        inlined_[at] = true;
      loop[at] = inlined_[at] ? in : id;
    }
  }

  // Splits loops that are too long at a value in their middle. The costs so far count shared values
  // once for each reader, or not at all.
  void shorten() {
    std::vector<Register> used;
    for (int id = 0; id < g_.size(); ++id) {
      const Node& n = g_.node(id);
      if (inlined_[static_cast<std::size_t>(id)] || !(is_elementwise(n) || n.op == Op::reduce))
        continue;
      for (find_registers(g_, inlined_, id, used); registers_of(used) > kMostRegistersUsed;
           find_registers(g_, inlined_, id, used)) {
        std::sort(used.begin(), used.end());
        inlined_[static_cast<std::size_t>(middle_of(used, id))] = false;
      }
    }
  }
  // Returns the registers of a loop, with those of operands that it rounds.
  std::size_t registers_of(const std::vector<Register>& used) const {
    std::size_t count = used.size();
    for (const auto& [v, backwards] : used) {
      const Node& n = g_.node(v);
      for (const Value operand : n.operands) count += rounds_operand(g_, n, operand) ? 1 : 0;
    }
    return count;
  }
  // Returns the value computed in the loop of `id` that would make the longest separate loop.
  int middle_of(const std::vector<Register>& used, int id) const {
    int middle = -1;
    std::size_t most = 0;
    std::vector<Register> of_value;
    for (const auto& [v, backwards] : used) {
      if (v.node == id || !inlined_[static_cast<std::size_t>(v.node)] ||
          !is_elementwise(g_.node(v)))
        continue;
      find_registers(g_, inlined_, v.node, of_value);
      const std::size_t own = registers_of(of_value);
      if (own <= kMostRegistersUsed && own > most) {
        most = own;
        middle = v.node;
      }
    }
    return middle;
  }
};

}  // namespace

std::vector<bool> inlined_nodes(const Graph& graph, const std::vector<int>& again) {
  return Inliner(graph, again).run();
}

bool may_be_recomputed(const Graph& graph, int node) {
  const Node& n = graph.node(node);
  const DType dtype = n.results[0].dtype;
  if (!is_elementwise(n) || needs_wide(graph, n) || (dtype != DType::f32 && dtype != DType::f64))
    return false;
  const auto reads = [&](Value v) { return v.node == node; };
  const std::vector<Output>& outputs = graph.outputs();
  if (std::any_of(outputs.begin(), outputs.end(), [&](const Output& o) { return reads(o.value); }))
    return false;
  return std::all_of(graph.nodes().begin(), graph.nodes().end(), [&](const Node& user) {
    return std::none_of(user.operands.begin(), user.operands.end(), reads) ||
           reads_elementwise(user, {node, 0});
  });
}

}  // namespace logitless::ir
