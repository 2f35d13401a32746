#include "logitless/vocab_order.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <functional>
#include <initializer_list>
#include <numeric>
#include <optional>
#include <tuple>

#include "core/check.h"
#include "core/parallel.h"
#include "head/far/device_order.h"
#include "head/far/order_file.h"
#include "head/far/shared_order.h"
#include "head/shard_plan.h"
#include "head/validate.h"
#include "head/vocab_order_access.h"
#include "kernels/cpu_head.h"
#include "kernels/cpu_tensor.h"
#include "logitless/head.h"
#include "logitless/tensor_file.h"
#include "math/mix.h"

namespace logitless {

VocabOrder::VocabOrder(std::span<const std::int64_t> vocab_ids, std::span<const float> average) {
  const auto vocab = static_cast<std::int64_t>(vocab_ids.size());
  require(vocab >= 1 && vocab <= INT32_MAX - kVocabTile, "vocab_ids: expected 1 to ",
          INT32_MAX - kVocabTile, " vocabulary entries, got ", vocab);
  require(average.size() == vocab_ids.size(), "average: expected ", vocab, " values, got ",
          average.size());
  auto data = std::make_shared<Data>();
  data->vocab_ids.assign(vocab_ids.begin(), vocab_ids.end());
  data->average.assign(average.begin(), average.end());
  data->positions.assign(vocab_ids.size(), -1);
  for (std::int64_t i = 0; i < vocab; ++i) {
    const std::int64_t vocab_id = vocab_ids[i];
    require(vocab_id >= 0 && vocab_id < vocab, "vocab_ids: ", vocab_id, " at position ", i,
            " is outside [0, ", vocab, ")");
    require(data->positions[vocab_id] < 0, "vocab_ids: ", vocab_id, " stands at position ",
            data->positions[vocab_id], " and at ", i);
    data->positions[vocab_id] = static_cast<std::int32_t>(i);
    data->identity = data->identity && vocab_id == i;
    require(std::isfinite(average[i]) && average[i] >= 0.0f, "average: expected numbers >= 0, got ",
            average[i], " for vocabulary entry ", i);
  }
  data->share.resize(vocab_ids.size());
  for (std::int64_t first = 0; first < vocab; first += kVocabTile) {
    const std::int64_t end = std::min(first + kVocabTile, vocab);
    double total = 0.0;
    for (std::int64_t i = first; i < end; ++i) total += static_cast<double>(average[vocab_ids[i]]);
    for (std::int64_t i = first; i < end; ++i) {
      data->share[i] = total > 0.0 ? static_cast<float>(average[vocab_ids[i]] / total)
                                   : 1.0f / static_cast<float>(end - first);
    }
  }
  data_ = std::move(data);
}

std::int64_t VocabOrder::vocab() const {
  return data_ == nullptr ? 0 : static_cast<std::int64_t>(data_->vocab_ids.size());
}
std::span<const std::int64_t> VocabOrder::vocab_ids() const {
  return data_ == nullptr ? std::span<const std::int64_t>() : data_->vocab_ids;
}
std::span<const std::int32_t> VocabOrder::positions() const {
  return data_ == nullptr ? std::span<const std::int32_t>() : data_->positions;
}
std::span<const float> VocabOrder::average() const {
  return data_ == nullptr ? std::span<const float>() : data_->average;
}
std::span<const float> VocabOrder::share() const {
  return data_ == nullptr ? std::span<const float>() : data_->share;
}

std::span<const std::int32_t> VocabOrder::places() const {
  return data_ == nullptr ? std::span<const std::int32_t>() : data_->places;
}

VocabOrder VocabOrderAccess::with_positions(const VocabOrder& order,
                                            std::vector<std::int32_t> places) {
  auto data = order.empty() ? std::make_shared<Data>() : std::make_shared<Data>(*order.data_);
  data->common = mix64(places.size());
  for (const std::int32_t place : places)
    data->common = mix64(data->common ^ static_cast<std::uint64_t>(place));
  data->places = std::move(places);
  data->on_devices = std::make_shared<DeviceCopies>();
  VocabOrder out;
  out.data_ = std::move(data);
  return out;
}

bool VocabOrder::has_moments() const { return dim() > 0; }
std::int64_t VocabOrder::dim() const { return data_ == nullptr ? 0 : data_->dim; }
std::span<const float> VocabOrder::axes() const {
  return data_ == nullptr ? std::span<const float>() : data_->axes;
}
std::span<const float> VocabOrder::variance() const {
  return data_ == nullptr ? std::span<const float>() : data_->variance;
}
std::span<const float> VocabOrder::log2_caution() const {
  return data_ == nullptr ? std::span<const float>() : data_->log2_caution;
}

VocabOrder VocabOrder::with_moments(std::int64_t dim, std::span<const float> axes,
                                    std::span<const float> variance,
                                    std::span<const float> log2_caution) const {
  require(!empty(), "order: expected one that was made or loaded, got an empty one");
  const std::int64_t tiles = ceil_div(vocab(), kVocabTile);
  // dim * dim and tiles * dim must fit in 64 bits.
  require(dim >= 1 && dim <= INT32_MAX, "dim: expected 1 to ", INT32_MAX, ", got ", dim);
  for (const auto& [name, values, size] :
       {std::tuple{"axes", axes, dim * dim}, std::tuple{"variance", variance, tiles * dim},
        std::tuple{"log2_caution", log2_caution, tiles}}) {
    require(static_cast<std::int64_t>(values.size()) == size, name, ": expected ", size,
            " values for ", tiles, " tiles of dim ", dim, ", got ", values.size());
    for (const float v : values) {
      require(std::isfinite(v) && (v >= 0.0f || values.data() == axes.data()), name,
              ": expected finite numbers", values.data() == axes.data() ? "" : " >= 0", ", got ",
              v);
    }
  }
  auto data = std::make_shared<Data>(*data_);
  data->dim = dim;
  data->axes.assign(axes.begin(), axes.end());
  data->variance.assign(variance.begin(), variance.end());
  data->log2_caution.assign(log2_caution.begin(), log2_caution.end());
  data->moments_on_devices = std::make_shared<DeviceCopies>();
  VocabOrder out;
  out.data_ = std::move(data);
  return out;
}

namespace {
std::span<const float> floats(const ConstTensorView& view) {
  return {static_cast<const float*>(view.data()), static_cast<std::size_t>(view.numel())};
}
ConstTensorView view_of(std::span<const float> values, std::span<const std::int64_t> sizes) {
  return ConstTensorView(values.data(), DType::f32, sizes);
}
}  // namespace

void append_order(const VocabOrder& order, const std::string& prefix,
                  std::vector<NamedTensor>& tensors) {
  const std::int64_t vocab[] = {order.vocab()};
  tensors.push_back({prefix + "vocab_ids", {order.vocab_ids().data(), DType::i64, vocab}});
  tensors.push_back({prefix + "average", view_of(order.average(), vocab)});
  if (!order.places().empty()) {
    const auto places = static_cast<std::int64_t>(order.places().size());
    tensors.push_back(
        {prefix + "places", {order.places().data(), DType::i32, std::span(&places, 1)}});
  }
  if (!order.has_moments()) return;
  const std::int64_t tiles = ceil_div(order.vocab(), kVocabTile);
  const std::int64_t square[] = {order.dim(), order.dim()};
  const std::int64_t each[] = {tiles, order.dim()};
  tensors.push_back({prefix + "axes", view_of(order.axes(), square)});
  tensors.push_back({prefix + "variance", view_of(order.variance(), each)});
  tensors.push_back({prefix + "log2_caution", view_of(order.log2_caution(), std::span(&tiles, 1))});
}

VocabOrder order_of(const TensorFile& file, const std::string& path, const std::string& prefix) {
  // Returns a tensor of these sizes; -1 stands for a size, named `open`, that the tensor
  // determines.
  const auto tensor = [&](const char* name, DType dtype, std::initializer_list<std::int64_t> sizes,
                          const char* open = "") {
    const ConstTensorView view = file.tensor(prefix + name);
    bool fits = view.dtype() == dtype && view.rank() == static_cast<int>(sizes.size());
    std::string text;
    int d = 0;
    for (const std::int64_t size : sizes) {
      fits = fits && (size < 0 || view.size(d) == size);
      text += concat(d > 0 ? ", " : "", size < 0 ? open : concat(size));
      ++d;
    }
    require(fits, path, ": ", prefix, name, ": expected ", name_of(dtype), "[", text, "], got ",
            describe(view));
    return view;
  };
  const ConstTensorView vocab_ids = tensor("vocab_ids", DType::i64, {-1}, "vocab");
  const std::int64_t vocab = vocab_ids.numel();
  const bool shared = file.contains(prefix + "places");
  VocabOrder order;
  if (vocab > 0 || !shared) {
    order = VocabOrder(
        {static_cast<const std::int64_t*>(vocab_ids.data()), static_cast<std::size_t>(vocab)},
        floats(tensor("average", DType::f32, {vocab})));
  }
  if (shared) {
    const ConstTensorView places = tensor("places", DType::i32, {-1}, "vocabulary of all ranks");
    const auto* const first = static_cast<const std::int32_t*>(places.data());
    require(places.numel() >= std::max<std::int64_t>(vocab, 1), path, ": ", prefix,
            "places: expected those of at least ", std::max<std::int64_t>(vocab, 1),
            " vocabulary entries, got ", places.numel());
    order = VocabOrderAccess::with_positions(order, {first, first + places.numel()});
  }
  if (!file.contains(prefix + "axes")) return order;
  const std::int64_t tiles = ceil_div(vocab, kVocabTile);
  const ConstTensorView variance = tensor("variance", DType::f32, {tiles, -1}, "dim");
  const std::int64_t dim = variance.size(1);
  return order.with_moments(dim, floats(tensor("axes", DType::f32, {dim, dim})), floats(variance),
                            floats(tensor("log2_caution", DType::f32, {tiles})));
}

void VocabOrder::save(const std::string& path) const {
  require(!empty(), "order: expected one that was made or loaded, got an empty one");
  std::vector<NamedTensor> tensors;
  append_order(*this, "", tensors);
  write_safetensors(path, tensors, {{"kind", "logitless vocabulary order"}});
}

VocabOrder VocabOrder::load(const std::string& path) {
  return order_of(TensorFile(path), path, "");
}

std::vector<float> average_probability(const Context& context, const ConstTensorView& hidden,
                                       const ConstTensorView& weight, const ConstTensorView& bias,
                                       float logit_scale, float softcap, std::size_t memory_budget,
                                       const Sharding& sharding) {
  const HeadShape shape = require_order_source(context, hidden, weight, bias, sharding);
  const std::int64_t tokens = sampled_tokens(sharding, shape.tokens);
  require(tokens > 0, "hidden: expected tokens to average over, got ", describe(hidden));
  const bool device = context.device().kind == DeviceKind::cuda;
  std::vector<cuda::DeviceMemory> copies;
  // Copies a vector to where the context's kernels read it.
  const auto placed = [&](void* values, std::size_t bytes) {
    if (!device) return values;
    cuda::DeviceMemory& copy = copies.emplace_back(bytes);
    cuda::copy_to_device(copy.data(), values, bytes, context.stream());
    return copy.data();
  };
  // sum_i p_ij is the gradient of sum_i lse_i with respect to the bias.
  const std::int64_t rows = weight.size(0);
  const std::size_t capacity = static_cast<std::size_t>(std::max<std::int64_t>(rows, 1));
  std::vector<float> zero, ones, average;
  std::vector<std::int64_t> targets;
  const std::size_t vocab_bytes = capacity * sizeof(float);
  HeadOptions options;
  options.logit_scale = logit_scale;
  options.softcap = softcap;
  HeadInputs in;
  in.hidden = hidden;
  in.weight = weight;
  in.sharding = sharding;
  in.sharding.replicas = nullptr;  // no result is a mean
  HeadCotangents cotangents;
  HeadGradients gradients;
  // Runs code that may fail on one rank alone.
  const auto safely = [&](const std::function<void()>& body) {
    is_sharded(sharding) ? together(sharding, body) : body();
  };
  safely([&] {
    const std::int64_t vocab_size[] = {rows};
    std::vector<std::int64_t> token_sizes;
    for (int d = 0; d + 1 < hidden.rank(); ++d) token_sizes.push_back(hidden.size(d));
    zero.assign(bias.defined() ? 0 : capacity, 0.0f);
    targets.assign(static_cast<std::size_t>(shape.tokens), 0);
    ones.assign(static_cast<std::size_t>(shape.tokens), 1.0f / static_cast<float>(tokens));
    average.assign(capacity, 0.0f);
    in.bias = bias.defined()
                  ? bias
                  : ConstTensorView(placed(zero.data(), vocab_bytes), DType::f32, vocab_size);
    in.targets = ConstTensorView(placed(targets.data(), targets.size() * sizeof(std::int64_t)),
                                 DType::i64, token_sizes);
    cotangents.lse =
        ConstTensorView(placed(ones.data(), ones.size() * sizeof(float)), DType::f32, token_sizes);
    gradients.d_bias = TensorView(placed(average.data(), vocab_bytes), DType::f32, vocab_size);
  });
  PlanRequest request;
  request.device = context.device();
  request.memory_budget = memory_budget;
  const LossPlan plan = plan_head_backward(options, in, cotangents, gradients, request);
  std::optional<Workspace> workspace;
  safely([&] { workspace.emplace(context, plan); });
  head_backward(context, plan, options, in, cotangents, gradients, *workspace);
  if (device)
    cuda::copy_to_host(average.data(), gradients.d_bias.data(), vocab_bytes, context.stream());
  average.resize(static_cast<std::size_t>(rows));
  // The gradient is that of scale * (x . w + b), and rounding may leave a -0. NaN stays.
  for (float& p : average) p = std::max(p / logit_scale, 0.0f) + 0.0f;
  return average;
}

namespace {

// Rows of the weights that are sampled to estimate the principal direction of a part.
constexpr std::int64_t kSample = 256;
constexpr int kPowerSteps = 5;

// Local random number generator (splitmix64), so that all platforms make the same order.
std::uint64_t next_random(std::uint64_t& state) {
  std::uint64_t z = (state += 0x9e3779b97f4a7c15ULL);
  z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9ULL;
  z = (z ^ (z >> 27)) * 0x94d049bb133111ebULL;
  return z ^ (z >> 31);
}

// Splits one stratum down to tiles by recursive bisection.
class Bisector {
 public:
  Bisector(const ConstTensorView& weight, std::uint64_t seed)
      : weight_(weight),
        dim_(weight.size(1)),
        state_(seed),
        sample_(static_cast<std::size_t>(kSample * dim_)),
        direction_(static_cast<std::size_t>(dim_)),
        next_(static_cast<std::size_t>(dim_)),
        row_(static_cast<std::size_t>(dim_)) {}

