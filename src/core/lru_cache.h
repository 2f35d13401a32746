// A bounded map: beyond its capacity it drops the entry that was asked for the longest time ago.
#pragma once

#include <cstddef>
#include <list>
#include <map>
#include <memory>
#include <mutex>
#include <utility>

namespace logitless {

// Threads may share it; one at a time makes a value. Values are shared with the callers, so that
// dropping one does not end its use.
template <typename Key, typename Value>
class LruCache {
 public:
  explicit LruCache(std::size_t capacity) : capacity_(capacity) {}

  // Returns the value of a key, computed by make() if it is not in the cache.
  template <typename Make>
  std::shared_ptr<const Value> get(const Key& key, const Make& make) {
    const std::lock_guard lock(mutex_);
    const auto found = positions_.find(key);
    if (found != positions_.end()) {
      entries_.splice(entries_.begin(), entries_, found->second);
      return entries_.front().second;
    }
    auto value = std::make_shared<const Value>(make());
    if (entries_.size() == capacity_) {
      positions_.erase(entries_.back().first);
      entries_.pop_back();
    }
    entries_.emplace_front(key, value);
    positions_.emplace(key, entries_.begin());
    return value;
  }
  std::size_t size() const {
    const std::lock_guard lock(mutex_);
    return entries_.size();
  }

 private:
  using Entries = std::list<std::pair<Key, std::shared_ptr<const Value>>>;  // the last used first

  const std::size_t capacity_;
  mutable std::mutex mutex_;
  Entries entries_;
  std::map<Key, typename Entries::iterator> positions_;
};

}  // namespace logitless
