#include "logitless/sample.h"

#include <algorithm>
#include <cstring>

#include "core/check.h"
#include "core/described.h"
#include "kernels/device/stream.h"
#include "logitless/head.h"
#include "sample/state.h"
#include "sample/tensor_roles.h"

namespace logitless {
namespace {

bool same_form(const ConstTensorView& a, const ConstTensorView& b) {
  if (a.rank() != b.rank()) return false;
  if (!a.defined()) return true;
  for (int d = 0; d < a.rank(); ++d)
    if (a.size(d) != b.size(d)) return false;
  return a.dtype() == b.dtype();
}

std::string_view name_of(DeviceKind kind) { return kind == DeviceKind::cpu ? "CPU" : "GPU"; }

const SamplePlan::State& state_of(const SamplePlan& plan, bool top) {
  const SamplePlan::State* s = SampleAccess::of(plan);
  require(s != nullptr, "plan: is empty; expected one of ",
          top ? "plan_top_logprobs" : "plan_sample");
  require(s->top == top, "plan: expected one of ", top ? "plan_top_logprobs" : "plan_sample",
          ", got one of ", top ? "plan_sample" : "plan_top_logprobs");
  return *s;
}

// Returns a visitor that compares tensors with those of the plan, in order.
auto same_as_planned(const SamplePlan::State& s, std::size_t& at) {
  return [&s, &at](const char* name, const ConstTensorView& view) {
    const ConstTensorView& planned = s.tensors[at++];
    require(same_form(view, planned), name, ": the plan is for ", described(planned), ", got ",
            described(view));
  };
}

void require_logits(const LogitsForm& form, const LogitsForm& planned) {
  require(form.softcap == planned.softcap, "softcap: the plan is for ", planned.softcap, ", got ",
          form.softcap);
  require(form.logit_scale == planned.logit_scale, "logit_scale: the plan is for ",
          planned.logit_scale, ", got ", form.logit_scale);
}

void require_machine(const SamplePlan::State& s, const Context& context,
                     const Workspace& workspace) {
  const DeviceLimits& here = context.device();
  const bool gpu = s.device.kind == DeviceKind::cuda;
  require(here.kind == s.device.kind, "context: of the ", name_of(here.kind),
          ", the plan is for a ", name_of(s.device.kind));
  require(gpu || here.threads == s.device.threads, "context: has ", here.threads,
          " threads, the plan is for ", s.device.threads);
  require(!gpu || here.compute_capability == s.device.compute_capability,
          "context: of compute capability ", here.compute_capability, ", the plan is for ",
          s.device.compute_capability);
  require(workspace.data() != nullptr && workspace.bytes() >= s.bytes, "workspace: expected ",
          s.bytes, " bytes, got ",
          workspace.data() == nullptr ? std::string("NULL") : concat(workspace.bytes()));
  const std::size_t alignment = gpu ? 256 : 64;
  require(reinterpret_cast<std::uintptr_t>(workspace.data()) % alignment == 0,
          "workspace: is not aligned to ", alignment, " bytes");
}

// Pointers of tensors and numbers by name, for programs.
class Pointers {
 public:
  void add(std::string_view name, const void* data) {
    list_.push_back({name, const_cast<void*>(data)});
  }
  bool has(std::string_view name) const {
    return std::any_of(list_.begin(), list_.end(), [&](const auto& p) { return p.name == name; });
  }
  auto adder() {
    return [this](const char* name, const ConstTensorView& view) {
      if (view.defined()) add(name, view.data());
    };
  }
  operator std::span<const NamedPointer>() const { return list_; }  // NOLINT: on purpose

