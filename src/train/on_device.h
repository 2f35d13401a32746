// What a Trainer has on a GPU.
#pragma once

#include <cstdint>
#include <deque>

#include "train/device_steps.h"
#include "train/trainer.h"

namespace logitless::train {

struct Trainer::OnDevice {
  // taken_before: of the card, by whomever.
  OnDevice(Context&& gpu, const DeviceModel& model, std::size_t taken_before);

  // Tensors to the host, which wants all steps finished; a set of no tensors gets nothing.
  void get(const TensorSet& values, const TensorSet& m, const TensorSet& v) const;
  void get_values(const TensorSet& values) const;
  void add_to(TrainMemory& memory) const;

  // A step that was started, and the run before it.
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
