#include "train/run/trainer.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <filesystem>
#include <numeric>

#include "logitless/error.h"
#include "train/device/on_device.h"
#include "train/hash.h"

namespace logitless::train {
namespace {

// Draws a token by its logits.
std::int64_t draw(std::span<const float> logits, const SampleOptions& options,
                  double uniform_number) {
  std::vector<std::int64_t> order(logits.size());
  std::iota(order.begin(), order.end(), 0);
  const auto better = [&](std::int64_t a, std::int64_t b) {
    const float x = logits[static_cast<std::size_t>(a)], y = logits[static_cast<std::size_t>(b)];
    return x != y ? x > y : a < b;
  };
  std::size_t kept = order.size();
  if (options.temperature <= 0.0)
    kept = 1;
  else if (options.top_k > 0)
    kept = std::min(kept, static_cast<std::size_t>(options.top_k));
  std::partial_sort(order.begin(), order.begin() + static_cast<std::ptrdiff_t>(kept), order.end(),
                    better);
  if (kept == 1) return order[0];
  std::vector<double> weights(kept);
  const auto logit = [&](std::size_t i) {
    return static_cast<double>(logits[static_cast<std::size_t>(order[i])]);
  };
  for (std::size_t i = 0; i < kept; ++i) {
    weights[i] = std::exp((logit(i) - logit(0)) / options.temperature);
  }
  double left = uniform_number * std::accumulate(weights.begin(), weights.end(), 0.0);
  for (std::size_t i = 0; i + 1 < kept; ++i) {
    left -= weights[i];
    if (left < 0.0) return order[i];
  }
  return order[kept - 1];
}

// Returns why a plan that may use the far field is dense.
std::string why_dense(const LossPlan& plan) {
  std::string text;
  for (const PlanCandidate& c : plan.candidates) {
    if (c.kind != PlanKind::far_backward && c.kind != PlanKind::far_both) continue;
    text += fmt::format("{}{}: {}", text.empty() ? "" : "; ", name_of(c.kind), c.reason);
  }
  return text;
}

}  // namespace

void require_finite(const char* name, double value, std::int64_t step) {
  if (std::isfinite(value)) return;
  throw Diverged(
      fmt::format("the {} of step {} is {}: the learning rate may be too high", name, step, value));
}

std::string far_state_of(const std::string& checkpoint) {
  return std::filesystem::path(checkpoint).replace_extension(".far.safetensors").string();
}

Trainer::Trainer(ModelPtr model, const TrainOptions& options, Dataset train, Dataset valid)
    : model_(std::move(model)),
      options_(options),
      train_(std::move(train)),
      valid_(std::move(valid)),
      list_(model_->parameters()),
      tables_(model_->tables(train_.length())) {
  state_.seed = options_.seed;
  state_.data = hex(train_.key());
  if (options_.shard_head) check_sharded_head();
  if (options_.device == DeviceKind::cuda) {
    start_device();
    return;
  }
  make_partition(std::vector<ParameterUse>(list_.size()));
  m_ = TensorSet(partition_->layout());
  v_ = TensorSet(partition_->layout());
  gradients_ = TensorSet(partition_->layout());
  tokens_.resize(static_cast<std::size_t>(options_.batch * train_.length()));
  targets_.resize(tokens_.size());

  Pointers gradients = {{"loss", &loss_}};
  for (std::size_t i = 0; i < list_.size(); ++i) {
    gradients["d_" + list_[i].name] = gradients_.all().data() + partition_->local_begin(i);
  }
  if (shards_head() && options_.accumulate > 1) {
    const std::int64_t dim = model_->sizes().dim;
    local_gradient_ =
        Buffer(static_cast<std::size_t>(partition_->local_rows()->each * dim) * sizeof(float));
    gradients["d_" + model_->head()] = local_gradient_.data();
  }
  step_ =
      compiled(build_step(*model_, options_.batch, train_.length()), gradients, added_gradients());
  threads_ = step_.program.threads();
  ContextOptions context;
  context.threads = threads_;
  if (shards_head())
    step_head_.emplace(
        head_over_ranks(step_.program, Context(context), step_.program.arena_bytes()));
  if (options_.far_field) start_far_field(Context(context));
}

Trainer::~Trainer() = default;

void Trainer::make_partition(std::vector<ParameterUse> uses) {
  if (shards_head())
    uses[head_parameter()].local_row = static_cast<std::size_t>(model_->sizes().dim);
  partition_.emplace(counts_of(list_), uses, rank(), ranks(), options_.bucket);
  exchange_.emplace(*partition_, options_.ranks.get());
  values_ = TensorSet(partition_->layout());
  for (std::size_t i = 0; i < list_.size(); ++i) initialise(list_[i], i, options_.seed, values_[i]);
}

std::vector<std::string> Trainer::added_gradients() const {
  std::vector<std::string> names;
  for (std::size_t i = 0; options_.accumulate > 1 && i < list_.size(); ++i) {
    // A sharded head on the CPU cannot accumulate into its result, and other code would need the
    // gradient of the full vocabulary.
    if (shards_head() && options_.device == DeviceKind::cpu && i == head_parameter()) continue;
    names.push_back("d_" + list_[i].name);
  }
  return names;
}

CompiledProgram Trainer::within_budget(const Graph& graph, std::vector<std::string> added) const {
  CompileOptions compile_options;
  compile_options.device = limits_;
  compile_options.chunk = options_.chunk;
  compile_options.head_engine = options_.head_engine;
  compile_options.epilogues = options_.epilogues;
  compile_options.memory_budget = options_.memory_budget;
  compile_options.budget_with_scratch = true;  // the budget bounds the memory of the whole run
  compile_options.threads = options_.threads;
  compile_options.added = std::move(added);
  return compile(graph, compile_options);
}

Trainer::Runner Trainer::compiled(const Graph& graph, const Pointers& others,
                                  std::vector<std::string> added) {
  Pointers pointers = {
      {"tokens", tokens_.data()}, {"targets", targets_.data()}, {"inverse_count", &inverse_count_}};
  for (std::size_t i = 0; i < list_.size(); ++i)
    pointers[list_[i].name] = values_.all().data() + partition_->local_begin(i);
  for (PositionTable& table : tables_) pointers[table.name] = table.values.data();
  for (const auto& [name, pointer] : others) pointers[name] = pointer;
  Runner runner{within_budget(graph, std::move(added)), {}, {}};
  for (const CompiledProgram::Tensor& t : runner.program.parameters()) {
    runner.parameters.push_back(pointers.at(t.name));
  }
  for (const CompiledProgram::Tensor& t : runner.program.results()) {
    runner.results.push_back(pointers.at(t.name));
  }
  if (runner.program.arena_bytes() > arena_.bytes()) {
    arena_ = Buffer();  // freed first: there must not be two arenas
    arena_ = Buffer(runner.program.arena_bytes());
  }
  return runner;
}

void Trainer::start_far_field(Context&& context) {
  FarFieldOptions far = *options_.far_field;
  const std::size_t arena = step_.program.arena_bytes();
  if (options_.memory_budget > 0)
    far.memory_budget = options_.memory_budget > arena ? options_.memory_budget - arena : 1;
  if (ranks() > 1) far.replicas = options_.ranks;
  far_.reset();  // must be destroyed before its context
  far_context_.emplace(std::move(context));
  far_.emplace(*far_context_, far);
  try {
    const LossPlan plan = step_.program.far_plan(*far_);
    if (plan.tau > 0.0f) {
      far_workspace_ = plan.workspace_bytes();
    } else {
      far_refusal_ = why_dense(plan);
    }
  } catch (const Unsupported& error) {
    far_refusal_ = error.what();
  } catch (const InvalidArgument& error) {
    if (options_.memory_budget == 0) throw;
    far_refusal_ = fmt::format("an arena of {} leaves too little of the budget: {}",
                               format_bytes(arena), error.what());
  }
  if (!far_refusal_.empty()) far_.reset();
}

void Trainer::run(const Runner& runner, HeadOverRanks* head) {
  if (head != nullptr) {
    runner.program.run(runner.parameters, runner.results, arena_.data(), *head);
  } else {
    runner.program.run(runner.parameters, runner.results, arena_.data());
  }
}

void Trainer::run_step() {
  if (far_) {
    step_.program.run(step_.parameters, step_.results, arena_.data(), *far_);
  } else {
    run(step_, step_head_ ? &*step_head_ : nullptr);
  }
  if (local_gradient_.bytes() == 0) return;
  const auto count =
      static_cast<std::size_t>(partition_->local_rows()->count * model_->sizes().dim);
  const std::span<float> sums =
      gradients_.all().subspan(partition_->local_begin(head_parameter()), count);
  const auto* const own = local_gradient_.as<const float>();
  for (std::size_t i = 0; i < count; ++i) sums[i] += own[i];
}

void Trainer::load(const Batch& batch) {
  std::copy(batch.tokens.begin(), batch.tokens.end(), tokens_.begin());
  std::copy(batch.targets.begin(), batch.targets.end(), targets_.begin());
}

Trainer::StepData Trainer::step_data() const {
  StepData data;
  std::int64_t counted = 0;
  for (std::int64_t i = 0; i < options_.accumulate; ++i) {
    const std::int64_t first = state_.windows + (i * ranks() + rank()) * options_.batch;
    data.batches.push_back(train_.shuffled_batch(options_.seed, first, options_.batch));
    counted += data.batches.back().counted;
  }
  // No target of training data is ignored, on any rank.
  data.inverse_count = static_cast<float>(1.0 / static_cast<double>(counted * ranks()));
  return data;
}

StepResult Trainer::step(int note) {
  if (device_) {
    start_step(note);
    return finish_step().value();
  }
  const auto [batches, inverse_count] = step_data();
  inverse_count_ = inverse_count;

  RankTotals mine;
  mine.note = note;
  if (options_.accumulate > 1) {
    std::vector<std::span<float>> sums;
    for (std::size_t t = 0; t < list_.size(); ++t) sums.push_back(gradients_[t]);
    clear(sums, threads_);
  }
  for (const Batch& batch : batches) {
    load(batch);
    run_step();
    mine.loss += static_cast<double>(loss_);
  }
  exchange_->add_gradients(gradients_, threads_);

  std::vector<std::span<const float>> gradients;
  std::vector<AdamWSlot> slots;
  for (const OwnedSlice& s : partition_->slices()) {
    const auto of = [&](const TensorSet& set) { return set.all().subspan(s.at, s.count); };
    gradients.emplace_back(of(gradients_));
    slots.push_back({of(values_), gradients.back(), of(m_), of(v_), list_[s.tensor].is_matrix()});
  }
  mine.squares = sum_of_squares(gradients, threads_);
  const RankTotals all = exchange_->sum(mine);
  StepResult result;
  result.loss = all.loss;
  result.norm = std::sqrt(all.squares);
  result.note = static_cast<int>(all.note);
  require_finite("loss", result.loss, state_.step + 1);
  require_finite("gradients' norm", result.norm, state_.step + 1);
  result.rate = options_.schedule.rate(state_.step);
  ++state_.step;
  state_.windows += windows_of_step();
  adamw_step(options_.adamw, slots, state_.step, result.rate,
             clip_scale(result.norm, options_.clip), threads_);
  exchange_->share(values_);
  return result;
}

double Trainer::validate(std::int64_t windows) {
  if (!device_ && !loss_runner_) {
    loss_runner_ = compiled(build_loss(*model_, options_.batch, train_.length()),
                            {{"loss", &loss_}, {"count", &count_}});
    ContextOptions context;
    context.threads = threads_;
    if (shards_head())
      loss_head_.emplace(head_over_ranks(loss_runner_->program, Context(context),
                                         arena_.bytes() + step_head_->workspace_bytes()));
  }
  RankTotals mine;
  const std::int64_t end = std::min(windows, valid_.windows());
  // With a sharded head all ranks take part in every batch; the last ranks may have no window.
  const std::int64_t stride = ranks() * options_.batch;
  const std::int64_t rounds_end = shards_head() ? (end + stride - 1) / stride * stride : end;
  for (std::int64_t first = rank() * options_.batch; first < rounds_end; first += stride) {
    Batch batch = valid_.sequential_batch(first, options_.batch);
    // Targets of windows from `end` on are ignored.
    for (std::int64_t row = std::max<std::int64_t>(end - first, 0); row < options_.batch; ++row) {
      const auto begin = batch.targets.begin() + row * train_.length();
      std::fill(begin, begin + train_.length(), kIgnoredTarget);
    }
    if (device_) {
      const DeviceSteps::Losses losses = device_->steps.losses(batch);
      mine.loss += losses.loss;
      mine.count += losses.count;
      continue;
    }
    load(batch);
    run(*loss_runner_, loss_head_ ? &*loss_head_ : nullptr);
    mine.loss += static_cast<double>(loss_);
    mine.count += static_cast<double>(count_);
  }
  const RankTotals all = exchange_->sum(mine);
  const double loss = all.loss / all.count;
  require_finite("validation loss", loss, state_.step);
  return loss;
}

std::vector<std::int64_t> Trainer::generate(std::vector<std::int64_t> prompt, std::int64_t count,
                                            const SampleOptions& options) {
  if (prompt.empty()) throw InvalidArgument("prompt: expected at least one token, got none");
  const auto length = static_cast<std::size_t>(train_.length());
  prompt_.resize(length);
  logits_.resize(static_cast<std::size_t>(shards_head() ? vocab_of_logits() * ranks()
                                                        : model_->sizes().vocab));
  // The logits of this rank's vocabulary shard.
  const std::span<float> own =
      shards_head()
          ? std::span(logits_).subspan(static_cast<std::size_t>(rank() * vocab_of_logits()),
                                       static_cast<std::size_t>(vocab_of_logits()))
          : std::span(logits_);
  if (!device_ && !logits_runner_) {
    logits_runner_ =
        compiled(build_logits(*model_, 1, train_.length(), Weights::masters, vocab_of_logits()),
                 {{"tokens", prompt_.data()}, {"last", &last_}, {"logits", own.data()}});
  }
  const std::int64_t vocab_count = options.vocab_count > 0
                                       ? std::min(options.vocab_count, model_->sizes().vocab)
                                       : model_->sizes().vocab;
  std::vector<std::int64_t> written;
  for (std::int64_t i = 0; i < count; ++i) {
    const std::size_t seen = std::min(prompt.size(), length);
    std::copy(prompt.end() - static_cast<std::ptrdiff_t>(seen), prompt.end(), prompt_.begin());
    std::fill(prompt_.begin() + static_cast<std::ptrdiff_t>(seen), prompt_.end(), 0);
    last_ = static_cast<std::int64_t>(seen) - 1;
    if (device_) {
      device_->steps.logits(prompt_, last_, own);
    } else {
      run(*logits_runner_);
    }
    if (shards_head())
      options_.ranks->all_gather_host(own.data(), logits_.data(), own.size_bytes());
    written.push_back(draw(std::span(logits_).first(static_cast<std::size_t>(vocab_count)), options,
                           uniform(mix(options.seed, 0x73616d70), static_cast<std::uint64_t>(i))));
    prompt.push_back(written.back());
  }
  return written;
}

std::int64_t Trainer::parameter_count() const {
  std::int64_t count = 0;
  for (const Parameter& parameter : list_) count += parameter.numel();
  return count;
}

TrainMemory Trainer::memory() const {
  TrainMemory memory;
  memory.arena = step_.program.arena_bytes();
  memory.unchunked_arena = step_.program.unchunked_arena_bytes();
  memory.parameters = values_.bytes();
  memory.gradients = gradients_.bytes() + local_gradient_.bytes();
  memory.moments = m_.bytes() + v_.bytes();
  for (const PositionTable& table : tables_) memory.tables += table.values.size() * sizeof(float);
  memory.far_workspace = far_workspace_;
  for (const auto* head : {&step_head_, &loss_head_})
    memory.head_workspace += *head ? (*head)->workspace_bytes() : 0;
  if (device_) device_->add_to(memory);
  if (far_) memory.far_peak = far_context_->memory().peak_bytes();
  return memory;
}

void Trainer::save(const std::string& path, const std::string& options) const {
  TensorSet m, v;  // copies from the GPU, on rank 0 only
  if (device_) {
    if (rank() == 0) {
      m = TensorSet(partition_->layout());
      v = TensorSet(partition_->layout());
    }
    device_->get(rank() == 0 ? values_ : m, m, v);
  } else {
    for (const TensorSet* set : {&m_, &v_}) {
      exchange_->share(*set);
      exchange_->share_local_rows(*set);
    }
    exchange_->share_local_rows(values_);
  }
  if (rank() > 0) return;
  write(path, options, device_ ? m : m_, device_ ? v : v_);
}

void Trainer::write(const std::string& path, const std::string& options, const TensorSet& m,
                    const TensorSet& v) const {
  check_finite(m, v);
  RunState state = state_;
  state.options = options;
  if (!far_) {
    std::filesystem::remove(far_state_of(path) +
                            kNewState);  // left by a killed run with a far field
    return save_checkpoint(path, *model_, state, values_, m, v);
  }
  state.far_steps = far_->report().steps;
  // The two files belong together: both are written before either is renamed. load_far_field()
  // handles a process killed between the two renames.
  const std::string far = far_state_of(path);
  far_->save(far + kNewState);
  save_checkpoint(path, *model_, state, values_, m, v);
  std::filesystem::rename(far + kNewState, far);
}

void Trainer::check_finite(const TensorSet& m, const TensorSet& v) const {
  for (const TensorSet* set : {&values_, &m, &v}) {
    for (std::size_t t = 0; t < list_.size(); ++t) {
      const std::span<const float> numbers[] = {(*set)[t]};
      // The norm is in double, which finite floats cannot overflow.
      if (std::isfinite(global_norm(numbers, threads_))) continue;
      throw Diverged(fmt::format("after step {} {}{} holds what is no finite number", state_.step,
                                 set == &values_ ? "" : "a moment of ", list_[t].name));
    }
  }
}

// Loads the far-field state after `steps` steps. It has its final name, or its temporary name when
// the process was killed between the renames of the checkpoint and the state.
void Trainer::load_far_field(const std::string& path, std::int64_t steps) {
  const std::string far = far_state_of(path);
  std::error_code none;
  if (std::filesystem::exists(far + kNewState, none)) {
    try {
      far_->load(far + kNewState);
      if (far_->report().steps == steps) return;
    } catch (const InvalidArgument&) {
      // Not usable: try the final name.
    }
  }
  far_->load(far);
  if (far_->report().steps != steps) {
    throw InvalidArgument(
        fmt::format("'{}': expected {} steps of the head as in '{}', found {}: the two files "
                    "were not saved together",
                    far, steps, path, far_->report().steps));
  }
}

void Trainer::resume(const std::string& path) {
  const RunState state = read_checkpoint_header(path).state;
  const auto expect = [&](const char* name, const auto& found, const auto& expected) {
    if (found == expected) return;
    throw InvalidArgument(
        fmt::format("'{}': metadata '{}': expected {}, found {}", path, name, expected, found));
  };
  expect("seed", state.seed, state_.seed);
  expect("data", state.data, state_.data);
  TensorSet m, v;
  if (device_) {
    m = TensorSet(partition_->layout());
    v = TensorSet(partition_->layout());
  }
  load_checkpoint(path, *model_, values_, device_ ? m : m_, device_ ? v : v_);
  if (far_ && state.far_steps) load_far_field(path, *state.far_steps);
  state_ = state;
  put_on_device(m, v);
}

void Trainer::import_weights(const std::string& path) {
  load_weights(path, *model_, values_);
  put_on_device({}, {});
}
void Trainer::export_weights(const std::string& path, const SaveOptions& options) const {
  const TensorSet& all = values();
  if (rank() == 0) save_weights(path, *model_, all, options);
}

}  // namespace logitless::train
