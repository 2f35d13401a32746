// The bf16 GEMMs of cuBLAS, as the roofline. cuBLAS is loaded at run time: building needs no
// development files.
#pragma once

#include <cstdint>
#include <string>

namespace logitless::bench {

// Multiplies bf16 matrices on the device, row-major and contiguous. GEMMs run on the default stream
// and accumulate in fp32.
class CublasGemm {
 public:
  CublasGemm();
  // Returns "", or why cuBLAS could not be loaded.
  const std::string& missing() const { return missing_; }
  // Computes c [m, n] = a [m, k] . b [n, k]^T.
  void multiply(const void* a, const void* b, void* c, std::int64_t m, std::int64_t n,
                std::int64_t k) const;
  // Computes c [m, n] = a [m, k] . b [k, n].
  void multiply_plain(const void* a, const void* b, void* c, std::int64_t m, std::int64_t n,
                      std::int64_t k) const;
  // Computes c [m, n] = a [k, m]^T . b [k, n].
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
