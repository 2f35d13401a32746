// GEMM of packed panels (GotoBLAS): FloatGemm widens any operand to fp32, TileGemm multiplies bf16
// by the micro-kernels of bf16_tiles-inl.h.
//
// A task owns a tile of c. For each block of k it packs its columns of b once, then rows of a in
// blocks that stay in L2. The micro-kernel's slice of b stays in L1. An element of c is the sum
// over blocks of k in order, of sums along k in order, independent of the tiling. So the tiling may
// depend on the number of threads without changing bits.
#if defined(LOGITLESS_TENSOR_GEMM_INL_H) == defined(HWY_TARGET_TOGGLE)
#ifdef LOGITLESS_TENSOR_GEMM_INL_H
#undef LOGITLESS_TENSOR_GEMM_INL_H
#else
#define LOGITLESS_TENSOR_GEMM_INL_H
#endif

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <utility>

#include "core/element.h"
#include "core/parallel.h"
#include "hwy/cache_control.h"
#include "kernels/cpu/bf16_tiles-inl.h"
#include "kernels/cpu/tensor/vector-inl.h"
#include "kernels/cpu_head.h"
#include "kernels/cpu_tensor.h"

HWY_BEFORE_NAMESPACE();
namespace logitless::cpu::HWY_NAMESPACE {

#if HWY_ARCH_X86 && HWY_TARGET <= HWY_AVX2
inline constexpr bool kTransposes8 = true;
using D8 = hn::CappedTag<float, 8>;

// Transposes 8 x 8: r[i] lane j becomes r[j] lane i.
HWY_INLINE void Transpose8(__m256 (&r)[8]) {
  __m256 a[8], b[8];
#pragma GCC unroll 4
  for (int i = 0; i < 8; i += 2) {
    a[i] = _mm256_unpacklo_ps(r[i], r[i + 1]);
    a[i + 1] = _mm256_unpackhi_ps(r[i], r[i + 1]);
  }
#pragma GCC unroll 2
  for (int i = 0; i < 8; i += 4) {
    b[i] = _mm256_shuffle_ps(a[i], a[i + 2], 0x44);
    b[i + 1] = _mm256_shuffle_ps(a[i], a[i + 2], 0xee);
    b[i + 2] = _mm256_shuffle_ps(a[i + 1], a[i + 3], 0x44);
    b[i + 3] = _mm256_shuffle_ps(a[i + 1], a[i + 3], 0xee);
  }
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i) {
    r[i] = _mm256_permute2f128_ps(b[i], b[i + 4], 0x20);
    r[i + 4] = _mm256_permute2f128_ps(b[i], b[i + 4], 0x31);
  }
}

// Packs one panel of P rows (`rows` of them exist), depth a multiple of 8, k contiguous. Where 8
// does not divide P, stores of 8 reach into the next row, and up to 2 floats past the panel.
template <int P, class Source>
HWY_INLINE void PackTransposed(const typename Source::T* from, std::int64_t stride,
                               std::int64_t rows, std::int64_t depth, float* HWY_RESTRICT to) {
  const D8 d;
  for (int g = 0; g < P; g += 8) {
    const std::int64_t n = std::min<std::int64_t>(8, rows - g);
    for (std::int64_t k = 0; k < depth; k += 8) {
      __m256 r[8];
#pragma GCC unroll 8
      for (int i = 0; i < 8; ++i) {
        r[i] = i < std::min(8, P - g) && i < n ? Source::Load(d, from + (g + i) * stride + k).raw
                                               : _mm256_setzero_ps();
      }
      Transpose8(r);
#pragma GCC unroll 8
      for (int i = 0; i < 8; ++i) _mm256_storeu_ps(to + (k + i) * P + g, r[i]);
    }
  }
}
#else
inline constexpr bool kTransposes8 = false;
template <int P, class Source>
void PackTransposed(const typename Source::T*, std::int64_t, std::int64_t, std::int64_t, float*) {}
#endif

