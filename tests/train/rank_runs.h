// Runs trainers that share their steps, as threads on the CPU, and collects their results.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <functional>
#include <memory>
#include <vector>

#include "comm/ranks.h"
#include "train/run/trainer.h"

namespace logitless::train {

// The results of a run of some steps.
struct Left {
  std::vector<double> losses, norms;
  std::vector<float> values;
  double validation = 0.0;

  bool operator==(const Left&) const = default;
};

inline Left run(Trainer& trainer, int steps) {
  Left left;
  for (int i = 0; i < steps; ++i) {
    const StepResult result = trainer.step();
    left.losses.push_back(result.loss);
    left.norms.push_back(result.norm);
  }
  left.validation = trainer.validate(5);
  const TensorSet& values = trainer.values();
  for (std::size_t t = 0; t < values.size(); ++t)
    left.values.insert(left.values.end(), values[t].begin(), values[t].end());
  return left;
}

inline double furthest(const std::vector<float>& a, const std::vector<float>& b) {
  double worst = 0.0;
  for (std::size_t i = 0; i < b.size(); ++i)
    worst = std::max(worst, std::abs(static_cast<double>(a[i]) - static_cast<double>(b[i])));
  return worst;
}

// Expects the same training but for the order of sums.
inline void expect_close(const Left& left, const Left& expected) {
  for (std::size_t step = 0; step < expected.losses.size(); ++step) {
    EXPECT_NEAR(left.losses[step], expected.losses[step], 2e-5) << step;
    EXPECT_NEAR(left.norms[step] / expected.norms[step], 1.0, 1e-4) << step;
  }
  EXPECT_NEAR(left.validation, expected.validation, 2e-5);
  // Adam's first steps have the length of the rate, in a direction that depends on rounding.
  EXPECT_LT(furthest(left.values, expected.values), 2e-3);
}

using MakeTrainer = std::function<std::unique_ptr<Trainer>(const TrainOptions&)>;

// Runs act(trainer) on each rank and returns the outcomes; an exception of `act` aborts the group.
template <typename Act>
std::vector<Outcome> on_ranks(int ranks, const TrainOptions& o, const MakeTrainer& make,
                              const Act& act) {
  const Ranks group = make_thread_group(ranks, std::chrono::seconds(60));
  return run_ranks(group, [&](Communicator& self) {
    const auto rank = static_cast<std::size_t>(self.rank());
    try {
      TrainOptions with = o;
      with.ranks = group[rank];
      const std::unique_ptr<Trainer> trainer = make(with);
      act(*trainer);
    } catch (const std::exception& error) {
      self.abort(error.what());
      throw;
    }
  });
}

inline std::vector<Left> left_by(int ranks, const TrainOptions& o, const MakeTrainer& make,
                                 int steps) {
  std::vector<Left> left(static_cast<std::size_t>(ranks));
  for (const Outcome& outcome : on_ranks(ranks, o, make, [&](Trainer& trainer) {
         left[static_cast<std::size_t>(trainer.rank())] = run(trainer, steps);
       }))
    EXPECT_EQ(outcome.text, "");
  return left;
}

}  // namespace logitless::train
