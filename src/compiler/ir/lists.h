// Many short lists stored consecutively in one array, such as one for each node of a graph or step
// of a schedule.
#pragma once

#include <cstddef>
#include <numeric>
#include <span>
#include <vector>

namespace logitless::ir {

template <typename T>
class Lists {
 public:
  Lists() = default;

  // Returns `count` lists. fill(put) calls put(list, item) in the order of the items. `fill` is
  // called twice and must put the same items.
  template <typename Fill>
  static Lists grouped(std::size_t count, Fill&& fill) {
    Lists lists;
    lists.begin_.assign(count + 1, 0);
    std::vector<std::size_t>& begin = lists.begin_;
    fill([&](std::size_t list, const T&) { ++begin[list + 1]; });
    std::partial_sum(begin.begin(), begin.end(), begin.begin());
    lists.items_.resize(begin.back());
    std::vector<std::size_t> place(begin.begin(), begin.end() - 1);
    fill([&](std::size_t list, const T& item) { lists.items_[place[list]++] = item; });
    return lists;
  }

  std::size_t size() const { return begin_.size() - 1; }
  std::span<const T> operator[](std::size_t list) const {
    return std::span(items_).subspan(begin_[list], begin_[list + 1] - begin_[list]);
  }
  void reserve(std::size_t lists, std::size_t items) {
    begin_.reserve(lists + 1);
    items_.reserve(items);
  }
  std::size_t items() const { return items_.size(); }

  // Appends a list: its items one by one, then end_list().
  void put(const T& item) { items_.push_back(item); }
  void end_list() { begin_.push_back(items_.size()); }
  void add(std::span<const T> list) {
    items_.insert(items_.end(), list.begin(), list.end());
    end_list();
  }

 private:
  std::vector<std::size_t> begin_ = {0};
  std::vector<T> items_;
};

}  // namespace logitless::ir
