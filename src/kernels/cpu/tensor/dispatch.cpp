// All SIMD targets of the tensor kernels: Highway compiles this file once for each.
#undef HWY_DISABLED_TARGETS
#define HWY_DISABLED_TARGETS \
  (HWY_SSSE3 | HWY_SSE4 | HWY_AVX3_DL | HWY_SVE | HWY_SVE2 | HWY_SVE_256 | HWY_SVE2_128)
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kernels/cpu/tensor/dispatch.cpp"
#include "hwy/foreach_target.h"  // IWYU pragma: keep
//
#include "hwy/highway.h"
#include "kernels/cpu/tensor/attention/attention-inl.h"
#include "kernels/cpu/tensor/attention/tiles-inl.h"
#include "kernels/cpu/tensor/gemm-inl.h"
#include "kernels/cpu/tensor/level.h"
#include "kernels/cpu/tensor/vector-inl.h"
#include "math/gamma.h"

HWY_BEFORE_NAMESPACE();
namespace logitless::cpu::HWY_NAMESPACE {

// Calls f(engine) with this processor's best GEMM engine for the problem.
template <class F>
auto WithEngine([[maybe_unused]] const GemmProblem& problem, F&& f) {
#if HWY_ARCH_X86 && HWY_TARGET <= HWY_AVX3
  if (problem.a.dtype == DType::bf16) {
    const TensorLevel& level = tensor_level();
    if (level.tiles) return f.template operator()<TileGemm<HardwareTiles>>();
    if (level.dot) return f.template operator()<TileGemm<DotTiles>>();
  }
#endif
  return f.template operator()<FloatGemm>();
}

const char* TargetName() { return hwy::TargetName(HWY_TARGET); }

std::size_t GemmScratchBytes(const GemmProblem& problem) {
  return WithEngine(problem, [&]<class Engine>() { return GemmScratch<Engine>(problem); });
}
void Gemm(const GemmProblem& problem, std::byte* scratch) {
  WithEngine(problem, [&]<class Engine>() { RunGemm<Engine>(problem, scratch); });
}

struct FloatAttention {
  static std::size_t Scratch(const AttentionShape& shape, bool backward) {
    return AttentionScratch(shape, backward);
  }
  template <class... Args>
  static void Forward(const Args&... args) {
    RunAttentionForward(args...);
  }
  template <class... Args>
  static void Backward(const Args&... args) {
    RunAttentionBackward(args...);
  }
};
template <class Tiles>
struct TileAttention {
  static std::size_t Scratch(const AttentionShape& shape, bool backward) {
    return TileAttentionScratch(shape, backward);
  }
  template <class... Args>
  static void Forward(const Args&... args) {
    RunTileAttentionForward<Tiles>(args...);
  }
  template <class... Args>
  static void Backward(const Args&... args) {
    RunTileAttentionBackward<Tiles>(args...);
  }
};

// Calls f(engine) with this processor's best attention engine.
template <class F>
auto WithAttention([[maybe_unused]] const AttentionShape& shape, F&& f) {
  if (shape.dtype == DType::bf16) {
    [[maybe_unused]] const TensorLevel& level = tensor_level();
#if HWY_ARCH_X86 && HWY_TARGET <= HWY_AVX3
    if (level.tiles) return f.template operator()<TileAttention<HardwareTiles>>();
    if (level.dot) return f.template operator()<TileAttention<DotTiles>>();
#endif
#if HWY_TARGET == HWY_STATIC_TARGET
    if (level.emulated) return f.template operator()<TileAttention<EmulatedTiles>>();
#endif
  }
  return f.template operator()<FloatAttention>();
}

std::size_t AttentionScratchBytes(const AttentionShape& shape, bool backward) {
  return WithAttention(shape, [&]<class Engine>() { return Engine::Scratch(shape, backward); });
}
void AttentionForward(const AttentionShape& shape, const AttentionOperand& q,
                      const AttentionOperand& k, const AttentionOperand& v,
                      const AttentionOutput& out, float* lse, std::byte* scratch) {
  WithAttention(shape, [&]<class Engine>() { Engine::Forward(shape, q, k, v, out, lse, scratch); });
}
void AttentionBackward(const AttentionShape& shape, const AttentionOperand& q,
                       const AttentionOperand& k, const AttentionOperand& v,
                       const AttentionOperand& out, const AttentionOperand& d_out, const float* lse,
                       const AttentionOutput& dq, const AttentionOutput& dk,
                       const AttentionOutput& dv, std::byte* scratch) {
  WithAttention(shape, [&]<class Engine>() {
    Engine::Backward(shape, q, k, v, out, d_out, lse, dq, dk, dv, scratch);
  });
}

#if HWY_TARGET == HWY_STATIC_TARGET
std::size_t GemmScratchEmulated(const GemmProblem& problem) {
  return GemmScratch<TileGemm<EmulatedTiles>>(problem);
}
void GemmEmulated(const GemmProblem& problem, std::byte* scratch) {
  RunGemm<TileGemm<EmulatedTiles>>(problem, scratch);
}
#endif

// NOLINTNEXTLINE(google-readability-namespace-comments)
}  // namespace logitless::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace logitless {
namespace cpu {
namespace {

// Index of tensor_level()'s target in the tables of HWY_EXPORT, as HWY_DYNAMIC_DISPATCH finds it
// for the processor's best.
std::size_t target_index() {
#if (HWY_TARGETS & (HWY_TARGETS - 1)) == 0
  return 0;
#else
  hwy::ChosenTarget chosen;
  chosen.Update(tensor_level().targets);
  return chosen.GetIndex();
#endif
}
#define LOGITLESS_DISPATCH(function) (*HWY_DISPATCH_TABLE(function)[target_index()])

bool takes_emulated_tiles(const GemmProblem& problem) {
  return problem.a.dtype == DType::bf16 && tensor_level().emulated;
}

HWY_EXPORT(TargetName);
HWY_EXPORT(GemmScratchBytes);
HWY_EXPORT(Gemm);
HWY_EXPORT(ToF32);
HWY_EXPORT(FromF32);
HWY_EXPORT(RoundF32);
HWY_EXPORT(FunctionOf);
HWY_EXPORT(Dot);
HWY_EXPORT(AddScaledTo);
HWY_EXPORT(RowSum);
HWY_EXPORT(RowMax);
HWY_EXPORT(RowLse);
HWY_EXPORT(AddTo);
HWY_EXPORT(MaxTo);
HWY_EXPORT(AddExponentials);
HWY_EXPORT(CompareI64ToF32);
HWY_EXPORT(CompareI64ToF64);
HWY_EXPORT(AttentionScratchBytes);
HWY_EXPORT(AttentionForward);
HWY_EXPORT(AttentionBackward);

// Computes one element with <cmath>: all of f64, and f32 functions without a vector version.
template <class T>
T scalar_function(VectorOp op, T a, T b, T c) {
  const auto truth = [](bool x) { return x ? T(1) : T(0); };
  switch (op) {
    case VectorOp::neg:
      return -a;
    case VectorOp::abs:
      return std::abs(a);
    case VectorOp::exp:
      return std::exp(a);
    case VectorOp::log:
      return std::log(a);
    case VectorOp::log1p:
      return std::log1p(a);
    case VectorOp::expm1:
      return std::expm1(a);
    case VectorOp::sqrt:
      return std::sqrt(a);
    case VectorOp::rsqrt:
      return T(1) / std::sqrt(a);
    case VectorOp::tanh:
      return std::tanh(a);
    case VectorOp::erf:
      return std::erf(a);
    case VectorOp::sigmoid:
      return T(1) / (T(1) + std::exp(-a));
    case VectorOp::sin:
      return std::sin(a);
    case VectorOp::cos:
      return std::cos(a);
    case VectorOp::atan:
      return std::atan(a);
    case VectorOp::erfc:
      return std::erfc(a);
    case VectorOp::lgamma:  // its roots, and digamma's, ask for more digits than f32 has
      return static_cast<T>(log_gamma(a));
    case VectorOp::digamma:
      return static_cast<T>(digamma(a));
    case VectorOp::trigamma:
      return static_cast<T>(trigamma(a));
    case VectorOp::floor:
      return std::floor(a);
    case VectorOp::sign:
      return a > 0 ? T(1) : (a < 0 ? T(-1) : a);
    case VectorOp::add:
      return a + b;
    case VectorOp::sub:
      return a - b;
    case VectorOp::mul:
      return a * b;
    case VectorOp::div:
      return a / b;
    case VectorOp::max:
      return std::isnan(a) || a > b ? a : b;
    case VectorOp::min:
      return std::isnan(a) || a < b ? a : b;
    case VectorOp::pow:
      return std::pow(a, b);
    case VectorOp::eq:
      return truth(a == b);
    case VectorOp::ne:
      return truth(a != b);
    case VectorOp::lt:
      return truth(a < b);
    case VectorOp::le:
      return truth(a <= b);
    case VectorOp::gt:
      return truth(a > b);
    case VectorOp::ge:
      return truth(a >= b);
    case VectorOp::logical_and:
      return truth(a != 0 && b != 0);
    case VectorOp::logical_or:
      return truth(a != 0 || b != 0);
    case VectorOp::logical_not:
      return truth(a == 0);
    case VectorOp::select:
      return a != 0 ? b : c;
  }
  return a;
}

constexpr int input_count(VectorOp op) {
  if (op == VectorOp::select) return 3;
  return op >= VectorOp::add && op <= VectorOp::logical_or ? 2 : 1;
}

template <class T, VectorOp kOp>
void scalar_loop(const T* a, const T* b, const T* c, T* out, std::int64_t n) {
  for (std::int64_t i = 0; i < n; ++i) {
    out[i] = scalar_function<T>(kOp, a[i], input_count(kOp) > 1 ? b[i] : T(0),
                                input_count(kOp) > 2 ? c[i] : T(0));
  }
}

template <class T, std::size_t... kOps>
auto scalar_loop_of(VectorOp op, std::index_sequence<kOps...>) {
  using Function = void (*)(const T*, const T*, const T*, T*, std::int64_t);
  static constexpr Function kLoops[] = {&scalar_loop<T, static_cast<VectorOp>(kOps)>...};
  return kLoops[static_cast<std::size_t>(op)];
}
using AllOps = std::make_index_sequence<static_cast<std::size_t>(kVectorOpCount)>;

// c (+)= a . b in f64: rows of c by blocks of columns, k in order.
void gemm_f64(const GemmProblem& p) {
  constexpr std::int64_t kRows = 4, kColumns = 256;
  const auto* a = static_cast<const double*>(p.a.data);
  const auto* b = static_cast<const double*>(p.b.data);
  const std::int64_t tiles_m = ceil_div(p.m, kRows), tiles_n = ceil_div(p.n, kColumns);
  parallel_for(p.threads, p.batch * tiles_m * tiles_n, [&](std::int64_t task, int) {
    const std::int64_t batch = task / (tiles_m * tiles_n);
    const std::int64_t i0 = task / tiles_n % tiles_m * kRows;
    const std::int64_t j0 = task % tiles_n * kColumns;
    const std::int64_t rows = std::min(kRows, p.m - i0), columns = std::min(kColumns, p.n - j0);
    double sum[kRows][kColumns] = {};
    for (std::int64_t k = 0; k < p.k; ++k) {
      const double* row = b + batch * p.b.batch_stride + k * p.b.row_stride + j0 * p.b.col_stride;
      for (std::int64_t i = 0; i < rows; ++i) {
        const double x =
            a[batch * p.a.batch_stride + (i0 + i) * p.a.row_stride + k * p.a.col_stride];
        if (p.b.col_stride == 1) {
          for (std::int64_t j = 0; j < columns; ++j) sum[i][j] += x * row[j];
        } else {
          for (std::int64_t j = 0; j < columns; ++j) sum[i][j] += x * row[j * p.b.col_stride];
        }
      }
    }
    for (std::int64_t i = 0; i < rows; ++i) {
      for (std::int64_t j = 0; j < columns; ++j) {
        const std::int64_t at =
            batch * p.c.batch_stride + (i0 + i) * p.c.row_stride + (j0 + j) * p.c.col_stride;
        const double before = p.accumulate ? load_element(p.c.data, p.c.dtype, at) : 0.0;
        store_element(p.c.data, p.c.dtype, at, before + sum[i][j]);
      }
    }
  });
}

}  // namespace

std::size_t gemm_scratch_bytes_emulated_tiles(const GemmProblem& problem) {
  return HWY_STATIC_DISPATCH(GemmScratchEmulated)(problem);
}
void gemm_emulated_tiles(const GemmProblem& problem, std::byte* scratch) {
  HWY_STATIC_DISPATCH(GemmEmulated)(problem, scratch);
}

std::string_view tensor_target() { return LOGITLESS_DISPATCH(TargetName)(); }

std::size_t scratch_bytes_of(const GemmProblem& problem) {
  if (takes_emulated_tiles(problem)) return gemm_scratch_bytes_emulated_tiles(problem);
  return LOGITLESS_DISPATCH(GemmScratchBytes)(problem);
}
void gemm_of(const GemmProblem& problem, std::byte* scratch) {
  if (problem.a.dtype == DType::f64) return gemm_f64(problem);
  if (takes_emulated_tiles(problem)) return gemm_emulated_tiles(problem, scratch);
  LOGITLESS_DISPATCH(Gemm)(problem, scratch);
}
void to_f32_of(DType dtype, const void* from, float* to, std::int64_t n) {
  LOGITLESS_DISPATCH(ToF32)(dtype, from, to, n);
}
void from_f32_of(DType dtype, const float* from, void* to, std::int64_t n) {
  LOGITLESS_DISPATCH(FromF32)(dtype, from, to, n);
}
void round_f32_of(DType dtype, const float* from, float* to, std::int64_t n) {
  LOGITLESS_DISPATCH(RoundF32)(dtype, from, to, n);
}
VectorFunction function_of(VectorOp op) {
  const VectorFunction function = LOGITLESS_DISPATCH(FunctionOf)(op);
  return function != nullptr ? function : scalar_loop_of<float>(op, AllOps());
}
VectorFunctionF64 function_f64_of(VectorOp op) { return scalar_loop_of<double>(op, AllOps()); }
float row_sum_of(const float* x, std::int64_t n) { return LOGITLESS_DISPATCH(RowSum)(x, n); }
float row_max_of(const float* x, std::int64_t n) { return LOGITLESS_DISPATCH(RowMax)(x, n); }
LseState row_lse_of(const float* x, std::int64_t n) { return LOGITLESS_DISPATCH(RowLse)(x, n); }
float dot_of(const float* a, const float* b, std::int64_t n) {
  return LOGITLESS_DISPATCH(Dot)(a, b, n);
}
void add_scaled_of(const float* x, float factor, float* y, std::int64_t n) {
  LOGITLESS_DISPATCH(AddScaledTo)(x, factor, y, n);
}
void add_to_of(const float* x, float* y, std::int64_t n) { LOGITLESS_DISPATCH(AddTo)(x, y, n); }
void max_to_of(const float* x, float* y, std::int64_t n) { LOGITLESS_DISPATCH(MaxTo)(x, y, n); }
void add_exponentials_of(const float* x, float* top, float* sum, std::int64_t n) {
  LOGITLESS_DISPATCH(AddExponentials)(x, top, sum, n);
}
void compare_i64_of(VectorOp op, const std::int64_t* a, const std::int64_t* b, float* out,
                    std::int64_t n) {
  LOGITLESS_DISPATCH(CompareI64ToF32)(op, a, b, out, n);
}
void compare_i64_of(VectorOp op, const std::int64_t* a, const std::int64_t* b, double* out,
                    std::int64_t n) {
  LOGITLESS_DISPATCH(CompareI64ToF64)(op, a, b, out, n);
}
std::size_t attention_scratch_of(const AttentionShape& shape, bool backward) {
  return LOGITLESS_DISPATCH(AttentionScratchBytes)(shape, backward);
}
void attention_forward_of(const AttentionShape& shape, const AttentionOperand& q,
                          const AttentionOperand& k, const AttentionOperand& v,
                          const AttentionOutput& out, float* lse, std::byte* scratch) {
  LOGITLESS_DISPATCH(AttentionForward)(shape, q, k, v, out, lse, scratch);
}
void attention_backward_of(const AttentionShape& shape, const AttentionOperand& q,
                           const AttentionOperand& k, const AttentionOperand& v,
                           const AttentionOperand& out, const AttentionOperand& d_out,
                           const float* lse, const AttentionOutput& dq, const AttentionOutput& dk,
                           const AttentionOutput& dv, std::byte* scratch) {
  LOGITLESS_DISPATCH(AttentionBackward)(shape, q, k, v, out, d_out, lse, dq, dk, dv, scratch);
}

}  // namespace cpu

