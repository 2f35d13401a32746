#include "logitless/context.h"

#include <cstdlib>

#include "core/check.h"
#include "core/parallel.h"
#include "kernels/device_gradient.h"
#include "kernels/kernels.h"

namespace logitless {

std::vector<std::string> kernel_names(bool runnable) {
  std::vector<std::string> names;
  for (const HeadKernel& kernel : head_kernels()) {
    if (!runnable || kernel.runnable().empty()) names.emplace_back(kernel.name);
  }
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
    if (!device_.kernel.empty()) cuda::find_device_kernel(device_.kernel);
    require(options.device_index == cuda::current_device(), "device_index: ", options.device_index,
            " is not the thread's current device, which is ", cuda::current_device());
    device_.kind = DeviceKind::cuda;
    device_.threads = 0;
    device_.compute_capability = cuda::compute_capability(options.device_index);
    stream_ = options.stream;
    return;
  }
  require(options.stream == nullptr, "stream: given, and the context is not a GPU's");
  const char* source = "kernel";
  if (device_.kernel.empty()) {
    if (const char* forced = std::getenv("LOGITLESS_CPU"); forced != nullptr && *forced != '\0') {
      device_.kernel = forced;
      source = "LOGITLESS_CPU";
    }
  }
  if (device_.kernel.empty()) return;
  std::string names;
  for (const std::string& name : kernel_names(false))
    names += concat(names.empty() ? "" : ", ", name);
  bool known = false;
  for (const HeadKernel& kernel : head_kernels()) known = known || kernel.name == device_.kernel;
  require(known, source, ": '", device_.kernel, "' is unknown; expected one of ", names);
  const std::string reason = find_head_kernel(device_.kernel).runnable();
  require(reason.empty(), source, ": ", device_.kernel, " cannot run here: ", reason);
}

}  // namespace logitless
