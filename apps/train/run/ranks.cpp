#include "train/run/ranks.h"

#include <fmt/format.h>

#include <exception>
#include <mutex>
#include <thread>
#include <vector>

#include "logitless/device.h"
#include "logitless/error.h"
#include "train/ranks/rank_partition.h"

namespace logitless::train {
namespace {

// The communicators of the ranks, and the first exception.
class Ranks {
 public:
  explicit Ranks(int size) : made_(static_cast<std::size_t>(size)) {}

  // Registers a rank's communicator. Throws where a rank has already failed.
  void join(int rank, std::shared_ptr<Communicator> communicator) {
    const std::lock_guard lock(mutex_);
    made_[static_cast<std::size_t>(rank)] = std::move(communicator);
    if (failure_) std::rethrow_exception(failure_);
  }
  // Aborts the calls of all ranks: those of GPUs do not end otherwise.
  void fail(std::exception_ptr failure, const char* what) noexcept {
    const std::lock_guard lock(mutex_);
    if (failure_) return;
    failure_ = std::move(failure);
    for (const auto& rank : made_) {
      if (rank != nullptr) rank->abort(what);
    }
  }
  void rethrow() const {
    if (failure_) std::rethrow_exception(failure_);
  }

 private:
  std::mutex mutex_;
  std::vector<std::shared_ptr<Communicator>> made_;
  std::exception_ptr failure_;
};

}  // namespace

std::string ranks_missing(int ranks) {
  for (int r = 0; r < ranks; ++r) {
    const std::string missing = gpu_missing(r);
    if (!missing.empty())
      return ranks == 1 ? missing : fmt::format("{} ranks want a GPU each: {}", ranks, missing);
  }
  return ranks == 1 ? "" : nccl_missing();
}

void run_on_ranks(int ranks, DeviceKind device,
                  const std::function<void(const std::shared_ptr<Communicator>&)>& body) {
  const bool gpus = device == DeviceKind::cuda;
  std::vector<std::shared_ptr<Communicator>> on_cpu;
  NcclId id = {};
  if (gpus) {
    id = make_nccl_id();
  } else {
    on_cpu = make_thread_group(ranks, kRanksLimit);
  }
  Ranks group(ranks);
  const auto run = [&](int rank) {
    try {
      std::shared_ptr<Communicator> communicator;
      if (gpus) {
        use_gpu(rank);
        NcclOptions options;
        options.limit = kRanksLimit;
        communicator = make_nccl(id, rank, ranks, options);
      } else {
        communicator = on_cpu[static_cast<std::size_t>(rank)];
      }
      group.join(rank, communicator);
      body(communicator);
    } catch (const std::exception& error) {
      group.fail(std::current_exception(), error.what());
    } catch (...) {
      group.fail(std::current_exception(), "an exception of unknown type");
    }
  };
  std::vector<std::thread> threads;
  for (int rank = 1; rank < ranks; ++rank) threads.emplace_back(run, rank);
  run(0);
  for (std::thread& thread : threads) thread.join();
  group.rethrow();
}

}  // namespace logitless::train