// Packs rows p of a matrix (stride_p between them, stride_k along k) into panels to[p /
// P][depth][P] of floats; rows past count are 0. Writes up to 2 floats past the last panel.
template <int P, class Source>
void PackPanels(const typename Source::T* from, std::int64_t stride_p, std::int64_t stride_k,
                std::int64_t count, std::int64_t depth, float* HWY_RESTRICT to) {
  using DP = hn::CappedTag<float, P % 16 == 0 ? 16 : 8>;
  constexpr std::int64_t kWide = static_cast<std::int64_t>(hn::MaxLanes(DP()));
  constexpr std::int64_t kRead = (P + kWide - 1) / kWide * kWide;
  // panels filled together, for longer contiguous reads along a row of k
  constexpr std::int64_t kGroup = 4 * P;
  const DP d;
  if (stride_p == 1) {
    for (std::int64_t group = 0; group < count; group += kGroup) {
      for (std::int64_t k = 0; k < depth; ++k) {
        const auto* row = from + k * stride_k;
        for (std::int64_t p = group; p < std::min(count, group + kGroup); p += P) {
          float* out = to + p * depth + k * P;
          if (p + kRead <= count && (kRead == P || k + 1 < depth)) {
#pragma GCC unroll 4
            for (std::int64_t j = 0; j < P; j += kWide)
              hn::StoreU(Source::Load(d, row + p + j), d, out + j);
          } else {
            const std::int64_t n = std::min<std::int64_t>(P, count - p);
            for (std::int64_t j = 0; j < P; ++j) out[j] = j < n ? Source::One(row[p + j]) : 0.0f;
          }
        }
      }
    }
    return;
  }
  for (std::int64_t p = 0; p < count; p += P) {
    const std::int64_t n = std::min<std::int64_t>(P, count - p);
    const auto* rows = from + p * stride_p;
    float* panel = to + p * depth;
    std::int64_t k = 0;
    if (kTransposes8 && stride_k == 1) {
      k = depth / 8 * 8;
      PackTransposed<P, Source>(rows, stride_p, n, k, panel);
    }
    for (; k < depth; ++k) {
      for (std::int64_t j = 0; j < P; ++j)
        panel[k * P + j] = j < n ? Source::One(rows[j * stride_p + k * stride_k]) : 0.0f;
    }
  }
}

template <int P>
void PackPanels(const void* from, DType dtype, std::int64_t offset, std::int64_t stride_p,
                std::int64_t stride_k, std::int64_t count, std::int64_t depth,
                float* HWY_RESTRICT to) {
  with_source(dtype, [&]<class Source>() {
    PackPanels<P, Source>(static_cast<const typename Source::T*>(from) + offset, stride_p, stride_k,
                          count, depth, to);
  });
}

struct FloatGemm {
  using Element = float;
  struct Session {};  // nothing to set up in a thread
  static constexpr int kLanes = static_cast<int>(kMaxLanes);
  // Register blocking: accumulators, one row of b and a broadcast fill the registers: 16 on AVX2,
  // 32 on AVX-512 and NEON.
  static constexpr bool kManyRegisters = HWY_TARGET <= HWY_AVX3 || HWY_ARCH_ARM;
  static constexpr int kRows = kManyRegisters ? 8 : (HWY_TARGET == HWY_AVX2 ? 6 : 4);
  static constexpr int kVectors = kManyRegisters ? 3 : 2;
  static constexpr int kColumns = kVectors * kLanes;
  static constexpr std::int64_t kDepth = kLanes == 16 ? 192 : 320;
  static constexpr std::int64_t kDepthAlign = 8;
  static constexpr std::int64_t kRowBlock = 144;
  static constexpr std::int64_t kSlack = 16;  // elements that may be written past a packed operand
  static constexpr bool kReadsInPlace = true;

