// Interface between the loss engine and the head kernels of a GPU. It includes no CUDA headers. In
// a build without CUDA every call throws the reason, but sizes are known.
//
// Calls enqueue on a stream and return. None waits for the device or allocates on it, except
// DeviceMemory and the copies, which say so.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

#include "logitless/dtype.h"
#include "logitless/head_shape.h"
#include "math/host_device.h"

namespace logitless {
struct TokenRecord;  // math/shard_state.h
}
namespace logitless::cuda {

using Stream = void*;  // a cudaStream_t; null: the default stream

// GPUs that this process sees; 0 without a driver, and in a build without CUDA.
int device_count();
// Returns why device `index` cannot run the kernels, or empty.
std::string device_missing(int index);

// 10 * major + minor.
int compute_capability(int index);
// Current device of the thread.
int current_device();

// Device memory, aligned to 256 bytes. Throws DeviceError when there is not enough.
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

// Both copies wait until they are done.
void copy_to_device(void* to, const void* from, std::size_t bytes, Stream stream);
void copy_to_host(void* to, const void* from, std::size_t bytes, Stream stream);
void fill_device(void* to, int byte, std::size_t bytes, Stream stream);
// Bytes of the current device in use by all processes, as the driver reports them.
std::size_t memory_in_use();
// Waits for the stream. Throws DeviceError with the first error of the work on it.
void synchronize(Stream stream);

// Measures milliseconds between two points of a stream by the device's clock. For benchmarks:
// stop() waits.
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

// Sizes of a forward call, and its outputs beyond lse and target logits.
struct ForwardShape {
  std::int64_t tokens = 0;
  std::int64_t dim = 0;
  std::int64_t vocab = 0;
  DType dtype = DType::bf16;
  int targets_per_token = 1;
  bool entropy = false;
  bool weighted_sum = false;
  bool argmax = false;
  bool gradients = false;  // gradient_gemms is called afterwards
  Precision precision = Precision::ieee;
  DType narrow_weight = DType::f32;  // of a weight of 16 bits beside f32 hidden; f32: `dtype`

  LOGITLESS_HOST_DEVICE DType weight_dtype() const {
    return narrow_weight == DType::f32 ? dtype : narrow_weight;
  }
};

// Blocks are padded to multiples of this many tokens and vocabulary entries, which every kernel's
// tiles divide.
inline constexpr std::int64_t kBlockPadding = 256;

// Exponentials or gradients of the logits of a chunk, [tokens, entries], in the dtype of hidden.
// Rows have `stride` elements. Where a kernel saves no logits it is a multiple of kBlockPadding,
// and columns beyond the entries are 0.
struct LogitBlock {
  void* data = nullptr;
  std::int64_t stride = 0;
};

// A block that is split over several memories. Range r holds the vocabulary entries [first[r],
// first[r + 1]) as a LogitBlock [tokens, its entries]. Ranges begin at multiples of 256.
inline constexpr int kMaxVocabRanges = 8;
struct VocabRanges {
  int count = 0;  // 0: no ranges, one block
  std::int32_t first[kMaxVocabRanges + 1] = {};
  void* data[kMaxVocabRanges] = {};

