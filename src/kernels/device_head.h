// The head on a GPU: what the loss engine asks of the device kernels. No CUDA headers here: a build
// without CUDA answers every call with the reason, but knows what calls need.
//
// Calls enqueue on a stream and return: nothing here waits for the device or allocates on it, but
// for DeviceMemory and the copies, which say so.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

#include "logitless/dtype.h"
#include "math/host_device.h"

namespace logitless {
struct TokenRecord;  // math/shard_state.h
}
namespace logitless::cuda {

using Stream = void*;  // a cudaStream_t; null: the default stream

// GPUs this process sees; 0 without a driver, and in a build without CUDA.
int device_count();
// Empty, or why device `index` cannot run the kernels.
std::string device_missing(int index);

// 10 * major + minor.
int compute_capability(int index);
// The thread's.
int current_device();

// Memory of a device, aligned to 256 bytes. Throws DeviceError when it is short.
class DeviceMemory {
 public:
  DeviceMemory() = default;
  explicit DeviceMemory(std::size_t bytes);
  ~DeviceMemory();
  DeviceMemory(DeviceMemory&& other) noexcept;
  DeviceMemory& operator=(DeviceMemory&& other) noexcept;
  DeviceMemory(const DeviceMemory&) = delete;
  DeviceMemory& operator=(const DeviceMemory&) = delete;
  void* data() const { return data_; }
  std::size_t bytes() const { return bytes_; }

 private:
  void* data_ = nullptr;
  std::size_t bytes_ = 0;
};

// Both wait for the copy.
void copy_to_device(void* to, const void* from, std::size_t bytes, Stream stream);
void copy_to_host(void* to, const void* from, std::size_t bytes, Stream stream);
void fill_device(void* to, int byte, std::size_t bytes, Stream stream);
// Bytes of the current device that are taken, by whomever, as its driver has it.
std::size_t memory_in_use();
// Waits for the stream. Throws DeviceError with the first error of what ran on it.
void synchronize(Stream stream);

// Milliseconds between two points of a stream, by the device's clock. For benchmarks: stop waits.
class Timer {
 public:
  Timer();
  ~Timer();
  Timer(const Timer&) = delete;
  Timer& operator=(const Timer&) = delete;
  void start(Stream stream);
  float stop(Stream stream);

 private:
  void* events_[2] = {};
};

// Sizes of a forward call, and which outputs it has beyond lse and target logits.
struct ForwardShape {
  std::int64_t tokens = 0;
  std::int64_t dim = 0;
  std::int64_t vocab = 0;
  DType dtype = DType::bf16;
  int targets_per_token = 1;
  bool entropy = false;
  bool weighted_sum = false;
  bool argmax = false;
  bool gradients = false;  // calls of gradient_products follow
};

// Exponentials or gradients of the logits of a chunk of tokens, [tokens, words], in the dtype of
// hidden. Rows of `stride` elements; on the Hopper kernels a multiple of 256, and columns up to it
// are 0 past the last word.
struct LogitBlock {
  void* data = nullptr;
  std::int64_t stride = 0;
};

// A block of more words than one memory has room for: range r holds the words [first[r], first[r +
// 1]) as a LogitBlock of its own, [tokens, its words]. Ranges begin at multiples of 256.
inline constexpr int kMostWordRanges = 8;
struct WordRanges {
  int count = 0;  // 0: no ranges, one block
  std::int32_t first[kMostWordRanges + 1] = {};
  void* data[kMostWordRanges] = {};

