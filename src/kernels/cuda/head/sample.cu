// Samples of tokens from stored logits by the Gumbel-max trick, see device/sample.h.
//
// A thread draws the upper random bits of eight entries at once. The least bits and the greatest
// logit of their tile bound their scores. Logits are read only where one of the eight may win, some
// hundreds of a row; then those that may win by their own logit get the other random bits, two
// logarithms and the division by the temperature.
#include <algorithm>

#include "kernels/cuda/device/error.cuh"
#include "kernels/cuda/device/kernels_of_file.cuh"
#include "kernels/cuda/device/launch.cuh"
#include "kernels/cuda/head/draw.cuh"
#include "kernels/cuda/head/kept_entries.cuh"
#include "kernels/cuda/head/sample_sizes.h"
#include "kernels/device/sample.h"

namespace logitless::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kWarps = kThreads / 32;
static_assert(kTileColumns == 32 * kSharedEntries, "a warp reads a tile at a time");

struct DrawArguments {
  StoredRows rows;
  float* greatest;    // [tokens]: the greatest logit, with logit_bias
  float* least;       // [tokens]: the least s that top_k and top_p keep; null: all are kept
  ScoredEntry* best;  // [tokens]
  const std::int64_t* key;
  const void* counter;
  bool int64_counter;
  std::int64_t first_token;
  TokenNumbers temperature, top_p, min_p;
  std::int64_t top_k;  // 0: all
  int block_tiles;     // vocabulary tiles of a thread block

  __host__ __device__ bool filters() const { return least != nullptr || min_p.data != nullptr; }
};

__device__ __forceinline__ float number_of(const TokenNumbers& numbers, std::int64_t token,
                                           float without) {
  return numbers.data == nullptr ? without : numbers.data[numbers.per_token ? token : 0];
}

// A token's temperature, 1 for those without noise.
struct Temperature {
  __device__ __forceinline__ Temperature(const DrawArguments& d, std::int64_t token)
      : value(number_of(d.temperature, token, 0.0f)), warm(value > 0.0f) {
    if (!warm) value = 1.0f;
  }
  float value;
  bool warm;  // there is noise
};

__device__ __forceinline__ NoiseKey key_of(const DrawArguments& d, std::int64_t row) {
  if (d.key == nullptr) return {};
  std::int64_t counter = d.first_token + row;
  if (d.counter != nullptr) {
    counter = d.int64_counter ? static_cast<const std::int64_t*>(d.counter)[counter]
                              : static_cast<const std::int32_t*>(d.counter)[counter];
  }
  return {static_cast<std::uint32_t>(d.key[0] + counter), static_cast<std::uint32_t>(d.key[1])};
}

// A token's sampler. kFilters: d.filters().
template <bool kFilters>
struct Sampler {
  __device__ __forceinline__ Sampler(const DrawArguments& d, std::int64_t row)
      : greatest(d.greatest[row]), keys(key_of(d, row)) {
    const std::int64_t token = d.first_token + row;
    const Temperature of_token(d, token);
    temperature = of_token.value;
    warm = of_token.warm;
    slope = kLog2EFloat / temperature;
    if constexpr (kFilters) {
      least = d.least == nullptr ? -INFINITY : d.least[row];
      if (d.min_p.data != nullptr) least = fmaxf(least, logf(number_of(d.min_p, token, 0.0f)));
      // The product's rounding, and that of s, are less than these.
      const float bound = least * temperature;
      least_z = bound - (fabsf(bound) * 0x1p-20f + 0x1p-126f);
    }
  }

  // Returns the entry with its score, or 0 if a filter drops it. `z` is its logit less the
  // greatest.
  __device__ __forceinline__ ScoredEntry scored(float z, std::uint32_t upper,
                                                std::uint32_t vocab_id) const {
    const float s = z / temperature;
    if (kFilters && s < least) return 0;
    return scored_entry(warm ? s + gumbel_noise(upper, keys, vocab_id) : s, vocab_id);
  }

  float greatest, temperature, slope;
  float least = -INFINITY;    // least s that is kept
  float least_z = -INFINITY;  // a bound: no entry with less z is kept
  bool warm;                  // there is noise
  RoundKeys keys;
};

// The best entry of a row so far. A greater one since is as good: nothing depends on how many
// entries are computed.
__device__ __forceinline__ ScoredEntry best_so_far(const DrawArguments& d, std::int64_t row) {
  return *static_cast<volatile const ScoredEntry*>(d.best + row);
}