  void split(std::span<std::int64_t> vocab_ids) {
    const auto count = static_cast<std::int64_t>(vocab_ids.size());
    if (count <= kVocabTile) {
      std::sort(vocab_ids.begin(), vocab_ids.end());
      return;
    }
    find_direction(vocab_ids);
    keys_.resize(vocab_ids.size());
    for (std::int64_t i = 0; i < count; ++i) {
      load_row(weight_, vocab_ids[i], row_.data());
      keys_[i] = {dot(row_.data(), direction_.data(), dim_), vocab_ids[i]};
    }
    const std::int64_t half = std::max(count / 2 / kVocabTile * kVocabTile, kVocabTile);
    // Keys are ordered by (projection, token id), a total order. Rows with NaN come last, by id.
    std::nth_element(keys_.begin(), keys_.begin() + half, keys_.end(),
                     [](const Key& a, const Key& b) {
                       const bool a_nan = std::isnan(a.value), b_nan = std::isnan(b.value);
                       if (a_nan != b_nan) return b_nan;
                       if (!a_nan && a.value != b.value) return a.value < b.value;
                       return a.vocab_id < b.vocab_id;
                     });
    for (std::int64_t i = 0; i < count; ++i) vocab_ids[i] = keys_[i].vocab_id;
    // nth_element leaves each half in an unspecified order, so both are sorted.
    std::sort(vocab_ids.begin(), vocab_ids.begin() + half);
    std::sort(vocab_ids.begin() + half, vocab_ids.end());
    split(vocab_ids.first(static_cast<std::size_t>(half)));
    split(vocab_ids.subspan(static_cast<std::size_t>(half)));
  }

