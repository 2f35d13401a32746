#include "logitless/compiler.h"

#include <algorithm>
#include <chrono>

#include "compiler/analysis/split.h"
#include "compiler/compiled.h"
#include "compiler/exec/cpu/backend.h"
#include "compiler/exec/cuda/backend.h"
#include "compiler/exec/head.h"
#include "compiler/exec/head_over_ranks.h"
#include "compiler/exec/results_done.h"
#include "compiler/graph_access.h"
#include "compiler/passes/pipeline.h"
#include "compiler/plan/cost.h"
#include "compiler/target/cpu.h"
#include "compiler/target/cuda.h"
#include "core/check.h"
#include "core/parallel.h"
#include "kernels/device/gpu_kernels.h"
#include "kernels/forced_kernel.h"

namespace logitless {
namespace {

std::vector<CompiledProgram::Tensor> tensors(const ir::Graph& graph, bool results) {
  std::vector<CompiledProgram::Tensor> list;
  const auto add = [&](const std::string& name, const ir::Type& type) {
    list.push_back({name, type.dtype, ir::sizes_of(type)});
  };
  if (results) {
    for (const ir::Output& o : graph.outputs()) add(o.name, graph.type(o.value));
  } else {
    for (const int id : graph.parameters())
      add(graph.node(id).attributes->name, graph.node(id).results[0]);
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
const std::vector<PlanPoint>& CompiledProgram::plans() const { return state_->plans; }
double CompiledProgram::predicted_seconds() const { return state_->predicted_seconds; }
int CompiledProgram::threads() const { return state_->threads; }
const DeviceLimits& CompiledProgram::device() const { return state_->device; }

namespace {

void check_options(const CompileOptions& options) {
  require(options.threads >= 0 && options.threads <= kMostThreads, "compile: threads is ",
          options.threads, ", expected 0 to ", kMostThreads);
  const DeviceLimits& device = options.device;
  require(device.kernel.empty() && device.threads == 0,
          "compile: device: its kernel and threads are not for programs; expected them unset");
  if (device.kind == DeviceKind::cuda) {
    require(device.compute_capability >= 80, "compile: device: compute capability ",
            device.compute_capability, ", expected 80 or more");
    require(options.threads == 0, "compile: threads is ", options.threads,
            " of a program for a GPU, expected 0");
    cuda::gpu_kernels();
  }
  // Checks the environment variables now: tensor kernels no longer check them when they run.
  (void)forced_kernel();
  require(options.chunks >= 0, "compile: chunks is ", options.chunks, ", expected 0 or more");
}

// Refuses sizes with which the program's values take more bytes than 64 bits hold, with a margin
// for sums over values.
void check_bytes(const ir::Graph& graph) {
  constexpr std::int64_t kMost = std::int64_t{1} << 60;
  std::int64_t left = kMost;
  for (int id = 0; id < graph.size(); ++id) {
    for (const ir::Type& type : graph.node(id).results) {
      const std::int64_t elements = ir::elements_of(type);
      const auto item = static_cast<std::int64_t>(size_of(type.dtype));
      require(elements <= left / item,
              "compile: sizes: expected values of at most 2^60 bytes together, got more: ",
              ir::name_of(graph.node(id).op), " makes ", elements, " elements");
      left -= elements * item;
    }
  }
}

// Returns the graph with all symbolic sizes bound to numbers.
ir::Graph bound(const ir::Graph& graph, const Bindings& sizes) {
  require(!graph.outputs().empty(), "compile: the program has no results");
  const std::vector<std::string> symbols = graph.symbols();
  for (const auto& [name, value] : sizes) {
    require(value >= 0, "compile: size ", name, " is ", value);
    if (std::binary_search(symbols.begin(), symbols.end(), name)) continue;
    std::string all;
    for (const std::string& symbol : symbols) all += concat(all.empty() ? "" : ", ", symbol);
    throw InvalidArgument(
        concat("compile: sizes: the program has no size '", name, "'; ",
               all.empty() ? "all of its sizes are numbers" : concat("its sizes are ", all)));
  }
  ir::Graph result = ir::bind(graph, sizes);
  for (const std::string& symbol : result.symbols())
    throw InvalidArgument(concat("compile: the size ", symbol, " has no value; give it in sizes"));
  check_bytes(result);
  return result;
}

// Returns a flag for each output: whether its result is added to. Throws InvalidArgument for an
// unknown name and for a result that cannot be added to.
std::vector<bool> added_outputs(const ir::Graph& graph, const std::vector<std::string>& names) {
  std::vector<bool> added(names.empty() ? 0 : graph.outputs().size());
  const std::vector<CompiledProgram::Tensor> results = tensors(graph, true);
  for (const std::string& name : names) {
    const std::size_t at = find(results, name, "result");
    require(results[at].dtype == DType::f32 || results[at].dtype == DType::f64,
            "compile: added: result '", name, "' is ", name_of(results[at].dtype),
            ", expected f32 or f64");
    added[at] = true;
  }
  return added;
}

// Returns the name of the first operation that the caller runs, or "" without one.
std::string first_extern(const ir::Graph& graph) {
  for (const ir::Node& n : graph.nodes()) {
    if (n.op == ir::Op::extern_call) return ir::description_of(n);
    std::string inside = n.op == ir::Op::loop ? first_extern(n.attributes->loop->body) : "";
    if (!inside.empty()) return inside;
  }
  return {};
}

// Throws Unsupported for programs with operations that the caller runs.
void check_no_extern(const CompiledProgram::State& s, const char* what) {
  if (!s.extern_name.empty())
    throw Unsupported(concat(what, ": ", s.extern_name,
                             " is an operation that the caller runs: the program can be read, "
                             "and not be run here"));
}

void check_strictly(const CompiledProgram::State& s) {
  const std::int64_t bytes = s.bounded_bytes(s.program);
  require(s.budget == 0 || bytes <= s.budget,
          "compile: ", s.budget_with_scratch ? "the arena takes " : "values take ", bytes,
          " bytes, the budget is ", s.budget,
          s.refusals.empty() ? std::string() : "; " + s.refusals.back());
  for (const ir::ChunkedRegion& region : s.regions)
    require(region.boundaries.empty(),
            "compile: strict: ", region.boundaries.empty() ? "" : region.boundaries[0]);
}

}  // namespace

CompiledProgram compile(const Graph& source, const CompileOptions& options) {
  const auto begin = std::chrono::steady_clock::now();
  check_options(options);
  auto state = std::make_shared<CompiledProgram::State>();
  state->device = options.device;
  std::unique_ptr<const ir::Target> target;
  if (options.device.kind == DeviceKind::cuda) {
    state->threads = 0;
    target =
        std::make_unique<const ir::CudaTarget>(options.device.compute_capability, options.epilogues,
                                               options.device.card, !options.externs);
    state->backend = std::make_shared<const ir::CudaBackend>(options.device.compute_capability);
  } else {
    state->threads = options.threads > 0 ? options.threads : default_threads();
    target = std::make_unique<const ir::CpuTarget>(state->threads, !options.externs);
    state->backend = std::make_shared<const ir::CpuBackend>(state->threads);
  }
  state->budget = static_cast<std::int64_t>(options.memory_budget);
  state->budget_with_scratch = options.budget_with_scratch;

  ir::Compilation c{*target, state->budget, options.chunks, options.chunk, options.head_engine};
  c.budget_with_scratch = options.budget_with_scratch;
  c.explore = options.explore;
  c.externs = options.externs;
  c.graph = bound(GraphAccess::of(source), options.sizes);
  c.added = added_outputs(c.graph, options.added);
  state->extern_name = first_extern(c.graph);
  if (!options.externs && !state->extern_name.empty())
    throw Unsupported(concat("compile: ", state->extern_name,
                             " is an operation that the caller runs; expected the option externs"));
  ir::run_pipeline(c, [&](const ir::Pass& pass, double seconds) {
    state->passes.push_back({std::string(pass.name), seconds, c.graph.size()});
    if (options.dump && (options.dump_after == pass.name || options.dump_after == "all"))
      options.dump(pass.name, ir::print(c.graph));
  });

  state->graph = std::move(c.graph);
  state->unchunked_graph = std::move(c.unchunked_graph);
  state->unchunked = std::move(c.unchunked);
  state->program = std::move(c.program);
  state->regions = std::move(c.regions);
  state->refusals = std::move(c.refusals);
  state->plans = std::move(c.plans);
  state->search = std::move(c.search);
  state->predicted_seconds = ir::predicted_seconds(state->program, target->rates());
  state->unchunked_seconds = ir::predicted_seconds(state->unchunked, target->rates());
  state->recomputed = c.recomputed;
  if (options.strict) check_strictly(*state);
  state->parameters = tensors(state->graph, false);
  state->results = tensors(state->graph, true);
  state->seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
  return CompilerAccess::make(std::move(state));
}

namespace {

void check_pointers(const CompiledProgram::State& s, std::span<const void* const> parameters,
                    std::span<void* const> results, void* arena) {
  check_no_extern(s, "run");
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
  const auto alignment = static_cast<std::uintptr_t>(s.program.alignment);
  require(arena != nullptr && reinterpret_cast<std::uintptr_t>(arena) % alignment == 0,
          "run: the arena is not aligned to ", alignment, " bytes");
}

void execute(const CompiledProgram::State& s, std::span<const void* const> parameters,
             std::span<void* const> results, void* arena, const ir::HeadUnder& under) {
  check_pointers(s, parameters, results, arena);
  s.backend->run(s.program, parameters, results, static_cast<std::byte*>(arena), under);
}

}  // namespace

void CompiledProgram::run(std::span<const void* const> parameters, std::span<void* const> results,
                          void* arena) const {
  execute(*state_, parameters, results, arena, {});
}

void CompiledProgram::run(std::span<const void* const> parameters, std::span<void* const> results,
                          void* arena, FarFieldHead& far) const {
  execute(*state_, parameters, results, arena, {.far = &far});
}

void CompiledProgram::run(std::span<const void* const> parameters, std::span<void* const> results,
                          void* arena, HeadOverRanks& head) const {
  execute(*state_, parameters, results, arena, {.ranks = &CompilerAccess::state(head)});
}

PreparedProgram CompiledProgram::prepare(const Context& context) const {
  check_no_extern(*state_, "prepare");
  auto state = std::make_shared<PreparedProgram::State>();
  state->program = state_;
  state->prepared = state_->backend->prepare(state_->program, context);
  return CompilerAccess::make(std::move(state));
}

void check_device_pointers(const CompiledProgram::State& s, std::span<const void* const> parameters,
                           std::span<void* const> results, void* arena) {
  check_pointers(s, parameters, results, arena);
  static constexpr std::uintptr_t kAlignment = 16;
  const auto check_aligned = [](const char* what, const CompiledProgram::Tensor& t,
                                const void* data) {
    require(reinterpret_cast<std::uintptr_t>(data) % kAlignment == 0, "run: ", what, " '", t.name,
            "' is not aligned to ", kAlignment, " bytes");
  };
  for (std::size_t i = 0; i < parameters.size(); ++i)
    check_aligned("parameter", s.parameters[i], parameters[i]);
  for (std::size_t i = 0; i < results.size(); ++i)
    check_aligned("result", s.results[i], results[i]);
}

void PreparedProgram::run(std::span<const void* const> parameters, std::span<void* const> results,
                          void* arena, void* stream) const {
  check_device_pointers(*state_->program, parameters, results, arena);
  state_->prepared->run(parameters, results, static_cast<std::byte*>(arena), stream);
}

void PreparedProgram::run(std::span<const void* const> parameters, std::span<void* const> results,
                          void* arena, void* stream,
                          const std::function<void(std::size_t result)>& done) const {
  check_device_pointers(*state_->program, parameters, results, arena);
  ir::ResultsDone observer(state_->program->program, done);
  state_->prepared->run(parameters, results, static_cast<std::byte*>(arena), stream, {}, &observer);
  observer.end();
}

void PreparedProgram::run(std::span<const void* const> parameters, std::span<void* const> results,
                          void* arena, FarFieldHead& far) const {
  check_device_pointers(*state_->program, parameters, results, arena);
  state_->prepared->run(parameters, results, static_cast<std::byte*>(arena), nullptr,
                        {.far = &far});
}

void PreparedProgram::run(std::span<const void* const> parameters, std::span<void* const> results,
                          void* arena, void* stream, HeadOverRanks& head,
                          const std::function<void(std::size_t result)>& done) const {
  check_device_pointers(*state_->program, parameters, results, arena);
  const auto run_observed = [&](ir::Observer* observer) {
    state_->prepared->run(parameters, results, static_cast<std::byte*>(arena), stream,
                          {.ranks = &CompilerAccess::state(head)}, observer);
  };
  if (!done) return run_observed(nullptr);
  ir::ResultsDone observer(state_->program->program, done);
  run_observed(&observer);
  observer.end();
}

void PreparedProgram::load(std::span<const void* const> parameters, std::span<void* const> results,
                           void* arena, void* stream, HeadOverRanks& head) const {
  check_device_pointers(*state_->program, parameters, results, arena);
  HeadOverRanks::State& ranks = CompilerAccess::state(head);
  ir::require_head(ranks, state_->program->program);
  ranks.allocate();
  state_->prepared->run(parameters, results, static_cast<std::byte*>(arena), stream,
                        {.skipped = true});
}

LossPlan CompiledProgram::far_plan(const FarFieldHead& far) const {
  return ir::far_plan(state_->program, far, state_->device.kind);
}

}  // namespace logitless
