#include "train/on_device.h"

#include <fmt/format.h>

#include "logitless/device.h"
#include "logitless/error.h"
#include "logitless/parallel.h"

namespace logitless::train {
namespace {

std::size_t taken(const Context& context) {
  const DeviceStatus status = device_status(context);
  return status.total_bytes - status.free_bytes;
}

}  // namespace

Trainer::OnDevice::OnDevice(Context&& gpu, const DeviceModel& model, const TensorSet& layout)
    : context(std::move(gpu)),
      statement(DeviceSteps::statement(model, layout)),
      taken_before(taken(context)),
      steps(context, model, layout) {}

void Trainer::OnDevice::require_finished(const char* call) const {
  if (!started.empty())
    throw InternalError(fmt::format("{} between start_step() and finish_step()", call));
}
void Trainer::OnDevice::get(const TensorSet& values, const TensorSet& m, const TensorSet& v) const {
  require_finished("save()");
  steps.get(values, m, v);
}
void Trainer::OnDevice::get_values(const TensorSet& values) const {
  require_finished("values()");
  steps.get_values(values);
}
void Trainer::OnDevice::add_to(TrainMemory& memory) const {
  memory.device = statement;
  for (const MemoryItem& item : statement) {
    if (item.name == "gradients") memory.gradients = item.bytes;
  }
  memory.device_taken_before = taken_before;
  memory.device_taken = taken(context);
}

void Trainer::start_device() {
  if (options_.far_field) throw Unsupported("the far field: a GPU trains without it");
  ContextOptions on_gpu;
  on_gpu.device = DeviceKind::cuda;
  Context context(on_gpu);
  limits_ = context.device();
  device_name_ = device_status(context).name;
  threads_ = default_threads();  // for what the host does

  DeviceModel model;
  step_.program = within_budget(build_step(*model_, options_.batch, train_.length()));
  model.step = step_.program;
  model.loss = within_budget(build_loss(*model_, options_.batch, train_.length()));
  model.logits = within_budget(build_logits(*model_, 1, train_.length()));
  for (const Parameter& p : list_) model.parameters.push_back({p.name, p.is_matrix()});
  for (const PositionTable& table : tables_) model.constants.push_back({table.name, table.values});
  model.accumulate = options_.accumulate;
  const AdamWOptions& adamw = options_.adamw;
  model.adamw = {adamw.beta1, adamw.beta2, adamw.epsilon, adamw.weight_decay, options_.clip};
  device_ = std::make_unique<OnDevice>(std::move(context), model, values_);
  put_on_device();
}

void Trainer::put_on_device() {
  if (!device_) return;
  device_->started.clear();
  device_->steps.put(values_, m_, v_);
}

const TensorSet& Trainer::values() const {
  if (device_) device_->get_values(values_);
  return values_;
}

std::optional<StepResult> Trainer::start_step() {
  if (!device_) return step();
  const StepData data = step_data();
  const OnDevice::Started now{state_.step, state_.windows, options_.schedule.rate(state_.step)};
  device_->steps.start(data.batches, data.inverse_count, state_.step + 1, now.rate);
  ++state_.step;
  state_.windows += options_.batch * options_.accumulate;
  std::optional<StepResult> before;
  if (!device_->started.empty()) before = finish_step();
  device_->started.push_back(now);
  return before;
}

std::optional<StepResult> Trainer::finish_step() {
  if (!device_ || device_->started.empty()) return std::nullopt;
  const OnDevice::Started first = device_->started.front();
  device_->started.pop_front();
  const DeviceAdamWReport report = device_->steps.finish();
  if (report.skipped != 0) {
    // Neither has the step after it, if one was started, changed anything.
    device_->started.clear();
    device_->steps.reset();
    state_.step = first.step;
    state_.windows = first.windows;
    require_finite("loss", report.loss, first.step + 1);
    require_finite("gradients' norm", report.norm, first.step + 1);
    throw InternalError("a step of finite numbers was skipped");
  }
  return StepResult{report.loss, first.rate, report.norm};
}

}  // namespace logitless::train
