#include "head/plan/search/search.h"

#include "core/parallel.h"
#include "head/plan/search/cpu.h"
#include "head/plan/search/cuda.h"
#include "head/plan/search/gathered.h"

namespace logitless {

KernelSearch make_search(const PlanProblem& problem, const DeviceLimits& device) {
  KernelSearch made;
  const bool gathered = problem.features.gathered_rows > 0;
  if (device.kind == DeviceKind::cuda) {
    const cuda::DeviceKernel& kernel = choose_device_kernel(problem, device, &made.kernel_reasons);
    made.kernel = kernel.name;
    if (gathered) {
      made.search = std::make_unique<GatheredCudaSearch>(problem, kernel, device);
    } else {
      made.search = std::make_unique<CudaSearch>(problem, kernel, device);
    }
    return made;
  }
  const HeadKernel& kernel =
      choose_head_kernel(device.kernel, problem.shape, problem.features, &made.kernel_reasons);
  made.kernel = kernel.name;
  made.threads = device.threads > 0 ? device.threads : default_threads();
  if (gathered) {
    made.search = std::make_unique<GatheredCpuSearch>(problem, kernel, made.threads);
  } else {
    made.search = std::make_unique<CpuSearch>(problem, kernel, made.threads);
  }
  return made;
}

}  // namespace logitless
