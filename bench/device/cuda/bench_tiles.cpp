// Times the forward kernel `sm80` without its small kernels: without a block, with the exponentials
// stored, and as a block of gradients. Prints a line for each head with milliseconds and TFLOP/s,
// after the rate of the same instruction from registers. Inputs are random, the block is written.
//
//   build/bench/bench_tiles [--resident MIB]
#include <CLI/CLI.hpp>
#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <random>
#include <string>
#include <vector>

#include "device/cuda/mma_peak.h"
#include "kernels/cpu_tensor.h"
#include "kernels/cuda/head/tile_kernel.h"
#include "kernels/device/head.h"

namespace logitless::bench {
namespace {

struct Head {
  std::int64_t tokens, dim, vocab;
};

// Returns `count` bf16 numbers on the device: copies of 2^22 random ones.
cuda::DeviceMemory random_numbers(std::int64_t count, float deviation, unsigned seed) {
  constexpr std::int64_t kRandom = std::int64_t{1} << 22;
  std::mt19937 random(seed);
  std::normal_distribution<float> normal(0.0f, deviation);
  std::vector<float> values(kRandom);
  for (float& value : values) value = normal(random);
  std::vector<std::byte> narrow(values.size() * 2);
  from_f32(DType::bf16, values.data(), narrow.data(), kRandom);
  cuda::DeviceMemory out(static_cast<std::size_t>(count) * 2);
  for (std::int64_t at = 0; at < count; at += kRandom)
    cuda::copy_to_device(static_cast<std::byte*>(out.data()) + at * 2, narrow.data(),
                         static_cast<std::size_t>(std::min(kRandom, count - at)) * 2, nullptr);
  return out;
}

template <typename Run>
float median_milliseconds(const Run& run) {
  cuda::Timer timer;
  std::vector<float> times;
  for (int i = 0; i < 8; ++i) {  // the first three warm up
    timer.start(nullptr);
    run();
    times.push_back(timer.stop(nullptr));
  }
  std::sort(times.begin() + 3, times.end());
  return times[5];
}

void time_head(const Head& head, std::int64_t resident_bytes) {
  using cuda::ForwardMode;
  const std::int64_t tokens = cuda::padded_tokens(head.tokens);
  const std::int64_t columns = cuda::padded_vocab(head.vocab);
  const auto zeros = [](std::int64_t bytes) {
    cuda::DeviceMemory memory(static_cast<std::size_t>(bytes));
    cuda::fill_device(memory.data(), 0, memory.bytes(), nullptr);
    return memory;
  };
  const cuda::DeviceMemory hidden = random_numbers(head.tokens * head.dim, 1.0f, 1);
  const cuda::DeviceMemory weight =
      random_numbers(head.vocab * head.dim, 2.0f / std::sqrt(static_cast<float>(head.dim)), 2);
  const cuda::DeviceMemory block = zeros(tokens * columns * 2);
  const cuda::DeviceMemory sums = zeros(tokens * columns / 256 * 4);
  const cuda::DeviceMemory reference = zeros(tokens * 4);
  const cuda::DeviceMemory rows =
      zeros(tokens * static_cast<std::int64_t>(sizeof(cuda::RowCoefficients)));

  cuda::TileOperands operands;
  operands.tokens = head.tokens;
  operands.dim = head.dim;
  operands.vocab = head.vocab;
  operands.hidden = hidden.data();
  operands.rows = weight.data();
  operands.hidden_stride = operands.row_stride = head.dim;
  operands.block = {block.data(), columns};
  cuda::ForwardArguments arguments{};
  arguments.vocab = static_cast<int>(head.vocab);
  arguments.token_pairs = static_cast<int>(tokens / 256);
  arguments.vocab_tiles = arguments.stored_tiles = static_cast<int>(columns / 256);
  arguments.group =
      static_cast<int>(std::max<std::int64_t>(1, resident_bytes / (256 * head.dim * 2)));
  arguments.padded_tokens = tokens;
  arguments.scale = 1.0f;
  arguments.reference = static_cast<const float*>(reference.data());
  arguments.sums = static_cast<float*>(sums.data());
  arguments.rows = static_cast<const cuda::RowCoefficients*>(rows.data());
  const auto time = [&](ForwardMode mode, bool store) {
    return median_milliseconds(
        [&] { cuda::sm80_tiles().launch(mode, store, operands, arguments, nullptr); });
  };
  const double operations = 2.0 * static_cast<double>(head.tokens) * static_cast<double>(head.dim) *
                            static_cast<double>(head.vocab);
  std::printf("%6lld x %4lld x %6lld", static_cast<long long>(head.tokens),
              static_cast<long long>(head.dim), static_cast<long long>(head.vocab));
  const auto print = [&](const char* name, float milliseconds) {
    std::printf("  %s %.2f ms %.0f TFLOP/s", name, milliseconds,
                operations / (milliseconds * 1e-3) * 1e-12);
  };
  print("sums alone", time(ForwardMode::kPlain, false));
  print("stored", time(ForwardMode::kPlain, true));
  print("gradients", time(ForwardMode::kPlainGradient, true));
  std::printf("\n");
}

}  // namespace
}  // namespace logitless::bench

int main(int argc, char** argv) {
  CLI::App app("Times the tiles of the kernel sm80 on a GPU");
  std::int64_t resident_mib = 20;
  app.add_option("--resident", resident_mib, "MiB of hidden states that stay in L2 (default 20)")
      ->check(CLI::PositiveNumber);
  CLI11_PARSE(app, argc, argv);
  const std::string missing = logitless::cuda::device_missing(0);
  if (!missing.empty()) {
    std::fprintf(stderr, "bench_tiles: %s\n", missing.c_str());
    return 2;
  }
  std::printf("mma.sync from registers %.0f TFLOP/s\n", logitless::bench::mma_peak() * 1e-12);
  for (const logitless::bench::Head& head :
       {logitless::bench::Head{8192, 4096, 128256}, {8192, 2304, 256000}, {32768, 768, 50304}})
    logitless::bench::time_head(head, resident_mib << 20);
  return 0;
}
