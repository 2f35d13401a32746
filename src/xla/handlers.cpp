// XLA FFI handlers: the losses as custom calls of a compiled program. logitless.jax registers them
// for the CPU and for CUDA.
//
// A handler allocates no tensor memory and does not wait. Its workspace is one of XLA's result
// buffers, sized by the caller from a plan for the same call. Attributes besides the buffer names:
// the options of the call under their names in the library, memory_budget, expected_ignored, and
// threads (of the CPU).
#include <cstdint>
#include <string>

#include "head/tensor_roles.h"
#include "xla/loss_call.h"

namespace logitless::xla_handlers {
namespace {

template <typename Options>
std::string text_of(const Call& call, const Options& options) {
  return concat("scale ", options.logit_scale, " cap ", options.softcap, " precision ",
                static_cast<int>(options.precision), " ignored ",
                call.attribute<float>("expected_ignored"));
}

PlanRequest request_of(const Call& call, const Context& context) {
  PlanRequest request;
  request.device = context.device();
  request.memory_budget = budget_of(call);
  request.expected_ignored = call.attribute<float>("expected_ignored");
  return request;
}

void run_cross_entropy(const Place& place, Call call) {
  const CrossEntropyOptions options = loss_options(call);
  CrossEntropyInputs in;
  CrossEntropyOutputs out;
  call.read([&](const SlotVisitor& visit) {
    each_loss_input(visit, in);
    each_loss_output(visit, out);
  });

  const Context context = context_of(place, call);
  std::string text = text_of(call, options);
  if (options.label_smoothing != 0.0f) text += " smoothed";
  const auto plan = remembered_plan<LossPlan>(
      plan_key("cross_entropy", place, context, call, text),
      [&] { return plan_cross_entropy(options, in, out, request_of(call, context)); });
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
  call.read([&](const SlotVisitor& visit) {
    each_head_input(visit, in);
    each_head_output(visit, out);
  });

  const Context context = context_of(place, call);
  const auto plan = remembered_plan<LossPlan>(
      plan_key("head_forward", place, context, call, text_of(call, options)),
      [&] { return plan_head_forward(options, in, out, request_of(call, context)); });
  head_forward(context, *plan, options, in, out, call.workspace());
}

void run_head_backward(const Place& place, Call call) {
  const HeadOptions options = head_options(call);
  HeadInputs in;
  HeadCotangents cotangents;
  HeadGradients gradients;
  call.read([&](const SlotVisitor& visit) {
    each_head_input(visit, in);
    each_head_cotangent(visit.prefixed("cotangent_"), cotangents);
    each_head_gradient(visit, gradients);
  });

  const Context context = context_of(place, call);
  const auto plan = remembered_plan<LossPlan>(
      plan_key("head_backward", place, context, call, text_of(call, options)), [&] {
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
