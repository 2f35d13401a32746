// A model on a GPU: its tensors, its step as captured CUDA graphs, and the reports of steps.
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
#include "train/data/dataset.h"
#include "train/data/read_ahead.h"
#include "train/device/memory.h"
#include "train/optimizer/tensor_set.h"
#include "train/ranks/device_exchange.h"
#include "train/ranks/gradient_buckets.h"
#include "train/ranks/rank_partition.h"

namespace logitless::train {

// The programs and tensors of a model on the GPU. With several micro-batches to a step, `step` adds
// its gradients to the buffers' contents. All programs take tokens, constants and the parameters
// under their names, or a bf16 copy under `rounded`. The other inputs and results are:
//   step     targets, inverse_count -> loss, d_NAME for each parameter
//   loss     targets -> loss, count
//   logits   last -> logits
struct DeviceModel {
  struct Tensor {
    std::string name;
    std::string rounded;  // name of the bf16 copy, which exists if the step reads it
    bool decay = false;
  };
  struct Constant {
    std::string name;
    std::span<const float> values;
  };
  CompiledProgram step, loss, logits;
  std::vector<Tensor> parameters;
  RankPartition partition{{}, {}};  // of the parameters, made from uses()
  // The communicator of partition.ranks() ranks, for device memory; null for one rank.
  Communicator* ranks = nullptr;
  int gpu = 0;  // its index
  std::vector<Constant> constants;
  std::size_t far_bytes = 0;  // of the head given to use(), for the statement
  // The sharded heads of `step` and `loss`, where `partition` has local_rows(); they outlive the
  // DeviceSteps. `logits` then has local_rows().each vocabulary entries.
  HeadOverRanks *step_head = nullptr, *loss_head = nullptr;
  std::int64_t accumulate = 1;  // micro-batches to a step
  DeviceAdamWOptions adamw;
  // Reads a micro-batch of `rows` windows that begins with window `first`. Called on the reader's
  // thread.
  std::function<Batch(std::int64_t first)> read;
  std::int64_t rows = 1;

  // Returns which copies of each parameter the programs read.
  std::vector<ParameterUse> uses() const;
};

// The constructor allocates all memory, one block for each item of the statement. Steps are
// asynchronous: a thread reads the next micro-batches into three pinned buffers, and reports return
// through two. With several ranks each has a DeviceSteps, and all make the same calls in the same
// order.
class DeviceSteps {
 public:
  static std::vector<MemoryItem> statement(const DeviceModel& model);

  // Prepares the programs, runs each once and captures the graphs; put() must follow. Throws
  // DeviceError with the memory statement and the free bytes where these are too few, and the
  // exceptions of CompiledProgram::prepare().
  DeviceSteps(const Context& context, const DeviceModel& model);

  // Makes `far` the head of all later steps; it uses the same stream and must outlive this. Steps
  // then differ, so kernels are enqueued one by one, without a graph. Steps in which `far` takes a
  // decision wait for the GPU (PreparedProgram::run).
  void use(FarFieldHead& far) { far_ = &far; }

  // Copies parameters and moments between host and device, in sets of `partition.layout()`. Waits.
  // put() rounds the bf16 copies, and re-enables updates after a skipped step; moments without
  // tensors are set to zero. get_moments() skips sets without tensors.
  void put(const TensorSet& values, const TensorSet& m, const TensorSet& v);
  void get_values(const TensorSet& values) const;
  void get_moments(const TensorSet& m, const TensorSet& v) const;

  // Starts step `step`, counted from 1, of `accumulate` micro-batches on each rank. Micro-batches
  // begin at `window`: first those of all ranks in their order, then the next round. At most one
  // earlier step may be unfinished. The report has the greatest `note` of all ranks. Throws the
  // reader's exceptions. No step has then started, and the next one discards the gradients of
  // micro-batches that already ran.
  void start(std::int64_t window, float inverse_count, std::int64_t step, double rate,
             std::int32_t note = 0);
  // Waits for the oldest unfinished step and returns its report. A skipped step changes nothing,
  // nor does any later one until reset().
  DeviceAdamWReport finish();
  // Waits for all steps, drops their reports, and re-enables updates.
  void reset();

  // Returns the cudaStream_t of all work.
  void* stream() const { return stream_.handle(); }

  // Run the programs `loss` and `logits`, and wait for their results.
  struct Losses {
    double loss = 0.0, count = 0.0;
  };
  Losses losses(const Batch& batch);
  void logits(std::span<const std::int64_t> tokens, std::int64_t last, std::span<float> logits);

 private:
  struct Runner {
    PreparedProgram program;
    HeadOverRanks* head;  // may be null
    std::vector<const void*> parameters;
    std::vector<void*> results;
  };
  // Layout of a step's inputs other than tensors, in device memory and in pinned buffers: byte
  // offsets.
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
  // Enqueues a program; done(result), if given, is called when the kernels of a result are
  // enqueued.
  void run(const Runner& runner, const std::function<void(std::size_t result)>& done = {}) const;
  // Enqueues the program of a micro-batch. For the last one with several ranks, updates buckets_.
  void run_step(bool last);
  // Enqueues a micro-batch of a step; with one rank the last one also enqueues the update.
  void enqueue(bool first, bool last);
  void enqueue_update_of_ranks() const;
  static std::size_t kind(bool first, bool last) { return (first ? 1U : 0U) + (last ? 2U : 0U); }
  // Returns the pinned buffer of validation and sampling, once its last copy is done.
  Slot& host_slot();
  void send(Slot& slot);
  void put_batch(const Slot& slot, const Batch& batch) const;

  const Context& context_;
  const RankPartition partition_;
  std::int64_t accumulate_, rows_;
  Inputs inputs_;
  DeviceStream stream_;
  DeviceExchange exchange_;
  DeviceBuffer weights_, rounded_, moments_, gradients_, constants_, arena_, input_, output_;
  std::optional<DeviceAdamW> adamw_;
  Runner step_, loss_, logits_;
  std::vector<std::size_t> gradient_of_;  // result of the step -> tensor, or kNoTensor
  GradientBuckets buckets_;
  std::vector<DeviceEvent> whole_;      // by bucket: its gradients are complete
  std::vector<std::size_t> exchanged_;  // order of the exchanged buckets, equal on all ranks
  std::array<DeviceGraph, 4> graphs_;
  FarFieldHead* far_ = nullptr;
  std::vector<Slot> slots_;  // the reader's slots, and host_slot()
  std::vector<ReportSlot> reports_;
  std::int64_t started_ = 0, finished_ = 0;
  std::optional<ReadAhead> reader_;  // reads into slots_
};

}  // namespace logitless::train
