// The forward kernel against cuBLAS's product of the same logits, in one process, on fresh random
// data: medians of interleaved runs timed by events on the device.
#include <CLI/CLI.hpp>
#include <algorithm>
#include <cstdio>
#include <cstring>
#include <nlohmann/json.hpp>
#include <random>
#include <vector>

#include "core/half.h"
#include "device/cublas_gemm.h"
#include "kernels/device_head.h"

namespace {

using logitless::cuda::DeviceMemory;
namespace cuda = logitless::cuda;

struct Shape {
  const char* name;
  std::int64_t tokens, dim, vocab;
};
constexpr Shape kShapes[] = {{"Gemma-2-2B", 8192, 2304, 256000},
                             {"Llama-3-8B", 8192, 4096, 128256},
                             {"GPT-2", 32768, 768, 50304}};

// Normal numbers: a block of 16 Mi of them, repeated.
void fill_normal(const DeviceMemory& memory, std::size_t count, float deviation, unsigned seed) {
  std::mt19937_64 random(seed);
  std::normal_distribution<float> normal(0.0f, deviation);
  std::vector<std::uint16_t> block(std::min<std::size_t>(count, (std::size_t{1} << 22) + 12345));
  for (std::uint16_t& value : block) value = logitless::float_to_bf16(normal(random));
  for (std::size_t at = 0; at < count; at += block.size()) {
    cuda::copy_to_device(static_cast<std::uint16_t*>(memory.data()) + at, block.data(),
                         std::min(block.size(), count - at) * 2, nullptr);
  }
}

double median(std::vector<float> times) {
  std::sort(times.begin(), times.end());
  return times[times.size() / 2];
}

nlohmann::json measure(const Shape& s, int repeat, const logitless::bench::CublasGemm& cublas) {
  const auto n = static_cast<std::size_t>(s.tokens);
  const auto d = static_cast<std::size_t>(s.dim);
  const auto v = static_cast<std::size_t>(s.vocab);
  const DeviceMemory hidden(n * d * 2), weight(v * d * 2), targets(n * 4), logits(n * v * 2);
  const DeviceMemory lse(n * 4), log_prob(n * 4), bad(8);
  fill_normal(hidden, n * d, 1.0f, 1);
  fill_normal(weight, v * d, 2.0f / std::sqrt(static_cast<float>(d)), 2);
  std::mt19937 random(3);
  std::vector<std::int32_t> words(n);
  for (std::int32_t& word : words) word = static_cast<std::int32_t>(random() % v);
  cuda::copy_to_device(targets.data(), words.data(), n * 4, nullptr);

  cuda::ForwardCall call;
  call.shape = {s.tokens, s.dim, s.vocab, logitless::DType::bf16, 1, false, false, false};
  const DeviceMemory workspace(cuda::forward_workspace_bytes(call.shape));
  call.hidden = hidden.data();
  call.hidden_stride = s.dim;
  call.weight = weight.data();
  call.weight_stride = s.dim;
  call.targets = targets.data();
  call.lse = static_cast<float*>(lse.data());
  call.log_prob = static_cast<float*>(log_prob.data());
  call.bad_target = static_cast<std::uint64_t*>(bad.data());
  call.workspace = workspace.data();

  std::vector<float> gemm_times, forward_times;
  cuda::Timer timer;
  for (int run = -2; run < repeat; ++run) {
    timer.start(nullptr);
    if (cublas.missing().empty())
      cublas.multiply(hidden.data(), weight.data(), logits.data(), s.tokens, s.vocab, s.dim);
    const float gemm = timer.stop(nullptr);
    timer.start(nullptr);
    cuda::forward(call);
    const float forward = timer.stop(nullptr);
    if (run < 0) continue;  // warming up
    gemm_times.push_back(gemm);
    forward_times.push_back(forward);
  }
  const double flops =
      2.0 * static_cast<double>(n) * static_cast<double>(d) * static_cast<double>(v);
  nlohmann::json row = {{"name", s.name},
                        {"tokens", s.tokens},
                        {"dim", s.dim},
                        {"vocab", s.vocab},
                        {"forward_ms", median(forward_times)},
                        {"forward_tflops", flops / median(forward_times) * 1e-9},
                        {"workspace_bytes", workspace.bytes()},
                        {"logits_bytes", n * v * 4}};
  if (cublas.missing().empty()) {
    row["cublas_ms"] = median(gemm_times);
    row["ratio"] = median(forward_times) / median(gemm_times);
  }
  return row;
}

}  // namespace

int main(int argc, char** argv) {
  CLI::App app("Times the forward kernel of the GPU against cuBLAS's product of the same logits");
  int repeat = 15;
  bool json = false;
  app.add_option("--repeat", repeat)->check(CLI::PositiveNumber)->capture_default_str();
  app.add_flag("--json", json);
  CLI11_PARSE(app, argc, argv);
  const std::string reason = cuda::device_missing(0);
  if (!reason.empty()) {
    std::fprintf(stderr, "device_forward: %s\n", reason.c_str());
    return 1;
  }
  const logitless::bench::CublasGemm cublas;
  if (!cublas.missing().empty())
    std::fprintf(stderr, "device_forward: without cuBLAS: %s\n", cublas.missing().c_str());
  nlohmann::json rows = nlohmann::json::array();
  if (!json)
    std::puts(
        "head            forward ms   TFLOP/s   cuBLAS ms   ratio   workspace MiB   logits MiB");
  for (const Shape& shape : kShapes) {
    const nlohmann::json row = measure(shape, repeat, cublas);
    rows.push_back(row);
    if (json) continue;
    std::printf("%-14s %11.3f %9.0f %11.3f %7.3f %15.1f %12.0f\n", shape.name,
                row["forward_ms"].get<double>(), row["forward_tflops"].get<double>(),
                row.value("cublas_ms", 0.0), row.value("ratio", 0.0),
                row["workspace_bytes"].get<double>() / 1048576.0,
                row["logits_bytes"].get<double>() / 1048576.0);
    std::fflush(stdout);
  }
  if (json) std::puts(rows.dump(2).c_str());
  return 0;
}
