#include "kernels/cuda/cublas.h"

#include <cuda_runtime_api.h>

#include "core/check.h"
#include "kernels/cuda/dynamic_library.h"

namespace logitless::cuda {
namespace {

using Handle = void*;

// Values of cublas_api.h and library_types.h.
constexpr int kNoTranspose = 0, kTranspose = 1;
constexpr int kF32 = 0, kF16 = 2, kBf16 = 14;
constexpr int kCompute32F = 68, kCompute32FPedantic = 69, kCompute32FFastTf32 = 77;
constexpr int kDefaultAlgorithm = -1;
constexpr int kPointersOnHost = 0, kPointersOnDevice = 1;

struct Functions {
  std::string missing;
  int (*create)(Handle*) = nullptr;
  int (*set_stream)(Handle, cudaStream_t) = nullptr;
  int (*set_workspace)(Handle, void*, std::size_t) = nullptr;
  int (*set_pointer_mode)(Handle, int) = nullptr;
  int (*gemm)(Handle, int, int, int, int, int, const void*, const void*, int, int, const void*, int,
              int, const void*, void*, int, int, int, int) = nullptr;
};

Functions load() {
  DynamicLibrary library("cuBLAS", {"libcublas.so.13", "libcublas.so.12", "libcublas.so"});
  Functions out;
  library.find("cublasCreate_v2", out.create);
  library.find("cublasSetStream_v2", out.set_stream);
  library.find("cublasSetWorkspace_v2", out.set_workspace);
  library.find("cublasSetPointerMode_v2", out.set_pointer_mode);
  library.find("cublasGemmEx", out.gemm);
  out.missing = library.missing();
  return out;
}

const Functions& functions() {
  static const Functions loaded = load();
  return loaded;
}

void require_cublas(int status, const char* what) {
  if (status != 0) throw DeviceError(concat(what, ": cuBLAS status ", status));
}

Handle handle() {
  static HandlePool& pool = *new HandlePool;  // threads may end after static objects
  thread_local DeviceHandles handles(&pool);
  return handles.get("cuBLAS", functions().missing, functions().create);
}

int compute_type(const Gemm& g) {
  if (g.dtype != DType::f32) return kCompute32F;
  return g.precision == Precision::tf32 ? kCompute32FFastTf32 : kCompute32FPedantic;
}

int type_of(DType dtype) {
  return dtype == DType::bf16 ? kBf16 : dtype == DType::f16 ? kF16 : kF32;
}

}  // namespace

const std::string& cublas_missing() {
  static const std::string missing = device_missing(0).empty() ? functions().missing : "";
  return missing;
}

void cublas_prepare() { handle(); }

void cublas_multiply(const Gemm& g, void* workspace, Stream stream, std::size_t bytes) {
  if (g.m == 0 || g.n == 0) return;
  Handle const h = handle();
  const Functions& f = functions();
  require_cublas(f.set_stream(h, static_cast<cudaStream_t>(stream)), "cublasSetStream");
  require_cublas(f.set_workspace(h, workspace, bytes), "cublasSetWorkspace");
  const bool on_host = g.alpha == nullptr;
  require_cublas(f.set_pointer_mode(h, on_host ? kPointersOnHost : kPointersOnDevice),
                 "cublasSetPointerMode");
  constexpr float kOne = 1.0f, kZero = 0.0f;
  const float* const alpha = on_host ? &kOne : g.alpha;
  const float* const beta = !on_host ? g.beta : g.adds ? &kOne : &kZero;
  const auto narrow = [](std::int64_t value) { return static_cast<int>(value); };
  const int type = type_of(g.dtype);
  // cuBLAS is column-major: c^T [n, m] = op(b)^T op(a)^T.
  require_cublas(
      f.gemm(h, g.b_transposed ? kTranspose : kNoTranspose,
             g.a_transposed ? kTranspose : kNoTranspose, narrow(g.n), narrow(g.m), narrow(g.k),
             alpha, g.b, type, narrow(g.b_stride), g.a, type, narrow(g.a_stride), beta, g.c, kF32,
             narrow(g.c_stride), compute_type(g), kDefaultAlgorithm),
      "cublasGemmEx");
}

}  // namespace logitless::cuda
