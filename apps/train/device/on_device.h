// The part of a Trainer that is on a GPU.
#pragma once

#include <cstdint>
#include <deque>

#include "train/device/steps.h"
#include "train/run/trainer.h"

namespace logitless::train {

struct Trainer::OnDevice {
  // taken_before: memory of the GPU in use, by all processes.
  OnDevice(Context&& gpu, const DeviceModel& model, std::size_t taken_before);

  // Copy tensors to the host; all steps must be finished. Sets without tensors are skipped.
  void get(const TensorSet& values, const TensorSet& m, const TensorSet& v) const;
  void get_values(const TensorSet& values) const;
  void add_to(TrainMemory& memory) const;

  // A started step, and the state of the run before it.
  struct Started {
    std::int64_t step = 0, windows = 0;
    double rate = 0.0;
  };

  Context context;
  std::vector<MemoryItem> statement;
  std::size_t taken_before = 0;
  DeviceSteps steps;
  std::deque<Started> started;

 private:
  void require_finished(const char* call) const;
};

}  // namespace logitless::train
