// Plans for several recorded processors, made on any machine: it matters only by its CpuFacts and
// number of threads.
#include <gtest/gtest.h>

#include <algorithm>
#include <string>
#include <vector>

#include "kernels/cpu_facts.h"
#include "kernels/cpu_head.h"
#include "logitless/logitless.h"

namespace logitless::test {
namespace {

struct Machine {
  const char* name;
  int threads;
  CpuFacts facts;
  const char* f32;   // kernel of f32 and f16 heads
  const char* bf16;  // kernel of bf16 heads
};

CpuFacts with(bool avx2, bool avx512, bool dot, bool tiles, bool fast_dot) {
  CpuFacts facts;
  if (avx2) facts.avx2.clear();
  if (avx512) facts.avx512.clear();
  if (dot) facts.avx512_bf16.clear();
  if (tiles) facts.amx_bf16.clear();
  facts.dot_product_is_fast = fast_dot;
  return facts;
}

const Machine kMachines[] = {
    {"XeonWithAmx", 56, with(true, true, true, true, false), "avx512", "amx_bf16"},
    {"XeonWithoutAmx", 26, with(true, true, true, false, false), "avx512", "avx512"},
    {"XeonWithoutBf16", 16, with(true, true, false, false, false), "avx512", "avx512"},
    {"EpycWithAvx512", 96, with(true, true, true, false, true), "avx512", "avx512_bf16"},
    {"EpycOfTwoCores", 2, with(true, true, true, false, true), "avx512", "avx512_bf16"},
    {"LaptopWithAvx2", 8, with(true, false, false, false, false), "avx2", "avx2"},
    {"NoVectors", 1, CpuFacts{}, "scalar", "scalar"},
};

class Machines : public testing::TestWithParam<Machine> {
 protected:
  // Kernels of other instruction sets are not built, so the best available one is expected.
  static bool has(const std::string& name) {
    const std::vector<std::string> all = kernel_names(false);
    return std::find(all.begin(), all.end(), name) != all.end();
  }
  static LossPlan plan(const HeadShape& shape, const HeadFeatures& features, std::size_t budget,
                       int threads) {
    PlanRequest request;
    request.device.threads = threads;
    request.memory_budget = budget;
    return plan_head(shape, features, request);
  }
};

std::vector<HeadFeatures> all_features(DType dtype) {
  HeadFeatures forward, both, narrow, capped;
  both.d_hidden = both.d_weight = true;
  narrow = both;
  narrow.d_hidden_dtype = narrow.d_weight_dtype = dtype;
  capped = both;
  capped.softcap = 30.0f;
  capped.label_smoothing = capped.bias = capped.d_bias = true;
  return {forward, both, narrow, capped};
}

TEST_P(Machines, ChooseTheirKernelAndSayWhyNotAnother) {
  if (!has("avx2")) GTEST_SKIP() << "a build for another instruction set";
  const AssumedCpu assumed(GetParam().facts);
  for (const DType dtype : {DType::f32, DType::bf16, DType::f16}) {
    const LossPlan p = plan({64, 32, 1000, dtype}, {}, 0, GetParam().threads);
    EXPECT_EQ(p.kernel, dtype == DType::bf16 ? GetParam().bf16 : GetParam().f32);
    for (const HeadKernel& kernel : head_kernels()) {
      if (kernel.name == p.kernel) break;
      EXPECT_NE(p.kernel_reasons.find(std::string(kernel.name) + ": "), std::string::npos)
          << p.kernel_reasons;
    }
  }
}

TEST_P(Machines, PlansHoldWhatIsPromisedOfThem) {
  const AssumedCpu assumed(GetParam().facts);
  const HeadShape shapes[] = {{1, 64, 50257, DType::f32},
                              {1024, 64, 8192, DType::f32},
                              {700, 72, 1671, DType::bf16},
                              {8192, 4096, 128256, DType::bf16},
                              {2048, 2048, 65536, DType::f16}};
  for (const HeadShape& shape : shapes) {
    for (const HeadFeatures& features : all_features(shape.dtype)) {
      SCOPED_TRACE(testing::Message() << shape.tokens << ' ' << shape.dim << ' ' << shape.vocab
                                      << ' ' << name_of(shape.dtype) << ' ' << features.d_weight);
      const int threads = GetParam().threads;
      const LossPlan free = plan(shape, features, 0, threads);
      EXPECT_EQ(free.threads, threads);
      // Chunks determine the bits of sums, so they must not depend on the machine's threads.
      const LossPlan alone = plan(shape, features, 0, 1);
      EXPECT_EQ(free.kind, alone.kind);
      EXPECT_EQ(free.chunk_tokens, alone.chunk_tokens);
      EXPECT_EQ(free.block_vocab, alone.block_vocab);
      for (const std::size_t budget : {256_MiB, 2_GiB, std::size_t{1} << 40}) {
        const LossPlan bounded = plan(shape, features, budget, threads);
        EXPECT_LE(bounded.workspace_bytes(), budget);
        EXPECT_LE(bounded.workspace_bytes(),
                  std::max(bounded.logits_bytes(), free.workspace_bytes()))
            << bounded.explain();
      }
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Recorded, Machines, testing::ValuesIn(kMachines),
                         [](const auto& machine) { return std::string(machine.param.name); });

}  // namespace
}  // namespace logitless::test
