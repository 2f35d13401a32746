// Micro-kernels for one 32 x 32 block of a bf16 GEMM: on the AMX unit, by AVX-512 dot products, or
// in plain C++ (tests on any machine).
//
// A tiles are [16 rows][32 k], B tiles [16 pairs of k][16 columns][2]; both are 512 contiguous
// elements.
// A k step has two adjacent tiles of each.
#if defined(LOGITLESS_BF16_TILES_INL_H) == defined(HWY_TARGET_TOGGLE)
#ifdef LOGITLESS_BF16_TILES_INL_H
#undef LOGITLESS_BF16_TILES_INL_H
#else
#define LOGITLESS_BF16_TILES_INL_H
#endif

#include <algorithm>
#include <cstdint>
#include <cstring>

#include "core/half.h"
#include "hwy/highway.h"
#include "kernels/cpu/simd_math-inl.h"

#if HWY_ARCH_X86
#include <immintrin.h>
#endif

HWY_BEFORE_NAMESPACE();
namespace logitless::cpu::HWY_NAMESPACE {

inline constexpr std::int64_t kTile = 512;  // elements

// c [32][32] (+)= a . b over `steps` steps of 32 k. a_step and b_step: elements between steps. Only
// the first `rows` rows of c need be computed.
struct EmulatedTiles {
  using Bf16 = PortableBf16;
  struct Session {};
  static void Multiply(const std::uint16_t* a, std::int64_t a_step, const std::uint16_t* b,
                       std::int64_t b_step, std::int64_t steps, float* HWY_RESTRICT c,
                       std::int64_t ldc, bool add, std::int64_t rows = 32) {
    for (std::int64_t i = 0; i < std::min<std::int64_t>(rows, 32); ++i) {
      for (int j = 0; j < 32; ++j) {
        float sum = add ? c[i * ldc + j] : 0.0f;
        for (std::int64_t s = 0; s < steps; ++s) {
          const std::uint16_t* row = a + s * a_step + (i / 16) * kTile + (i % 16) * 32;
          const std::uint16_t* column = b + s * b_step + (j / 16) * kTile + (j % 16) * 2;
          for (int k = 0; k < 16; ++k) {
            sum += bf16_to_float(row[2 * k]) * bf16_to_float(column[k * 32]);
            sum += bf16_to_float(row[2 * k + 1]) * bf16_to_float(column[k * 32 + 1]);
          }
        }
        c[i * ldc + j] = sum;
      }
    }
  }
};

#if HWY_ARCH_X86 && HWY_TARGET <= HWY_AVX3
struct HardwareTiles {
  using Bf16 = HardwareBf16;
  // Configures this thread's tile registers for its lifetime: 8 tiles of 16 rows x 64 bytes.
  class Session {
   public:
    Session() {
      struct alignas(64) Config {
        std::uint8_t palette = 1;
        std::uint8_t start_row = 0;
        std::uint8_t reserved[14] = {};
        std::uint16_t row_bytes[16] = {};
        std::uint8_t rows[16] = {};
      } config;
      for (int t = 0; t < 8; ++t) {
        config.row_bytes[t] = 64;
        config.rows[t] = 16;
      }
      __asm__ volatile("ldtilecfg %0" ::"m"(config));
    }
    ~Session() { __asm__ volatile("tilerelease" ::: "memory"); }
    Session(const Session&) = delete;
    Session& operator=(const Session&) = delete;
  };

  static HWY_INLINE void Multiply(const std::uint16_t* a, std::int64_t a_step,
                                  const std::uint16_t* b, std::int64_t b_step, std::int64_t steps,
                                  float* HWY_RESTRICT c, std::int64_t ldc, bool add,
                                  std::int64_t /*rows*/ = 32) {
    const std::size_t stride = static_cast<std::size_t>(ldc) * sizeof(float);
    if (add) {
      _tile_loadd(0, c, stride);
      _tile_loadd(1, c + 16, stride);
      _tile_loadd(2, c + 16 * ldc, stride);
      _tile_loadd(3, c + 16 * ldc + 16, stride);
    } else {
      _tile_zero(0);
      _tile_zero(1);
      _tile_zero(2);
      _tile_zero(3);
    }
    for (std::int64_t s = 0; s < steps; ++s) {
      _tile_loadd(4, a, 64);
      _tile_loadd(6, b, 64);
      _tile_loadd(7, b + kTile, 64);
      _tile_dpbf16ps(0, 4, 6);
      _tile_loadd(5, a + kTile, 64);
      _tile_dpbf16ps(1, 4, 7);
      _tile_dpbf16ps(2, 5, 6);
      _tile_dpbf16ps(3, 5, 7);
      a += a_step;
      b += b_step;
    }
    _tile_stored(0, c, stride);
    _tile_stored(1, c + 16, stride);
    _tile_stored(2, c + 16 * ldc, stride);
    _tile_stored(3, c + 16 * ldc + 16, stride);
  }
};

// Uses vdpbf16ps in inline assembly, since AVX3 does not imply it. Register blocking: 8 rows x 2
// vectors of accumulators, one row of B, one broadcast pair of A.
struct DotTiles {
  using Bf16 = HardwareBf16;
  struct Session {};
  static HWY_INLINE void Multiply(const std::uint16_t* a, std::int64_t a_step,
                                  const std::uint16_t* b, std::int64_t b_step, std::int64_t steps,
                                  float* HWY_RESTRICT c, std::int64_t ldc, bool add,
                                  std::int64_t rows = 32) {
    for (std::int64_t r = 0; r < std::min<std::int64_t>(rows, 32); r += 8)
      Rows(a + r / 16 * kTile + r % 16 * 32, a_step, b, b_step, steps, c + r * ldc, ldc, add);
  }

