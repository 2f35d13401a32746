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
#include <map>
#include <mutex>
#include <span>
#include <string>
#include <utility>
#include <vector>

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
const LossPlan& remembered_plan(const std::string& key, Make&& make) {
  static std::mutex mutex;
  static auto* const plans = new std::map<std::string, LossPlan>;  // outlives XLA's threads
  const std::lock_guard lock(mutex);
  const auto found = plans->find(key);
  if (found != plans->end()) return found->second;
  return plans->emplace(key, std::forward<Make>(make)()).first->second;
}

template <typename Options>
std::string plan_key(std::string_view handler, const Call& call, const Options& options,
                     const Context& context) {
  const DeviceLimits& device = context.device();
  return concat(handler, " ", call.signature(), " scale ", options.logit_scale, " cap ",
                options.softcap, " budget ", call.attribute<std::int64_t>("memory_budget"),
                " device ", static_cast<int>(device.kind), " threads ", device.threads, " kernel ",
                device.kernel, " capability ", device.compute_capability);
}

PlanRequest request_of(const Call& call, const Context& context) {
  PlanRequest request;
  request.device = context.device();
  request.memory_budget = static_cast<std::size_t>(call.attribute<std::int64_t>("memory_budget"));
  return request;
}

CrossEntropyOptions loss_options(const Call& call) {
  CrossEntropyOptions options;
  options.reduction = static_cast<Reduction>(call.attribute<std::int64_t>("reduction"));
  options.ignore_index = call.attribute<std::int64_t>("ignore_index");
  for (const LossNumber<float>& number : loss_numbers(options))
    *number.value = call.attribute<float>(number.name);
  options.softcap = call.attribute<float>("softcap");
  options.logit_scale = call.attribute<float>("logit_scale");
  if (const auto normalizer = call.attribute<double>("normalizer"); normalizer != 0.0)
    options.normalizer = normalizer;
  return options;
}

void run_cross_entropy(const Place& place, Call call) {
  const CrossEntropyOptions options = loss_options(call);
  CrossEntropyInputs in;
  CrossEntropyOutputs out;
  call.read_inputs({{"hidden", &in.hidden},
                    {"weight", &in.weight},
                    {"targets", &in.targets},
                    {"bias", &in.bias},
                    {"class_weight", &in.class_weight},
                    {"token_weight", &in.token_weight},
                    {"target_weight", &in.target_weight},
                    {"grad_losses", &in.grad_losses}});
  call.read_outputs({{"loss", &out.loss},
                     {"d_hidden", &out.d_hidden},
                     {"d_weight", &out.d_weight},
                     {"d_bias", &out.d_bias},
                     {"argmax", &out.argmax}});

  const Context context = context_of(place, call);
  std::string key = plan_key("cross_entropy", call, options, context);
  if (options.label_smoothing != 0.0f) key += " smoothed";
  const LossPlan& plan = remembered_plan(
      key, [&] { return plan_cross_entropy(options, in, out, request_of(call, context)); });
  cross_entropy(context, plan, options, in, out, call.workspace());
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
  call.read_inputs({{"hidden", &in.hidden},
                    {"weight", &in.weight},
                    {"targets", &in.targets},
                    {"bias", &in.bias},
                    {"class_weight", &in.class_weight},
                    {"token_weight", &in.token_weight},
                    {"target_weight", &in.target_weight},
                    {"state", &state}});
  call.read_outputs({{"loss", &out.loss},
                     {"d_hidden", &out.d_hidden},
                     {"d_weight", &out.d_weight},
                     {"d_bias", &out.d_bias},
                     {"state", &next_state}});
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
  return options;
}

void run_head_forward(const Place& place, Call call) {
  const HeadOptions options = head_options(call);
  HeadInputs in;
  HeadOutputs out;
  call.read_inputs({{"hidden", &in.hidden},
                    {"weight", &in.weight},
                    {"targets", &in.targets},
                    {"bias", &in.bias},
                    {"vocab_weight", &in.vocab_weight}});
  call.read_outputs({{"lse", &out.lse},
                     {"target_logit", &out.target_logit},
                     {"log_prob", &out.log_prob},
                     {"entropy", &out.entropy},
                     {"weighted_logit_sum", &out.weighted_logit_sum}});

  const Context context = context_of(place, call);
  const LossPlan& plan = remembered_plan(plan_key("head_forward", call, options, context), [&] {
    return plan_head_forward(options, in, out, request_of(call, context));
  });
  head_forward(context, plan, options, in, out, call.workspace());
}

void run_head_backward(const Place& place, Call call) {
  const HeadOptions options = head_options(call);
  HeadInputs in;
  HeadCotangents cotangents;
  HeadGradients gradients;
  call.read_inputs({{"hidden", &in.hidden},
                    {"weight", &in.weight},
                    {"targets", &in.targets},
                    {"bias", &in.bias},
                    {"vocab_weight", &in.vocab_weight},
                    {"cotangent_lse", &cotangents.lse},
                    {"cotangent_target_logit", &cotangents.target_logit},
                    {"cotangent_log_prob", &cotangents.log_prob},
                    {"cotangent_entropy", &cotangents.entropy},
                    {"cotangent_weighted_logit_sum", &cotangents.weighted_logit_sum}});
  call.read_outputs({{"d_hidden", &gradients.d_hidden},
                     {"d_weight", &gradients.d_weight},
                     {"d_bias", &gradients.d_bias}});

  const Context context = context_of(place, call);
  const LossPlan& plan = remembered_plan(plan_key("head_backward", call, options, context), [&] {
    return plan_head_backward(options, in, cotangents, gradients, request_of(call, context));
  });
  head_backward(context, plan, options, in, cotangents, gradients, call.workspace());
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
