#include "head/cuda/layout.h"

#include <algorithm>

#include "head/far_work.h"
#include "head/gathered_vocab.h"
#include "kernels/cpu_head.h"
#include "kernels/device/far.h"
#include "math/shard_state.h"

namespace logitless::cuda {
namespace {

template <typename Take>
FarLayout take_far(const HeadShape& shape, const HeadFeatures& f, const Sizes& sizes,
                   const Take& take) {
  const std::int64_t tokens = std::max<std::int64_t>(shape.tokens, 1);
  const std::int64_t chunk = std::min(sizes.chunk, tokens);
  const std::int64_t padded = padded_tokens(chunk);
  const std::int64_t tiles = far_tile_count(shape.vocab);
  const std::int64_t groups = far_group_count(shape.vocab);
  const std::int64_t blocks = padded / kFarBlock;
  const std::int64_t places = f.vocab_ranks > 0 ? shape.global_vocab : shape.vocab;
  FarLayout far;
  far.sums = take(sizeof(FarSums));
  far.partial = take(kFarPartials * 8);
  far.token_keys = take(tokens * 4);
  far.token_rows = take(tokens * 4);
  far.token_positions = take(tokens * 4);
  far.token_counts = take(2 * (token_keys(places, tokens) + 2) * 4, tokens > kFewTargets);
  far.chunk_keys = take(chunk * 4);
  far.chunk_rows = take(chunk * 4);
  far.chunk_positions = take(chunk * 4);
  far.chunk_counts = take(2 * (chunk_keys(chunk) + 2) * 4, chunk > kFewTargets);
  far.hidden_rows = take(chunk * shape.dim * 2);
  far.bias = take(shape.vocab * 4, f.bias);
  far.logit_weights = take(shape.vocab * 4, f.vocab_weight);
  far.mass = take(2 * groups * padded * 4);
  far.centroid = take(tiles * shape.dim * 2);
  far.groups = take(groups * 4);
  far.arranged_vocab = take(shape.vocab * 4);
  far.arranged_positions = take(shape.vocab * 4);
  far.arranged_share = take(shape.vocab * 4);
  far.arranged_centroid = take(tiles * shape.dim * 2);
  far.radius = take(tiles * 4);
  far.distance = take(tiles * 4);
  far.block_groups = take(blocks * far_bits(groups) * 4);
  far.group_blocks = take(groups * far_bits(blocks) * 4);
  far.list = take(groups * blocks * 4);
  far.list_begin = take((groups + 1) * 4);
  far.block = take(chunk * padded_vocab(tiles) * 2);
  far.tile_gradient = take(tiles * shape.dim * 4, f.d_weight);
  far.tile_sum = take(tiles * 4, f.d_bias);
  far.bound = take(padded * 4);
  return far;
}

template <typename Take>
EstimateLayout take_estimates(const HeadShape& shape, std::int64_t chunk, const Take& take) {
  const std::int64_t rows = estimate_rows(chunk);
  const std::int64_t padded = padded_tokens(chunk);
  const std::int64_t tiles = far_tile_count(shape.vocab);
  EstimateLayout estimates;
  estimates.target_weight_sum = take(shape.vocab * 4);
  estimates.log2_base = take(tiles * 4);
  estimates.mean = take(tiles * shape.dim * 2);
  estimates.along = take(rows * shape.dim * 4);
  estimates.squares = take(rows * shape.dim * 2);
  estimates.forms = take(tiles * rows * 4);
  estimates.total_mass = take(padded * 4);
  estimates.far_sum = take(padded * 4);
  estimates.constants = take(3 * 4);
  estimates.products = take(kEstimateBytes);
  return estimates;
}

int chunks_in_flight(const HeadShape& shape, std::int64_t chunk) {
  return chunk < shape.tokens ? 2 : 1;
}

// copies: a chunk's tokens are copies in another order.
template <typename Take>
ShardLayout take_shard(const HeadShape& shape, const HeadFeatures& f, std::int64_t chunk,
                       bool copies, const Take& take) {
  const std::int64_t ranks = f.vocab_ranks;
  const std::int64_t slots = chunk * f.targets_per_token;
  const std::int64_t of_rank = ceil_div(chunk, ranks);
  const int times = chunks_in_flight(shape, chunk);
  ShardLayout shard;
  shard.logits = take(ranks * slots * 4, times == 1);  // else see take_tokens
  for (int i = 0; i < times; ++i) shard.merged_logits[i] = take(slots * 4);
  shard.records = take(ranks * chunk * static_cast<std::int64_t>(sizeof(TokenRecord)));
  shard.logit_weights = take(shape.vocab * 4, f.vocab_weight);
  shard.denominators = take((kMostRanks + 1) * 8);
  if (!f.tokens_sharded && !copies) return shard;
  for (int i = 0; i < times; ++i)
    shard.targets[i] = take(slots * 8, times == 1 || !f.tokens_sharded);
  shard.bad_target = take(8);
  if (!f.tokens_sharded) {
    for (int i = 0; i < times; ++i) shard.hidden[i] = take(chunk * shape.dim * 2);
    return shard;
  }
  shard.local_coefficients =
      take(padded_tokens(of_rank) * static_cast<std::int64_t>(sizeof(RowCoefficients)),
           wants_gradients(f));
  shard.local_delta = take(of_rank * f.targets_per_token * 4, wants_gradients(f));
  shard.losses = take(ranks * static_cast<std::int64_t>(sizeof(RankLoss)));
  return shard;
}

template <typename Take>
ShardFarLayout take_shard_far(const HeadFeatures& f, std::int64_t chunk, const Take& take) {
  const std::int64_t ranks = f.vocab_ranks;
  const std::int64_t slots = chunk * f.targets_per_token;
  ShardFarLayout far;
  far.sums = take(ranks * static_cast<std::int64_t>(sizeof(FarSums)));
  far.values = take(ranks * chunk * 4);
  far.merged = take(chunk * 4);
  far.token_coefficients =
      take(padded_tokens(chunk) * static_cast<std::int64_t>(sizeof(RowCoefficients)));
  far.delta = take(slots * 4);
  far.rows = take(chunk * 4);
  far.merged_logits = take(slots * 4);
  far.records = take(chunk * static_cast<std::int64_t>(sizeof(TokenRecord)));
  far.lse = take(chunk * 4);
  far.log_prob = take(slots * 4);
  far.target_logit = take(slots * 4);
  return far;
}

bool exchanges_hidden(const HeadFeatures& f) { return f.vocab_ranks > 0 && f.gathered_rows == 0; }

// Takes the receive buffers, which come last in the workspace: large ones, and those that are
// received beside another chunk's GEMMs. These GEMMs occupy all SMs, so a kernel that copied the
// data would wait for their end. It would also have taken SMs from GEMMs that start late on another
// rank.
template <typename Take>
void take_tokens(const HeadShape& shape, const HeadFeatures& f, const Sizes& sizes, Layout& out,
                 const Take& take) {
  const std::int64_t chunk =
      std::min(sizes.largest_chunk(), std::max<std::int64_t>(shape.tokens, 1));
  const std::int64_t whole = round_up(chunk, std::int64_t{f.vocab_ranks});
  const std::int64_t slots = chunk * f.targets_per_token;
  const bool several = chunks_in_flight(shape, chunk) > 1;
  for (int i = 0; f.tokens_sharded && i < chunks_in_flight(shape, chunk); ++i) {
    out.shard.hidden[i] = take(chunk * shape.dim * static_cast<std::int64_t>(size_of(shape.dtype)));
    if (several) out.shard.targets[i] = take(slots * 8);
  }
  if (several) out.shard.logits = take(f.vocab_ranks * slots * 4);
  out.shard.received = take(whole * shape.dim * 4, f.d_hidden);
}

// Returns the bytes that one rank contributes to a slice.
std::int64_t slice_bytes(const HeadShape& shape, HeadFeatures f, const Sizes& sizes) {
  f.bias = false;
  return static_cast<std::int64_t>(slice_layout(shape, f, sizes.slice, false).bytes);
}
std::int64_t sums_bytes(const HeadShape& shape, const HeadFeatures& f, const Sizes& sizes) {
  return wants_gradients(f) ? static_cast<std::int64_t>(slice_sums(shape, f, sizes.slice).bytes)
                            : 0;
}

template <typename Take>
void take_slices(const HeadShape& shape, const HeadFeatures& f, const Sizes& sizes,
                 GatheredLayout& gathered, const Take& take) {
  const std::int64_t ranks = f.vocab_ranks;
  const std::int64_t slice = slice_bytes(shape, f, sizes), sums = sums_bytes(shape, f, sizes);
  const bool several = several_slices(f, sizes);
  gathered.slice = take(ranks * (several ? 2 * slice : std::max(slice, sums)));
  gathered.received = several ? take(ranks * sums) : gathered.slice;
}

template <typename Take>
void take_received(const HeadShape& shape, const HeadFeatures& f, const Sizes& sizes, Layout& out,
                   const Take& take) {
  if (sizes.slice > 0) {
    take_slices(shape, f, sizes, out.gathered, take);
  } else if (exchanges_hidden(f)) {
    take_tokens(shape, f, sizes, out, take);
  }
}

template <typename Take>
GatheredLayout take_gathered(const HeadShape& shape, const HeadFeatures& f, const Sizes& sizes,
                             const Take& take) {
  const std::int64_t tokens = std::max<std::int64_t>(shape.tokens, 1);
  const std::int64_t slots = tokens * f.targets_per_token;
  const std::int64_t ranks = f.vocab_ranks;
  const bool backward = wants_gradients(f);
  GatheredLayout gathered;
  gathered.records = take(tokens * static_cast<std::int64_t>(sizeof(TokenRecord)));
  gathered.states = take(tokens * static_cast<std::int64_t>(sizeof(TokenRecord)));
  gathered.vocab_ids = take(vocab_of_call(f, sizes.slice) * 4, rows_lie_together(f));
  gathered.found = take(slots * 4);
  gathered.logits = take(slots * 4);
  gathered.no_logits = take(slots * 4);
  gathered.bias = take(ranks * bias_rows(f) * 4, f.bias && f.gathered_columns == 0);
  const std::int64_t times = several_slices(f, sizes) ? 2 : 1;
  gathered.sums = take(times * ranks * sums_bytes(shape, f, sizes));
  gathered.whole = take(times * static_cast<std::int64_t>(full_slice(shape, f, sizes.slice).bias));
  gathered.full_sums =
      take(static_cast<std::int64_t>(full_sums(shape, f, sizes.slice).bytes), backward);
  HeadFeatures without_bias = f;
  without_bias.bias = false;
  gathered.parts = slice_parts(shape, without_bias, sizes.slice, false);
  return gathered;
}

template <typename Take>
AuditLayout take_audit(const HeadShape& shape, std::int64_t tokens, const Take& take) {
  AuditLayout audit;
  audit.rows = take(tokens * 4);
  audit.valid = take(4);
  audit.tokens = take(tokens * shape.dim * 2);
  audit.lse = take(tokens * 4);
  audit.partial = take(tokens * 16);
  audit.hidden = take(tokens * shape.dim * 4);
  audit.exact = take(tokens * shape.dim * 4);
  audit.exact_lse = take(tokens * 4);
  return audit;
}

}  // namespace

std::int64_t vocab_of_call(const HeadFeatures& f, std::int64_t slice) {
  return rows_lie_together(f) ? f.vocab_ranks * slice : slice;
}

bool several_slices(const HeadFeatures& f, const Sizes& sizes) {
  return slice_count(f.gathered_rows, sizes.slice) > 1;
}

Sizes sizes_for(PlanKind kind, const PlanSizes& sizes, std::int64_t audited) {
  return {.chunk = sizes.chunk_tokens,
          .vocab_block = sizes.block_vocab,
          .stored = sizes.stored_vocab,
          .ranges = sizes.weight_ranges,
          .first = sizes.first_tokens,
          .far = is_far(kind),
          .both = kind == PlanKind::far_both,
          .audited = is_far(kind) ? audited : 0,
          .slice = sizes.slice_rows,
          .weight_apart = sizes.weight_vocab > 0};
}

Sizes sizes_of(const LossPlan& plan) {
  return sizes_for(plan.kind, plan_sizes(plan),
                   plan.audit == nullptr ? 0 : plan.audit->shape.tokens);
}

ForwardShape forward_shape(const HeadShape& shape, const HeadFeatures& features) {
  return {shape.tokens,
          shape.dim,
          shape.vocab,
          shape.dtype,
          features.targets_per_token,
          features.entropy,
          features.label_smoothing,
          features.argmax,
          wants_gradients(features),
          features.precision,
          features.narrow_weight};
}

namespace {

RowBytes row_bytes(const HeadShape& shape, const HeadFeatures& f) {
  return {.weight = shape.dim * static_cast<std::int64_t>(size_of(f.d_weight_dtype)),
          .number = shape.dtype == DType::f32 ? 4 : 2};
}
// Returns whether blocks of entries that are not saved also reuse d_weight's memory.
bool aliases_blocks(const HeadShape& shape, const Sizes& sizes) {
  return sizes.ranges > 0 && sizes.vocab_block < shape.vocab;
}
}  // namespace

AliasedRanges ranges_of(const DeviceKernel& kernel, const HeadShape& shape, const HeadFeatures& f,
                        const Sizes& sizes) {
  if (sizes.ranges == 0 || sizes.stored == 0) return {};
  RowBytes row = row_bytes(shape, f);
  if (splits_weight(kernel, shape.tokens, f, sizes))
    row.low = running_sum_bytes(1, shape.dim) / 256;
  const std::int64_t first = std::min(sizes.first, shape.tokens);
  return aliases_blocks(shape, sizes)
             ? saved_ranges(first, shape.vocab, row, sizes.ranges, sizes.vocab_block)
             : aliased_ranges(first, shape.vocab, row, sizes.ranges);
}

AliasedBlock vocab_block_of(const HeadShape& shape, const HeadFeatures& f, const Sizes& sizes,
                            std::int64_t first) {
  if (!aliases_blocks(shape, sizes))
    return {std::min(sizes.vocab_block, shape.vocab - first), false};
  return aliased_block(std::min(sizes.first, shape.tokens), shape.vocab, row_bytes(shape, f), first,
                       sizes.vocab_block);
}

namespace {

// Returns the entries of the largest vocabulary block, in either memory.
std::int64_t max_vocab(const HeadShape& shape, const HeadFeatures& f, const Sizes& sizes) {
  const std::int64_t most = std::max(sizes.vocab_block, sizes.stored);
  return aliases_blocks(shape, sizes)
             ? std::max(most, vocab_block_of(shape, f, sizes, sizes.stored)
                                  .vocab_count)  // later blocks are smaller
             : most;
}

// Returns the bytes of the block [tokens, entries padded to 256] of the largest chunk, in 16 bit,
// or 32 for f32. If a first chunk reuses d_weight's memory, only its last block counts.
std::int64_t block_bytes(const DeviceKernel& kernel, const HeadShape& shape, const HeadFeatures& f,
                         const Sizes& sizes) {
  const std::int64_t element = shape.dtype == DType::f32 ? 4 : 2;
  const std::int64_t tokens = std::max<std::int64_t>(shape.tokens, 1);
  std::int64_t first = 0;
  std::int64_t rest = tokens;
  const VocabRanges ranges = ranges_of(kernel, shape, f, sizes).ranges;
  if (ranges.count > 0 && !aliases_blocks(shape, sizes)) {
    first = std::min(sizes.first, tokens) * ranges.stride(ranges.count - 1);
    rest = std::max<std::int64_t>(tokens - sizes.first, 0);
  }
  return element * std::max(first, std::min(sizes.chunk, rest) * padded_vocab(sizes.vocab_block));
}

}  // namespace

HeadFeatures features_of_slices(HeadFeatures features) {
  features.d_weight_dtype = DType::f32;
  features.d_weight_strided = false;
  features.accumulate = false;
  return features;
}

Layout layout_of(const DeviceKernel& kernel, const HeadShape& whole, const HeadFeatures& features,
                 const Sizes& sizes) {
  const bool gathered = sizes.slice > 0;
  const HeadFeatures f = gathered ? features_of_slices(features) : features;
  HeadShape shape = whole;
  if (gathered) shape.vocab = vocab_of_call(f, sizes.slice);
  Layout out;
  out.sizes = sizes;
  GradientLayout& gradients = out.gradients;
  const auto take = [&](std::int64_t bytes, bool wanted = true) {
    const std::size_t at = out.total;
    if (wanted) out.total += (static_cast<std::size_t>(bytes) + 255) / 256 * 256;
    return at;
  };
  const std::int64_t tokens = std::max<std::int64_t>(shape.tokens, 1);
  const std::int64_t chunk = std::min(sizes.largest_chunk(), tokens);
  const std::int64_t padded = padded_tokens(chunk);
  const std::int64_t slots = chunk * f.targets_per_token;
  const std::int64_t vocab_count = max_vocab(shape, f, sizes);
  const std::int64_t element = shape.dtype == DType::f32 ? 4 : 2;
  const bool backward = wants_gradients(f);
  // The gradients of a separate d_weight read these values of all chunks.
  const std::int64_t chunks = sizes.weight_apart ? ceil_div(tokens, chunk) : 1;
  out.statistics = take(sizeof(DeviceStatistics));
  out.loss = take(static_cast<std::int64_t>(loss_workspace_bytes(tokens)));
  out.lse = take(chunks * chunk * 4);
  out.lse_rest = take(chunks * chunk * 4, backward);
  out.log_prob = take(chunks * slots * 4);
  out.list.wanted = lists_tokens(kernel, tokens, features, sizes);
  out.target_logit = take(chunks * slots * 4, backward || f.tokens_sharded || out.list.wanted);
  if (out.list.wanted) {
    out.list.rows = take(tokens * 4);
    out.list.counts = take((list_blocks(tokens) + 1) * 4);
    out.list.hidden = take(chunk * shape.dim * element, !exchanges_hidden(f));
  }
  out.wide_hidden = take(chunk * shape.dim * 4, widens_hidden(f));
  out.weighted_sum = take(chunk * 4, f.label_smoothing);
  out.entropy = take(chunk * 4, f.entropy);
  out.argmax = take(chunk * 4, f.argmax);
  HeadShape of_chunk = shape;
  of_chunk.tokens = chunk;
  out.forward_bytes = kernel.workspace_bytes(forward_shape(of_chunk, f));
  auto of_kernel = static_cast<std::int64_t>(out.forward_bytes);
  gradients.many = out.total;
  if (adds_entries(kernel, tokens, f, sizes)) {  // reuses the memory that only the forward needs,
                                                 // if it fits
    const std::int64_t products =
        kernel.gemms_bytes == nullptr
            ? of_kernel
            : static_cast<std::int64_t>(kernel.gemms_bytes(forward_shape(of_chunk, f)));
    gradients.many += static_cast<std::size_t>(round_up(products, 256));
    of_kernel = std::max(of_kernel, round_up(products, 256) + many_rows(slots) * shape.dim * 4);
  }
  out.forward = take(of_kernel);
  if (gathered) {
    out.shard.denominators = take((kMostRanks + 1) * 8);
    out.shard.losses = take(f.vocab_ranks * static_cast<std::int64_t>(sizeof(RankLoss)));
    out.gathered = take_gathered(shape, f, sizes, take);
  } else if (f.vocab_ranks > 0) {
    out.shard = take_shard(shape, f, chunk, sizes.far || out.list.wanted, take);
    if (sizes.far) out.shard_far = take_shard_far(f, chunk, take);
  }
  const auto end = [&] {
    out.exchange = out.total;
    take_received(whole, f, sizes, out, take);
    return out;
  };
  if (!backward) return end();
  gradients.rows = take(chunks * padded * static_cast<std::int64_t>(sizeof(RowCoefficients)));
  gradients.delta = take(chunks * slots * 4);
  gradients.factor = take(padded * 4);
  gradients.coefficient = take(slots * 4);
  gradients.vocab_ids = take(slots * 4);
  gradients.slots = take(slots * 4);
  gradients.places = take(slots * 4);
  gradients.counts = take(2 * (shape.vocab + 2) * 4, slots > kFewTargets);
  gradients.entry_begin = take(((sizes.far ? shape.vocab : vocab_count) + 1) * 4);
  gradients.entry_vocab = take(slots * 4);
  gradients.entry_tokens = take(slots * 4);
  gradients.entry_values = take(slots * 4);
  gradients.reference = take(padded * 4);
  gradients.active = take(chunks * (padded / kBlockPadding + 1) * 4);
  out.ranges = ranges_of(kernel, shape, f, sizes);
  const std::size_t by_position =
      take(std::min(sizes.vocab_block, shape.vocab) * shape.dim * 2, sizes.far);
  gradients.block = take(block_bytes(kernel, shape, f, sizes));
  gradients.scaled_hidden =
      take(chunk * shape.dim * element, scales_hidden(kernel, out.list.wanted, f, sizes) &&
                                            !scales_in_place(out.list.wanted, f));
  gradients.scales = take(8, shape.dtype == DType::f16);
  if (!exchanges_hidden(f))
    gradients.d_hidden = take(chunk * shape.dim * 4, sums_hidden(shape.vocab, f, sizes));
  const auto swept = static_cast<std::int64_t>(out.total - by_position) / (shape.dim * 2);
  if (exchanges_hidden(f))  // a chunk's d_hidden is sent while the next chunk uses that memory
    gradients.d_hidden =
        take(round_up(chunk, std::int64_t{f.vocab_ranks}) * shape.dim * 4, f.d_hidden);
  gradients.d_weight = take(shape.vocab * shape.dim * 4, sums_weight(kernel, tokens, f, sizes));
  gradients.weight_low =
      take(running_sum_bytes(sizes.weight_apart ? vocab_count : shape.vocab, shape.dim),
           splits_weight(kernel, tokens, f, sizes));
  gradients.d_bias = take(shape.vocab * 4, f.d_bias);
  gradients.weight_sum = take(shape.dim * 4, smooths_apart(f));
  gradients.hidden_sum = take(shape.dim * 4, smooths_apart(f));
  if (sizes.far) {
    out.far = take_far(shape, f, sizes, take);
    out.far.gathered = by_position;
    out.far.swept = std::max(sizes.vocab_block, swept / kFarGroup * kFarGroup);
  }
  if (sizes.both) out.estimates = take_estimates(shape, chunk, take);
  if (sizes.audited > 0) out.audit = take_audit(shape, sizes.audited, take);
  std::int64_t columns = 0;
  if (f.d_bias) columns = sizes.far ? far_tile_count(shape.vocab) : vocab_count;
  if (smooths_apart(f)) columns = std::max(columns, shape.dim);
  std::int64_t sums = 0;
  for (const std::int64_t count : {columns, f.d_bias && !sizes.far ? vocab_count : 0, shape.dim})
    sums = std::max(sums, static_cast<std::int64_t>(column_sum_workspace_bytes(count)));
  gradients.column_sums = take(sums, columns > 0);
  return end();
}

Layout layout_of(const LossPlan& plan) {
  return layout_of(find_device_kernel(plan.kernel), plan.shape, plan.features, sizes_of(plan));
}

std::size_t exchange_bytes(const HeadShape& shape, const HeadFeatures& features,
                           const Sizes& sizes) {
  std::size_t total = 0;
  Layout out;
  const HeadFeatures f = sizes.slice > 0 ? features_of_slices(features) : features;
  take_received(shape, f, sizes, out, [&](std::int64_t bytes, bool wanted = true) {
    const std::size_t at = total;
    if (wanted) total += (static_cast<std::size_t>(bytes) + 255) / 256 * 256;
    return at;
  });
  return total;
}

}  // namespace logitless::cuda