 private:
  static HWY_NOINLINE void Rows(const std::uint16_t* a, std::int64_t a_step, const std::uint16_t* b,
                                std::int64_t b_step, std::int64_t steps, float* HWY_RESTRICT c,
                                std::int64_t ldc, bool add) {
    __m512 sum[8][2];
#pragma GCC unroll 8
    for (int i = 0; i < 8; ++i) {
      sum[i][0] = add ? _mm512_loadu_ps(c + i * ldc) : _mm512_setzero_ps();
      sum[i][1] = add ? _mm512_loadu_ps(c + i * ldc + 16) : _mm512_setzero_ps();
    }
    for (std::int64_t s = 0; s < steps; ++s) {
      for (int k = 0; k < 16; ++k) {
        const __m512i low = _mm512_loadu_si512(b + k * 32);
        const __m512i high = _mm512_loadu_si512(b + kTile + k * 32);
#pragma GCC unroll 8
        for (int i = 0; i < 8; ++i) {
          std::int32_t pair;
          std::memcpy(&pair, a + i * 32 + 2 * k, sizeof(pair));
          const __m512i x = _mm512_set1_epi32(pair);
          __asm__("vdpbf16ps %2, %1, %0" : "+v"(sum[i][0]) : "v"(x), "v"(low));
          __asm__("vdpbf16ps %2, %1, %0" : "+v"(sum[i][1]) : "v"(x), "v"(high));
        }
      }
      a += a_step;
      b += b_step;
    }
#pragma GCC unroll 8
    for (int i = 0; i < 8; ++i) {
      _mm512_storeu_ps(c + i * ldc, sum[i][0]);
      _mm512_storeu_ps(c + i * ldc + 16, sum[i][1]);
    }
  }
};
#endif

// Transposes 16 x 16 elements of 32 bits: to [16][to_stride] = from [16][from_stride]^T. Elements
// of `from` may be pairs of 16 bits, at any even address.
template <class From, class Word>
HWY_INLINE void TransposeWords(const From* HWY_RESTRICT from, std::int64_t from_stride,
                               Word* HWY_RESTRICT to, std::int64_t to_stride) {
  static_assert(sizeof(Word) == 4 && (sizeof(From) == 2 || sizeof(From) == 4));
#if HWY_ARCH_X86 && HWY_TARGET <= HWY_AVX3
  __m512i r[16], a[16], b[16];
#pragma GCC unroll 16
  for (int i = 0; i < 16; ++i) r[i] = _mm512_loadu_si512(from + i * from_stride);
#pragma GCC unroll 8
  for (int i = 0; i < 16; i += 2) {
    a[i] = _mm512_unpacklo_epi32(r[i], r[i + 1]);
    a[i + 1] = _mm512_unpackhi_epi32(r[i], r[i + 1]);
  }
#pragma GCC unroll 4
  for (int i = 0; i < 16; i += 4) {
    b[i] = _mm512_unpacklo_epi64(a[i], a[i + 2]);
    b[i + 1] = _mm512_unpackhi_epi64(a[i], a[i + 2]);
    b[i + 2] = _mm512_unpacklo_epi64(a[i + 1], a[i + 3]);
    b[i + 3] = _mm512_unpackhi_epi64(a[i + 1], a[i + 3]);
  }
  // 128-bit block L of b[4 j + c] is column 4 L + c of rows 4 j to 4 j + 3.
#pragma GCC unroll 4
  for (int c = 0; c < 4; ++c) {
    const __m512i x0 = _mm512_shuffle_i32x4(b[c], b[4 + c], 0x88);
    const __m512i x1 = _mm512_shuffle_i32x4(b[c], b[4 + c], 0xdd);
    const __m512i y0 = _mm512_shuffle_i32x4(b[8 + c], b[12 + c], 0x88);
    const __m512i y1 = _mm512_shuffle_i32x4(b[8 + c], b[12 + c], 0xdd);
    _mm512_storeu_si512(to + c * to_stride, _mm512_shuffle_i32x4(x0, y0, 0x88));
    _mm512_storeu_si512(to + (4 + c) * to_stride, _mm512_shuffle_i32x4(x1, y1, 0x88));
    _mm512_storeu_si512(to + (8 + c) * to_stride, _mm512_shuffle_i32x4(x0, y0, 0xdd));
    _mm512_storeu_si512(to + (12 + c) * to_stride, _mm512_shuffle_i32x4(x1, y1, 0xdd));
  }
#else
  constexpr int kParts = sizeof(Word) / sizeof(From);
  for (int i = 0; i < 16; ++i) {
    for (int j = 0; j < 16; ++j)
      std::memcpy(to + i * to_stride + j, from + j * from_stride + i * kParts, sizeof(Word));
  }
#endif
}

// NOLINTNEXTLINE(google-readability-namespace-comments)
}  // namespace logitless::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif
