// Conversion between C structs and C++ values. Sizes and enums are checked; messages name the
// field.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstring>
#include <string_view>

#include "capi/handles.h"
#include "core/byte_range.h"
#include "core/check.h"
#include "core/described.h"
#include "head/tensor_roles.h"
#include "logitless/c_api.h"
#include "logitless/c_sharding.h"
#include "logitless/logitless.h"

namespace logitless::capi {

// Copies the numeric options of the loss from one struct to another.
template <typename From, typename To>
void copy_loss_numbers(const From& from, To& to) {
  const auto source = loss_numbers(from);
  const auto target = loss_numbers(to);
  for (std::size_t i = 0; i < source.size(); ++i) *target[i].value = *source[i].value;
}

// Returns the defaults that _init writes; specialised where zero is not the default.
template <typename T>
T defaults() {
  T value{};
  value.struct_size = sizeof(T);
  return value;
}
template <>
inline logitless_plan_request defaults() {
  logitless_plan_request value{};
  value.struct_size = sizeof(value);
  value.kind = LOGITLESS_PLAN_ANY;
  return value;
}
template <>
inline logitless_head_features defaults() {
  logitless_head_features value{};
  value.struct_size = sizeof(value);
  value.targets_per_token = 1;
  value.logit_scale = 1.0f;
  return value;
}
template <>
inline logitless_cross_entropy_options defaults() {
  const CrossEntropyOptions options;
  logitless_cross_entropy_options value{};
  value.struct_size = sizeof(value);
  value.ignore_index = options.ignore_index;
  value.reduction = static_cast<logitless_reduction>(options.reduction);
  value.logit_scale = options.logit_scale;
  copy_loss_numbers(options, value);
  return value;
}
template <>
inline logitless_cross_entropy_inputs defaults() {
  logitless_cross_entropy_inputs value{};
  value.struct_size = sizeof(value);
  value.grad_loss = 1.0;
  return value;
}
template <>
inline logitless_head_options defaults() {
  logitless_head_options value{};
  value.struct_size = sizeof(value);
  value.ignore_index = -100;
  value.logit_scale = 1.0f;
  return value;
}
template <>
inline logitless_program_options defaults() {
  logitless_program_options value{};
  value.struct_size = sizeof(value);
  value.chunk = 1;
  value.head_engine = 1;
  return value;
}

// Writes the defaults into the caller's struct. Its header may be older (shorter) or newer (longer,
// zero-filled).
template <typename T>
void init(T* to, std::size_t struct_size) {
  if (to == nullptr || struct_size < sizeof(to->struct_size)) return;
  T value = defaults<T>();
  value.struct_size = struct_size;
  std::memset(static_cast<void*>(to), 0, struct_size);
  std::memcpy(static_cast<void*>(to), &value, std::min(struct_size, sizeof(T)));
}

// Sizes of version 1 of the ABI: no header has shorter structs. A struct that may grow, or has
// grown, names the last field of that version.
template <typename T>
constexpr std::size_t least_size() {
  return sizeof(T);
}
template <>
constexpr std::size_t least_size<logitless_cross_entropy_options>() {
  using Options = logitless_cross_entropy_options;
  return offsetof(Options, accumulate) + sizeof(Options::accumulate);
}
template <>
constexpr std::size_t least_size<logitless_head_features>() {
  using Features = logitless_head_features;
  return offsetof(Features, accumulate) + sizeof(Features::accumulate);
}
template <>
constexpr std::size_t least_size<logitless_plan_request>() {
  return offsetof(logitless_plan_request, accuracy) + sizeof(logitless_plan_request::accuracy);
}
template <>
constexpr std::size_t least_size<logitless_cross_entropy_inputs>() {
  using Inputs = logitless_cross_entropy_inputs;
  return offsetof(Inputs, grad_loss) + sizeof(Inputs::grad_loss);
}
template <>
constexpr std::size_t least_size<logitless_head_inputs>() {
  return offsetof(logitless_head_inputs, vocab_weight) +
         sizeof(logitless_head_inputs::vocab_weight);
}
template <>
constexpr std::size_t least_size<logitless_loss_statistics>() {
  using Statistics = logitless_loss_statistics;
  return offsetof(Statistics, mean_log_prob) + sizeof(Statistics::mean_log_prob);
}
template <>
constexpr std::size_t least_size<logitless_program_options>() {
  return offsetof(logitless_program_options, strict) + sizeof(logitless_program_options::strict);
}
template <>
constexpr std::size_t least_size<logitless_loss_terms>() {
  return offsetof(logitless_loss_terms, z_loss) + sizeof(logitless_loss_terms::z_loss);
}

template <typename T>
void check_struct_size(const T* from, const char* name) {
  require(from != nullptr, name, ": expected a struct, got NULL");
  require(from->struct_size >= least_size<T>(), name, ": struct_size is ", from->struct_size,
          ", expected ", sizeof(T), "; was its _init called?");
}

// Returns the caller's struct in this library's layout.
template <typename T>
T read_struct(const T* from, const char* name) {
  check_struct_size(from, name);
  T value = defaults<T>();
  const std::size_t size = from->struct_size;
  std::memcpy(static_cast<void*>(&value), from, std::min(size, sizeof(T)));
  const auto* bytes = reinterpret_cast<const unsigned char*>(from);
  for (std::size_t i = sizeof(T); i < size; ++i) {
    if (bytes[i] != 0) {
      throw Unsupported(concat(name, ": byte ", i, " of a struct of ", size,
                               " bytes is set, but version ", version(),
                               " of the library knows the first ", sizeof(T), " only"));
    }
  }
  return value;
}

// The same with NULL for the defaults.
template <typename T>
T read_optional_struct(const T* from, const char* name) {
  return from == nullptr ? defaults<T>() : read_struct(from, name);
}

// Writes as much of the caller's struct as it has space for; the rest of a longer one is unchanged.
template <typename T>
void write_struct(T value, T* to, const char* name) {
  check_struct_size(to, name);
  value.struct_size = to->struct_size;
  std::memcpy(static_cast<void*>(to), &value, std::min(to->struct_size, sizeof(T)));
}

inline DType dtype_from(logitless_dtype dtype, const char* name) {
  require(dtype >= 0 && dtype < kDTypeCount, name, ": dtype ", dtype,
          " is none of logitless_dtype");
  return static_cast<DType>(dtype);
}

inline DeviceKind device_from(logitless_device device, const char* name) {
  if (device != LOGITLESS_DEVICE_CPU && device != LOGITLESS_DEVICE_CUDA) {
    throw Unsupported(concat(
        name, ": ", device, " is unknown; expected LOGITLESS_DEVICE_CPU or LOGITLESS_DEVICE_CUDA"));
  }
  return device == LOGITLESS_DEVICE_CUDA ? DeviceKind::cuda : DeviceKind::cpu;
}

// Returns an undefined view for NULL. Writable views are made from the same struct, since C does
// not distinguish them.
inline TensorView view_from(const logitless_tensor* tensor, const char* name) {
  if (tensor == nullptr) return {};
  require(tensor->rank >= 0 && tensor->rank <= LOGITLESS_MAX_RANK, name, ": rank ", tensor->rank,
          " is not in 0 to ", LOGITLESS_MAX_RANK);
  const auto rank = static_cast<std::size_t>(tensor->rank);
  for (std::size_t d = 0; d < rank; ++d) {
    require(tensor->shape[d] >= 0, name, ": size ", tensor->shape[d], " of dimension ", d,
            " is negative");
  }
  std::int64_t count = 1;
  for (std::size_t d = 0; d < rank; ++d) {
    require(!__builtin_mul_overflow(count, tensor->shape[d], &count) && count <= INT64_MAX / 8,
            name, ": the number of elements overflows at dimension ", d);
  }
  const TensorView view(tensor->data, dtype_from(tensor->dtype, name),
                        std::span(tensor->shape, rank), std::span(tensor->strides, rank));
  require(byte_range(view).has_value(), name, ": the addresses of ", described(view),
          " leave the address space");
  return view;
}

// A visitor of tensor_roles.h: from a struct of the C ABI to that of C++.
inline constexpr auto read_tensor = [](const char* name, auto& to, const logitless_tensor* tensor) {
  to = view_from(tensor, name);
};

inline Accuracy accuracy_from(logitless_accuracy accuracy, const char* name) {
  require(accuracy >= LOGITLESS_ACCURACY_EXACT && accuracy <= LOGITLESS_ACCURACY_FAR_BOTH, name,
          ": ", accuracy, " is none of logitless_accuracy");
  return static_cast<Accuracy>(accuracy);
}

// `absent` says whether a plan may be for a GPU that is not present.
inline PlanRequest request_from(const logitless_plan_request* from, const DeviceLimits& device,
                                bool absent = false) {
  const logitless_plan_request c = read_optional_struct(from, "request");
  require(c.compute_capability == 0 || (absent && c.compute_capability > 0),
          "request.compute_capability: expected 0",
          absent ? ", or 10 * major + minor of a GPU" : " in a plan of tensors", ", got ",
          c.compute_capability);
  require(c.kind >= LOGITLESS_PLAN_ANY && c.kind <= LOGITLESS_PLAN_FAR_BOTH,
          "request.kind: ", c.kind, " is none of logitless_plan_kind");
  require(c.stored_fraction == 0.0 || c.kind == LOGITLESS_PLAN_STORED,
          "request.stored_fraction: only LOGITLESS_PLAN_STORED takes one, kind is ", c.kind);
  PlanRequest request;
  request.device = device;
  if (c.compute_capability != 0)
    request.device = {.kind = DeviceKind::cuda, .compute_capability = c.compute_capability};
  if (c.card != nullptr && *c.card != '\0') {
    require(absent, "request.card: expected NULL in a plan of tensors, got ", c.card);
    const GpuCard card = gpu_card(c.card);
    require(c.compute_capability == 0 || c.compute_capability == card.compute_capability,
            "request.compute_capability: expected 0 or the card's ", card.compute_capability,
            ", got ", c.compute_capability);
    request.device = {
        .kind = DeviceKind::cuda, .compute_capability = card.compute_capability, .card = card};
  }
  request.memory_budget = c.memory_budget;
  request.stored_fraction = c.stored_fraction;
  if (c.kind != LOGITLESS_PLAN_ANY) request.kind = static_cast<PlanKind>(c.kind);
  request.accuracy = accuracy_from(c.accuracy, "request.accuracy");
  request.tau = c.tau;
  request.sample_every = c.sample_every;
  request.audit_rows = c.audit_rows;
  request.expected_ignored = c.expected_ignored;
  return request;
}

inline HeadShape shape_from(const logitless_head_features& c) {
  return {c.tokens, c.dim, c.vocab, dtype_from(c.dtype, "features.dtype")};
}

// Returns the precision; `name` is the field's in errors.
inline Precision precision_from(logitless_precision c, std::string_view name) {
  require(c >= LOGITLESS_PRECISION_IEEE && c <= LOGITLESS_PRECISION_BF16X3, name, ": ", c,
          " is none of logitless_precision");
  return static_cast<Precision>(c);
}

inline HeadFeatures features_from(const logitless_head_features& c) {
  HeadFeatures f;
  f.targets_per_token = c.targets_per_token;
  f.bias = c.bias != 0;
  f.logit_scale = c.logit_scale;
  f.softcap = c.softcap;
  f.label_smoothing = c.label_smoothing != 0;
  f.vocab_weight = c.vocab_weight != 0;
  f.entropy = c.entropy != 0;
  f.argmax = c.argmax != 0;
  f.d_hidden = c.d_hidden != 0;
  f.d_weight = c.d_weight != 0;
  f.d_bias = c.d_bias != 0;
  f.d_hidden_dtype = dtype_from(c.d_hidden_dtype, "features.d_hidden_dtype");
  f.d_weight_dtype = dtype_from(c.d_weight_dtype, "features.d_weight_dtype");
  f.entropy_gradient = c.entropy_gradient != 0;
  f.accumulate = c.accumulate != 0;
  f.precision = precision_from(c.precision, "features.precision");
  f.narrow_hidden = dtype_from(c.narrow_hidden, "features.narrow_hidden");
  f.narrow_weight = dtype_from(c.narrow_weight, "features.narrow_weight");
  return f;
}

inline CrossEntropyOptions options_from(const logitless_cross_entropy_options* from) {
  const logitless_cross_entropy_options c = read_optional_struct(from, "options");
  require(c.reduction >= LOGITLESS_REDUCTION_NONE && c.reduction <= LOGITLESS_REDUCTION_SUM,
          "options.reduction: ", c.reduction, " is none of logitless_reduction");
  CrossEntropyOptions options;
  options.reduction = static_cast<Reduction>(c.reduction);
  options.ignore_index = c.ignore_index;
  copy_loss_numbers(c, options);
  options.softcap = c.softcap;
  options.logit_scale = c.logit_scale;
  if (c.normalizer != 0.0) options.normalizer = c.normalizer;
  options.next_token = c.next_token != 0;
  options.nan_if_empty = c.nan_if_empty != 0;
  options.accumulate = c.accumulate != 0;
  options.precision = precision_from(c.precision, "options.precision");
  return options;
}

inline Sharding sharding_from(const logitless_sharding* from) {
  if (from == nullptr) return {};
  const logitless_sharding c = read_struct(from, "sharding");
  require(c.exchange >= LOGITLESS_EXCHANGE_PLANNED && c.exchange <= LOGITLESS_EXCHANGE_WEIGHTS,
          "sharding.exchange: ", c.exchange, " is none of LOGITLESS_EXCHANGE_*");
  require(c.vocab_group != nullptr, "sharding.vocab_group: expected a communicator, got NULL");
  Sharding sharding;
  sharding.vocab_group = c.vocab_group->communicator;
  sharding.vocab = c.vocab;
  sharding.vocab_begin = c.vocab_begin;
  sharding.vocab_ids = view_from(c.vocab_ids, "sharding.vocab_ids");
  sharding.tokens = c.tokens != 0;
  sharding.exchange = static_cast<ExchangeMode>(c.exchange);
  require(c.weight >= LOGITLESS_WEIGHT_ROWS && c.weight <= LOGITLESS_WEIGHT_COLUMNS,
          "sharding.weight: ", c.weight, " is none of LOGITLESS_WEIGHT_*");
  sharding.weight = static_cast<WeightSharding>(c.weight);
  sharding.columns = c.columns;
  sharding.interleaved = c.interleaved != 0;
  if (c.replicas != nullptr) sharding.replicas = c.replicas->communicator;
  return sharding;
}

inline CrossEntropyInputs inputs_from(const logitless_cross_entropy_inputs* from) {
  const logitless_cross_entropy_inputs c = read_struct(from, "inputs");
  CrossEntropyInputs inputs;
  each_loss_input(read_tensor, inputs, c);
  inputs.grad_loss = c.grad_loss;
  if (c.order != nullptr) inputs.order = c.order->order;
  inputs.sample_seed = c.sample_seed;
  inputs.sharding = sharding_from(c.sharding);
  return inputs;
}

inline CrossEntropyOutputs outputs_from(const logitless_cross_entropy_outputs* from) {
  const logitless_cross_entropy_outputs c = read_struct(from, "outputs");
  CrossEntropyOutputs outputs;
  each_loss_output(read_tensor, outputs, c);
  return outputs;
}

inline void write_statistics(const LossStatistics& made, logitless_loss_statistics* to) {
  auto c = defaults<logitless_loss_statistics>();
  c.tokens = made.tokens;
  c.valid_tokens = made.valid_tokens;
  c.correct = made.correct;
  c.normalizer = made.normalizer;
  c.mean_lse = made.mean_lse;
  c.mean_log_prob = made.mean_log_prob;
  c.selected = made.far.selected;
  c.sampled = made.far.sampled;
  c.passes = made.far.passes;
  c.bound = made.far.bound;
  c.audited_error = made.far.audited_error;
  c.audited_tokens = made.far.audited_tokens;
  c.audited_lse_error = made.far.audited_lse_error;
  c.audited_lse_error_max = made.far.audited_lse_error_max;
  c.dense_fallback = made.far.dense_fallback ? 1 : 0;
  c.imbalance = made.far.imbalance;
  c.sampled_lse_error = made.far.sampled_lse_error;
  c.sampled_most = made.far.sampled_most;
  write_struct(c, to, "statistics");
}

inline HeadOptions options_from(const logitless_head_options* from) {
  const logitless_head_options c = read_optional_struct(from, "options");
  return {c.ignore_index, c.softcap, c.logit_scale, c.accumulate != 0,
          precision_from(c.precision, "options.precision")};
}

inline HeadInputs inputs_from(const logitless_head_inputs* from) {
  const logitless_head_inputs c = read_struct(from, "inputs");
  HeadInputs inputs;
  each_head_input(read_tensor, inputs, c);
  inputs.sharding = sharding_from(c.sharding);
  return inputs;
}

inline HeadOutputs outputs_from(const logitless_head_outputs* from) {
  const logitless_head_outputs c = read_struct(from, "outputs");
  HeadOutputs outputs;
  each_head_output(read_tensor, outputs, c);
  return outputs;
}

inline HeadCotangents cotangents_from(const logitless_head_cotangents* from) {
  const logitless_head_cotangents c = read_struct(from, "cotangents");
  HeadCotangents cotangents;
  each_head_cotangent(
      [](const char* name, ConstTensorView& to, const logitless_tensor* tensor) {
        to = view_from(tensor, concat("cotangents.", name).c_str());
      },
      cotangents, c);
  return cotangents;
}

inline HeadGradients gradients_from(const logitless_head_gradients* from) {
  const logitless_head_gradients c = read_struct(from, "gradients");
  HeadGradients gradients;
  each_head_gradient(read_tensor, gradients, c);
  return gradients;
}

}  // namespace logitless::capi
