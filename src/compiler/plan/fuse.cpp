#include "compiler/plan/fuse.h"

#include <algorithm>
#include <set>

#include "compiler/ops/op.h"

namespace logitless::ir {
namespace {

// Registers that one loop may use, with room for leaves of a reduction.
constexpr int kMostSteps = 40;
// Of a loop as it ends up, shared values counted once; merging into a result takes some more.
constexpr std::size_t kMostRegistersUsed = 48;
// Steps computed again in each of several readers.
constexpr int kCheapSteps = 4;

bool is_costly(const Node& n) {
  if (n.op != Op::map) return false;
  switch (n.attributes.function) {
    case Function::exp:
    case Function::log:
    case Function::log1p:
    case Function::expm1:
    case Function::tanh:
    case Function::erf:
    case Function::sigmoid:
    case Function::sin:
    case Function::cos:
    case Function::pow:
      return true;
    default:
      return false;
  }
}

bool reads_elementwise(const Node& user, Value v) {
  if (is_elementwise(user)) return true;
  return user.op == Op::reduce && user.attributes.reduce != Reduce::argmax && user.operands[0] == v;
}

struct Cost {
  int steps = 0;
  bool costly = false;
  std::set<Value> memory;  // values of the full shape that it reads
};

// Nodes that the loop of a node holds in registers: it, what it computes, and what it reads.
std::set<int> registers_of(const Graph& graph, const std::vector<bool>& inlined, int id) {
  std::set<int> used = {id};
  std::vector<int> work = {id};
  while (!work.empty()) {
    const Node& n = graph.node(work.back());
    work.pop_back();
    for (const Value v : n.operands) {
      const bool computed =
          inlined[static_cast<std::size_t>(v.node)] && is_elementwise(graph.node(v));
      if (used.insert(v.node).second && computed) work.push_back(v.node);
    }
  }
  return used;
}

}  // namespace

bool is_elementwise(const Node& n) { return row_of(n.op).work == Work::elementwise; }

std::vector<bool> inlined_nodes(const Graph& graph) {
  const std::vector<std::vector<int>> users = graph.users();
  std::vector<bool> inlined(static_cast<std::size_t>(graph.size())), output(inlined.size());
  for (const Output& o : graph.outputs()) output[static_cast<std::size_t>(o.value.node)] = true;
  std::vector<Cost> cost(inlined.size());
  // Loops that end up computing a node, for nodes that are inlined: the readers' own, or theirs.
  for (int id = 0; id < graph.size(); ++id) {
    const Node& n = graph.node(id);
    const auto at = static_cast<std::size_t>(id);
    if (row_of(n.op).of_nothing) {
      inlined[at] = true;
      continue;
    }
    if (!is_elementwise(n)) continue;
    Cost& c = cost[at];
    c.steps = 1;
    c.costly = is_costly(n);
    for (const Value v : n.operands) {
      const auto from = static_cast<std::size_t>(v.node);
      c.steps += 1;
      if (row_of(graph.node(v).op).of_nothing) continue;
      if (inlined[from]) {
        c.steps += cost[from].steps - 1;
        c.costly = c.costly || cost[from].costly;
        c.memory.insert(cost[from].memory.begin(), cost[from].memory.end());
      } else if (graph.node(v).op != Op::broadcast) {
        c.memory.insert(v);
      }
    }
    if (c.steps > kMostSteps) {
      // Too long for one loop: the longest operand gets memory.
      Value longest = n.operands[0];
      for (const Value v : n.operands) {
        if (cost[static_cast<std::size_t>(v.node)].steps >
            cost[static_cast<std::size_t>(longest.node)].steps)
          longest = v;
      }
      inlined[static_cast<std::size_t>(longest.node)] = false;
      c.steps -= cost[static_cast<std::size_t>(longest.node)].steps;
    }
    const std::vector<int>& readers = users[at];
    const bool readable =
        !output[at] && !readers.empty() && std::all_of(readers.begin(), readers.end(), [&](int u) {
          return reads_elementwise(graph.node(u), {id, 0});
        });
    if (!readable) continue;
    const bool cheap = !c.costly && c.steps <= 2 * kCheapSteps && c.memory.size() <= 2;
    inlined[at] = readers.size() == 1 || cheap;
  }
  // One loop around several readers: a value whose readers all end in the same stored value.
  std::vector<std::set<int>> loops(inlined.size());
  for (int id = graph.size() - 1; id >= 0; --id) {
    const auto at = static_cast<std::size_t>(id);
    const Node& n = graph.node(id);
    if (!is_elementwise(n)) {
      loops[at] = {id};
      continue;
    }
    bool readable = !output[at] && !users[at].empty();
    std::set<int> in;
    for (const int u : users[at]) {
      readable = readable && reads_elementwise(graph.node(u), {id, 0});
      in.insert(loops[static_cast<std::size_t>(u)].begin(),
                loops[static_cast<std::size_t>(u)].end());
    }
    if (readable && !inlined[at] && in.size() == 1 && cost[at].steps <= kMostSteps / 2)
      inlined[at] = true;
    loops[at] = inlined[at] ? in : std::set<int>{id};
  }
  // What is shared was counted once for each reader, or not at all: the loops that are too long
  // give memory to a value in their middle.
  for (int id = 0; id < graph.size(); ++id) {
    const Node& n = graph.node(id);
    if (inlined[static_cast<std::size_t>(id)] || !(is_elementwise(n) || n.op == Op::reduce))
      continue;
    for (std::set<int> used = registers_of(graph, inlined, id); used.size() > kMostRegistersUsed;
         used = registers_of(graph, inlined, id)) {
      int middle = -1;
      std::size_t most = 0;
      for (const int v : used) {
        if (v == id || !inlined[static_cast<std::size_t>(v)] || !is_elementwise(graph.node(v)))
          continue;
        const std::size_t own = registers_of(graph, inlined, v).size();
        if (own <= kMostRegistersUsed && own > most) {
          most = own;
          middle = v;
        }
      }
      inlined[static_cast<std::size_t>(middle)] = false;
    }
  }
  return inlined;
}

}  // namespace logitless::ir
