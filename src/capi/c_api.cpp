// The C ABI: every function converts its arguments, calls the C++ API, and turns exceptions into
// status codes.
#include "logitless/c_api.h"

#include <algorithm>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "capi/convert.h"
#include "capi/guarded.h"
#include "capi/handles.h"
#include "head/hinted_plan.h"
#include "head/overlap.h"
#include "head/tensor_roles.h"
#include "logitless/c_communicator.h"
#include "logitless/c_far_field.h"
#include "logitless/c_sample.h"
#include "logitless/c_saved_head.h"
#include "logitless/saved_head.h"

using namespace logitless;        // NOLINT: this file is the library seen from outside
using namespace logitless::capi;  // NOLINT

struct logitless_plan {
  LossPlan plan;
  std::string explanation;
};

namespace {

thread_local std::string last_error_storage;
thread_local const char* last_error = "";

const LossPlan& plan_of(const logitless_plan* plan) {
  require(plan != nullptr, "plan: expected a handle, got NULL");
  return plan->plan;
}

// Makes the handle of the plan from make(request). `absent`: as in request_from.
template <typename Make>
logitless_status return_plan(const logitless_context* context,
                             const logitless_plan_request* request, logitless_plan** to,
                             const Make& make, bool absent = false) {
  return guarded([&] {
    require_pointer(to, "plan");
    const PlanRequest wanted = request_from(request, context_of(context).device(), absent);
    const bool hint = read_optional_struct(request, "request").budget_is_hint != 0;
    require(!hint || wanted.memory_budget > 0,
            "request.budget_is_hint: expected a memory_budget above 0, got 0");
    auto made = std::make_unique<logitless_plan>();
    made->plan = hint ? plan_from_hint(wanted, make) : make(wanted);
    made->explanation = made->plan.explain();
    context_of(context).trace(made->explanation);
    *to = made.release();
  });
}

// Returns the caller's workspace. Throws where one of `tensors`, each of type NamedViews, lies in
// the bytes that the plan uses.
template <typename... Tensors>
Workspace workspace_of(const LossPlan& plan, void* data, std::size_t bytes,
                       const Tensors&... tensors) {
  const std::size_t used = std::min(bytes, plan.workspace_bytes());
  require(data != nullptr || plan.workspace_bytes() == 0, "workspace: expected ",
          plan.workspace_bytes(), " bytes, got NULL");
  const NamedView memory{"workspace",
                         ConstTensorView(data, DType::i8, {static_cast<std::int64_t>(used)})};
  (require_apart(std::span(&memory, 1), tensors), ...);
  return Workspace(data, bytes);
}

ContextOptions context_options_from(const logitless_context_options* from) {
  const logitless_context_options c = read_optional_struct(from, "options");
  ContextOptions options;
  options.device = device_from(c.device, "options.device");
  options.device_index = c.device_index;
  options.stream = c.stream;
  options.threads = c.threads;
  if (c.kernel != nullptr) options.kernel = c.kernel;
  if (c.trace != nullptr) {
    options.trace = [trace = c.trace, user = c.trace_user](std::string_view line) {
      trace(std::string(line).c_str(), user);
    };
  }
  return options;
}

// Returns the names, which live as long as the library is loaded; empty if they are unavailable.
const std::vector<std::string>& kernels(bool runnable) noexcept {
  static const std::vector<std::string> none;
  try {
    static const std::vector<std::string> all = kernel_names(false);
    static const std::vector<std::string> here = kernel_names(true);
    return runnable ? here : all;
  } catch (...) {
    return none;
  }
}

}  // namespace

logitless_status logitless::capi::fail(logitless_status status, const char* text) noexcept {
  try {
    last_error_storage = text;
    last_error = last_error_storage.c_str();
  } catch (...) {
    last_error = "out of memory";
  }
  return status;
}

// ---- Version, status, errors

const char* logitless_version(void) { return version(); }
int32_t logitless_abi_version(void) { return LOGITLESS_ABI_VERSION; }

#define LOGITLESS_FOR_EACH_SIZED_STRUCT(apply)                                           \
  apply(context_options) apply(plan_request) apply(plan_info) apply(plan_candidate)      \
      apply(head_features) apply(cross_entropy_options) apply(cross_entropy_inputs)      \
          apply(cross_entropy_outputs) apply(loss_statistics) apply(loss_terms)          \
              apply(token_loss_inputs) apply(token_loss_outputs) apply(head_options)     \
                  apply(head_inputs) apply(head_outputs) apply(head_cotangents)          \
                      apply(head_gradients) apply(program_options) apply(program_tensor) \
                          apply(sharding)