std::size_t gemm_scratch_bytes(const GemmProblem& problem) {
  return problem.a.dtype == DType::f64 ? 0 : cpu::scratch_bytes_of(problem);
}
void gemm(const GemmProblem& problem, std::byte* scratch) { cpu::gemm_of(problem, scratch); }
void to_f32(DType dtype, const void* from, float* to, std::int64_t n) {
  cpu::to_f32_of(dtype, from, to, n);
}
void from_f32(DType dtype, const float* from, void* to, std::int64_t n) {
  cpu::from_f32_of(dtype, from, to, n);
}
void round_f32(DType dtype, const float* from, float* to, std::int64_t n) {
  cpu::round_f32_of(dtype, from, to, n);
}
VectorFunction vector_function(VectorOp op) { return cpu::function_of(op); }
VectorFunctionF64 vector_function_f64(VectorOp op) { return cpu::function_f64_of(op); }
float row_sum(const float* x, std::int64_t n) { return cpu::row_sum_of(x, n); }
float row_max(const float* x, std::int64_t n) { return cpu::row_max_of(x, n); }
LseState row_lse(const float* x, std::int64_t n) { return cpu::row_lse_of(x, n); }
float dot(const float* a, const float* b, std::int64_t n) { return cpu::dot_of(a, b, n); }
void add_scaled(const float* x, float factor, float* y, std::int64_t n) {
  cpu::add_scaled_of(x, factor, y, n);
}
void add_to(const float* x, float* y, std::int64_t n) { cpu::add_to_of(x, y, n); }
void max_to(const float* x, float* y, std::int64_t n) { cpu::max_to_of(x, y, n); }
void add_exponentials(const float* x, float* top, float* sum, std::int64_t n) {
  cpu::add_exponentials_of(x, top, sum, n);
}
void compare_i64(VectorOp op, const std::int64_t* a, const std::int64_t* b, float* out,
                 std::int64_t n) {
  cpu::compare_i64_of(op, a, b, out, n);
}
void compare_i64(VectorOp op, const std::int64_t* a, const std::int64_t* b, double* out,
                 std::int64_t n) {
  cpu::compare_i64_of(op, a, b, out, n);
}
std::size_t attention_scratch_bytes(const AttentionShape& shape, bool backward) {
  return cpu::attention_scratch_of(shape, backward);
}
void attention_forward(const AttentionShape& shape, const AttentionOperand& q,
                       const AttentionOperand& k, const AttentionOperand& v,
                       const AttentionOutput& out, float* lse, std::byte* scratch) {
  cpu::attention_forward_of(shape, q, k, v, out, lse, scratch);
}
void attention_backward(const AttentionShape& shape, const AttentionOperand& q,
                        const AttentionOperand& k, const AttentionOperand& v,
                        const AttentionOperand& out, const AttentionOperand& d_out,
                        const float* lse, const AttentionOutput& dq, const AttentionOutput& dk,
                        const AttentionOutput& dv, std::byte* scratch) {
  cpu::attention_backward_of(shape, q, k, v, out, d_out, lse, dq, dk, dv, scratch);
}

}  // namespace logitless
#endif  // HWY_ONCE
