// Prefetching: a thread reads the next items while the current one is processed.
#pragma once

#include <condition_variable>
#include <cstdint>
#include <deque>
#include <exception>
#include <functional>
#include <mutex>
#include <thread>
#include <utility>

namespace logitless::train {

// Reads a sequence of items, `stride` apart, into slots that the caller provides. take() and
// give_back() are called by one thread.
class ReadAhead {
 public:
  // Reads the item at `position` into a slot; called on the reader's thread.
  using Read = std::function<void(std::int64_t position, std::size_t slot)>;
  ReadAhead(std::size_t slots, std::int64_t stride, Read read);
  // Waits for the item being read.
  ~ReadAhead();
  ReadAhead(const ReadAhead&) = delete;
  ReadAhead& operator=(const ReadAhead&) = delete;

  // Returns the slot with the item at `position`, and waits for it. The slot belongs to the caller
  // until give_back(). Later items are read while slots are free. If `position` does not follow the
  // last one, items read ahead are dropped. Throws the exception of reading this item.
  std::size_t take(std::int64_t position);
  void give_back(std::size_t slot);

 private:
  void run();

  const std::int64_t stride_;
  const Read read_;
  std::mutex mutex_;
  std::condition_variable changed_;
  bool begun_ = false, stopped_ = false;
  std::int64_t next_ = 0;  // position to read next
  std::deque<std::size_t> free_;
  std::deque<std::pair<std::int64_t, std::size_t>> ready_;  // (position, slot)
  std::exception_ptr error_;                                // of reading next_
  std::thread thread_;
};

}  // namespace logitless::train
