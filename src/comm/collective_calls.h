// Collective calls of a plan: all ranks return, or all throw.
#pragma once

#include <cstddef>
#include <cstdint>
#include <exception>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "comm/status.h"
#include "logitless/communicator.h"

namespace logitless {

// A barrier of 64 bytes a rank precedes every exchange, and one ends the call; a failed rank
// reports its status there. On a GPU, where exchanges are enqueued, only the first exchange has a
// barrier: argument errors are known by then. Not shared between threads.
class CollectiveCalls {
 public:
  // `plan` is the number of the ranks' agreement (Agreement::plan).
  CollectiveCalls(std::shared_ptr<Communicator> communicator, std::uint64_t plan);

  Communicator& communicator() const { return *communicator_; }

  // Runs one call: `body` makes its exchanges by the functions below, in the same order on all
  // ranks. Returns when the bodies of all ranks have returned. If one throws, all ranks throw: it
  // its own exception, the others the same with the rank's name, "rank 2: ...", at their next
  // exchange. The next call is then possible. Throws InvalidArgument on all ranks if they differ in
  // call, plan or exchange ("rank 2: call 5, rank 0: call 6"). Throws DeviceError when the group
  // fails. On a GPU a body that throws after its first exchange aborts the group.
  template <typename F>
  void run(const F& body) {
    begin();
    try {
      body();
      end();
    } catch (...) {
      propagate(std::current_exception());
      throw;
    }
  }

  // Exchanges of the communicator; stream is only for a GPU.
  void all_gather(const void* mine, void* all, std::size_t bytes_each, void* stream = nullptr);
  void all_to_all(const void* slices, void* slices_of_all, std::size_t bytes_each,
                  void* stream = nullptr);

  // Enqueues the exchanges of its lifetime as one: an NCCL group (ncclGroupStart, ncclGroupEnd).
  // Not for the first exchange of a call.
  class Batch {
   public:
    explicit Batch(CollectiveCalls& calls) : communicator_(*calls.communicator_) {
      communicator_.begin_group();
    }
    // Throws as end_group() does, unless an exception is already in flight.
    ~Batch() noexcept(false) {
      try {
        communicator_.end_group();
      } catch (...) {
        if (std::uncaught_exceptions() == exceptions_) throw;  // else the first exception is kept
      }
    }
    Batch(const Batch&) = delete;
    Batch& operator=(const Batch&) = delete;

   private:
    Communicator& communicator_;
    const int exceptions_ = std::uncaught_exceptions();
  };

  // Throws on all ranks unless they pass the same number of tokens and the same order, which
  // identifies the far field's: it is equal on ranks with orders of one share_order. It is the
  // first exchange of a call on a GPU, and nothing after another. On the CPU the barriers before
  // all exchanges compare byte counts instead.
  void require_same_tokens(std::int64_t count, std::uint64_t order = 0);

  // Reports a target outside the vocabulary: all ranks throw InvalidArgument at the next exchange,
  // or at the end. Only the first of a call is kept.
  void bad_target(std::int64_t position, std::int64_t target);

 private:
  void begin();
  void end();
  void propagate(const std::exception_ptr& exception) noexcept;
  void barrier_before(ExchangeKind kind, std::size_t bytes_each);
  void barrier_at(Stage stage, ExchangeKind kind, std::size_t bytes_each);
  bool on_device() const { return communicator_->device() != DeviceKind::cpu; }

  std::shared_ptr<Communicator> communicator_;
  StatusHeader header_;      // current header of this rank
  std::string text_;         // error text beside a bad status
  bool propagated_ = false;  // all ranks know why this call throws
  std::vector<StatusHeader> all_;
};

}  // namespace logitless
