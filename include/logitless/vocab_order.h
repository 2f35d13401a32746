// An order of the vocabulary in which similar entries share a tile of 128. The far field
// (docs/use/far_field.md) iterates over its positions instead of token ids. The caller's tensors
// keep their own order.
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
  // Number of strata, 1 to 4096: vocabulary entries are grouped by average probability. Each
  // stratum is split by repeated principal-direction bisection of its weight rows, down to a tile.
  std::int64_t strata = 16;
  // Seed of the starting directions of power iteration.
  std::uint64_t seed = 0;
};

// Immutable; copies share their data, and any number of threads may use one. On a GPU the first
// call with an order waits while it is copied there (12 B * vocab, kept with it).
class LOGITLESS_API VocabOrder {
 public:
  VocabOrder() = default;
  // `vocab_ids` is a permutation of [0, vocab), by position. `average` is the average probability
  // of each entry (any positive scale), by vocabulary id. Throws InvalidArgument when the first is
  // no permutation, or an average is negative or not finite.
  VocabOrder(std::span<const std::int64_t> vocab_ids, std::span<const float> average);

  bool empty() const { return data_ == nullptr; }
  std::int64_t vocab() const;
  std::span<const std::int64_t> vocab_ids() const;  // [vocab] the entry at each position
  std::span<const std::int32_t> positions() const;  // [vocab] the position of each entry
  std::span<const float> average() const;           // [vocab] by vocabulary id
  // [vocab] by position: average over its sum within the tile of 128 positions.
  std::span<const float> share() const;

  // Returns whether it holds the moments that Accuracy::far_both needs (measure_tiles).
  bool has_moments() const;
  std::int64_t dim() const;                     // of the moments; 0 without
  std::span<const float> axes() const;          // [dim, dim] rows: the axes of the quadratic forms
  std::span<const float> variance() const;      // [tiles, dim] of each tile along the axes
  std::span<const float> log2_caution() const;  // [tiles] >= 0
  // Returns the same order with these moments. Throws InvalidArgument on other sizes or numbers
  // that are not finite.
  VocabOrder with_moments(std::int64_t dim, std::span<const float> axes,
                          std::span<const float> variance,
                          std::span<const float> log2_caution) const;

  // [vocab of all ranks] the position of each entry in the concatenated orders of the ranks, by
  // which ranks sort tokens alike (share_order); empty without.
  std::span<const std::int32_t> places() const;

  // Save and load a safetensors file: `vocab_ids` i64 [vocab], `average` f32 [vocab]; `axes`,
  // `variance`, `log2_caution` f32 if there are moments; `places` i32 if it is shared. Throws Error
  // (file), or as the constructor does.
  void save(const std::string& path) const;
  static VocabOrder load(const std::string& path);

 private:
  friend struct VocabOrderAccess;
  struct Data;
  std::shared_ptr<const Data> data_;
};

// Computes the average probability of each vocabulary entry, mean_i softmax(scale * (hidden_i .
// weight_j + bias_j)), over the rows of hidden [..., D]. A sample of one or two thousand rows is
// enough. With a softcap c it is the average of p_ij (1 - (z_ij / c)^2) with the capped logit z_ij,
// which governs the gradients of the vocabulary's rows.
//
// Work: two GEMMs of rows * vocab * dim at most. Extra memory: a plan of memory_budget (0: the
// default), and 4 B * vocab beside the result. On a GPU the tensors are in its memory and the
// result is on the host. It waits, takes 8 B * vocab and 12 B * rows of GPU memory, and throws
// DeviceError. With a sharding it is collective: for the local vocabulary shard, over the tokens of
// all ranks where these are sharded, too. An error on one rank is thrown on all.
LOGITLESS_API std::vector<float> average_probability(
    const Context& context, const ConstTensorView& hidden, const ConstTensorView& weight,
    const ConstTensorView& bias = {}, float logit_scale = 1.0f, float softcap = 0.0f,
    std::size_t memory_budget = 0, const Sharding& sharding = {});

// Makes the order of weight [V, D] (f32, bf16 or f16, rows of any stride) for these averages [V].
// It is the same for any number of threads. Extra memory: 512 fp32 rows a thread, and 16 B * V. On
// a GPU weight is in its memory, with contiguous rows; averages and result are on the host. It
// waits, takes 3 KiB * D and 40 B * V there, and makes another order than the CPU, of equal
// quality. Throws InvalidArgument on sizes or options that do not fit.
LOGITLESS_API VocabOrder make_vocab_order(const Context& context, const ConstTensorView& weight,
                                          std::span<const float> average,
                                          const OrderOptions& options = {});

// Returns the order with the moments of its tiles in these weights, and the safety factors of the
// masses estimated from them. log2_caution is the largest log2 of a tile's mass over its estimate.
// It is taken over the rows of hidden [..., D] where that mass was above tau / 3 of the row's
// total. Without it, an outlying entry of a tile is occasionally missed. A softcap has no such
// moments.
//
// Work: vocab * dim * (dim + 2 rows) multiply-adds. Extra memory: 4 B * rows * (dim + 2 tiles), 8 B
// * dim^2, 4 B * tiles * dim, and 0.5 KiB * (dim + rows) a thread. A GPU whose kernels have the far
// field supports it for the same heads. Everything except the orders is then in its memory, and it
// waits. Extra memory there: 24 B * dim^2 and cuSOLVER's workspace (about as much), 70 KiB * dim,
// 0.1 B * vocab * (dim + rows), 20 B * vocab, and 32 MiB. Throws Unsupported for other heads there,
// or without cuBLAS or cuSOLVER; DeviceError.
//
// With a sharding it is collective: moments of the local tiles, cautions against the totals of all
// ranks. hidden is the same on all ranks (Unsupported where tokens are sharded).
LOGITLESS_API VocabOrder measure_tiles(const Context& context, const VocabOrder& order,
                                       const ConstTensorView& hidden, const ConstTensorView& weight,
                                       const ConstTensorView& bias = {}, float logit_scale = 1.0f,
                                       float tau = 0.003f, const Sharding& sharding = {});

// Returns the order of the local vocabulary shard (an empty one where the shard is empty) with the
// positions of all ranks' entries. Far-field calls with a sharding need them to sort tokens by
// target, the same on all ranks. Collective. Ranks whose orders were not made together throw
// InvalidArgument; orders made together stay valid for other weights. Extra memory: 4 B for each
// entry of the global vocabulary, kept, and while it runs as much again for the largest shard.
// Throws InvalidArgument on all ranks where shards and orders do not fit.
LOGITLESS_API VocabOrder share_order(const VocabOrder& order, const Sharding& sharding);

}  // namespace logitless
