// Host side of the forward call: workspace, tensor maps, launches.
#include <algorithm>
#include <tuple>

#include "kernels/cuda/device/error.cuh"
#include "kernels/cuda/device/kernels_of_file.cuh"
#include "kernels/cuda/device/tensor_map.cuh"
#include "kernels/cuda/head/forward_sm90.cuh"
#include "kernels/cuda/head/sizes.h"
#include "kernels/cuda/head/token_kernels.cuh"
#include "kernels/device/far.h"
#include "kernels/device/gradient.h"
#include "kernels/device/order.h"

namespace logitless::cuda {
namespace {

// Pairs of token tiles whose hidden states take a third of an H200's L2.
int group_of(std::int64_t dim) {
  constexpr std::int64_t kBytes = std::int64_t{16} << 20;
  return static_cast<int>(std::max<std::int64_t>(1, kBytes / (kClusterRows * dim * 2)));
}

// Launches each group separately if it is long enough. Within a short launch the clusters stay
// close enough together to share operands in L2; over a long one they drift apart.
template <ForwardMode kMode, bool kStore>
void launch(const CUtensorMap& hidden, const CUtensorMap& weight, const BlockMaps& block,
            const ForwardArguments& all, cudaStream_t stream) {
  const auto kernel = forward_tiles<kMode, kStore>;
  allow_shared(kernel, kTileShared);
  const int processors = processor_count();
  if (all.list != nullptr) {
    kernel<<<processors / kClusterCtas * kClusterCtas, kTileThreads, kTileShared, stream>>>(
        hidden, weight, block, all);
    require_cuda(cudaGetLastError(), "selected tiles of the forward kernel");
    return;
  }
  constexpr int kLeastRounds = 16;  // tiles per cluster of a launch, or its tail costs too much
  ForwardArguments a = all;
  const int clusters = processors / kClusterCtas;
  const auto groups = static_cast<int>(ceil_div(all.token_pairs, all.group));
  a.group = static_cast<int>(ceil_div(all.token_pairs, groups));
  const bool apart = a.group * all.vocab_tiles >= kLeastRounds * clusters;
  const int step = apart ? a.group : all.token_pairs;
  for (a.first_pair = 0; a.first_pair < all.token_pairs; a.first_pair += step) {
    a.launch_pairs = std::min(step, all.token_pairs - a.first_pair);
    const int ctas = std::min(clusters, a.launch_pairs * a.vocab_tiles) * kClusterCtas;
    kernel<<<ctas, kTileThreads, kTileShared, stream>>>(hidden, weight, block, a);
    require_cuda(cudaGetLastError(), "forward kernel");
  }
}

template <ForwardMode kMode>
auto launch_of(bool store) {
  return store ? launch<kMode, true> : launch<kMode, false>;
}
auto launch_of(ForwardMode mode, bool store) {
  return mode == ForwardMode::kGeneral        ? launch_of<ForwardMode::kGeneral>(store)
         : mode == ForwardMode::kPlainEntropy ? launch_of<ForwardMode::kPlainEntropy>(store)
                                              : launch_of<ForwardMode::kPlain>(store);
}

CUtensorMap vocab_map(const void* rows, std::int64_t vocab_count, std::int64_t dim,
                      std::int64_t stride) {
  return matrix_map(rows, DType::bf16, vocab_count, dim, stride, kTileColumns / 2);
}

// run(map of the weight, arguments) over the vocabulary. It runs once, or for each vocabulary block
// of the far field with rows gathered by position. Nothing is read where *wanted is 0.
template <typename Run>
void sweep(const ForwardCall& c, const ForwardArguments& tiles, const int* wanted, GatherPart part,
           const Run& run) {
  if (c.far == nullptr)
    return run(vocab_map(c.weight, c.shape.vocab, c.shape.dim, c.weight_stride), tiles);
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
    run(vocab_map(rows, vocab_block.vocab_count, c.shape.dim,
                  far.order.identity ? c.weight_stride : c.shape.dim),
        a);
  }
}

}  // namespace

