#include "logitless/compiler.h"

#include <algorithm>
#include <chrono>

#include "compiler/choose_chunks.h"
#include "compiler/compiled.h"
#include "compiler/exec/executor.h"
#include "compiler/graph_access.h"
#include "compiler/passes/form_loops.h"
#include "compiler/passes/lower_heads.h"
#include "compiler/passes/pipeline.h"
#include "compiler/passes/recompute_cheap.h"
#include "compiler/plan/lower.h"
#include "core/check.h"
#include "core/parallel.h"
#include "kernels/forced_kernel.h"

namespace logitless {
namespace {

// No plan of the head engine takes less.
constexpr std::int64_t kLeastHead = 1 << 16;

// What the largest workspace of a head takes.
std::int64_t head_bytes(const ir::Program& program) {
  std::int64_t most = 0;
  for (const ir::Instruction& i : program.instructions) {
    if (const auto* head = std::get_if<ir::HeadRun>(&i.what))
      most = std::max(most, program.buffers[static_cast<std::size_t>(head->scratch)].value_bytes);
  }
  return most;
}

std::vector<CompiledProgram::Tensor> tensors(const ir::Graph& graph, bool results) {
  std::vector<CompiledProgram::Tensor> list;
  const auto add = [&](const std::string& name, const ir::Type& type) {
    list.push_back({name, type.dtype, ir::sizes_of(type)});
  };
  if (results) {
    for (const ir::Output& o : graph.outputs()) add(o.name, graph.type(o.value));
  } else {
    for (const int id : graph.parameters())
      add(graph.node(id).attributes.name, graph.node(id).results[0]);
  }
  return list;
}

std::size_t find(const std::vector<CompiledProgram::Tensor>& list, std::string_view name,
                 const char* what) {
  std::string names;
  for (std::size_t i = 0; i < list.size(); ++i) {
    if (list[i].name == name) return i;
    names += concat(i > 0 ? ", " : "", list[i].name);
  }
  throw InvalidArgument(concat("there is no ", what, " '", name, "'; there are ", names));
}

}  // namespace

std::int64_t CompiledProgram::Tensor::bytes() const {
  std::int64_t count = static_cast<std::int64_t>(size_of(dtype));
  for (const std::int64_t s : shape) count *= s;
  return count;
}

const std::vector<CompiledProgram::Tensor>& CompiledProgram::parameters() const {
  return state_->parameters;
}
const std::vector<CompiledProgram::Tensor>& CompiledProgram::results() const {
  return state_->results;
}
std::size_t CompiledProgram::parameter(std::string_view name) const {
  return find(state_->parameters, name, "parameter");
}
std::size_t CompiledProgram::result(std::string_view name) const {
  return find(state_->results, name, "result");
}
std::size_t CompiledProgram::arena_bytes() const {
  return static_cast<std::size_t>(state_->program.arena_bytes);
}
std::size_t CompiledProgram::unchunked_arena_bytes() const {
  return static_cast<std::size_t>(state_->unchunked.arena_bytes);
}
int CompiledProgram::threads() const { return state_->threads; }

CompiledProgram compile(const Graph& source, const CompileOptions& options) {
  const auto begin = std::chrono::steady_clock::now();
  auto state = std::make_shared<CompiledProgram::State>();
  state->threads = options.threads > 0 ? options.threads : default_threads();
  require(options.threads >= 0 && options.threads <= kMostThreads, "compile: threads is ",
          options.threads, ", expected 0 to ", kMostThreads);
  (void)forced_kernel();  // of the tensor kernels, which ask no more when they run
  require(options.chunks >= 0, "compile: chunks is ", options.chunks, ", expected 0 or more");
  const ir::Graph& graph = GraphAccess::of(source);
  require(!graph.outputs().empty(), "compile: the program has no results");
  for (const auto& [name, value] : options.sizes)
    require(value >= 0, "compile: size ", name, " is ", value);
  const auto budget = static_cast<std::int64_t>(options.memory_budget);
  ir::Graph current = ir::bind(graph, options.sizes);
  for (const std::string& symbol : current.symbols())
    throw InvalidArgument(concat("compile: the size ", symbol, " has no value; give it in sizes"));
  const auto timed = [&](std::string_view name, auto&& run) {
    const auto start = std::chrono::steady_clock::now();
    run();
    const double seconds =
        std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
    state->passes.push_back({std::string(name), seconds, current.size()});
    ir::verify(current);
    if (options.dump && (options.dump_after == name || options.dump_after == "all"))
      options.dump(name, ir::print(current));
  };
  for (const ir::Pass& pass : ir::pipeline())
    timed(pass.name, [&] { current = pass.run(current); });
  const ir::Graph written = current;
  timed("recompute-cheap", [&] { current = ir::recompute_cheap(current); });
  timed("plan-unchunked", [&] { state->unchunked = ir::lower(current, state->threads); });
  if (options.chunk && options.head_engine && options.chunks == 0) {
    timed("lower-heads", [&] {
      const ir::Graph lowered = ir::lower_heads(written, 0);
      if (lowered.size() == written.size()) return;
      current = ir::recompute_cheap(lowered);
      // Most of a budget is for the rest.
      if (budget > 0 && head_bytes(ir::lower(current, state->threads)) > budget / 2)
        current = ir::limit_heads(current, budget / 2);
    });
  }
  if (options.chunk) {
    timed("choose-chunks", [&] {
      ir::ChunkChoice choice = ir::choose_chunks(current, {budget, options.chunks, state->threads});
      current = std::move(choice.graph);
      state->program = std::move(choice.program);
      state->regions = std::move(choice.regions);
      state->refusals = std::move(choice.refusals);
    });
    // Loops did not do: the heads take less.
    for (std::int64_t bytes = head_bytes(state->program) / 2;
         budget > 0 && state->program.value_bytes > budget && bytes > kLeastHead; bytes /= 2) {
      current = ir::limit_heads(current, bytes);
      state->program = ir::lower(current, state->threads);
    }
  } else {
    state->program = state->unchunked;
  }
  state->budget = budget;
  if (options.strict) {
    require(state->budget == 0 || state->program.value_bytes <= state->budget,
            "compile: values take ", state->program.value_bytes, " bytes, the budget is ",
            state->budget, state->refusals.empty() ? std::string() : "; " + state->refusals.back());
    for (const ir::ChunkedRegion& region : state->regions)
      require(region.boundaries.empty(),
              "compile: strict: ", region.boundaries.empty() ? "" : region.boundaries[0]);
  }
  state->graph = std::move(current);
  state->parameters = tensors(state->graph, false);
  state->results = tensors(state->graph, true);
  state->seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
  return CompilerAccess::make(std::move(state));
}

namespace {

void execute(const CompiledProgram::State& s, std::span<const void* const> parameters,
             std::span<void* const> results, void* arena, FarFieldHead* far) {
  require(parameters.size() == s.parameters.size(), "run: ", parameters.size(),
          " parameters, expected ", s.parameters.size());
  require(results.size() == s.results.size(), "run: ", results.size(), " results, expected ",
          s.results.size());
  for (std::size_t i = 0; i < parameters.size(); ++i)
    require(parameters[i] != nullptr || s.parameters[i].bytes() == 0, "run: parameter '",
            s.parameters[i].name, "' is null");
  for (std::size_t i = 0; i < results.size(); ++i)
    require(results[i] != nullptr || s.results[i].bytes() == 0, "run: result '", s.results[i].name,
            "' is null");
  require(arena != nullptr && reinterpret_cast<std::uintptr_t>(arena) % 64 == 0,
          "run: the arena is not aligned to 64 bytes");
  ir::execute(s.program, parameters, results, static_cast<std::byte*>(arena), s.threads, far);
}

}  // namespace

void CompiledProgram::run(std::span<const void* const> parameters, std::span<void* const> results,
                          void* arena) const {
  execute(*state_, parameters, results, arena, nullptr);
}

void CompiledProgram::run(std::span<const void* const> parameters, std::span<void* const> results,
                          void* arena, FarFieldHead& far) const {
  execute(*state_, parameters, results, arena, &far);
}

LossPlan CompiledProgram::far_plan(const FarFieldHead& far) const {
  return ir::far_plan(state_->program, far);
}

}  // namespace logitless
