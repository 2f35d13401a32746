// An order of the vocabulary whose tiles of 128 words hold similar ones: what the far field
// (docs/far_field.md) walks instead of word ids. The caller's tensors stay in their own order.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "logitless/context.h"
#include "logitless/export.h"
#include "logitless/sharding.h"
#include "logitless/tensor_view.h"

namespace logitless {

struct OrderOptions {
  // Words are grouped by average probability into this many strata, each then split by repeated
  // principal-direction bisection of its rows of the weights, down to a tile. 1 to 4096.
  std::int64_t strata = 16;
  // Of the starting directions of power iteration.
  std::uint64_t seed = 0;
};

// Immutable; copies share their data, and any number of threads may use one. On a GPU the first
// call with an order copies it there (12 B * vocab, kept with it) and waits for that.
class LOGITLESS_API VocabOrder {
 public:
  VocabOrder() = default;
  // words: a permutation of [0, vocab), position by position. average: each word's average
  // probability (any positive scale), by word id. Throws InvalidArgument when it is no permutation,
  // or an average is not finite or negative.
  VocabOrder(std::span<const std::int64_t> words, std::span<const float> average);

  bool empty() const { return data_ == nullptr; }
  std::int64_t vocab() const;
  std::span<const std::int64_t> words() const;      // [vocab] the word at each position
  std::span<const std::int32_t> positions() const;  // [vocab] the position of each word
  std::span<const float> average() const;           // [vocab] by word
  // [vocab] by position: average / its sum over the tile, tiles of 128 positions.
  std::span<const float> share() const;

  // With what Accuracy::far_both needs (measure_tiles).
  bool has_moments() const;
  std::int64_t dim() const;                     // of the moments; 0 without
  std::span<const float> axes() const;          // [dim, dim] rows: the forms' axes
  std::span<const float> variance() const;      // [tiles, dim] of each tile along them
  std::span<const float> log2_caution() const;  // [tiles] >= 0
  // The same order with these. Throws InvalidArgument on other sizes or numbers that are not
  // finite.
  VocabOrder with_moments(std::int64_t dim, std::span<const float> axes,
                          std::span<const float> variance,
                          std::span<const float> log2_caution) const;

  // With what ranks take tokens in one order by (share_order): [words of all ranks] the place of
  // each word in the orders of the ranks one after another; empty without.
  std::span<const std::int32_t> places() const;

  // A safetensors file: words i64 [vocab], average f32 [vocab]; axes, variance, log2_caution f32 if
  // there are moments; places i32 if it is shared. Throws Error (file), or what the constructor
  // throws.
  void save(const std::string& path) const;
  static VocabOrder load(const std::string& path);

 private:
  friend struct VocabOrderAccess;
  struct Data;
  std::shared_ptr<const Data> data_;
};

// The average probability of each word, mean_i softmax(scale * (hidden_i . weight_j + bias_j)),
// over the rows of hidden [..., D]: a sample of a thousand or two serves. Two passes over rows *
// vocab * dim at most; extra memory: a plan of memory_budget (0: the default), 4 B * vocab beside
// the result. On a GPU the tensors are in its memory and the result is not: it waits, and takes 8 B
// * vocab and 12 B * rows there; throws DeviceError. With a softcap c, where z_ij is the capped
// logit, the average of p_ij (1 - (z_ij / c)^2): what the gradients of the words go by. With a
// sharding it is collective: of this rank's words, over all ranks' tokens where
// these are spread, too; throws on all ranks what one of them throws.
LOGITLESS_API std::vector<float> average_probability(
    const Context& context, const ConstTensorView& hidden, const ConstTensorView& weight,
    const ConstTensorView& bias = {}, float logit_scale = 1.0f, float softcap = 0.0f,
    std::size_t memory_budget = 0, const Sharding& sharding = {});

// The order of weight [V, D] (f32, bf16 or f16, rows of any stride) for these averages [V]. The
// same for any number of threads. Extra memory: 512 rows in fp32 a thread, and 16 B * V. On a GPU
// weight is in its memory, rows of contiguous elements, and averages and result are not: it waits;
// 3 KiB * D and 40 B * V there; another order than the CPU's, as good. Throws InvalidArgument on
// sizes or options that do not fit.
LOGITLESS_API VocabOrder make_vocab_order(const Context& context, const ConstTensorView& weight,
                                          std::span<const float> average,
                                          const OrderOptions& options = {});

// The order with the moments of its tiles in these weights, and how far the estimates of a tile's
// mass from them fall short: log2_caution is the most that the mass of a tile has been above its
// estimate, over the rows of hidden [..., D], where it was above tau / 3 of the row's total.
// Without it, a word that stands apart from its tile is missed now and then. Work:
// vocab * dim * (dim + 2 rows) multiply-adds; extra memory: 4 B * rows * (dim + 2 tiles), 8 B *
// dim^2, 4 B * tiles * dim, and 0.5 KiB * (dim + rows) a thread. softcap has no such moments. On a
// Hopper GPU, in bf16 with dim a multiple of 8, everything but the orders is in its memory, and it
// waits; extra memory there: 24 B * dim^2 and cuSOLVER's workspace (about as much), 70 KiB * dim,
// 0.1 B * vocab * (dim + rows), 20 B * vocab, and 32 MiB. Throws Unsupported for other heads there,
// or without cuBLAS or cuSOLVER; DeviceError. With a sharding it is collective:
// moments of this rank's tiles, cautions against the totals of all ranks, for hidden that is the
// same on all of them (Unsupported where tokens are spread).
LOGITLESS_API VocabOrder measure_tiles(const Context& context, const VocabOrder& order,
                                       const ConstTensorView& hidden, const ConstTensorView& weight,
                                       const ConstTensorView& bias = {}, float logit_scale = 1.0f,
                                       float tau = 0.003f, const Sharding& sharding = {});

// Collective: the order of this rank's words (one that is empty where it has none) with the places
// of those of all ranks, by which far-field calls with a sharding take their tokens: in the order
// of their targets, the same on all ranks. Ranks that call with others than those made together
// throw InvalidArgument. Any that were serve, whatever the weights are now. Extra memory: 4 B for
// each word of all ranks, kept, and as much again while it runs, for the rank of most words. Throws
// InvalidArgument on all ranks where words and orders do not fit.
LOGITLESS_API VocabOrder share_order(const VocabOrder& order, const Sharding& sharding);

}  // namespace logitless
