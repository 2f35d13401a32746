// cuBLAS's bf16 product as the floor to compare with, loaded at run time: no development files are
// needed to build.
#pragma once

#include <cstdint>
#include <string>

namespace logitless::bench {

class CublasGemm {
 public:
  CublasGemm();
  // Empty, or why cuBLAS could not be loaded.
  const std::string& missing() const { return missing_; }
  // c [m, n] = a [m, k] . b [n, k]^T, all bf16 on the device, row-major and contiguous, on the
  // default stream.
  void multiply(const void* a, const void* b, void* c, std::int64_t m, std::int64_t n,
                std::int64_t k) const;

 private:
  std::string missing_;
  void* handle_ = nullptr;
  int (*gemm_)(void*, int, int, int, int, int, const void*, const void*, int, int, const void*, int,
               int, const void*, void*, int, int, int, int) = nullptr;
};

}  // namespace logitless::bench