std::string hopper_call_unsupported(const ForwardCall& c) {
  const std::string reason = hopper_unsupported(c.shape);
  if (!reason.empty()) return reason;
  for (const auto& [name, data, stride] :
       {std::tuple{"hidden", c.hidden, c.hidden_stride}, {"weight", c.weight, c.weight_stride}}) {
    if (reinterpret_cast<std::uintptr_t>(data) % 16 != 0)
      return concat(name, ": expected an address that is a multiple of 16");
    if (stride % 8 != 0 || stride < c.shape.dim) {
      return concat(name, ": expected rows a multiple of 8 elements apart, at least ", c.shape.dim,
                    ", got ", stride);
    }
  }
  return {};
}

namespace {

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

  ForwardArguments tiles() const {
    const ForwardShape& s = call.shape;
    ForwardArguments a{};
    a.vocab = static_cast<int>(s.vocab);
    a.token_pairs = static_cast<int>(layout.token_pairs);
    a.vocab_tiles = static_cast<int>(layout.vocab_tiles);
    a.steps = static_cast<int>(ceil_div(s.dim, kStep));
    a.group = group_of(s.dim);
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
    return a;
  }
  CUtensorMap hidden() const {
    return matrix_map(call.hidden, DType::bf16, call.shape.tokens, call.shape.dim,
                      call.hidden_stride, kTileRows);
  }
  BlockMaps block() const {
    return store ? block_maps(call.block, call.ranges, call.shape.tokens, 64) : BlockMaps{};
  }
  Partials partials(const ForwardArguments& a) const {
    return {layout.rows, a.vocab_tiles, a.sums, a.entropy, a.weighted, a.best, a.best_index};
  }
  // Writes c.records if they are wanted.
  void write_records(const Partials& of_tiles, const float* more) const {
    if (call.records == nullptr) return;
    cuda::write_records<<<row_blocks, dim3(kRowsPerBlock, kRecordParts), 0, stream>>>(
        call, of_tiles, reference, active, more);
    require_cuda(cudaGetLastError(), "records of tokens");
  }
  ForwardMode mode() const {
    if (call.bias != nullptr || call.softcap != 0.0f || call.shape.weighted_sum ||
        call.shape.argmax)
      return ForwardMode::kGeneral;
    return call.shape.entropy ? ForwardMode::kPlainEntropy : ForwardMode::kPlain;
  }

  const ForwardCall& call;
  const HopperLayout layout;
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
  target_logits<<<static_cast<unsigned>(ceil_div(slots, 8)), 256, 0,
                  static_cast<cudaStream_t>(c.stream)>>>(c, logits, flags);
  require_cuda(cudaGetLastError(), "target logits");
}

}  // namespace

float* hopper_local_target_logits(const ForwardCall& c) { return Forward(c).local_targets; }

void hopper_target_logits(const ForwardCall& c, float* logits) {
  const std::string reason = hopper_call_unsupported(c);
  if (!reason.empty()) throw Unsupported(reason);
  launch_target_logits(c, logits, TokenFlags{});
}

