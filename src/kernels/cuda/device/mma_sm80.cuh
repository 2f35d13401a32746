// Instructions of compute capability 8.0: matrix products of a warp, loads of their operands, and
// asynchronous copies to shared memory. Generated kernels include it
// (kernels/device/tile_engine.h), so it needs no header of the host.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

namespace logitless::cuda {

// Copies 16 bytes, of which those from `bytes` on are 0. Both addresses are multiples of 16, the
// one in shared memory is an offset there.
__device__ __forceinline__ void copy_async(void* to, const void* from, int bytes) {
  asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" ::"r"(
                   static_cast<std::uint32_t>(__cvta_generic_to_shared(to))),
               "l"(from), "r"(bytes)
               : "memory");
}
// Eviction policies of L2: data that others read soon, and data that is read once or long after.
__device__ __forceinline__ std::uint64_t policy_keep() {
  std::uint64_t policy;
  asm("createpolicy.fractional.L2::evict_last.b64 %0, 1.0;" : "=l"(policy));
  return policy;
}
__device__ __forceinline__ std::uint64_t policy_pass() {
  std::uint64_t policy;
  asm("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
  return policy;
}
// Copies 16 bytes, or zeros unless `valid`: `from` is then not read.
__device__ __forceinline__ void copy_async_if(bool valid, std::uint32_t to, const void* from,
                                              std::uint64_t policy) {
  asm volatile(
      "{ .reg .pred none; setp.eq.u32 none, %2, 0;\n"
      "cp.async.cg.shared.global.L2::cache_hint.L2::128B [%0], [%1], 16, none, %3; }" ::"r"(to),
      "l"(from), "r"(static_cast<unsigned>(valid)), "l"(policy)
      : "memory");
}
// Copies the first `bytes` of 16, and zeros behind them; with 0 `from` is not read.
__device__ __forceinline__ void copy_async_bytes(int bytes, std::uint32_t to, const void* from) {
  asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" ::"r"(to), "l"(from),
               "r"(bytes)
               : "memory");
}
__device__ __forceinline__ void store_16_bytes(void* to, const std::uint32_t (&bits)[4],
                                               std::uint64_t policy) {
  asm volatile("st.global.L2::cache_hint.v4.b32 [%0], {%1, %2, %3, %4}, %5;" ::"l"(to),
               "r"(bits[0]), "r"(bits[1]), "r"(bits[2]), "r"(bits[3]), "l"(policy)
               : "memory");
}
__device__ __forceinline__ void store_shared(std::uint32_t to, const std::uint32_t (&bits)[4]) {
  asm volatile("st.shared.v4.b32 [%0], {%1, %2, %3, %4};" ::"r"(to), "r"(bits[0]), "r"(bits[1]),
               "r"(bits[2]), "r"(bits[3])
               : "memory");
}
__device__ __forceinline__ void copies_commit() {
  asm volatile("cp.async.commit_group;" ::: "memory");
}
// Waits until all but the last kGroups groups of the thread's copies are done.
template <int kGroups>
__device__ __forceinline__ void copies_wait_but() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kGroups) : "memory");
}
__device__ __forceinline__ void copies_wait() { asm volatile("cp.async.wait_all;" ::: "memory"); }
// Asynchronous copy of 16 bytes to shared memory; visible to this thread after copies_wait().
__device__ __forceinline__ void copy_16_bytes(void* to, const void* from) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(
                   static_cast<std::uint32_t>(__cvta_generic_to_shared(to))),
               "l"(from)
               : "memory");
}

// A barrier in shared memory, at an address there, that copies can arrive at.
class CopyBarrier {
 public:
  __device__ __forceinline__ explicit CopyBarrier(std::uint32_t address) : address_(address) {}
  __device__ __forceinline__ void init(int arrivals) const {
    asm volatile("mbarrier.init.shared.b64 [%0], %1;" ::"r"(address_), "r"(arrivals) : "memory");
  }
  __device__ __forceinline__ void arrive() const {
    asm volatile("{ .reg .b64 state; mbarrier.arrive.shared.b64 state, [%0]; }" ::"r"(address_)
                 : "memory");
  }
  // Arrives when the thread's copies so far are done. kAsync: they are asynchronous.
  template <bool kAsync>
  __device__ __forceinline__ void arrive_after_copies() const {
    if constexpr (kAsync) {
      asm volatile("cp.async.mbarrier.arrive.noinc.shared.b64 [%0];" ::"r"(address_) : "memory");
    } else {
      arrive();
    }
  }
  // Waits until the phase of this parity is complete.
  __device__ __forceinline__ void wait(unsigned parity) const {
    unsigned done;
    do {
#if __CUDA_ARCH__ >= 900
      asm volatile(
          "{ .reg .pred done; mbarrier.try_wait.parity.shared.b64 done, [%1], %2;\n"
          "selp.u32 %0, 1, 0, done; }"
          : "=r"(done)
          : "r"(address_), "r"(parity)
          : "memory");
#else
      asm volatile(
          "{ .reg .pred done; mbarrier.test_wait.parity.shared.b64 done, [%1], %2;\n"
          "selp.u32 %0, 1, 0, done; }"
          : "=r"(done)
          : "r"(address_), "r"(parity)
          : "memory");
#endif
    } while (done == 0);
  }

 private:
  std::uint32_t address_;
};

// Loads four 8 x 8 matrices; lane 8 m + r passes the shared address of row r of matrix m.
template <bool kTransposed>
__device__ __forceinline__ void load_matrices(std::uint32_t (&d)[4], std::uint32_t at) {
  if constexpr (kTransposed) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(d[0]), "=r"(d[1]), "=r"(d[2]), "=r"(d[3])
                 : "r"(at)
                 : "memory");
  } else {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(d[0]), "=r"(d[1]), "=r"(d[2]), "=r"(d[3])
                 : "r"(at)
                 : "memory");
  }
}

template <bool kTransposed>
__device__ __forceinline__ void load_matrices(std::uint32_t (&d)[4], const void* row) {
  load_matrices<kTransposed>(d, static_cast<std::uint32_t>(__cvta_generic_to_shared(row)));
}

// d [16][8] += a [16][16] . b [16][8]
template <typename T>
__device__ __forceinline__ void mma(float (&d)[4], const std::uint32_t (&a)[4], std::uint32_t b0,
                                    std::uint32_t b1);
template <>
__device__ __forceinline__ void mma<__nv_bfloat16>(float (&d)[4], const std::uint32_t (&a)[4],
                                                   std::uint32_t b0, std::uint32_t b1) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, "
      "{%8, %9}, {%0, %1, %2, %3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
template <>
__device__ __forceinline__ void mma<__half>(float (&d)[4], const std::uint32_t (&a)[4],
                                            std::uint32_t b0, std::uint32_t b1) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, "
      "{%8, %9}, {%0, %1, %2, %3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

template <typename T>
__device__ __forceinline__ std::uint32_t pair_of(float low, float high);
template <>
__device__ __forceinline__ std::uint32_t pair_of<__nv_bfloat16>(float low, float high) {
  const __nv_bfloat162 v = __floats2bfloat162_rn(low, high);
  return *reinterpret_cast<const std::uint32_t*>(&v);
}
template <>
__device__ __forceinline__ std::uint32_t pair_of<__half>(float low, float high) {
  const __half2 v = __floats2half2_rn(low, high);
  return *reinterpret_cast<const std::uint32_t*>(&v);
}

}  // namespace logitless::cuda