#define LOGITLESS_DEFINE_INIT(name)                                           \
  void logitless_##name##_init(logitless_##name* value, size_t struct_size) { \
    init(value, struct_size);                                                 \
  }
LOGITLESS_FOR_EACH_SIZED_STRUCT(LOGITLESS_DEFINE_INIT)

size_t logitless_struct_size(const char* name) {
  if (name == nullptr) return 0;
  const std::string_view wanted(name);
  if (wanted == "logitless_tensor") return sizeof(logitless_tensor);
#define LOGITLESS_MATCH(struct_name) \
  if (wanted == "logitless_" #struct_name) return sizeof(logitless_##struct_name);
  LOGITLESS_FOR_EACH_SIZED_STRUCT(LOGITLESS_MATCH)
  LOGITLESS_MATCH(communicator_callbacks_options)
  LOGITLESS_MATCH(communicator_nccl_options)
  LOGITLESS_MATCH(order_options)
  LOGITLESS_MATCH(far_field_options)
  LOGITLESS_MATCH(far_field_report)
  LOGITLESS_MATCH(sample_options)
  LOGITLESS_MATCH(sample_inputs)
  LOGITLESS_MATCH(sample_outputs)
  LOGITLESS_MATCH(top_logprobs_options)
  LOGITLESS_MATCH(top_logprobs_inputs)
  LOGITLESS_MATCH(top_logprobs_outputs)
  return 0;
}

const char* logitless_status_name(logitless_status status) {
  switch (status) {
    case LOGITLESS_OK:
      return "ok";
    case LOGITLESS_INVALID_ARGUMENT:
      return "invalid argument";
    case LOGITLESS_UNSUPPORTED:
      return "unsupported";
    case LOGITLESS_DEVICE_ERROR:
      return "device error";
    case LOGITLESS_INTERNAL_ERROR:
      return "internal error";
    default:
      return "unknown status";
  }
}

const char* logitless_last_error(void) { return last_error; }

// ---- Tensors

logitless_status logitless_tensor_init(logitless_tensor* tensor, void* data, logitless_dtype dtype,
                                       int32_t rank, const int64_t* shape) {
  return guarded([&] {
    require_pointer(tensor, "tensor");
    require(rank >= 0 && rank <= LOGITLESS_MAX_RANK, "rank: expected 0 to ", LOGITLESS_MAX_RANK,
            ", got ", rank);
    require(shape != nullptr || rank == 0, "shape: expected ", rank, " sizes, got NULL");
    const TensorView view(data, dtype_from(dtype, "dtype"),
                          std::span(shape, static_cast<std::size_t>(rank)));
    logitless_tensor made{data, dtype, rank, {}, {}};
    for (int d = 0; d < rank; ++d) {
      made.shape[d] = view.size(d);
      made.strides[d] = view.stride(d);
    }
    *tensor = made;
  });
}

// ---- Contexts and kernels

logitless_status logitless_context_create(const logitless_context_options* options,
                                          logitless_context** context) {
  return guarded([&] {
    require_pointer(context, "context");
    *context = new logitless_context{Context(context_options_from(options))};
  });
}

void logitless_context_destroy(logitless_context* context) { delete context; }

int32_t logitless_context_threads(const logitless_context* context) {
  return context == nullptr ? 0 : context->context.threads();
}
int32_t logitless_context_compute_capability(const logitless_context* context) {
  if (context == nullptr || context->context.device().kind != DeviceKind::cuda) return 0;
  return context->context.device().compute_capability;
}

size_t logitless_kernel_count(int32_t runnable) { return kernels(runnable != 0).size(); }

const char* logitless_kernel_name(int32_t runnable, size_t index) {
  const std::vector<std::string>& names = kernels(runnable != 0);
  return index < names.size() ? names[index].c_str() : nullptr;
}

// ---- Plans

void logitless_plan_destroy(logitless_plan* plan) { delete plan; }

size_t logitless_plan_workspace_bytes(const logitless_plan* plan) {
  return plan == nullptr ? 0 : plan->plan.workspace_bytes();
}

logitless_status logitless_plan_get_info(const logitless_plan* plan, logitless_plan_info* info) {
  return guarded([&] {
    const LossPlan& p = plan_of(plan);
    auto c = defaults<logitless_plan_info>();
    c.kernel = p.kernel.c_str();
    c.workspace_bytes = p.workspace_bytes();
    c.logits_bytes = p.logits_bytes();
    c.memory_budget = p.memory_budget;
    c.tokens = p.shape.tokens;
    c.dim = p.shape.dim;
    c.vocab = p.shape.vocab;
    c.chunk_tokens = p.chunk_tokens;
    c.block_vocab = p.block_vocab;
    c.stored_vocab = p.stored_vocab;
    c.passes = p.passes;
    c.predicted_seconds = p.predicted_seconds;
    c.kind = static_cast<logitless_plan_kind>(p.kind);
    c.dtype = static_cast<logitless_dtype>(p.shape.dtype);
    c.threads = p.threads;
    write_struct(c, info, "info");
  });
}

size_t logitless_plan_candidate_count(const logitless_plan* plan) {
  return plan == nullptr ? 0 : plan->plan.candidates.size();
}

logitless_status logitless_plan_get_candidate(const logitless_plan* plan, size_t index,
                                              logitless_plan_candidate* candidate) {
  return guarded([&] {
    const std::vector<PlanCandidate>& all = plan_of(plan).candidates;
    require(index < all.size(), "index: ", index, " is not below the ", all.size(),
            " candidates of the plan");
    const PlanCandidate& p = all[index];
    auto c = defaults<logitless_plan_candidate>();
    c.reason = p.reason.c_str();
    c.workspace_bytes = p.workspace_bytes;
    c.passes = p.passes;
    c.predicted_seconds = p.predicted_seconds;
    c.kind = static_cast<logitless_plan_kind>(p.kind);
    c.possible = p.possible ? 1 : 0;
    write_struct(c, candidate, "candidate");
  });
}

const char* logitless_plan_explain(const logitless_plan* plan) {
  return plan == nullptr ? "" : plan->explanation.c_str();
}

logitless_status logitless_plan_head(const logitless_context* context,
                                     const logitless_head_features* features,
                                     const logitless_plan_request* request, logitless_plan** plan) {
  return return_plan(
      context, request, plan,
      [&](const PlanRequest& wanted) {
        const logitless_head_features c = read_struct(features, "features");
        return plan_head(shape_from(c), features_from(c), wanted);
      },
      true);
}

// ---- Cross entropy

logitless_status logitless_plan_cross_entropy(const logitless_context* context,
                                              const logitless_cross_entropy_options* options,
                                              const logitless_cross_entropy_inputs* inputs,
                                              const logitless_cross_entropy_outputs* outputs,
                                              const logitless_plan_request* request,
                                              logitless_plan** plan) {
  return return_plan(context, request, plan, [&](const PlanRequest& wanted) {
    return plan_cross_entropy(options_from(options), inputs_from(inputs), outputs_from(outputs),
                              wanted);
  });
}

logitless_status logitless_cross_entropy(logitless_context* context, const logitless_plan* plan,
                                         const logitless_cross_entropy_options* options,
                                         const logitless_cross_entropy_inputs* inputs,
                                         const logitless_cross_entropy_outputs* outputs,
                                         void* workspace, size_t workspace_bytes,
                                         logitless_loss_statistics* statistics) {
  return guarded([&] {
    if (statistics != nullptr)
      check_struct_size(statistics, "statistics");  // before any output is written
    const LossPlan& p = plan_of(plan);
    const CrossEntropyInputs in = inputs_from(inputs);
    const CrossEntropyOutputs out = outputs_from(outputs);
    NamedViews read, written;
    each_loss_input(read.adder(), in);
    each_loss_output(written.adder(), out);
    const LossStatistics made =
        cross_entropy(context_of(context), p, options_from(options), in, out,
                      workspace_of(p, workspace, workspace_bytes, read, written));
    if (statistics == nullptr) return;
    write_statistics(made, statistics);
  });
}

logitless_status logitless_device_statistics(const logitless_context* context,
                                             const logitless_plan* plan, void* workspace,
                                             size_t workspace_bytes,
                                             logitless_loss_statistics* statistics) {
  return guarded([&] {
    require_pointer(statistics, "statistics");
    check_struct_size(statistics, "statistics");
    const LossPlan& p = plan_of(plan);
    write_statistics(
        device_statistics(context_of(context), p, workspace_of(p, workspace, workspace_bytes)),
        statistics);
  });
}

// ---- The head

logitless_status logitless_plan_head_forward(const logitless_context* context,
                                             const logitless_head_options* options,
                                             const logitless_head_inputs* inputs,
                                             const logitless_head_outputs* outputs,
                                             const logitless_plan_request* request,
                                             logitless_plan** plan) {
  return return_plan(context, request, plan, [&](const PlanRequest& wanted) {
    return plan_head_forward(options_from(options), inputs_from(inputs), outputs_from(outputs),
                             wanted);
  });
}

logitless_status logitless_head_forward(logitless_context* context, const logitless_plan* plan,
                                        const logitless_head_options* options,
                                        const logitless_head_inputs* inputs,
                                        const logitless_head_outputs* outputs, void* workspace,
                                        size_t workspace_bytes) {
  return guarded([&] {
    const LossPlan& p = plan_of(plan);
    const HeadInputs in = inputs_from(inputs);
    const HeadOutputs out = outputs_from(outputs);
    NamedViews read, written;
    each_head_input(read.adder(), in);
    each_head_output(written.adder(), out);
    head_forward(context_of(context), p, options_from(options), in, out,
                 workspace_of(p, workspace, workspace_bytes, read, written));
  });
}

logitless_status logitless_plan_head_backward(const logitless_context* context,
                                              const logitless_head_options* options,
                                              const logitless_head_inputs* inputs,
                                              const logitless_head_cotangents* cotangents,
                                              const logitless_head_gradients* gradients,
                                              const logitless_plan_request* request,
                                              logitless_plan** plan) {
  return return_plan(context, request, plan, [&](const PlanRequest& wanted) {
    return plan_head_backward(options_from(options), inputs_from(inputs),
                              cotangents_from(cotangents), gradients_from(gradients), wanted);
  });
}

logitless_status logitless_head_backward(logitless_context* context, const logitless_plan* plan,
                                         const logitless_head_options* options,
                                         const logitless_head_inputs* inputs,
                                         const logitless_head_cotangents* cotangents,
                                         const logitless_head_gradients* gradients, void* workspace,
                                         size_t workspace_bytes) {
  return guarded([&] {
    const LossPlan& p = plan_of(plan);
    const HeadInputs in = inputs_from(inputs);
    const HeadCotangents cotangent = cotangents_from(cotangents);
    const HeadGradients gradient = gradients_from(gradients);
    NamedViews read, written;
    each_head_input(read.adder(), in);
    each_head_cotangent(read.adder("cotangent of "), cotangent);
    each_head_gradient(written.adder(), gradient);
    head_backward(context_of(context), p, options_from(options), in, cotangent, gradient,
                  workspace_of(p, workspace, workspace_bytes, read, written));
  });
}

// ---- The saved head: a forward whose exponentials stay for the backward

logitless_status logitless_plan_head_saved(const logitless_context* context,
                                           const logitless_head_options* options,
                                           const logitless_head_inputs* inputs,
                                           const logitless_head_outputs* outputs,
                                           const logitless_head_gradients* gradients,
                                           const logitless_plan_request* request,
                                           logitless_plan** plan) {
  return return_plan(context, request, plan, [&](const PlanRequest& wanted) {
    return plan_head_saved(options_from(options), inputs_from(inputs), outputs_from(outputs),
                           gradients_from(gradients), wanted);
  });
}

logitless_status logitless_head_forward_saved(
    logitless_context* context, const logitless_plan* plan, const logitless_head_options* options,
    const logitless_head_inputs* inputs, const logitless_head_outputs* outputs,
    const logitless_head_gradients* gradients, void* workspace, size_t workspace_bytes) {
  return guarded([&] {
    const LossPlan& p = plan_of(plan);
    head_forward_saved(context_of(context), p, options_from(options), inputs_from(inputs),
                       outputs_from(outputs), gradients_from(gradients),
                       workspace_of(p, workspace, workspace_bytes));
  });
}

logitless_status logitless_head_backward_saved(
    logitless_context* context, const logitless_plan* plan, const logitless_head_options* options,
    const logitless_head_inputs* inputs, const logitless_head_cotangents* cotangents,
    const logitless_head_gradients* gradients, void* workspace, size_t workspace_bytes) {
  return guarded([&] {
    const LossPlan& p = plan_of(plan);
    head_backward_saved(context_of(context), p, options_from(options), inputs_from(inputs),
                        cotangents_from(cotangents), gradients_from(gradients),
                        workspace_of(p, workspace, workspace_bytes));
  });
}

logitless_status logitless_scale_gradients(logitless_context* context,
                                           const logitless_tensor* factor,
                                           const logitless_head_gradients* gradients) {
  return guarded([&] {
    scale_gradients(context_of(context), view_from(factor, "factor"), gradients_from(gradients));
  });
}

// ---- Bytes

logitless_status logitless_parse_bytes(const char* text, uint64_t* bytes) {
  return guarded([&] {
    require_pointer(text, "text");
    require_pointer(bytes, "bytes");
    *bytes = parse_bytes(text);
  });
}

uint64_t logitless_process_peak_bytes(void) { return process_peak_bytes(); }
