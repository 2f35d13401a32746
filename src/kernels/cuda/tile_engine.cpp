#include "kernels/device/tile_engine.h"

#include <string>

namespace logitless::cuda {
namespace {

// Stand-ins for the names of standard and CUDA headers that the engine uses.
constexpr std::string_view kStandIns = R"cuda(
namespace std {
using int64_t = long long;
using uint16_t = unsigned short;
using uint32_t = unsigned;
using uint64_t = unsigned long long;
using uintptr_t = unsigned long long;
template <class A, class B>
inline constexpr bool is_same_v = false;
template <class A>
inline constexpr bool is_same_v<A, A> = true;
}  // namespace std
struct alignas(64) CUtensorMap {
  unsigned long long opaque[16];
};
struct __nv_bfloat16 {
  unsigned short bits;
};
struct __half {
  unsigned short bits;
};
struct __nv_bfloat162 {
  unsigned bits;
};
struct __half2 {
  unsigned bits;
};
__device__ inline __nv_bfloat162 __floats2bfloat162_rn(float low, float high) {
  __nv_bfloat162 y;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(y.bits) : "f"(high), "f"(low));
  return y;
}
__device__ inline __half2 __floats2half2_rn(float low, float high) {
  __half2 y;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(y.bits) : "f"(high), "f"(low));
  return y;
}
namespace logitless::cuda {
struct BlockMaps;
}
__device__ inline void prefetch(const void* from) {
  asm volatile("prefetch.global.L2 [%0];" ::"l"(from));
}
__device__ inline unsigned two_bf16(float low, float high) {
  return __floats2bfloat162_rn(low, high).bits;
}
__device__ inline unsigned two_f16(float low, float high) {
  return __floats2half2_rn(low, high).bits;
}
)cuda";

constexpr std::string_view kSm90Headers =
#include "sm90_engine_text.inc"
    ;
constexpr std::string_view kSm80Headers =
#include "sm80_engine_text.inc"
    ;

std::string with_stand_ins(std::string_view headers) {
  return std::string(kStandIns) + std::string(headers);
}

}  // namespace

std::string_view sm90_engine_text() {
  static const std::string text = with_stand_ins(kSm90Headers);
  return text;
}
std::string_view sm80_engine_text() {
  static const std::string text = with_stand_ins(kSm80Headers);
  return text;
}

}  // namespace logitless::cuda
