// Gradient GEMMs by cuBLAS, of the heads without GEMMs of their own. Strips of rows are multiplied
// into fp32 in the workspace, and a kernel makes the gradient of them: it applies the factor of
// each token, adds targets, outer products and sums of earlier chunks, and rounds once. A strip is
// small enough to stay in L2 until then. cuBLAS multiplies the first fixed_tokens; the others that
// count are summed by counted_strips_sm80.cu.
#include <algorithm>

#include "kernels/cuda/cublas.h"
#include "kernels/cuda/device/error.cuh"
#include "kernels/cuda/device/kernels_of_file.cuh"
#include "kernels/cuda/device/numbers.cuh"
#include "kernels/cuda/device/tile_sizes.h"
#include "kernels/cuda/head/counted_strips.h"
#include "kernels/cuda/head/sizes.h"
#include "kernels/device/gradient.h"
#include "math/split_sum.h"

namespace logitless::cuda {
namespace {

constexpr int kThreads = 256;

// kWide adjacent elements, loaded and stored at once.
template <typename T, int kWide>
struct alignas(sizeof(T) * kWide) Pack {
  T values[kWide];
};
template <int kWide, typename T>
__device__ __forceinline__ void load(float (&to)[kWide], const T* from) {
  const auto pack = *reinterpret_cast<const Pack<T, kWide>*>(from);
#pragma unroll
  for (int i = 0; i < kWide; ++i) to[i] = as_float(pack.values[i]);
}
template <int kWide, typename T>
__device__ __forceinline__ void store(T* to, const float (&from)[kWide]) {
  Pack<T, kWide> pack;
#pragma unroll
  for (int i = 0; i < kWide; ++i) pack.values[i] = rounded<T>(from[i]);
  *reinterpret_cast<Pack<T, kWide>*>(to) = pack;
}
// v += factor * row
template <int kWide, typename T>
__device__ __forceinline__ void add(float (&v)[kWide], float factor, const T* row) {
  float r[kWide];
  load<kWide>(r, row);
#pragma unroll
  for (int i = 0; i < kWide; ++i) v[i] = fmaf(factor, r[i], v[i]);
}

// The last columns of a block [tokens, count] and their rows of the weight, which the GEMM leaves
// out: cuBLAS takes six times as long where the contracted dimension is no multiple of 16 bytes.
struct Tail {
  const void* block = nullptr;
  std::int64_t stride = 0;
  const void* weight = nullptr;
  int count = 0;
};

// A strip of d_hidden: sums [rows, dim] of tokens from `first` on. A thread block for each token.
// last_active: of a strip by sum_counted_hidden (CountedStrip); null: all rows have sums. Weight:
// the type of weight and target_weight.
template <typename T, typename Weight, typename Out, int kWide>
__global__ void __launch_bounds__(kThreads)
    finish_hidden(const GradientGemmsCall c, const Tail tail, const float* sums, std::int64_t first,
                  const int* last_active) {
  const std::int64_t row = first + blockIdx.x;
  const float factor = c.factor[row];
  const float gamma = c.weight_sum == nullptr ? 0.0f : c.rows[row].gamma;
  const float* const from = sums + blockIdx.x * c.dim;
  const CountedRows counted = last_active == nullptr
                                  ? CountedRows{static_cast<int>(gridDim.x), 0, 1}
                                  : counted_rows(*last_active, first, static_cast<int>(gridDim.x));
  Out* const to = static_cast<Out*>(c.d_hidden.data) + row * c.d_hidden.stride;
  const bool apart = c.target_weight != nullptr;
  const auto* const weight = static_cast<const Weight*>(apart ? c.target_weight : c.weight);
  const std::int64_t stride = apart ? c.target_stride : c.weight_stride;
  for (std::int64_t d = threadIdx.x * kWide; d < c.dim; d += kThreads * kWide) {
    float v[kWide] = {};
    if (blockIdx.x < static_cast<unsigned>(counted.rows)) load<kWide>(v, from + d);
    for (int part = 1; part < counted.parts; ++part)
      add<kWide>(v, 1.0f, from + std::int64_t{part} * counted.part_rows * c.dim + d);
    for (int j = 0; j < tail.count; ++j)
      add<kWide>(v, as_float(static_cast<const T*>(tail.block)[row * tail.stride + j]),
                 static_cast<const Weight*>(tail.weight) + j * c.weight_stride + d);
#pragma unroll
    for (float& value : v) value *= factor;
    if (c.weight_sum != nullptr) add<kWide>(v, gamma, c.weight_sum + d);
    for (int k = 0; k < c.targets_per_token; ++k) {
      const std::int64_t slot = row * c.targets_per_token + k;
      const float coefficient = c.coefficient[slot];
      if (coefficient != 0.0f)
        add<kWide>(v, coefficient, weight + (c.vocab_ids[slot] - c.vocab_begin) * stride + d);
    }
    if (c.d_hidden.add) add<kWide>(v, 1.0f, to + d);
    store<kWide>(to + d, v);
  }
}

// Sums of a 16-bit d_weight between chunks, 24 bits each: see RunningSums and math/split_sum.h. Of
// f16, the lower 8 bits are the rest in units of 1/256 of the last digit.
__device__ __forceinline__ float joined(__nv_bfloat16 high, std::uint8_t low) {
  return join_sum(__bfloat16_as_ushort(high), low);
}
__device__ __forceinline__ void split(float sum, __nv_bfloat16& high, std::uint8_t& low) {
  high = __ushort_as_bfloat16(split_high(sum));
  low = split_low(sum);
}
__device__ __forceinline__ float last_digit(__half v) {
  const int exponent = max(__half_as_ushort(v) >> 10 & 31, 1);
  return __uint_as_float(static_cast<unsigned>(exponent - 25 + 127) << 23);  // 2^(exponent - 25)
}
__device__ __forceinline__ float joined(__half high, std::uint8_t low) {
  const float rest = static_cast<float>(static_cast<std::int8_t>(low)) * (1.0f / 256);
  return fmaf(rest, last_digit(high), __half2float(high));
}
__device__ __forceinline__ void split(float sum, __half& high, std::uint8_t& low) {
  high = __float2half(sum);
  const float rest = (sum - __half2float(high)) / last_digit(high) * 256.0f;
  const int units = isfinite(rest) ? max(-128, min(127, __float2int_rn(rest))) : 0;
  low = static_cast<std::uint8_t>(static_cast<std::int8_t>(units));
}
// d_weight in fp32 has no such sums.
__device__ __forceinline__ float joined(float high, std::uint8_t) { return high; }
__device__ __forceinline__ void split(float sum, float& high, std::uint8_t& low) {
  high = sum;
  low = 0;
}

// A strip of d_weight: sums [rows, dim] of the block's entries from `first` on. A thread block for
// each entry. c.entries.many null: targets are added afterwards.
template <typename T, typename Out, int kWide>
__global__ void __launch_bounds__(kThreads)
    finish_weight(const GradientGemmsCall c, const float* sums, std::int64_t first,
                  std::int64_t low_stride) {
  const std::int64_t entry = first + blockIdx.x;
  const float* const from = sums + blockIdx.x * c.dim;
  Out* const to = static_cast<Out*>(c.d_weight.data) + entry * c.d_weight.stride;
  std::uint8_t* const low = c.running.low == nullptr ? nullptr : c.running.low + entry * low_stride;
  const float share = c.logit_weights == nullptr ? 1.0f : c.logit_weights[entry];
  const float unscale = c.weight_unscale == nullptr ? 1.0f : *c.weight_unscale;
  const int begin = c.entries.many == nullptr ? 0 : c.entries.begin[entry];
  const int end = c.entries.many == nullptr ? 0 : c.entries.begin[entry + 1];
  const bool many = end - begin > kFewEntries;
  for (std::int64_t d = threadIdx.x * kWide; d < c.dim; d += kThreads * kWide) {
    float v[kWide];
    load<kWide>(v, from + d);
#pragma unroll
    for (float& value : v) value *= unscale;
    if (c.running.from == SumsFrom::sums) {
      const auto high = *reinterpret_cast<const Pack<Out, kWide>*>(to + d);
      const auto bytes = *reinterpret_cast<const Pack<std::uint8_t, kWide>*>(low + d);
#pragma unroll
      for (int i = 0; i < kWide; ++i) v[i] += joined(high.values[i], bytes.values[i]);
    } else if (c.running.from == SumsFrom::output || c.d_weight.add) {
      add<kWide>(v, 1.0f, to + d);
    }
    if (c.hidden_sum != nullptr) add<kWide>(v, share, c.hidden_sum + d);
    if (many) {
      add<kWide>(v, 1.0f, c.entries.many + begin / (kFewEntries + 1) * c.dim + d);
    } else {
      for (int e = begin; e < end; ++e) {
        const float coefficient = c.entries.coefficients[e];
        if (coefficient != 0.0f)
          add<kWide>(v, coefficient,
                     static_cast<const T*>(c.hidden) + c.entries.tokens[e] * c.hidden_stride + d);
      }
    }
    if (c.running.last) {
      store<kWide>(to + d, v);
      continue;
    }
    Pack<Out, kWide> high;
    Pack<std::uint8_t, kWide> bytes;
#pragma unroll
    for (int i = 0; i < kWide; ++i) split(v[i], high.values[i], bytes.values[i]);
    *reinterpret_cast<Pack<Out, kWide>*>(to + d) = high;
    *reinterpret_cast<Pack<std::uint8_t, kWide>*>(low + d) = bytes;
  }
}

constexpr int kMostWide = 4;
bool is_wide(const void* data, std::int64_t stride, DType dtype) {
  return stride % kMostWide == 0 &&
         reinterpret_cast<std::uintptr_t>(data) % (kMostWide * size_of(dtype)) == 0;
}
template <typename F>
void with_width(bool wide, const F& f) {
  wide ? f(std::integral_constant<int, kMostWide>{}) : f(std::integral_constant<int, 1>{});
}
// f(type of the operands, type of the output, elements at once). The output is f32, of the dtype of
// the operands, or of 16 bits beside f32 operands.
template <typename F>
void with_types(DType dtype, DType out, bool wide, const F& f) {
  const auto with_output = [&](auto type, auto out_type) {
    with_width(wide, [&](auto at_once) { f(type, out_type, at_once); });
  };
  if (dtype == DType::f32)
    return with_type(out, [&](auto out_type) { with_output(float{}, out_type); });
  const auto narrow = [&](auto type) {
    out == DType::f32 ? with_output(type, float{}) : with_output(type, type);
  };
  dtype == DType::bf16 ? narrow(__nv_bfloat16{}) : narrow(__half{});
}

// Elements of 16 bytes in 16 bit. Products whose contiguous dimensions are multiples of it are
// fast.
constexpr std::int64_t kAligned = 8;

class StripGemms {
 public:
  StripGemms(const GradientGemmsCall& c, std::int64_t most_rows)
      : c_(c),
        stream_(static_cast<cudaStream_t>(c.stream)),
        rows_(strip_rows(most_rows, c.tokens, c.block_vocab)),
        sums_(static_cast<float*>(c.kernel_workspace)),
        products_(sums_ + strip_floats(rows_, c.dim)),
        bytes_(std::min(kCublasBytes, strip_floats(rows_, c.dim) * sizeof(float))),
        splits_of_a_(static_cast<std::byte*>(products_) + bytes_),
        widens_(widens_weight(c.dtype, c.weight_dtype, c.precision)),
        ranges_(c.ranges.count),
        counted_rows_(c.fixed_tokens < c.tokens ? counted_strip_rows(rows_, c.dim) : rows_) {}

