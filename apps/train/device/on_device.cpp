#include "train/device/on_device.h"

#include <fmt/format.h>

#include <algorithm>

#include "logitless/device.h"
#include "logitless/error.h"
#include "logitless/parallel.h"

namespace logitless::train {
namespace {

std::size_t taken(const Context& context) {
  const DeviceStatus status = device_status(context);
  return status.total_bytes - status.free_bytes;
}

// Returns the bytes of a vocabulary order's copy on a GPU (far_field.h).
std::size_t order_bytes(const ModelSizes& sizes, const FarFieldOptions& far) {
  const auto vocab = static_cast<std::size_t>(sizes.vocab);
  const auto dim = static_cast<std::size_t>(sizes.dim);
  return 12 * vocab + (far.accuracy == Accuracy::far_both ? 2 * dim * (dim + vocab / 128) : 0);
}

}  // namespace

Trainer::OnDevice::OnDevice(Context&& gpu, const DeviceModel& model, std::size_t before)
    : context(std::move(gpu)),
      statement(DeviceSteps::statement(model)),
      taken_before(before),
      steps(context, model) {}

void Trainer::OnDevice::require_finished(const char* call) const {
  if (!started.empty())
    throw InternalError(fmt::format("{} between start_step() and finish_step()", call));
}
void Trainer::OnDevice::get(const TensorSet& values, const TensorSet& m, const TensorSet& v) const {
  require_finished("save()");
  steps.get_values(values);
  steps.get_moments(m, v);
}
void Trainer::OnDevice::get_values(const TensorSet& values) const {
  require_finished("values()");
  steps.get_values(values);
}
void Trainer::OnDevice::add_to(TrainMemory& memory) const {
  memory.device = statement;
  for (const MemoryItem& item : statement) {
    if (item.name == "gradients") memory.gradients = item.bytes;
    if (item.name == "moments") memory.moments = item.bytes;
  }
  memory.device_taken_before = taken_before;
  memory.device_taken = taken(context);
}

void Trainer::start_device() {
  ContextOptions on_gpu;
  on_gpu.device = DeviceKind::cuda;
  on_gpu.device_index = options_.gpu;
  Context context(on_gpu);
  limits_ = context.device();
  // Programs of ranks are alike: neither another card nor its measured rates make them differ.
  if (ranks() > 1) limits_.card = {};
  device_name_ = device_status(context).name;
  const std::size_t taken_before = taken(context);
  threads_ = default_threads();  // threads of the host's work

  DeviceModel model;
  step_.program = within_budget(
      build_step(*model_, options_.batch, train_.length(), Weights::rounded), added_gradients());
  model.step = step_.program;
  model.loss =
      within_budget(build_loss(*model_, options_.batch, train_.length(), Weights::rounded));
  model.logits =
      within_budget(build_logits(*model_, 1, train_.length(), Weights::rounded, vocab_of_logits()));
  for (const Parameter& p : list_)
    model.parameters.push_back({p.name, rounded_name(p.name), p.is_matrix()});
  make_partition(model.uses());
  model.partition = *partition_;
  if (shards_head()) {
    const std::size_t arena =
        std::max({model.step.arena_bytes(), model.loss.arena_bytes(), model.logits.arena_bytes()});
    model.step_head = &step_head_.emplace(head_over_ranks(model.step, context, arena));
    model.loss_head = &loss_head_.emplace(
        head_over_ranks(model.loss, context, arena + step_head_->workspace_bytes()));
  }
  model.ranks = options_.ranks.get();
  model.gpu = options_.gpu;
  for (const PositionTable& table : tables_) model.constants.push_back({table.name, table.values});
  model.accumulate = options_.accumulate;
  model.rows = options_.batch;
  model.read = [this](std::int64_t first) {
    return train_.shuffled_batch(options_.seed, first, options_.batch);
  };
  const AdamWOptions& adamw = options_.adamw;
  model.adamw = {adamw.beta1, adamw.beta2, adamw.epsilon, adamw.weight_decay, options_.clip};
  if (options_.far_field) {
    start_far_field(Context(context));  // to get its workspace
    if (far_) model.far_bytes = far_workspace_ + order_bytes(model_->sizes(), *options_.far_field);
  }
  device_ = std::make_unique<OnDevice>(std::move(context), model, taken_before);
  if (far_) {
    start_far_field(device_->context.on(device_->steps.stream()));
    device_->steps.use(*far_);
  }
  put_on_device({}, {});
}

void Trainer::put_on_device(const TensorSet& m, const TensorSet& v) {
  if (!device_) return;
  device_->started.clear();
  device_->steps.put(values_, m, v);
}

const TensorSet& Trainer::values() const {
  device_ ? device_->get_values(values_) : exchange_->share_local_rows(values_);
  return values_;
}

std::optional<StepResult> Trainer::start_step(int note) {
  if (!device_) return step(note);
  // No target of training data is ignored.
  const std::int64_t count = windows_of_step() * train_.length();
  const OnDevice::Started now{state_.step, state_.windows, options_.schedule.rate(state_.step)};
  device_->steps.start(state_.windows, static_cast<float>(1.0 / static_cast<double>(count)),
                       state_.step + 1, now.rate, note);
  ++state_.step;
  state_.windows += windows_of_step();
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
    // Nor has a step started after it changed anything.
    device_->started.clear();
    device_->steps.reset();
    state_.step = first.step;
    state_.windows = first.windows;
    require_finite("loss", report.loss, first.step + 1);
    require_finite("gradients' norm", report.norm, first.step + 1);
    throw InternalError("a step of finite numbers was skipped");
  }
  return StepResult{report.loss, first.rate, report.norm, static_cast<int>(report.note)};
}

}  // namespace logitless::train
