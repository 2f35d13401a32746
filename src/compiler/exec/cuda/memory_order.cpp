#include "compiler/exec/cuda/memory_order.h"

#include <algorithm>
#include <cstdlib>

namespace logitless::ir {
namespace {

constexpr std::int64_t kLeast = 16;          // elements along an innermost dimension
constexpr double kSector = 32.0;             // bytes that an access of one element reads
constexpr double kCached = 1.0 * (1 << 18);  // bytes of operands that stay in caches
constexpr double kGain = 0.5;                // of the bytes, from which another order pays

bool in_memory(const Pointwise::Leaf& leaf) { return leaf.kind == Pointwise::Leaf::Kind::memory; }

// Returns the view's elements, those of repeated dimensions once.
double elements_in(const View& view, const std::vector<std::int64_t>& shape) {
  double elements = 1.0;
  for (std::size_t d = 0; d < shape.size(); ++d) {
    if (view.strides[d] != 0) elements *= static_cast<double>(shape[d]);
  }
  return elements;
}
double bytes_in(const View& view, const std::vector<std::int64_t>& shape) {
  return elements_in(view, shape) * static_cast<double>(size_of(view.dtype));
}

// Returns the bytes that threads adjacent along `dim` move.
double bytes_along(const View& view, const std::vector<std::int64_t>& shape, std::size_t dim) {
  const double bytes = bytes_in(view, shape);
  if (std::abs(view.strides[dim]) <= 1 || bytes <= kCached) return bytes;
  return elements_in(view, shape) * std::max(kSector, static_cast<double>(size_of(view.dtype)));
}
double bytes_along(const Pointwise& loop, std::size_t dim) {
  double bytes = bytes_along(loop.store.view, loop.shape, dim);
  for (const Pointwise::Leaf& leaf : loop.leaves) {
    if (in_memory(leaf)) bytes += bytes_along(leaf.view, loop.shape, dim);
  }
  return bytes;
}

}  // namespace

Pointwise permuted(const Pointwise& loop, const std::vector<std::size_t>& order) {
  Pointwise out = loop;
  const auto move = [&](const std::vector<std::int64_t>& from, std::vector<std::int64_t>& to) {
    for (std::size_t i = 0; i < order.size(); ++i) to[i] = from[order[i]];
  };
  move(loop.shape, out.shape);
  for (std::size_t i = 0; i < loop.leaves.size(); ++i) {
    const Pointwise::Leaf& leaf = loop.leaves[i];
    if (leaf.kind == Pointwise::Leaf::Kind::iota) {
      const auto at = std::find(order.begin(), order.end(), static_cast<std::size_t>(leaf.dim));
      out.leaves[i].dim = static_cast<int>(at - order.begin());
    } else if (in_memory(leaf)) {
      move(leaf.view.strides, out.leaves[i].view.strides);
      out.leaves[i].view.shape = out.shape;
    }
  }
  move(loop.store.view.strides, out.store.view.strides);
  out.store.view.shape = out.shape;
  return out;
}

Pointwise reduction_in_memory_order(const Pointwise& loop) {
  const std::size_t rank = loop.shape.size(), reduced = static_cast<std::size_t>(loop.reduced);
  if (rank < 2 || reduced == rank) return loop;
  std::size_t best = rank - 1;
  double least = kGain * bytes_along(loop, best);
  for (std::size_t d = 0; d + 1 < rank; ++d) {
    const double bytes = loop.shape[d] >= kLeast ? bytes_along(loop, d) : least;
    if (bytes < least) {
      best = d;
      least = bytes;
    }
  }
  if (best == rank - 1) return loop;
  const auto is_reduced = [&](std::size_t d) {
    return loop.columns ? d < reduced : d >= rank - reduced;
  };
  std::vector<std::size_t> outer, inner;
  for (std::size_t d = 0; d < rank; ++d) {
    if (d != best) (is_reduced(d) == is_reduced(best) ? inner : outer).push_back(d);
  }
  inner.push_back(best);
  outer.insert(outer.end(), inner.begin(), inner.end());
  Pointwise out = permuted(loop, outer);
  out.columns = !is_reduced(best);
  return out;
}

MapOrder memory_order_of(const Pointwise& map) {
  const std::size_t rank = map.shape.size();
  MapOrder order;
  if (rank < 2) return order;
  order.inner = rank - 1;
  const auto whole = [&](const View& view, std::size_t d) {
    return map.shape[d] >= kLeast && view.strides[d] == 1;
  };
  if (std::abs(map.store.view.strides.back()) != 1) {
    for (std::size_t d = 0; d < rank; ++d) {
      if (whole(map.store.view, d)) order.inner = d;
    }
  }
  if (!whole(map.store.view, order.inner)) return order;
  double most = 0.0;
  for (std::size_t d = 0; d < rank; ++d) {
    if (d == order.inner) continue;
    std::vector<std::size_t> leaves;
    double bytes = 0.0;
    for (std::size_t i = 0; i < map.leaves.size(); ++i) {
      const View& view = map.leaves[i].view;
      if (!in_memory(map.leaves[i]) || !whole(view, d) || view.strides[order.inner] <= 1) continue;
      if (bytes_in(view, map.shape) <= kCached) continue;
      if (std::any_of(view.strides.begin(), view.strides.end(),
                      [](std::int64_t stride) { return stride < 0; }))
        continue;
      leaves.push_back(i);
      bytes += bytes_in(view, map.shape);
    }
    if (bytes <= most) continue;
    most = bytes;
    order.turned = d;
    order.leaves = std::move(leaves);
  }
  return order;
}

}  // namespace logitless::ir
