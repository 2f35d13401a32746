#include "compiler/plan/views.h"

#include "core/check.h"

namespace logitless::ir {

std::vector<std::int64_t> contiguous_strides(const std::vector<std::int64_t>& shape) {
  std::vector<std::int64_t> strides(shape.size(), 1);
  for (std::size_t d = shape.size(); d-- > 1;) strides[d - 1] = strides[d] * shape[d];
  return strides;
}

std::int64_t elements_of(const View& view) {
  std::int64_t count = 1;
  for (const std::int64_t size : view.shape) count *= size;
  return count;
}

bool is_contiguous(const View& view) {
  std::int64_t expected = 1;
  for (std::size_t d = view.shape.size(); d-- > 0;) {
    if (view.shape[d] != 1 && view.strides[d] != expected) return false;
    expected *= view.shape[d];
  }
  return true;
}

bool same_elements(const View& a, const View& b) {
  if (elements_of(a) == 0) return true;
  if (a.buffer != b.buffer || a.offset != b.offset || a.dtype != b.dtype) return false;
  for (std::size_t d = 0; d < a.shape.size(); ++d) {
    if (a.shape[d] > 1 && a.strides[d] != b.strides[d]) return false;
  }
  return true;
}

bool same_memory(const View& a, const View& b) {
  return a.buffer == b.buffer && a.offset == b.offset && a.dtype == b.dtype &&
         a.strides == b.strides;
}

View transposed(const View& view, const std::vector<int>& dims) {
  View to = view;
  for (std::size_t i = 0; i < dims.size(); ++i) {
    to.shape[i] = view.shape[static_cast<std::size_t>(dims[i])];
    to.strides[i] = view.strides[static_cast<std::size_t>(dims[i])];
  }
  return to;
}

View sliced(const View& view, const std::vector<std::int64_t>& begin,
            const std::vector<std::int64_t>& shape) {
  View to = view;
  for (std::size_t d = 0; d < begin.size(); ++d) to.offset += begin[d] * view.strides[d];
  to.shape = shape;
  return to;
}

View broadcasted(const View& view, const std::vector<std::int64_t>& shape,
                 const std::vector<int>& dims) {
  View to = view;
  to.shape = shape;
  to.strides.assign(shape.size(), 0);
  for (std::size_t i = 0; i < dims.size(); ++i)
    to.strides[static_cast<std::size_t>(dims[i])] = view.strides[i];
  return to;
}

std::optional<View> reshaped(const View& view, const std::vector<std::int64_t>& shape) {
  View to = view;
  to.shape = shape;
  to.strides.assign(shape.size(), 0);
  if (elements_of(view) == 0) return to;  // nothing to find
  // Matches runs of dimensions with equal products on both sides. The old dimensions of a run must
  // be mergeable.
  std::vector<std::int64_t> sizes, strides;
  for (std::size_t d = 0; d < view.shape.size(); ++d) {
    if (view.shape[d] == 1) continue;
    sizes.push_back(view.shape[d]);
    strides.push_back(view.strides[d]);
  }
  std::size_t i = 0, j = 0;
  while (i < sizes.size()) {
    std::size_t last_i = i + 1, last_j = j;
    std::int64_t from = sizes[i], into = 1;
    while (from != into || last_j == j) {
      if (into < from || (last_j == j)) {
        if (last_j == shape.size()) return std::nullopt;
        into *= shape[last_j++];
      } else {
        if (last_i == sizes.size()) return std::nullopt;
        from *= sizes[last_i++];
      }
    }
    for (std::size_t d = i; d + 1 < last_i; ++d) {
      if (strides[d] != strides[d + 1] * sizes[d + 1]) return std::nullopt;
    }
    std::int64_t stride = strides[last_i - 1];
    for (std::size_t d = last_j; d-- > j;) {
      to.strides[d] = stride;
      stride *= shape[d];
    }
    i = last_i;
    j = last_j;
  }
  return to;
}

std::vector<int> merge_dims(std::vector<std::int64_t>& shape,
                            const std::vector<std::vector<std::int64_t>*>& strides,
                            const std::vector<bool>& fixed) {
  for (const std::vector<std::int64_t>* s : strides)
    check(s->size() == shape.size(), "merge_dims: ranks disagree");
  std::vector<int> to(shape.size(), -1);
  // Entries before `kept` are final; old dimension `last` was merged last.
  std::size_t kept = 0, last = shape.size();
  for (std::size_t d = 0; d < to.size(); ++d) {
    const std::int64_t size = shape[d];
    if (size == 1 && !fixed[d]) continue;
    bool merge = last < to.size() && !fixed[d] && !fixed[last];
    for (const auto* s : strides) merge = merge && (*s)[kept - 1] == (*s)[d] * size;
    if (merge) {
      shape[kept - 1] *= size;
    } else {
      shape[kept++] = size;
    }
    for (std::vector<std::int64_t>* s : strides) (*s)[kept - 1] = (*s)[d];
    to[d] = static_cast<int>(kept) - 1;
    last = d;
  }
  shape.resize(kept);
  for (std::vector<std::int64_t>* s : strides) s->resize(kept);
  return to;
}

}  // namespace logitless::ir
