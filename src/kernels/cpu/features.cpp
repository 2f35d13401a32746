#include "kernels/cpu/features.h"

#include <atomic>
#include <utility>

#include "hwy/targets.h"
#include "kernels/cpu_facts.h"

#if defined(__x86_64__)
#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace logitless::cpu {
namespace {

#if defined(__x86_64__)
bool cpuid_bit(unsigned leaf, unsigned subleaf, int reg, int bit) {
  unsigned r[4] = {};
  if (__get_cpuid_count(leaf, subleaf, &r[0], &r[1], &r[2], &r[3]) == 0) return false;
  return (r[reg] >> bit & 1u) != 0;
}

// Linux gives a process the 8 KiB of tile state only on request.
bool request_tiles() {
  constexpr long kArchReqXcompPerm = 0x1023;
  constexpr long kTileData = 18;
  return syscall(SYS_arch_prctl, kArchReqXcompPerm, kTileData) == 0;
}
#endif

}  // namespace

std::string amx_bf16_missing() {
#if defined(__x86_64__)
  constexpr int kEdx = 3;
  if (!cpuid_bit(7, 0, kEdx, 24) || !cpuid_bit(7, 0, kEdx, 22))
    return "the processor has no AMX bf16 tiles";
  const std::string bf16 = avx512_bf16_missing();  // its conversions are used with the tiles
  if (!bf16.empty()) return bf16;
  static const bool granted = request_tiles();
  if (!granted) return "the operating system does not grant the AMX tile state";
  return {};
#else
  return "AMX is an x86 extension";
#endif
}

std::string avx512_bf16_missing() {
#if defined(__x86_64__)
  constexpr int kEax = 0;
  if (!cpuid_bit(7, 1, kEax, 5)) return "the processor has no AVX-512 bf16 dot product";
  return {};
#else
  return "AVX-512 is an x86 extension";
#endif
}

bool dot_product_is_fast() {
#if defined(__x86_64__)
  unsigned highest = 0, ebx = 0, ecx = 0, edx = 0;
  constexpr unsigned kAuthenticAmd = 0x68747541;  // "Auth", the first letters of "AuthenticAMD"
  return __get_cpuid(0, &highest, &ebx, &ecx, &edx) != 0 && ebx == kAuthenticAmd;
#else
  return false;
#endif
}

}  // namespace logitless::cpu

namespace logitless {
namespace {

CpuFacts this_machine() {
  CpuFacts facts;
#if defined(__x86_64__)
  const std::int64_t targets = hwy::SupportedTargets();
  if ((targets & HWY_AVX2) != 0) facts.avx2.clear();
  if ((targets & HWY_AVX3) != 0) facts.avx512.clear();
#endif
  facts.avx512_bf16 = cpu::avx512_bf16_missing();
  facts.amx_bf16 = cpu::amx_bf16_missing();
  facts.dot_product_is_fast = cpu::dot_product_is_fast();
  return facts;
}

std::atomic<const CpuFacts*> assumed{nullptr};

}  // namespace

const CpuFacts& cpu_facts() {
  static const CpuFacts own = this_machine();
  const CpuFacts* const other = assumed.load(std::memory_order_acquire);
  return other != nullptr ? *other : own;
}

AssumedCpu::AssumedCpu(CpuFacts facts)
    : facts_(std::move(facts)), before_(assumed.exchange(&facts_, std::memory_order_acq_rel)) {}
AssumedCpu::~AssumedCpu() { assumed.store(before_, std::memory_order_release); }

}  // namespace logitless
