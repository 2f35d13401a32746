// Times exchanges between the GPUs of one host by NCCL's kernels, with a thread for each GPU.
// Prints lines of JSON: microseconds of the slowest rank's median, "us" in a captured graph and
// "us_enqueued" call by call; GB/s received by each GPU in a graph; device memory of NCCL. NVLink's
// multicast stays off.
//
//   bench_links [RANKS [TOKENS DIM]]   default: all GPUs, 8192 tokens of 4096
#include <algorithm>
#include <barrier>
#include <cstdio>
#include <cstdlib>
#include <exception>
#include <functional>
#include <nlohmann/json.hpp>
#include <string>
#include <thread>
#include <vector>

#include "kernels/device/head.h"
#include "kernels/device/stream.h"
#include "logitless/communicator.h"
#include "logitless/device.h"

namespace logitless::bench {
namespace {

constexpr int kRounds = 15, kCalls = 10;

struct Case {
  std::string name;
  bool to_all;
  std::size_t bytes_each;
};

// Returns the median microseconds of a call; launch() enqueues kCalls of them.
double median_us(const DeviceStream& stream, std::barrier<>& together,
                 const std::function<void()>& launch) {
  cuda::Timer timer;
  std::vector<double> times;
  for (int round = -3; round < kRounds; ++round) {
    together.arrive_and_wait();
    timer.start(stream.handle());
    launch();
    const double us = 1000.0 * static_cast<double>(timer.stop(stream.handle())) / kCalls;
    if (round >= 0) times.push_back(us);
  }
  std::nth_element(times.begin(), times.begin() + kRounds / 2, times.end());
  return times[kRounds / 2];
}

struct Times {
  double captured = 0.0, enqueued = 0.0;  // microseconds
};

Times time_calls(const DeviceStream& stream, std::barrier<>& together,
                 const std::function<void()>& call) {
  const auto calls = [&] {
    for (int i = 0; i < kCalls; ++i) call();
  };
  Times times;
  times.enqueued = median_us(stream, together, calls);
  const DeviceGraph graph = stream.capture(calls);
  times.captured = median_us(stream, together, [&] { stream.launch(graph); });
  return times;
}

void run(int ranks, std::size_t tokens, std::size_t dim) {
  const auto size = static_cast<std::size_t>(ranks);
  const std::vector<Case> cases = {
      {"all_gather of bf16 hidden", false, tokens / size * dim * 2},
      {"all_to_all of fp32 d_hidden", true, tokens / size * dim * 4},
      {"all_gather of 8 bytes a token", false, tokens * 8},
      {"all_gather of 24 bytes a token", false, tokens * 24},
      {"all_gather of 64 bytes", false, 64},
  };
  for (const int max_ctas : {0, 4, 8, 16}) {
    const NcclId id = make_nccl_id();
    std::vector<std::vector<Times>> times(cases.size(), std::vector<Times>(size));
    std::barrier<> together(ranks);
    std::size_t group_bytes = 0;  // device memory that NCCL holds after all cases
    const auto time_rank = [&](int rank) {
      cuda::set_current_device(rank);
      ContextOptions on_gpu;
      on_gpu.device = DeviceKind::cuda;
      on_gpu.device_index = rank;
      const Context context(on_gpu);
      const DeviceStream stream(context);
      const std::size_t free = device_status(context).free_bytes;
      NcclOptions options;
      options.max_ctas = max_ctas;
      const auto group = make_nccl(id, rank, ranks, options);
      std::size_t most = 0;
      for (const Case& c : cases) most = std::max(most, c.bytes_each);
      const DeviceBuffer from(context, most * size), to(context, most * size);
      const std::size_t held = from.bytes() + to.bytes();
      stream.fill(from.data(), 1, from.bytes());
      for (std::size_t i = 0; i < cases.size(); ++i) {
        times[i][static_cast<std::size_t>(rank)] = time_calls(stream, together, [&] {
          if (cases[i].to_all) {
            group->all_to_all(from.data(), to.data(), cases[i].bytes_each, stream.handle());
          } else {
            group->all_gather(from.data(), to.data(), cases[i].bytes_each, stream.handle());
          }
        });
      }
      if (rank == 0) group_bytes = free - device_status(context).free_bytes - held;
    };
    std::vector<std::thread> threads;
    for (int rank = 0; rank < ranks; ++rank) {
      threads.emplace_back([&, rank] {
        try {
          time_rank(rank);
        } catch (const std::exception& e) {
          // The other ranks wait for this one.
          std::fprintf(stderr, "bench_links: rank %d: %s\n", rank, e.what());
          std::_Exit(1);
        }
      });
    }
    for (std::thread& thread : threads) thread.join();
    for (std::size_t i = 0; i < cases.size(); ++i) {
      Times slowest;
      for (const Times& t : times[i]) {
        slowest.captured = std::max(slowest.captured, t.captured);
        slowest.enqueued = std::max(slowest.enqueued, t.enqueued);
      }
      const double received = static_cast<double>(cases[i].bytes_each * (size - 1));
      std::puts(nlohmann::ordered_json{{"exchange", cases[i].name},
                                       {"ranks", ranks},
                                       {"max_ctas", max_ctas},
                                       {"bytes_each", cases[i].bytes_each},
                                       {"us", slowest.captured},
                                       {"us_enqueued", slowest.enqueued},
                                       {"gb_per_s", received / slowest.captured / 1000.0},
                                       {"group_bytes", group_bytes}}
                    .dump()
                    .c_str());
    }
  }
}

}  // namespace
}  // namespace logitless::bench

int main(int argc, char** argv) {
  setenv("NCCL_NVLS_ENABLE", "0", 1);
  try {
    const auto argument = [&](int index, long otherwise) {
      return argc > index ? std::strtol(argv[index], nullptr, 10) : otherwise;
    };
    const long gpus = logitless::cuda::device_count();
    const long ranks = argument(1, gpus);
    const long tokens = argument(2, 8192), dim = argument(3, 4096);
    if (ranks < 2 || ranks > gpus || tokens < ranks || dim < 1) {
      std::fprintf(stderr, "usage: bench_links [RANKS [TOKENS DIM]], RANKS in [2, %ld]\n", gpus);
      return 2;
    }
    logitless::bench::run(static_cast<int>(ranks), static_cast<std::size_t>(tokens),
                          static_cast<std::size_t>(dim));
  } catch (const std::exception& e) {
    std::fprintf(stderr, "bench_links: %s\n", e.what());
    return 1;
  }
}
