// Plans as text.
#pragma once

#include <cstddef>
#include <cstdio>
#include <string>

#include "kernels/cpu_head.h"
#include "logitless/plan.h"

namespace logitless {

inline std::string seconds_text(double seconds) {
  char text[32];
  if (seconds >= 1.0) {
    std::snprintf(text, sizeof(text), "%.2f s", seconds);
  } else {
    std::snprintf(text, sizeof(text), "%.2f ms", seconds * 1e3);
  }
  return text;
}

// --- contents.cpp: the large parts of a workspace

// Returns text such as `exp(z) of 1024 tokens x 40000 vocabulary entries in 16 bits, 79.0 MiB; what
// bf16 leaves of the sums of d_weight, 58.6 MiB; the rest, chunks and vocabulary blocks, 8.1 MiB`.
// `total` is the bytes of the workspace on the CPU.
std::string describe_contents(const HeadKernel& kernel, const HeadShape& shape,
                              const HeadFeatures& features, const ChunkSizes& sizes,
                              std::size_t total);

}  // namespace logitless
