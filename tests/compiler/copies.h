// Finds the instructions of a program that only copy.
#pragma once

#include <string>
#include <variant>
#include <vector>

#include "compiler/plan/program.h"

namespace logitless::test {

inline bool is_copy(const ir::Instruction& i) {
  const auto* loop = std::get_if<ir::Pointwise>(&i.what);
  return loop != nullptr && !loop->reduction && loop->steps.empty() && loop->leaves.size() == 1 &&
         loop->leaves[0].kind == ir::Pointwise::Leaf::Kind::memory &&
         loop->leaves[0].view.dtype == loop->store.view.dtype;
}

// Returns the names of the values that are copied, also in loops.
inline std::vector<std::string> copies(const ir::Program& program) {
  std::vector<std::string> names;
  for (const ir::Instruction& i : program.instructions) {
    if (is_copy(i)) names.push_back(i.name);
    const auto* loop = std::get_if<ir::LoopRun>(&i.what);
    if (loop == nullptr) continue;
    for (const std::string& name : copies(*loop->body)) names.push_back(name);
  }
  return names;
}

}  // namespace logitless::test