// Updates the best entry of a row by those of a tile. A warp calls it. top: the tile's greatest
// logit less the row's, which is kept. kGeneral: d.rows.general().
template <bool kGeneral, bool kFilters>
__device__ __forceinline__ void draw_tile(const DrawArguments& d, std::int64_t row, int tile,
                                          float top, ScoredEntry best,
                                          const Sampler<kFilters>& sampler,
                                          const LogitReader<kGeneral>& reader) {
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const int first = tile * kTileColumns + lane / 4 * 32 + lane % 4 * 2;
  // block_of(first)
  const UpperBits bits(sampler.keys, tile * 32 + lane, sampler.warm);
  const float above = fmaf(score_of(best), -kLog2EFloat, kScoreMargin);
  if (!may_win(bits.least(), fmaf(top, sampler.slope, above))) return;
  float z[kSharedEntries / 2][2];
#pragma unroll
  for (int w = 0; w < kSharedEntries / 2; ++w) reader.read(z[w], d.rows, first + 8 * w);
  unsigned winners = 0;  // a bit for each entry that may win
#pragma unroll
  for (int j = 0; j < kSharedEntries; ++j) {
    const float s = __fsub_rn(z[j / 2][j % 2], sampler.greatest);
    const bool wins = may_win(bits.of(j), fmaf(s, sampler.slope, above));
    if (wins && first + shared_offset(j) < d.rows.vocab) winners |= 1u << j;
  }
  for (; winners != 0; winners &= winners - 1) {
    const int j = __ffs(static_cast<int>(winners)) - 1, vocab_id = first + shared_offset(j);
    float again[1];  // from the L1 cache, since registers have no index
    reader.read(again, d.rows, vocab_id);
    const float s = __fsub_rn(again[0], sampler.greatest);
    if (kFilters && s < sampler.least_z) continue;
    const ScoredEntry entry = sampler.scored(s, bits.of(j), vocab_id);
    if (entry > best) atomicMax(d.best + row, entry);
  }
}

// Updates the best entry of a token (x) by those of a part of the vocabulary (y). With filters most
// tiles are dropped before their random numbers are drawn.
template <bool kGeneral, bool kFilters>
__global__ void __launch_bounds__(kThreads, 4) draw(const DrawArguments d) {
  const std::int64_t row = blockIdx.x;
  const Sampler<kFilters> sampler(d, row);
  const LogitReader<kGeneral> reader(d.rows, row);
  const int begin = static_cast<int>(blockIdx.y) * d.block_tiles;
  const int end = min(begin + d.block_tiles, d.rows.vocab_tiles);
  for (int tile = begin + static_cast<int>(threadIdx.x) / 32; tile < end; tile += kWarps) {
    const ScoredEntry best = best_so_far(d, row);
    const float top = __fsub_rn(d.rows.tile_top(row, tile), sampler.greatest);
    if (kFilters && top < sampler.least_z) continue;
    draw_tile(d, row, tile, top, best, sampler, reader);
  }
}

// d.least[token] = the least s of the entries that top_k and top_p keep, -INFINITY for all. A
// thread block for each token.
template <bool kGeneral>
__global__ void __launch_bounds__(kSelectThreads, 2) find_least(const DrawArguments d) {
  __shared__ Selection m;
  const std::int64_t row = blockIdx.x, token = d.first_token + row;
  const float greatest = d.greatest[row], temperature = Temperature(d, token).value;
  const float top_p = number_of(d.top_p, token, 1.0f);
  const Span span = span_of(d.rows, row, m);
  RowEntries<kGeneral> entries{d.rows, row};
  if (d.top_k > 0) entries.least = least_of_best<kGeneral>(d.rows, row, span, d.top_k, m);
  if (top_p < 1.0f) {
    const ProbabilityWeights weights(greatest, temperature, d.rows.vocab, top_p);
    const bool few = d.top_k > 0 && d.top_k <= kMostListed;
    const LinearBins bins = few ? LinearBins{} : bins_of(span, weights.range());
    entries.least = m.select(entries, weights, bins);
  }
  if (threadIdx.x > 0) return;
  d.least[row] =
      entries.least == 0 ? -INFINITY : __fsub_rn(score_of(entries.least), greatest) / temperature;
}

constexpr int kRows = 32;   // tokens of a thread block
constexpr int kParts = 32;  // threads of a token

// A row's greatest logit so far, and its tile.
struct TopTile {
  float top;
  int tile;

  __device__ __forceinline__ void add(const TopTile& other) {
    if (other.top > top) *this = other;
  }
};

// d.greatest[token] = the greatest of its tiles. d.best[token] = a score below all others. Without
// filters it then draws from the tile with the greatest logit, so that few other entries may win.
template <bool kGeneral>
__global__ void __launch_bounds__(kRows* kParts)
    begin_draw(const DrawArguments d, std::int64_t tokens) {
  __shared__ TopTile tops[kParts][kRows];
  const std::int64_t first = static_cast<std::int64_t>(blockIdx.x) * kRows;
  const int part = static_cast<int>(threadIdx.y), column = static_cast<int>(threadIdx.x);
  TopTile top{-INFINITY, 0};
  for (int t = part; t < d.rows.vocab_tiles; t += kParts)
    top.add({d.rows.tile_top(first + column, t), t});
  tops[part][column] = top;
  __syncthreads();
  if (part == 0) {
    for (int p = 1; p < kParts; ++p) top.add(tops[p][column]);
    tops[0][column] = top;
    d.greatest[first + column] = top.top;
    d.best[first + column] = scored_entry(kLeastNoise, 0);
  }
  __syncthreads();
  const std::int64_t row = first + part;
  if (d.filters() || row >= tokens) return;
  draw_tile(d, row, tops[0][part].tile, 0.0f, scored_entry(kLeastNoise, 0), Sampler<false>(d, row),
            LogitReader<kGeneral>(d.rows, row));
}

