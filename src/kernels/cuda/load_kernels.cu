#include <cuda.h>

#include <vector>

#include "kernels/cuda/device/driver_function.h"
#include "kernels/cuda/device/kernels_to_load.h"
#include "kernels/device/module.h"

namespace logitless::cuda {
namespace {

constexpr int kLoads = 12040;  // CUDA version that can load single functions

struct File {
  const void* kernel;
  bool (*wanted)();
};
std::vector<File>& files() {
  static std::vector<File> of_library;
  return of_library;
}

void require(CUresult result, const char* what) {
  if (result != CUDA_SUCCESS) throw DeviceError(concat(what, ": error ", static_cast<int>(result)));
}

struct Driver {
  CUresult (*module_of)(CUmodule*, CUfunction) =
      driver_function<CUresult (*)(CUmodule*, CUfunction)>("cuFuncGetModule");
  CUresult (*count_of)(unsigned*, CUmodule) =
      driver_function<CUresult (*)(unsigned*, CUmodule)>("cuModuleGetFunctionCount", kLoads);
  CUresult (*functions_of)(CUfunction*, unsigned, CUmodule) =
      driver_function<CUresult (*)(CUfunction*, unsigned, CUmodule)>("cuModuleEnumerateFunctions",
                                                                     kLoads);
  CUresult (*load)(CUfunction) = driver_function<CUresult (*)(CUfunction)>("cuFuncLoad", kLoads);
};

}  // namespace

KernelsOfFile::KernelsOfFile(const void* kernel, bool (*wanted)()) {
  files().push_back({kernel, wanted});
}

void load_kernels() {
  int version = 0;
  require_cuda(cudaDriverGetVersion(&version), "cudaDriverGetVersion");
  if (version < kLoads) return;
  const Driver driver;
  for (const File& file : files()) {
    if (file.wanted != nullptr && !file.wanted()) continue;
    cudaFunction_t function = nullptr;
    const cudaError_t status = cudaGetFuncBySymbol(&function, file.kernel);
    // A Hopper kernel on another GPU.
    if (status == cudaErrorNoKernelImageForDevice || status == cudaErrorInvalidDeviceFunction) {
      cudaGetLastError();
      continue;
    }
    require_cuda(status, "cudaGetFuncBySymbol");
    CUmodule module = nullptr;
    require(driver.module_of(&module, function), "cuFuncGetModule");
    unsigned count = 0;
    require(driver.count_of(&count, module), "cuModuleGetFunctionCount");
    std::vector<CUfunction> functions(count);
    require(driver.functions_of(functions.data(), count, module), "cuModuleEnumerateFunctions");
    for (const CUfunction each : functions) require(driver.load(each), "cuFuncLoad");
  }
}

}  // namespace logitless::cuda
