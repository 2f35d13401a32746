// cuBLAS's bf16 products as the floor to compare with, loaded at run time: no development files are
// needed to build.
#pragma once

#include <cstdint>
#include <string>

namespace logitless::bench {

// Matrices on the device, bf16, row-major and contiguous; products on the default stream,
// accumulated in fp32.
class CublasGemm {
 public:
  CublasGemm();
  // Empty, or why cuBLAS could not be loaded.
  const std::string& missing() const { return missing_; }
  // c [m, n] = a [m, k] . b [n, k]^T
  void multiply(const void* a, const void* b, void* c, std::int64_t m, std::int64_t n,
                std::int64_t k) const;
  // c [m, n] = a [m, k] . b [k, n]
  void multiply_plain(const void* a, const void* b, void* c, std::int64_t m, std::int64_t n,
                      std::int64_t k) const;
  // c [m, n] = a [k, m]^T . b [k, n]
  void multiply_transposed(const void* a, const void* b, void* c, std::int64_t m, std::int64_t n,
                           std::int64_t k) const;

 private:
  void run(bool a_transposed, bool b_transposed, const void* a, const void* b, void* c,
           std::int64_t m, std::int64_t n, std::int64_t k) const;

  std::string missing_;
  void* handle_ = nullptr;
  int (*gemm_)(void*, int, int, int, int, int, const void*, const void*, int, int, const void*, int,
               int, const void*, void*, int, int, int, int) = nullptr;
};

}  // namespace logitless::bench