  LOGITLESS_HOST_DEVICE std::int64_t words(int r) const { return first[r + 1] - first[r]; }
  LOGITLESS_HOST_DEVICE std::int64_t stride(int r) const { return (words(r) + 255) / 256 * 256; }
};

struct FarCall;  // device_far.h

// What a chunk of tokens is multiplied from. All pointers are the device's. hidden [tokens, dim]
// and weight [vocab, dim], rows of contiguous elements, row strides in elements.
//
// The rows of weight may be some words of a larger vocabulary, that of the targets: sums, entropies
// and block columns are then of these words alone.
struct ForwardOperands {
  ForwardShape shape;
  const void* hidden = nullptr;
  std::int64_t hidden_stride = 0;
  const void* weight = nullptr;
  std::int64_t weight_stride = 0;
  const float* bias = nullptr;   // [vocab]; -inf masks a word
  const float* omega = nullptr;  // [vocab]: weights of weighted_sum; null: 1
  std::int64_t first_word = 0;   // that row 0 of weight is
  // [vocab], ascending: the words that rows of weight are; null: from first_word on. Only by a
  // kernel with target_logits.
  const std::int32_t* word_table = nullptr;
  std::int64_t whole_vocab = 0;   // words that targets may be; 0: vocab
  const void* targets = nullptr;  // [all tokens, K], i32 or i64
  bool wide_targets = false;      // i64
  std::int64_t ignore_index = -100;
  std::int64_t first_token = 0;  // row of targets that row 0 of the chunk belongs to
  // [all tokens] the token of each row of the calls; null: the identity.
  const std::int32_t* rows = nullptr;
  // T: row i has the target of row i + 1, and the last row of each T none. 0: its own.
  std::int64_t sequence = 0;
  float logit_scale = 1.0f;
  float softcap = 0.0f;
  // [tokens, K]: the logits of all targets, of those in other words' rows, too. Exponentials are
  // taken against them, so that sums over several calls' words add up as they are. Null: the call
  // multiplies its own. Only by a kernel with target_logits.
  const float* given_logits = nullptr;

  LOGITLESS_HOST_DEVICE std::int64_t vocab_of_targets() const {
    return whole_vocab > 0 ? whole_vocab : shape.vocab;
  }
};

// What it says of each token: fp32 [tokens] or [tokens, K], contiguous; 0 (argmax: -1) for tokens
// whose targets are all ignore_index. Null: not wanted.
struct ForwardOutputs {
  float* lse = nullptr;
  float* target_logit = nullptr;  // [tokens, K]; 0 for targets neither here nor given
  float* log_prob = nullptr;      // [tokens, K], likewise; NaN where bad_target would name it
  float* entropy = nullptr;
  float* weighted_sum = nullptr;
  std::int32_t* argmax = nullptr;  // of the words here, which word it is
  // [tokens], of the words here: what merge_records needs of each call's. Null: not wanted. Only by
  // a kernel with target_logits.
  TokenRecord* records = nullptr;
  // The first position [all tokens * K] whose target is no word and not ignore_index, or
  // kNoBadTarget. The chunk whose first_token is 0 sets it.
  std::uint64_t* bad_target = nullptr;
};

// What it keeps for the gradients.
struct StoredBlock {
  // exp(z) of the first stored_words (a multiple of 256, or vocab): block = 2^(z log2e -
  // reference), times the slope of the softcap. 0: none.
  std::int64_t stored_words = 0;
  LogitBlock block;
  WordRanges ranges;           // instead of block, where there are any: of all words
  float* reference = nullptr;  // [padded_tokens]: exponents of the block; null: not wanted
  int* active = nullptr;       // [padded_tokens / 256 + 1]: whether 256 tokens have a target; then
                               // whether any has; null: not wanted
};

// A chunk of tokens.
struct ForwardCall : ForwardOperands, ForwardOutputs, StoredBlock {
  // Of the far field: weight, bias and omega are read by position, and masses are left. No argmax.
  const FarCall* far = nullptr;

  void* workspace = nullptr;  // DeviceKernel::workspace_bytes(shape), aligned to 256
  Stream stream = nullptr;
};
inline constexpr std::uint64_t kNoBadTarget = ~std::uint64_t{0};
constexpr std::int64_t padded_tokens(std::int64_t tokens) {
  return tokens <= 256 ? 256 : (tokens + 255) / 256 * 256;
}
constexpr std::int64_t padded_words(std::int64_t words) { return (words + 255) / 256 * 256; }

}  // namespace logitless::cuda
