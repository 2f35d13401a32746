#include "sample/program.h"

#include <algorithm>
#include <vector>

#include "core/check.h"

namespace logitless {
namespace {

constexpr double kSlack = 1.2;    // a default plan over the fastest, in predicted time
constexpr double kNoWork = 1e-3;  // extra multiply-adds that are no recomputation

// Returns the bytes of the smallest plan that recomputes nothing and is fast enough; 0: none.
std::size_t frugal(const std::vector<PlanPoint>& plans) {
  double fastest = 0.0;
  for (const PlanPoint& p : plans)
    if (p.extra_work < kNoWork && (fastest == 0.0 || p.seconds < fastest)) fastest = p.seconds;
  std::size_t least = 0;
  for (const PlanPoint& p : plans) {
    if (p.extra_work >= kNoWork || p.seconds > kSlack * fastest) continue;
    if (least == 0 || p.value_bytes < least) least = std::max<std::size_t>(p.value_bytes, 1);
  }
  return least;
}

CompiledProgram compiled(const Context& context, const Graph& graph, std::size_t memory_budget,
                         bool chunk) {
  CompileOptions options;
  options.chunk = chunk;
  options.device.kind = context.device().kind;
  if (options.device.kind == DeviceKind::cuda) {
    options.device.compute_capability = context.device().compute_capability;
    options.device.card = context.device().card;
  } else {
    options.threads = context.threads();
  }
  if (memory_budget > 0) {
    options.memory_budget = memory_budget;
    options.budget_with_scratch = true;
    CompiledProgram made = compile(graph, options);
    require(made.arena_bytes() <= memory_budget, "memory_budget: ", memory_budget,
            " bytes are left for the program of the ids, whose least plan takes ",
            made.arena_bytes());
    return made;
  }
  options.explore = chunk;
  CompiledProgram made = compile(graph, options);
  const std::size_t wanted = frugal(made.plans());
  if (wanted == 0) return made;
  options.explore = false;
  options.memory_budget = wanted;
  CompiledProgram small = compile(graph, options);
  return small.arena_bytes() < made.arena_bytes() ? small : made;
}

}  // namespace

SampleProgram::SampleProgram(const Context& context, const Graph& graph, std::size_t memory_budget,
                             bool chunk)
    : program_(compiled(context, graph, memory_budget, chunk)) {
  if (context.device().kind == DeviceKind::cuda) prepared_ = program_.prepare(context);
}

void SampleProgram::run(const Context& context, std::span<const NamedPointer> tensors,
                        void* arena) const {
  const auto pointer = [&](const CompiledProgram::Tensor& tensor) {
    const auto found = std::find_if(tensors.begin(), tensors.end(),
                                    [&](const NamedPointer& p) { return p.name == tensor.name; });
    check(found != tensors.end(), "no pointer for ", tensor.name);
    return found->data;
  };
  std::vector<const void*> parameters;
  std::vector<void*> results;
  for (const auto& tensor : program_.parameters()) parameters.push_back(pointer(tensor));
  for (const auto& tensor : program_.results()) results.push_back(pointer(tensor));
  if (prepared_)
    prepared_->run(parameters, results, arena, context.stream());
  else
    program_.run(parameters, results, arena);
}

}  // namespace logitless
