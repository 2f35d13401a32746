#include <bit>
#include <cstdint>

#include "head/shard_far_plan.h"
#include "kernels/device/cards.h"

namespace logitless {
namespace {

constexpr const char *kSms = "card: sms", *kCalibrated = "card: calibrated";

// Calls visit(name, number) for each rate that predictions read.
template <typename Card, typename Visit>
void each_rate(Card& card, const Visit& visit) {
  visit("card: tensor_flops", card.tensor_flops);
  visit("card: tf32_flops", card.tf32_flops);
  visit("card: fp32_flops", card.fp32_flops);
  visit("card: gemm_flops", card.gemm_flops);
  visit("card: tile_flops", card.tile_flops);
  visit("card: copy_bytes_per_second", card.copy_bytes_per_second);
  visit("card: row_bytes_per_second", card.row_bytes_per_second);
}

}  // namespace

void add_card(const DeviceLimits& device, PlanDigest& digest) {
  const GpuCard& card = cuda::card_or_usual(device.card, device.compute_capability);
  each_rate(card, [&](const char* name, double rate) {
    digest.own(name, std::bit_cast<std::int64_t>(rate));
  });
  digest.own(kSms, card.sms);
  digest.own(kCalibrated, card.calibrated ? 1 : 0);
}

GpuCard card_of_rank_0(const Agreement& agreed) {
  GpuCard card;
  card.name = "rank 0's";
  each_rate(card, [&](const char* name, double& rate) {
    rate = std::bit_cast<double>(agreed.value_of(0, name));
  });
  card.sms = static_cast<int>(agreed.value_of(0, kSms));
  card.calibrated = agreed.value_of(0, kCalibrated) != 0;
  return card;
}

}  // namespace logitless
