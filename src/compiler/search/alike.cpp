#include <functional>

#include "compiler/search/plan.h"

namespace logitless::ir {
namespace {

std::uint64_t mixed(std::uint64_t hash, std::uint64_t value) {
  hash ^= value + 0x9e3779b97f4a7c15u + (hash << 6) + (hash >> 2);
  hash *= 0xff51afd7ed558ccdu;
  return hash ^ (hash >> 33);
}

std::uint64_t alone(const Node& n) {
  const Attributes& a = n.attributes;
  std::uint64_t hash = mixed(static_cast<std::uint64_t>(n.op), n.operands.size());
  const auto add = [&](auto value) { hash = mixed(hash, static_cast<std::uint64_t>(value)); };
  add(a.function);
  add(a.reduce);
  add(a.axis);
  for (const auto* list : {&a.dims, &a.batch_a, &a.batch_b, &a.contract_a, &a.contract_b}) {
    add(list->size());
    for (const int d : *list) add(d);
  }
  for (const Type& type : n.results) {
    add(type.dtype);
    for (const Dim& d : type.shape)
      add(d.is_constant() ? static_cast<std::uint64_t>(d.value())
                          : std::hash<std::string>()(d.text()));
  }
  if (a.loop) {
    add(a.loop->extent);
    add(a.loop->chunk);
    add(a.loop->body.size());
  }
  return hash;
}

}  // namespace

std::vector<std::uint64_t> roles_of(const Graph& graph) {
  std::vector<std::uint64_t> own, roles;
  for (const Node& n : graph.nodes()) own.push_back(alone(n));
  roles = own;
  // Hashes of each node's readers, summed in any order.
  std::vector<std::uint64_t> readers(own.size(), 0);
  for (int id = 0; id < graph.size(); ++id) {
    const auto at = static_cast<std::size_t>(id);
    for (const Value v : graph.node(id).operands) {
      const auto from = static_cast<std::size_t>(v.node);
      roles[at] = mixed(roles[at], own[from]);
      readers[from] += mixed(own[at], static_cast<std::uint64_t>(v.index));
    }
  }
  for (std::size_t i = 0; i < roles.size(); ++i) roles[i] = mixed(roles[i], readers[i]);
  return roles;
}

}  // namespace logitless::ir
