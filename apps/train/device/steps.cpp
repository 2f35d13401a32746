#include "train/device/steps.h"

#include <algorithm>
#include <cstring>

#include "logitless/error.h"

namespace logitless::train {
namespace {

constexpr std::size_t kAlignment = 256;
std::size_t aligned(std::size_t bytes) {
  return (bytes + kAlignment - 1) / kAlignment * kAlignment;
}

// Byte offsets of the programs' results in the output buffer.
constexpr std::size_t kLoss = 0, kCount = kAlignment, kReport = 2 * kAlignment;
constexpr std::size_t kLogits = 3 * kAlignment;

constexpr std::size_t kSlots = 3;
constexpr std::size_t kReports = 2;

std::size_t bytes_of(const CompiledProgram::Tensor& t) {
  return static_cast<std::size_t>(t.bytes());
}

bool takes(const CompiledProgram& program, const std::string& name) {
  const auto& taken = program.parameters();
  return std::any_of(taken.begin(), taken.end(), [&](const auto& t) { return t.name == name; });
}
std::size_t constant_bytes(const DeviceModel& model) {
  std::size_t bytes = 0;
  for (const DeviceModel::Constant& c : model.constants) bytes += aligned(c.values.size_bytes());
  return bytes;
}
std::size_t arena_bytes(const DeviceModel& model) {
  return std::max({model.step.arena_bytes(), model.loss.arena_bytes(), model.logits.arena_bytes()});
}
// Bytes of the receive buffers that the heads' communicator has allocated since they were planned.
std::size_t head_exchange_bytes(const DeviceModel& model) {
  std::size_t bytes = 0;
  for (const HeadOverRanks* head : {model.step_head, model.loss_head})
    bytes = std::max(bytes, head != nullptr ? head->plan().exchange_bytes : 0);
  return bytes;
}
std::size_t output_bytes(const DeviceModel& model) {
  return kLogits + bytes_of(model.logits.results()[model.logits.result("logits")]);
}

}  // namespace

std::vector<ParameterUse> DeviceModel::uses() const {
  std::vector<ParameterUse> uses;
  for (const Tensor& t : parameters) {
    const bool rounded = takes(step, t.rounded);
    const bool master = takes(step, t.name) || takes(loss, t.name) || takes(logits, t.name);
    uses.push_back({master || !rounded, rounded});
  }
  return uses;
}

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

std::vector<MemoryItem> DeviceSteps::statement(const DeviceModel& model) {
  const RankPartition& partition = model.partition;
  std::vector<std::int64_t> counts;
  for (const OwnedSlice& slice : partition.slices())
    counts.push_back(static_cast<std::int64_t>(slice.count));
  DeviceSizes sizes;
  sizes.weights = partition.masters() * sizeof(float);
  sizes.rounded = 2 * partition.rounded();
  sizes.moments = 2 * partition.owned() * sizeof(float);
  sizes.gradients = partition.local_end() * sizeof(float);
  sizes.constants = constant_bytes(model);
  sizes.arena = arena_bytes(model);
  sizes.far = model.far_bytes;
  for (const HeadOverRanks* head : {model.step_head, model.loss_head})
    sizes.head += head != nullptr ? head->workspace_bytes() : 0;
  sizes.head += head_exchange_bytes(model);
  sizes.optimizer = DeviceAdamW::bytes(counts);
  sizes.batches = Inputs(model.step).end + output_bytes(model);
  sizes.exchange = DeviceExchange::bytes(partition);
  return memory_statement(sizes);
}

DeviceSteps::DeviceSteps(const Context& context, const DeviceModel& model)
    : context_(context),
      partition_(model.partition),
      accumulate_(model.accumulate),
      rows_(model.rows),
      inputs_(model.step),
      stream_(context),
      exchange_(context, stream_, partition_, model.ranks),
      buckets_(partition_) {
  for (std::size_t b = 0; b < partition_.buckets().size(); ++b) whole_.emplace_back(context);
  const std::string no_memory = why_no_memory(
      statement(model), device_status(context).free_bytes + head_exchange_bytes(model));
  if (!no_memory.empty()) throw DeviceError(no_memory);
  weights_ = DeviceBuffer(context, partition_.masters() * sizeof(float));
  rounded_ = DeviceBuffer(context, 2 * partition_.rounded());
  moments_ = DeviceBuffer(context, 2 * partition_.owned() * sizeof(float));
  gradients_ = DeviceBuffer(context, partition_.local_end() * sizeof(float));
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
  for (std::size_t i = 0; i < model.parameters.size(); ++i) {
    const DeviceModel::Tensor& tensor = model.parameters[i];
    const std::size_t first = partition_.local_begin(i);
    if (partition_.is_rounded(first))
      pointers[tensor.rounded] = rounded_.as<void>(2 * partition_.rounded_at(first));
    if (first >= partition_.master_begin())
      pointers[tensor.name] = weights_.as<float>() + partition_.master_at(first);
    pointers["d_" + tensor.name] = gradients_.as<float>() + partition_.local_at(first);
  }
  std::vector<DeviceAdamWTensor> tensors;
  for (const OwnedSlice& slice : partition_.slices()) {
    DeviceAdamWTensor t;
    t.value = weights_.as<float>() + partition_.master_of(slice);
    t.gradient = gradients_.as<float>() + partition_.local_at(slice.at);
    t.m = moments_.as<float>() + slice.owned;
    t.v = t.m + partition_.owned();
    if (partition_.is_rounded(slice.at))
      t.rounded = rounded_.as<void>(2 * partition_.rounded_at(slice.at));
    t.count = static_cast<std::int64_t>(slice.count);
    t.decay = model.parameters[slice.tensor].decay;
    tensors.push_back(t);
  }
  adamw_.emplace(context, model.adamw, tensors);
  step_ = runner(model.step, pointers, model.step_head);
  for (const CompiledProgram::Tensor& result : model.step.results()) {
    const auto of = std::find_if(
        model.parameters.begin(), model.parameters.end(),
        [&](const DeviceModel::Tensor& tensor) { return result.name == "d_" + tensor.name; });
    gradient_of_.push_back(of == model.parameters.end()
                               ? kNoTensor
                               : static_cast<std::size_t>(of - model.parameters.begin()));
  }
  for (std::size_t t = 0; t < model.parameters.size(); ++t) {
    if (std::find(gradient_of_.begin(), gradient_of_.end(), t) == gradient_of_.end())
      throw InternalError("a step without the gradient of " + model.parameters[t].name);
  }
  loss_ = runner(model.loss, pointers, model.loss_head);
  logits_ = runner(model.logits, pointers);
  for (std::size_t i = 0; i <= kSlots; ++i) {
    slots_.push_back({PinnedBuffer(context, inputs_.end), DeviceEvent(context)});
    std::memset(slots_.back().memory.data(), 0, inputs_.end);
  }
  for (std::size_t i = 0; i < kReports; ++i)
    reports_.push_back({PinnedBuffer(context, sizeof(DeviceAdamWReport)), DeviceEvent(context)});

  // A first run without capture: libraries and drivers allocate memory when a kernel first runs,
  // which is not allowed while a graph is captured. For a vocabulary-parallel head whose ranks are
  // threads of one process, allocation or module loading on one rank may wait for unmatched
  // exchanges of another. Therefore kernels are loaded before any exchange, and ranks proceed in
  // lockstep.
  const auto together = [&] {
    if (step_.head != nullptr) exchange_.meet();
  };
  run(logits_);
  for (const Runner* runner : {&step_, &loss_}) {
    if (runner->head != nullptr)
      runner->program.load(runner->parameters, runner->results, arena_.data(), stream_.handle(),
                           *runner->head);
  }
  together();
  run(loss_);
  together();
  for (const bool first : {true, false}) {
    for (const bool last : {false, true}) {
      const bool only = first && last;
      if (accumulate_ == 1 ? !only : only || (!first && !last && accumulate_ == 2)) continue;
      enqueue(first, last);
      together();
      graphs_[kind(first, last)] = stream_.capture([&] { enqueue(first, last); });
      together();
    }
  }
  stream_.wait();
  exchanged_ = exchange_.of_first(buckets_.found());
  if (step_.head != nullptr) enqueue_update_of_ranks();  // also lets NCCL connect the ranks
  together();
  const auto stride = rows_ * partition_.ranks();
  const auto read = [this, read = model.read, gpu = model.gpu](std::int64_t first,
                                                               std::size_t slot) {
    use_gpu(gpu);
    const Batch batch = read(first);
    slots_[slot].copied.wait();
    put_batch(slots_[slot], batch);
  };
  reader_.emplace(kSlots, stride, read);
}

DeviceSteps::Runner DeviceSteps::runner(const CompiledProgram& program, const Pointers& pointers,
                                        HeadOverRanks* head) const {
  Runner made{program.prepare(context_), head, {}, {}};
  for (const CompiledProgram::Tensor& t : program.parameters())
    made.parameters.push_back(pointers.at(t.name));
  for (const CompiledProgram::Tensor& t : program.results())
    made.results.push_back(pointers.at(t.name));
  return made;
}

void DeviceSteps::run(const Runner& runner, const std::function<void(std::size_t)>& done) const {
  void* const stream = stream_.handle();
  if (runner.head != nullptr) {
    runner.program.run(runner.parameters, runner.results, arena_.data(), stream, *runner.head,
                       done);
  } else if (done) {
    runner.program.run(runner.parameters, runner.results, arena_.data(), stream, done);
  } else {
    runner.program.run(runner.parameters, runner.results, arena_.data(), stream);
  }
}

void DeviceSteps::run_step(bool last) {
  const bool exchanges = last && !exchange_.alone();
  if (far_ != nullptr) {
    step_.program.run(step_.parameters, step_.results, arena_.data(), *far_);
    if (exchanges)
      for (DeviceEvent& event : whole_) stream_.record(event);
    return;
  }
  if (!exchanges) return run(step_);
  buckets_.begin();
  run(step_, [&](std::size_t result) {
    const std::size_t tensor = gradient_of_[result];
    if (tensor == kNoTensor) return;
    buckets_.done(tensor, [&](std::size_t b) { stream_.record(whole_[b]); });
  });
}

void DeviceSteps::enqueue(bool first, bool last) {
  if (first && accumulate_ > 1) stream_.fill(gradients_.data(), 0, gradients_.bytes());
  run_step(last);
  if (first) {
    adamw_->first_loss(output_.as<float>(kLoss), stream_.handle());
  } else {
    adamw_->add_loss(output_.as<float>(kLoss), stream_.handle());
  }
  if (last && exchange_.alone()) {
    adamw_->step(input_.as<DeviceAdamWRates>(inputs_.rates), output_.as<DeviceAdamWReport>(kReport),
                 stream_.handle());
  }
}

void DeviceSteps::enqueue_update_of_ranks() const {
  const auto* const rates = input_.as<DeviceAdamWRates>(inputs_.rates);
  exchange_.add_gradients(gradients_.as<float>(), exchanged_, whole_);
  adamw_->totals(rates, exchange_.local_totals(), stream_.handle());
  exchange_.share_totals();
  adamw_->step_of_ranks(rates, exchange_.all_totals(), partition_.ranks(),
                        output_.as<DeviceAdamWReport>(kReport), stream_.handle());
  exchange_.share_values(weights_.as<float>(), rounded_.data());
}

void DeviceSteps::put(const TensorSet& values, const TensorSet& m, const TensorSet& v) {
  const auto mine = static_cast<std::size_t>(partition_.rank());
  const auto put_slice = [&](const TensorSet& set, const Bucket& b, float* to) {
    stream_.copy(to, set.all().data() + b.begin + mine * b.stride, b.slice_size * sizeof(float));
  };
  for (const Bucket& b : partition_.buckets()) {
    if (!b.use.master) put_slice(values, b, weights_.as<float>() + b.owned);
  }
  for (const Bucket& b : partition_.local_buckets())
    put_slice(values, b, weights_.as<float>() + partition_.master_at(b.begin + mine * b.stride));
  const std::span<const float> whole = values.all().subspan(
      partition_.master_begin(), partition_.shared_end() - partition_.master_begin());
  stream_.copy(weights_.as<float>() + partition_.owned_before_masters(), whole.data(),
               whole.size_bytes());
  float* to = moments_.as<float>();
  for (const TensorSet* set : {&m, &v}) {
    if (set->size() > 0) {
      for (const auto* buckets : {&partition_.buckets(), &partition_.local_buckets()})
        for (const Bucket& b : *buckets) put_slice(*set, b, to + b.owned);
    } else {
      stream_.fill(to, 0, partition_.owned() * sizeof(float));
    }
    to += partition_.owned();
  }
  adamw_->round(stream_.handle());
  exchange_.share_values(weights_.as<float>(), rounded_.data());
  reset();
}

void DeviceSteps::get_values(const TensorSet& values) const {
  exchange_.gather_masters(weights_.as<float>(), values.all());
}

void DeviceSteps::get_moments(const TensorSet& m, const TensorSet& v) const {
  exchange_.gather(moments_.as<float>(), m.all());
  exchange_.gather(moments_.as<float>() + partition_.owned(), v.all());
}

DeviceSteps::Slot& DeviceSteps::host_slot() {
  Slot& slot = slots_.back();
  slot.copied.wait();
  return slot;
}

void DeviceSteps::send(Slot& slot) {
  stream_.copy(input_.data(), slot.memory.data(), inputs_.end);
  stream_.record(slot.copied);
}

void DeviceSteps::put_batch(const Slot& slot, const Batch& batch) const {
  std::copy(batch.tokens.begin(), batch.tokens.end(), slot.memory.as<std::int64_t>());
  std::copy(batch.targets.begin(), batch.targets.end(),
            slot.memory.as<std::int64_t>(inputs_.targets));
}

void DeviceSteps::start(std::int64_t window, float inverse_count, std::int64_t step, double rate,
                        std::int32_t note) {
  if (started_ - finished_ >= static_cast<std::int64_t>(kReports))
    throw InternalError("a third step was started before the first was finished");
  DeviceAdamWRates rates = adamw_->rates(step, rate);
  rates.note = note;
  for (std::int64_t i = 0; i < accumulate_; ++i) {
    const std::int64_t batch = i * partition_.ranks() + partition_.rank();
    const std::size_t taken = reader_->take(window + batch * rows_);
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
  if (!exchange_.alone()) enqueue_update_of_ranks();
  ReportSlot& report = reports_[static_cast<std::size_t>(started_++) % kReports];
  stream_.copy(report.memory.data(), output_.as<void>(kReport), report.memory.bytes());
  stream_.record(report.written);
}

DeviceAdamWReport DeviceSteps::finish() {
  if (started_ == finished_) throw InternalError("no step was started");
  const ReportSlot& report = reports_[static_cast<std::size_t>(finished_++) % kReports];
  exchange_.wait(report.written);
  return *report.memory.as<DeviceAdamWReport>();
}

void DeviceSteps::reset() {
  adamw_->reset(stream_.handle());
  stream_.wait();
  finished_ = started_;
}

DeviceSteps::Losses DeviceSteps::losses(const Batch& batch) {
  Slot& slot = host_slot();
  put_batch(slot, batch);
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
  Slot& slot = host_slot();
  std::copy(tokens.begin(), tokens.end(), slot.memory.as<std::int64_t>());
  *slot.memory.as<std::int64_t>(inputs_.last) = last;
  send(slot);
  run(logits_);
  stream_.copy(logits.data(), output_.as<void>(kLogits), logits.size_bytes());
  stream_.wait();
}

}  // namespace logitless::train
