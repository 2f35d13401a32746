// Compiles a tensor program (graph.h) for a CPU or a GPU: regions whose intermediate values dwarf
// everything else become loops over chunks, and all memory but parameters and results is one arena
// of a size known beforehand. docs/compiler.md tells how.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <string_view>
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
  // What the program's sizes are. Every symbol must have a value.
  Bindings sizes = {};
  // What it is for: a CPU, or a GPU of this compute capability, which need not be here; a build
  // without CUDA compiles for it, too. Its kernel and threads stay empty: heads take the best
  // kernel there is.
  DeviceLimits device = {};
  bool chunk = true;  // false: no loops; the program as it is written
  // Bytes that values in the arena may take at a time; the scratch of kernels, some MiB for each
  // thread, comes on top, so that decisions and results do not depend on threads. 0: chunk wherever
  // that lowers the peak and computes nothing twice. With a budget, values are also computed again
  // until it is met: of the programs that the compiler finds (CompiledProgram::plans) the one that
  // is predicted to be the fastest within it, the smallest where none is.
  std::size_t memory_budget = 0;
  // The budget bounds arena_bytes(), the scratch of kernels included: decisions then depend on
  // threads.
  bool budget_with_scratch = false;
  // Without a budget, too, look for programs that take less memory and more time, so that plans()
  // has them. Compiling takes as long as with a budget; the program is the same.
  bool explore = false;
  // Chunks of every loop, at most one for each element of its axis; 0: as many as pay. With a
  // number heads are loops as well.
  std::int64_t chunks = 0;
  // Losses of a large vocabulary in f32, bf16 or f16 run on the engine of head.h; false: they are
  // loops like the rest.
  bool head_engine = true;
  // Results of these names are added to what their memory holds, where a product or sum can do so
  // while it is made: f32 or f64. The others are written.
  std::vector<std::string> added = {};
  // Products on a GPU add biases and residuals before they store their sums, and Hopper's make gelu
  // by tanh of them and its gradient; false: loops do it.
  bool epilogues = true;
  // Operations that the caller runs (`extern` of docs/ir.md) are taken; false: refused. A program
  // with one is planned and described, and its text is for the caller to run: run() and prepare()
  // refuse it. Products of a program so compiled are of as few dimensions as it has them, since a
  // caller's may copy what has no strides; the library's own read it where it lies.
  bool externs = false;
  // A budget that cannot be met, or a big value that could not be cut, is an error that names it;
  // otherwise the report does.
  bool strict = false;
  int threads = 0;  // that run it on a CPU; 0: LOGITLESS's default (context.h)
  // Called with (pass, text form of the graph after it) for the pass of this name, or all for
  // "all".
  std::string dump_after = {};
  std::function<void(std::string_view pass, std::string_view text)> dump = {};
};

// A program that the compiler found, by what it takes.
struct PlanPoint {
  std::size_t value_bytes = 0;  // what memory_budget bounds
  std::size_t arena_bytes = 0;  // with the scratch of kernels
  // Predicted, of a run, from the machine's nominal rates. Of a CPU those are of one core that
  // stands for any: only ratios mean something.
  double seconds = 0.0;
  double extra_work = 0.0;  // multiply-adds beyond those without loops, as a fraction of these
  std::string what = {};    // "no loops", "2 loops: gelu %h in 16 chunks; head workspace 8.0 MiB"
  bool chosen = false;
};

// Instructions of a program that are alike in kind, sizes and dtypes, and what a run takes for
// them.
struct InstructionTime {
  std::string what = {};   // "product 4096 x 768 x 3072 bf16 to f32"
  std::string name = {};   // of the value that the first of them makes; may be empty
  std::int64_t count = 0;  // how often they run: in a loop, in each round
  // Of all together.
  double seconds = 0.0;
  double bytes = 0.0;  // each operand read once, each result written once
  double flops = 0.0;  // of products, attention and heads
};

// A program compiled for a GPU, with its kernels loaded into a device: what prepare() makes. A
// value: cheap to copy, never changes.
class LOGITLESS_API PreparedProgram {
 public:
  class State;  // the compiler's

