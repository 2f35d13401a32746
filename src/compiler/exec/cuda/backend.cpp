#include "compiler/exec/cuda/backend.h"

#include "compiler/exec/cuda/steps.h"
#include "core/check.h"

namespace logitless::ir {
namespace {

class PreparedSteps final : public Prepared {
 public:
  PreparedSteps(const Program& program, int compute_capability)
      : program_(program), steps_(program, buffer_alignments(program), set_) {
    set_.load(compute_capability);
    steps_.bind(set_);
  }
  void run(std::span<const void* const> parameters, std::span<void* const> results,
           std::byte* arena, void* stream) const final {
    steps_.enqueue({program_, arena, parameters, results}, stream);
  }

 private:
  const Program& program_;
  KernelSet set_;
  Steps steps_;
};

}  // namespace

void CudaBackend::run(const Program&, std::span<const void* const>, std::span<void* const>,
                      std::byte*, FarFieldHead*) const {
  throw InvalidArgument(
      "run: the program was compiled for a GPU; prepare() it in a context of one, and run that");
}

LossPlan CudaBackend::far_plan(const Program&, const FarFieldHead&) const {
  throw Unsupported("far_plan: programs on a GPU have no far field");
}

std::unique_ptr<const Prepared> CudaBackend::prepare(const Program& program,
                                                     const Context& context) const {
  const DeviceLimits& device = context.device();
  require(device.kind == DeviceKind::cuda,
          "prepare: context: of the CPU; the program was compiled for a GPU");
  require(device.compute_capability == compute_capability_,
          "prepare: context: of a GPU of compute capability ", device.compute_capability,
          "; the program was compiled for ", compute_capability_);
  return std::make_unique<const PreparedSteps>(program, compute_capability_);
}

}  // namespace logitless::ir
