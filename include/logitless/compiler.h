// Compiles a tensor program (graph.h) for a CPU or a GPU. Regions whose intermediate values dwarf
// everything else become loops over chunks. All memory except parameters and results is one arena
// of a size known beforehand. docs/explain/compiler.md explains the method.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "logitless/context.h"
#include "logitless/dim.h"
#include "logitless/export.h"
#include "logitless/graph.h"
#include "logitless/plan.h"

namespace logitless {

class FarFieldHead;
class HeadOverRanks;

struct CompileOptions {
  // Values of the program's size symbols. Every symbol must have one.
  Bindings sizes = {};
  // The device to compile for: a CPU, or a GPU of this compute capability. The GPU need not be
  // present, and a build without CUDA compiles for it, too. `kernel` and `threads` stay empty:
  // heads take the best available kernel.
  DeviceLimits device = {};
  bool chunk = true;  // false: no loops; the program as it is written
  // Bytes that the values in the arena may take at a time. Values that end before a result is made
  // may be in its memory instead, unless the result is one of `added`. The scratch of kernels, some
  // MiB for each thread, comes on top, so that decisions and results do not depend on threads. 0:
  // chunk wherever that lowers the peak and recomputes nothing. With a budget, values are also
  // recomputed until it is met. Of the programs that the compiler finds (CompiledProgram::plans) it
  // takes the fastest by prediction that fits, or the smallest if none fits.
  std::size_t memory_budget = 0;
  // Makes the budget bound arena_bytes(), which includes the scratch of kernels: decisions then
  // depend on threads.
  bool budget_with_scratch = false;
  // Also without a budget, searches for programs that take less memory and more time, for plans().
  // Compiling takes as long as with a budget; the program is the same.
  bool explore = false;
  // Chunks of every loop, at most one for each element of its axis; 0: as many as pay. With a
  // number, heads become loops as well.
  std::int64_t chunks = 0;
  // Runs losses of a large vocabulary in f32, bf16 or f16 on the engine of head.h; false: they
  // become loops.
  bool head_engine = true;
  // Names of results that are added to their memory's contents, where a matrix product or sum can
  // do so: f32 or f64. The others are overwritten.
  std::vector<std::string> added = {};
  // Lets GEMM epilogues on a GPU add biases and residuals; on Hopper also tanh-gelu and its
  // gradient. false: loops do it.
  bool epilogues = true;
  // Accepts operations that the caller runs (`extern` of docs/reference/ir.md); false: they are
  // refused. A program with one is planned and described, and the caller runs its text: run() and
  // prepare() refuse it. Matrix products keep as few dimensions as the program gives them, since a
  // caller's may copy operands without strides. The library's own read such operands in place.
  bool externs = false;
  // Throws an error that names a missed budget or a big value that could not be chunked; otherwise
  // the report names it.
  bool strict = false;
  int threads = 0;  // threads of a CPU run; 0: the default of context.h
  // Called with the pass and the graph's text after it, for the pass named by dump_after, or for
  // each if that is "all".
  std::string dump_after = {};
  std::function<void(std::string_view pass, std::string_view text)> dump = {};
};

// A program that the compiler found, with its memory and time.
struct PlanPoint {
  std::size_t value_bytes = 0;  // the bytes that memory_budget bounds
  std::size_t arena_bytes = 0;  // with the scratch of kernels
  // Predicted time of a run, from the machine's nominal rates. A CPU's rates are those of one
  // generic core: only ratios mean something.
  double seconds = 0.0;
  double extra_work = 0.0;  // multiply-adds beyond those without loops, as a fraction of these
  std::string what = {};    // "no loops", "2 loops: gelu %h in 16 chunks; head workspace 8.0 MiB"
  bool chosen = false;
};

// Names and values of a report, in the order of their rows.
using ReportFacts = std::vector<std::pair<std::string, std::string>>;

// Instructions of a program with the same kind, sizes and dtypes, and their share of a run.
struct InstructionTime {
  std::string what = {};   // "product 4096 x 768 x 3072 bf16 to f32"
  std::string name = {};   // of the first one's value; may be empty
  std::int64_t count = 0;  // runs of all of them; in a loop, once for each chunk
  // Totals of all of them.
  double seconds = 0.0;
  double bytes = 0.0;  // each operand read once, each result written once
  double flops = 0.0;  // of matrix products, attention and heads
};

// A program compiled for a GPU with its kernels loaded into a device, made by prepare(). A value:
// cheap to copy, immutable.
class LOGITLESS_API PreparedProgram {
 public:
  class State;  // private to the compiler

