// Workspaces of the GPU kernels depend on shapes alone: they are the same in every build, with or
// without CUDA. The figures are counted by hand from the buffers of the kernels.
#include <gtest/gtest.h>

#include "kernels/cuda/head/sizes.h"
#include "kernels/cuda/tensor/attention/sizes.h"
#include "kernels/device/attention.h"
#include "kernels/device/kernel.h"
#include "kernels/device/loss.h"
#include "logitless/error.h"

namespace logitless::cuda {
namespace {

ForwardShape gpt2_head(std::int64_t tokens) {
  ForwardShape shape;
  shape.tokens = tokens;
  shape.dim = 768;
  shape.vocab = 50257;  // 197 tiles of 256
  return shape;
}
// A head of f32 products.
ForwardShape head(std::int64_t tokens, std::int64_t dim, std::int64_t vocab,
                  Precision precision = Precision::ieee, DType narrow_weight = DType::f32) {
  ForwardShape shape;
  shape.tokens = tokens;
  shape.dim = dim;
  shape.vocab = vocab;
  shape.dtype = DType::f32;
  shape.precision = precision;
  shape.narrow_weight = narrow_weight;
  return shape;
}

TEST(DeviceSizes, TheTableOfKernelsIsInEveryBuild) {
  ASSERT_EQ(device_kernels().size(), 6u);
  EXPECT_EQ(find_device_kernel("hopper").unsupported(gpt2_head(1024)), "");
  ForwardShape odd = gpt2_head(1024);
  odd.dim = 12;
  EXPECT_EQ(find_device_kernel("hopper").unsupported(odd), "dim: expected a multiple of 8, got 12");
  EXPECT_THROW(find_device_kernel("hoper"), InvalidArgument);
}

TEST(DeviceSizes, OfTheHopperForward) {
  // References and target logits, two rows of flags of 5 ints, a flag for each token, and a sum for
  // each token and tile.
  constexpr std::size_t kPlain = 2 * 4096 + 2 * 256 + 1024 + 1024 * 197 * 4;
  ForwardShape shape = gpt2_head(1024);
  EXPECT_EQ(hopper_workspace_bytes(shape), kPlain);
  shape.tokens = 1000;  // tokens are padded; target logits only to 256 bytes
  EXPECT_EQ(hopper_workspace_bytes(shape), kPlain);
  shape.entropy = shape.weighted_sum = shape.argmax = true;
  EXPECT_EQ(hopper_workspace_bytes(shape), kPlain + 4 * (1024 * 197 * 4));
}

TEST(DeviceSizes, OfTheHopperProducts) {
  // 4 x 3 tiles of d_hidden in ceil(786 / 16) stretches and 197 x 3 of d_weight, a counter each. 12
  // tiles are few for 66 clusters: a share of 66 / (12 + 3 x 21 / 4) = 2.38 gives split-K by 5.
  constexpr std::size_t kCounters = (12 * 50 + 591) * 4;
  constexpr std::size_t kPace = (kCounters + 255) / 256 * 256;
  EXPECT_EQ(hopper_gemms_bytes(gpt2_head(1024)), 5 * kPace + 5 * 1024 * 768 * 4);
  // 128 x 3 tiles keep all clusters busy: no split-K, and no partial sums.
  constexpr std::size_t kMany = ((384 * 50 + 591) * 4 + 255) / 256 * 256;
  EXPECT_EQ(hopper_gemms_bytes(gpt2_head(32768)), kMany);
  ForwardShape shape = gpt2_head(1024);
  shape.gradients = true;
  EXPECT_EQ(hopper_workspace_bytes(shape), 5 * kPace + 5 * 1024 * 768 * 4);
}

TEST(DeviceSizes, OfStripsOfGradients) {
  // A strip of 5376 rows of fp32 and as much for cuBLAS; a small head has strips of a quarter of
  // its rows, at least 256. In bf16x3 a strip is 32 MiB, or its splits are 64.
  EXPECT_EQ(cublas_gemms_bytes(head(32768, 768, 50257)), 2 * std::size_t{5376} * 768 * 4);
  EXPECT_EQ(cublas_gemms_bytes(head(17, 8, 300)), 2u * 256 * 8 * 4);
  EXPECT_EQ(cublas_strip_rows(768, Precision::bf16x3, false), 5376);
  EXPECT_EQ(cublas_strip_rows(4096, Precision::bf16x3, false), 2048);
}

TEST(DeviceSizes, KernelsSayWhatSharedMemoryTheyNeed) {
  EXPECT_EQ(capability_refusal(find_device_kernel("sm80"), 80), "");
  EXPECT_EQ(capability_refusal(find_device_kernel("sm80"), 89),
            "needs 163 KiB of shared memory for a thread block, the GPU has 99");
  EXPECT_EQ(capability_refusal(find_device_kernel("sm86"), 89), "");
}

TEST(DeviceSizes, OfCublas) {
  // A strip of 16 MiB, as much for cuBLAS, 40 bytes and a target's logit a token, and 64 tokens.
  EXPECT_EQ(sizeof(CublasRow), 40u);
  constexpr std::size_t kFew = 64 * 768 * 2;
  EXPECT_EQ(cublas_workspace_bytes(gpt2_head(1024)), (32u << 20) + 1024 * 44 + kFew);
  // The entries of a strip are the same for any number of tokens.
  for (const std::int64_t tokens : {1, 100, 512, 1024, 32768}) {
    EXPECT_EQ(CublasLayout(gpt2_head(tokens)).strip_vocab, 8192);
    EXPECT_EQ(CublasLayout(gpt2_head(tokens)).strip_tokens, tokens <= 256 ? 256 : 512);
  }
  EXPECT_EQ(cublas_workspace_bytes(gpt2_head(100)), (16u << 20) + 4096 + 512 + kFew);
  EXPECT_EQ(cublas_workspace_bytes(gpt2_head(0)), (16u << 20) + 2 * 256);
  // Strips of the gradient GEMMs: 5376 rows of 768 floats.
  EXPECT_EQ(cublas_strip_rows(768, Precision::ieee, false), 5376);
  EXPECT_EQ(cublas_gemms_bytes(head(100, 768, 50257)), 2u * 5376 * 768 * 4);
  EXPECT_EQ(cublas_gemms_bytes(head(100, 768, 300)), 2u * 256 * 768 * 4);
  EXPECT_EQ(cublas_strip_rows(100000, Precision::ieee, false), 256);
}

// Splits of an operand that several products read: all of them, or as many as fit 64 MiB.
TEST(DeviceSizes, OfSplits) {
  EXPECT_EQ(stretch_bytes(2048, 4096), std::size_t{6} * 2048 * 2048);
  EXPECT_EQ(stretch_bytes(9, 13), 16u * 16 * 6);
  EXPECT_EQ(split_bytes(2048, 4097), std::size_t{6} * 2048 * 4096 + 2048 * 8 * 6);
  EXPECT_EQ(kept_stretches(2048, 4096), 2);
  EXPECT_EQ(kept_stretches(2048, 8192), 1);  // two of four, and one that the others share
  EXPECT_EQ(shared_split_bytes(2048, 8192), std::size_t{64} << 20);
  EXPECT_EQ(kept_stretches(16384, 8192), 0);
  EXPECT_EQ(shared_split_bytes(16384, 8192), stretch_bytes(16384, 8192));
  std::size_t before = 0, gemms = 0;
  for (std::int64_t tokens = 1; tokens < 9000; tokens += 300) {
    const std::size_t bytes = shared_split_bytes(2304, tokens);
    const std::int64_t kept = kept_stretches(2304, tokens) * kSplitStretch;
    const std::size_t last = tokens > kept ? stretch_bytes(2304, tokens) : 0;
    EXPECT_LE(split_bytes(2304, std::min(kept, tokens)) + last, bytes);
    EXPECT_GE(bytes, before);
    before = bytes;
    const ForwardShape large = head(tokens, 4096, 128256, Precision::bf16x3);
    EXPECT_GE(bf16x3_gemms_bytes(large), gemms);
    gemms = bf16x3_gemms_bytes(large);
  }
  ForwardShape shape = gpt2_head(1024);
  shape.dtype = DType::f32;
  shape.precision = Precision::bf16x3;
  const CublasLayout layout(shape);
  EXPECT_EQ(layout.strip_vocab, kMostSplitStripVocab);
  EXPECT_EQ(layout.total - layout.split_hidden,
            shared_split_bytes(1024, 768) + stretch_bytes(kMostSplitStripVocab, 768));
}

// Rows of a 16-bit weight in f32: 32 MiB, or a strip of a small vocabulary; none in bf16x3. Strips
// of logits have as many bytes as without, those of d_hidden twice as many.
TEST(DeviceSizes, OfAWeightThatIsWidened) {
  const ForwardShape plain = head(2048, 4096, 128256);
  const ForwardShape wide = head(2048, 4096, 128256, Precision::tf32, DType::bf16);
  const CublasLayout layout(wide);
  EXPECT_EQ(layout.strip_vocab, 2048);
  EXPECT_EQ(layout.strip_tokens, 2048);
  EXPECT_EQ(layout.total, CublasLayout(plain).total + (std::size_t{32} << 20));
  EXPECT_EQ(cublas_gemms_bytes(wide), 3 * (std::size_t{32} << 20));
  EXPECT_EQ(cublas_gemms_bytes(plain), 2 * (std::size_t{16} << 20));
  EXPECT_EQ(wide_rows(300, 37), 256);
  const ForwardShape split = head(2048, 4096, 128256, Precision::bf16x3, DType::bf16);
  EXPECT_EQ(bf16x3_workspace_bytes(split),
            bf16x3_workspace_bytes(head(2048, 4096, 128256, Precision::bf16x3)));
}

// A chunk of fewer tokens uses the workspace of a larger one.
TEST(DeviceSizes, OfCublasGrowWithTokens) {
  std::size_t strip = 0, total = 0;
  for (std::int64_t tokens = 0; tokens <= 5000; tokens += tokens < 300 ? 7 : 100) {
    const CublasLayout layout(gpt2_head(tokens));
    EXPECT_GE(layout.total, total);
    EXPECT_GE(layout.gemm, strip);
    EXPECT_LE(static_cast<std::size_t>(layout.strip_tokens * layout.strip_vocab * 4), layout.gemm);
    EXPECT_LE(layout.strip_vocab, kMostStripVocab);
    EXPECT_EQ(layout.strip_vocab % kBlockPadding, 0);
    total = layout.total;
    strip = layout.gemm;
  }
}

TEST(DeviceSizes, OfLossesAndColumnSums) {
  EXPECT_EQ(loss_workspace_bytes(0), 512u);
  EXPECT_EQ(loss_workspace_bytes(1792), 256 + 512u);  // 7 blocks of 40 bytes
  EXPECT_EQ(column_sum_workspace_bytes(50257), (1 << 18) * 4u);
  EXPECT_EQ(column_sum_workspace_bytes(100), 100 * 64 * 4u);
  EXPECT_EQ(column_sum_workspace_bytes(1 << 20), (1 << 20) * 2 * 4u);
  // A last block of 43684 entries after one of 87388 is cut into 6 parts, not 2.
  for (const std::int64_t all : {100, 4097, 50257, 87388, 131073, 300000}) {
    std::int64_t most = 0;
    for (std::int64_t columns = 1; columns <= all; ++columns)
      most = std::max(most, columns * column_sum_parts(columns));
    EXPECT_LE(most * 4, static_cast<std::int64_t>(column_sum_workspace_bytes(all))) << all;
  }
}

TEST(DeviceSizes, OfAttention) {
  AttentionCall call;
  call.batch = 2;
  call.heads = call.kv_heads = 12;
  call.queries = call.keys = 1000;
  call.dim = 64;
  call.dtype = DType::bf16;
  call.scale = 0.125f;
  EXPECT_EQ(attention_unsupported(call, 90), "");
  EXPECT_EQ(attention_scratch_bytes(call, false, 90), 0u);
  // A sum of each row.
  EXPECT_EQ(attention_scratch_bytes(call, true, 80), 24 * 1000 * 4u);
  // 1024 padded rows a head: a reference, a sum and d_q in fp32 for each; a counter of each tile of
  // 128, and one more.
  EXPECT_EQ(attention_scratch_bytes(call, true, 90), 24 * 1024 * (2 + 64) * 4 + 1024u);
  call.dim = 80;  // as 128, in tiles of 64
  EXPECT_EQ(attention_scratch_bytes(call, true, 90), 24 * 1024 * (2 + 128) * 4 + 1792u);
  call.dtype = DType::f32;
  EXPECT_EQ(attention_scratch_bytes(call, true, 90), 24 * 1000 * 4u);
}

}  // namespace
}  // namespace logitless::cuda