  void make_hidden() const {
    const bool wide = is_wide(c_.d_hidden.data, c_.d_hidden.stride, c_.d_hidden.dtype) &&
                      is_wide(c_.weight, c_.weight_stride, c_.weight_dtype) &&
                      is_wide(c_.target_weight, c_.target_stride, c_.weight_dtype) &&
                      is_wide(c_.weight_sum, c_.dim, DType::f32);
    for (std::int64_t first = 0, count = 0; first < c_.tokens; first += count) {
      const bool fixed = first < c_.fixed_tokens;
      count = fixed ? std::min(rows_, c_.fixed_tokens - first)
                    : std::min(counted_rows_, c_.tokens - first);
      Tail tail;  // of the last range: the others are whole tiles
      if (fixed) {
        tail = multiply_hidden(first, count);
      } else {
        sum_hidden(first, count);
      }
      finish_hidden_strip(tail, first, count, fixed ? nullptr : last_active(), wide);
    }
  }

  // Range r, or the whole block.
  void make_weight(int r) const {
    GradientGemmsCall c = c_;
    const std::int64_t skipped = vocab_first(r);
    c.d_weight.data =
        static_cast<std::byte*>(c.d_weight.data) +
        skipped * c.d_weight.stride * static_cast<std::int64_t>(size_of(c.d_weight.dtype));
    if (c.running.low != nullptr) c.running.low += running_sum_bytes(skipped, c.dim);
    if (c.entries.begin != nullptr) c.entries.begin += skipped;
    if (c.logit_weights != nullptr) c.logit_weights += skipped;
    const bool wide = is_wide(c.d_weight.data, c.d_weight.stride, c.d_weight.dtype) &&
                      is_wide(c.hidden, c.hidden_stride, c.dtype) &&
                      is_wide(c.hidden_sum, c.dim, DType::f32) &&
                      is_wide(c.entries.many, c.dim, DType::f32);
    const std::int64_t rows = c.fixed_tokens > 0 ? rows_ : counted_rows_;
    for (std::int64_t first = 0; first < vocab_count(r); first += rows) {
      const std::int64_t count = std::min(rows, vocab_count(r) - first);
      if (c.fixed_tokens > 0) multiply_weight(r, first, count);
      if (c.fixed_tokens < c.tokens) sum_weight(r, first, count);
      with_types(c.dtype, c.d_weight.dtype, wide, [&](auto type, auto out, auto at_once) {
        finish_weight<decltype(type), decltype(out), decltype(at_once)::value>
            <<<static_cast<unsigned>(count), kThreads, 0, stream_>>>(c, sums_, first,
                                                                     padded_vocab(c.dim));
      });
      require_cuda(cudaGetLastError(), "strip of d_weight");
    }
  }