  // Enqueues the program on the stream (a cudaStream_t; null: the default one), whose device must
  // be the thread's current one. Tensors are contiguous, in device memory, aligned to 16 bytes and
  // in the order of the program. Results overlap neither each other nor parameters; their memory
  // may hold other values until they are made. The arena has arena_bytes() bytes, aligned to 256.
  // Neither waits nor allocates, so a CUDA graph may capture it. The driver holds at most four
  // graphs of runs that repeat their addresses. Runs in different arenas may overlap in time. The
  // same inputs give the same bits on the same kind of device with the same libraries. Throws
  // InvalidArgument on pointers that do not fit, and DeviceError.
  void run(std::span<const void* const> parameters, std::span<void* const> results, void* arena,
           void* stream) const;
  // The same run, with a call of done(result) once for each result, as soon as all work that reads
  // or writes it is enqueued. Other streams may use the result after an event that done() records,
  // while the program continues. Exceptions of done() pass through, in the midst of the program.
  void run(std::span<const void* const> parameters, std::span<void* const> results, void* arena,
           void* stream, const std::function<void(std::size_t result)>& done) const;
  // The same run with the program's head under `far`, on the stream of far's context; see
  // CompiledProgram::run. Most steps enqueue and return. An audited step waits for the head, and
  // may enqueue it again. A step that makes an order waits for it, and one that needs a larger
  // workspace allocates it (FarFieldHead::step). Must not be captured. Throws as far_plan() and
  // FarFieldHead::step do.
  void run(std::span<const void* const> parameters, std::span<void* const> results, void* arena,
           FarFieldHead& far) const;
  // The same run with the program's head under `head` (head_over_ranks.h), made from this program
  // on the context's GPU: collective. `done` is as above, or empty. The first run may allocate a
  // workspace and exchange buffers; later ones may be captured, on all ranks alike. Errors of
  // pointers, or a head of another program, are thrown on this rank alone. The others wait for it
  // until it aborts the group (Communicator::abort). Errors that the head finds are exchanged
  // between the hosts, and all ranks throw. Later failures abort the group.
  void run(std::span<const void* const> parameters, std::span<void* const> results, void* arena,
           void* stream, HeadOverRanks& head,
           const std::function<void(std::size_t result)>& done = {}) const;
  // Loads the kernels for runs under `head`, without the other ranks. It allocates the workspace
  // and enqueues everything except heads, so that results and arena hold garbage afterwards. CUDA
  // loads kernels, also those of cuBLAS, at their first launch. It may then wait for the GPU while
  // the process launches nothing on another one. Ranks that are threads of one process would
  // deadlock if exchanges were in flight. Before the first run under a HeadOverRanks each of them
  // therefore calls this for its programs, runs its other programs once, and passes a barrier.
  // Throws as run() does.
  void load(std::span<const void* const> parameters, std::span<void* const> results, void* arena,
            void* stream, HeadOverRanks& head) const;

  // Runs it repeat + 2 times on a stream of its own, the last times with an event after each
  // instruction, and waits. Returns mean times, the longest first. Their sum exceeds the time of a
  // run by the cost of the events, 1 or 2 us an instruction. Takes device memory for graph and
  // events. Throws as run() does.
  std::vector<InstructionTime> profile(std::span<const void* const> parameters,
                                       std::span<void* const> results, void* arena,
                                       int repeat = 1) const;

 private:
  friend struct CompilerAccess;
  std::shared_ptr<const State> state_;
};

// A program ready to run. A value: cheap to copy, immutable.
class LOGITLESS_API CompiledProgram {
 public:
  struct State;  // private to the compiler
  struct Tensor {
    std::string name = {};
    DType dtype = DType::f32;
    std::vector<std::int64_t> shape = {};
    std::int64_t bytes() const;
  };

  // Parameters and results in the order of the graph.
  const std::vector<Tensor>& parameters() const;
  const std::vector<Tensor>& results() const;
  // Returns the index of a name. Throws InvalidArgument listing the names.
  std::size_t parameter(std::string_view name) const;
  std::size_t result(std::string_view name) const;

