// XLA FFI handlers of samples and best entries (logitless/sample.h).
//
// Attributes: the options under their names in the library, memory_budget, and threads (of the
// CPU). The key has four 32-bit integers, which are two of 64 bits: JAX has those only on demand. A
// process plans equal calls once. The workspace is XLA's scratch memory for the time of the call.
#include "logitless/sample.h"

#include <cstddef>
#include <string>

#include "sample/tensor_roles.h"
#include "xla/loss_call.h"

namespace logitless::xla_handlers {
namespace {

// run(workspace) with the bytes that a plan takes.
template <typename Run>
void with_workspace(const Place& place, const Context& context, std::size_t bytes, const Run& run) {
  run(place.device == DeviceKind::cpu ? Workspace(context, bytes)
                                      : scratch_of(place, "sample", bytes));
}

void run_sample(const Place& place, Call call) {
  SampleOptions options;
  options.temperature = call.attribute<float>("temperature");
  options.top_k = call.attribute<std::int64_t>("top_k");
  options.top_p = call.attribute<float>("top_p");
  options.min_p = call.attribute<float>("min_p");
  options.softcap = call.attribute<float>("softcap");
  options.logit_scale = call.attribute<float>("logit_scale");
  SampleInputs in;
  SampleOutputs out;
  call.read([&](const SlotVisitor& visit) {
    each_sample_input(visit, in);
    each_sample_output(visit, out);
  });
  if (in.key.defined()) {
    check(in.key.dtype() == DType::i32 && in.key.bytes() == 16, "key: ", describe(in.key));
    in.key = ConstTensorView(in.key.data(), DType::i64, {2});
  }

  const Context context = context_of(place, call);
  const std::string text = concat("temperature ", options.temperature, " top_k ", options.top_k,
                                  " top_p ", options.top_p, " min_p ", options.min_p, " cap ",
                                  options.softcap, " scale ", options.logit_scale);
  const auto plan = remembered_plan<SamplePlan>(
      plan_key("sample", place, context, call, text),
      [&] { return plan_sample(context, options, in, out, budget_of(call)); });
  with_workspace(place, context, plan->workspace_bytes(), [&](const Workspace& workspace) {
    sample(context, *plan, options, in, out, workspace);
  });
}

void run_top_logprobs(const Place& place, Call call) {
  TopLogProbsOptions options;
  options.k = call.attribute<std::int64_t>("k");
  options.softcap = call.attribute<float>("softcap");
  options.logit_scale = call.attribute<float>("logit_scale");
  TopLogProbsInputs in;
  TopLogProbsOutputs out;
  call.read([&](const SlotVisitor& visit) {
    each_top_input(visit, in);
    each_top_output(visit, out);
  });

  const Context context = context_of(place, call);
  const std::string text =
      concat("k ", options.k, " cap ", options.softcap, " scale ", options.logit_scale);
  const auto plan = remembered_plan<SamplePlan>(
      plan_key("top_logprobs", place, context, call, text),
      [&] { return plan_top_logprobs(context, options, in, out, budget_of(call)); });
  with_workspace(place, context, plan->workspace_bytes(), [&](const Workspace& workspace) {
    top_logprobs(context, *plan, options, in, out, workspace);
  });
}

}  // namespace
}  // namespace logitless::xla_handlers

using logitless::xla_handlers::run_sample;
using logitless::xla_handlers::run_top_logprobs;

LOGITLESS_XLA_HANDLERS_WITH_SCRATCH(sample);
LOGITLESS_XLA_HANDLERS_WITH_SCRATCH(top_logprobs);