  static void PackA(const GemmOperand& a, std::int64_t offset, std::int64_t rows,
                    std::int64_t depth, Element* to) {
    PackPanels<kRows>(a.data, a.dtype, offset, a.row_stride, a.col_stride, rows, depth, to);
  }
  static void PackB(const GemmOperand& b, std::int64_t offset, std::int64_t columns,
                    std::int64_t depth, Element* to) {
    PackPanels<kColumns>(b.data, b.dtype, offset, b.col_stride, b.row_stride, columns, depth, to);
  }

  // Operand of a block: packed panels, or a matrix of floats in place.
  struct Left {
    const float* data;
    std::int64_t row_stride, depth_stride, panel_stride;  // panel: kRows rows
  };
  struct Right {
    const float* data;
    std::int64_t depth_stride, panel_stride;  // columns contiguous; panel: kColumns columns
  };
  static Left PackedLeft(const float* a, std::int64_t depth) {
    return {a, 1, kRows, kRows * depth};
  }
  static Right PackedRight(const float* b, std::int64_t depth) {
    return {b, kColumns, kColumns * depth};
  }

  // c [rows][ldc] (+)= a . b. Reads full panels of b, and exactly `rows` rows of an a in place.
  static void Block(const Left& a, std::int64_t rows, const Right& b, std::int64_t columns,
                    std::int64_t depth, float* c, std::int64_t ldc, bool add) {
    const bool packed = a.row_stride == 1 && a.depth_stride == kRows && b.depth_stride == kColumns;
    for (std::int64_t j = 0; j < columns; j += kColumns) {
      const std::int64_t nc = std::min<std::int64_t>(kColumns, columns - j);
      const float* panel = b.data + j / kColumns * b.panel_stride;
      for (std::int64_t i = 0; i < rows; i += kRows) {
        const std::int64_t nr = std::min<std::int64_t>(kRows, rows - i);
        const float* left = a.data + i / kRows * a.panel_stride;
        float* to = c + i * ldc + j;
        if (packed && nr == kRows && nc == kColumns) {
          Tile<kRows, kVectors>(left, 1, kRows, panel, kColumns, depth, to, ldc, add);
          continue;
        }
        const TileFunction tile =
            Choose(static_cast<std::size_t>((nr - 1) * kVectors + ceil_div(nc, kLanes) - 1),
                   std::make_index_sequence<kRows * kVectors>());
        if (nc % kLanes == 0) {
          tile(left, a.row_stride, a.depth_stride, panel, b.depth_stride, depth, to, ldc, add);
          continue;
        }
        HWY_ALIGN float part[kRows * kColumns] = {};
        for (std::int64_t r = 0; r < nr && add; ++r) {
          for (std::int64_t s = 0; s < nc; ++s) part[r * kColumns + s] = to[r * ldc + s];
        }
        tile(left, a.row_stride, a.depth_stride, panel, b.depth_stride, depth, part, kColumns,
             true);
        for (std::int64_t r = 0; r < nr; ++r) {
          for (std::int64_t s = 0; s < nc; ++s) to[r * ldc + s] = part[r * kColumns + s];
        }
      }
    }
  }
  static void PackedBlock(const Element* a, std::int64_t rows, const Element* b,
                          std::int64_t columns, std::int64_t depth, float* c, std::int64_t ldc,
                          bool add) {
    Block(PackedLeft(a, depth), rows, PackedRight(b, depth), columns, depth, c, ldc, add);
  }

 private:
  using TileFunction = void (*)(const float*, std::int64_t, std::int64_t, const float*,
                                std::int64_t, std::int64_t, float*, std::int64_t, bool);

