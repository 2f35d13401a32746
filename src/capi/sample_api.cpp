// Sampling over the C ABI.
#include <memory>
#include <string>
#include <utility>

#include "capi/convert.h"
#include "capi/guarded.h"
#include "capi/handles.h"
#include "logitless/c_sample.h"
#include "logitless/sample.h"
#include "sample/tensor_roles.h"

using namespace logitless;        // NOLINT: this file is the library seen from outside
using namespace logitless::capi;  // NOLINT

struct logitless_sample_plan {
  SamplePlan plan;
  std::string explanation;
};

namespace logitless::capi {

template <>
inline logitless_sample_options defaults() {
  const SampleOptions options;
  logitless_sample_options value{};
  value.struct_size = sizeof(value);
  value.temperature = options.temperature;
  value.top_p = options.top_p;
  value.logit_scale = options.logit_scale;
  return value;
}
template <>
inline logitless_top_logprobs_options defaults() {
  const TopLogProbsOptions options;
  logitless_top_logprobs_options value{};
  value.struct_size = sizeof(value);
  value.k = options.k;
  value.logit_scale = options.logit_scale;
  return value;
}

}  // namespace logitless::capi

namespace {

SampleOptions options_from(const logitless_sample_options* from) {
  const logitless_sample_options c = read_optional_struct(from, "options");
  require(c.reserved == 0, "options.reserved: expected 0, got ", c.reserved);
  return {c.temperature, c.top_k, c.top_p, c.min_p, c.seed, c.softcap, c.logit_scale};
}
SampleInputs inputs_from(const logitless_sample_inputs* from) {
  const logitless_sample_inputs c = read_struct(from, "inputs");
  SampleInputs inputs;
  each_sample_input(read_tensor, inputs, c);
  return inputs;
}
SampleOutputs outputs_from(const logitless_sample_outputs* from) {
  const logitless_sample_outputs c = read_struct(from, "outputs");
  SampleOutputs outputs;
  each_sample_output(read_tensor, outputs, c);
  return outputs;
}

TopLogProbsOptions options_from(const logitless_top_logprobs_options* from) {
  const logitless_top_logprobs_options c = read_optional_struct(from, "options");
  return {c.k, c.softcap, c.logit_scale};
}
TopLogProbsInputs inputs_from(const logitless_top_logprobs_inputs* from) {
  const logitless_top_logprobs_inputs c = read_struct(from, "inputs");
  TopLogProbsInputs inputs;
  each_top_input(read_tensor, inputs, c);
  return inputs;
}
TopLogProbsOutputs outputs_from(const logitless_top_logprobs_outputs* from) {
  const logitless_top_logprobs_outputs c = read_struct(from, "outputs");
  TopLogProbsOutputs outputs;
  each_top_output(read_tensor, outputs, c);
  return outputs;
}

const SamplePlan& plan_of(const logitless_sample_plan* plan) {
  require(plan != nullptr, "plan: expected a handle, got NULL");
  return plan->plan;
}

void return_plan(const Context& context, SamplePlan plan, logitless_sample_plan** to) {
  auto made = std::make_unique<logitless_sample_plan>();
  made->explanation = plan.explain();
  made->plan = std::move(plan);
  context.trace(made->explanation);
  *to = made.release();
}

}  // namespace

#define LOGITLESS_DEFINE_INIT(name)                                           \
  void logitless_##name##_init(logitless_##name* value, size_t struct_size) { \
    init(value, struct_size);                                                 \
  }
LOGITLESS_DEFINE_INIT(sample_options)
LOGITLESS_DEFINE_INIT(sample_inputs)
LOGITLESS_DEFINE_INIT(sample_outputs)
LOGITLESS_DEFINE_INIT(top_logprobs_options)
LOGITLESS_DEFINE_INIT(top_logprobs_inputs)
LOGITLESS_DEFINE_INIT(top_logprobs_outputs)

void logitless_sample_plan_destroy(logitless_sample_plan* plan) { delete plan; }
size_t logitless_sample_plan_workspace_bytes(const logitless_sample_plan* plan) {
  return plan == nullptr ? 0 : plan->plan.workspace_bytes();
}
const char* logitless_sample_plan_explain(const logitless_sample_plan* plan) {
  return plan == nullptr ? "" : plan->explanation.c_str();
}

logitless_status logitless_plan_sample(const logitless_context* context,
                                       const logitless_sample_options* options,
                                       const logitless_sample_inputs* inputs,
                                       const logitless_sample_outputs* outputs,
                                       uint64_t memory_budget, logitless_sample_plan** plan) {
  return guarded([&] {
    require_pointer(plan, "plan");
    const Context& where = context_of(context);
    return_plan(where,
                plan_sample(where, options_from(options), inputs_from(inputs),
                            outputs_from(outputs), memory_budget),
                plan);
  });
}

logitless_status logitless_sample(logitless_context* context, const logitless_sample_plan* plan,
                                  const logitless_sample_options* options,
                                  const logitless_sample_inputs* inputs,
                                  const logitless_sample_outputs* outputs, void* workspace,
                                  size_t workspace_bytes) {
  return guarded([&] {
    sample(context_of(context), plan_of(plan), options_from(options), inputs_from(inputs),
           outputs_from(outputs), Workspace(workspace, workspace_bytes));
  });
}

logitless_status logitless_plan_top_logprobs(const logitless_context* context,
                                             const logitless_top_logprobs_options* options,
                                             const logitless_top_logprobs_inputs* inputs,
                                             const logitless_top_logprobs_outputs* outputs,
                                             uint64_t memory_budget, logitless_sample_plan** plan) {
  return guarded([&] {
    require_pointer(plan, "plan");
    const Context& where = context_of(context);
    return_plan(where,
                plan_top_logprobs(where, options_from(options), inputs_from(inputs),
                                  outputs_from(outputs), memory_budget),
                plan);
  });
}

logitless_status logitless_top_logprobs(logitless_context* context,
                                        const logitless_sample_plan* plan,
                                        const logitless_top_logprobs_options* options,
                                        const logitless_top_logprobs_inputs* inputs,
                                        const logitless_top_logprobs_outputs* outputs,
                                        void* workspace, size_t workspace_bytes) {
  return guarded([&] {
    top_logprobs(context_of(context), plan_of(plan), options_from(options), inputs_from(inputs),
                 outputs_from(outputs), Workspace(workspace, workspace_bytes));
  });
}
