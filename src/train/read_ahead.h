// Reading what comes next on a thread of its own, beside what is computed.
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

// A sequence of items, `stride` apart, each read into one of some slots, which are the caller's.
// take() and give_back() are one thread's.
class ReadAhead {
 public:
  // Reads the item at `position` into a slot; on the thread.
  using Read = std::function<void(std::int64_t position, std::size_t slot)>;
  ReadAhead(std::size_t slots, std::int64_t stride, Read read);
  // Waits for the item that is being read.
  ~ReadAhead();
  ReadAhead(const ReadAhead&) = delete;
  ReadAhead& operator=(const ReadAhead&) = delete;

  // The slot with the item at `position`, which is the caller's until give_back(): waits for it.
  // Reading goes on behind it, as far as there are slots. Another position than the one after the
  // last is read from there, and what was read ahead is dropped. Throws what reading this item
  // threw.
  std::size_t take(std::int64_t position);
  void give_back(std::size_t slot);

 private:
  void run();

  const std::int64_t stride_;
  const Read read_;
  std::mutex mutex_;
  std::condition_variable changed_;
  bool begun_ = false, stopped_ = false;
  std::int64_t next_ = 0;  // to be read
  std::deque<std::size_t> free_;
  std::deque<std::pair<std::int64_t, std::size_t>> ready_;  // position and slot
  std::exception_ptr error_;                                // of next_
  std::thread thread_;
};

}  // namespace logitless::train
