// XLA FFI handlers: the losses as custom calls of a compiled program. logitless.jax registers them
// for the CPU and for CUDA.
//
// A handler allocates no tensor memory and does not wait. Its workspace is one of XLA's result
// buffers, sized by the caller from a plan for the same call. Attributes besides the buffer names:
// the options of the call under their names in the library, memory_budget, expected_ignored, and
// threads (of the CPU).
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
#include "xla/loss_call.h"

namespace logitless::xla_handlers {
namespace {

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
                call.attribute<std::int64_t>("memory_budget"), " ignored ",
                call.attribute<float>("expected_ignored"), " device ",
                static_cast<int>(device.kind), " threads ", device.threads, " kernel ",
                device.kernel, " capability ", device.compute_capability);
}

PlanRequest request_of(const Call& call, const Context& context) {
  PlanRequest request;
  request.device = context.device();
  request.memory_budget = static_cast<std::size_t>(call.attribute<std::int64_t>("memory_budget"));
  request.expected_ignored = call.attribute<float>("expected_ignored");
  return request;
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
using logitless::xla_handlers::run_head_backward;
using logitless::xla_handlers::run_head_forward;

LOGITLESS_XLA_HANDLERS(cross_entropy);
LOGITLESS_XLA_HANDLERS(head_forward);
LOGITLESS_XLA_HANDLERS(head_backward);