__global__ void write_tokens(const ScoredEntry* best, std::int64_t count, std::int64_t first,
                             bool int64, void* tokens) {
  const std::int64_t row = static_cast<std::int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
  if (row >= count) return;
  const std::uint32_t vocab_id = vocab_id_of(best[row]);
  if (int64) {
    static_cast<std::int64_t*>(tokens)[first + row] = vocab_id;
  } else {
    static_cast<std::int32_t*>(tokens)[first + row] = static_cast<std::int32_t>(vocab_id);
  }
}

// Draws tokens from stored logits, whose tiles have the greatest ones.
void draw_tokens(const SampleCall& s, const ForwardCall& c, const SampleLayout& layout,
                 const StoredRows& stored) {
  auto* const base = static_cast<std::byte*>(c.workspace);
  const auto stream = static_cast<cudaStream_t>(c.stream);
  const std::int64_t tokens = c.shape.tokens;
  DrawArguments d{};
  d.rows = stored;
  d.greatest = reinterpret_cast<float*>(base + layout.greatest);
  d.best = reinterpret_cast<ScoredEntry*>(base + layout.best);
  d.key = s.key;
  d.counter = s.counter;
  d.int64_counter = s.int64_counter;
  d.first_token = c.first_token;
  d.temperature = s.temperature;
  d.top_p = s.top_p;
  d.min_p = s.min_p;
  d.top_k = s.top_k;
  if (s.top_k > 0 || s.top_p.data != nullptr)
    d.least = reinterpret_cast<float*>(base + layout.least);
  const bool general = stored.general();
  (general ? begin_draw<true> : begin_draw<false>)<<<static_cast<unsigned>(ceil_div(tokens, kRows)),
                                                     dim3(kRows, kParts), 0, stream>>>(d, tokens);
  require_cuda(cudaGetLastError(), "greatest logits");
  if (d.least != nullptr) {
    (general ? find_least<true>
             : find_least<false>)<<<static_cast<unsigned>(tokens), kSelectThreads, 0, stream>>>(d);
    require_cuda(cudaGetLastError(), "entries that filters keep");
  }
  // About two rounds of thread blocks over all SMs.
  constexpr int kRounds = 16;
  const std::int64_t steps = ceil_div(stored.vocab_tiles, kWarps);
  const std::int64_t parts =
      std::clamp<std::int64_t>(ceil_div(kRounds * processor_count(), tokens), 1, steps);
  const std::int64_t steps_of_block = ceil_div(steps, parts);
  d.block_tiles = static_cast<int>(steps_of_block) * kWarps;
  const dim3 grid(static_cast<unsigned>(tokens),
                  static_cast<unsigned>(ceil_div(steps, steps_of_block)));
  const auto draw_of = [&](auto plain, auto filtering) {
    (d.filters() ? filtering : plain)<<<grid, kThreads, 0, stream>>>(d);
  };
  general ? draw_of(draw<true, false>, draw<true, true>)
          : draw_of(draw<false, false>, draw<false, true>);
  require_cuda(cudaGetLastError(), "draws of tokens");

  write_tokens<<<static_cast<unsigned>(ceil_div(tokens, kThreads)), kThreads, 0, stream>>>(
      d.best, tokens, c.first_token, s.int64_tokens, s.tokens);
  require_cuda(cudaGetLastError(), "sampled tokens");
}

}  // namespace

void sample_tokens(const SampleCall& s) {
  if (s.chunk.shape.tokens == 0) return;
  const SampleLayout layout(*s.kernel, s.chunk.shape);
  auto* const base = static_cast<std::byte*>(s.chunk.workspace);
  auto* const logits = reinterpret_cast<float*>(base + layout.logits);
  ForwardCall c = s.chunk;
  c.targets = s.tokens;
  c.int64_targets = s.int64_tokens;
  c.bad_target = reinterpret_cast<std::uint64_t*>(base + layout.bad_target);
  auto* const tops = reinterpret_cast<float*>(base + layout.tile_tops);
  s.kernel->stored->store(c, s.logit_bias, logits, tops);
  draw_tokens(s, c, layout, stored_rows(c, tops, logits, s.logit_bias));
  if (c.log_prob == nullptr) return;
  c.block.data = logits;
  s.kernel->stored->forward(c);
}

}  // namespace logitless::cuda
