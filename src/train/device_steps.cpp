#include "train/device_steps.h"

#include <algorithm>
#include <cstring>
#include <numeric>

#include "logitless/error.h"

namespace logitless::train {
namespace {

constexpr std::size_t kAlignment = 256;
std::size_t aligned(std::size_t bytes) {
  return (bytes + kAlignment - 1) / kAlignment * kAlignment;
}

// What programs say, in bytes of one block.
constexpr std::size_t kLoss = 0, kCount = kAlignment, kReport = 2 * kAlignment;
constexpr std::size_t kLogits = 3 * kAlignment;

constexpr std::size_t kSlots = 3;
constexpr std::size_t kReports = 2;

std::size_t bytes_of(const CompiledProgram::Tensor& t) {
  return static_cast<std::size_t>(t.bytes());
}

std::size_t offset_of(const TensorSet& set, std::size_t index) {
  return static_cast<std::size_t>(set[index].data() - set[0].data());
}
// Of the bf16 copies of parameters that the step takes; 0 of one that it does not.
std::vector<std::size_t> rounded_bytes(const DeviceModel& model) {
  std::vector<std::size_t> bytes;
  for (const DeviceModel::Tensor& tensor : model.parameters) {
    const auto& taken = model.step.parameters();
    const auto found = std::find_if(taken.begin(), taken.end(),
                                    [&](const auto& t) { return t.name == tensor.rounded; });
    bytes.push_back(found == taken.end() ? 0 : aligned(bytes_of(*found)));
  }
  return bytes;
}
std::size_t constant_bytes(const DeviceModel& model) {
  std::size_t bytes = 0;
  for (const DeviceModel::Constant& c : model.constants) bytes += aligned(c.values.size_bytes());
  return bytes;
}
std::size_t arena_bytes(const DeviceModel& model) {
  return std::max({model.step.arena_bytes(), model.loss.arena_bytes(), model.logits.arena_bytes()});
}
std::size_t output_bytes(const DeviceModel& model) {
  return kLogits + bytes_of(model.logits.results()[model.logits.result("logits")]);
}

}  // namespace

DeviceSteps::Inputs::Inputs(const CompiledProgram& step) {
  const auto bytes = [&](const char* name) {
    return aligned(bytes_of(step.parameters()[step.parameter(name)]));
  };
  targets = bytes("tokens");
  inverse_count = targets + bytes("targets");
  rates = inverse_count + kAlignment;
  last = rates + kAlignment;
  end = last + kAlignment;
}

std::vector<MemoryItem> DeviceSteps::statement(const DeviceModel& model, const TensorSet& layout) {
  std::vector<std::int64_t> counts;
  for (std::size_t i = 0; i < layout.size(); ++i) counts.push_back(std::ssize(layout[i]));
  DeviceSizes sizes;
  sizes.weights = layout.bytes();
  const std::vector<std::size_t> rounded = rounded_bytes(model);
  sizes.rounded = std::accumulate(rounded.begin(), rounded.end(), std::size_t{0});
  sizes.constants = constant_bytes(model);
  sizes.arena = arena_bytes(model);
  sizes.far = model.far_bytes;
  sizes.optimizer = DeviceAdamW::bytes(counts);
  sizes.batches = Inputs(model.step).end + output_bytes(model);
  return memory_statement(sizes);
}

DeviceSteps::DeviceSteps(const Context& context, const DeviceModel& model, const TensorSet& layout)
    : context_(context),
      accumulate_(model.accumulate),
      rows_(model.rows),
      inputs_(model.step),
      stream_(context) {
  const std::string no_room =
      why_no_room(statement(model, layout), device_status(context).free_bytes);
  if (!no_room.empty()) throw DeviceError(no_room);
  const std::size_t set = layout.bytes();
  weights_ = DeviceBuffer(context, set);
  const std::vector<std::size_t> rounded = rounded_bytes(model);
  rounded_ = DeviceBuffer(context, std::accumulate(rounded.begin(), rounded.end(), std::size_t{0}));
  moments_ = DeviceBuffer(context, 2 * set);
  gradients_ = DeviceBuffer(context, set);
  constants_ = DeviceBuffer(context, constant_bytes(model));
  arena_ = DeviceBuffer(context, arena_bytes(model));
  input_ = DeviceBuffer(context, inputs_.end);
  output_ = DeviceBuffer(context, output_bytes(model));
  for (const DeviceBuffer* block :
       {&weights_, &rounded_, &moments_, &gradients_, &input_, &output_})
    stream_.fill(block->data(), 0, block->bytes());

  Pointers pointers = {{"tokens", input_.data()},
                       {"targets", input_.as<void>(inputs_.targets)},
                       {"inverse_count", input_.as<void>(inputs_.inverse_count)},
                       {"last", input_.as<void>(inputs_.last)},
                       {"loss", output_.as<void>(kLoss)},
                       {"count", output_.as<void>(kCount)},
                       {"logits", output_.as<void>(kLogits)}};
  std::size_t at = 0;
  for (const DeviceModel::Constant& c : model.constants) {
    stream_.copy(constants_.as<void>(at), c.values.data(), c.values.size_bytes());
    pointers[c.name] = constants_.as<void>(at);
    at += aligned(c.values.size_bytes());
  }
  std::vector<DeviceAdamWTensor> tensors;
  at = 0;
  for (std::size_t i = 0; i < layout.size(); ++i) {
    const std::size_t offset = offset_of(layout, i) * sizeof(float);
    DeviceAdamWTensor t;
    t.value = weights_.as<float>(offset);
    t.gradient = gradients_.as<float>(offset);
    t.m = moments_.as<float>(offset);
    t.v = moments_.as<float>(set + offset);
    if (rounded[i] > 0) {
      pointers[model.parameters[i].rounded] = t.rounded = rounded_.as<void>(at);
      at += rounded[i];
    }
    t.count = std::ssize(layout[i]);
    t.decay = model.parameters[i].decay;
    tensors.push_back(t);
    pointers[model.parameters[i].name] = t.value;
    pointers["d_" + model.parameters[i].name] = t.gradient;
  }
  adamw_.emplace(context, model.adamw, tensors);
  step_ = runner(model.step, pointers);
  loss_ = runner(model.loss, pointers);
  logits_ = runner(model.logits, pointers);
  for (std::size_t i = 0; i <= kSlots; ++i) {
    slots_.push_back({PinnedBuffer(context, inputs_.end), DeviceEvent(context)});
    std::memset(slots_.back().memory.data(), 0, inputs_.end);
  }
  for (std::size_t i = 0; i < kReports; ++i)
    reports_.push_back({PinnedBuffer(context, sizeof(DeviceAdamWReport)), DeviceEvent(context)});

  // Once as they are: libraries and drivers take memory when a kernel runs for the first time, and
  // may not while a graph is captured.
  run(loss_);
  run(logits_);
  for (const bool first : {true, false}) {
    for (const bool last : {false, true}) {
      const bool only = first && last;
      if (accumulate_ == 1 ? !only : only || (!first && !last && accumulate_ == 2)) continue;
      enqueue(first, last);
      graphs_[kind(first, last)] = stream_.capture([&] { enqueue(first, last); });
    }
  }
  stream_.wait();
  reader_.emplace(kSlots, rows_, [this, read = model.read](std::int64_t first, std::size_t slot) {
    const Batch batch = read(first);
    slots_[slot].copied.wait();
    put_words(slots_[slot], batch);
  });
}

DeviceSteps::Runner DeviceSteps::runner(const CompiledProgram& program,
                                        const Pointers& pointers) const {
  Runner made{program.prepare(context_), {}, {}};
  for (const CompiledProgram::Tensor& t : program.parameters())
    made.parameters.push_back(pointers.at(t.name));
  for (const CompiledProgram::Tensor& t : program.results())
    made.results.push_back(pointers.at(t.name));
  return made;
}

void DeviceSteps::run(const Runner& runner) const {
  runner.program.run(runner.parameters, runner.results, arena_.data(), stream_.handle());
}

void DeviceSteps::enqueue(bool first, bool last) const {
  if (first && accumulate_ > 1) stream_.fill(gradients_.data(), 0, gradients_.bytes());
  if (far_ != nullptr) {
    step_.program.run(step_.parameters, step_.results, arena_.data(), *far_);
  } else {
    run(step_);
  }
  if (first) {
    adamw_->first_loss(output_.as<float>(kLoss), stream_.handle());
  } else {
    adamw_->add_loss(output_.as<float>(kLoss), stream_.handle());
  }
  if (last) {
    adamw_->step(input_.as<DeviceAdamWRates>(inputs_.rates), output_.as<DeviceAdamWReport>(kReport),
                 stream_.handle());
  }
}

void DeviceSteps::put(const TensorSet& values, const TensorSet& m, const TensorSet& v) {
  const std::size_t set = weights_.bytes();
  stream_.copy(weights_.data(), values[0].data(), set);
  stream_.copy(moments_.data(), m[0].data(), set);
  stream_.copy(moments_.as<void>(set), v[0].data(), set);
  adamw_->round(stream_.handle());
  reset();
}

void DeviceSteps::get_values(const TensorSet& values) const {
  stream_.copy(values[0].data(), weights_.data(), weights_.bytes());
  stream_.wait();
}

void DeviceSteps::get(const TensorSet& values, const TensorSet& m, const TensorSet& v) const {
  const std::size_t set = weights_.bytes();
  stream_.copy(m[0].data(), moments_.data(), set);
  stream_.copy(v[0].data(), moments_.as<void>(set), set);
  get_values(values);
}

DeviceSteps::Slot& DeviceSteps::own_slot() {
  Slot& slot = slots_.back();
  slot.copied.wait();
  return slot;
}

void DeviceSteps::send(Slot& slot) {
  stream_.copy(input_.data(), slot.memory.data(), inputs_.end);
  stream_.record(slot.copied);
}

void DeviceSteps::put_words(const Slot& slot, const Batch& batch) const {
  std::copy(batch.tokens.begin(), batch.tokens.end(), slot.memory.as<std::int64_t>());
  std::copy(batch.targets.begin(), batch.targets.end(),
            slot.memory.as<std::int64_t>(inputs_.targets));
}

void DeviceSteps::start(std::int64_t window, float inverse_count, std::int64_t step, double rate) {
  if (started_ - finished_ >= static_cast<std::int64_t>(kReports))
    throw InternalError("a third step was started before the first was finished");
  const DeviceAdamWRates rates = adamw_->rates(step, rate);
  for (std::int64_t i = 0; i < accumulate_; ++i) {
    const std::size_t taken = reader_->take(window + i * rows_);
    Slot& slot = slots_[taken];
    *slot.memory.as<float>(inputs_.inverse_count) = inverse_count;
    *slot.memory.as<DeviceAdamWRates>(inputs_.rates) = rates;
    send(slot);
    reader_->give_back(taken);
    const bool first = i == 0, last = i + 1 == accumulate_;
    if (far_ != nullptr) {
      enqueue(first, last);
    } else {
      stream_.launch(graphs_[kind(first, last)]);
    }
  }
  ReportSlot& report = reports_[static_cast<std::size_t>(started_++) % kReports];
  stream_.copy(report.memory.data(), output_.as<void>(kReport), report.memory.bytes());
  stream_.record(report.written);
}

DeviceAdamWReport DeviceSteps::finish() {
  if (started_ == finished_) throw InternalError("no step was started");
  const ReportSlot& report = reports_[static_cast<std::size_t>(finished_++) % kReports];
  report.written.wait();
  return *report.memory.as<DeviceAdamWReport>();
}

void DeviceSteps::reset() {
  adamw_->reset(stream_.handle());
  stream_.wait();
  finished_ = started_;
}

DeviceSteps::Losses DeviceSteps::losses(const Batch& batch) {
  Slot& slot = own_slot();
  put_words(slot, batch);
  send(slot);
  run(loss_);
  float loss = 0.0f, count = 0.0f;
  stream_.copy(&loss, output_.as<void>(kLoss), sizeof(loss));
  stream_.copy(&count, output_.as<void>(kCount), sizeof(count));
  stream_.wait();
  return {static_cast<double>(loss), static_cast<double>(count)};
}

void DeviceSteps::logits(std::span<const std::int64_t> tokens, std::int64_t last,
                         std::span<float> logits) {
  Slot& slot = own_slot();
  std::copy(tokens.begin(), tokens.end(), slot.memory.as<std::int64_t>());
  *slot.memory.as<std::int64_t>(inputs_.last) = last;
  send(slot);
  run(logits_);
  stream_.copy(logits.data(), output_.as<void>(kLogits), logits.size_bytes());
  stream_.wait();
}

}  // namespace logitless::train
