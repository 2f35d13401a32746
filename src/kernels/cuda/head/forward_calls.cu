// Forward calls of the kernels that compute tiles of logits: workspace, launches, and the small
// kernels around them.
#include <algorithm>

#include "kernels/cuda/device/error.cuh"
#include "kernels/cuda/device/kernels_of_file.cuh"
#include "kernels/cuda/device/tile_sizes.h"
#include "kernels/cuda/head/sizes.h"
#include "kernels/cuda/head/tile_kernel.h"
#include "kernels/cuda/head/token_kernels.cuh"
#include "kernels/device/far.h"
#include "kernels/device/order.h"

namespace logitless::cuda {
namespace {

// Pairs of token tiles whose hidden states stay in L2.
int group_of(const TileKernel& kernel, std::int64_t dim) {
  return static_cast<int>(
      std::max<std::int64_t>(1, kernel.resident_bytes() / (kClusterRows * dim * 2)));
}

TileOperands operands_of(const ForwardCall& c) {
  TileOperands o;
  o.dtype = c.shape.dtype;
  o.tokens = c.shape.tokens;
  o.dim = c.shape.dim;
  o.vocab = c.shape.vocab;
  o.hidden = c.hidden;
  o.hidden_stride = c.hidden_stride;
  o.rows = c.weight;
  o.row_stride = c.weight_stride;
  o.block = c.block;
  o.ranges = c.ranges;
  return o;
}

// run(operands, arguments) over the vocabulary. It runs once, or for each vocabulary block
// of the far field with rows gathered by position. Nothing is read where *wanted is 0.
template <typename Run>
void sweep(const ForwardCall& c, const ForwardArguments& tiles, const int* wanted, GatherPart part,
           const Run& run) {
  TileOperands operands = operands_of(c);
  if (c.far == nullptr) return run(operands, tiles);
  const FarCall& far = *c.far;
  for (FarVocabBlock vocab_block; vocab_block.first < c.shape.vocab;
       vocab_block.first += vocab_block.vocab_count) {
    vocab_block.vocab_count = std::min(far.swept_vocab, c.shape.vocab - vocab_block.first);
    const void* const rows =
        gather_block(c, vocab_block, part, part == GatherPart::rows ? wanted : nullptr);
    ForwardArguments a = tiles;
    const std::int64_t first = vocab_block.first / kTileColumns;
    const auto from = [&](auto* values, std::int64_t offset) {
      return values == nullptr ? nullptr : values + offset;
    };
    a.vocab = static_cast<int>(vocab_block.vocab_count);
    a.vocab_tiles = static_cast<int>(ceil_div(vocab_block.vocab_count, kTileColumns));
    a.bias = from(a.bias, vocab_block.first);
    a.logit_weights = from(a.logit_weights, vocab_block.first);
    for (float** const partial : {&a.sums, &a.entropy, &a.weighted, &a.best})
      *partial = from(*partial, first * a.padded_tokens);
    a.masses = from(a.masses, 2 * first * a.padded_tokens);
    if (a.best_index != nullptr) a.best_index += first * a.padded_tokens;
    a.vocab_ids = far.order.vocab_ids + vocab_block.first;
    if (a.list != nullptr) {
      a.first_tile = static_cast<int>(first);
      a.list_begin = far.list_begin + first;
    }
    operands.vocab = vocab_block.vocab_count;
    operands.rows = rows;
    operands.row_stride = far.order.identity ? c.weight_stride : c.shape.dim;
    run(operands, a);
  }
}

// Workspace pointers of a call, and arguments common to its tile launches.
struct Forward {
  explicit Forward(const ForwardCall& c)
      : call(c),
        layout(c.shape),
        base(static_cast<std::byte*>(c.workspace)),
        stream(static_cast<cudaStream_t>(c.stream)),
        reference(c.reference != nullptr ? c.reference : floats(layout.reference)),
        local_targets(floats(layout.target_logits)),
        targets(c.given_logits != nullptr ? c.given_logits : local_targets),
        active(c.active != nullptr ? c.active : ints(layout.active)),
        repair(ints(layout.repair)),
        store(c.stored_vocab > 0),
        row_blocks(static_cast<unsigned>(layout.rows / kRowsPerBlock)) {}

  float* floats(std::size_t at, bool wanted = true) const {
    return wanted ? reinterpret_cast<float*>(base + at) : nullptr;
  }
  int* ints(std::size_t at) const { return reinterpret_cast<int*>(base + at); }

