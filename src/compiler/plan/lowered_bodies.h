// A cache of lowered loop bodies. Equal loops share a body in the graph (form_loops.h), and graphs
// made from each other share most loops, so few bodies are lowered.
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

// All bodies are for one target. Names in a program are those of the first loop with the body.
class LoweredBodies {
 public:
  // Everything that a body's program depends on.
  struct Key {
    const Loop* loop = nullptr;
    std::int64_t chunk = 0;
    bool keeps_order = false, parts_in_place = false;
    // Strides of operands and results, in order, then whether the memory of each is unaligned.
    std::vector<std::int64_t> strides;
    auto operator<=>(const Key&) const = default;
  };
  struct Body {
    std::shared_ptr<const Program> program;
    bool parts_wait = false;  // Lowering::parts_wait()
  };

  // Returns nullptr if the body is not lowered yet.
  const Body* find(const Key& key) const {
    const auto found = bodies_.find(key);
    return found != bodies_.end() ? &found->second : nullptr;
  }
  const Body& keep(std::shared_ptr<const Loop> loop, Key key, Body body) {
    loops_.push_back(std::move(loop));
    return bodies_.insert_or_assign(std::move(key), std::move(body)).first->second;
  }
  // Returns a body with this description, or calls `make`. Loops that another graph of a search
  // forms around the same values have one description.
  template <typename Make>
  const Body& described(std::string description, Make&& make) {
    const auto [found, is_new] = described_.try_emplace(std::move(description));
    if (is_new) found->second = make();
    return found->second;
  }

 private:
  std::map<Key, Body> bodies_;
  std::unordered_map<std::string, Body> described_;
  std::vector<std::shared_ptr<const Loop>> loops_;  // keeps the addresses in keys valid
};

}  // namespace logitless::ir