  // Tensors are contiguous, in the device's memory, aligned to 16 bytes and in the order of the
  // program; results overlap neither each other nor parameters; arena has arena_bytes() bytes,
  // aligned to 256. Enqueues on the stream (a cudaStream_t; null: the default one), whose device
  // must be the thread's current one; returns before the work is done, and neither waits nor
  // allocates, so that it may be captured into a CUDA graph. Runs in different arenas may go on
  // beside each other. The same inputs give the same bits on the same kind of device with the same
  // libraries. Throws InvalidArgument on pointers that do not fit, DeviceError.
  void run(std::span<const void* const> parameters, std::span<void* const> results, void* arena,
           void* stream) const;
  // The same, and calls done(result) as soon as all that reads or writes a result is enqueued: each
  // result once. What follows may use it, on another stream after an event that done() records,
  // while the program goes on. What done() throws is thrown, in the midst of the program.
  void run(std::span<const void* const> parameters, std::span<void* const> results, void* arena,
           void* stream, const std::function<void(std::size_t result)>& done) const;
  // The same with the program's head under `far`, as CompiledProgram::run has it, on the stream of
  // far's context. Most steps enqueue and return; one that is audited waits for the head, and may
  // enqueue it again, before it goes on, one that an order is made from waits for that, and one
  // that needs a larger workspace allocates it (FarFieldHead::step): not to be captured. Throws as
  // far_plan() does, and as FarFieldHead::step does.
  void run(std::span<const void* const> parameters, std::span<void* const> results, void* arena,
           FarFieldHead& far) const;
  // The same with the program's head under `head` (head_over_ranks.h), which was made of this
  // program on the context's GPU: collective. done: as above, or none. The first run may allocate a
  // workspace and what exchanges take, and later ones may be captured: on all ranks alike. What is
  // wrong with the pointers, or a head of another program, is thrown on this rank alone, which the
  // others wait for until it gives the group up (Communicator::abort). What the head finds wrong
  // the hosts tell one another, and all throw; what fails later gives the group up.
  void run(std::span<const void* const> parameters, std::span<void* const> results, void* arena,
           void* stream, HeadOverRanks& head,
           const std::function<void(std::size_t result)>& done = {}) const;
  // Makes ready for runs under `head`, by itself: allocates its workspace, and enqueues what is not
  // a head, so that results and arena hold no numbers afterwards. CUDA loads kernels, those of
  // cuBLAS among them, when they are first launched, and may wait for the GPU then, while the
  // process launches nothing on another one. Ranks that are threads of one process would wait for
  // one another for good where exchanges are under way: each of them calls this for its programs,
  // runs its others once, and they meet, before the first run under a HeadOverRanks. Throws as
  // run() does.
  void load(std::span<const void* const> parameters, std::span<void* const> results, void* arena,
            void* stream, HeadOverRanks& head) const;

  // Runs it repeat + 2 times on a stream of its own, the last times with an event after each
  // instruction, and waits: the means, the longest first. Sums are above the time of a run by the
  // events' own, 1 or 2 us an instruction. Takes memory of the device for graph and events.
  // Throws what run() throws.
  std::vector<InstructionTime> profile(std::span<const void* const> parameters,
                                       std::span<void* const> results, void* arena,
                                       int repeat = 1) const;

 private:
  friend struct CompilerAccess;
  std::shared_ptr<const State> state_;
};

// A program ready to run. A value: cheap to copy, never changes.
class LOGITLESS_API CompiledProgram {
 public:
  struct State;  // the compiler's
  struct Tensor {
    std::string name = {};
    DType dtype = DType::f32;
    std::vector<std::int64_t> shape = {};
    std::int64_t bytes() const;
  };

  // In the order of the graph.
  const std::vector<Tensor>& parameters() const;
  const std::vector<Tensor>& results() const;
  // Index by name. Throws InvalidArgument listing the names.
  std::size_t parameter(std::string_view name) const;
  std::size_t result(std::string_view name) const;

