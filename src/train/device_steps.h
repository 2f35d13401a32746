// A model on a GPU: its tensors there, a step as captured graphs, and what steps say.
#pragma once

#include <array>
#include <cstdint>
#include <functional>
#include <map>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "logitless/compiler.h"
#include "logitless/device.h"
#include "logitless/device_adamw.h"
#include "logitless/far_field.h"
#include "logitless/head_over_ranks.h"
#include "train/dataset.h"
#include "train/device_exchange.h"
#include "train/device_memory.h"
#include "train/gradient_buckets.h"
#include "train/rank_pieces.h"
#include "train/read_ahead.h"
#include "train/tensor_set.h"

namespace logitless::train {

// What runs on the GPU. With several micro-batches to a step, it adds its gradients to what is
// there. All programs take the parameters under their names, or a bf16 copy under `rounded`, the
// constants, and tokens; step and loss take targets, step takes inverse_count and gives loss and
// d_NAME for each parameter, loss gives loss and count, logits takes last and gives logits.
struct DeviceModel {
  struct Tensor {
    std::string name;
    std::string rounded;  // of the copy, which is kept where the step takes it
    bool decay = false;
  };
  struct Constant {
    std::string name;
    std::span<const float> values;
  };
  CompiledProgram step, loss, logits;
  std::vector<Tensor> parameters;
  RankPieces pieces{{}, {}};  // of the parameters, by uses()
  // Of pieces.ranks(); null of one. It moves the GPU's memory.
  Communicator* ranks = nullptr;
  int gpu = 0;  // its index
  std::vector<Constant> constants;
  std::size_t far_bytes = 0;  // of DeviceSteps::use(), for the statement
  // Of step and loss, where pieces have own_rows(): they outlive what is made of this. logits has
  // as many words as own_rows().each then.
  HeadOverRanks *step_head = nullptr, *loss_head = nullptr;
  std::int64_t accumulate = 1;  // micro-batches of a step
  DeviceAdamWOptions adamw;
  // The micro-batch of `rows` windows from the first-th on; called on a thread of its own.
  std::function<Batch(std::int64_t first)> read;
  std::int64_t rows = 1;

  // What the programs read of the parameters.
  std::vector<ParameterUse> uses() const;
};

// All memory is allocated when it is made, one block for each item of the statement. Steps are
// enqueued and not waited for: a thread reads the next micro-batches into three pinned buffers,
// reports come back through two. Of several ranks each has its own, and makes the same calls in the
// same order.
class DeviceSteps {
 public:
  static std::vector<MemoryItem> statement(const DeviceModel& model);

  // Prepares the programs, runs each once and captures the graphs; put() has to follow. Throws
  // DeviceError stating the memory that it takes and what is free where that is too little, and
  // what CompiledProgram::prepare() throws.
  DeviceSteps(const Context& context, const DeviceModel& model);

  // From now on the step's head is under `far`, which is on the stream and outlives this. Steps are
  // enqueued one kernel at a time then: what runs differs from step to step. Those that `far`
  // decides something in wait (PreparedProgram::run).
  void use(FarFieldHead& far) { far_ = &far; }

  // Parameters and moments from the host and to it, in sets of pieces.layout(). Waits. put() rounds
  // the copies, and begins anew after steps that changed nothing; sets of no tensors are zeros. A
  // set of no tensors gets nothing.
  void put(const TensorSet& values, const TensorSet& m, const TensorSet& v);
  void get_values(const TensorSet& values) const;
  void get_moments(const TensorSet& m, const TensorSet& v) const;

  // The step-th step, counted from 1, of `accumulate` micro-batches of each rank from a window
  // on: those of all ranks, in their order, then the next ones. At most one started before may be
  // unfinished. `note` comes back in the report, of several ranks the greatest. Throws what reading
  // throws; then no step was started, though micro-batches before the unread one may have run,
  // which the next step begins anew.
  void start(std::int64_t window, float inverse_count, std::int64_t step, double rate,
             std::int32_t note = 0);
  // Waits for the first that is not finished, and says what became of it. A step that was skipped
  // changed nothing, and neither does any after it until reset().
  DeviceAdamWReport finish();
  // Waits for all, forgets what they say, and lets steps change parameters again.
  void reset();

  // The cudaStream_t of all of it.
  void* stream() const { return stream_.handle(); }

  // Of the program loss. Wait.
  struct Losses {
    double loss = 0.0, count = 0.0;
  };
  Losses losses(const Batch& batch);
  void logits(std::span<const std::int64_t> tokens, std::int64_t last, std::span<float> logits);

 private:
  struct Runner {
    PreparedProgram program;
    HeadOverRanks* head;  // or null
    std::vector<const void*> parameters;
    std::vector<void*> results;
  };
  // What a step reads beside the tensors, as it lies in the device's memory and in pinned buffers:
  // offsets in bytes.
  struct Inputs {
    explicit Inputs(const CompiledProgram& step);
    std::size_t targets = 0, inverse_count = 0, rates = 0, last = 0, end = 0;
  };
  struct Slot {
    PinnedBuffer memory;
    DeviceEvent copied;
  };
  struct ReportSlot {
    PinnedBuffer memory;
    DeviceEvent written;
  };
  using Pointers = std::map<std::string, void*>;
  static constexpr std::size_t kNoTensor = ~std::size_t{0};

  Runner runner(const CompiledProgram& program, const Pointers& pointers,
                HeadOverRanks* head = nullptr) const;
  // done: told of results, or none.
  void run(const Runner& runner, const std::function<void(std::size_t result)>& done = {}) const;
  // The program of a micro-batch; of the last one of several ranks buckets_ are told.
  void run_step(bool last);
  // A micro-batch of a step, and with the last one of a step of one rank the update.
  void enqueue(bool first, bool last);
  void enqueue_update_of_ranks() const;
  static std::size_t kind(bool first, bool last) { return (first ? 1U : 0U) + (last ? 2U : 0U); }
  // The pinned buffer of what is no step, when its last copy is done.
  Slot& own_slot();
  void send(Slot& slot);
  void put_words(const Slot& slot, const Batch& batch) const;

  const Context& context_;
  const RankPieces pieces_;
  std::int64_t accumulate_, rows_;
  Inputs inputs_;
  DeviceStream stream_;
  DeviceExchange exchange_;
  DeviceBuffer weights_, rounded_, moments_, gradients_, constants_, arena_, input_, output_;
  std::optional<DeviceAdamW> adamw_;
  Runner step_, loss_, logits_;
  std::vector<std::size_t> gradient_of_;  // by the step's result: a tensor, or kNoTensor
  GradientBuckets buckets_;
  std::vector<DeviceEvent> whole_;      // by bucket
  std::vector<std::size_t> exchanged_;  // buckets, in the order of all ranks
  std::array<DeviceGraph, 4> graphs_;
  FarFieldHead* far_ = nullptr;
  std::vector<Slot> slots_;  // the reader's, and one more
  std::vector<ReportSlot> reports_;
  std::int64_t started_ = 0, finished_ = 0;
  std::optional<ReadAhead> reader_;  // reads into slots_
};

}  // namespace logitless::train
