#include "compiler/exec/cuda/prelude.h"

namespace logitless::ir {
namespace {

constexpr std::string_view kMachine = R"cuda(
struct bf16 { unsigned short bits; };
struct f16 { unsigned short bits; };

__device__ inline float number(bf16 x) { return __uint_as_float((unsigned)x.bits << 16); }
__device__ inline float number(f16 x) {
  float y;
  asm("cvt.f32.f16 %0, %1;" : "=f"(y) : "h"(x.bits));
  return y;
}
__device__ inline bf16 to_bf16(float x) {
  bf16 y;
  asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(y.bits) : "f"(x));
  return y;
}
__device__ inline f16 to_f16(float x) {
  f16 y;
  asm("cvt.rn.f16.f32 %0, %1;" : "=h"(y.bits) : "f"(x));
  return y;
}

__device__ inline float float_maximum(float a, float b) {
  float y;
  asm("max.NaN.f32 %0, %1, %2;" : "=f"(y) : "f"(a), "f"(b));
  return y;
}

__device__ inline float infinity() { return __uint_as_float(0x7f800000u); }

// Returns 1 / x of a normal x to a unit in the last place.
__device__ inline float reciprocal(float x) {
  float y;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
// Returns the square root to a unit in the last place.
__device__ inline float near_root(float x) {
  float y;
  asm("sqrt.approx.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
// Returns exp(x) of an x of at most 0 as a term of a sum that is 1 or more: to 2^-22.
__device__ inline float weight_of(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x * 1.44269504f));
  return y;
}

// Returns the x of the lane whose index differs in the bits of `mask`.
template <class R>
__device__ inline R other_lane(R x, int mask) {
  return __shfl_xor_sync(0xffffffffu, x, mask);
}
)cuda";

constexpr std::string_view kPrelude = R"cuda(
__device__ inline float number(float x) { return x; }
__device__ inline double number(double x) { return x; }
__device__ inline int number(int x) { return x; }
__device__ inline int number(signed char x) { return x; }
__device__ inline long long number(long long x) { return x; }

__device__ inline float round_bf16(float x) { return number(to_bf16(x)); }
__device__ inline float round_f16(float x) { return number(to_f16(x)); }

// N elements, accessed by at most 16 bytes at a time.
template <int N, class T>
struct alignas(N * sizeof(T)) Pack {
  T at[N];
};
template <int N, class T>
__device__ inline void load(T (&to)[N], const T* from) {
  constexpr int kPack = N * sizeof(T) > 16 ? 16 / sizeof(T) : N;
#pragma unroll
  for (int i = 0; i < N; i += kPack) {
    const Pack<kPack, T> pack = *(const Pack<kPack, T>*)(from + i);
#pragma unroll
    for (int j = 0; j < kPack; ++j) to[i + j] = pack.at[j];
  }
}
template <int N, class T>
__device__ inline void store(T* to, const T (&from)[N]) {
  constexpr int kPack = N * sizeof(T) > 16 ? 16 / sizeof(T) : N;
#pragma unroll
  for (int i = 0; i < N; i += kPack) {
    Pack<kPack, T> pack;
#pragma unroll
    for (int j = 0; j < kPack; ++j) pack.at[j] = from[i + j];
    *(Pack<kPack, T>*)(to + i) = pack;
  }
}

// Integers wrap.
__device__ inline long long wrapped_sum(long long a, long long b) {
  return (long long)((unsigned long long)a + (unsigned long long)b);
}
__device__ inline long long wrapped_difference(long long a, long long b) {
  return (long long)((unsigned long long)a - (unsigned long long)b);
}
__device__ inline long long wrapped_product(long long a, long long b) {
  return (long long)((unsigned long long)a * (unsigned long long)b);
}

// Truncates toward 0.
__device__ inline float truncated(float x) { return truncf(x); }
__device__ inline double truncated(double x) { return trunc(x); }
// Truncates a number that becomes an integer; -most, the least one, if it is not in [-most, most).
template <class R>
__device__ inline R whole(R x, R most) {
  return x >= -most && x < most ? truncated(x) : -most;
}

// The number that is greater than no other.
template <class R>
__device__ inline R least() { return -R(infinity()); }
template <>
__device__ inline long long least<long long>() { return -0x7fffffffffffffffll - 1; }

// Returns NaN if an operand is NaN.
template <class R>
__device__ inline R maximum(R a, R b) {
  return a > b || a != a ? a : b;
}
template <>
__device__ inline float maximum<float>(float a, float b) { return float_maximum(a, b); }
template <class R>
__device__ inline R minimum(R a, R b) {
  return a < b || a != a ? a : b;
}
template <class R>
__device__ inline R sign_of(R a) {
  return a > R(0) ? R(1) : a < R(0) ? R(-1) : a;
}

// Returns x / by, where r is the reciprocal of `by`, rounded. Zeros keep their sign.
__device__ inline float divided(float x, float by, float r) {
  const float q = x * r, rest = fmaf(-q, by, x);
  return rest != 0.0f && fabsf(rest) < infinity() ? fmaf(rest, r, q) : q;
}

// Returns x / by to 2 units in the last place. A power of two keeps the reciprocal in range; both
// are computed once for all x of a row.
__device__ inline float quotient(float x, float by) {
  const float size = fabsf(by);
  const float scale = size < 5.42101086e-20f ? 1.84467441e19f : size > 1.84467441e19f ? 5.42101086e-20f : 1.0f;
  return x * scale * reciprocal(by * scale);
}

__device__ inline float inverse(float x) { return quotient(1.0f, x); }
__device__ inline double inverse(double x) { return 1.0 / x; }

// Returns x to the power of N, not 0. Each product rounds once, the inverse twice.
template <int N, class R>
__device__ inline R integral_power(R x) {
  R power = R(1), square = x;
#pragma unroll
  for (int n = N < 0 ? -N : N; n > 0; n /= 2, square *= square) {
    if (n % 2 != 0) power *= square;
  }
  return N < 0 ? inverse(power) : power;
}

__device__ inline double weight_of(double x) { return exp(x); }
__device__ inline float exponential(float x) { return expf(x); }
__device__ inline double exponential(double x) { return exp(x); }
__device__ inline float logarithm(float x) { return logf(x); }
__device__ inline double logarithm(double x) { return log(x); }
__device__ inline float inverse_root(float x) { return rsqrtf(x); }
__device__ inline double inverse_root(double x) { return 1.0 / sqrt(x); }

// The exponential never overflows.
template <class R>
__device__ inline R sigmoid(R x) {
  const R e = exponential(x < R(0) ? x : -x);
  return (x < R(0) ? e : R(1)) / (R(1) + e);
}
template <>
__device__ inline float sigmoid<float>(float x) {
  const float e = exponential(x < 0.0f ? x : -x);
  return (x < 0.0f ? e : 1.0f) * reciprocal(1.0f + e);
}

// Abramowitz and Stegun, 6.3.7, 6.3.5 and 6.3.18, in double: the root at 1.46 asks for more digits
// than a float has.
__device__ inline double digamma(double x) {
  if (x == 0.0) return 1.0 / x < 0.0 ? infinity() : -infinity();
  double y = 0.0;
  if (x < 0.0) {
    const double fraction = x - round(x);  // keeps the digits of a small x
    if (!(fabs(fraction) > 0.0)) return infinity() - infinity();
    y = -3.141592653589793 / tan(3.141592653589793 * fraction);
    x = 1.0 - x;
  }
  for (; x < 10.0; x += 1.0) y -= 1.0 / x;
  const double z = 1.0 / (x * x);
  return y + log(x) - 0.5 / x - z * (1.0 / 12 - z * (1.0 / 120 - z * (1.0 / 252 - z * (1.0 / 240 -
         z * (1.0 / 132 - z * (691.0 / 32760 - z / 12))))));
}
__device__ inline float digamma(float x) { return (float)digamma((double)x); }

// Abramowitz and Stegun, 6.4.7, 6.4.6 and 6.4.12.
__device__ inline double trigamma(double x) {
  double y = 0.0, sign = 1.0, sum = 0.0;
  if (x < 0.5) {
    const double fraction = x - round(x);
    if (!(fabs(fraction) > 0.0)) return fraction == 0.0 ? infinity() : fraction;
    const double of_sine = 3.141592653589793 / sin(3.141592653589793 * fraction);
    y = of_sine * of_sine;
    sign = -1.0;
    x = 1.0 - x;
  }
  for (; x < 10.0; x += 1.0) sum += 1.0 / (x * x);
  const double z = 1.0 / (x * x);
  sum += (1.0 + 0.5 / x + z * (1.0 / 6 - z * (1.0 / 30 - z * (1.0 / 42 - z * (1.0 / 30 -
         z * (5.0 / 66 - z * 691.0 / 2730)))))) / x;
  return y + sign * sum;
}
__device__ inline float trigamma(float x) { return (float)trigamma((double)x); }

__device__ inline unsigned rotated(unsigned x, int by) { return x << by | x >> (32 - by); }

// Threefry-2x32 with 20 rounds: the exclusive or of its results as a number in [0, 1).
__device__ inline double random_number(double key0, double key1, double counter) {
  const unsigned long long at = (unsigned long long)(long long)counter;
  const unsigned k0 = (unsigned)(long long)key0, k1 = (unsigned)(long long)key1;
  const unsigned keys[3] = {k0, k1, k0 ^ k1 ^ 0x1BD11BDAu};
  unsigned x = (unsigned)(at >> 32) + k0, y = (unsigned)at + k1;
#pragma unroll
  for (int group = 0; group < 5; ++group) {
    const bool odd = group % 2 != 0;
    x += y, y = rotated(y, odd ? 17 : 13) ^ x;
    x += y, y = rotated(y, odd ? 29 : 15) ^ x;
    x += y, y = rotated(y, odd ? 16 : 26) ^ x;
    x += y, y = rotated(y, odd ? 24 : 6) ^ x;
    x += keys[(group + 1) % 3], y += keys[(group + 2) % 3] + (unsigned)group + 1u;
  }
  return (double)((x ^ y) >> 9) * 1.1920928955078125e-7;
}

// Result `which` of Philox-4x32 with 10 rounds, of the counter (block, part, 0, 0).
__device__ inline unsigned philox(unsigned key0, unsigned key1, unsigned block, unsigned part, int which) {
  unsigned x0 = block, x1 = part, x2 = 0u, x3 = 0u;
#pragma unroll
  for (int round = 0; round < 10; ++round) {
    const unsigned long long a = 0xD2511F53ull * x0, b = 0xCD9E8D57ull * x2;
    x0 = (unsigned)(b >> 32) ^ x1 ^ key0, x1 = (unsigned)b;
    x2 = (unsigned)(a >> 32) ^ x3 ^ key1, x3 = (unsigned)a;
    key0 += 0x9E3779B9u, key1 += 0xBB67AE85u;
  }
  return which == 0 ? x0 : which == 1 ? x1 : which == 2 ? x2 : x3;
}
// Function::uniform.
__device__ inline double uniform_number(double key0, double key1, double entry) {
  const unsigned k0 = (unsigned)(long long)key0, k1 = (unsigned)(long long)key1;
  const unsigned at = (unsigned)(long long)entry, block = at / 32u * 4u + at % 8u / 2u;
  const int slot = (int)(at / 8u % 4u * 2u + at % 2u);
  const unsigned pair = philox(k0, k1, block, 0u, slot / 2);
  const unsigned first = slot % 2 == 0 ? pair & 0xFFFFu : pair >> 16;
  const unsigned more = philox(k0, k1, block, 1u + (unsigned)(slot / 4), slot % 4) >> 9;
  const float v = ((float)first + ((float)more + 0.5f) * 1.1920928955078125e-7f) * 1.52587890625e-5f;
  return v < 1.0f ? v : 0.999999940395355224609375f;
}

// Returns the sum of N numbers, added in pairs: a fixed tree.
template <int N, class R>
__device__ inline R tree_sum(const R (&x)[N]) {
  R sum[N];
#pragma unroll
  for (int j = 0; j < N; ++j) sum[j] = x[j];
#pragma unroll
  for (int n = N; n > 1; n = (n + 1) / 2) {
#pragma unroll
    for (int j = 0; j < n / 2; ++j) sum[j] += sum[j + (n + 1) / 2];
  }
  return sum[0];
}
template <int N, class R>
__device__ inline R tree_maximum(const R (&x)[N]) {
  R top = x[0];
#pragma unroll
  for (int j = 1; j < N; ++j) top = maximum(top, x[j]);
  return top;
}

// States of a reduction's part. They have no constructors, since they lie in shared memory.
template <class R>
struct Sum {
  R sum;
  __device__ void clear() { sum = R(0); }
  template <int N>
  __device__ void add(const R (&x)[N]) { sum += tree_sum(x); }
  __device__ void merge(Sum other) { sum += other.sum; }
  __device__ void across(int lanes) {
    for (int mask = lanes / 2; mask > 0; mask /= 2) sum += other_lane(sum, mask);
  }
  __device__ R value() const { return sum; }
};
template <class R>
struct Max {
  R top;
  __device__ void clear() { top = least<R>(); }
  template <int N>
  __device__ void add(const R (&x)[N]) { top = maximum(top, tree_maximum(x)); }
  __device__ void merge(Max other) { top = maximum(top, other.top); }
  __device__ void across(int lanes) {
    for (int mask = lanes / 2; mask > 0; mask /= 2) top = maximum(top, other_lane(top, mask));
  }
  __device__ R value() const { return top; }
};
template <class R>
struct Product {
  R product;
  __device__ void clear() { product = R(1); }
  template <int N>
  __device__ void add(const R (&x)[N]) {
#pragma unroll
    for (int j = 0; j < N; ++j) product *= x[j];
  }
  __device__ void merge(Product other) { product *= other.product; }
  __device__ void across(int lanes) {
    for (int mask = lanes / 2; mask > 0; mask /= 2) product *= other_lane(product, mask);
  }
  __device__ R value() const { return product; }
};
// The log-sum-exp is top + log(sum); infinities are left out of the sum.
template <class R>
struct LogSum {
  R top, sum;
  __device__ void clear() {
    top = -R(infinity());
    sum = R(0);
  }
  // Returns the number that is subtracted in exponents: top, or 0 if that is infinite.
  __device__ static R shift(R top) {
    return top == R(infinity()) || top == -R(infinity()) ? R(0) : top;
  }
  template <int N>
  __device__ void add(const R (&x)[N]) {
    const R higher = maximum(top, tree_maximum(x)), base = shift(higher);
    R e[N];
#pragma unroll
    for (int j = 0; j < N; ++j) e[j] = weight_of(x[j] - base);
    sum = sum * weight_of(top - base) + tree_sum(e);
    top = higher;
  }
  __device__ void merge(LogSum other) {
    const R higher = maximum(top, other.top), base = shift(higher);
    sum = sum * weight_of(top - base) + other.sum * weight_of(other.top - base);
    top = higher;
  }
  // Each lane's sum is rescaled once, by the maximum of all.
  __device__ void across(int lanes) {
    R higher = top;
    for (int mask = lanes / 2; mask > 0; mask /= 2)
      higher = maximum(higher, other_lane(higher, mask));
    sum *= weight_of(top - shift(higher));
    for (int mask = lanes / 2; mask > 0; mask /= 2) sum += other_lane(sum, mask);
    top = higher;
  }
  __device__ R value() const {
    return shift(top) == R(0) && top != R(0) ? top : top + logarithm(sum);
  }
  // Keeps the digits that R rounds away beside a large top.
  __device__ double wide_value() const {
    return shift(top) == R(0) && top != R(0) ? (double)top : (double)top + (double)logarithm(sum);
  }
};

// Merges the states of `lanes` neighbours, a power of two up to 32. All lanes get the result.
template <class State>
__device__ inline void across_lanes(State& state, int lanes) {
  state.across(lanes);
}
// Merges `count` states in shared memory; `lanes` is the next power of two. All threads of whole
// warps get the same result.
template <class State>
__device__ inline void merge_shared(State& state, const State* shared, int count, int lanes) {
  const int at = (int)threadIdx.x % lanes;
  state.clear();
  if (at < count) state = shared[at];
  state.across(lanes);
}
// Merges the states of a block's `warps` warps in their order. Thread 0 gets the result.
template <class State>
__device__ inline void across_block(State& state, State* shared, int warps) {
  across_lanes(state, 32);
  if (threadIdx.x % 32 == 0) shared[threadIdx.x / 32] = state;
  __syncthreads();
  if (threadIdx.x == 0) {
    for (int w = 1; w < warps; ++w) state.merge(shared[w]);
  }
}
)cuda";

