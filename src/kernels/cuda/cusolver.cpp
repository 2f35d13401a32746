#include "kernels/cuda/cusolver.h"

#include <cuda_runtime_api.h>

#include "core/check.h"
#include "kernels/cuda/dynamic_library.h"

namespace logitless::cuda {
namespace {

using Handle = void*;

// Values of cusolverDn.h and cublas_api.h.
constexpr int kVectors = 1, kLower = 0;
constexpr std::size_t kInfoBytes = 256;

struct Functions {
  std::string missing;
  int (*create)(Handle*) = nullptr;
  int (*set_stream)(Handle, cudaStream_t) = nullptr;
  int (*size)(Handle, int, int, int, const float*, int, const float*, int*) = nullptr;
  int (*solve)(Handle, int, int, int, float*, int, float*, float*, int, int*) = nullptr;
};

Functions load() {
  DynamicLibrary library("cuSOLVER", {"libcusolver.so.12", "libcusolver.so.11", "libcusolver.so"});
  Functions out;
  library.find("cusolverDnCreate", out.create);
  library.find("cusolverDnSetStream", out.set_stream);
  library.find("cusolverDnSsyevd_bufferSize", out.size);
  library.find("cusolverDnSsyevd", out.solve);
  out.missing = library.missing();
  return out;
}

const Functions& functions() {
  static const Functions loaded = load();
  return loaded;
}

void require_cusolver(int status, const char* what) {
  if (status != 0) throw DeviceError(concat(what, ": cuSOLVER status ", status));
}

Handle handle() {
  thread_local DeviceHandles handles(nullptr);  // its work may use memory of the handle
  return handles.get("cuSOLVER", functions().missing, functions().create);
}

int floats_of(int dim) {
  int floats = 0;
  require_cusolver(
      functions().size(handle(), kVectors, kLower, dim, nullptr, dim, nullptr, &floats),
      "cusolverDnSsyevd_bufferSize");
  return floats;
}

}  // namespace

const std::string& cusolver_missing() { return functions().missing; }

std::size_t eigen_workspace_bytes(std::int64_t dim) {
  handle();
  return kInfoBytes + static_cast<std::size_t>(floats_of(static_cast<int>(dim))) * sizeof(float);
}

void symmetric_eigen(float* matrix, std::int64_t dim, float* values, void* workspace,
                     Stream stream) {
  Handle const h = handle();
  const auto n = static_cast<int>(dim);
  require_cusolver(functions().set_stream(h, static_cast<cudaStream_t>(stream)),
                   "cusolverDnSetStream");
  auto* const scratch = static_cast<std::byte*>(workspace);
  // cuSOLVER's columns are the rows of our row-major matrix.
  require_cusolver(functions().solve(h, kVectors, kLower, n, matrix, n, values,
                                     reinterpret_cast<float*>(scratch + kInfoBytes), floats_of(n),
                                     reinterpret_cast<int*>(scratch)),
                   "cusolverDnSsyevd");
}

}  // namespace logitless::cuda
