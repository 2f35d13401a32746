// The forward call: workspace, tensor maps, launches.
#include <algorithm>
#include <array>
#include <tuple>

#include "kernels/cuda/device/error.cuh"
#include "kernels/cuda/device/forward_sm90.cuh"
#include "kernels/cuda/device/tensor_map.cuh"
#include "kernels/cuda/device/token_kernels.cuh"
#include "kernels/cuda/device_kernels.h"
#include "kernels/device_far.h"

namespace logitless::cuda {
namespace {

// Offsets in bytes of the workspace.
struct ForwardLayout {
  explicit ForwardLayout(const ForwardShape& s)
      : rows(padded_tokens(s.tokens)),
        token_pairs(rows / kClusterRows),
        word_tiles(ceil_div(s.vocab, kTileColumns)) {
    const std::int64_t map = rows * word_tiles * 4;
    reference = take(rows * 4);
    target_logits = take(s.tokens * s.targets_per_token * 4);
    active = take((token_pairs + 1) * 4);
    repair = take((token_pairs + 1) * 4);
    sums = take(map);
    entropy = take(s.entropy ? map : 0);
    weighted = take(s.weighted_sum ? map : 0);
    best = take(s.argmax ? map : 0);
    best_index = take(s.argmax ? map : 0);
  }
  std::size_t take(std::int64_t bytes) {
    const std::size_t at = total;
    total += static_cast<std::size_t>(ceil_div(bytes, 256) * 256);
    return at;
  }

