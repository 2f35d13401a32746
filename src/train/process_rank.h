// This process as one of the ranks of a launched run.
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "logitless/communicator.h"
#include "logitless/context.h"
#include "train/launched_rank.h"
#include "train/tokenizer.h"

namespace logitless::train {

// What a rank says, by name.
using Facts = std::vector<std::pair<std::string, std::string>>;

class ProcessRank {
 public:
  // Collective, as make_tcp(), whose errors it throws. `waiting` is told, after some seconds, for
  // whom this rank waits.
  explicit ProcessRank(const LaunchedRank& launched, const Say& waiting = {});
  ~ProcessRank();
  ProcessRank(const ProcessRank&) = delete;
  ProcessRank& operator=(const ProcessRank&) = delete;

  // Collective: returns when it has run on all ranks. What it throws on one of them ends the
  // others' exchanges: "rank 2 gave up: ...".
  void run(const std::function<void()>& body);

  const LaunchedRank& launched() const { return launched_; }
  int rank() const { return launched_.rank; }
  int size() const { return launched_.size; }

  // In `body` all ranks make the same of these calls in the same order.

  // Throws InvalidArgument on all ranks, "rank 1: --batch 4, rank 0: 2", unless all say the same.
  void agree(const Facts& mine);
  // On rank 0 first, then on the others: what it leaves in a cache is there for them.
  void first_on_rank_0(const std::function<void()>& body);
  // What steps exchange by; of GPUs NCCL, on the current one, whose calls end, too, when a rank
  // fails or its process has ended.
  std::shared_ptr<Communicator> communicator(DeviceKind device);

  // The one for this process: of its number on the host, or the only one that it sees.
  int gpu() const;
  // Empty, or why this process has no GPU to share a run with others.
  std::string gpu_missing() const;

 private:
  class Watch;

  void meet();

  const LaunchedRank launched_;
  const std::shared_ptr<Communicator> host_;
  std::unique_ptr<Watch> watch_;  // over GPUs
};

// Tells the other ranks of a launched run that this one fails before it has joined them; of any
// other process it does nothing.
void fail_launched_rank(std::string_view reason) noexcept;

}  // namespace logitless::train
