// One thread for each rank of a group, and their exceptions.
#pragma once

#include <chrono>
#include <cstdint>
#include <exception>
#include <functional>
#include <memory>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "logitless/communicator.h"
#include "logitless/error.h"

namespace logitless {

struct Outcome {
  std::string kind;  // "" if nothing was thrown
  std::string text;

  bool operator==(const Outcome&) const = default;
};

inline Outcome outcome_of(const std::function<void()>& body) {
  try {
    body();
    return {};
  } catch (const InvalidArgument& e) {
    return {"InvalidArgument", e.what()};
  } catch (const Unsupported& e) {
    return {"Unsupported", e.what()};
  } catch (const DeviceError& e) {
    return {"DeviceError", e.what()};
  } catch (const std::exception& e) {
    return {"exception", e.what()};
  }
}

using Ranks = std::vector<std::shared_ptr<Communicator>>;

inline std::vector<Outcome> run_ranks(const Ranks& ranks,
                                      const std::function<void(Communicator&)>& body) {
  std::vector<Outcome> outcomes(ranks.size());
  std::vector<std::thread> threads;
  for (std::size_t r = 0; r < ranks.size(); ++r) {
    threads.emplace_back([&, r] { outcomes[r] = outcome_of([&] { body(*ranks[r]); }); });
  }
  for (std::thread& thread : threads) thread.join();
  return outcomes;
}

// Sleeps for up to a millisecond, or not at all: other ranks come first, or last.
class RandomDelays {
 public:
  RandomDelays(int rank, unsigned seed) : random_(seed * 1000 + static_cast<unsigned>(rank)) {}
  void operator()() {
    if (const unsigned us = random_() % 2000; us < 1000)
      std::this_thread::sleep_for(std::chrono::microseconds(us));
  }

 private:
  std::minstd_rand random_;
};

}  // namespace logitless