 private:
  // sums = block . weight of tokens [first, first + count), but for the tail.
  Tail multiply_hidden(std::int64_t first, std::int64_t count) const {
    Tail tail;
    for (int r = 0; r < std::max(ranges_, 1); ++r) {
      Gemm g = gemm(block(r), first * block(r).stride);
      g.m = count;
      g.k = vocab_count(r);
      g.b = weight_row(vocab_first(r));
      g.b_stride = c_.weight_stride;
      g.adds = r > 0;
      if (g.k > kAligned) {
        tail.count = static_cast<int>(g.k % kAligned);
        g.k -= tail.count;
        tail.block = at(block(r).data, g.k);
        tail.stride = block(r).stride;
        tail.weight = weight_row(vocab_first(r) + g.k);
      }
      widens_ ? multiply_widened(g)
              : multiply(g, {.data = splits_of_b(g.k), .dtype = c_.weight_dtype});
    }
    return tail;
  }
  // The product of `all` with rows of the weight that are widened a stretch at a time.
  void multiply_widened(const Gemm& all) const {
    const std::int64_t most = wide_rows(c_.block_vocab, c_.dim);
    const std::int64_t row = c_.weight_stride * static_cast<std::int64_t>(size_of(c_.weight_dtype));
    auto* const wide = reinterpret_cast<float*>(splits_of_a_);
    for (std::int64_t first = 0; first < all.k; first += most) {
      Gemm g = all;
      g.k = std::min(most, all.k - first);
      g.a = at(all.a, first);
      g.b = wide;
      g.b_stride = c_.dim;
      g.adds = all.adds || first > 0;
      widen_rows(static_cast<const std::byte*>(all.b) + first * row, c_.weight_dtype,
                 c_.weight_stride, g.k, c_.dim, wide, c_.stream);
      multiply(g, {});
    }
  }
  // Makes a strip of d_hidden of its sums. Beside a 16-bit weight it is f32, as hidden is.
  void finish_hidden_strip(const Tail& tail, std::int64_t first, std::int64_t count,
                           const int* last_active, bool wide) const {
    const auto launch = [&](auto type, auto weight, auto out, auto at_once) {
      finish_hidden<decltype(type), decltype(weight), decltype(out), decltype(at_once)::value>
          <<<static_cast<unsigned>(count), kThreads, 0, stream_>>>(c_, tail, sums_, first,
                                                                   last_active);
    };
    if (c_.weight_dtype != c_.dtype) {
      with_type(c_.weight_dtype, [&](auto weight) {
        with_width(wide, [&](auto at_once) { launch(float{}, weight, float{}, at_once); });
      });
    } else {
      with_types(c_.dtype, c_.d_hidden.dtype, wide,
                 [&](auto type, auto out, auto at_once) { launch(type, type, out, at_once); });
    }
    require_cuda(cudaGetLastError(), "strip of d_hidden");
  }
  // sums = block^T . hidden of the first fixed_tokens, for entries [first, first + count) of range
  // r.
  void multiply_weight(int r, std::int64_t first, std::int64_t count) const {
    Gemm g = gemm(block(r), first);
    g.b = c_.factored_hidden;
    // Rows beyond the block's last, of its padding, are not read afterwards.
    g.m = ceil_div(count, kAligned) * kAligned;
    if (g.m > rows_ || first + g.m > block(r).stride) g.m = count;
    g.k = c_.fixed_tokens;
    g.a_transposed = true;
    g.b_stride = c_.factored_stride;
    multiply(g, {splits_of_b(g.k), kept_stretches(c_.dim, g.k), first > 0 || r > 0});
  }

