// Hopper building blocks: mbarriers, TMA, wgmma. PTX ISA 8.0, sm_90a.
#pragma once

#include <cuda.h>
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>
#include <type_traits>

namespace logitless::cuda {

__device__ __forceinline__ std::uint32_t smem_address(const void* p) {
  return static_cast<std::uint32_t>(__cvta_generic_to_shared(p));
}

__device__ __forceinline__ void barrier_init(std::uint64_t* bar, std::uint32_t count) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(smem_address(bar)), "r"(count));
}
__device__ __forceinline__ void barrier_expect(std::uint64_t* bar, std::uint32_t bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(smem_address(bar)),
               "r"(bytes)
               : "memory");
}
__device__ __forceinline__ void barrier_arrive(std::uint64_t* bar) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(smem_address(bar)) : "memory");
}
// Makes initialised barriers visible to the cluster and to TMA.
__device__ __forceinline__ void barrier_init_fence() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}
__device__ __forceinline__ int cluster_rank() {
  int rank;
  asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  return rank;
}
__device__ __forceinline__ void cluster_sync() {
  asm volatile("barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;" ::
                   : "memory");
}
// Arrives at the same barrier of a CTA of the cluster. It is relaxed: it orders only TMA and
// tensor-core accesses. A release at cluster scope is a full memory barrier, and cost a fifth of
// the throughput.
__device__ __forceinline__ void barrier_arrive_at(std::uint64_t* bar, std::uint32_t cta) {
  asm volatile(
      "{\n.reg .b32 remote;\n"
      "mapa.shared::cluster.u32 remote, %0, %1;\n"
      "mbarrier.arrive.shared::cluster.b64 _, [remote];\n}" ::"r"(smem_address(bar)),
      "r"(cta)
      : "memory");
}
__device__ __forceinline__ void barrier_wait(std::uint64_t* bar, std::uint32_t parity) {
  asm volatile(
      "{\n.reg .pred done;\n"
      "again:\n"
      "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
      "@done bra.uni end;\n"
      "bra.uni again;\n"
      "end:\n}" ::"r"(smem_address(bar)),
      "r"(parity)
      : "memory");
}

// L2 eviction policies of a copy: evict last, or evict first.
__device__ __forceinline__ std::uint64_t keep_policy() {
  std::uint64_t policy;
  asm("createpolicy.fractional.L2::evict_last.b64 %0, 1.0;" : "=l"(policy));
  return policy;
}
__device__ __forceinline__ std::uint64_t pass_policy() {
  std::uint64_t policy;
  asm("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
  return policy;
}

// Loads one box of a 2-D tensor map to shared memory; x runs along the contiguous dimension.
__device__ __forceinline__ void tma_load(void* to, const CUtensorMap* map, std::uint64_t* bar,
                                         int x, int y) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%3, "
      "%4}], [%2];" ::"r"(smem_address(to)),
      "l"(reinterpret_cast<std::uint64_t>(map)), "r"(smem_address(bar)), "r"(x), "r"(y)
      : "memory");
}
__device__ __forceinline__ void tma_load_multicast(void* to, const CUtensorMap* map,
                                                   std::uint64_t* bar, int x, int y,
                                                   std::uint16_t ctas) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::"
      "cluster [%0], [%1, {%3, %4}], [%2], %5;" ::"r"(smem_address(to)),
      "l"(reinterpret_cast<std::uint64_t>(map)), "r"(smem_address(bar)), "r"(x), "r"(y), "h"(ctas)
      : "memory");
}

__device__ __forceinline__ void tma_load(void* to, const CUtensorMap* map, std::uint64_t* bar,
                                         int x, int y, std::uint64_t policy) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint "
      "[%0], [%1, {%3, %4}], [%2], %5;" ::"r"(smem_address(to)),
      "l"(reinterpret_cast<std::uint64_t>(map)), "r"(smem_address(bar)), "r"(x), "r"(y), "l"(policy)
      : "memory");
}
__device__ __forceinline__ void tma_load_multicast(void* to, const CUtensorMap* map,
                                                   std::uint64_t* bar, int x, int y,
                                                   std::uint16_t ctas, std::uint64_t policy) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::"
      "cluster.L2::cache_hint [%0], [%1, {%3, %4}], [%2], %5, %6;" ::"r"(smem_address(to)),
      "l"(reinterpret_cast<std::uint64_t>(map)), "r"(smem_address(bar)), "r"(x), "r"(y), "h"(ctas),
      "l"(policy)
      : "memory");
}

