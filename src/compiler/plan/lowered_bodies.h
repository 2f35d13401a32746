// Bodies of loops that were lowered before. Loops alike share a body in the graph (form_loops.h),
// and a graph that a pass made of another one has most of its loops, so that few are lowered.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <unordered_map>
#include <vector>

#include "compiler/ir/graph.h"
#include "compiler/plan/program.h"

namespace logitless::ir {

// All of one target. Names in the programs are those of the first loop that had the body.
class LoweredBodies {
 public:
  // All that a body's program depends on.
  struct Key {
    const Loop* loop = nullptr;
    std::int64_t chunk = 0;
    bool keeps_order = false, parts_in_place = false;
    std::vector<std::int64_t> strides;  // of operands and results, in order
    auto operator<=>(const Key&) const = default;
  };
  struct Body {
    std::shared_ptr<const Program> program;
    bool parts_wait = false;  // as Lowering has it
  };

  // nullptr: not yet.
  const Body* find(const Key& key) const {
    const auto found = bodies_.find(key);
    return found != bodies_.end() ? &found->second : nullptr;
  }
  const Body& keep(std::shared_ptr<const Loop> loop, Key key, Body body) {
    loops_.push_back(std::move(loop));
    return bodies_.insert_or_assign(std::move(key), std::move(body)).first->second;
  }
  // The program of a body, made by `make` unless one of the same description was: loops formed anew
  // around the same values, in another graph of a search.
  template <typename Make>
  const Body& described(std::string description, Make&& make) {
    const auto [found, is_new] = described_.try_emplace(std::move(description));
    if (is_new) found->second = make();
    return found->second;
  }

 private:
  std::map<Key, Body> bodies_;
  std::unordered_map<std::string, Body> described_;
  std::vector<std::shared_ptr<const Loop>> loops_;  // whose addresses stand in keys
};

}  // namespace logitless::ir
