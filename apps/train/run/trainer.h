// Trains a language model with compiled programs: steps, validation, sampling.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "logitless/communicator.h"
#include "logitless/compiler.h"
#include "logitless/error.h"
#include "logitless/far_field.h"
#include "logitless/head_over_ranks.h"
#include "train/data/dataset.h"
#include "train/device/memory.h"
#include "train/model/model.h"
#include "train/model/weight_files.h"
#include "train/optimizer/adamw.h"
#include "train/optimizer/tensor_set.h"
#include "train/ranks/host_exchange.h"
#include "train/ranks/rank_partition.h"
#include "train/run/checkpoint.h"

namespace logitless::train {

struct TrainOptions {
  std::int64_t batch = 8;       // rows of a micro-batch
  std::int64_t accumulate = 1;  // micro-batches to a step
  Schedule schedule;
  AdamWOptions adamw;
  double clip = 1.0;  // largest norm of the gradients; 0: no clipping
  std::uint64_t seed = 1;
  std::size_t memory_budget = 0;  // limit of each program's arena; see CompileOptions
  bool chunk = true;
  bool head_engine = true;  // compute the loss on the head engine; false: in a loop of the compiler
  bool epilogues = true;    // as in CompileOptions
  int threads = 0;          // 0: logitless's default
  // cuda: tensors are copied back for checkpoints.
  DeviceKind device = DeviceKind::cpu;
  int gpu = 0;  // index of the GPU, which must be the thread's current one
  // Communicator of the ranks that share each step, for memory of `device`. Each has its own
  // micro-batches of `batch` rows, and updates a shard of the parameters (rank_partition.h). Null:
  // one rank.
  std::shared_ptr<Communicator> ranks = {};
  std::size_t bucket = RankPartition::kBucket;  // elements that ranks exchange at one time
  // Vocabulary-parallel head: each rank holds a shard of the vocabulary and its moments. Ranks
  // exchange hidden states and the head's results instead of its weight and gradient. The head must
  // be untied and large enough for the head engine, and there is no far field. On a GPU activations
  // are in bf16. No effect with one rank.
  bool shard_head = false;
  // Far-field gradients of the loss, with a head step for each micro-batch; none: exact gradients.
  // Its memory_budget is the part of memory_budget that the arena leaves.
  std::optional<FarFieldOptions> far_field = {};
};

struct StepResult {
  double loss = 0.0;  // nats a token
  double rate = 0.0;
  double norm = 0.0;  // norm of the gradients before clipping
  int note = 0;       // the greatest `note` of all ranks
};

// Memory in bytes. The arena is shared by all programs; these two figures are for the program of a
// step.
struct TrainMemory {
  std::size_t arena = 0;
  std::size_t unchunked_arena = 0;
  std::size_t parameters = 0;
  std::size_t gradients = 0;
  std::size_t moments = 0;
  std::size_t tables = 0;  // of positions
  // The far field's memory without the arena: the workspace of its steps, and the peak so far,
  // including copies from which vocabulary orders are made.
  std::size_t far_workspace = 0;
  std::size_t far_peak = 0;
  std::size_t head_workspace = 0;  // of a sharded head, without the arena
  // GPU only: the run's memory statement, made before any allocation. Then the memory in use on the
  // GPU at that time, by all processes and this run's context, and now.
  std::vector<MemoryItem> device = {};
  std::size_t device_taken_before = 0;
  std::size_t device_taken = 0;
};

struct SampleOptions {
  double temperature = 0.8;      // 0: always the most likely token
  std::int64_t top_k = 50;       // 0: all tokens
  std::int64_t vocab_count = 0;  // sample only from the first token ids; 0: all
  std::uint64_t seed = 1;
};

// A loss, norm or weight is not finite, so that training cannot continue.
class Diverged : public Error {
 public:
  using Error::Error;
};
// Throws Diverged naming the number and the step unless the value is finite.
void require_finite(const char* name, double value, std::int64_t step);

// Results have the same bits for any number of threads, whether a run is resumed or not. On a GPU
// this holds for the same kind of GPU and the same libraries; with several ranks, for the same
// number of them.
//
// Each of several ranks has a Trainer, made with the same arguments except its communicator. All
// make the same calls, except generate(), which is local unless the head is sharded. Losses, norms
// and parameters are global, and equal on all ranks. When one rank throws, others may wait for it:
// whoever catches the exception aborts the communicators.
class Trainer {
 public:
  // Compiles the program of a step and initialises the parameters. Rows have train.length() tokens.
  // Throws the exceptions of compile().
  Trainer(ModelPtr model, const TrainOptions& options, Dataset train, Dataset valid);
  // Not movable: programs hold pointers into the tensors.
  ~Trainer();
  Trainer(const Trainer&) = delete;
  Trainer& operator=(const Trainer&) = delete;

  // Runs a step. Throws Diverged when the loss or the norm of the gradients is not finite; the
  // parameters then keep their values.
  StepResult step(int note = 0);
  // Starts a step without waiting for the GPU. Returns the result of the step started before, if
  // that was not returned yet; on the CPU the result of this step. finish_step() returns the last
  // result. Diverged is thrown with a result, when the next step has started; that one changes
  // nothing either. No other calls are allowed between them.
  std::optional<StepResult> start_step(int note = 0);
  std::optional<StepResult> finish_step();
  int rank() const { return options_.ranks == nullptr ? 0 : options_.ranks->rank(); }
  int ranks() const { return options_.ranks == nullptr ? 1 : options_.ranks->size(); }
  // Returns whether each rank holds a shard of the head's vocabulary.
  bool shards_head() const { return options_.shard_head && ranks() > 1; }
  // Returns the loss in nats per token over the first `windows` windows of the validation data, or
  // all of them if there are fewer. Throws Diverged when it is not finite.
  double validate(std::int64_t windows);
  // Samples `count` tokens after the prompt, which has at least one. The model sees the last
  // train.length() tokens.
  std::vector<std::int64_t> generate(std::vector<std::int64_t> prompt, std::int64_t count,
                                     const SampleOptions& options);