constexpr std::string_view kClusterMachine = R"cuda(
// A block may write into the shared memory of another one once that has arrived.
__device__ inline void cluster_arrive() {
  asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
}
__device__ inline void cluster_wait() {
  asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
}

// Stores a state into another block's shared memory, where `own` is in this one's.
template <class State>
__device__ inline void store_to_block(State* own, unsigned block, const State& state) {
  static_assert(sizeof(State) % 4 == 0 && sizeof(State) <= 32, "a state in registers");
  constexpr int kRegisters = sizeof(State) / 4;
  unsigned to;
  const unsigned from = (unsigned)__cvta_generic_to_shared(own);
  asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(to) : "r"(from), "r"(block));
  unsigned registers[kRegisters];
  memcpy(registers, &state, sizeof(State));
#pragma unroll
  for (int i = 0; i < kRegisters; ++i)
    asm volatile("st.shared::cluster.u32 [%0], %1;" ::"r"(to + 4 * i), "r"(registers[i]) : "memory");
}
)cuda";

constexpr std::string_view kCluster = R"cuda(
// Merges the states of the cluster's blocks: equal in all threads of a block before, and of the
// cluster after. `blocks` is shared memory that nothing else uses.
template <int Blocks, class State>
__device__ inline void across_cluster(State& state, State* blocks, unsigned rank) {
  if (threadIdx.x < Blocks) store_to_block(blocks + rank, threadIdx.x, state);
  cluster_arrive();
  cluster_wait();
  merge_shared(state, blocks, Blocks, Blocks);
}
)cuda";

}  // namespace

std::string_view prelude() { return kPrelude; }
std::string_view prelude_cluster() { return kCluster; }
std::string_view prelude_cluster_machine() { return kClusterMachine; }
std::string_view prelude_machine() { return kMachine; }

}  // namespace logitless::ir