  std::int64_t rows, token_pairs, word_tiles;
  std::size_t total = 0;
  std::size_t reference, target_logits, active, repair, sums, entropy, weighted, best, best_index;
};

// Pairs of token tiles whose hidden states take a third of an H200's second-level cache.
int group_of(std::int64_t dim) {
  constexpr std::int64_t kBytes = std::int64_t{16} << 20;
  return static_cast<int>(std::max<std::int64_t>(1, kBytes / (kClusterRows * dim * 2)));
}

// A launch for each group, of some length: within one the clusters stay close enough together to
// share what they read, over a long one they drift apart.
template <ForwardMode kMode, bool kStore>
void launch(const CUtensorMap& hidden, const CUtensorMap& weight, const CUtensorMap& block,
            const ForwardArguments& all, cudaStream_t stream) {
  const auto kernel = forward_tiles<kMode, kStore>;
  allow_shared(kernel, kTileShared);
  const int processors = processor_count();
  if (all.list != nullptr) {
    kernel<<<processors / kClusterCtas * kClusterCtas, kTileThreads, kTileShared, stream>>>(
        hidden, weight, block, all);
    require_cuda(cudaGetLastError(), "kept tiles of the forward kernel");
    return;
  }
  constexpr int kLeastRounds = 16;  // of a launch, or its last one weighs too much
  ForwardArguments a = all;
  const int clusters = processors / kClusterCtas;
  const auto groups = static_cast<int>(ceil_div(all.token_pairs, all.group));
  a.group = static_cast<int>(ceil_div(all.token_pairs, groups));
  const bool apart = a.group * all.word_tiles >= kLeastRounds * clusters;
  const int step = apart ? a.group : all.token_pairs;
  for (a.first_pair = 0; a.first_pair < all.token_pairs; a.first_pair += step) {
    a.launch_pairs = std::min(step, all.token_pairs - a.first_pair);
    const int ctas = std::min(clusters, a.launch_pairs * a.word_tiles) * kClusterCtas;
    kernel<<<ctas, kTileThreads, kTileShared, stream>>>(hidden, weight, block, a);
    require_cuda(cudaGetLastError(), "forward kernel");
  }
}

CUtensorMap word_map(const void* rows, std::int64_t words, std::int64_t dim, std::int64_t stride) {
  return matrix_map(rows, DType::bf16, words, dim, stride, kTileColumns / 2);
}

// run(map of the words, arguments) over the vocabulary: in one piece, or in the far field's slabs
// of words by position, nothing of which is read where *wanted is 0.
template <typename Run>
void sweep(const ForwardCall& c, const ForwardArguments& tiles, const int* wanted, GatherPart part,
           const Run& run) {
  if (c.far == nullptr)
    return run(word_map(c.weight, c.shape.vocab, c.shape.dim, c.weight_stride), tiles);
  const FarCall& far = *c.far;
  for (FarSlab slab; slab.first < c.shape.vocab; slab.first += slab.words) {
    slab.words = std::min(far.slab_words, c.shape.vocab - slab.first);
    const void* const rows =
        gather_slab(c, slab, part, part == GatherPart::rows ? wanted : nullptr);
    ForwardArguments a = tiles;
    const std::int64_t first = slab.first / kTileColumns;
    const auto from = [&](auto* values, std::int64_t offset) {
      return values == nullptr ? nullptr : values + offset;
    };
    a.vocab = static_cast<int>(slab.words);
    a.word_tiles = static_cast<int>(ceil_div(slab.words, kTileColumns));
    a.bias = from(a.bias, slab.first);
    a.omega = from(a.omega, slab.first);
    for (float** const partial : {&a.sums, &a.entropy, &a.weighted, &a.best})
      *partial = from(*partial, first * a.padded_tokens);
    a.masses = from(a.masses, 2 * first * a.padded_tokens);
    if (a.best_index != nullptr) a.best_index += first * a.padded_tokens;
    a.words = far.order.words + slab.first;
    if (a.list != nullptr) {
      a.first_tile = static_cast<int>(first);
      a.list_begin = far.list_begin + first;
    }
    run(word_map(rows, slab.words, c.shape.dim, far.order.identity ? c.weight_stride : c.shape.dim),
        a);
  }
}

}  // namespace

std::string forward_unsupported(const ForwardShape& s) {
  if (s.dtype != DType::bf16)
    return concat("multiplies bf16, hidden and weight are ", name_of(s.dtype));
  if (s.dim % 8 != 0) return concat("dim: expected a multiple of 8, got ", s.dim);
  return {};
}

std::string forward_unsupported(const ForwardCall& c) {
  const std::string reason = forward_unsupported(c.shape);
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

std::size_t forward_workspace_bytes(const ForwardShape& shape) {
  const std::size_t forward = ForwardLayout(shape).total;
  // The products come when the forward's is free again.
  return shape.gradients ? std::max(forward, products_bytes(shape.tokens, shape.dim, shape.vocab))
                         : forward;
}

void forward(const ForwardCall& c) {
  const auto stream = static_cast<cudaStream_t>(c.stream);
  const std::string reason = forward_unsupported(c);
  if (!reason.empty()) throw Unsupported(reason);
  if (c.first_token == 0)
    require_cuda(cudaMemsetAsync(c.bad_target, 0xff, sizeof(*c.bad_target), stream), "bad_target");
  if (c.shape.tokens == 0) return;

  const ForwardLayout layout(c.shape);
  auto* const base = static_cast<std::byte*>(c.workspace);
  const auto floats = [&](std::size_t at, bool wanted = true) {
    return wanted ? reinterpret_cast<float*>(base + at) : nullptr;
  };
  float* const reference = c.reference != nullptr ? c.reference : floats(layout.reference);
  float* const targets = floats(layout.target_logits);
  int* const active = c.active != nullptr ? c.active : reinterpret_cast<int*>(base + layout.active);
  auto* const repair = reinterpret_cast<int*>(base + layout.repair);
  require_cuda(cudaMemsetAsync(repair, 0, (layout.token_pairs + 1) * sizeof(int), stream),
               "workspace");
  require_cuda(cudaMemsetAsync(active, 0, (layout.token_pairs + 1) * sizeof(int), stream),
               "workspace");

  const std::int64_t dim = c.shape.dim;
  const CUtensorMap hidden =
      matrix_map(c.hidden, DType::bf16, c.shape.tokens, dim, c.hidden_stride, kTileRows);
  const bool store = c.stored_words > 0;
  const CUtensorMap block = store ? matrix_map(c.block.data, DType::bf16, c.shape.tokens,
                                               c.block.stride, c.block.stride, 64)
                                  : hidden;
  ForwardArguments tiles{};
  tiles.vocab = static_cast<int>(c.shape.vocab);
  tiles.token_pairs = static_cast<int>(layout.token_pairs);
  tiles.word_tiles = static_cast<int>(layout.word_tiles);
  tiles.steps = static_cast<int>(ceil_div(dim, kStep));
  tiles.group = group_of(dim);
  tiles.stored_tiles = static_cast<int>(ceil_div(c.stored_words, kTileColumns));
  tiles.padded_tokens = layout.rows;
  tiles.scale = c.logit_scale;
  tiles.cap = c.softcap;
  tiles.bias = c.far == nullptr ? c.bias : c.far->bias;
  tiles.omega = c.far == nullptr ? c.omega : c.far->omega;
  if (c.far != nullptr) tiles.masses = c.far->mass;
  tiles.reference = reference;
  tiles.sums = floats(layout.sums);
  tiles.entropy = floats(layout.entropy, c.shape.entropy);
  tiles.weighted = floats(layout.weighted, c.shape.weighted_sum);
  tiles.best = floats(layout.best, c.shape.argmax);
  tiles.best_index = reinterpret_cast<int*>(floats(layout.best_index, c.shape.argmax));
  const Partials partials{layout.rows,    tiles.word_tiles, tiles.sums,      tiles.entropy,
                          tiles.weighted, tiles.best,       tiles.best_index};
  const bool general = c.bias != nullptr || c.softcap != 0.0f || c.shape.entropy ||
                       c.shape.weighted_sum || c.shape.argmax;
  const dim3 threads(kRowsPerBlock, kParts);
  const auto row_blocks = static_cast<unsigned>(layout.rows / kRowsPerBlock);

  const std::int64_t slots = c.shape.tokens * c.shape.targets_per_token;
  target_logits<<<static_cast<unsigned>(ceil_div(slots, 8)), 256, 0, stream>>>(c, targets, active,
                                                                               tiles.token_pairs);
  require_cuda(cudaGetLastError(), "target logits");

  guess_reference<<<static_cast<unsigned>(layout.rows / 256), 256, 0, stream>>>(
      c, targets, layout.rows, reference);
  require_cuda(cudaGetLastError(), "reference exponents");
  if (c.far != nullptr) gather_vectors(c);
  if (c.far != nullptr && c.far->estimate != nullptr) {
    if (c.first_token == 0) prepare_means(c);
    estimate_masses(c);
    const int per_token = c.shape.targets_per_token;
    sort_tokens(c, nullptr,
                std::array{TokenValues{c.far->estimate->total, 1, 0, 1},
                           TokenValues{targets, per_token, 1, per_token}});
    select_estimated(c, targets);
    require_cuda(
        cudaMemsetAsync(tiles.sums, 0,
                        static_cast<std::size_t>(layout.rows * layout.word_tiles) * 4, stream),
        "sums of the kept tiles");
    tiles.masses = nullptr;
    tiles.weighted = nullptr;
    tiles.list = c.far->list;
    tiles.wanted = active;
    const auto run = c.bias != nullptr ? launch<ForwardMode::kGeneral, false>
                                       : launch<ForwardMode::kPlain, false>;
    sweep(c, tiles, nullptr, GatherPart::rows,
          [&](const CUtensorMap& weight, const auto& a) { run(hidden, weight, block, a, stream); });
    sum_far_masses(c);
    Partials sums = partials;
    sums.weighted = nullptr;
    ForwardCall outputs = c;
    outputs.weighted_sum = nullptr;
    write_outputs<<<row_blocks, threads, 0, stream>>>(outputs, sums, reference, targets, nullptr,
                                                      nullptr, active, c.far->estimate->far_sum);
    require_cuda(cudaGetLastError(), "outputs");
    return;
  }
  // First against the targets' exponents; then, for tokens whose sums left the range, against the
  // greatest logit's.
  for (const bool again : {false, true}) {
    tiles.wanted = again ? repair : active;
    const int* const any = tiles.wanted + tiles.token_pairs;
    if (again) {
      ForwardArguments greatest = tiles;
      greatest.best = tiles.sums;  // free until the sums are made
      sweep(c, greatest, any, GatherPart::rows, [&](const CUtensorMap& weight, const auto& a) {
        launch<ForwardMode::kReference, false>(hidden, weight, block, a, stream);
      });
      set_reference<<<row_blocks, threads, 0, stream>>>(greatest.best, tiles.word_tiles,
                                                        layout.rows, repair, reference);
      require_cuda(cudaGetLastError(), "reference exponents");
    }
    const auto run =
        general ? store ? launch<ForwardMode::kGeneral, true> : launch<ForwardMode::kGeneral, false>
        : store ? launch<ForwardMode::kPlain, true>
                : launch<ForwardMode::kPlain, false>;
    sweep(c, tiles, any, again ? GatherPart::rows : GatherPart::centroids,
          [&](const CUtensorMap& weight, const auto& a) { run(hidden, weight, block, a, stream); });
    write_outputs<<<row_blocks, threads, 0, stream>>>(c, partials, reference, targets,
                                                      again ? repair : nullptr,
                                                      again ? nullptr : repair, active, nullptr);
    require_cuda(cudaGetLastError(), "outputs");
  }
}

void gradient_block(const BlockCall& b) {
  const ForwardCall& c = b.chunk;
  if (c.shape.tokens == 0) return;
  const auto stream = static_cast<cudaStream_t>(c.stream);
  const bool far = c.far != nullptr;
  const void* const words =
      far ? b.weight_rows
          : static_cast<const std::uint16_t*>(c.weight) + b.first_word * c.weight_stride;
  const float* const bias = far ? c.far->bias : c.bias;
  const float* const omega = far ? c.far->omega : c.omega;
  const CUtensorMap hidden =
      matrix_map(c.hidden, DType::bf16, c.shape.tokens, c.shape.dim, c.hidden_stride, kTileRows);
  const CUtensorMap weight = word_map(
      words, b.words, c.shape.dim, far && !c.far->order.identity ? c.shape.dim : c.weight_stride);
  const CUtensorMap block =
      matrix_map(b.block.data, DType::bf16, c.shape.tokens, b.block.stride, b.block.stride, 64);
  ForwardArguments tiles{};
  tiles.vocab = static_cast<int>(b.words);
  tiles.token_pairs = static_cast<int>(padded_tokens(c.shape.tokens) / kClusterRows);
  tiles.word_tiles = static_cast<int>(ceil_div(b.words, kTileColumns));
  tiles.steps = static_cast<int>(ceil_div(c.shape.dim, kStep));
  tiles.group = group_of(c.shape.dim);
  tiles.stored_tiles = tiles.word_tiles;
  tiles.scale = c.logit_scale;
  tiles.cap = c.softcap;
  tiles.bias = bias == nullptr ? nullptr : bias + b.first_word;
  tiles.omega = omega == nullptr ? nullptr : omega + b.first_word;
  if (far) {
    tiles.first_tile = static_cast<int>(b.first_word / kTileColumns);
    tiles.list = c.far->list;
    tiles.list_begin = c.far->list_begin + tiles.first_tile;
    tiles.sampled = static_cast<float>(c.far->sample.every);
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
