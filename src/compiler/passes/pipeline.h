// The passes before chunks are chosen, in order.
#pragma once

#include <span>
#include <string_view>

#include "compiler/ir/graph.h"

namespace logitless::ir {

// One pass: a graph in, a graph out; results, parameters and their order stay.
struct Pass {
  std::string_view name;
  Graph (*run)(const Graph&);
};
std::span<const Pass> pipeline();

}  // namespace logitless::ir
