// Chunk sizes of one kind of plan on a CPU kernel, and what they cost.
#pragma once

#include <cstddef>
#include <cstdint>

#include "kernels/kernels.h"
#include "logitless/plan.h"

namespace logitless {

// Chunk sizes with the workspace they take. What is not about fitting is decided by what they would
// take for one thread, so that chunks, and with them the bits of sums, do not depend on how many
// threads there are.
struct Sized {
  ChunkSizes sizes;
  std::size_t bytes = 0;  // 0: none
  std::size_t alone = 0;  // for one thread
};

// What a search is for. tau, sample_every, audited and audit_bytes are of the far field: tokens
// audited, and the workspace of the plan that audits them, which comes after everything else.
struct SearchProblem {
  const HeadKernel* kernel = nullptr;
  HeadShape shape;
  HeadFeatures features;
  int threads = 1;
  double stored_fraction = 0.0;  // of the stored kind; 0: as much as fits
  float tau = 0.0f;
  std::int64_t sample_every = 0;
  std::int64_t audited = 0;
  std::size_t audit_bytes = 0;
};

class PlanSearch {
 public:
  explicit PlanSearch(const SearchProblem& problem) : p_(problem) {}

  // Of the sizes that fit into the budget, among those about as fast as the fastest (1 %) the ones
  // that take least (of the stored kind and the far field: the fastest); where none fit, the ones
  // that take least.
  Sized best(PlanKind kind, std::size_t budget) const;

  // Passes over tokens * vocab * dim multiply-adds.
  double passes(PlanKind kind, const ChunkSizes& sizes) const;
  // At the kernel's nominal rate.
  double seconds(PlanKind kind, const ChunkSizes& sizes) const;
  // Whether exp(z) of the whole vocabulary is kept.
  bool stores_all(const ChunkSizes& sizes) const;

 private:
  Sized sized(PlanKind kind, std::int64_t tokens, std::int64_t slab, std::int64_t stored) const;
  Sized sized(PlanKind kind, std::int64_t tokens, std::int64_t slab) const;
  Sized largest(PlanKind kind, std::int64_t slab, std::size_t budget) const;
  Sized with_stored(std::int64_t tokens, std::int64_t slab, std::size_t budget) const;
  Sized fastest(PlanKind kind, std::size_t budget) const;
  Sized leanest(PlanKind kind, const Sized& fastest, std::size_t budget) const;

  SearchProblem p_;
};

}  // namespace logitless
