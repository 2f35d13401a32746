// Rates of kernels on a card, and the card of a local GPU.
#pragma once

#include <cstdint>
#include <string>

#include "kernels/device/kernel.h"
#include "logitless/gpu_card.h"

namespace logitless::cuda {

// Properties of a GPU as the driver reports them.
struct CardFacts {
  std::string name;
  int compute_capability = 0;
  int sms = 0;
  double clock_hz = 0.0;  // the highest
  double bytes_per_second = 0.0;
  std::int64_t l2_bytes = 0;
  std::int64_t shared_bytes = 0;  // of an SM
  std::string driver = {};        // the CUDA version of the driver, as "13.0"
};
// Asks the driver. Throws Unsupported in a build without CUDA.
CardFacts card_facts(int index);

// Returns the table's card of the name "NVIDIA A100-SXM4-80GB" with as many SMs, or an estimate
// from SMs, clock and bandwidth. Other cards of a family (Ti, Laptop, a MIG slice) have other SM
// counts.
GpuCard card_from(const CardFacts& facts);
// Returns the nominal card of a local GPU, asked for once in a process.
const GpuCard& local_card(int index);
// Returns the card that plans assume for a compute capability: an H200 for 90, an A100 for 80.
const GpuCard& usual_card(int compute_capability);
// Returns `card`, or the usual one if it has no name.
const GpuCard& card_or_usual(const GpuCard& card, int compute_capability);

// Returns a kernel's rates on a card, scaled from those on an H200:
// - arithmetic by the sustained GEMMs. For ieee products of f32 by the fp32 peak. For those of tf32
//   by its peak and the fraction of the peak that GEMMs sustain.
// - the forward of a mma.sync kernel by what such a forward sustains
// - traffic by the bandwidth of copies, or of passes over logits if the kernel writes them
DeviceRates rates_on(const DeviceKernel& kernel, const GpuCard& card, DType dtype,
                     Precision precision = Precision::ieee);
// Does the same for a kernel's far field.
FarRates far_rates_on(const DeviceKernel& kernel, const GpuCard& card);

}  // namespace logitless::cuda
