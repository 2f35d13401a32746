// XLA FFI handlers of samples and best entries (logitless/sample.h).
//
// Attributes: the options under their names in the library, memory_budget, and threads (of the
// CPU). The key has four 32-bit integers, which are two of 64 bits: JAX has those only on demand. A
// process plans equal calls once. The workspace is XLA's scratch memory for the time of the call.
#include "logitless/sample.h"

#include <cstddef>
#include <memory>
#include <mutex>
#include <optional>
#include <string>

#include "core/lru_cache.h"
#include "sample/tensor_roles.h"
#include "xla/loss_call.h"

namespace logitless::xla_handlers {
namespace {

// Returns the plan from `make`. Plans on a GPU have loaded kernels, so the key names the device.
template <typename Make>
std::shared_ptr<const SamplePlan> remembered_plan(const Place& place, const Context& context,
                                                  const std::string& call, const Make& make) {
  constexpr std::size_t kMostPlans = 256;
  static std::mutex mutex;
  static auto* const plans = new LruCache<std::string, SamplePlan>(kMostPlans);  // outlives threads
  const DeviceLimits& device = context.device();
  const std::string key = concat(call, " device ", static_cast<int>(place.device), " ",
                                 place.device_index, " threads ", device.threads);
  const std::lock_guard lock(mutex);
  return plans->get(key, make);
}

// run(workspace) with the bytes that a plan takes.
template <typename Run>
void with_workspace(const Place& place, const Context& context, std::size_t bytes, const Run& run) {
  constexpr std::size_t kAlignment = 256;
  if (place.device == DeviceKind::cpu) return run(Workspace(context, bytes));
  const std::optional<void*> data = place.scratch->Allocate(bytes + kAlignment);
  if (!data.has_value())
    throw DeviceError(concat("sample: XLA has no ", bytes, " bytes for its workspace"));
  run(aligned_workspace({*data, bytes + kAlignment}));
}

std::size_t budget_of(const Call& call) {
  return static_cast<std::size_t>(call.attribute<std::int64_t>("memory_budget"));
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
  Slots<ConstTensorView> inputs;
  Slots<TensorView> outputs;
  each_sample_input(listed_in(inputs), in);
  each_sample_output(listed_in(outputs), out);
  call.read_inputs(inputs);
  call.read_outputs(outputs);
  if (in.key.defined()) {
    check(in.key.dtype() == DType::i32 && in.key.bytes() == 16, "key: ", describe(in.key));
    in.key = ConstTensorView(in.key.data(), DType::i64, {2});
  }

  const Context context = context_of(place, call);
  const std::string text =
      concat("sample ", call.signature(), " temperature ", options.temperature, " top_k ",
             options.top_k, " top_p ", options.top_p, " min_p ", options.min_p, " cap ",
             options.softcap, " scale ", options.logit_scale, " budget ", budget_of(call));
  const auto plan = remembered_plan(place, context, text, [&] {
    return plan_sample(context, options, in, out, budget_of(call));
  });
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
  Slots<ConstTensorView> inputs;
  Slots<TensorView> outputs;
  each_top_input(listed_in(inputs), in);
  each_top_output(listed_in(outputs), out);
  call.read_inputs(inputs);
  call.read_outputs(outputs);

  const Context context = context_of(place, call);
  const std::string text =
      concat("top_logprobs ", call.signature(), " k ", options.k, " cap ", options.softcap,
             " scale ", options.logit_scale, " budget ", budget_of(call));
  const auto plan = remembered_plan(place, context, text, [&] {
    return plan_top_logprobs(context, options, in, out, budget_of(call));
  });
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
