// Trains a language model with compiled programs: steps, validation, words written by the model.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "logitless/compiler.h"
#include "logitless/error.h"
#include "logitless/far_field.h"
#include "train/adamw.h"
#include "train/checkpoint.h"
#include "train/dataset.h"
#include "train/device_memory.h"
#include "train/model.h"
#include "train/tensor_set.h"
#include "train/weight_files.h"

namespace logitless::train {

struct TrainOptions {
  std::int64_t batch = 8;       // rows of a micro-batch
  std::int64_t accumulate = 1;  // micro-batches of a step
  Schedule schedule;
  AdamWOptions adamw;
  double clip = 1.0;  // norm of the gradients; 0: any
  std::uint64_t seed = 1;
  std::size_t memory_budget = 0;  // of each program's arena; see CompileOptions
  bool chunk = true;
  bool head_engine = true;  // the loss on the head engine; false: a loop like the rest
  bool epilogues = true;    // CompileOptions' of the same name
  int threads = 0;          // 0: logitless's default
  // cuda: the first GPU. Tensors are copied back for checkpoints.
  DeviceKind device = DeviceKind::cpu;
  // Gradients of the loss by the far field, a head step for each micro-batch; none: exact ones. Its
  // memory_budget is what memory_budget leaves beside the arena.
  std::optional<FarFieldOptions> far_field = {};
};

struct StepResult {
  double loss = 0.0;  // nats a token
  double rate = 0.0;
  double norm = 0.0;  // of the gradients before clipping
};

// Bytes. The arena is shared by all programs; these two are what the program of a step needs.
struct TrainMemory {
  std::size_t arena = 0;
  std::size_t unchunked_arena = 0;
  std::size_t parameters = 0;
  std::size_t gradients = 0;
  std::size_t moments = 0;
  std::size_t tables = 0;  // of positions
  // Of the far field, beside the arena: the workspace of its steps, and the most of it so far with
  // the copies that orders are made from.
  std::size_t far_workspace = 0;
  std::size_t far_peak = 0;
  // Of a GPU: what the run takes of its memory, stated before any of it was allocated; what was
  // taken on the card then, by whomever, the run's context among it; and what is now.
  std::vector<MemoryItem> device = {};
  std::size_t device_taken_before = 0;
  std::size_t device_taken = 0;
};

struct SampleOptions {
  double temperature = 0.8;  // 0: always the likeliest word
  std::int64_t top_k = 50;   // 0: all words
  std::int64_t words = 0;    // only the first of the vocabulary; 0: all
  std::uint64_t seed = 1;
};

// Numbers that are none, where training would go on with them.
class Diverged : public Error {
 public:
  using Error::Error;
};
// Throws Diverged naming the number and the step unless the value is finite.
void require_finite(const char* name, double value, std::int64_t step);

// Results are the same bits for any number of threads, and for a run in one piece or resumed; on a
// GPU, on the same kind of GPU with the same libraries.
class Trainer {
 public:
  // Compiles the program of a step and sets the starting values. Rows have train.length() tokens.
  // Throws what compile() throws.
  Trainer(ModelPtr model, const TrainOptions& options, Dataset train, Dataset valid);
  // Programs hold pointers into the tensors.
  ~Trainer();
  Trainer(const Trainer&) = delete;
  Trainer& operator=(const Trainer&) = delete;

  // Throws Diverged when the loss or the gradients' norm is no finite number; the parameters are
  // then those before the step.
  StepResult step();
  // The same without waiting for a GPU: starts a step, and gives the result of the one started
  // before it, if that has not been given; on the CPU its own. finish_step() gives the last one's.
  // Diverged comes with the result, when the next step has been started: that one changes nothing
  // either. In between only these two may be called.
  std::optional<StepResult> start_step();
  std::optional<StepResult> finish_step();
  // Nats a token, over the first `windows` windows of the validation data, or all there are. Throws
  // Diverged when that is no finite number.
  double validate(std::int64_t windows);
  // `count` words after the prompt, which has at least one. The model sees the last train.length().
  std::vector<std::int64_t> generate(std::vector<std::int64_t> prompt, std::int64_t count,
                                     const SampleOptions& options);

  std::int64_t steps_done() const { return state_.step; }
  std::int64_t windows_read() const { return state_.windows; }  // by those steps
  std::int64_t parameter_count() const;
  int threads() const { return threads_; }
  TrainMemory memory() const;
  // Null without TrainOptions::far_field, and where the program's head cannot take it.
  const FarFieldHead* far_field() const { return far_ ? &*far_ : nullptr; }
  // Why every step is dense though the far field was asked for; empty if not all are.
  const std::string& far_refusal() const { return far_refusal_; }
  const CompiledProgram& program() const { return step_.program; }
  // On a GPU a copy of them.
  const TensorSet& values() const;
  // "" on the CPU.
  const std::string& device_name() const { return device_name_; }

  // See checkpoint.h. `options` goes into the checkpoint as it is. resume() wants the seed and the
  // data of the checkpoint. What the far field knows is in a file beside it, far_state_of(path); a
  // checkpoint without goes on with a new one. save() throws Diverged, and leaves the files as they
  // are, when a parameter or moment is no finite number.
  void save(const std::string& path, const std::string& options) const;
  void resume(const std::string& path);
  // See weight_files.h.
  void import_weights(const std::string& path);
  void export_weights(const std::string& path, const SaveOptions& options) const;

 private:
  struct Runner {
    CompiledProgram program;
    std::vector<const void*> parameters;
    std::vector<void*> results;
  };
  using Pointers = std::map<std::string, void*>;
  struct StepData {
    std::vector<Batch> batches;
    float inverse_count = 0.0f;
  };
  struct OnDevice;
  // `added`: see CompileOptions.
  CompiledProgram within_budget(const Graph& graph, std::vector<std::string> added = {}) const;
  Runner compiled(const Graph& graph, const Pointers& others, std::vector<std::string> added = {});
  // Results of a step to which further micro-batches add theirs.
  std::vector<std::string> added_gradients() const;
  // Of the program step_; leaves far_ or far_refusal_.
  void start_far_field(Context&& context);
  void run(const Runner& runner);
  void load(const Batch& batch);
  StepData step_data() const;
  void start_device();
  void put_on_device();
  void check_finite() const;
  void load_far_field(const std::string& path, std::int64_t steps);

  ModelPtr model_;
  TrainOptions options_;
  Dataset train_, valid_;
  std::vector<Parameter> list_;
  TensorSet values_, m_, v_, gradients_;
  RunState state_;

  std::vector<PositionTable> tables_;
  // What the programs read and write beside tensors of parameters.
  std::vector<std::int64_t> tokens_, targets_;
  float inverse_count_ = 0.0f, loss_ = 0.0f, count_ = 0.0f;
  std::vector<std::int64_t> prompt_;
  std::int64_t last_ = 0;
  std::vector<float> logits_;

  int threads_ = 1;
  Buffer arena_;
  Runner step_;
  DeviceLimits limits_;  // programs are compiled for
  std::string device_name_;
  std::unique_ptr<OnDevice> device_;    // null on the CPU
  std::optional<Context> far_context_;  // on a GPU, on the stream of device_
  std::optional<FarFieldHead> far_;
  std::size_t far_workspace_ = 0;
  std::string far_refusal_;
  std::optional<Runner> loss_runner_, logits_runner_;
};

// Beside a checkpoint: run.safetensors has run.far.safetensors.
std::string far_state_of(const std::string& checkpoint);

}  // namespace logitless::train