  LOGITLESS_HOST_DEVICE std::int64_t vocab_count(int r) const { return first[r + 1] - first[r]; }
  LOGITLESS_HOST_DEVICE std::int64_t stride(int r) const {
    return (vocab_count(r) + kBlockPadding - 1) / kBlockPadding * kBlockPadding;
  }
};

struct FarCall;  // far.h

// Rows of a matrix [*, dim]: row i is row rows[i] of the data. Without data: none.
struct ListedRows {
  const void* data = nullptr;
  std::int64_t stride = 0;  // elements
  const std::int32_t* rows = nullptr;
};

// Operands of a chunk's forward. All pointers are of the device. hidden [tokens, dim], of
// shape.dtype, and weight [vocab, dim], of shape.weight_dtype(), have rows of contiguous elements;
// row strides count elements.
//
// The rows of weight may be a shard of a larger vocabulary that the targets refer to. Sums,
// entropies and block columns are then of this shard alone.
struct ForwardOperands {
  ForwardShape shape;
  const void* hidden = nullptr;
  std::int64_t hidden_stride = 0;
  // The original of `hidden`, where that is a copy which the backward may overwrite.
  ListedRows original;
  const void* weight = nullptr;
  std::int64_t weight_stride = 0;
  const float* bias = nullptr;           // [vocab]; -inf masks a vocabulary entry
  const float* logit_weights = nullptr;  // [vocab]: logit weights of weighted_sum; null: 1
  std::int64_t vocab_begin = 0;          // token id of row 0 of weight
  // [vocab], ascending: the token id of each row of weight; null: vocab_begin + row. Only for a
  // kernel with target_logits.
  const std::int32_t* vocab_ids = nullptr;
  std::int64_t global_vocab = 0;  // size of the global vocabulary; 0: vocab
  const void* targets = nullptr;  // [all tokens, K], i32 or i64
  bool int64_targets = false;     // i64
  std::int64_t ignore_index = -100;
  std::int64_t first_token = 0;  // row of targets for row 0 of the chunk
  // [all tokens] the token of each row of the calls; null: the identity
  const std::int32_t* rows = nullptr;
  // T: row i has the target of row i + 1, and the last row of each T has none. 0: row i has target
  // i.
  std::int64_t sequence = 0;
  float logit_scale = 1.0f;
  float softcap = 0.0f;
  // [tokens, K]: logits of all targets, those in other shards included. Exponentials are taken
  // relative to them, so that sums of several shards add up directly. Null: the call computes its
  // own. Only for a kernel with target_logits.
  const float* given_logits = nullptr;

  LOGITLESS_HOST_DEVICE std::int64_t vocab_of_targets() const {
    return global_vocab > 0 ? global_vocab : shape.vocab;
  }
};

// Outputs for each token: fp32 [tokens] or [tokens, K], contiguous. 0 (argmax: -1) for tokens whose
// targets are all ignore_index. Null: not wanted.
struct ForwardOutputs {
  float* lse = nullptr;
  float* lse_rest = nullptr;      // the log-sum-exp less lse, its rounding to fp32
  float* target_logit = nullptr;  // [tokens, K]; 0 for targets outside the shard that are not given
  float* log_prob = nullptr;      // [tokens, K], likewise; NaN for targets out of range
  float* entropy = nullptr;
  float* weighted_sum = nullptr;
  std::int32_t* argmax = nullptr;  // token id of the largest logit in the local shard
  // [tokens], of the local shard: input of merge_records. Null: not wanted. Only for a kernel with
  // target_logits.
  TokenRecord* records = nullptr;
  // First index in [all tokens * K] of a target that is out of range and not ignore_index, or
  // kNoBadTarget. The chunk with first_token 0 initialises it.
  std::uint64_t* bad_target = nullptr;
};

// Values that the forward saves for the gradients.
struct StoredBlock {
  // exp(z) of the first stored_vocab (a multiple of 256, or vocab): block = 2^(z log2e -
  // reference), times the slope of the softcap. 0: none.
  std::int64_t stored_vocab = 0;
  LogitBlock block;
  VocabRanges ranges;          // if count > 0, replaces block for the full vocabulary
  float* reference = nullptr;  // [padded_tokens]: exponents of the block; null: not wanted
  // [padded_tokens / 256 + 1]: 1 if the 256 tokens have a target; the last: 1 + the last such 256,
  // or 0. Null: not wanted.
  int* active = nullptr;
};

// Forward of a chunk of tokens.
struct ForwardCall : ForwardOperands, ForwardOutputs, StoredBlock {
  // Not null: `weight`, `bias` and `logit_weights` are read by position, and masses are written. No
  // argmax.
  const FarCall* far = nullptr;

  void* workspace = nullptr;  // DeviceKernel::workspace_bytes(shape), aligned to 256
  Stream stream = nullptr;
};
inline constexpr std::uint64_t kNoBadTarget = ~std::uint64_t{0};
constexpr std::int64_t padded_tokens(std::int64_t tokens) {
  return tokens <= kBlockPadding ? kBlockPadding
                                 : (tokens + kBlockPadding - 1) / kBlockPadding * kBlockPadding;
}
constexpr std::int64_t padded_vocab(std::int64_t vocab_count) {
  return (vocab_count + kBlockPadding - 1) / kBlockPadding * kBlockPadding;
}

}  // namespace logitless::cuda