  ForwardArguments tiles(const TileKernel& kernel) const {
    const ForwardShape& s = call.shape;
    ForwardArguments a{};
    a.vocab = static_cast<int>(s.vocab);
    a.token_pairs = static_cast<int>(layout.token_pairs);
    a.vocab_tiles = static_cast<int>(layout.vocab_tiles);
    a.group = group_of(kernel, s.dim);
    a.stored_tiles = static_cast<int>(ceil_div(call.stored_vocab, kTileColumns));
    a.padded_tokens = layout.rows;
    a.scale = call.logit_scale;
    a.cap = call.softcap;
    a.bias = call.far == nullptr ? call.bias : call.far->bias;
    a.logit_weights = call.far == nullptr ? call.logit_weights : call.far->logit_weights;
    if (call.far != nullptr) a.masses = call.far->mass;
    a.reference = reference;
    a.sums = floats(layout.sums);
    a.entropy = floats(layout.entropy, s.entropy);
    a.weighted = floats(layout.weighted, s.weighted_sum);
    a.best = floats(layout.best, s.argmax);
    a.best_index = reinterpret_cast<int*>(floats(layout.best_index, s.argmax));
    if (half()) {
      a.lifts = floats(layout.lifts);
      a.shifts = reinterpret_cast<std::uint8_t*>(base + layout.shifts);
    }
    return a;
  }
  Partials partials(const ForwardArguments& a) const {
    return {layout.rows, a.vocab_tiles, a.sums, a.entropy, a.weighted, a.best, a.best_index};
  }
  // Stores f16 exponentials.
  bool half() const { return store && call.shape.dtype == DType::f16; }
  float* lifts() const { return half() ? floats(layout.lifts) : nullptr; }
  // Sets the lifts of an f16 block from the logits of some entries, evenly spread.
  void estimate(const TileKernel& kernel, const ForwardArguments& tiles) const {
    const std::int64_t every = std::max<std::int64_t>(1, call.shape.vocab / kTileColumns);
    TileOperands operands = operands_of(call);
    operands.vocab = std::min<std::int64_t>(call.shape.vocab, kTileColumns);
    operands.row_stride *= every;
    ForwardArguments a = tiles;
    a.vocab = static_cast<int>(operands.vocab);
    a.vocab_tiles = 1;
    a.logit_weights = nullptr;
    a.entropy = a.weighted = a.best = nullptr;
    a.wanted = active;
    if (a.bias != nullptr) {
      float* const sampled = floats(layout.sampled_bias);
      sample_bias<<<1, kTileColumns, 0, stream>>>(a.bias, every, a.vocab, sampled);
      require_cuda(cudaGetLastError(), "sampled bias");
      a.bias = sampled;
    }
    const bool plain = call.softcap == 0.0f && a.bias == nullptr;
    kernel.launch(plain ? ForwardMode::kPlain : ForwardMode::kGeneral, false, operands, a, stream);
    estimate_lifts<<<static_cast<unsigned>(layout.token_pairs), 256, 0, stream>>>(
        a.sums, static_cast<float>(operands.vocab), static_cast<float>(call.shape.vocab), active,
        lifts());
    require_cuda(cudaGetLastError(), "range of an f16 block");
  }
  // Brings the rows of an f16 block into its range.
  void level(const ForwardArguments& tiles) const {
    level_rows<<<static_cast<unsigned>(call.shape.tokens), 256, 0, stream>>>(
        call, exponents(), lifts(), tiles.shifts, std::int64_t{4} * tiles.vocab_tiles,
        std::int64_t{tiles.stored_tiles} * kTileColumns, active, reference);
    require_cuda(cudaGetLastError(), "range of an f16 block");
  }
  TokenFlags flags() const {
    return {active, repair, reinterpret_cast<std::uint8_t*>(base + layout.repair_rows),
            static_cast<int>(layout.token_pairs)};
  }
  float* exponents() const { return half() ? floats(layout.exponents) : nullptr; }
  // Writes c.records if they are wanted.
  void write_records(const Partials& of_tiles, const float* more) const {
    if (call.records == nullptr) return;
    cuda::write_records<<<row_blocks, dim3(kRowsPerBlock, kRecordParts), 0, stream>>>(
        call, of_tiles, reference, active, more);
    require_cuda(cudaGetLastError(), "records of tokens");
  }
  ForwardMode mode() const {
    if (call.bias != nullptr || call.softcap != 0.0f || call.shape.weighted_sum)
      return ForwardMode::kGeneral;
    if (call.shape.argmax) {
      const bool plain = call.far == nullptr && call.logit_scale > 0.0f;
      return plain ? ForwardMode::kPlainBest : ForwardMode::kGeneral;
    }
    return call.shape.entropy ? ForwardMode::kPlainEntropy : ForwardMode::kPlain;
  }

