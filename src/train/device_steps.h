// A model on a GPU: its tensors there, a step as captured graphs, and what steps say.
#pragma once

#include <array>
#include <cstdint>
#include <map>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "logitless/compiler.h"
#include "logitless/device.h"
#include "logitless/device_adamw.h"
#include "train/dataset.h"
#include "train/device_memory.h"
#include "train/tensor_set.h"

namespace logitless::train {

// What runs on the GPU. All programs take the parameters and constants under their names, and
// tokens; step and loss take targets, step takes inverse_count and gives loss and d_NAME for each
// parameter, loss gives loss and count, logits takes last and gives logits.
struct DeviceModel {
  struct Tensor {
    std::string name;
    bool decay = false;
  };
  struct Constant {
    std::string name;
    std::span<const float> values;
  };
  CompiledProgram step, loss, logits;
  std::vector<Tensor> parameters;
  std::vector<Constant> constants;
  std::int64_t accumulate = 1;  // micro-batches of a step
  DeviceAdamWOptions adamw;
};

// All memory is allocated when it is made, one block for each item of the statement. Steps are
// enqueued and not waited for: tokens go through three pinned buffers by turns, reports come back
// through two.
class DeviceSteps {
 public:
  // layout: where tensors lie in a set of them; its numbers are not read.
  static std::vector<MemoryItem> statement(const DeviceModel& model, const TensorSet& layout);

  // Prepares the programs, runs each once and captures the graphs; put() has to follow. Throws
  // DeviceError stating the memory that it takes and what is free where that is too little, and
  // what CompiledProgram::prepare() throws.
  DeviceSteps(const Context& context, const DeviceModel& model, const TensorSet& layout);

  // Parameters and moments from the host and to it. Waits. put() begins anew after steps that
  // changed nothing.
  void put(const TensorSet& values, const TensorSet& m, const TensorSet& v);
  void get_values(const TensorSet& values) const;
  void get(const TensorSet& values, const TensorSet& m, const TensorSet& v) const;

  // The step-th step, counted from 1, of `accumulate` batches. At most one started before may be
  // unfinished.
  void start(std::span<const Batch> batches, float inverse_count, std::int64_t step, double rate);
  // Waits for the first that is not finished, and says what became of it. A step that was skipped
  // changed nothing, and neither does any after it until reset().
  DeviceAdamWReport finish();
  // Waits for all, forgets what they say, and lets steps change parameters again.
  void reset();

  // Of the program loss. Wait.
  struct Losses {
    double loss = 0.0, count = 0.0;
  };
  Losses losses(const Batch& batch);
  void logits(std::span<const std::int64_t> tokens, std::int64_t last, std::span<float> logits);

 private:
  struct Runner {
    PreparedProgram program;
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

  Runner runner(const CompiledProgram& program, const Pointers& pointers) const;
  void run(const Runner& runner) const;
  // A micro-batch of a step.
  void enqueue(bool first, bool last) const;
  static std::size_t kind(bool first, bool last) { return (first ? 1U : 0U) + (last ? 2U : 0U); }
  // A pinned buffer whose last copy is done.
  Slot& next_slot();
  void send(Slot& slot);
  void put_words(const Slot& slot, const Batch& batch) const;

  const Context& context_;
  std::int64_t accumulate_;
  Inputs inputs_;
  DeviceStream stream_;
  DeviceBuffer weights_, moments_, gradients_, constants_, arena_, input_, output_;
  std::optional<DeviceAdamW> adamw_;
  Runner step_, loss_, logits_;
  std::vector<void*> more_results_;  // of step_, for micro-batches but the first
  std::array<DeviceGraph, 4> graphs_;
  std::vector<Slot> slots_;
  std::size_t next_slot_ = 0;
  std::vector<ReportSlot> reports_;
  std::int64_t started_ = 0, finished_ = 0;
};

}  // namespace logitless::train