  // c [R][N vectors] (+)= a . b. The sum continues from the contents of c, so that splitting k,
  // into blocks or accumulating calls, gives the same bits.
  template <int R, int N>
  static HWY_INLINE void Multiply(const float* HWY_RESTRICT a, std::int64_t rs, std::int64_t cs,
                                  const float* HWY_RESTRICT b, std::int64_t ldb, std::int64_t depth,
                                  float* HWY_RESTRICT c, std::int64_t ldc, bool add) {
    const D d;
    V acc[R][N];
#pragma GCC unroll 8
    for (int i = 0; i < R; ++i) {
#pragma GCC unroll 4
      for (int j = 0; j < N; ++j)
        acc[i][j] = add ? hn::LoadU(d, c + i * ldc + j * kLanes) : hn::Zero(d);
    }
    for (std::int64_t k = 0; k < depth; ++k) {
      V row[N];
#pragma GCC unroll 4
      for (int j = 0; j < N; ++j) row[j] = hn::LoadU(d, b + j * kLanes);
#pragma GCC unroll 8
      for (int i = 0; i < R; ++i) {
        const V x = hn::Set(d, a[i * rs]);
#pragma GCC unroll 4
        for (int j = 0; j < N; ++j) acc[i][j] = hn::MulAdd(x, row[j], acc[i][j]);
      }
      a += cs;
      b += ldb;
    }
#pragma GCC unroll 8
    for (int i = 0; i < R; ++i) {
#pragma GCC unroll 4
      for (int j = 0; j < N; ++j) {
        hn::StoreU(acc[i][j], d, c + i * ldc + j * kLanes);
      }
    }
  }
  template <int R, int N>
  static HWY_NOINLINE void Tile(const float* a, std::int64_t rs, std::int64_t cs, const float* b,
                                std::int64_t ldb, std::int64_t depth, float* c, std::int64_t ldc,
                                bool add) {
    if (rs == 1 && cs == kRows && ldb == kColumns) {  // known strides: cheaper addresses
      Multiply<R, N>(a, 1, kRows, b, kColumns, depth, c, ldc, add);
    } else {
      Multiply<R, N>(a, rs, cs, b, ldb, depth, c, ldc, add);
    }
  }
  template <std::size_t... kIndex>
  static TileFunction Choose(std::size_t index, std::index_sequence<kIndex...>) {
    static constexpr TileFunction kTiles[] = {
        &Tile<static_cast<int>(kIndex) / kVectors + 1, static_cast<int>(kIndex) % kVectors + 1>...};
    return kTiles[index];
  }
};

// bf16 operands as the tiles of bf16_tiles-inl.h: panels of 32 rows or columns, k in steps of 32.
template <class Tiles>
struct TileGemm {
  using Element = std::uint16_t;
  using Session = typename Tiles::Session;
  static constexpr int kRows = 32;
  static constexpr int kColumns = 32;
  static constexpr std::int64_t kDepth = 512;
  static constexpr std::int64_t kDepthAlign = 32;
  static constexpr std::int64_t kRowBlock = 256;
  static constexpr std::int64_t kSlack = 0;
  static constexpr bool kReadsInPlace = false;
  static constexpr std::int64_t kStep = 2 * kTile;  // elements of a step of 32 k of one operand

  static void PackA(const GemmOperand& a, std::int64_t offset, std::int64_t rows,
                    std::int64_t depth, Element* to) {
    Pack<true>(a, offset, a.row_stride, a.col_stride, rows, depth, to);
  }
  static void PackB(const GemmOperand& b, std::int64_t offset, std::int64_t columns,
                    std::int64_t depth, Element* to) {
    Pack<false>(b, offset, b.col_stride, b.row_stride, columns, depth, to);
  }

