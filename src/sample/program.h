// A compiled program that runs on the device of a context.
#pragma once

#include <cstddef>
#include <optional>
#include <span>
#include <string_view>

#include "logitless/compiler.h"
#include "logitless/context.h"
#include "logitless/graph.h"

namespace logitless {

struct NamedPointer {
  std::string_view name;
  void* data;
};

class SampleProgram {
 public:
  // With a budget it takes the fastest plan whose arena fits, and throws InvalidArgument naming the
  // least. Budget 0 takes the least memory that recomputes nothing and costs little time. `chunk`:
  // whether it may have loops. On a GPU it loads kernels.
  SampleProgram(const Context& context, const Graph& graph, std::size_t memory_budget, bool chunk);

  std::size_t arena_bytes() const { return program_.arena_bytes(); }
  const CompiledProgram& program() const { return program_; }
  // Runs it, or enqueues it on the context's stream. Every parameter and result has a pointer by
  // its name; others are ignored.
  void run(const Context& context, std::span<const NamedPointer> tensors, void* arena) const;

 private:
  CompiledProgram program_;
  std::optional<PreparedProgram> prepared_;  // on a GPU
};

}  // namespace logitless
