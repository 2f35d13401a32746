// Properties of the processor and operating system that the choice of a CPU kernel depends on. They
// are the machine's part of a plan, beside the number of threads in PlanRequest::device. Cache
// sizes are not among them.
#pragma once

#include <string>

namespace logitless {

// Instruction sets, each with the reason why it cannot be used, or empty.
struct CpuFacts {
  std::string avx2 = "the processor has no AVX2";
  std::string avx512 = "the processor has no AVX-512";
  std::string avx512_bf16 = "the processor has no AVX-512 bf16 dot product";
  std::string amx_bf16 = "the processor has no AMX bf16 tiles";
  // True if that dot product beats fp32 multiply-adds: on AMD's cores, not on Intel's.
  bool dot_product_is_fast = false;
};

// Facts of this machine, or the assumed ones.
const CpuFacts& cpu_facts();

// Makes all threads plan for another processor while it lives. Calls of kernels that the facts
// exclude are refused. For tests: kernels that the facts add must not be called.
class AssumedCpu {
 public:
  explicit AssumedCpu(CpuFacts facts);
  ~AssumedCpu();
  AssumedCpu(const AssumedCpu&) = delete;
  AssumedCpu& operator=(const AssumedCpu&) = delete;

 private:
  CpuFacts facts_;
  const CpuFacts* before_;
};

}  // namespace logitless
