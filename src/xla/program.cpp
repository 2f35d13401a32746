// XLA FFI handlers of tensor programs (docs/reference/ir.md): a custom call that computes the
// results of a text, in XLA's memory. logitless.jax's autochunk makes such calls.
//
// Arguments are the program's parameters. Results are its results and then the arena, a byte buffer
// of 256 bytes more than the program's arena. Attributes: text; memory_budget, chunks, chunk,
// head_engine and threads of CompileOptions. A process compiles a text once for each GPU, and once
// for the CPU while it is among the last kMostPrograms. On a GPU that happens when XLA initialises
// its program, so that runs only enqueue and may be recorded into command buffers.
#include <limits>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "core/lru_cache.h"
#include "logitless/compiler.h"
#include "xla/buffers.h"
#include "xla/handler.h"

namespace logitless::xla_handlers {
namespace {

struct ReadyProgram {
  CompiledProgram compiled;
  std::optional<PreparedProgram> on_gpu;
};

ReadyProgram make_ready(const std::string& text, CompileOptions options, const Place& place) {
  if (place.device == DeviceKind::cpu) return {compile(Graph::parse(text), options), std::nullopt};
  ContextOptions where;
  where.device = place.device;
  where.device_index = place.device_index;
  const Context context(std::move(where));
  options.device = context.device();
  options.threads = 0;
  ReadyProgram ready{compile(Graph::parse(text), options), std::nullopt};
  ready.on_gpu = ready.compiled.prepare(context);
  return ready;
}

// Programs of the CPU that are cached. Those of GPUs stay loaded as long as the process: XLA
// records their kernels into command buffers, whose end it does not report.
constexpr std::size_t kMostPrograms = 1024;

using Programs = LruCache<std::string, ReadyProgram>;

// Returns the compiled program of a call, cached for equal ones.
std::shared_ptr<const ReadyProgram> ready_program(const Place& place, const Call& call) {
  const std::string text(call.attribute<std::string_view>("text"));
  CompileOptions options;
  options.memory_budget = static_cast<std::size_t>(call.attribute<std::int64_t>("memory_budget"));
  options.chunks = call.attribute<std::int64_t>("chunks");
  options.chunk = call.attribute<std::int64_t>("chunk") != 0;
  options.head_engine = call.attribute<std::int64_t>("head_engine") != 0;
  options.threads = static_cast<int>(call.attribute<std::int64_t>("threads"));
  const std::string key =
      concat(place.device_index, " ", options.memory_budget, " ", options.chunks, " ",
             options.chunk, " ", options.head_engine, " ", options.threads, " ", text);
  static auto* const on_cpu = new Programs(kMostPrograms);  // both outlive XLA's threads
  static auto* const on_gpus = new Programs(std::numeric_limits<std::size_t>::max());
  return (place.device == DeviceKind::cpu ? on_cpu : on_gpus)->get(key, [&] {
    return make_ready(text, options, place);
  });
}

void check_buffers(const std::vector<Buffer>& buffers, std::size_t count,
                   const std::vector<CompiledProgram::Tensor>& tensors, const char* what) {
  check(count == tensors.size(), "program: ", count, " ", what, ", expected ", tensors.size());
  for (std::size_t i = 0; i < count; ++i)
    check(buffers[i].bytes == static_cast<std::size_t>(tensors[i].bytes()), "program: ", what, " ",
          tensors[i].name, " has ", buffers[i].bytes, " bytes, expected ", tensors[i].bytes());
}

void run_program(const Place& place, Call call) {
  const auto program = ready_program(place, call);
  const ReadyProgram& ready = *program;
  const std::vector<Buffer> in = call.arguments(), out = call.results();
  check(!out.empty(), "program: no arena among the results");
  check_buffers(in, in.size(), ready.compiled.parameters(), "parameters");
  check_buffers(out, out.size() - 1, ready.compiled.results(), "results");
  const Workspace arena = aligned_workspace(out.back());
  check(arena.bytes() >= ready.compiled.arena_bytes(), "program: an arena of ", arena.bytes(),
        " bytes, expected ", ready.compiled.arena_bytes());
  std::vector<const void*> parameters;
  for (const Buffer& b : in) parameters.push_back(b.data);
  std::vector<void*> results;
  for (std::size_t i = 0; i + 1 < out.size(); ++i) results.push_back(out[i].data);
  if (ready.on_gpu) {
    ready.on_gpu->run(parameters, results, arena.data(), place.stream);
  } else {
    ready.compiled.run(parameters, results, arena.data());
  }
}

void prepare_program(const Place& place, Call call) { ready_program(place, call); }

ffi::Error on_initialize(std::int32_t device_index, ffi::RemainingArgs arguments,
                         ffi::RemainingRets results, ffi::Dictionary attributes) {
  return guarded(prepare_program, Place{DeviceKind::cuda, device_index, nullptr},
                 Call(arguments, results, attributes));
}

auto initialize_binding() {
  return ffi::Ffi::Bind<ffi::ExecutionStage::kInitialize>()
      .Ctx<ffi::DeviceOrdinal>()
      .RemainingArgs()
      .RemainingRets()
      .Attrs();
}

}  // namespace
}  // namespace logitless::xla_handlers

using logitless::xla_handlers::run_program;

LOGITLESS_XLA_HANDLERS(program, {xla::ffi::Traits::kCmdBufferCompatible});

extern "C" LOGITLESS_API XLA_FFI_Error* logitless_xla_program_initialize_cuda(XLA_FFI_CallFrame*);
XLA_FFI_DEFINE_HANDLER_SYMBOL(logitless_xla_program_initialize_cuda,
                              logitless::xla_handlers::on_initialize,
                              logitless::xla_handlers::initialize_binding());