  // Bytes of everything but parameters and results: exact.
  std::size_t arena_bytes() const;
  // The same without loops.
  std::size_t unchunked_arena_bytes() const;
  // The programs found that no other one beats in both bytes and predicted seconds, the smallest
  // first. They do not depend on the budget; without one, and without CompileOptions::explore,
  // those that take little more time than the program without loops. Empty without chunking.
  const std::vector<PlanPoint>& plans() const;
  double predicted_seconds() const;  // of a run; as PlanPoint::seconds
  int threads() const;               // 0 of a GPU's
  const DeviceLimits& device() const;
  // What was chunked, along what, into how many chunks and phases, what was not and why, memory
  // before and after, time of each pass.
  std::string explain() const;
  std::string report_json() const;
  // A page that stands alone: memory over the instructions, before and after, what lives at each
  // peak, what each loop saved, work by layer, and with times of profile() those of a run.
  std::string report_html(const std::vector<InstructionTime>& times = {}) const;
  // The program after the last pass.
  std::string text() const;

  // Runs a program compiled for a CPU. Tensors are contiguous and in the caller's memory, results
  // overlap neither each other nor parameters; arena has arena_bytes() bytes, aligned to 64.
  // Allocates nothing. The same inputs give the same bits from run to run and for any number of
  // threads.
  void run(std::span<const void* const> parameters, std::span<void* const> results,
           void* arena) const;

  // Runs it repeat + 1 times, the first of them not counted: the mean time of each kind of
  // instruction, the longest first. Throws what run() throws.
  std::vector<InstructionTime> profile(std::span<const void* const> parameters,
                                       std::span<void* const> results, void* arena,
                                       int repeat = 1) const;

  // Of a program compiled for a GPU: compiles and loads its kernels, chooses the algorithms of its
  // products. The only call that allocates on the device or on disk (docs/gpu.md: what libraries it
  // needs, and the cache of kernels). context: of a GPU of the program's compute capability.
  // Throws InvalidArgument of a program or context of the CPU, or of another compute capability;
  // Unsupported naming a library that is missing, or a build without CUDA; DeviceError.
  PreparedProgram prepare(const Context& context) const;

  // The same with the program's head under `far` (far_field.h), which serves this head alone: each
  // run is one of its steps. Dense steps give the bits of run() without it; a step whose audit
  // misses the error is done again densely before anything reads its gradients, unless the head
  // adds them to results (CompileOptions::added on a GPU): what has been added stays, and the next
  // step is dense or a trial with a smaller tau. The same inputs and the same steps before give the
  // same bits for any number of threads.
  // Extra memory: far_plan(far).workspace_bytes(), and what orders take (far_field.h).
  // Throws as far_plan() does, and as FarFieldHead::step does.
  void run(std::span<const void* const> parameters, std::span<void* const> results, void* arena,
           FarFieldHead& far) const;
  // The same with the program's head over ranks (head_over_ranks.h): collective. Extra memory:
  // head.workspace_bytes(), from the first run on. What the head throws on one rank it throws on
  // all; what is thrown before it (pointers, a head of another program) the others wait for until
  // the group is given up.
  void run(std::span<const void* const> parameters, std::span<void* const> results, void* arena,
           HeadOverRanks& head) const;
  // The plan of the next audited far-field step under `far`, or of another kind, which says why,
  // where the planner sees nothing to gain: then steps are dense. Throws Unsupported, saying why,
  // unless the program has one head and computes its losses and their gradients, that of the hidden
  // states among them, in one operation; InvalidArgument when far's memory_budget is below every
  // plan.
  LossPlan far_plan(const FarFieldHead& far) const;

 private:
  friend struct CompilerAccess;
  std::shared_ptr<const State> state_;
};

// Throws InvalidArgument on a size without a value, or what strict forbids; Unsupported naming an
// operation and dtype without a kernel.
LOGITLESS_API CompiledProgram compile(const Graph& graph, const CompileOptions& options = {});

}  // namespace logitless
