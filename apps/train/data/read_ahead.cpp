#include "train/data/read_ahead.h"

namespace logitless::train {

ReadAhead::ReadAhead(std::size_t slots, std::int64_t stride, Read read)
    : stride_(stride), read_(std::move(read)) {
  for (std::size_t i = 0; i < slots; ++i) free_.push_back(i);
  thread_ = std::thread([this] { run(); });
}

ReadAhead::~ReadAhead() {
  {
    const std::lock_guard lock(mutex_);
    stopped_ = true;
  }
  changed_.notify_all();
  thread_.join();
}

std::size_t ReadAhead::take(std::int64_t position) {
  std::unique_lock lock(mutex_);
  if (position != (ready_.empty() ? next_ : ready_.front().first)) {
    for (const auto& [dropped, slot] : ready_) free_.push_back(slot);
    ready_.clear();
    error_ = nullptr;
    next_ = position;
  }
  begun_ = true;
  changed_.notify_all();
  changed_.wait(lock, [&] { return !ready_.empty() || error_; });
  if (ready_.empty()) std::rethrow_exception(std::exchange(error_, nullptr));
  const std::size_t slot = ready_.front().second;
  ready_.pop_front();
  return slot;
}

void ReadAhead::give_back(std::size_t slot) {
  {
    const std::lock_guard lock(mutex_);
    free_.push_back(slot);
  }
  changed_.notify_all();
}

void ReadAhead::run() {
  std::unique_lock lock(mutex_);
  while (true) {
    changed_.wait(lock, [&] { return stopped_ || (begun_ && !error_ && !free_.empty()); });
    if (stopped_) return;
    const std::int64_t position = next_;
    const std::size_t slot = free_.front();
    free_.pop_front();
    lock.unlock();
    std::exception_ptr error;
    try {
      read_(position, slot);
    } catch (...) {
      error = std::current_exception();
    }
    lock.lock();
    if (position != next_ || error) {
      free_.push_front(slot);
      if (position == next_) error_ = error;
    } else {
      ready_.emplace_back(position, slot);
      next_ += stride_;
    }
    changed_.notify_all();
  }
}

}  // namespace logitless::train
