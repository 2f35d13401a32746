// XLA FFI handlers: the losses as custom calls of a compiled program. logitless.jax registers them
// for the CPU and for CUDA.
//
// Except for the far field, a handler allocates no tensor memory and does not wait. Its workspace
// is one of XLA's result buffers, sized by the caller from a plan for the same call. Attributes
// besides the buffer names: the options of the call under their names in the library,
// memory_budget, and threads (of the CPU).
#include <algorithm>
#include <cstddef>
#include <cstring>
#include <memory>
#include <mutex>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "core/lru_cache.h"
#include "head/tensor_roles.h"
#include "xla/buffers.h"
#include "xla/handler.h"

namespace logitless::xla_handlers {
namespace {

Context context_of(const Place& place, const Call& call) {
  ContextOptions options;
  options.device = place.device;
  options.device_index = place.device_index;
  options.stream = place.stream;
  if (place.device == DeviceKind::cpu)
    options.threads = static_cast<int>(call.attribute<std::int64_t>("threads"));
  return Context(std::move(options));
}

// Returns the plan from `make`, cached by key: a program's calls repeat.
template <typename Make>
std::shared_ptr<const LossPlan> remembered_plan(const std::string& key, const Make& make) {
  constexpr std::size_t kMostPlans = 1024;
  static std::mutex mutex;
  static auto* const plans = new LruCache<std::string, LossPlan>(kMostPlans);  // outlives threads
  const std::lock_guard lock(mutex);
  return plans->get(key, make);
}

template <typename Options>
std::string plan_key(std::string_view handler, const Call& call, const Options& options,
                     const Context& context) {
  const DeviceLimits& device = context.device();
  return concat(handler, " ", call.signature(), " scale ", options.logit_scale, " cap ",
                options.softcap, " precision ", static_cast<int>(options.precision), " budget ",
                call.attribute<std::int64_t>("memory_budget"), " device ",
                static_cast<int>(device.kind), " threads ", device.threads, " kernel ",
                device.kernel, " capability ", device.compute_capability);
}

PlanRequest request_of(const Call& call, const Context& context) {
  PlanRequest request;
  request.device = context.device();
  request.memory_budget = static_cast<std::size_t>(call.attribute<std::int64_t>("memory_budget"));
  return request;
}

Precision precision_of(const Call& call) {
  return static_cast<Precision>(call.attribute<std::int64_t>("precision"));
}

CrossEntropyOptions loss_options(const Call& call) {
  CrossEntropyOptions options;
  options.reduction = static_cast<Reduction>(call.attribute<std::int64_t>("reduction"));
  options.ignore_index = call.attribute<std::int64_t>("ignore_index");
  for (const LossNumber<float>& number : loss_numbers(options))
    *number.value = call.attribute<float>(number.name);
  options.softcap = call.attribute<float>("softcap");
  options.logit_scale = call.attribute<float>("logit_scale");
  options.precision = precision_of(call);
  if (const auto normalizer = call.attribute<double>("normalizer"); normalizer != 0.0)
    options.normalizer = normalizer;
  return options;
}

void read_loss(Call& call, CrossEntropyInputs& in, CrossEntropyOutputs& out,
               Slots<ConstTensorView> inputs = {}, Slots<TensorView> outputs = {}) {
  each_loss_input(listed_in(inputs), in);
  each_loss_output(listed_in(outputs), out);
  call.read_inputs(inputs);
  call.read_outputs(outputs);
}

void run_cross_entropy(const Place& place, Call call) {
  const CrossEntropyOptions options = loss_options(call);
  CrossEntropyInputs in;
  CrossEntropyOutputs out;
  read_loss(call, in, out);

  const Context context = context_of(place, call);
  std::string key = plan_key("cross_entropy", call, options, context);
  if (options.label_smoothing != 0.0f) key += " smoothed";
  const auto plan = remembered_plan(
      key, [&] { return plan_cross_entropy(options, in, out, request_of(call, context)); });
  cross_entropy(context, *plan, options, in, out, call.workspace());
}

// ---- The far field: the state of a head is an input and an output, as bytes

FarFieldOptions far_options(const Call& call) {
  FarFieldOptions options;
  options.accuracy = static_cast<Accuracy>(call.attribute<std::int64_t>("accuracy"));
  options.error = call.attribute<double>("error");
  options.sample_every = call.attribute<std::int64_t>("sample_every");
  options.audit_rows = call.attribute<std::int64_t>("audit_rows");
  options.audit_every = call.attribute<std::int64_t>("audit_every");
  options.refresh_every = call.attribute<std::int64_t>("refresh_every");
  options.refresh_delay = call.attribute<std::int64_t>("refresh_delay");
  options.sample_rows = call.attribute<std::int64_t>("sample_rows");
  options.memory_budget = static_cast<std::size_t>(call.attribute<std::int64_t>("memory_budget"));
  return options;
}

// Reads a length of 8 bytes and as many bytes of FarFieldHead::state(); zeros before the first
// step.
std::span<const std::byte> read_state(const ConstTensorView& state) {
  std::uint64_t length = 0;
  const std::span all(static_cast<const std::byte*>(state.data()),
                      static_cast<std::size_t>(state.bytes()));
  check(all.size() >= sizeof(length), "state: ", all.size(), " bytes");
  std::memcpy(&length, all.data(), sizeof(length));
  require(length <= all.size() - sizeof(length), "state: the first 8 bytes tell of ", length,
          " bytes, but ", all.size() - sizeof(length), " follow");
  return all.subspan(sizeof(length), static_cast<std::size_t>(length));
}

void write_state(const std::vector<std::byte>& made, const TensorView& state) {
  const std::uint64_t length = made.size();
  const auto bytes = static_cast<std::size_t>(state.bytes());
  check(bytes >= sizeof(length) + made.size(), "state: ", made.size(), " bytes for room of ",
        bytes);
  auto* to = static_cast<std::byte*>(state.data());
  std::memcpy(to, &length, sizeof(length));
  std::copy(made.begin(), made.end(), to + sizeof(length));
  std::fill(to + sizeof(length) + made.size(), to + bytes, std::byte{0});
}

void run_far_field_step(const Place& place, Call call) {
  if (place.device != DeviceKind::cpu)
    throw Unsupported("far_field_step: the state is the host's; expected the CPU, got a GPU");
  const CrossEntropyOptions options = loss_options(call);
  CrossEntropyInputs in;
  CrossEntropyOutputs out;
  ConstTensorView state;
  TensorView next_state;
  read_loss(call, in, out, {{"state", &state}}, {{"state", &next_state}});
  const Context context = context_of(place, call);
  FarFieldHead head(context, far_options(call));
  if (const auto bytes = read_state(state); !bytes.empty()) head.set_state(bytes);
  head.step(options, in, out);
  write_state(head.state(), next_state);
}

HeadOptions head_options(const Call& call) {
  HeadOptions options;
  options.ignore_index = call.attribute<std::int64_t>("ignore_index");
  options.softcap = call.attribute<float>("softcap");
  options.logit_scale = call.attribute<float>("logit_scale");
  options.precision = precision_of(call);
  return options;
}

void run_head_forward(const Place& place, Call call) {
  const HeadOptions options = head_options(call);
  HeadInputs in;
  HeadOutputs out;
  Slots<ConstTensorView> inputs;
  Slots<TensorView> outputs;
  each_head_input(listed_in(inputs), in);
  each_head_output(listed_in(outputs), out);
  call.read_inputs(inputs);
  call.read_outputs(outputs);

  const Context context = context_of(place, call);
  const auto plan = remembered_plan(plan_key("head_forward", call, options, context), [&] {
    return plan_head_forward(options, in, out, request_of(call, context));
  });
  head_forward(context, *plan, options, in, out, call.workspace());
}

void run_head_backward(const Place& place, Call call) {
  const HeadOptions options = head_options(call);
  HeadInputs in;
  HeadCotangents cotangents;
  HeadGradients gradients;
  Slots<ConstTensorView> inputs;
  Slots<TensorView> outputs;
  each_head_input(listed_in(inputs), in);
  each_head_cotangent(listed_in(inputs, "cotangent_"), cotangents);
  each_head_gradient(listed_in(outputs), gradients);
  call.read_inputs(inputs);
  call.read_outputs(outputs);

  const Context context = context_of(place, call);
  const auto plan = remembered_plan(plan_key("head_backward", call, options, context), [&] {
    return plan_head_backward(options, in, cotangents, gradients, request_of(call, context));
  });
  head_backward(context, *plan, options, in, cotangents, gradients, call.workspace());
}

}  // namespace
}  // namespace logitless::xla_handlers

using logitless::xla_handlers::run_cross_entropy;
using logitless::xla_handlers::run_far_field_step;
using logitless::xla_handlers::run_head_backward;
using logitless::xla_handlers::run_head_forward;

LOGITLESS_XLA_HANDLERS(cross_entropy);
LOGITLESS_XLA_HANDLERS(far_field_step);
LOGITLESS_XLA_HANDLERS(head_forward);
LOGITLESS_XLA_HANDLERS(head_backward);