 private:
  struct Key {
    float value;
    std::int64_t vocab_id;
  };

  // Computes the first principal direction of evenly spaced rows by power iteration.
  void find_direction(std::span<const std::int64_t> vocab_ids) {
    const auto count = static_cast<std::int64_t>(vocab_ids.size());
    const std::int64_t sampled = std::min(count, kSample);
    std::fill(next_.begin(), next_.end(), 0.0f);
    for (std::int64_t i = 0; i < sampled; ++i) {
      load_row(weight_, vocab_ids[i * count / sampled], sample_.data() + i * dim_);
      add_to(sample_.data() + i * dim_, next_.data(), dim_);
    }
    for (std::int64_t i = 0; i < sampled; ++i)
      add_scaled(next_.data(), -1.0f / static_cast<float>(sampled), sample_.data() + i * dim_,
                 dim_);
    for (float& v : direction_)
      v = static_cast<float>(static_cast<double>(next_random(state_) >> 11) * 0x1p-53 - 0.5);
    for (int step = 0; step < kPowerSteps; ++step) {
      std::fill(next_.begin(), next_.end(), 0.0f);
      for (std::int64_t i = 0; i < sampled; ++i) {
        const float* row = sample_.data() + i * dim_;
        add_scaled(row, dot(row, direction_.data(), dim_), next_.data(), dim_);
      }
      const float norm = std::sqrt(dot(next_.data(), next_.data(), dim_));
      if (!(norm > 0.0f) || !std::isfinite(norm))
        return;  // all rows are equal: any direction
                 // serves
      for (std::int64_t k = 0; k < dim_; ++k) direction_[k] = next_[k] / norm;
    }
  }

