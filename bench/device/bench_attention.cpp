// Times attention in the compiler's programs on a GPU: milliseconds and TFLOP/s of forward and
// backward, one line of JSON for each shape. Causal work counts half: 2 GEMMs forward and 5
// backward, whatever the kernels do. bench/compare/attention.py compares it with PyTorch's.
#include <CLI/CLI.hpp>
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <functional>
#include <nlohmann/json.hpp>
#include <random>
#include <vector>

#include "core/half.h"
#include "kernels/device/attention.h"

namespace logitless::bench {
namespace {

using cuda::AttentionCall;
using cuda::DeviceMemory;

struct Shape {
  std::int64_t batch, heads, kv_heads, length, dim;
};

// Returns normal random numbers.
DeviceMemory random_bf16(std::int64_t count, unsigned seed) {
  DeviceMemory memory(static_cast<std::size_t>(count) * 2);
  std::mt19937 random(seed);
  std::normal_distribution<float> normal;
  std::vector<std::uint16_t> block(std::min<std::size_t>(static_cast<std::size_t>(count), 999983));
  for (std::uint16_t& x : block) x = float_to_bf16(normal(random));
  for (std::size_t at = 0; at < static_cast<std::size_t>(count); at += block.size()) {
    cuda::copy_to_device(static_cast<std::uint16_t*>(memory.data()) + at, block.data(),
                         std::min(block.size(), static_cast<std::size_t>(count) - at) * 2, nullptr);
  }
  return memory;
}

// Returns the median of `rounds` rounds of 10 calls, after 50 ms of warm-up.
double milliseconds(int rounds, const std::function<void()>& call) {
  cuda::Timer timer;
  for (float spent = 0.0f; spent < 50.0f;) {
    timer.start(nullptr);
    for (int i = 0; i < 10; ++i) call();
    spent += timer.stop(nullptr);
  }
  std::vector<float> times;
  for (int round = 0; round < rounds; ++round) {
    timer.start(nullptr);
    for (int i = 0; i < 10; ++i) call();
    times.push_back(timer.stop(nullptr) / 10);
  }
  std::nth_element(times.begin(), times.begin() + rounds / 2, times.end());
  return times[static_cast<std::size_t>(rounds / 2)];
}

// q, k, v (and their gradients) are columns of one matrix, the result of a transformer's fused
// projection.
nlohmann::json measure(const Shape& s, bool causal, int rounds) {
  const std::int64_t width = (s.heads + 2 * s.kv_heads) * s.dim;
  const std::int64_t tokens = s.batch * s.length;
  const std::int64_t out_width = s.heads * s.dim;
  const DeviceMemory qkv = random_bf16(tokens * width, 1);
  const DeviceMemory d_out = random_bf16(tokens * out_width, 2);
  const DeviceMemory out(static_cast<std::size_t>(tokens * out_width) * 2);
  const DeviceMemory d_qkv(static_cast<std::size_t>(tokens * width) * 2);
  const DeviceMemory lse(static_cast<std::size_t>(tokens * s.heads) * 4);
  AttentionCall call;
  call.batch = s.batch;
  call.heads = s.heads;
  call.kv_heads = s.kv_heads;
  call.queries = call.keys = s.length;
  call.dim = s.dim;
  call.causal = causal;
  call.scale = 1.0f / std::sqrt(static_cast<float>(s.dim));
  const auto column = [&](const DeviceMemory& m, std::int64_t at) {
    return static_cast<std::uint16_t*>(m.data()) + at;
  };
  const std::int64_t k_at = s.heads * s.dim, v_at = k_at + s.kv_heads * s.dim;
  const auto of_qkv = [&](std::int64_t at) {
    return AttentionCall::Operand{column(qkv, at), s.length * width, s.dim, width};
  };
  const auto of_d_qkv = [&](std::int64_t at) {
    return AttentionCall::Output{column(d_qkv, at), s.length * width, s.dim, width};
  };
  call.q = of_qkv(0);
  call.k = of_qkv(k_at);
  call.v = of_qkv(v_at);
  call.d_q = of_d_qkv(0);
  call.d_k = of_d_qkv(k_at);
  call.d_v = of_d_qkv(v_at);
  call.lse = static_cast<float*>(lse.data());
  call.result = {out.data(), s.length * out_width, s.dim, out_width};
  call.out = {out.data(), s.length * out_width, s.dim, out_width};
  call.d_out = {d_out.data(), s.length * out_width, s.dim, out_width};
  const int capability = cuda::compute_capability(0);
  const std::size_t bytes = std::max(cuda::attention_scratch_bytes(call, false, capability),
                                     cuda::attention_scratch_bytes(call, true, capability));
  const DeviceMemory scratch(bytes);
  call.scratch = scratch.data();

  const double pairs = static_cast<double>(s.batch * s.heads) * static_cast<double>(s.length) *
                       static_cast<double>(s.length) * (causal ? 0.5 : 1.0);
  const double product = 2 * pairs * static_cast<double>(s.dim);
  const double forward = milliseconds(rounds, [&] { cuda::attention_forward(call); });
  const double backward = milliseconds(rounds, [&] { cuda::attention_backward(call); });
  return {{"batch", s.batch},
          {"heads", s.heads},
          {"kv_heads", s.kv_heads},
          {"length", s.length},
          {"dim", s.dim},
          {"causal", causal},
          {"forward_ms", forward},
          {"backward_ms", backward},
          {"forward_tflops", 2 * product / forward * 1e-9},
          {"backward_tflops", 5 * product / backward * 1e-9},
          {"scratch_mib", static_cast<double>(bytes) / (1 << 20)}};
}

}  // namespace
}  // namespace logitless::bench

int main(int argc, char** argv) {
  CLI::App app("Attention on a GPU");
  int rounds = 11;
  bool full = false;
  app.add_option("--rounds", rounds, "of 10 calls, for a median")->check(CLI::PositiveNumber);
  app.add_flag("--full", full, "every query sees every key");
  CLI11_PARSE(app, argc, argv);
  if (const std::string reason = logitless::cuda::device_missing(0); !reason.empty()) {
    std::fprintf(stderr, "bench_attention: %s\n", reason.c_str());
    return 1;
  }
  using logitless::bench::Shape;
  for (const Shape& s : {Shape{32, 12, 12, 1024, 64}, Shape{4, 12, 12, 1024, 64},
                         Shape{2, 16, 16, 4096, 128}, Shape{8, 32, 8, 2048, 64}})
    std::printf("%s\n", logitless::bench::measure(s, !full, rounds).dump().c_str());
  return 0;
}
