#include "amx_peak.h"

#include <atomic>
#include <chrono>
#include <cstdint>
#include <thread>
#include <vector>

#include "logitless/context.h"

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace bench {
namespace {

#if defined(__x86_64__)
// Multiplies independent tiles into four accumulators: only the rate of the tile unit limits them.
double run_tiles(std::int64_t rounds) {
  struct alignas(64) {
    std::uint8_t palette = 1, start = 0, reserved[14] = {};
    std::uint16_t bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
    std::uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
  } config;
  alignas(64) std::uint16_t values[512];
  for (int i = 0; i < 512; ++i) values[i] = static_cast<std::uint16_t>(0x3f80 + i % 64);
  __asm__ volatile("ldtilecfg %0" ::"m"(config));
  _tile_zero(0);
  _tile_zero(1);
  _tile_zero(2);
  _tile_zero(3);
  _tile_loadd(4, values, 64);
  _tile_loadd(5, values, 64);
  _tile_loadd(6, values, 64);
  _tile_loadd(7, values, 64);
  const auto start = std::chrono::steady_clock::now();
  for (std::int64_t i = 0; i < rounds; ++i) {
    _tile_dpbf16ps(0, 4, 6);
    _tile_dpbf16ps(1, 4, 7);
    _tile_dpbf16ps(2, 5, 6);
    _tile_dpbf16ps(3, 5, 7);
  }
  const double seconds =
      std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
  __asm__ volatile("tilerelease" ::: "memory");
  constexpr double kFlops = 2.0 * 16 * 16 * 32;
  return 4.0 * kFlops * static_cast<double>(rounds) / seconds;
}
#endif

bool has_amx() {
  for (const std::string& name : logitless::kernel_names()) {
    if (name == "amx_bf16") return true;
  }
  return false;
}

}  // namespace

double amx_peak_flops(int threads) {
#if defined(__x86_64__)
  if (!has_amx()) return 0.0;
  std::vector<double> rates(static_cast<std::size_t>(threads));
  {
    std::vector<std::jthread> team;
    for (double& rate : rates) team.emplace_back([&rate] { rate = run_tiles(5'000'000); });
  }
  double sum = 0.0;
  for (const double rate : rates) sum += rate;
  return sum;
#else
  (void)threads;
  (void)has_amx;
  return 0.0;
#endif
}

}  // namespace bench