  std::int64_t steps_done() const { return state_.step; }
  std::int64_t windows_read() const { return state_.windows; }  // windows read by those steps
  std::int64_t parameter_count() const;
  int threads() const { return threads_; }
  TrainMemory memory() const;
  // Returns the far-field head; null without TrainOptions::far_field, and where the program's head
  // does not support it.
  const FarFieldHead* far_field() const { return far_ ? &*far_ : nullptr; }
  // Returns why every step is dense although the far field was requested; else empty.
  const std::string& far_refusal() const { return far_refusal_; }
  const CompiledProgram& program() const { return step_.program; }
  // Returns the parameters. On a GPU, or with a sharded head, this is a copy, made collectively.
  const TensorSet& values() const;
  // Returns the name of the GPU; "" on the CPU.
  const std::string& device_name() const { return device_name_; }

  // Save and load checkpoints (checkpoint.h). `options` is stored verbatim. resume() requires the
  // checkpoint's seed and data. The far field's state is in a separate file, far_state_of(path);
  // without it the far field starts empty. save() throws Diverged, and leaves the files unchanged,
  // when a parameter or moment is not finite. Rank 0 writes. A resumed run may have another number
  // of ranks.
  void save(const std::string& path, const std::string& options) const;
  void resume(const std::string& path);
  // Import and export weights (weight_files.h).
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
  // Compiles a graph within the memory budget. `added`: see CompileOptions.
  CompiledProgram within_budget(const Graph& graph, std::vector<std::string> added = {}) const;
  Runner compiled(const Graph& graph, const Pointers& others, std::vector<std::string> added = {});
  // Returns the results of a step that accumulate over micro-batches.
  std::vector<std::string> added_gradients() const;
  // Makes the far-field head of step_'s program. Sets far_ or far_refusal_.
  void start_far_field(Context&& context);
  // Runs a program. `head`: its vocabulary-parallel head, if it has one.
  void run(const Runner& runner, HeadOverRanks* head = nullptr);
  void load(const Batch& batch);
  StepData step_data() const;
  std::int64_t windows_of_step() const { return options_.batch * options_.accumulate * ranks(); }
  void make_partition(std::vector<ParameterUse> uses);
  // Throws InvalidArgument where the options do not allow a sharded head.
  void check_sharded_head() const;
  std::size_t head_parameter() const;  // index in list_
  // taken: bytes of memory_budget that are in use otherwise.
  HeadOverRanks head_over_ranks(const CompiledProgram& program, const Context& context,
                                std::size_t taken) const;
  // Returns the vocabulary entries of a rank for build_logits; 0: all, without a sharded head.
  std::int64_t vocab_of_logits() const;
  // Runs a micro-batch on the CPU and adds its gradients to gradients_.
  void run_step();
  void start_device();
  // Copies the parameters and these moments to the GPU; moments without tensors are set to zero.
  void put_on_device(const TensorSet& m, const TensorSet& v);
  void write(const std::string& path, const std::string& options, const TensorSet& m,
             const TensorSet& v) const;
  void check_finite(const TensorSet& m, const TensorSet& v) const;
  void load_far_field(const std::string& path, std::int64_t steps);

  ModelPtr model_;
  TrainOptions options_;
  Dataset train_, valid_;
  std::vector<Parameter> list_;
  std::optional<RankPartition> partition_;
  TensorSet values_;
  TensorSet m_, v_, gradients_;  // CPU only; moments have values in this rank's shard only
  std::optional<HostExchange> exchange_;
  RunState state_;

  std::vector<PositionTable> tables_;
  // Inputs and results of the programs other than parameters and gradients.
  std::vector<std::int64_t> tokens_, targets_;
  float inverse_count_ = 0.0f, loss_ = 0.0f, count_ = 0.0f;
  std::vector<std::int64_t> prompt_;
  std::int64_t last_ = 0;
  std::vector<float> logits_;

  int threads_ = 1;
  Buffer arena_;
  Runner step_;
  DeviceLimits limits_;  // limits of the device that programs are compiled for
  std::string device_name_;
  std::optional<HeadOverRanks> step_head_, loss_head_;  // with a sharded head
  Buffer local_gradient_;  // CPU only: gradient of the head's local rows for a micro-batch, before
                           // it is accumulated
  std::unique_ptr<OnDevice> device_;    // null on the CPU
  std::optional<Context> far_context_;  // GPU only, on the stream of device_
  std::optional<FarFieldHead> far_;
  std::size_t far_workspace_ = 0;
  std::string far_refusal_;
  std::optional<Runner> loss_runner_, logits_runner_;
};

// Returns the path of the far field's state: run.far.safetensors for run.safetensors.
std::string far_state_of(const std::string& checkpoint);
// Suffix of a file that is being written.
inline constexpr const char* kNewState = ".new";

}  // namespace logitless::train