// Loads one box of a 4-D tensor map, see head_map: columns from x on, rows from y on of a head.
__device__ __forceinline__ void tma_load_head(void* to, const CUtensorMap* map, std::uint64_t* bar,
                                              int x, int y, int head, int batch) {
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%3, "
      "%4, %5, %6}], [%2];" ::"r"(smem_address(to)),
      "l"(reinterpret_cast<std::uint64_t>(map)), "r"(smem_address(bar)), "r"(x), "r"(y), "r"(head),
      "r"(batch)
      : "memory");
}
__device__ __forceinline__ void tma_store_head(const CUtensorMap* map, const void* from, int x,
                                               int y, int head, int batch) {
  asm volatile(
      "cp.async.bulk.tensor.4d.global.shared::cta.tile.bulk_group [%0, {%2, %3, %4, %5}], [%1];" ::
          "l"(reinterpret_cast<std::uint64_t>(map)),
      "r"(smem_address(from)), "r"(x), "r"(y), "r"(head), "r"(batch)
      : "memory");
}

// Stores one box of shared memory to a 2-D tensor map, or adds it (fp32). Elements outside the
// tensor are left out. tma_wait_reads waits until shared memory has been read.
__device__ __forceinline__ void tma_store(const CUtensorMap* map, const void* from, int x, int y,
                                          std::uint64_t policy) {
  asm volatile(
      "cp.async.bulk.tensor.2d.global.shared::cta.tile.bulk_group.L2::cache_hint [%0, {%2, %3}], "
      "[%1], %4;" ::"l"(reinterpret_cast<std::uint64_t>(map)),
      "r"(smem_address(from)), "r"(x), "r"(y), "l"(policy)
      : "memory");
}
__device__ __forceinline__ void tma_add(const CUtensorMap* map, const void* from, int x, int y,
                                        std::uint64_t policy) {
  asm volatile(
      "cp.reduce.async.bulk.tensor.2d.global.shared::cta.add.tile.bulk_group.L2::cache_hint [%0, "
      "{%2, %3}], [%1], %4;" ::"l"(reinterpret_cast<std::uint64_t>(map)),
      "r"(smem_address(from)), "r"(x), "r"(y), "l"(policy)
      : "memory");
}
// Copies shared memory to global memory: bytes and addresses are multiples of 16.
__device__ __forceinline__ void bulk_store(void* to, const void* from, int bytes) {
  asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(to),
               "r"(smem_address(from)), "r"(bytes)
               : "memory");
}
// Copies global memory to shared memory, likewise.
__device__ __forceinline__ void bulk_load(void* to, const void* from, int bytes,
                                          std::uint64_t* bar) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::
          "r"(smem_address(to)),
      "l"(from), "r"(bytes), "r"(smem_address(bar))
      : "memory");
}
// Adds fp32 of shared memory to global memory, likewise.
__device__ __forceinline__ void bulk_add(float* to, const void* from, int bytes) {
  asm volatile(
      "cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32 [%0], [%1], %2;" ::"l"(to),
      "r"(smem_address(from)), "r"(bytes)
      : "memory");
}
__device__ __forceinline__ void tma_commit() {
  asm volatile("cp.async.bulk.commit_group;" ::: "memory");
}
// Waits until at most N groups of this thread's stores have still to read shared memory.
template <int N>
__device__ __forceinline__ void tma_wait_reads() {
  asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(N) : "memory");
}
// Waits until at most N groups of this thread's stores are in flight; the others' writes are
// visible.
template <int N>
__device__ __forceinline__ void tma_wait_writes() {
  asm volatile("cp.async.bulk.wait_group %0;" ::"n"(N) : "memory");
}
// Makes threads' writes to shared memory visible to TMA.
__device__ __forceinline__ void async_proxy_fence() {
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}
// Orders threads' accesses to any memory before the next TMA operations.
__device__ __forceinline__ void proxy_fence() { asm volatile("fence.proxy.async;" ::: "memory"); }
// Prefetches one box of a tensor map, or bytes (size and address multiples of 16), into L2.
__device__ __forceinline__ void tma_prefetch(const CUtensorMap* map, int x, int y) {
  asm volatile("cp.async.bulk.prefetch.tensor.2d.L2.global.tile [%0, {%1, %2}];" ::"l"(
                   reinterpret_cast<std::uint64_t>(map)),
               "r"(x), "r"(y)
               : "memory");
}
__device__ __forceinline__ void bulk_prefetch(const void* from, int bytes) {
  asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(from), "r"(bytes) : "memory");
}
// Stores four 8 x 8 matrices of bf16; lane 8 m + r passes the address of row r of matrix m, 16
// bytes.
__device__ __forceinline__ void store_matrices(void* row, std::uint32_t a, std::uint32_t b,
                                               std::uint32_t c, std::uint32_t d) {
  asm volatile(
      "stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(smem_address(row)),
      "r"(a), "r"(b), "r"(c), "r"(d)
      : "memory");
}
// Named barriers of `threads` threads, to wait or only to arrive; id 1 to 15.
__device__ __forceinline__ void threads_sync(int id, int threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
}
__device__ __forceinline__ void threads_arrive(int id, int threads) {
  asm volatile("bar.arrive %0, %1;" ::"r"(id), "r"(threads) : "memory");
}
// A barrier of one warpgroup; id 1 to 15.
__device__ __forceinline__ void warpgroup_sync(int id) {
  asm volatile("bar.sync %0, 128;" ::"r"(id) : "memory");
}

