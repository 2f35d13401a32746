#include "logitless/context.h"

#include "core/check.h"
#include "core/parallel.h"
#include "device/card_file.h"
#include "kernels/cpu_head.h"
#include "kernels/device/gpu_kernels.h"
#include "kernels/device/head.h"
#include "kernels/device/kernel.h"
#include "kernels/forced_kernel.h"

namespace logitless {

std::vector<std::string> kernel_names(bool runnable) {
  std::vector<std::string> names;
  for (const HeadKernel& kernel : head_kernels()) {
    if (!runnable || kernel.runnable().empty()) names.emplace_back(kernel.name);
  }
  return names;
}

std::vector<std::string> gpu_kernel_names() {
  std::vector<std::string> names;
  for (const cuda::DeviceKernel& kernel : cuda::device_kernels()) names.emplace_back(kernel.name);
  return names;
}

Context::Context(ContextOptions options)
    : memory_(std::make_shared<MemoryMeter>()), trace_(std::move(options.trace)) {
  require(options.threads >= 0 && options.threads <= kMostThreads,
          "threads: expected 0 (all cores) to ", kMostThreads, ", got ", options.threads);
  device_.threads = options.threads > 0 ? options.threads : default_threads();
  device_.kernel = std::move(options.kernel);
  if (options.device == DeviceKind::cuda) {
    const std::string missing = cuda::device_missing(options.device_index);
    if (!missing.empty()) throw Unsupported(concat("device: ", missing));
    cuda::wanted_gpu_kernels(device_.kernel);  // throws on an unknown name
    require(options.device_index == cuda::current_device(), "device_index: ", options.device_index,
            " is not the thread's current device, which is ", cuda::current_device());
    device_.kind = DeviceKind::cuda;
    device_.threads = 0;
    device_.compute_capability = cuda::compute_capability(options.device_index);
    device_.card = planning_card(options.device_index);
    stream_ = options.stream;
    return;
  }
  require(options.stream == nullptr, "stream: given, and the context is not a GPU's");
  if (device_.kernel.empty()) {
    device_.kernel = forced_kernel();
  } else {
    require_head_kernel("kernel", device_.kernel);
  }
}

Context Context::on(void* stream) const {
  require(device_.kind == DeviceKind::cuda, "on: the context is of the CPU, which has no streams");
  Context other = *this;
  other.stream_ = stream;
  return other;
}

}  // namespace logitless
