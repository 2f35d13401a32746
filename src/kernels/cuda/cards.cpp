// Nominal rates of cards, from NVIDIA's datasheets: dense, fp32 sums, boost clock.
#include "kernels/device/cards.h"

#include <algorithm>
#include <array>
#include <map>
#include <mutex>

#include "core/check.h"

namespace logitless {
namespace {

constexpr double kTera = 1e12, kGiga = 1e9;
constexpr std::int64_t kKiB = 1024, kMiB = 1024 * kKiB;

// Fractions of the peaks that cuBLAS and copies sustain on a card that nobody measured. Power
// lowers the clocks of Hopper and Blackwell data centre cards under GEMMs.
constexpr double kCopyFraction = 0.83;
// Fractions of those rates, fitted on an H200 (head/kernels.cpp): the forward of mma.sync kernels
// relative to GEMMs, and the pass over rows of logits relative to a copy.
constexpr double kTileFraction = 450.0 / 700.0;
constexpr double kRowFraction = 3.5 / 4.0;
// GEMMs of TF32 sustain 285 TFLOP/s on an H200, where the share of the peak that GEMMs of 16 bits
// sustain would be 350.
constexpr double kTf32Fraction = 285.0 / 350.0;
constexpr double gemm_fraction(int capability) {
  return capability >= 90 && capability < 120 ? 0.65 : 0.8;
}

struct Row {
  const char* name;
  // All of these stand in the driver's name, between spaces and hyphens.
  std::array<const char*, 2> parts;
  int capability, sms;
  double tensor, tf32, fp32;  // TFLOP/s
  double bandwidth;           // GB/s
  std::int64_t l2, shared;    // MiB, KiB of an SM
  // Sustained TFLOP/s and GB/s, where they were measured; 0: by the fractions.
  double gemm, copy;
};

// A row with two parts of a name stands before the one with the first alone.
constexpr Row kRows[] = {
    {"T4", {"T4"}, 75, 40, 65, 0, 8.1, 320, 4, 64, 0, 0},
    {"A10", {"A10"}, 86, 72, 125, 62.5, 31.2, 600, 6, 100, 0, 0},
    {"A100 40GB", {"A100", "40GB"}, 80, 108, 312, 156, 19.5, 1555, 40, 164, 250, 0},
    {"A100", {"A100"}, 80, 108, 312, 156, 19.5, 2039, 40, 164, 250, 1700},
    {"RTX 3090", {"RTX", "3090"}, 86, 82, 71, 35.6, 35.6, 936, 6, 100, 0, 0},
    {"RTX 4090", {"RTX", "4090"}, 89, 128, 165.2, 82.6, 82.6, 1008, 72, 100, 0, 0},
    {"L4", {"L4"}, 89, 58, 121, 60, 30.3, 300, 48, 100, 0, 0},
    {"L40S", {"L40S"}, 89, 142, 362, 183, 91.6, 864, 96, 100, 0, 0},
    {"H100 PCIe", {"H100", "PCIe"}, 90, 114, 756, 378, 51.2, 2000, 50, 228, 535, 0},
    {"H100 NVL", {"H100", "NVL"}, 90, 132, 835, 417, 60, 3900, 50, 228, 590, 0},
    {"H100", {"H100"}, 90, 132, 989, 494, 67, 3350, 50, 228, 700, 0},
    {"H200 NVL", {"H200", "NVL"}, 90, 132, 835, 417, 60, 4800, 50, 228, 590, 4000},
    {"H200", {"H200"}, 90, 132, 989, 494, 67, 4800, 50, 228, 700, 4000},
    {"B200", {"B200"}, 100, 148, 2250, 1125, 75, 8000, 126, 228, 1500, 6500},
    {"RTX 5090", {"RTX", "5090"}, 120, 170, 209.5, 104.8, 104.8, 1792, 96, 100, 0, 0},
};

void set_derived_rates(GpuCard& card) {
  card.tile_flops = card.compute_capability >= 80 ? kTileFraction * card.gemm_flops : 0.0;
  card.row_bytes_per_second = kRowFraction * card.copy_bytes_per_second;
}

GpuCard card_of(const Row& row) {
  GpuCard card;
  card.name = row.name;
  card.compute_capability = row.capability;
  card.tensor_flops = row.tensor * kTera;
  card.tf32_flops = row.tf32 * kTera;
  card.fp32_flops = row.fp32 * kTera;
  card.bytes_per_second = row.bandwidth * kGiga;
  card.l2_bytes = row.l2 * kMiB;
  card.sms = row.sms;
  card.shared_bytes = row.shared * kKiB;
  card.gemm_flops =
      row.gemm > 0 ? row.gemm * kTera : gemm_fraction(row.capability) * card.tensor_flops;
  card.copy_bytes_per_second =
      row.copy > 0 ? row.copy * kGiga : kCopyFraction * card.bytes_per_second;
  set_derived_rates(card);
  return card;
}

bool has_part(std::string_view name, std::string_view part) {
  const auto separates = [](char c) { return c == ' ' || c == '-'; };
  for (std::size_t at = name.find(part); at != std::string_view::npos;
       at = name.find(part, at + 1)) {
    const std::size_t end = at + part.size();
    if ((at == 0 || separates(name[at - 1])) && (end == name.size() || separates(name[end])))
      return true;
  }
  return false;
}

// Operations of a tensor core GEMM with fp32 sums and of fp32 arithmetic, of an SM and clock.
struct PerClock {
  double tensor, fp32;
};
PerClock per_clock(int capability, bool geforce) {
  // GeForce cards sum in fp32 at half the rate of professional ones.
  const double half = geforce ? 0.5 : 1.0;
  if (capability < 80) return {1024 * half, 128};
  if (capability == 80) return {2048, 128};
  if (capability < 90) return {1024 * half, 256};
  if (capability < 100) return {4096, 256};
  if (capability < 120) return {8192, 256};
  return {1024 * half, 256};
}

}  // namespace

std::vector<std::string> gpu_card_names() {
  std::vector<std::string> names;
  for (const Row& row : kRows) names.emplace_back(row.name);
  return names;
}

GpuCard gpu_card(std::string_view name) {
  std::string names;
  for (const Row& row : kRows) {
    if (name == row.name) return card_of(row);
    names += concat(names.empty() ? "" : ", ", row.name);
  }
  throw InvalidArgument(concat("card: '", name, "' is unknown; expected one of ", names));
}

namespace cuda {

GpuCard card_from(const CardFacts& facts) {
  GpuCard card;
  const auto is_row = [&](const Row& row) {
    return row.capability == facts.compute_capability && row.sms == facts.sms &&
           std::ranges::all_of(row.parts, [&](const char* part) {
             return part == nullptr || has_part(facts.name, part);
           });
  };
  const auto row = std::ranges::find_if(kRows, is_row);
  if (row != std::end(kRows)) {
    card = card_of(*row);
  } else {
    const PerClock clock = per_clock(facts.compute_capability, has_part(facts.name, "GeForce"));
    const double clocks = facts.sms * facts.clock_hz;
    card.compute_capability = facts.compute_capability;
    card.tensor_flops = clock.tensor * clocks;
    card.tf32_flops = facts.compute_capability >= 80 ? card.tensor_flops / 2 : 0.0;
    card.fp32_flops = clock.fp32 * clocks;
    card.bytes_per_second = facts.bytes_per_second;
    card.l2_bytes = facts.l2_bytes;
    card.sms = facts.sms;
    card.shared_bytes = facts.shared_bytes;
    card.gemm_flops = gemm_fraction(facts.compute_capability) * card.tensor_flops;
    card.copy_bytes_per_second = kCopyFraction * card.bytes_per_second;
    set_derived_rates(card);
  }
  card.name = facts.name;
  return card;
}

const GpuCard& local_card(int index) {
  static std::mutex mutex;
  static auto* const cards = new std::map<int, GpuCard>;  // outlives threads
  const std::lock_guard lock(mutex);
  const auto found = cards->find(index);
  if (found != cards->end()) return found->second;
  return cards->emplace(index, card_from(card_facts(index))).first->second;
}

const GpuCard& usual_card(int compute_capability) {
  static const GpuCard t4 = gpu_card("T4"), a100 = gpu_card("A100"), rtx3090 = gpu_card("RTX 3090"),
                       rtx4090 = gpu_card("RTX 4090"), h200 = gpu_card("H200"),
                       b200 = gpu_card("B200"), rtx5090 = gpu_card("RTX 5090");
  if (compute_capability < 80) return t4;
  if (compute_capability == 80) return a100;
  if (compute_capability < 89) return rtx3090;
  if (compute_capability < 90) return rtx4090;
  if (compute_capability < 100) return h200;
  return compute_capability < 120 ? b200 : rtx5090;
}

const GpuCard& card_or_usual(const GpuCard& card, int compute_capability) {
  return card.name.empty() ? usual_card(compute_capability) : card;
}

DeviceRates rates_on(const DeviceKernel& kernel, const GpuCard& card, DType dtype,
                     Precision precision) {
  const GpuCard& fitted = usual_card(90);
  const bool wide = dtype == DType::f32 && precision == Precision::ieee;
  const double arithmetic =
      wide ? card.fp32_flops / fitted.fp32_flops : card.gemm_flops / fitted.gemm_flops;
  DeviceRates r = kernel.rates(dtype);
  const double forward = r.by_mma_sync ? card.tile_flops / fitted.tile_flops : arithmetic;
  r.forward_flops *= forward;
  r.gemm_flops *= arithmetic;
  r.logit_seconds /= forward;
  r.sum_seconds /= arithmetic;
  r.bytes_per_second *= r.logit_bytes > 0.0
                            ? card.row_bytes_per_second / fitted.row_bytes_per_second
                            : card.copy_bytes_per_second / fitted.copy_bytes_per_second;
  r.round_flops *= static_cast<double>(card.sms) / fitted.sms;
  if (precision == Precision::tf32)
    r.forward_flops = r.gemm_flops =
        kTf32Fraction * card.tf32_flops * card.gemm_flops / card.tensor_flops;
  return r;
}

FarRates far_rates_on(const DeviceKernel& kernel, const GpuCard& card) {
  const GpuCard& fitted = usual_card(90);
  FarRates r = kernel.far->rates;
  if (kernel.rates(DType::bf16).by_mma_sync)
    r.gemm_fraction *= card.tile_flops / card.gemm_flops * (fitted.gemm_flops / fitted.tile_flops);
  r.tile_seconds *= fitted.gemm_flops / card.gemm_flops;
  r.bytes_per_second *= card.copy_bytes_per_second / fitted.copy_bytes_per_second;
  return r;
}

}  // namespace cuda
}  // namespace logitless