  const ConstTensorView& weight_;
  std::int64_t dim_;
  std::uint64_t state_;
  std::vector<float> sample_, direction_, next_, row_;
  std::vector<Key> keys_;
};

}  // namespace

VocabOrder make_vocab_order(const Context& context, const ConstTensorView& weight,
                            std::span<const float> average, const OrderOptions& options) {
  require(weight.defined() && weight.rank() == 2 && is_head_float(weight.dtype()),
          "weight: expected [V, D] of f32, bf16 or f16, got ",
          weight.defined() ? describe(weight) : "none");
  const std::int64_t vocab = weight.size(0);
  require(static_cast<std::int64_t>(average.size()) == vocab, "average: expected ", vocab,
          " values, got ", average.size());
  require(options.strata >= 1 && options.strata <= 4096, "strata: expected 1 to 4096, got ",
          options.strata);
  for (std::int64_t i = 0; i < vocab; ++i) {
    require(std::isfinite(average[i]) && average[i] >= 0.0f, "average: expected numbers >= 0, got ",
            average[i], " for vocabulary entry ", i);
  }
  // Strata consist of full tiles, so that no tile spans two of them.
  const std::int64_t per = round_up(ceil_div(vocab, options.strata), kVocabTile);
  if (context.device().kind == DeviceKind::cuda)
    return device_vocab_order(context, weight, average, per, options.seed);
  std::vector<std::int64_t> vocab_ids(static_cast<std::size_t>(vocab));
  std::iota(vocab_ids.begin(), vocab_ids.end(), 0);
  std::sort(vocab_ids.begin(), vocab_ids.end(), [&](std::int64_t a, std::int64_t b) {
    if (average[a] != average[b]) return average[a] > average[b];
    return a < b;
  });
  const std::int64_t strata = ceil_div(vocab, per);
  parallel_for(context.threads(), strata, [&](std::int64_t s, int) {
    const std::int64_t first = s * per;
    const std::int64_t count = std::min(per, vocab - first);
    std::uint64_t seed = options.seed ^ (static_cast<std::uint64_t>(s) << 32);
    Bisector bisector(weight, next_random(seed));
    bisector.split(std::span(vocab_ids).subspan(static_cast<std::size_t>(first),
                                                static_cast<std::size_t>(count)));
  });
  return VocabOrder(vocab_ids, average);
}

}  // namespace logitless