  // Exact bytes of everything except parameters and results.
  std::size_t arena_bytes() const;
  // The same without loops.
  std::size_t unchunked_arena_bytes() const;
  // Pareto-optimal programs in bytes and predicted seconds, the smallest first. They do not depend
  // on the budget. Without a budget and without CompileOptions::explore, only those little slower
  // than the program without loops. Empty without chunking.
  const std::vector<PlanPoint>& plans() const;
  double predicted_seconds() const;  // of a run; see PlanPoint::seconds
  int threads() const;               // 0 for a GPU's program
  const DeviceLimits& device() const;
  // The compiler's report: chunked values with axis, chunks and phases, others with the reason,
  // memory before and after, and the time of each pass.
  std::string explain() const;
  std::string report_json() const;
  // A self-contained HTML page: memory over the instructions before and after, live values at each
  // peak, savings of each loop, and work by layer. With times of profile(), also the time of a run.
  // about: facts of the caller's that begin the page.
  std::string report_html(const std::vector<InstructionTime>& times = {},
                          const ReportFacts& about = {}) const;
  // The program's text after the last pass.
  std::string text() const;

  // Runs a program compiled for a CPU. Tensors are contiguous and in the caller's memory; results
  // overlap neither each other nor parameters. The arena has arena_bytes() bytes, aligned to 64.
  // Allocates nothing. The same inputs give the same bits from run to run and for any number of
  // threads. The memory of results may hold other values until they are made.
  void run(std::span<const void* const> parameters, std::span<void* const> results,
           void* arena) const;

  // Runs it repeat + 1 times, the first not counted. Returns the mean time of each kind of
  // instruction, the longest first. Throws as run() does.
  std::vector<InstructionTime> profile(std::span<const void* const> parameters,
                                       std::span<void* const> results, void* arena,
                                       int repeat = 1) const;

  // Compiles and loads the kernels of a GPU program and chooses its GEMM algorithms. It is the only
  // call that allocates on the device or on disk (docs/use/gpu.md lists the required libraries and
  // the kernel cache). The context's GPU has the program's compute capability. Throws
  // InvalidArgument if program or context is the CPU's or has another compute capability. Throws
  // Unsupported naming a missing library, or a build without CUDA; DeviceError.
  PreparedProgram prepare(const Context& context) const;

  // The same run with the program's head under `far` (far_field.h), which serves this head alone:
  // each run is one of its steps. Dense steps give the bits of run() without it. A step whose audit
  // misses the error is repeated densely before anything reads its gradients. The exception is a
  // head that adds them to results (CompileOptions::added on a GPU): its sums stay, and the next
  // step is dense or a trial with a smaller tau. The same inputs after the same steps give the same
  // bits for any number of threads. Extra memory: far_plan(far).workspace_bytes() and the orders
  // (far_field.h). Throws as far_plan() and FarFieldHead::step do.
  void run(std::span<const void* const> parameters, std::span<void* const> results, void* arena,
           FarFieldHead& far) const;
  // The same run with the head over ranks (head_over_ranks.h): collective. Extra memory:
  // head.workspace_bytes(), from the first run on. Errors of the head are thrown on all ranks.
  // After earlier errors (pointers, a head of another program) the other ranks wait until the group
  // is aborted.
  void run(std::span<const void* const> parameters, std::span<void* const> results, void* arena,
           HeadOverRanks& head) const;
  // Returns the plan of the next audited far-field step under `far`. Where the planner predicts no
  // gain, it is an exact plan that says why, and steps are dense. Throws Unsupported with the
  // reason unless the program has one head that computes losses and gradients, including d_hidden,
  // in one operation. Throws InvalidArgument when far's memory_budget is below every plan.
  LossPlan far_plan(const FarFieldHead& far) const;

 private:
  friend struct CompilerAccess;
  std::shared_ptr<const State> state_;
};

// Compiles a graph. Throws InvalidArgument on an unbound size or a violation of strict; Unsupported
// naming an operation and dtype without a kernel.
LOGITLESS_API CompiledProgram compile(const Graph& graph, const CompileOptions& options = {});

}  // namespace logitless