  const ForwardCall& call;
  const TileLayout layout;
  std::byte* const base;
  const cudaStream_t stream;
  float* const reference;
  float* const local_targets;
  const float* const targets;
  int* const active;
  int* const repair;
  const bool store;
  const unsigned row_blocks;
  const dim3 threads = dim3(kRowsPerBlock, kParts);
};

void launch_target_logits(const ForwardCall& c, float* logits, const TokenFlags& flags) {
  const std::int64_t slots = c.shape.tokens * c.shape.targets_per_token;
  if (slots == 0) return;
  with_type(c.shape.dtype, [&](auto type) {
    target_logits<decltype(type)><<<static_cast<unsigned>(ceil_div(slots, 8)), 256, 0,
                                    static_cast<cudaStream_t>(c.stream)>>>(c, logits, flags);
  });
  require_cuda(cudaGetLastError(), "target logits");
}

void require_support(const TileKernel& kernel, const ForwardCall& c) {
  const std::string reason = kernel.unsupported(c);
  if (!reason.empty()) throw Unsupported(reason);
}

}  // namespace

float* local_target_logits(const ForwardCall& c) { return Forward(c).local_targets; }

void target_logits_by_tiles(const TileKernel& kernel, const ForwardCall& c, float* logits) {
  require_support(kernel, c);
  launch_target_logits(c, logits, TokenFlags{});
}

void begin_forward_by_tiles(const TileKernel& kernel, const ForwardCall& c) {
  require_support(kernel, c);
  const Forward f(c);
  if (c.shape.tokens == 0) {
    if (c.first_token == 0)
      require_cuda(cudaMemsetAsync(c.bad_target, 0xff, sizeof(*c.bad_target), f.stream),
                   "bad_target");
    return;
  }
  const TokenFlags flags = f.flags();
  if (c.given_logits == nullptr && c.shape.targets_per_token == 1 && c.shape.tokens <= kFewTokens) {
    with_type(c.shape.dtype, [&](auto type) {
      target_logits_of_few<decltype(type)>
          <<<static_cast<unsigned>(f.layout.rows / 8), 256, 0, f.stream>>>(c, f.local_targets,
                                                                           flags, f.reference);
    });
    return require_cuda(cudaGetLastError(), "target logits");
  }
  if (c.given_logits == nullptr) {
    launch_target_logits(c, f.local_targets, flags);
  } else {
    clear_flags<<<1, 1, 0, f.stream>>>(c, flags);
    require_cuda(cudaGetLastError(), "flags of tokens");
  }
  guess_reference<<<static_cast<unsigned>(f.layout.token_pairs), 256, 0, f.stream>>>(
      c, f.targets, flags, f.reference);
  require_cuda(cudaGetLastError(), "reference exponents");
}

void selected_tiles(const TileKernel& kernel, const ForwardCall& c) {
  if (c.shape.tokens == 0) return;
  const Forward f(c);
  ForwardArguments tiles = f.tiles(kernel);
  require_cuda(
      cudaMemsetAsync(tiles.sums, 0,
                      static_cast<std::size_t>(f.layout.rows * f.layout.vocab_tiles) * 4, f.stream),
      "sums of the selected tiles");
  tiles.masses = nullptr;
  tiles.weighted = nullptr;
  tiles.list = c.far->list;
  tiles.wanted = f.active;
  const ForwardMode mode = c.bias != nullptr ? ForwardMode::kGeneral : ForwardMode::kPlain;
  sweep(c, tiles, nullptr, GatherPart::rows, [&](const TileOperands& operands, const auto& a) {
    kernel.launch(mode, false, operands, a, f.stream);
  });
  sum_far_masses(c);
  ForwardCall outputs = c;
  outputs.weighted_sum = nullptr;
  write_outputs<<<f.row_blocks, f.threads, 0, f.stream>>>(
      outputs, f.partials(tiles), f.reference, f.targets, nullptr, TokenFlags{}, f.active,
      c.far->estimate->far_sum, nullptr);
  require_cuda(cudaGetLastError(), "outputs");
  f.write_records(f.partials(tiles), c.far->estimate->far_sum);
}

void all_tiles(const TileKernel& kernel, const ForwardCall& c) {
  if (c.shape.tokens == 0) return;
  const Forward f(c);
  ForwardArguments tiles = f.tiles(kernel);
  const Partials partials = f.partials(tiles);
  if (f.half()) f.estimate(kernel, tiles);
  // The first round takes the targets' exponents as references. The second repairs tokens whose
  // sums left the range, with the greatest logit as reference.
  for (const bool again : {false, true}) {
    tiles.wanted = again ? f.repair : f.active;
    const int* const any = tiles.wanted + tiles.token_pairs;
    if (again) {
      ForwardArguments greatest = tiles;
      greatest.best = tiles.sums;  // free until the sums are computed
      sweep(c, greatest, any, GatherPart::rows, [&](const TileOperands& operands, const auto& a) {
        kernel.launch(ForwardMode::kReference, false, operands, a, f.stream);
      });
      set_reference<<<f.row_blocks, f.threads, 0, f.stream>>>(
          greatest.best, tiles.vocab_tiles, f.layout.rows, f.flags(), f.lifts(), f.reference);
      require_cuda(cudaGetLastError(), "reference exponents");
    }
    sweep(c, tiles, any, again ? GatherPart::rows : GatherPart::centroids,
          [&](const TileOperands& operands, const auto& a) {
            kernel.launch(f.mode(), f.store, operands, a, f.stream);
          });
    write_outputs<<<f.row_blocks, f.threads, 0, f.stream>>>(
        c, partials, f.reference, f.targets, again ? f.repair : nullptr,
        again ? TokenFlags{} : f.flags(), f.active, nullptr, f.exponents());
    require_cuda(cudaGetLastError(), "outputs");
  }
  f.write_records(partials, nullptr);
  if (f.half()) f.level(tiles);
}

void store_by_tiles(const TileKernel& kernel, const ForwardCall& c, const float* logit_bias,
                    float* results, float* tile_tops) {
  require_support(kernel, c);
  const Forward f(c);
  ForwardArguments tiles = f.tiles(kernel);
  tiles.best = tile_tops;
  tiles.best_index = nullptr;
  tiles.logit_weights = logit_bias;
  tiles.logits = results;
  tiles.tokens = c.shape.tokens;
  kernel.launch(ForwardMode::kLogits, false, operands_of(c), tiles, f.stream);
}

void forward_by_tiles(const TileKernel& kernel, const ForwardCall& c) {
  begin_forward_by_tiles(kernel, c);
  all_tiles(kernel, c);
}

void gradient_block_by_tiles(const TileKernel& kernel, const BlockCall& b) {
  const ForwardCall& c = b.chunk;
  if (c.shape.tokens == 0) return;
  const bool far = c.far != nullptr;
  TileOperands operands = operands_of(c);
  operands.vocab = b.vocab_count;
  operands.block = b.block;
  operands.ranges = {};
  const auto element = static_cast<std::int64_t>(size_of(c.shape.dtype));
  operands.rows =
      far ? b.weight_rows
          : static_cast<const std::byte*>(c.weight) + b.vocab_begin * c.weight_stride * element;
  if (far && !c.far->order.identity) operands.row_stride = c.shape.dim;
  const float* const bias = far ? c.far->bias : c.bias;
  const float* const logit_weights = far ? c.far->logit_weights : c.logit_weights;
  ForwardArguments tiles{};
  tiles.vocab = static_cast<int>(b.vocab_count);
  tiles.token_pairs = static_cast<int>(padded_tokens(c.shape.tokens) / kClusterRows);
  tiles.vocab_tiles = static_cast<int>(ceil_div(b.vocab_count, kTileColumns));
  tiles.group = group_of(kernel, c.shape.dim);
  tiles.stored_tiles = tiles.vocab_tiles;
  tiles.scale = c.logit_scale;
  tiles.cap = c.softcap;
  tiles.bias = bias == nullptr ? nullptr : bias + b.vocab_begin;
  tiles.logit_weights = logit_weights == nullptr ? nullptr : logit_weights + b.vocab_begin;
  if (far) {
    tiles.first_tile = static_cast<int>(b.vocab_begin / kTileColumns);
    tiles.list = c.far->list;
    tiles.list_begin = c.far->list_begin + tiles.first_tile;
    tiles.sampled = static_cast<float>(c.far->sample.every);
    tiles.padded_tokens = padded_tokens(c.shape.tokens);
    if (samples_estimates(*c.far)) {
      tiles.masses = c.far->mass;
      tiles.groups = c.far->groups + tiles.first_tile;
      tiles.reference = c.reference;
    }
  }
  tiles.wanted = c.active;
  tiles.smooths = !b.smoothing_apart;
  tiles.rows = b.rows;
  tiles.block_scale = b.scales;
  const bool plain = c.bias == nullptr && c.softcap == 0.0f && !b.entropy_part &&
                     (b.smoothing_apart || !b.smoothing);
  kernel.launch(plain ? ForwardMode::kPlainGradient : ForwardMode::kGradient, true, operands, tiles,
                c.stream);
}

}  // namespace logitless::cuda