  // The same sums over tokens from fixed_tokens on, where they count.
  void sum_hidden(std::int64_t first, std::int64_t count) const {
    for (int r = 0; r < std::max(ranges_, 1); ++r) {
      CountedStrip strip = counted_strip(block(r), first, count);
      strip.block = at(block(r).data, first * block(r).stride);
      strip.right = weight_row(vocab_first(r));
      strip.right_stride = c_.weight_stride;
      strip.contracted = static_cast<int>(vocab_count(r));
      strip.adds = r > 0;
      sum_counted_hidden(strip);
    }
  }
  void sum_weight(int r, std::int64_t first, std::int64_t count) const {
    CountedStrip strip = counted_strip(block(r), c_.fixed_tokens, count);
    strip.block = at(block(r).data, c_.fixed_tokens * block(r).stride + first);
    strip.block_columns = static_cast<int>(block(r).stride - first);
    strip.right = at(c_.factored_hidden, c_.fixed_tokens * c_.factored_stride);
    strip.right_stride = c_.factored_stride;
    strip.contracted = static_cast<int>(c_.tokens - c_.fixed_tokens);
    strip.adds = c_.fixed_tokens > 0;
    sum_counted_weight(strip);
  }
  CountedStrip counted_strip(const LogitBlock& of, std::int64_t first_token,
                             std::int64_t rows) const {
    CountedStrip strip;
    strip.dtype = c_.dtype;
    strip.rows = static_cast<int>(rows);
    strip.columns = static_cast<int>(c_.dim);
    strip.block_stride = of.stride;
    strip.last_active = last_active();
    strip.first_token = first_token;
    strip.sums = sums_;
    strip.stream = c_.stream;
    return strip;
  }