  static void PackedBlock(const Element* a, std::int64_t rows, const Element* b,
                          std::int64_t columns, std::int64_t depth, float* c, std::int64_t ldc,
                          bool add) {
    const std::int64_t steps = ceil_div(depth, 32);
    for (std::int64_t j = 0; j < columns; j += kColumns) {
      const std::int64_t nc = std::min<std::int64_t>(kColumns, columns - j);
      const Element* right = b + j / kColumns * steps * kStep;
      for (std::int64_t i = 0; i < rows; i += kRows) {
        const std::int64_t nr = std::min<std::int64_t>(kRows, rows - i);
        const Element* left = a + i / kRows * steps * kStep;
        float* to = c + i * ldc + j;
        if (nr == kRows && nc == kColumns) {
          Tiles::Multiply(left, kStep, right, kStep, steps, to, ldc, add);
          continue;
        }
        alignas(64) float part[kRows * kColumns] = {};
        const std::size_t bytes = static_cast<std::size_t>(nc) * sizeof(float);
        if (add) {
          for (std::int64_t r = 0; r < nr; ++r)
            std::memcpy(part + r * kColumns, to + r * ldc, bytes);
        }
        Tiles::Multiply(left, kStep, right, kStep, steps, part, kColumns, add);
        for (std::int64_t r = 0; r < nr; ++r) std::memcpy(to + r * ldc, part + r * kColumns, bytes);
      }
    }
  }

 private:
  // Tiles of a hold rows of pairs of k, tiles of b columns of pairs: one is the transpose of the
  // other.
  template <bool kIsA>
  static void Pack(const GemmOperand& from, std::int64_t offset, std::int64_t stride_p,
                   std::int64_t stride_k, std::int64_t count, std::int64_t depth, Element* to) {
    const auto* data = static_cast<const std::uint16_t*>(from.data) + offset;
    const std::int64_t steps = ceil_div(depth, 32);
    // Panels packed together along k, for longer contiguous reads along a row of k.
    const std::int64_t group = stride_p == 1 ? 4 * 32 : 32;
    for (std::int64_t first = 0; first < count; first += group) {
      for (std::int64_t k = 0; k < depth; k += 32) {
        for (std::int64_t p = first; p < std::min(count, first + group); p += 32) {
          const std::uint16_t* at = data + p * stride_p + k * stride_k;
          Element* step = to + (p / 32 * steps + k / 32) * kStep;
          if (count - p < 32 || depth - k < 32 || (stride_p != 1 && stride_k != 1)) {
            PackPart<kIsA>(at, stride_p, stride_k, std::min<std::int64_t>(32, count - p),
                           std::min<std::int64_t>(32, depth - k), step);
          } else if (stride_p == 1) {
            PackColumns<kIsA>(at, stride_k, step);
          } else {
            PackRows<kIsA>(at, stride_p, step);
          }
        }
      }
    }
  }

  // Packs 32 x 32 elements: rows of contiguous k.
  template <bool kIsA>
  static HWY_INLINE void PackRows(const std::uint16_t* HWY_RESTRICT from, std::int64_t stride_p,
                                  Element* HWY_RESTRICT to) {
    for (int half = 0; half < 2; ++half) {
      const std::uint16_t* rows = from + half * 16 * stride_p;
      Element* tile = to + half * kTile;
      if constexpr (kIsA) {
        for (int j = 0; j < 16; ++j) std::memcpy(tile + j * 32, rows + j * stride_p, 64);
      } else {
        TransposeWords(rows, stride_p, reinterpret_cast<std::uint32_t*>(tile), 16);
      }
    }
  }
  // Packs 32 x 32 elements: contiguous for each k.
  template <bool kIsA>
  static HWY_INLINE void PackColumns(const std::uint16_t* HWY_RESTRICT from, std::int64_t stride_k,
                                     Element* HWY_RESTRICT to) {
    using Words = hn::CappedTag<std::uint32_t, 16>;
    const Words words;
    const hn::Rebind<std::uint16_t, Words> halves;
    constexpr int kLanes = static_cast<int>(hn::MaxLanes(Words()));
    alignas(64) std::uint32_t tile[16 * 16];
    for (int half = 0; half < 2; ++half) {
      auto* out = reinterpret_cast<std::uint32_t*>(to + half * kTile);
      std::uint32_t* pairs = kIsA ? tile : out;
      for (int i = 0; i < 16; ++i) {
        const std::uint16_t* even = from + 2 * i * stride_k + half * 16;
        for (int j = 0; j < 16; j += kLanes) {
          const auto low = hn::PromoteTo(words, hn::LoadU(halves, even + j));
          const auto high = hn::PromoteTo(words, hn::LoadU(halves, even + stride_k + j));
          hn::StoreU(hn::Or(low, hn::ShiftLeft<16>(high)), words, pairs + i * 16 + j);
        }
      }
      if constexpr (kIsA) TransposeWords(tile, 16, out, 16);
    }
  }
  // Packs np x nk elements with any strides, the rest 0.
  template <bool kIsA>
  static void PackPart(const std::uint16_t* from, std::int64_t stride_p, std::int64_t stride_k,
                       std::int64_t np, std::int64_t nk, Element* to) {
    alignas(64) std::uint16_t rows[32 * 32] = {};
    for (std::int64_t j = 0; j < np; ++j) {
      for (std::int64_t i = 0; i < nk; ++i) rows[j * 32 + i] = from[j * stride_p + i * stride_k];
    }
    PackRows<kIsA>(rows, 32, to);
  }
};

