#include "train/device_steps.h"

#include <algorithm>
#include <cstring>

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
  sizes.accumulate = model.accumulate > 1;
  sizes.constants = constant_bytes(model);
  sizes.arena = arena_bytes(model);
  sizes.optimizer = DeviceAdamW::bytes(counts);
  sizes.batches = Inputs(model.step).end + output_bytes(model);
  return memory_statement(sizes);
}

DeviceSteps::DeviceSteps(const Context& context, const DeviceModel& model, const TensorSet& layout)
    : context_(context), accumulate_(model.accumulate), inputs_(model.step), stream_(context) {
  const std::string no_room =
      why_no_room(statement(model, layout), device_status(context).free_bytes);
  if (!no_room.empty()) throw DeviceError(no_room);
  const std::size_t set = layout.bytes();
  const bool more = accumulate_ > 1;
  weights_ = DeviceBuffer(context, set);
  moments_ = DeviceBuffer(context, 2 * set);
  gradients_ = DeviceBuffer(context, more ? 2 * set : set);
  constants_ = DeviceBuffer(context, constant_bytes(model));
  arena_ = DeviceBuffer(context, arena_bytes(model));
  input_ = DeviceBuffer(context, inputs_.end);
  output_ = DeviceBuffer(context, output_bytes(model));
  for (const DeviceBuffer* block : {&weights_, &moments_, &gradients_, &input_, &output_})
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
  for (std::size_t i = 0; i < layout.size(); ++i) {
    const std::size_t offset = offset_of(layout, i) * sizeof(float);
    DeviceAdamWTensor t;
    t.value = weights_.as<float>(offset);
    t.gradient = gradients_.as<float>(offset);
    if (more) t.more_gradient = gradients_.as<float>(set + offset);
    t.m = moments_.as<float>(offset);
    t.v = moments_.as<float>(set + offset);
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
  more_results_ = step_.results;
  for (std::size_t i = 0; more && i < layout.size(); ++i) {
    more_results_[model.step.result("d_" + model.parameters[i].name)] =
        const_cast<float*>(tensors[i].more_gradient);
  }
  for (std::size_t i = 0; i < kSlots; ++i) {
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
  step_.program.run(step_.parameters, first ? step_.results : more_results_, arena_.data(),
                    stream_.handle());
  if (first) {
    adamw_->first_loss(output_.as<float>(kLoss), stream_.handle());
  } else {
    adamw_->add(output_.as<float>(kLoss), stream_.handle());
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

DeviceSteps::Slot& DeviceSteps::next_slot() {
  Slot& slot = slots_[next_slot_++ % kSlots];
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

void DeviceSteps::start(std::span<const Batch> batches, float inverse_count, std::int64_t step,
                        double rate) {
  if (started_ - finished_ >= static_cast<std::int64_t>(kReports))
    throw InternalError("a third step was started before the first was finished");
  const DeviceAdamWRates rates = adamw_->rates(step, rate);
  for (std::size_t i = 0; i < batches.size(); ++i) {
    Slot& slot = next_slot();
    put_words(slot, batches[i]);
    *slot.memory.as<float>(inputs_.inverse_count) = inverse_count;
    *slot.memory.as<DeviceAdamWRates>(inputs_.rates) = rates;
    send(slot);
    stream_.launch(graphs_[kind(i == 0, i + 1 == batches.size())]);
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
  Slot& slot = next_slot();
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
  Slot& slot = next_slot();
  std::copy(tokens.begin(), tokens.end(), slot.memory.as<std::int64_t>());
  *slot.memory.as<std::int64_t>(inputs_.last) = last;
  send(slot);
  run(logits_);
  stream_.copy(logits.data(), output_.as<void>(kLogits), logits.size_bytes());
  stream_.wait();
}

}  // namespace logitless::train
