// What the choice of a CPU kernel asks of the processor and the operating system: the machine's
// part of a plan, beside the number of threads, which PlanRequest::device has. No size of a cache
// is in it.
#pragma once

#include <string>

namespace logitless {

// Instruction sets, each with the reason why it cannot be used, or empty.
struct CpuFacts {
  std::string avx2 = "the processor has no AVX2";
  std::string avx512 = "the processor has no AVX-512";
  std::string avx512_bf16 = "the processor has no AVX-512 bf16 dot product";
  std::string amx_bf16 = "the processor has no AMX bf16 tiles";
  // Whether that dot product beats multiply-adds in fp32: on AMD's cores, not on Intel's.
  bool dot_product_is_fast = false;
};

// This machine's, or those assumed.
const CpuFacts& cpu_facts();

// Plans are made as on another processor while it lives, by all threads; calls of kernels that the
// facts exclude are refused. For tests: kernels that the facts add must not be called.
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
