#include <algorithm>
#include <chrono>
#include <cstdint>
#include <functional>
#include <random>
#include <vector>

#include "core/check.h"
#include "core/half.h"
#include "core/own_files.h"
#include "device/card_file.h"
#include "kernels/device/cards.h"
#include "kernels/device/gemm.h"
#include "kernels/device/head.h"
#include "kernels/device/kernel.h"
#include "logitless/calibration.h"
#include "logitless/cross_entropy.h"
#include "logitless/device.h"
#include "logitless/plan.h"
#include "logitless/workspace.h"

namespace logitless {
namespace {

// The least time of each measurement; power and clocks settle meanwhile.
constexpr double kGemmSeconds = 25e-3, kCopySeconds = 15e-3, kForwardSeconds = 25e-3;

// Head of the GEMMs, and heads of the forwards: wide, where GEMMs take the time, and narrow, where
// logits do.
constexpr std::int64_t kTokens = 4096, kDim = 4096, kVocab = 16384;
constexpr HeadShape kWide{.tokens = 4096, .dim = 4096, .vocab = 32768};
constexpr HeadShape kNarrow{.tokens = 8192, .dim = 64, .vocab = 131072};

// Rates of an H200 by these measurements, relative to those that its plans are fitted to: a short
// run of GEMMs has a higher clock, and GEMMs of 64 columns take longer than their arithmetic.
constexpr double kGemmShare = 1.06, kRowShare = 0.445;

double product(std::int64_t a, std::int64_t b, std::int64_t c = 1) {
  return static_cast<double>(a) * static_cast<double>(b) * static_cast<double>(c);
}

class Measurement {
 public:
  explicit Measurement(const Context& context)
      : stream_(context),
        capability_(context.device().compute_capability),
        dtype_(capability_ >= 80 ? DType::bf16 : DType::f16),
        arena_(context, kBytes) {
    fill();
  }

  GpuRates run() {
    GpuRates rates;
    rates.gemm_flops = gemms();
    rates.copy_bytes_per_second = copies();
    rates.row_bytes_per_second = narrow_forward(rates.gemm_flops);
    rates.tile_flops = wide_forward();
    return rates;
  }

 private:
  // Parts of the arena: hidden [kTokens, kDim], a wide weight, and two blocks [kTokens, kVocab] or
  // [kVocab, kDim].
  static constexpr std::size_t kHiddenBytes = std::size_t{2} * kTokens * kDim;
  static constexpr std::size_t kWeightBytes = std::size_t{2} * kWide.vocab * kWide.dim;
  static constexpr std::size_t kBlockBytes = std::size_t{2} * kTokens * kVocab;
  static_assert(kVocab * kDim <= kTokens * kVocab && kTokens >= kDim);
  static_assert(kNarrow.tokens * kNarrow.dim <= kTokens * kDim &&
                kNarrow.vocab * kNarrow.dim <= kWide.vocab * kWide.dim);
  static constexpr std::size_t kBytes = kHiddenBytes + kWeightBytes + 2 * kBlockBytes;

  void* hidden() const { return arena_.data(); }
  void* weight() const { return arena_.as<std::byte>(kHiddenBytes); }
  void* block(int i) const {
    return arena_.as<std::byte>(kHiddenBytes + kWeightBytes +
                                static_cast<std::size_t>(i) * kBlockBytes);
  }

  // Fills the arena with normal numbers: the power of the multipliers depends on the bits. Rows of
  // hidden repeat those of the weight, and their logits of kDim / 256 stay in the range of exp.
  void fill() const {
    constexpr std::size_t kCount = std::size_t{1} << 19;
    std::vector<std::uint16_t> numbers(kCount);
    std::mt19937 rng(1);
    std::normal_distribution<float> normal(0.0F, 1.0F / 16);
    for (std::uint16_t& n : numbers)
      n = dtype_ == DType::bf16 ? float_to_bf16(normal(rng)) : float_to_f16(normal(rng));
    std::size_t filled = 2 * kCount;
    stream_.copy(arena_.data(), numbers.data(), filled);
    stream_.wait();
    for (; filled < kBytes; filled *= 2)
      stream_.copy(arena_.as<std::byte>(filled), arena_.data(), std::min(filled, kBytes - filled));
  }

  // Returns the median time of a call over the second half of at least so many seconds.
  double seconds_of(double least, const std::function<void()>& enqueue) const {
    constexpr std::size_t kLeastCalls = 4;
    enqueue();
    cuda::Timer timer;
    std::vector<double> times;
    for (double total = 0.0; total < least || times.size() < kLeastCalls; total += times.back()) {
      timer.start(stream_.handle());
      enqueue();
      times.push_back(1e-3 * static_cast<double>(timer.stop(stream_.handle())));
    }
    times.erase(times.begin(), times.begin() + static_cast<std::ptrdiff_t>(times.size() / 2));
    const auto middle = times.begin() + static_cast<std::ptrdiff_t>(times.size() / 2);
    std::nth_element(times.begin(), middle, times.end());
    return *middle;
  }

  // A row-major matrix of so many columns, or its transpose.
  cuda::MatrixLayout matrix(std::int64_t columns, bool transposed = false) const {
    cuda::MatrixLayout layout;
    layout.dtype = dtype_;
    layout.row_stride = transposed ? 1 : columns;
    layout.col_stride = transposed ? columns : 1;
    return layout;
  }

