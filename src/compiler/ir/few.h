// A list that stores up to kFew items without an allocation.
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <initializer_list>
#include <span>
#include <vector>

namespace logitless::ir {

template <typename T, std::size_t kFew>
class Few {
 public:
  Few() = default;
  Few(std::initializer_list<T> items) {
    for (const T& item : items) push_back(item);
  }
  Few(std::size_t count, const T& item) {
    for (std::size_t i = 0; i < count; ++i) push_back(item);
  }

  std::size_t size() const { return size_; }
  bool empty() const { return size_ == 0; }
  const T* begin() const { return many_.empty() ? few_.data() : many_.data(); }
  const T* end() const { return begin() + size_; }
  const T& operator[](std::size_t i) const { return begin()[i]; }
  T& operator[](std::size_t i) { return many_.empty() ? few_[i] : many_[i]; }

  void push_back(const T& item) {
    if (size_ == kFew) many_.assign(few_.begin(), few_.end());
    if (size_ < kFew) {
      few_[size_] = item;
    } else {
      many_.push_back(item);
    }
    ++size_;
  }

  friend bool operator==(const Few& a, const Few& b) {
    return std::equal(a.begin(), a.end(), b.begin(), b.end());
  }

 private:
  std::size_t size_ = 0;
  std::array<T, kFew> few_{};
  std::vector<T> many_;  // all items if there are more than kFew
};

}  // namespace logitless::ir