  // Returns the number of 256 tokens up to the last ones that count, in device memory.
  const int* last_active() const { return c_.active + padded_tokens(c_.tokens) / kBlockPadding; }

  LogitBlock block(int r) const {
    return ranges_ == 0 ? c_.block : LogitBlock{c_.ranges.data[r], c_.ranges.stride(r)};
  }
  std::int64_t vocab_first(int r) const { return ranges_ == 0 ? 0 : c_.ranges.first[r]; }
  std::int64_t vocab_count(int r) const {
    return ranges_ == 0 ? c_.block_vocab : c_.ranges.vocab_count(r);
  }
  const void* at(const void* data, std::int64_t elements) const {
    return static_cast<const std::byte*>(data) +
           elements * static_cast<std::int64_t>(size_of(c_.dtype));
  }
  const void* weight_row(std::int64_t entry) const {
    return static_cast<const std::byte*>(c_.weight) +
           entry * c_.weight_stride * static_cast<std::int64_t>(size_of(c_.weight_dtype));
  }
  // A product of a part of a block into the strip; the offset counts elements.
  Gemm gemm(const LogitBlock& a, std::int64_t a_first) const {
    Gemm g;
    g.dtype = c_.dtype;
    g.precision = c_.precision;
    g.n = c_.dim;
    g.a = at(a.data, a_first);
    g.a_stride = a.stride;
    g.c = sums_;
    g.c_stride = c_.dim;
    return g;
  }

