// An immutable value that copies share.
#pragma once

#include <cstddef>
#include <memory>
#include <utility>
#include <vector>

namespace logitless::ir {

template <typename T>
class Shared {
 public:
  Shared(T value)  // NOLINT: implicit on purpose
      : value_(std::make_shared<const T>(std::move(value))) {}

  const T& operator*() const { return *value_; }
  const T* operator->() const { return value_.get(); }
  operator const T&() const { return *value_; }  // NOLINT: implicit on purpose

  // Returns whether both share one value, which makes them equal; others may be equal, too.
  bool is(const Shared& other) const { return value_ == other.value_; }

 private:
  std::shared_ptr<const T> value_;
};

template <typename T>
class SharedList : public Shared<std::vector<T>> {
 public:
  using Shared<std::vector<T>>::Shared;

  std::size_t size() const { return (**this).size(); }
  bool empty() const { return (**this).empty(); }
  const T& operator[](std::size_t i) const { return (**this)[i]; }
  auto begin() const { return (**this).begin(); }
  auto end() const { return (**this).end(); }
  friend bool operator==(const SharedList& a, const SharedList& b) { return a.is(b) || *a == *b; }
};

}  // namespace logitless::ir
