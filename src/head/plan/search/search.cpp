#include "head/plan/search/search.h"

#include "core/parallel.h"
#include "head/plan/search/cpu.h"
#include "head/plan/search/cuda.h"
#include "head/plan/search/gathered.h"

namespace logitless {

std::unique_ptr<PlanSearch> make_search(const PlanProblem& problem, const DeviceLimits& device,
                                        LossPlan& plan) {
  if (device.kind == DeviceKind::cuda) {
    const cuda::DeviceKernel& kernel = choose_device_kernel(problem, device, &plan.kernel_reasons);
    plan.kernel = kernel.name;
    plan.threads = 0;
    if (problem.features.gathered_rows > 0)
      return std::make_unique<GatheredCudaSearch>(problem, kernel, device);
    return std::make_unique<CudaSearch>(problem, kernel, device);
  }
  const HeadKernel& kernel =
      choose_head_kernel(device.kernel, problem.shape, problem.features, &plan.kernel_reasons);
  plan.kernel = kernel.name;
  plan.threads = device.threads > 0 ? device.threads : default_threads();
  if (problem.features.gathered_rows > 0)
    return std::make_unique<GatheredCpuSearch>(problem, kernel, plan.threads);
  return std::make_unique<CpuSearch>(problem, kernel, plan.threads);
}

}  // namespace logitless
