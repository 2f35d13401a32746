#include "head/shard_card.h"

#include <bit>
#include <cstdint>

#include "kernels/device/cards.h"

namespace logitless {
namespace {

constexpr const char* kSms = "card: sms";
constexpr const char* kForwardKernel = "card: forward_kernel";

// Calls visit(name, number) for each rate that predictions read.
template <typename Card, typename Visit>
void each_rate(Card& card, const Visit& visit) {
  visit("card: fp32_flops", card.fp32_flops);
  visit("card: gemm_flops", card.gemm_flops);
  visit("card: copy_bytes_per_second", card.copy_bytes_per_second);
  visit("card: forward_flops", card.forward_flops);
}

}  // namespace

void add_card(const DeviceLimits& device, PlanDigest& digest) {
  const GpuCard& card = cuda::card_or_usual(device.card, device.compute_capability);
  each_rate(card, [&](const char* name, double rate) {
    digest.own(name, std::bit_cast<std::int64_t>(rate));
  });
  digest.own(kSms, card.sms);
  const auto kernels = cuda::device_kernels();
  std::int64_t kernel = 0;  // index of the measured one, from 1; 0: none
  for (std::size_t i = 0; i < kernels.size(); ++i) {
    if (card.forward_kernel == kernels[i].name) kernel = static_cast<std::int64_t>(i) + 1;
  }
  digest.own(kForwardKernel, kernel);
}

GpuCard card_of_rank_0(const Agreement& agreed) {
  GpuCard card;
  card.name = "rank 0's";
  each_rate(card, [&](const char* name, double& rate) {
    rate = std::bit_cast<double>(agreed.value_of(0, name));
  });
  card.sms = static_cast<int>(agreed.value_of(0, kSms));
  const std::int64_t kernel = agreed.value_of(0, kForwardKernel);
  if (kernel > 0)
    card.forward_kernel = cuda::device_kernels()[static_cast<std::size_t>(kernel - 1)].name;
  return card;
}

}  // namespace logitless
