#include "device/cublas_gemm.h"

#include <dlfcn.h>

#include <cstring>
#include <stdexcept>

namespace logitless::bench {
namespace {

// Values of cublas_api.h and library_types.h.
constexpr int kNoTranspose = 0, kTranspose = 1, kBf16 = 14, kCompute32F = 68, kDefault = -1;

template <typename F>
void find(void* library, const char* name, F& function) {
  void* const found = dlsym(library, name);
  if (found == nullptr) throw std::runtime_error(dlerror());
  std::memcpy(&function, &found, sizeof(found));
}

}  // namespace

CublasGemm::CublasGemm() {
  void* library = nullptr;
  for (const char* name : {"libcublas.so.13", "libcublas.so.12", "libcublas.so"}) {
    library = dlopen(name, RTLD_NOW);
    if (library != nullptr) break;
  }
  if (library == nullptr) {
    missing_ = dlerror();
    return;
  }
  int (*create)(void**) = nullptr;
  find(library, "cublasCreate_v2", create);
  find(library, "cublasGemmEx", gemm_);
  if (create(&handle_) != 0) missing_ = "cublasCreate failed";
}

// Calls the column-major cuBLAS: c^T [n, m] = op(b)^T . op(a)^T.
void CublasGemm::run(bool a_transposed, bool b_transposed, const void* a, const void* b, void* c,
                     std::int64_t m, std::int64_t n, std::int64_t k) const {
  const float one = 1.0f;
  const float zero = 0.0f;
  const int status = gemm_(
      handle_, b_transposed ? kTranspose : kNoTranspose, a_transposed ? kTranspose : kNoTranspose,
      static_cast<int>(n), static_cast<int>(m), static_cast<int>(k), &one, b, kBf16,
      static_cast<int>(b_transposed ? k : n), a, kBf16, static_cast<int>(a_transposed ? m : k),
      &zero, c, kBf16, static_cast<int>(n), kCompute32F, kDefault);
  if (status != 0) throw std::runtime_error("cublasGemmEx: status " + std::to_string(status));
}

void CublasGemm::multiply(const void* a, const void* b, void* c, std::int64_t m, std::int64_t n,
                          std::int64_t k) const {
  run(false, true, a, b, c, m, n, k);
}
void CublasGemm::multiply_plain(const void* a, const void* b, void* c, std::int64_t m,
                                std::int64_t n, std::int64_t k) const {
  run(false, false, a, b, c, m, n, k);
}
void CublasGemm::multiply_transposed(const void* a, const void* b, void* c, std::int64_t m,
                                     std::int64_t n, std::int64_t k) const {
  run(true, false, a, b, c, m, n, k);
}

}  // namespace logitless::bench
