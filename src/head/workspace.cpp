#include "logitless/workspace.h"

#include "kernels/device/kernel.h"

namespace logitless {

namespace {

// Loads the kernels of a GPU's plan before memory is taken for it.
const LossPlan& prepared(const Context& context, const LossPlan& plan) {
  if (context.device().kind == DeviceKind::cpu) return plan;
  const cuda::DeviceKernel& kernel = cuda::find_device_kernel(plan.kernel);
  if (kernel.prepare != nullptr) kernel.prepare();
  return plan;
}

}  // namespace

Workspace::Workspace(const Context& context, const LossPlan& plan)
    : Workspace(context, prepared(context, plan).workspace_bytes()) {}

Workspace::Workspace(const Context& context, std::size_t bytes) : bytes_(bytes) {
  if (context.device().kind == DeviceKind::cpu) {
    owned_ = Buffer(bytes_, &context.memory());
    data_ = owned_.data();
    return;
  }
  auto memory = std::make_unique<cuda::DeviceMemory>(bytes_);
  data_ = memory->data();
  MemoryMeter* const meter = &context.memory();
  meter->add(bytes_);
  device_memory_ = std::shared_ptr<void>(memory.release(), [meter, bytes = bytes_](void* held) {
    delete static_cast<cuda::DeviceMemory*>(held);
    meter->remove(bytes);
  });
}

}  // namespace logitless
