#include "compiler/exec/cuda/backend.h"

#include "compiler/exec/cuda/steps.h"
#include "compiler/exec/cuda/time_steps.h"
#include "compiler/exec/head_over_ranks.h"
#include "core/check.h"

namespace logitless::ir {
namespace {

class PreparedSteps final : public Prepared {
 public:
  PreparedSteps(const Program& program, const Context& context)
      : program_(program), context_(context), steps_(program, buffer_alignments(program), set_) {
    set_.load(context.device().compute_capability);
    steps_.bind(set_);
  }
  void run(std::span<const void* const> parameters, std::span<void* const> results,
           std::byte* arena, void* stream, Observer* observer) const final {
    steps_.enqueue({program_, arena, parameters, results}, context_.on(stream), observer);
  }
  Timed time(std::span<const void* const> parameters, std::span<void* const> results,
             std::byte* arena, int repeat) const final {
    return time_steps(steps_, {program_, arena, parameters, results}, context_, repeat);
  }
  void run(std::span<const void* const> parameters, std::span<void* const> results,
           std::byte* arena, FarFieldHead& far) const final {
    far_head(program_);
    steps_.enqueue({program_, arena, parameters, results}, context_of(far), nullptr, {.far = &far});
  }
  void run(std::span<const void* const> parameters, std::span<void* const> results,
           std::byte* arena, void* stream, HeadOverRanks::State& ranks,
           Observer* observer) const final {
    require_head(ranks, program_);
    steps_.enqueue({program_, arena, parameters, results}, context_.on(stream), observer,
                   {.ranks = &ranks});
  }
  void run_without_heads(std::span<const void* const> parameters, std::span<void* const> results,
                         std::byte* arena, void* stream) const final {
    steps_.enqueue({program_, arena, parameters, results}, context_.on(stream), nullptr,
                   {.skipped = true});
  }

 private:
  const Program& program_;
  const Context context_;
  KernelSet set_;
  Steps steps_;
};

}  // namespace

void CudaBackend::run(const Program&, std::span<const void* const>, std::span<void* const>,
                      std::byte*, const HeadUnder&, Observer*) const {
  throw InvalidArgument(
      "run: the program was compiled for a GPU; prepare() it in a context of one, and run that");
}

LossPlan CudaBackend::far_plan(const Program& program, const FarFieldHead& far) const {
  return far_plan_of(far_head(program), far);
}

void CudaBackend::plan(HeadOverRanks::State& ranks, std::size_t memory_budget) const {
  plan_over_gpus(ranks, memory_budget);
}

std::unique_ptr<const Prepared> CudaBackend::prepare(const Program& program,
                                                     const Context& context) const {
  const DeviceLimits& device = context.device();
  require(device.kind == DeviceKind::cuda,
          "prepare: context: of the CPU; the program was compiled for a GPU");
  require(device.compute_capability == compute_capability_,
          "prepare: context: of a GPU of compute capability ", device.compute_capability,
          "; the program was compiled for ", compute_capability_);
  return std::make_unique<const PreparedSteps>(program, context);
}

}  // namespace logitless::ir
