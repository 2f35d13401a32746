// TCP groups on this host, at free ports.
#pragma once

#include <chrono>
#include <cstddef>
#include <thread>
#include <vector>

#include "comm/ranks.h"
#include "comm/socket.h"

namespace logitless {

inline int free_port() { return Socket::listen(0).port(); }

// Each rank is made by its own thread.
inline Ranks make_tcp_group(int size, std::chrono::milliseconds limit = std::chrono::minutes(1)) {
  const int port = free_port();
  Ranks ranks(static_cast<std::size_t>(size));
  std::vector<std::thread> threads;
  for (int r = 0; r < size; ++r) {
    threads.emplace_back([&ranks, port, r, size, limit] {
      ranks[static_cast<std::size_t>(r)] = make_tcp("127.0.0.1", port, r, size, limit);
    });
  }
  for (std::thread& thread : threads) thread.join();
  return ranks;
}

// Makes calls of both kinds and many sizes; returns all that this rank received.
inline std::vector<std::byte> exchange_a_lot(Communicator& c) {
  std::vector<std::byte> got;
  const auto size = static_cast<std::size_t>(c.size());
  RandomDelays delay(c.rank(), static_cast<unsigned>(c.size()));
  for (const std::size_t bytes : {0UL, 1UL, 31UL, 32UL, 33UL, 4096UL, 300007UL}) {
    for (std::size_t call = 0; call < 4; ++call) {
      std::vector<std::byte> mine(call % 2 == 0 ? bytes : bytes * size), all(bytes * size);
      for (std::size_t i = 0; i < mine.size(); ++i)
        mine[i] = static_cast<std::byte>(i * 7 + call + 31 * static_cast<std::size_t>(c.rank()));
      delay();
      if (call % 2 == 0) {
        c.all_gather(mine.data(), all.data(), bytes, nullptr);
      } else {
        c.all_to_all(mine.data(), all.data(), bytes, nullptr);
      }
      got.insert(got.end(), all.begin(), all.end());
    }
  }
  return got;
}

// Returns the same for all ranks of a group of threads.
inline std::vector<std::vector<std::byte>> exchanged_by_threads(int size) {
  std::vector<std::vector<std::byte>> got(static_cast<std::size_t>(size));
  run_ranks(make_thread_group(size),
            [&](Communicator& c) { got[static_cast<std::size_t>(c.rank())] = exchange_a_lot(c); });
  return got;
}

}  // namespace logitless
