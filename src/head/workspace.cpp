#include "logitless/workspace.h"

#include "kernels/device/kernel.h"

namespace logitless {

Workspace::Workspace(const Context& context, const LossPlan& plan)
    : bytes_(plan.workspace_bytes()) {
  if (context.device().kind == DeviceKind::cpu) {
    owned_ = Buffer(bytes_, &context.memory());
    data_ = owned_.data();
    return;
  }
  const cuda::DeviceKernel& kernel = cuda::find_device_kernel(plan.kernel);
  if (kernel.prepare != nullptr) kernel.prepare();
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