  // Memory behind the splits of a strip's rows of a, over k contracted elements.
  void* splits_of_b(std::int64_t k) const { return splits_of_a_ + stretch_bytes(rows_, k); }

  void multiply(const Gemm& g, const Splits& splits_of_b) const {
    if (g.precision == Precision::bf16x3) {
      multiply_split(g, {splits_of_a_}, splits_of_b, products_, c_.stream, bytes_);
    } else {
      cublas_multiply(g, products_, c_.stream, bytes_);
    }
  }

  const GradientGemmsCall& c_;
  cudaStream_t stream_;
  std::int64_t rows_;  // of a strip
  float* sums_;        // the strip
  void* products_;     // cuBLAS's workspace
  std::size_t bytes_;
  std::byte* splits_of_a_;  // of bf16x3, and behind them those of b; or f32 rows of the weight
  bool widens_;             // rows of the weight
  int ranges_;
  std::int64_t counted_rows_;  // of a strip without cuBLAS
};

}  // namespace

// With ranges, d_hidden reads all of them before the first is overwritten; d_weight of each is
// written after its last read.
void cublas_gradient_gemms(const GradientGemmsCall& c) {
  const bool has_weight = c.d_weight.data != nullptr;
  if (c.tokens == 0 || (c.d_hidden.data == nullptr && !has_weight)) return;
  const bool widens = widens_weight(c.dtype, c.weight_dtype, c.precision);
  const StripGemms gemms(c, cublas_strip_rows(c.dim, c.precision, widens));
  if (c.d_hidden.data != nullptr) gemms.make_hidden();
  if (c.hidden_done != nullptr) {
    require_cuda(cudaEventRecord(static_cast<cudaEvent_t>(c.hidden_done),
                                 static_cast<cudaStream_t>(c.stream)),
                 "event");
  }
  if (!has_weight) return;
  for (int r = 0; r < std::max(c.ranges.count, 1); ++r) gemms.make_weight(r);
  if (c.entries.many == nullptr && c.entries.begin != nullptr) add_weight_targets(c);
}

}  // namespace logitless::cuda
