// The table of head kernels on GPUs. A kernel's entry has all that planners and engines know of it:
// where it runs, its tiles and rates, what it declines, and its entry points.
#pragma once

#include <span>
#include <string>
#include <string_view>

#include "kernels/device/gradient.h"

namespace logitless::cuda {

// Tokens that a kernel in strips (cublas_kernel.cu) multiplies at once, at most.
inline constexpr std::int64_t kStripTokens = 2048;

// Nominal rates of the parts of a plan, for the planner, fitted with bench_head --device cuda
// (docs/develop/benchmarks.md).
struct DeviceRates {
  double forward_flops;
  double gemm_flops;
  double logit_seconds;    // for each exponential that the GEMMs do not hide
  double logit_bytes = 0;  // written and read for each logit that is computed
  // Written and read for each element of the weight, by each pass over it for kStripTokens tokens.
  double weight_bytes = 0;
  double bytes_per_second;  // for traffic beyond the operands, partly hidden
  double sum_seconds;       // for each element of split sums between chunks, beside their bytes
  double chunk_seconds;     // small kernels and launches
  double block_seconds;
  // Operations, for each token, of one round of d_weight tiles over all SMs. 0: a partial round
  // costs nothing.
  double round_flops;
  bool by_mma_sync = false;  // the forward's tiles; GpuCard::tile_flops scales them
};

// Rates of far-field plans, fitted to plans of two heads (docs/develop/log/far_field_figures.md).
struct FarRates {
  double gemm_fraction;  // throughput of the selected tiles' GEMMs relative to the dense ones
  double chunk_seconds;
  double block_seconds;
  double tile_seconds;      // for each token and tile: its mass is estimated, sorted and read
  double bytes_per_second;  // of gathered and written rows
  double selected_groups;   // groups that some block selects, relative to the selected pairs
};

// The far-field part of a kernel: the stages of its forward, between which the engine selects
// tiles.
struct FarForward {
  FarRates rates;
  // Returns why it does not support such a head, or empty.
  std::string (*head_unsupported)(const ForwardShape& shape);
  // Returns why it does not support a call, or empty. It checks pointers and strides too.
  std::string (*unsupported)(const ForwardCall& call);
  // Computes target logits and references.
  void (*begin)(const ForwardCall& call);
  // Returns the logits [tokens, K] that `begin` wrote, for code that permutes tokens.
  float* (*target_logits)(const ForwardCall& call);
  // Computes all tiles, writes their masses and the outputs.
  void (*all_tiles)(const ForwardCall& call);
  // Computes the tiles of call.far->list alone; the outputs include the estimates of the others.
  void (*selected_tiles)(const ForwardCall& call);
};

// The forward of a kernel in two parts, between which samples are drawn (sample.h): its GEMM stores
// fp32 results, and the epilogue runs on them.
struct StoredForward {
  // Log-probabilities have the bits of `forward` where each chunk but the last has a multiple of so
  // many tokens.
  std::int64_t (*unit_tokens)(const ForwardShape& shape);
  // Writes the results of a call's GEMM, before bias, scale and softcap, to `results` [tokens,
  // padded_vocab(vocab)]. tile_tops [vocabulary tiles of 256][padded_tokens(tokens)]: the greatest
  // logit of each tile and token, with logit_bias [vocab] added at last unless it is null.
  void (*store)(const ForwardCall& call, const float* logit_bias, float* results, float* tile_tops);
  // Computes the call's outputs from the results in the memory of call.block. Neither entropy nor
  // weighted sum nor argmax.
  void (*forward)(const ForwardCall& call);
};

// Tokens of which gradient GEMMs read nothing where 256 of them are all ignored: none; those behind
// the tokens that are expected to count (PlanRequest::expected_ignored); any.
enum class GemmsSkip : std::uint8_t { nothing, beyond_expected, ignored };

// Entry points of the GEMM kernels for one kind of GPU. Those that enqueue work are null in a build
// without CUDA, where there is no context to call them with.
struct DeviceKernel {
  const char* name;
  // The GEMM of d_weight reads a copy of hidden that is 0 for ignored tokens in every block, and
  // not only in those of stored exponentials. So these tokens may hold NaN.
  bool copies_hidden;
  // Sums a 16-bit d_weight over chunks, or onto its contents, by GradientGemmsCall::running.
  // Otherwise the sum is fp32 and is rounded at the end.
  bool splits_sums;
  // Computes no logits of 256 tokens that are all ignored.
  bool skips_ignored;
  // Its gradient GEMMs read nothing of such tokens.
  GemmsSkip gemms_skip;
  // Takes the exponentials of the forward in ranges of the vocabulary.
  bool takes_ranges;
  // Takes references of the whole vocabulary (given_logits): a vocabulary shard's sums add up.
  bool takes_shards;
  // Compute capabilities that it runs on, 10 * major + minor.
  int least_capability;
  int most_capability;
  // Shared memory that a thread block needs, KiB.
  int shared_kib;
  // Units of chunks and of vocabulary blocks; divisors of kBlockPadding.
  std::int64_t tile_tokens;
  std::int64_t tile_vocab;
  DeviceRates (*rates)(DType dtype);  // on an H200; rates_on() of cards.h scales them
  // Returns why it does not support such a head, or empty.
  std::string (*unsupported)(const ForwardShape& shape);
  std::size_t (*workspace_bytes)(const ForwardShape& shape);
  // Bytes of kernel_workspace for a chunk and blocks of at most its vocabulary; null: all.
  std::size_t (*gemms_bytes)(const ForwardShape& shape);
  // Returns what this process lacks to run it, such as a library, or empty. Null: nothing.
  const std::string& (*missing)();
  // Sets up what a thread needs once and must not set up during graph capture. Null: nothing.
  void (*prepare)();
  // Enqueues the forward of a chunk. Deterministic: the same inputs give the same bits. Throws
  // DeviceError when a launch is refused.
  void (*forward)(const ForwardCall& call);
  // Computes, before the forward of a chunk, logits [tokens, K]: z of the targets in the local
  // shard, 0 for all others. Another call takes them as given_logits. Uses no workspace. Null: the
  // forward needs no references and takes none.
  void (*target_logits)(const ForwardCall& call, float* logits);
  const FarForward* far;  // null: the far field is not supported
  // Fills the block with the gradient of the logits of the block's entries, without the targets'
  // own part.
  void (*gradient_block)(const BlockCall& call);
  void (*gradient_gemms)(const GradientGemmsCall& call);
  const StoredForward* stored = nullptr;  // null: samples take programs
};

// Best first.
std::span<const DeviceKernel> device_kernels();
// Throws InvalidArgument that lists the kernels.
const DeviceKernel& find_device_kernel(std::string_view name);
// Returns why a kernel does not run on GPUs of a compute capability, or empty.
std::string capability_refusal(const DeviceKernel& kernel, int compute_capability);
// Returns the kernel of the name, or else the first of gpu_kernels(), that has a far field for the
// compute capability and the head. Throws Unsupported with the refusals.
const DeviceKernel& find_far_kernel(int compute_capability, std::string_view wanted = {},
                                    const ForwardShape& shape = {});

}  // namespace logitless::cuda
