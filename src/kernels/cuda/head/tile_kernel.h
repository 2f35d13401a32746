// The kernels that compute tiles of logits, 128 tokens x 256 vocabulary entries for each CTA, and
// the forward calls that are made of them. A kernel for a kind of GPU gives a TileKernel; the calls
// are the same for all.
#pragma once

#include <cstdint>
#include <string>

#include "kernels/device/gradient.h"

namespace logitless::cuda {

// kPlain: scale alone. kPlainEntropy: scale and entropy. kPlainBest: scale, argmax and entropy.
// kGeneral: bias, softcap, and all outputs beyond lse. kReference: the greatest logit of each token
// and tile, into `best`. kGradient: the gradient of the logits. kPlainGradient: the same with scale
// and cross entropy alone. kLogits: the raw results into `logits`, and into `best` the greatest
// logit with logit_weights added.
enum class ForwardMode {
  kPlain,
  kPlainEntropy,
  kPlainBest,
  kGeneral,
  kReference,
  kGradient,
  kPlainGradient,
  kLogits
};

// Arguments of a launch. Arrays are [vocabulary tiles][padded tokens].
struct ForwardArguments {
  int vocab;
  int token_pairs;  // pairs of token tiles: ceil(tokens / 256)
  int first_pair;   // first pair of this launch
  int launch_pairs;
  int vocab_tiles;   // vocabulary tiles visited
  int steps;         // of the mainloop; the kernel sets it
  int group;         // pairs whose hidden states stay in L2
  int stored_tiles;  // vocabulary tiles with stored exp(z) or gradients
  std::int64_t padded_tokens;
  float scale;
  float cap;
  const float* bias;
  const float* logit_weights;
  const float* reference;  // [padded tokens], integral
  float* sums;             // sums of 2^(z log2e - reference)
  float* entropy;          // sums of x log2 x, x = 2^(z log2e - reference), or null
  float* weighted;         // sums of logit weight times z, or null
  float* best;             // greatest z, or null
  int* best_index;
  // [token_pairs + 1]: 0 skips the pair; the last: 1 + the last pair that is not skipped, or 0.
  // Null: none skipped.
  const int* wanted;
  // Exponentials are stored in f16 times 2^lift [padded tokens], integral, and 2^-shift [tokens, 4
  // vocabulary tiles] of their 64 entries. Null: as they are.
  const float* lifts;
  std::uint8_t* shifts;
  bool smooths;                 // kGradient adds gamma times the logit weights
  const RowCoefficients* rows;  // [padded tokens], for kGradient
  const float* block_scale;     // a factor of the gradients of a block; null: 1
  // [2 vocabulary tiles][padded tokens], far field: for each 128 entries, the sum of the
  // exponentials times the slope of the softcap; null: not wanted. With kGradient and
  // kPlainGradient: their estimates, indexed by `groups`, or null where masses are exact. For
  // sampled tiles see normalize_sampled.
  float* masses;
  const std::int32_t* groups;  // [vocabulary tiles]
  // Tile list of a block-sparse launch: far_entry(vocabulary tile, sampled, pair), entries
  // list_begin[0] to list_begin[vocab_tiles], vocabulary tiles from first_tile on. Null: all tiles.
  const std::uint32_t* list;
  const int* list_begin;
  int first_tile;
  float sampled;                  // factor of sampled tiles in kGradient and kPlainGradient
  const std::int32_t* vocab_ids;  // token ids by position, for argmax; null: the positions
  // Results of the GEMM, [tokens, 256 vocab_tiles]: written with kLogits, read by
  // stored_tiles_sm80.cu and stored_tiles_sm90.cu.
  float* logits;
  std::int64_t tokens;
};

// Operands of a launch: hidden [tokens, dim] and `rows` [vocab, dim] of the weight, or of its rows
// gathered by position.
struct TileOperands {
  DType dtype = DType::bf16;
  std::int64_t tokens = 0;
  std::int64_t dim = 0;
  std::int64_t vocab = 0;
  const void* hidden = nullptr;
  std::int64_t hidden_stride = 0;
  const void* rows = nullptr;
  std::int64_t row_stride = 0;
  LogitBlock block;    // where tiles are stored, unless there are ranges
  VocabRanges ranges;  // likewise
};

struct TileKernel {
  // Returns why it does not support a call, or empty. It checks pointers and strides too.
  std::string (*unsupported)(const ForwardCall& call);
  // Bytes of hidden states that stay in L2 while the weights stream past.
  std::int64_t (*resident_bytes)();
  // Enqueues the tiles. `store`: tiles below arguments.stored_tiles are written to the block.
  void (*launch)(ForwardMode mode, bool store, const TileOperands& operands,
                 const ForwardArguments& arguments, Stream stream);
};

// Returns why rows of hidden and weight cannot be read 16 bytes at a time, or empty.
std::string rows_unsupported(const ForwardCall& call);
// The far field of compute capability 8.0, which gathers rows 16 bytes at a time: returns why it
// does not support such a head, or such a call, or empty.
std::string sm80_far_unsupported(const ForwardShape& shape);
std::string sm80_far_call_unsupported(const ForwardCall& call);

// The kernel of compute capability 8.0 (forward_sm80.cu), which takes any address and stride.
const TileKernel& sm80_tiles();
// The kernel of Hopper (forward_sm90.cu).
const TileKernel& hopper_tiles();

// Entry points of the table of kernels (device/kernel.h), for a kernel of tiles.
void forward_by_tiles(const TileKernel& kernel, const ForwardCall& call);
void target_logits_by_tiles(const TileKernel& kernel, const ForwardCall& call, float* logits);
void begin_forward_by_tiles(const TileKernel& kernel, const ForwardCall& call);
float* local_target_logits(const ForwardCall& call);
void all_tiles(const TileKernel& kernel, const ForwardCall& call);
void selected_tiles(const TileKernel& kernel, const ForwardCall& call);
void gradient_block_by_tiles(const TileKernel& kernel, const BlockCall& block);

// StoredForward::store (device/kernel.h).
void store_by_tiles(const TileKernel& kernel, const ForwardCall& call, const float* logit_bias,
                    float* results, float* tile_tops);

}  // namespace logitless::cuda
