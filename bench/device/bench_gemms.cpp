// Times the GEMMs of a GPT-2's training step on a GPU with their epilogues, by each algorithm of
// cuBLASLt's heuristic. Prints a line for each with milliseconds and TFLOP/s, after a line for the
// algorithm that programs use. GEMMs that programs divide into blocks have one more line,
// undivided. The other numbers are those of cublasLt.h: algorithm, tile, stages, cluster and
// split-K.
#include <CLI/CLI.hpp>
#include <algorithm>
#include <cstdio>
#include <functional>
#include <random>
#include <string>
#include <vector>

#include "kernels/device/gemm.h"
#include "kernels/device/head.h"
#include "logitless/device.h"

namespace logitless::bench {
namespace {

struct Case {
  std::string name;
  cuda::GemmShape shape;
};

cuda::MatrixLayout matrix(DType dtype, std::int64_t row_stride, std::int64_t col_stride) {
  return {dtype, 0, row_stride, col_stride, 16};
}

// Returns the GEMMs of a layer's linear maps on `rows` tokens: forward, and both gradients.
std::vector<Case> cases_of(std::int64_t rows, std::int64_t width) {
  const std::int64_t inner = 4 * width;
  std::vector<Case> list;
  const auto add = [&](const std::string& name, std::int64_t m, std::int64_t n, std::int64_t k,
                       const cuda::MatrixLayout& a, const cuda::MatrixLayout& b, DType to) {
    Case c{name, {}};
    c.shape.m = m;
    c.shape.n = n;
    c.shape.k = k;
    c.shape.a = a;
    c.shape.b = b;
    c.shape.c = matrix(to, n, 1);
    list.push_back(c);
    return list.size() - 1;
  };
  const auto again = [&](std::size_t of, const std::string& what,
                         const cuda::GemmEpilogue& epilogue) {
    Case c = list[of];
    c.name += ", " + what;
    c.shape.epilogue = epilogue;
    c.shape.epilogue.residual_layout = c.shape.epilogue.aux_layout = c.shape.c;
    list.push_back(c);
  };
  cuda::GemmEpilogue bias, both, residual, gelu, gradient;
  bias.bias = both.bias = gelu.bias = true;
  both.residual = residual.residual = true;
  gelu.gelu = gradient.gelu_gradient = true;
  struct Layer {
    const char* name;
    std::int64_t in, out;
  };
  for (const Layer& l : {Layer{"q, k, v", width, 3 * width},
                         {"attention out", width, width},
                         {"inner", width, inner},
                         {"inner out", inner, width}}) {
    const DType narrow = DType::bf16;
    const std::string name = l.name;
    const std::size_t forward =
        add(name, rows, l.out, l.in, matrix(narrow, l.in, 1), matrix(narrow, l.out, 1), narrow);
    again(forward, "bias", bias);
    if (l.out == width) again(forward, "bias, residual", both);
    if (l.out == inner) again(forward, "bias, gelu", gelu);
    const DType of_x = l.out == width ? narrow : DType::f32;  // a layer norm's gradient reads it
    const std::size_t d_x = add(name + ", d_x", rows, l.in, l.out, matrix(narrow, l.out, 1),
                                matrix(narrow, 1, l.out), of_x);
    if (l.in == inner) again(d_x, "gelu gradient", gradient);
    add(name + ", d_weight", l.in, l.out, rows, matrix(narrow, 1, l.in), matrix(narrow, l.out, 1),
        DType::f32);
    // The same with the result transposed.
    add(name + ", d_weight transposed", l.out, l.in, rows, matrix(narrow, 1, l.out),
        matrix(narrow, l.in, 1), DType::f32);
  }
  return list;
}

// Returns the GEMMs of a loop over chunks of rows with logits of vocab_count vocabulary entries.
// Rows are contiguous, or at multiples of 16 bytes.
std::vector<Case> cases_of_chunk(std::int64_t rows, std::int64_t width, std::int64_t vocab_count) {
  std::vector<Case> list;
  for (const bool apart : {false, true}) {
    const std::int64_t stride = apart ? (vocab_count + 7) / 8 * 8 : vocab_count;
    const std::int64_t bytes = stride % 8 == 0 ? 16 : 2;
    const auto add = [&](const char* what, std::int64_t m, std::int64_t n,
                         std::int64_t k) -> cuda::GemmShape& {
      Case c{std::string(what) + (apart ? ", rows apart" : ""), {}};
      c.shape.m = m;
      c.shape.n = n;
      c.shape.k = k;
      list.push_back(c);
      return list.back().shape;
    };
    const auto logits = [&](DType to) {
      cuda::MatrixLayout c = matrix(to, stride, 1);
      c.alignment = std::min<std::int64_t>(16, bytes * (to == DType::f32 ? 2 : 1));
      return c;
    };
    for (const DType to : {DType::f32, DType::bf16}) {
      cuda::GemmShape& z =
          add(to == DType::f32 ? "logits, f32" : "logits, bf16", rows, vocab_count, width);
      z.a = matrix(DType::bf16, width, 1);
      z.b = matrix(DType::bf16, 1, width);
      z.c = logits(to);
    }
    // The weight is [V, D], or [D, V] with rows side by side.
    const cuda::MatrixLayout rows_of_v = {DType::bf16, 0, vocab_count, 1, 16},
                             columns_of_v = {DType::bf16, 0, 1, vocab_count, 16};
    cuda::GemmShape& across = add("logits, bf16, weight [D, V]", rows, vocab_count, width);
    across.a = matrix(DType::bf16, width, 1);
    across.b = rows_of_v;
    across.c = logits(DType::bf16);
    for (const DType to : {DType::f32, DType::bf16}) {
      cuda::GemmShape& x =
          add(to == DType::f32 ? "d_hidden, f32" : "d_hidden, bf16", rows, width, vocab_count);
      x.a = logits(DType::bf16);
      x.b = matrix(DType::bf16, width, 1);
      x.c = matrix(to, width, 1);
    }
    cuda::GemmShape& back = add("d_hidden, bf16, weight [D, V]", rows, width, vocab_count);
    back.a = logits(DType::bf16);
    back.b = columns_of_v;
    back.c = matrix(DType::bf16, width, 1);
    cuda::GemmShape& w = add("d_weight", vocab_count, width, rows);
    w.a = {DType::bf16, 0, 1, stride, bytes};
    w.b = matrix(DType::bf16, width, 1);
    w.c = matrix(DType::f32, width, 1);
  }
  return list;
}

// Returns the median of 7 rounds of 4 calls, after two rounds of warm-up.
double milliseconds(const std::function<void()>& call) {
  constexpr int kRounds = 7, kCalls = 4;
  cuda::Timer timer;
  std::vector<float> times;
  for (int round = -2; round < kRounds; ++round) {
    timer.start(nullptr);
    for (int i = 0; i < kCalls; ++i) call();
    const float taken = timer.stop(nullptr) / kCalls;
    if (round >= 0) times.push_back(taken);
  }
  std::nth_element(times.begin(), times.begin() + kRounds / 2, times.end());
  return static_cast<double>(times[kRounds / 2]);
}

// Fills memory with normal random numbers in bf16: the power of the multipliers depends on the
// bits.
void fill(const DeviceBuffer& memory, const DeviceStream& stream) {
  constexpr std::size_t kCount = std::size_t{1} << 20;
  std::vector<std::uint16_t> numbers(kCount);
  std::mt19937 rng(1);
  std::normal_distribution<float> normal(0.0F, 0.5F);
  for (std::uint16_t& n : numbers) {
    const float x = normal(rng);
    std::uint32_t bits = 0;
    std::copy_n(reinterpret_cast<const char*>(&x), sizeof(bits), reinterpret_cast<char*>(&bits));
    n = static_cast<std::uint16_t>(bits >> 16);
  }
  for (std::size_t at = 0; at < memory.bytes(); at += kCount * 2)
    stream.copy(memory.as<std::byte>(at), numbers.data(),
                std::min(kCount * 2, memory.bytes() - at));
  stream.wait();
}

void run(std::int64_t rows, std::int64_t width, std::int64_t vocab_count, int algorithms) {
  ContextOptions options;
  options.device = DeviceKind::cuda;
  const Context context(options);
  const DeviceStream stream(context);
  // f32 matrices with the inner width, or with the vocabulary entries
  const auto large = static_cast<std::size_t>(
      std::max({rows * width * 4, rows * (vocab_count + 8), (vocab_count + 8) * width}) * 4 / 256 *
          256 +
      256);
  const DeviceBuffer memory(context, 4 * large);
  const DeviceBuffer workspace(context, std::size_t{128} << 20);
  fill(memory, stream);
  for (const Case& c :
       vocab_count > 0 ? cases_of_chunk(rows, width, vocab_count) : cases_of(rows, width)) {
    const bool divided = cuda::gemm_additional_bytes(c.shape) > 0;
    for (int choice = cuda::Product::kBest; choice < (divided ? 1 : algorithms); ++choice) {
      cuda::GemmShape shape = c.shape;
      if (divided && choice >= 0) shape.workspace = 0;
      const cuda::Product product(shape, choice);
      if (choice >= 0 && product.algorithm().empty()) break;
      if (c.shape.epilogue.any() && !product.fused()) break;
      cuda::GemmCall call;
      call.a = memory.data();
      call.b = memory.as<std::byte>(large);
      call.c = memory.as<std::byte>(2 * large);
      call.aux = memory.as<std::byte>(3 * large);
      call.bias = call.residual = memory.as<std::byte>(large + large / 2);
      call.workspace = workspace.data();
      const double ms = milliseconds([&] { product.run(call); });
      const double flops = 2.0 * static_cast<double>(c.shape.m) * static_cast<double>(c.shape.n) *
                           static_cast<double>(c.shape.k);
      std::printf("%-34s %6lld x %5lld x %5lld  %-12s  %.4f ms  %.0f TFLOP/s  %s\n", c.name.c_str(),
                  static_cast<long long>(c.shape.m), static_cast<long long>(c.shape.n),
                  static_cast<long long>(c.shape.k),
                  (choice < 0 ? std::string("programs")
                   : divided  ? std::string("undivided")
                              : "algorithm " + std::to_string(choice))
                      .c_str(),
                  ms, flops / ms / 1e9,
                  product.algorithm().empty() ? product.kernel() : product.algorithm().c_str());
    }
  }
}

}  // namespace
}  // namespace logitless::bench

int main(int argc, char** argv) {
  CLI::App app("GEMMs of a GPT-2's training step on a GPU");
  std::int64_t rows = 32768, width = 768, vocab = 0;
  int algorithms = 8;
  app.add_option("--rows", rows, "tokens of a step")->check(CLI::PositiveNumber);
  app.add_option("--width", width, "of the model")->check(CLI::PositiveNumber);
  app.add_option("--vocab", vocab, "instead: logits of such a vocabulary, and their gradients")
      ->check(CLI::PositiveNumber);
  app.add_option("--algorithms", algorithms, "of each GEMM")->check(CLI::Range(1, 64));
  CLI11_PARSE(app, argc, argv);
  if (const std::string missing = logitless::gpu_missing(); !missing.empty()) {
    std::printf("bench_gemms: skipped: %s\n", missing.c_str());
    return 0;
  }
  logitless::bench::run(rows, width, vocab, algorithms);
  return 0;
}
