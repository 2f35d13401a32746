// Calls of a plan that ranks make together: they all return, or they all throw.
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

// Every exchange is preceded by one of 64 bytes a rank, in which a rank that has failed says so;
// another one ends the call. On a GPU, where exchanges are enqueued, the first one alone is: what
// is wrong with a call is known by then. Not shared between threads.
class CollectiveCalls {
 public:
  // Of a plan that the ranks have agreed on (Agreement::plan).
  CollectiveCalls(std::shared_ptr<Communicator> communicator, std::uint64_t plan);

  Communicator& communicator() const { return *communicator_; }

  // One call: runs `body`, which makes its exchanges by the functions below, in the same order on
  // all ranks. Returns when the bodies of all ranks have ended well. Otherwise throws on all of
  // them: what the body threw on the ranks where it did, and elsewhere the same with the rank's
  // name, "rank 2: ...", at the next exchange. The next call is possible then. Also throws
  // InvalidArgument on all ranks where they are not in the same call, of the same plan, at the same
  // exchange ("rank 2: call 5, rank 0: call 6"), and DeviceError when the group fails. On a GPU a
  // body that throws after its first exchange gives the group up.
  template <typename F>
  void run(const F& body) {
    begin();
    try {
      body();
      end();
    } catch (...) {
      tell(std::current_exception());
      throw;
    }
  }

  // As Communicator's; stream: of a GPU's.
  void all_gather(const void* mine, void* all, std::size_t bytes_each, void* stream = nullptr);
  void all_to_all(const void* pieces, void* pieces_of_all, std::size_t bytes_each,
                  void* stream = nullptr);

  // Exchanges made while it exists are a group of the communicator's. Not the first of a call.
  class Together {
   public:
    explicit Together(CollectiveCalls& calls) : communicator_(*calls.communicator_) {
      communicator_.begin_group();
    }
    // Throws what end_group() does, unless something is thrown already.
    ~Together() noexcept(false) {
      try {
        communicator_.end_group();
      } catch (...) {
        if (std::uncaught_exceptions() == exceptions_) throw;  // else the first one counts
      }
    }
    Together(const Together&) = delete;
    Together& operator=(const Together&) = delete;

   private:
    Communicator& communicator_;
    const int exceptions_ = std::uncaught_exceptions();
  };

  // Before the first exchange of a call on a GPU: how many tokens this rank calls with, where all
  // are to call with as many. Elsewhere each exchange's bytes say it. order: of a far field's
  // words, the same number on ranks with orders of one share_order.
  void tokens(std::int64_t count, std::uint64_t order = 0);

  // This rank's targets have one that is no word: all ranks throw InvalidArgument at the next
  // exchange, or at the end. The first of a call counts.
  void bad_target(std::int64_t position, std::int64_t target);

 private:
  void begin();
  void end();
  void tell(const std::exception_ptr& exception) noexcept;
  void meet_before(ExchangeKind kind, std::size_t bytes_each);
  void meet_at(Stage stage, ExchangeKind kind, std::size_t bytes_each);
  bool on_device() const { return communicator_->device() != DeviceKind::cpu; }

  std::shared_ptr<Communicator> communicator_;
  StatusHeader header_;  // of this rank, now
  std::string text_;     // what it says with a bad status
  bool told_ = false;    // all ranks know why this call throws
  std::vector<StatusHeader> all_;
};

}  // namespace logitless
