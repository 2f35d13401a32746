// Trains a language model with compiled programs: steps, validation, words written by the model.
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
#include "train/adamw.h"
#include "train/checkpoint.h"
#include "train/dataset.h"
#include "train/device_memory.h"
#include "train/host_exchange.h"
#include "train/model.h"
#include "train/rank_pieces.h"
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
  // cuda: tensors are copied back for checkpoints.
  DeviceKind device = DeviceKind::cpu;
  int gpu = 0;  // its index, which is the thread's current one
  // Ranks that share each step, this one among them: each has `batch` rows of a micro-batch of its
  // own, and updates equal pieces of the parameters (rank_pieces.h). It moves the memory of
  // `device`. Null: one.
  std::shared_ptr<Communicator> ranks = {};
  std::size_t bucket = RankPieces::kBucket;  // of what ranks exchange at once
  // Each of several ranks has a share of the head's words, and their moments, for itself: hidden
  // states and what the head makes of them go from rank to rank instead of its weight and its
  // gradient. The head has a weight of its own (tied_head is false), logits enough for the head
  // engine, and no far field; on a GPU activations are in bf16. With one rank it is as without.
  bool shard_head = false;
  // Gradients of the loss by the far field, a head step for each micro-batch; none: exact ones. Its
  // memory_budget is what memory_budget leaves beside the arena.
  std::optional<FarFieldOptions> far_field = {};
};

struct StepResult {
  double loss = 0.0;  // nats a token
  double rate = 0.0;
  double norm = 0.0;  // of the gradients before clipping
  int note = 0;       // the greatest that a rank began the step with
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
  std::size_t head_workspace = 0;  // of a sharded head, beside the arena
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
// GPU, on the same kind of GPU with the same libraries; with several ranks, with as many of them.
//
// With several ranks each has a Trainer, made with the same arguments but for its communicator, and
// makes the same calls but for generate(), which is a rank's own unless the head is sharded.
// Losses, norms and parameters are those of all ranks, and the same on each. What one throws the
// others may wait for: whoever catches it aborts the communicators.
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
  StepResult step(int note = 0);
  // The same without waiting for a GPU: starts a step, and gives the result of the one started
  // before it, if that has not been given; on the CPU its own. finish_step() gives the last one's.
  // Diverged comes with the result, when the next step has been started: that one changes nothing
  // either. In between only these two may be called.
  std::optional<StepResult> start_step(int note = 0);
  std::optional<StepResult> finish_step();
  int rank() const { return options_.ranks == nullptr ? 0 : options_.ranks->rank(); }
  int ranks() const { return options_.ranks == nullptr ? 1 : options_.ranks->size(); }
  // Whether each rank has words of the head for itself.
  bool shards_head() const { return options_.shard_head && ranks() > 1; }
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
  // On a GPU, or with a sharded head, a copy of them, which all ranks ask for.
  const TensorSet& values() const;
  // "" on the CPU.
  const std::string& device_name() const { return device_name_; }

  // See checkpoint.h. `options` goes into the checkpoint as it is. resume() wants the seed and the
  // data of the checkpoint. What the far field knows is in a file beside it, far_state_of(path); a
  // checkpoint without goes on with a new one. save() throws Diverged, and leaves the files as they
  // are, when a parameter or moment is no finite number. Of several ranks the first one writes; how
  // many there are may differ when a run is resumed.
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
  // head: of the program, where its words are over ranks.
  void run(const Runner& runner, HeadOverRanks* head = nullptr);
  void load(const Batch& batch);
  StepData step_data() const;
  std::int64_t windows_of_step() const { return options_.batch * options_.accumulate * ranks(); }
  void make_pieces(std::vector<ParameterUse> uses);
  // Throws InvalidArgument where the options do not allow a sharded head.
  void check_sharded_head() const;
  std::size_t head_parameter() const;  // of list_
  // taken: bytes of memory_budget that others have.
  HeadOverRanks head_over_ranks(const CompiledProgram& program, const Context& context,
                                std::size_t taken) const;
  // Of build_logits: those that a rank has of a sharded head; 0: all.
  std::int64_t words_of_logits() const;
  // One micro-batch of the CPU, added to gradients_.
  void run_step();
  void start_device();
  // On a GPU; sets of no tensors are zeros.
  void put_on_device(const TensorSet& m, const TensorSet& v);
  void write(const std::string& path, const std::string& options, const TensorSet& m,
             const TensorSet& v) const;
  void check_finite(const TensorSet& m, const TensorSet& v) const;
  void load_far_field(const std::string& path, std::int64_t steps);

  ModelPtr model_;
  TrainOptions options_;
  Dataset train_, valid_;
  std::vector<Parameter> list_;
  std::optional<RankPieces> pieces_;
  TensorSet values_;
  TensorSet m_, v_, gradients_;  // on the CPU; of moments, of this rank's pieces
  std::optional<HostExchange> exchange_;
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
  std::optional<HeadOverRanks> step_head_, loss_head_;  // of a sharded head
  Buffer own_gradient_;  // of the head's rows, of a micro-batch that is added to others; the CPU's
  std::unique_ptr<OnDevice> device_;    // null on the CPU
  std::optional<Context> far_context_;  // on a GPU, on the stream of device_
  std::optional<FarFieldHead> far_;
  std::size_t far_workspace_ = 0;
  std::string far_refusal_;
  std::optional<Runner> loss_runner_, logits_runner_;
};

// Beside a checkpoint: run.safetensors has run.far.safetensors.
std::string far_state_of(const std::string& checkpoint);
// Ends the name of a file until it is whole.
inline constexpr const char* kNewState = ".new";

}  // namespace logitless::train