struct GemmPlan {
  GemmProblem problem;                            // transposed if that makes c's rows contiguous
  std::int64_t rows = 0, columns = 0, depth = 0;  // of a tile of c and a block of k
  std::int64_t tiles_m = 0, tiles_n = 0, tasks = 0;
  std::int64_t ldc = 0;
  bool direct_c = false, direct_a = false, direct_b = false;  // in place, not packed
  std::size_t a_bytes = 0, b_bytes = 0, thread_bytes = 0, total = 0;
};

inline GemmProblem Transposed(GemmProblem p) {
  std::swap(p.m, p.n);
  std::swap(p.a, p.b);
  std::swap(p.a.row_stride, p.a.col_stride);
  std::swap(p.b.row_stride, p.b.col_stride);
  std::swap(p.c.row_stride, p.c.col_stride);
  return p;
}

template <class Engine>
GemmPlan PlanGemm(const GemmProblem& given) {
  constexpr std::int64_t kMaxRows = 2016, kMaxColumns = 1536, kMinSide = 192;  // of whole panels
  GemmPlan plan;
  GemmProblem& p = plan.problem;
  p = given;
  // the stride of a single column is arbitrary
  if (p.n == 1 && p.m > 1 && p.a.row_stride != 1) p.c.col_stride = 1;
  const bool column = p.n < 8 && p.n < p.m && p.a.row_stride == 1 && p.c.row_stride == 1;
  if ((p.c.col_stride != 1 && p.c.row_stride == 1) || column) p = Transposed(p);
  plan.direct_c = p.c.dtype == DType::f32 && p.c.col_stride == 1;

  const std::int64_t blocks = std::max<std::int64_t>(1, ceil_div(p.k, Engine::kDepth));
  plan.depth = round_up(std::max<std::int64_t>(1, ceil_div(p.k, blocks)), Engine::kDepthAlign);

  // At least one of each: the matrices may be empty.
  std::int64_t rows =
      std::clamp<std::int64_t>(round_up(p.m, Engine::kRows), Engine::kRows, kMaxRows);
  std::int64_t columns =
      std::clamp<std::int64_t>(round_up(p.n, Engine::kColumns), Engine::kColumns, kMaxColumns);
  const auto tasks = [&] { return p.batch * ceil_div(p.m, rows) * ceil_div(p.n, columns); };
  const auto halve = [](std::int64_t& side, std::int64_t unit) {
    side = round_up(ceil_div(side, 2), unit);
  };
  // At least four tasks for each thread, and at most 1 MiB of separate accumulators.
  while ((p.threads > 1 && tasks() < 4 * p.threads && std::max(rows, columns) > kMinSide) ||
         (!plan.direct_c && rows * columns > (std::int64_t{1} << 18))) {
    if (rows >= columns) {
      halve(rows, Engine::kRows);
    } else {
      halve(columns, Engine::kColumns);
    }
  }
  plan.tiles_m = ceil_div(p.m, rows);
  plan.tiles_n = ceil_div(p.n, columns);
  if (plan.tiles_m > 0) rows = round_up(ceil_div(p.m, plan.tiles_m), Engine::kRows);
  if (plan.tiles_n > 0) columns = round_up(ceil_div(p.n, plan.tiles_n), Engine::kColumns);
  plan.rows = rows;
  plan.columns = columns;
  plan.tasks = p.batch * plan.tiles_m * plan.tiles_n;
  plan.ldc = plan.direct_c ? p.c.row_stride : columns;

  if (Engine::kReadsInPlace && p.a.dtype == DType::f32) {
    // Packing costs about as much as reading an operand in place a few times. Rows of b that map to
    // few cache sets are better packed.
    plan.direct_a = columns <= 4 * Engine::kColumns;
    plan.direct_b = p.b.col_stride == 1 &&
                    (rows <= 4 * Engine::kRows ||
                     (rows <= 144 && std::abs(p.b.row_stride) * std::min(plan.depth, p.k) <= 6144));
  }
  const auto bytes = [](std::int64_t elements, std::size_t size) {
    return (static_cast<std::size_t>(elements) * size + 63) / 64 * 64;
  };
  constexpr std::size_t kSize = sizeof(typename Engine::Element);
  const std::int64_t row_block = round_up(std::min(Engine::kRowBlock, rows), Engine::kRows);
  plan.a_bytes = plan.direct_a ? 0 : bytes(row_block * plan.depth + Engine::kSlack, kSize);
  plan.b_bytes =
      bytes((plan.direct_b ? Engine::kColumns : columns) * plan.depth + Engine::kSlack, kSize);
  plan.thread_bytes =
      plan.a_bytes + plan.b_bytes + (plan.direct_c ? 0 : bytes(rows * columns, sizeof(float)));
  plan.total = plan.thread_bytes * static_cast<std::size_t>(std::clamp<std::int64_t>(
                                       p.threads, 1, std::max<std::int64_t>(plan.tasks, 1)));
  return plan;
}

