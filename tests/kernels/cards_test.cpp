// The table of cards, and rates of kernels on them.
#include "kernels/device/cards.h"

#include <gtest/gtest.h>

#include "logitless/error.h"
#include "logitless/plan.h"

namespace logitless {
namespace {

cuda::CardFacts facts(const char* name, int capability, int sms) {
  return {.name = name,
          .compute_capability = capability,
          .sms = sms,
          .clock_hz = 1.7e9,
          .bytes_per_second = 1e12,
          .l2_bytes = 1 << 20,
          .shared_bytes = 100 << 10};
}

TEST(Cards, AreFoundByTheDriversName) {
  const struct {
    const char* of_driver;
    const char* name;
  } cases[] = {{"Tesla T4", "T4"},
               {"NVIDIA A10", "A10"},
               {"NVIDIA A100-SXM4-40GB", "A100 40GB"},
               {"NVIDIA A100-PCIE-40GB", "A100 40GB"},
               {"NVIDIA A100-SXM4-80GB", "A100"},
               {"NVIDIA A100 80GB PCIe", "A100"},
               {"NVIDIA GeForce RTX 3090", "RTX 3090"},
               {"NVIDIA GeForce RTX 4090", "RTX 4090"},
               {"NVIDIA L4", "L4"},
               {"NVIDIA L40S", "L40S"},
               {"NVIDIA H100 80GB HBM3", "H100"},
               {"NVIDIA H100 PCIe", "H100 PCIe"},
               {"NVIDIA H100 NVL", "H100 NVL"},
               {"NVIDIA H200", "H200"},
               {"NVIDIA H200 NVL", "H200 NVL"},
               {"NVIDIA B200", "B200"},
               {"NVIDIA GeForce RTX 5090", "RTX 5090"}};
  for (const auto& c : cases) {
    GpuCard expected = gpu_card(c.name);
    expected.name = c.of_driver;
    EXPECT_EQ(cuda::card_from(facts(c.of_driver, expected.compute_capability, expected.sms)),
              expected)
        << c.of_driver;
  }
}

// Relatives with fewer SMs are estimated from their own properties.
TEST(Cards, OthersAreEstimated) {
  for (const char* name : {"NVIDIA GeForce RTX 4090 Laptop GPU", "NVIDIA GeForce RTX 4090 D"}) {
    const GpuCard card = cuda::card_from(facts(name, 89, 76));
    EXPECT_EQ(card.name, name);
    EXPECT_DOUBLE_EQ(card.tensor_flops, 512 * 76 * 1.7e9);
    EXPECT_DOUBLE_EQ(card.fp32_flops, 256 * 76 * 1.7e9);
    EXPECT_EQ(card.bytes_per_second, 1e12);
  }
  EXPECT_EQ(cuda::card_from(facts("NVIDIA L40", 89, 142)).tensor_flops, 1024 * 142 * 1.7e9);
}

// The estimate's constants against the datasheets, at the boost clocks of these cards.
TEST(Cards, EstimatesAgreeWithTheTable) {
  const struct {
    const char* name;
    bool geforce;
    double clock;
  } cases[] = {{"T4", false, 1.59e9},       {"A10", false, 1.695e9},    {"A100", false, 1.41e9},
               {"RTX 3090", true, 1.695e9}, {"RTX 4090", true, 2.52e9}, {"L4", false, 2.04e9},
               {"L40S", false, 2.52e9},     {"H100", false, 1.83e9},    {"H200", false, 1.83e9},
               {"B200", false, 1.86e9},     {"RTX 5090", true, 2.41e9}};
  for (const auto& c : cases) {
    const GpuCard card = gpu_card(c.name);
    cuda::CardFacts other =
        facts(c.geforce ? "NVIDIA GeForce X" : "NVIDIA X", card.compute_capability, card.sms);
    other.clock_hz = c.clock;
    const GpuCard estimated = cuda::card_from(other);
    EXPECT_NEAR(estimated.tensor_flops / card.tensor_flops, 1.0, 0.03) << c.name;
    EXPECT_NEAR(estimated.fp32_flops / card.fp32_flops, 1.0, 0.1) << c.name;
  }
}

TEST(Cards, AnUnknownNameIsRefused) {
  try {
    gpu_card("abacus");
    FAIL();
  } catch (const InvalidArgument& error) {
    EXPECT_EQ(std::string(error.what()).rfind("card: 'abacus' is unknown; expected one of T4, ", 0),
              0u)
        << error.what();
  }
}

TEST(Cards, EachKernelHasItsOwnRatesOnAnH200) {
  for (const cuda::DeviceKernel& kernel : cuda::device_kernels()) {
    for (const DType dtype : {DType::f32, DType::bf16}) {
      const cuda::DeviceRates fitted = kernel.rates(dtype);
      const cuda::DeviceRates rates = cuda::rates_on(kernel, cuda::usual_card(90), dtype);
      EXPECT_EQ(rates.forward_flops, fitted.forward_flops);
      EXPECT_EQ(rates.gemm_flops, fitted.gemm_flops);
      EXPECT_EQ(rates.logit_seconds, fitted.logit_seconds);
      EXPECT_EQ(rates.bytes_per_second, fitted.bytes_per_second);
      EXPECT_EQ(rates.sum_seconds, fitted.sum_seconds);
      EXPECT_EQ(rates.round_flops, fitted.round_flops);
      // An H100 differs by its memory alone.
      const cuda::DeviceRates h100 = cuda::rates_on(kernel, gpu_card("H100"), dtype);
      EXPECT_EQ(h100.gemm_flops, fitted.gemm_flops);
      EXPECT_NEAR(h100.bytes_per_second / fitted.bytes_per_second, 3.35 / 4.8, 0.01);
    }
  }
}

TEST(Cards, APlanTakesTheUsualCardOfTheCapability) {
  HeadFeatures features;
  features.d_hidden = features.d_weight = true;
  PlanRequest request;
  request.device.kind = DeviceKind::cuda;
  const auto seconds = [&](int capability, const GpuCard& card) {
    request.device.compute_capability = capability;
    request.device.card = card;
    return plan_head({.tokens = 4096, .dim = 1024, .vocab = 50257, .dtype = DType::bf16}, features,
                     request)
        .predicted_seconds;
  };
  for (const auto& [capability, name] : {std::pair(80, "A100"),
                                         {86, "RTX 3090"},
                                         {89, "RTX 4090"},
                                         {90, "H200"},
                                         {100, "B200"},
                                         {120, "RTX 5090"}})
    EXPECT_EQ(seconds(capability, {}), seconds(capability, gpu_card(name))) << capability;
  EXPECT_GT(seconds(89, gpu_card("L4")), seconds(89, gpu_card("L40S")));
}

// GEMMs of TF32 sustain less of their peak than those of bf16, 285 / 350 of the share.
TEST(Cards, RatesInTf32) {
  const cuda::DeviceKernel& kernel = cuda::find_device_kernel("cublas");
  const GpuCard card = gpu_card("A100");
  const double a100 = 156e12 * 250 / 312 * 285 / 350;
  const cuda::DeviceRates rates = cuda::rates_on(kernel, card, DType::f32, Precision::tf32);
  EXPECT_NEAR(rates.gemm_flops, a100, 1e-9 * a100);
  EXPECT_NEAR(rates.forward_flops, a100, 1e-9 * a100);
  const GpuCard h200 = gpu_card("H200");
  EXPECT_NEAR(cuda::rates_on(kernel, h200, DType::f32, Precision::tf32).gemm_flops, 285e12, 1e12);
  EXPECT_LT(cuda::rates_on(kernel, card, DType::f32).gemm_flops, 20e12);
}

}  // namespace
}  // namespace logitless