 private:
  std::vector<NamedPointer> list_;
};

void run_head(const Context& context, const SamplePlan::State& s, const LossPlan& plan,
              const HeadInputs& in, const HeadOutputs& out, std::byte* base) {
  const LogitsForm& form = s.logits();
  head_forward(context, plan, {.softcap = form.softcap, .logit_scale = form.logit_scale}, in, out,
               Workspace(base + s.scratch_at, plan.workspace_bytes()));
}

// Writes the largest entries i32 [N] to the workspace. The targets of this pass do not matter.
void find_largest(const Context& context, const SamplePlan::State& s, HeadInputs in,
                  std::byte* base) {
  const std::int64_t rows = s.logits().shape.tokens;
  const std::size_t bytes = static_cast<std::size_t>(rows) * sizeof(std::int32_t);
  if (s.device.kind == DeviceKind::cuda)
    cuda::fill_device(base + s.wanted_at, 0, bytes, context.stream());
  else
    std::memset(base + s.wanted_at, 0, bytes);
  in.targets = {base + s.wanted_at, DType::i32, {rows}};
  run_head(context, s, *s.largest, in, {.argmax = {base + s.found_at, DType::i32, {rows}}}, base);
}

// Copies the numbers of a sampler to the workspace.
void add_numbers(const Context& context, const SamplePlan::State& s, const SampleOptions& options,
                 std::byte* base, Pointers& pointers) {
  static_assert(sizeof(SampleNumbers) == 64);  // put_values
  const SampleNumbers numbers{noise_key(options.seed), options.temperature, options.top_p,
                              options.min_p};
  if (s.device.kind == DeviceKind::cuda)
    cuda::put_values(base, &numbers, context.stream());
  else
    std::memcpy(base, &numbers, sizeof numbers);
  if (!pointers.has("key")) pointers.add("key", base + offsetof(SampleNumbers, key));
  if (s.sample.temperature == Given::number)
    pointers.add("temperature", base + offsetof(SampleNumbers, temperature));
  if (s.sample.top_p == Given::number) pointers.add("top_p", base + offsetof(SampleNumbers, top_p));
  if (s.sample.min_p == Given::number) pointers.add("min_p", base + offsetof(SampleNumbers, min_p));
}

// Runs `call` with a workspace for the plan, and waits.
template <typename Call>
void run_alone(const Context& context, const SamplePlan& plan, const Call& call) {
  const Workspace workspace(context, std::max<std::size_t>(plan.workspace_bytes(), 1));
  call(workspace);
  if (context.device().kind == DeviceKind::cuda) cuda::synchronize(context.stream());
}

}  // namespace

void sample(const Context& context, const SamplePlan& plan, const SampleOptions& options,
            const SampleInputs& in, const SampleOutputs& out, const Workspace& workspace) {
  const SamplePlan::State& s = state_of(plan, false);
  const SampleForm form = checked_form(context, options, in, out);
  const SampleForm& planned = s.sample;
  std::size_t at = 0;
  each_sample_input(same_as_planned(s, at), in);
  each_sample_output(same_as_planned(s, at), out);
  require_logits(form.logits, planned.logits);
  require(form.top_k == planned.top_k, "top_k: the plan is for ", planned.top_k, ", got ",
          form.top_k);
  require(form.top_p == Given::none || planned.top_p != Given::none,
          "top_p: the plan was made without one, got ", options.top_p);
  require(form.min_p == Given::none || planned.min_p != Given::none,
          "min_p: the plan was made without one, got ", options.min_p);
  require(form.greedy || !planned.greedy, "temperature: the plan is for 0, got ",
          options.temperature);
  if (form.logits.shape.tokens == 0) return;
  require_machine(s, context, workspace);

  auto* const base = static_cast<std::byte*>(workspace.data());
  const std::int64_t rows = form.logits.shape.tokens;
  HeadInputs head{.hidden = rows_of(in.hidden, rows, form.logits.shape.dim),
                  .weight = in.weight,
                  .bias = in.bias};
  Pointers pointers;
  each_sample_input(pointers.adder(), in);
  pointers.add("tokens", out.tokens.data());
  if (s.stored) {
    add_numbers(context, s, options, base, pointers);
    return sample_stored(context, s.stored, planned, in, out,
                         reinterpret_cast<const SampleNumbers*>(base), base + s.scratch_at);
  }
  if (planned.of_head()) {
    find_largest(context, s, head, base);
    pointers.add("largest", base + s.found_at);
  } else {
    add_numbers(context, s, options, base, pointers);
  }
  s.ids->run(context, pointers, base + s.scratch_at);
  if (!s.head) return;
  head.targets = rows_of(out.tokens, rows);
  run_head(context, s, *s.head, head, {.log_prob = {out.log_prob.data(), DType::f32, {rows}}},
           base);
}

void top_logprobs(const Context& context, const SamplePlan& plan, const TopLogProbsOptions& options,
                  const TopLogProbsInputs& in, const TopLogProbsOutputs& out,
                  const Workspace& workspace) {
  const SamplePlan::State& s = state_of(plan, true);
  const TopForm form = checked_form(context, options, in, out);
  std::size_t at = 0;
  require(form.k == s.best.k, "k: the plan is for ", s.best.k, ", got ", form.k);
  each_top_input(same_as_planned(s, at), in);
  each_top_output(same_as_planned(s, at), out);
  require_logits(form.logits, s.best.logits);
  const std::int64_t rows = form.logits.shape.tokens;
  if (rows == 0) return;
  require_machine(s, context, workspace);

  auto* const base = static_cast<std::byte*>(workspace.data());
  Pointers pointers;
  each_top_input(pointers.adder(), in);
  each_top_output(pointers.adder(), out);
  pointers.add("wanted", base + s.wanted_at);
  pointers.add("found", base + s.found_at);
  if (s.stored) {
    best_stored(context, s.stored, s.best, in, reinterpret_cast<std::int64_t*>(base + s.wanted_at),
                reinterpret_cast<float*>(base + s.found_at), base + s.scratch_at);
    s.order->run(context, pointers, base + s.scratch_at);
    return;
  }
  s.ids->run(context, pointers, base + s.scratch_at);
  HeadInputs head{.hidden = rows_of(in.hidden, rows, form.logits.shape.dim),
                  .weight = in.weight,
                  .targets = {base + s.wanted_at, DType::i64, {rows, form.wanted()}},
                  .bias = in.bias};
  run_head(context, s, *s.head, head,
           {.log_prob = {base + s.found_at, DType::f32, {rows, form.wanted()}}}, base);
  s.order->run(context, pointers, base + s.scratch_at);
}

void sample(const Context& context, const SampleOptions& options, const SampleInputs& in,
            const SampleOutputs& out, std::size_t memory_budget) {
  const SamplePlan plan = plan_sample(context, options, in, out, memory_budget);
  run_alone(context, plan, [&](const Workspace& workspace) {
    sample(context, plan, options, in, out, workspace);
  });
}

void top_logprobs(const Context& context, const TopLogProbsOptions& options,
                  const TopLogProbsInputs& in, const TopLogProbsOutputs& out,
                  std::size_t memory_budget) {
  const SamplePlan plan = plan_top_logprobs(context, options, in, out, memory_budget);
  run_alone(context, plan, [&](const Workspace& workspace) {
    top_logprobs(context, plan, options, in, out, workspace);
  });
}

}  // namespace logitless
