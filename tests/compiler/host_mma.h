// The engine of products by mma.sync (kernels/device/tile_engine.h) as text for the host: its
// instructions are emulated, and the rest is what a GPU compiles.
#pragma once

#include <string>

#include "core/check.h"
#include "kernels/device/tile_engine.h"

namespace logitless::test {

// Declarations of both engines.
inline constexpr const char* kHostProducts = R"host(
struct __nv_bfloat16 { unsigned short bits; };
struct __half { unsigned short bits; };
static void prefetch(const void*) {}
static unsigned two_bf16(float low, float high) {
  return to_bf16(low).bits | (unsigned)to_bf16(high).bits << 16;
}
static unsigned two_f16(float low, float high) {
  return to_f16(low).bits | (unsigned)to_f16(high).bits << 16;
}
template <typename T>
static float number_of(unsigned short bits) {
  if constexpr (std::is_same_v<T, __half>) return number(f16{bits});
  return number(bf16{bits});
}
)host";

// Instructions of kernels/cuda/device/mma_sm80.cuh. Threads of a block take turns: exchange() ends
// a turn. Addresses in shared memory are offsets. Copies are done when they are waited for.
inline constexpr const char* kHostMma = R"host(
#include <cstring>
#include <deque>
#define __forceinline__ inline
#define __align__(n)
static thread_local unsigned char product_memory[49152];

struct Exchanged { std::uint32_t registers[6]; };
static thread_local std::vector<Exchanged> exchanged[2];  // of even and odd turns
static thread_local std::vector<unsigned> turns;
// Returns what the lanes of the warp have given.
static const Exchanged* exchange(const Exchanged& own) {
  if (exchanged[0].size() < 128) {
    exchanged[0].resize(128), exchanged[1].resize(128), turns.resize(128);
  }
  auto& list = exchanged[turns[threadIdx.x]++ % 2];
  list[threadIdx.x] = own;
  yield();
  return list.data() + threadIdx.x / 32 * 32;
}
static std::uint32_t __shfl_xor_sync(unsigned, std::uint32_t x, int mask) {
  return exchange({{x}})[threadIdx.x % 32 ^ (unsigned)mask].registers[0];
}
static std::uint64_t __cvta_generic_to_shared(const void* at) {
  return (const unsigned char*)at - product_memory;
}
namespace logitless::cuda {
struct Copy { std::uint32_t to; const void* from; int bytes; };
static thread_local std::deque<std::vector<Copy>> copies[128];  // groups of each thread
static thread_local std::vector<Copy> uncommitted[128];
static std::uint64_t policy_keep() { return 0; }
static std::uint64_t policy_pass() { return 0; }
static void copy_async_bytes(int bytes, std::uint32_t to, const void* from) {
  if (to % 16 != 0 || (bytes > 0 && (std::uintptr_t)from % 16 != 0)) std::abort();
  uncommitted[threadIdx.x].push_back({to, from, bytes});
}
static void copy_async_if(bool valid, std::uint32_t to, const void* from, std::uint64_t) {
  copy_async_bytes(valid ? 16 : 0, to, from);
}
static void copies_commit() {
  copies[threadIdx.x].push_back(std::move(uncommitted[threadIdx.x]));
  uncommitted[threadIdx.x].clear();
}
template <int kGroups>
static void copies_wait_but() {
  for (auto& groups = copies[threadIdx.x]; groups.size() > kGroups; groups.pop_front()) {
    for (const Copy& c : groups.front()) {
      std::memset(product_memory + c.to, 0, 16);
      std::memcpy(product_memory + c.to, c.from, (std::size_t)c.bytes);
    }
  }
}
static void store_16_bytes(void* to, const std::uint32_t (&bits)[4], std::uint64_t) {
  if ((std::uintptr_t)to % 16 != 0) std::abort();
  std::memcpy(to, bits, 16);
}
template <bool kTransposed>
static void load_matrices(std::uint32_t (&d)[4], std::uint32_t at) {
  const Exchanged* const rows = exchange({{at}});
  const unsigned lane = threadIdx.x % 32, quad = lane / 4, pair = lane % 4 * 2;
  for (unsigned m = 0; m < 4; ++m) {
    unsigned short both[2];
    for (unsigned e = 0; e < 2; ++e) {
      const unsigned row = kTransposed ? pair + e : quad, column = kTransposed ? quad : pair + e;
      std::memcpy(&both[e], product_memory + rows[8 * m + row].registers[0] + 2 * column, 2);
    }
    d[m] = both[0] | (std::uint32_t)both[1] << 16;
  }
}
template <typename T>
static float element(std::uint32_t pair, unsigned odd) {
  return number_of<T>((unsigned short)(pair >> 16 * odd));
}
template <typename T>
static void mma(float (&d)[4], const std::uint32_t (&a)[4], std::uint32_t b0, std::uint32_t b1) {
  const Exchanged* const of = exchange({{a[0], a[1], a[2], a[3], b0, b1}});
  const unsigned lane = threadIdx.x % 32;
  for (unsigned i = 0; i < 4; ++i) {
    const unsigned column = lane % 4 * 2 + i % 2;
    for (unsigned k = 0; k < 16; ++k) {
      const std::uint32_t left = of[lane / 4 * 4 + k % 8 / 2].registers[i / 2 + k / 8 * 2];
      const std::uint32_t right = of[column * 4 + k % 8 / 2].registers[4 + k / 8];
      d[i] += element<T>(left, k % 2) * element<T>(right, k % 2);
    }
  }
}
}  // namespace logitless::cuda
)host";

// Returns the engine behind its instructions.
inline std::string host_sm80_engine() {
  std::string text(cuda::sm80_engine_text());
  const std::size_t begin = text.find("// A warp's 64 x 64 fp32 sums");
  check(begin != std::string::npos, "the engine's instructions are its first header");
  text.erase(0, begin);
  const std::string shared = "extern __shared__ __align__(128) unsigned char shared_memory[];";
  const std::size_t memory = text.find(shared);
  check(memory != std::string::npos, "the engine has shared memory");
  text.replace(memory, shared.size(), "unsigned char* const shared_memory = product_memory;");
  return concat(kHostProducts, kHostMma, text);
}

}  // namespace logitless::test