void hopper_begin_forward(const ForwardCall& c) {
  const std::string reason = hopper_call_unsupported(c);
  if (!reason.empty()) throw Unsupported(reason);
  const Forward f(c);
  if (c.shape.tokens == 0) {
    if (c.first_token == 0)
      require_cuda(cudaMemsetAsync(c.bad_target, 0xff, sizeof(*c.bad_target), f.stream),
                   "bad_target");
    return;
  }
  const TokenFlags flags{f.active, f.repair, static_cast<int>(f.layout.token_pairs)};
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

void hopper_forward_selected(const ForwardCall& c) {
  if (c.shape.tokens == 0) return;
  const Forward f(c);
  ForwardArguments tiles = f.tiles();
  require_cuda(
      cudaMemsetAsync(tiles.sums, 0,
                      static_cast<std::size_t>(f.layout.rows * f.layout.vocab_tiles) * 4, f.stream),
      "sums of the selected tiles");
  tiles.masses = nullptr;
  tiles.weighted = nullptr;
  tiles.list = c.far->list;
  tiles.wanted = f.active;
  const CUtensorMap hidden = f.hidden();
  const BlockMaps block = f.block();
  const auto run =
      c.bias != nullptr ? launch<ForwardMode::kGeneral, false> : launch<ForwardMode::kPlain, false>;
  sweep(c, tiles, nullptr, GatherPart::rows,
        [&](const CUtensorMap& weight, const auto& a) { run(hidden, weight, block, a, f.stream); });
  sum_far_masses(c);
  ForwardCall outputs = c;
  outputs.weighted_sum = nullptr;
  write_outputs<<<f.row_blocks, f.threads, 0, f.stream>>>(outputs, f.partials(tiles), f.reference,
                                                          f.targets, nullptr, nullptr, f.active,
                                                          c.far->estimate->far_sum);
  require_cuda(cudaGetLastError(), "outputs");
  f.write_records(f.partials(tiles), c.far->estimate->far_sum);
}

void hopper_forward_tiles(const ForwardCall& c) {
  if (c.shape.tokens == 0) return;
  const Forward f(c);
  ForwardArguments tiles = f.tiles();
  const Partials partials = f.partials(tiles);
  const CUtensorMap hidden = f.hidden();
  const BlockMaps block = f.block();
  // The first round takes the targets' exponents as references. The second repairs tokens whose
  // sums left the range, with the greatest logit as reference.
  for (const bool again : {false, true}) {
    tiles.wanted = again ? f.repair : f.active;
    const int* const any = tiles.wanted + tiles.token_pairs;
    if (again) {
      ForwardArguments greatest = tiles;
      greatest.best = tiles.sums;  // free until the sums are computed
      sweep(c, greatest, any, GatherPart::rows, [&](const CUtensorMap& weight, const auto& a) {
        launch<ForwardMode::kReference, false>(hidden, weight, block, a, f.stream);
      });
      set_reference<<<f.row_blocks, f.threads, 0, f.stream>>>(greatest.best, tiles.vocab_tiles,
                                                              f.layout.rows, f.repair, f.reference);
      require_cuda(cudaGetLastError(), "reference exponents");
    }
    const auto run = launch_of(f.mode(), f.store);
    sweep(
        c, tiles, any, again ? GatherPart::rows : GatherPart::centroids,
        [&](const CUtensorMap& weight, const auto& a) { run(hidden, weight, block, a, f.stream); });
    write_outputs<<<f.row_blocks, f.threads, 0, f.stream>>>(
        c, partials, f.reference, f.targets, again ? f.repair : nullptr, again ? nullptr : f.repair,
        f.active, nullptr);
    require_cuda(cudaGetLastError(), "outputs");
  }
  f.write_records(partials, nullptr);
}

void hopper_forward(const ForwardCall& c) {
  hopper_begin_forward(c);
  hopper_forward_tiles(c);
}

void hopper_gradient_block(const BlockCall& b) {
  const ForwardCall& c = b.chunk;
  if (c.shape.tokens == 0) return;
  const auto stream = static_cast<cudaStream_t>(c.stream);
  const bool far = c.far != nullptr;
  const void* const vocab_ids =
      far ? b.weight_rows
          : static_cast<const std::uint16_t*>(c.weight) + b.vocab_begin * c.weight_stride;
  const float* const bias = far ? c.far->bias : c.bias;
  const float* const logit_weights = far ? c.far->logit_weights : c.logit_weights;
  const CUtensorMap hidden =
      matrix_map(c.hidden, DType::bf16, c.shape.tokens, c.shape.dim, c.hidden_stride, kTileRows);
  const CUtensorMap weight =
      vocab_map(vocab_ids, b.vocab_count, c.shape.dim,
                far && !c.far->order.identity ? c.shape.dim : c.weight_stride);
  const BlockMaps block = block_maps(b.block, {}, c.shape.tokens, 64);
  ForwardArguments tiles{};
  tiles.vocab = static_cast<int>(b.vocab_count);
  tiles.token_pairs = static_cast<int>(padded_tokens(c.shape.tokens) / kClusterRows);
  tiles.vocab_tiles = static_cast<int>(ceil_div(b.vocab_count, kTileColumns));
  tiles.steps = static_cast<int>(ceil_div(c.shape.dim, kStep));
  tiles.group = group_of(c.shape.dim);
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
  const bool plain = c.bias == nullptr && c.softcap == 0.0f && !b.entropy_part &&
                     (b.smoothing_apart || !b.smoothing);
  const auto run =
      plain ? launch<ForwardMode::kPlainGradient, true> : launch<ForwardMode::kGradient, true>;
  run(hidden, weight, block, tiles, stream);
}

}  // namespace logitless::cuda