// Shared-memory matrix descriptor with 128-byte swizzle. start is 16-byte aligned. K-major operands
// have contiguous rows of 64 elements (128 B), 8 rows to a group of 1024 B.
__device__ __forceinline__ std::uint64_t wgmma_descriptor(const void* start,
                                                          std::uint32_t leading_bytes,
                                                          std::uint32_t stride_bytes) {
  std::uint64_t d = (smem_address(start) & 0x3ffff) >> 4;
  d |= static_cast<std::uint64_t>((leading_bytes & 0x3ffff) >> 4) << 16;
  d |= static_cast<std::uint64_t>((stride_bytes & 0x3ffff) >> 4) << 32;
  d |= std::uint64_t{1} << 62;
  return d;
}

__device__ __forceinline__ void wgmma_fence() {
  asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
}
__device__ __forceinline__ void wgmma_commit() {
  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}
template <int N>
__device__ __forceinline__ void wgmma_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(N) : "memory");
}

template <int kRegisters>
__device__ __forceinline__ void registers_grow() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kRegisters));
}
template <int kRegisters>
__device__ __forceinline__ void registers_shrink() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kRegisters));
}

// Accumulators d[i] to d[i + 31] as operands of an asm statement.
#define LOGITLESS_ACCUMULATORS_8(i)                                                   \
  "+f"(d[i]), "+f"(d[(i) + 1]), "+f"(d[(i) + 2]), "+f"(d[(i) + 3]), "+f"(d[(i) + 4]), \
      "+f"(d[(i) + 5]), "+f"(d[(i) + 6]), "+f"(d[(i) + 7])
#define LOGITLESS_ACCUMULATORS_32(i)                              \
  LOGITLESS_ACCUMULATORS_8(i), LOGITLESS_ACCUMULATORS_8((i) + 8), \
      LOGITLESS_ACCUMULATORS_8((i) + 16), LOGITLESS_ACCUMULATORS_8((i) + 24)

#define LOGITLESS_WGMMA(types)                                                                     \
  asm volatile(                                                                                    \
      "{\n.reg .pred p;\nsetp.ne.b32 p, %130, 0;\n"                                                \
      "wgmma.mma_async.sync.aligned.m64n256k16.f32." types                                         \
      " {"                                                                                         \
      "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, " \
      "%20, %21,"                                                                                  \
      "%22, %23, %24, %25, %26, %27, %28, %29, %30, %31, %32, %33, %34, %35, %36, %37, %38, %39, " \
      "%40, %41,"                                                                                  \
      "%42, %43, %44, %45, %46, %47, %48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, " \
      "%60, %61,"                                                                                  \
      "%62, %63, %64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79, " \
      "%80, %81,"                                                                                  \
      "%82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95, %96, %97, %98, %99, " \
      "%100,"                                                                                      \
      "%101, %102, %103, %104, %105, %106, %107, %108, %109, %110, %111, %112, %113, %114, %115, " \
      "%116,"                                                                                      \
      "%117, %118, %119, %120, %121, %122, %123, %124, %125, %126, %127"                           \
      "}, %128, %129, p, 1, 1, %131, %132;\n}"                                                     \
      : LOGITLESS_ACCUMULATORS_32(0), LOGITLESS_ACCUMULATORS_32(32),                               \
        LOGITLESS_ACCUMULATORS_32(64), LOGITLESS_ACCUMULATORS_32(96)                               \
      : "l"(a), "l"(b), "r"(add), "n"(kTransposeA), "n"(kTransposeB))

// d [64][256] (+)= a [64][16] . b [16][256]; kTransposeA/B: the operand has M or N contiguous. T:
// bf16 or f16.
template <int kTransposeA, int kTransposeB, typename T = __nv_bfloat16>
__device__ __forceinline__ void wgmma_m64n256k16(float (&d)[128], std::uint64_t a, std::uint64_t b,
                                                 int add) {
  if constexpr (std::is_same_v<T, __half>) {
    LOGITLESS_WGMMA("f16.f16");
  } else {
    LOGITLESS_WGMMA("bf16.bf16");
  }
}
#undef LOGITLESS_WGMMA

}  // namespace logitless::cuda