// Conversions between a tile of c, of any dtype and strides, and accumulators [rows][ld].
inline void LoadTile(const GemmOutput& c, std::int64_t offset, std::int64_t rows,
                     std::int64_t columns, float* to, std::int64_t ld) {
  for (std::int64_t i = 0; i < rows; ++i) {
    for (std::int64_t j = 0; j < columns; ++j) {
      to[i * ld + j] = static_cast<float>(
          load_element(c.data, c.dtype, offset + i * c.row_stride + j * c.col_stride));
    }
  }
}
inline void StoreTile(const GemmOutput& c, std::int64_t offset, std::int64_t rows,
                      std::int64_t columns, const float* from, std::int64_t ld) {
  auto* data = static_cast<std::byte*>(c.data);
  const auto size = static_cast<std::int64_t>(size_of(c.dtype));
  for (std::int64_t i = 0; i < rows; ++i) {
    const std::int64_t row = offset + i * c.row_stride;
    if (c.col_stride == 1) {
      FromF32(c.dtype, from + i * ld, data + row * size, columns);
      continue;
    }
    for (std::int64_t j = 0; j < columns; ++j)
      store_element(c.data, c.dtype, row + j * c.col_stride, static_cast<double>(from[i * ld + j]));
  }
}

// Computes tile (i0, j0) of matrix `batch` of c; scratch is this thread's.
template <class Engine>
void GemmTask(const GemmPlan& plan, std::int64_t batch, std::int64_t i0, std::int64_t j0,
              std::byte* scratch) {
  using Element = typename Engine::Element;
  const GemmProblem& p = plan.problem;
  [[maybe_unused]] const typename Engine::Session session;
  auto* packed_a = reinterpret_cast<Element*>(scratch);
  auto* packed_b = reinterpret_cast<Element*>(scratch + plan.a_bytes);
  const std::int64_t rows = std::min(plan.rows, p.m - i0);
  const std::int64_t columns = std::min(plan.columns, p.n - j0);
  const std::int64_t a0 = batch * p.a.batch_stride + i0 * p.a.row_stride;
  const std::int64_t b0 = batch * p.b.batch_stride + j0 * p.b.col_stride;
  const std::int64_t c0 = batch * p.c.batch_stride + i0 * p.c.row_stride + j0 * p.c.col_stride;
  float* c = plan.direct_c ? static_cast<float*>(p.c.data) + c0
                           : reinterpret_cast<float*>(scratch + plan.a_bytes + plan.b_bytes);
  if (p.accumulate && !plan.direct_c) LoadTile(p.c, c0, rows, columns, c, plan.ldc);
  if (p.k == 0 && !p.accumulate) {
    for (std::int64_t i = 0; i < rows; ++i)
      std::fill(c + i * plan.ldc, c + i * plan.ldc + columns, 0.0f);
  }
  for (std::int64_t k = 0; k < p.k; k += plan.depth) {
    const std::int64_t depth = std::min(plan.depth, p.k - k);
    const bool add = p.accumulate || k > 0;
    const std::int64_t ak = a0 + k * p.a.col_stride;
    const std::int64_t bk = b0 + k * p.b.row_stride;
    const std::int64_t whole =  // columns of b read in place: full panels
        plan.direct_b ? columns / Engine::kColumns * Engine::kColumns : 0;
    if (columns > whole)
      Engine::PackB(p.b, bk + whole * p.b.col_stride, columns - whole, depth, packed_b);
    for (std::int64_t i = 0; i < rows; i += Engine::kRowBlock) {
      const std::int64_t n = std::min(Engine::kRowBlock, rows - i);
      const std::int64_t ai = ak + i * p.a.row_stride;
      float* ci = c + i * plan.ldc;
      if (!plan.direct_a) Engine::PackA(p.a, ai, n, depth, packed_a);
      if constexpr (Engine::kReadsInPlace) {
        const auto left =
            plan.direct_a
                ? typename Engine::Left{static_cast<const float*>(p.a.data) + ai, p.a.row_stride,
                                        p.a.col_stride, p.a.row_stride * Engine::kRows}
                : Engine::PackedLeft(packed_a, depth);
        if (whole > 0) {
          Engine::Block(
              left, n, {static_cast<const float*>(p.b.data) + bk, p.b.row_stride, Engine::kColumns},
              whole, depth, ci, plan.ldc, add);
        }
        if (columns > whole) {
          Engine::Block(left, n, Engine::PackedRight(packed_b, depth), columns - whole, depth,
                        ci + whole, plan.ldc, add);
        }
      } else {
        Engine::PackedBlock(packed_a, n, packed_b, columns, depth, ci, plan.ldc, add);
      }
    }
  }
  if (!plan.direct_c && (p.k > 0 || !p.accumulate)) StoreTile(p.c, c0, rows, columns, c, plan.ldc);
}

template <class Engine>
void RunGemm(const GemmProblem& problem, std::byte* scratch) {
  const GemmPlan plan = PlanGemm<Engine>(problem);
  parallel_for(problem.threads, plan.tasks, [&](std::int64_t task, int thread) {
    const std::int64_t tile = task % (plan.tiles_m * plan.tiles_n);
    GemmTask<Engine>(plan, task / (plan.tiles_m * plan.tiles_n), tile % plan.tiles_m * plan.rows,
                     tile / plan.tiles_m * plan.columns,
                     scratch + static_cast<std::size_t>(thread) * plan.thread_bytes);
  });
}
template <class Engine>
std::size_t GemmScratch(const GemmProblem& problem) {
  return PlanGemm<Engine>(problem).total;
}

// NOLINTNEXTLINE(google-readability-namespace-comments)
}  // namespace logitless::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif
