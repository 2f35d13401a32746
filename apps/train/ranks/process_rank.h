// One rank of a launched run, which is this process.
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "logitless/communicator.h"
#include "logitless/context.h"
#include "train/ranks/launched_rank.h"
#include "train/tokenizer/tokenizer.h"

namespace logitless::train {

// Values that a rank reports: (name, value).
using Facts = std::vector<std::pair<std::string, std::string>>;

class ProcessRank {
 public:
  // Connects to the other ranks with make_tcp(), and throws its errors. Collective. Calls `waiting`
  // after some seconds with the ranks that are missing.
  explicit ProcessRank(const LaunchedRank& launched, const Print& waiting = {});
  ~ProcessRank();
  ProcessRank(const ProcessRank&) = delete;
  ProcessRank& operator=(const ProcessRank&) = delete;

  // Runs `body`, and returns when it has finished on all ranks. An exception of one rank ends the
  // exchanges of the others with "rank 2 gave up: ...". Collective.
  void run(const std::function<void()>& body);

  const LaunchedRank& launched() const { return launched_; }
  int rank() const { return launched_.rank; }
  int size() const { return launched_.size; }

  // Within `body` all ranks make the same calls of the following functions, in the same order.

  // Throws InvalidArgument on all ranks, "rank 1: --batch 4, rank 0: 2", unless the values of all
  // ranks are equal.
  void agree(const Facts& mine);
  // Runs `body` on rank 0 first, then on the others, which find its results in a cache.
  void first_on_rank_0(const std::function<void()>& body);
  // Returns the communicator of training steps: for GPUs that of NCCL, on the current GPU. Its
  // calls also end when a rank fails or its process has ended.
  std::shared_ptr<Communicator> communicator(DeviceKind device);

  // Returns the index of this process's GPU: its index on the host, or 0 if it sees a single one.
  int gpu() const;
  // Returns "", or why this process has no GPU for a run with several ranks.
  std::string gpu_missing() const;

 private:
  class Watch;

  void meet();

  const LaunchedRank launched_;
  const std::shared_ptr<Communicator> host_;
  std::unique_ptr<Watch> watch_;  // with GPUs
};

// Reports to the other ranks of a launched run that this rank fails before it has joined them. Does
// nothing in other processes.
void fail_launched_rank(std::string_view reason) noexcept;

}  // namespace logitless::train