  double gemm_seconds(std::int64_t m, std::int64_t n, std::int64_t k, const cuda::MatrixLayout& a,
                      const void* a_data, const cuda::MatrixLayout& b, const void* b_data) const {
    cuda::GemmShape shape;
    shape.m = m;
    shape.n = n;
    shape.k = k;
    shape.a = a;
    shape.b = b;
    shape.c = matrix(n);
    const cuda::DeviceMemory workspace(cuda::gemm_workspace_bytes(shape));
    const cuda::Product gemm(shape);
    cuda::GemmCall call;
    call.a = a_data;
    call.b = b_data;
    call.c = block(1);
    call.workspace = workspace.data();
    call.stream = stream_.handle();
    return seconds_of(kGemmSeconds, [&] { gemm.run(call); });
  }

  // Measures logits, d_hidden and d_weight of a head.
  double gemms() const {
    const double seconds =
        gemm_seconds(kTokens, kVocab, kDim, matrix(kDim), hidden(), matrix(kDim, true), weight()) +
        gemm_seconds(kTokens, kDim, kVocab, matrix(kVocab), block(0), matrix(kDim), weight()) +
        gemm_seconds(kVocab, kDim, kTokens, matrix(kVocab, true), block(0), matrix(kDim), hidden());
    return 3.0 * 2.0 * product(kTokens, kVocab, kDim) / seconds / kGemmShare;
  }

  // Copies half of the arena onto the other half, more than L2 holds.
  double copies() const {
    constexpr std::size_t kHalf = kBytes / 2 / 256 * 256;
    const double seconds = seconds_of(
        kCopySeconds, [&] { stream_.copy(arena_.as<std::byte>(kHalf), arena_.data(), kHalf); });
    return 2.0 * static_cast<double>(kHalf) / seconds;
  }

  double forward_seconds(const char* kernel, const HeadShape& head) const {
    ContextOptions options;
    options.kernel = kernel;
    options.device = DeviceKind::cuda;
    options.device_index = cuda::current_device();
    options.stream = stream_.handle();
    const Context context(options);
    const std::vector<std::int32_t> ids(static_cast<std::size_t>(head.tokens), 1);
    const DeviceBuffer targets(context, ids.size() * sizeof(ids[0]));
    const DeviceBuffer loss(context, sizeof(float));
    stream_.copy(targets.data(), ids.data(), targets.bytes());
    stream_.wait();
    CrossEntropyInputs in;
    in.hidden = ConstTensorView(hidden(), dtype_, {head.tokens, head.dim});
    in.weight = ConstTensorView(weight(), dtype_, {head.vocab, head.dim});
    in.targets = ConstTensorView(targets.data(), DType::i32, {head.tokens});
    CrossEntropyOutputs out;
    out.loss = TensorView(loss.data(), DType::f32, {});
    const LossPlan plan = plan_cross_entropy(context, {}, in, out, {});
    const Workspace workspace(context, plan);
    const double seconds =
        seconds_of(kForwardSeconds, [&] { cross_entropy(context, plan, {}, in, out, workspace); });
    stream_.wait();
    return seconds;
  }

  // Measures the first kernel that writes and reads its logits, without the time of its GEMM.
  double narrow_forward(double gemm_flops) const {
    const auto writes_logits = [&](const cuda::DeviceKernel& kernel) {
      return kernel.rates(dtype_).logit_bytes > 0.0;
    };
    const cuda::DeviceKernel& kernel = *std::ranges::find_if(cuda::device_kernels(), writes_logits);
    const cuda::DeviceRates nominal = kernel.rates(dtype_);
    const double of_gemms = nominal.gemm_flops / cuda::usual_card(90).gemm_flops * gemm_flops;
    const double seconds = forward_seconds(kernel.name, kNarrow);
    const double gemm = 2.0 * product(kNarrow.tokens, kNarrow.vocab, kNarrow.dim) / of_gemms;
    return nominal.logit_bytes * product(kNarrow.tokens, kNarrow.vocab) /
           std::max(seconds - gemm, seconds / 2) / kRowShare;
  }

  // Measures the first mma.sync kernel that this GPU runs, by its time at an H200's rates.
  double wide_forward() const {
    for (const cuda::DeviceKernel& kernel : cuda::device_kernels()) {
      const cuda::DeviceRates rates = kernel.rates(dtype_);
      if (!rates.by_mma_sync || !cuda::capability_refusal(kernel, capability_).empty()) continue;
      const double logits = product(kWide.tokens, kWide.vocab);
      const double on_h200 = 2.0 * logits * static_cast<double>(kWide.dim) / rates.forward_flops +
                             logits * rates.logit_seconds;
      return cuda::usual_card(90).tile_flops * on_h200 / forward_seconds(kernel.name, kWide);
    }
    return 0.0;
  }

  const DeviceStream stream_;
  const int capability_;
  const DType dtype_;
  const DeviceBuffer arena_;
};

void require_gpu(const Context& context, const char* function) {
  require(context.device().kind == DeviceKind::cuda, function,
          ": context: expected a GPU's, got the CPU's");
}

}  // namespace

GpuCalibration measure_gpu(const Context& context) {
  require_gpu(context, "measure_gpu");
  const int index = cuda::current_device();
  GpuCalibration out;
  out.nominal = cuda::local_card(index);
  out.used = context.device().card;
  out.driver = cuda::card_facts(index).driver;
  const auto start = std::chrono::steady_clock::now();
  out.measured = Measurement(context).run();
  out.seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
  return out;
}

GpuCalibration calibrate_gpu(const Context& context, bool refresh) {
  require_gpu(context, "calibrate_gpu");
  const int index = cuda::current_device();
  return calibrate(cuda::local_card(index), cuda::card_facts(index), cache_folder(), refresh,
                   [&] { return Measurement(context).run(); });
}

}  // namespace logitless
