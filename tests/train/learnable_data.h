// Training data from which a model can learn.
#pragma once

#include <cstdint>
#include <vector>

#include "train/data/dataset.h"
#include "train/hash.h"

namespace logitless::train {

inline constexpr std::int64_t kVocabCount = 600, kWindow = 16;

// Makes data in which a token mostly determines the next one.
inline Dataset learnable_data(std::int64_t windows, std::uint64_t seed) {
  std::vector<std::int32_t> vocab_ids = {0};
  while (std::ssize(vocab_ids) < windows * kWindow + 1) {
    const auto i = static_cast<std::uint64_t>(vocab_ids.size());
    vocab_ids.push_back(uniform(seed, i) < 0.8
                            ? (vocab_ids.back() * 7 + 3) % 50
                            : static_cast<std::int32_t>(mix(seed, i) % kVocabCount));
  }
  return Dataset::of_tokens(vocab_ids, kWindow, kVocabCount);
}

}  // namespace logitless::train
