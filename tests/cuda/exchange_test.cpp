// Groups of GPUs over NCCL: one process with a thread for each GPU, and two processes. Needs two
// GPUs and libnccl.so.2; skips without.
#include <cuda_runtime_api.h>
#include <dlfcn.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <spawn.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <barrier>
#include <chrono>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "comm/digest.h"
#include "comm/ranks.h"
#include "core/check.h"
#include "logitless/communicator.h"
#include "logitless/device.h"

namespace logitless {
namespace {

using std::chrono::milliseconds;

// Disables NVLink multicast before NCCL is loaded.
[[maybe_unused]] const int kNoMulticast = setenv("NCCL_NVLS_ENABLE", "0", 1);

// A rank: its GPU, a stream, and its end of the group.
struct Gpu {
  Context context;
  DeviceStream stream;
  std::shared_ptr<Communicator> group;

  explicit Gpu(int index) : context(options(index)), stream(context) {}
  static ContextOptions options(int index) {
    EXPECT_EQ(cudaSetDevice(index), cudaSuccess);
    ContextOptions options;
    options.device = DeviceKind::cuda;
    options.device_index = index;
    return options;
  }
  void* queue() const { return stream.handle(); }
};

class Exchange : public testing::Test {
 protected:
  void SetUp() override {
    const std::string missing = nccl_missing();
    if (!missing.empty()) GTEST_SKIP() << missing;
    int gpus = 0;
    if (cudaGetDeviceCount(&gpus) != cudaSuccess || gpus < 2) GTEST_SKIP() << "two GPUs are needed";
    ranks_ = std::min(gpus, 4);
  }
  // Runs body(gpu) in a thread for each rank, and returns what each threw.
  std::vector<Outcome> run(const std::function<void(Gpu&)>& body, const NcclOptions& options = {}) {
    const NcclId id = make_nccl_id();
    std::vector<Outcome> outcomes(static_cast<std::size_t>(ranks_));
    std::vector<std::thread> threads;
    for (int rank = 0; rank < ranks_; ++rank) {
      threads.emplace_back([&, rank] {
        outcomes[static_cast<std::size_t>(rank)] = outcome_of([&] {
          Gpu gpu(rank);
          gpu.group = make_nccl(id, rank, ranks_, options);
          body(gpu);
        });
      });
    }
    for (std::thread& thread : threads) thread.join();
    return outcomes;
  }
  std::vector<Outcome> fine() const {
    return std::vector<Outcome>(static_cast<std::size_t>(ranks_));
  }

  int ranks_ = 0;
};

// Byte i of the data that rank `from` sends to `to`.
unsigned char byte_of(std::size_t i, int from, int to) {
  return static_cast<unsigned char>(i * 7 + static_cast<std::size_t>(from) * 31 +
                                    static_cast<std::size_t>(to) * 101);
}

// Buffers of an exchange: of the GPU's own memory, or a part of `shared`.
struct Places {
  Places(Gpu& gpu, std::size_t bytes, void* shared) {
    const auto ranks = static_cast<std::size_t>(gpu.group->size());
    const std::size_t block = (bytes * ranks + 255) / 256 * 256;
    if (shared == nullptr) own = DeviceBuffer(gpu.context, 4 * block);
    auto* const base = static_cast<std::byte*>(shared == nullptr ? own.data() : shared);
    for (std::byte** place : {&mine, &all, &slices, &of_all})
      *place = base + block * static_cast<std::size_t>(used++);
  }
  DeviceBuffer own;
  std::byte *mine, *all, *slices, *of_all;
  int used = 0;
};

// One all_gather and one all_to_all, in flight together, compared byte for byte. With a graph:
// replayed three times with different bytes.
void expect_exchanges(Gpu& gpu, std::size_t bytes, bool graph, void* shared = nullptr) {
  const int size = gpu.group->size(), rank = gpu.group->rank();
  const auto ranks = static_cast<std::size_t>(size);
  const Places at(gpu, bytes, shared);
  const auto exchange = [&] {
    gpu.group->begin_group();
    gpu.group->all_gather(at.mine, at.all, bytes, gpu.queue());
    gpu.group->all_to_all(at.slices, at.of_all, bytes, gpu.queue());
    gpu.group->end_group();
  };
  DeviceGraph captured;
  if (graph) captured = gpu.stream.capture(exchange);
  for (int repeat = 0; repeat < (graph ? 3 : 1); ++repeat) {
    std::vector<unsigned char> given(bytes * (ranks + 1)), gathered(bytes * ranks), expected;
    const int turn = 17 * repeat;
    for (std::size_t r = 0; r <= ranks; ++r) {
      for (std::size_t i = 0; i < bytes; ++i)
        given[r * bytes + i] = byte_of(i, rank + turn, r == ranks ? -1 : static_cast<int>(r));
    }
    if (bytes > 0) {
      gpu.stream.copy(at.slices, given.data(), bytes * ranks);
      gpu.stream.copy(at.mine, given.data() + bytes * ranks, bytes);
      gpu.stream.fill(at.all, 0, bytes * ranks);
      gpu.stream.fill(at.of_all, 0, bytes * ranks);
    }
    if (graph) {
      gpu.stream.launch(captured);
    } else {
      exchange();
    }
    gpu.group->wait(gpu.queue(), milliseconds(20000));
    if (bytes == 0) continue;
    for (const bool to_all : {false, true}) {
      gpu.stream.copy(gathered.data(), to_all ? at.of_all : at.all, bytes * ranks);
      gpu.stream.wait();
      expected.clear();
      for (int r = 0; r < size; ++r) {
        for (std::size_t i = 0; i < bytes; ++i)
          expected.push_back(byte_of(i, r + turn, to_all ? rank : -1));
      }
      EXPECT_TRUE(gathered == expected) << bytes << " bytes, all_to_all " << to_all;
    }
  }
}

TEST_F(Exchange, MovesBytes) {
  for (const int max_ctas : {0, 2}) {
    NcclOptions options;
    options.max_ctas = max_ctas;
    const auto outcomes = run(
        [&](Gpu& gpu) {
          EXPECT_EQ(gpu.group->device(), DeviceKind::cuda);
          EXPECT_TRUE(gpu.group->capturable());
          for (const std::size_t bytes : {0, 1, 24, 4096, 1000003})
            expect_exchanges(gpu, bytes, false);
        },
        options);
    EXPECT_EQ(outcomes, fine());
  }
}

// Exchanges by copy engines, where the GPUs reach each other's memory.
TEST_F(Exchange, IntoTheGroupsMemory) {
  std::atomic<int> without = 0;
  const auto outcomes = run([&](Gpu& gpu) {
    constexpr std::size_t kBytes = std::size_t{1} << 20;
    void* const memory = gpu.group->exchange_memory(20 * kBytes);
    if (memory == nullptr) {
      ++without;
      return;
    }
    EXPECT_EQ(gpu.group->exchange_memory(kBytes), memory)
        << "one memory for all that it is enough for";
    for (const std::size_t bytes : {std::size_t{256}, kBytes, kBytes + 24})
      for (const bool graph : {false, true}) expect_exchanges(gpu, bytes, graph, memory);
    expect_exchanges(gpu, 24, false);
    void* const more = gpu.group->exchange_memory(100 * kBytes);
    EXPECT_NE(more, memory);
    expect_exchanges(gpu, kBytes, false, more);
    expect_exchanges(gpu, kBytes, false, memory);
    // Exchanges in place, and from memory that does not belong to the group.
    const auto rank = static_cast<std::size_t>(gpu.group->rank());
    const std::vector<char> given(kBytes, static_cast<char>('a' + rank));
    std::vector<char> got(kBytes);
    const DeviceBuffer own(gpu.context, kBytes);
    auto* const all = static_cast<char*>(memory);
    for (char* const mine : {own.as<char>(0), all + rank * kBytes}) {
      gpu.stream.fill(memory, 0, kBytes * static_cast<std::size_t>(gpu.group->size()));
      gpu.stream.copy(mine, given.data(), kBytes);
      gpu.group->all_gather(mine, all, kBytes, gpu.queue());
      for (std::size_t r = 0; r < static_cast<std::size_t>(gpu.group->size()); ++r) {
        gpu.stream.copy(got.data(), all + r * kBytes, kBytes);
        gpu.stream.wait();
        EXPECT_EQ(got, std::vector<char>(kBytes, static_cast<char>('a' + r)));
      }
    }
  });
  EXPECT_EQ(outcomes, fine());
  if (without > 0) GTEST_SKIP() << "the GPUs do not reach each other's memory";
}

// An exchange that waits for a missing rank is released, and the group still shuts down cleanly.
TEST_F(Exchange, ARankThatDoesNotCopyIsMissed) {
  std::atomic<int> failed{0}, without{0};
  const auto outcomes = run([&](Gpu& gpu) {
    constexpr std::size_t kBytes = std::size_t{1} << 20;
    auto* const all = static_cast<char*>(gpu.group->exchange_memory(8 * kBytes));
    if (all == nullptr) {
      ++without;
      return;
    }
    gpu.group->all_gather(all + 4 * kBytes, all, kBytes, gpu.queue());
    gpu.group->wait(gpu.queue(), milliseconds(20000));
    const int others = gpu.group->size() - 1;
    if (gpu.group->rank() == 0) {
      while (failed != others) std::this_thread::yield();
      return;
    }
    const Outcome outcome = outcome_of([&] {
      gpu.group->all_gather(all + 4 * kBytes, all, kBytes, gpu.queue());
      gpu.group->all_gather(all + 4 * kBytes, all, kBytes, gpu.queue());
      gpu.group->wait(gpu.queue(), milliseconds(300));
    });
    EXPECT_EQ(outcome.kind, "DeviceError");
    EXPECT_NE(outcome.text.find("not done within 300 ms; rank 0 has made "), std::string::npos)
        << outcome.text;
    gpu.stream.wait();
    ++failed;
  });
  EXPECT_EQ(outcomes, fine());
  if (without > 0) GTEST_SKIP() << "the GPUs do not reach each other's memory";
  EXPECT_EQ(run([](Gpu& gpu) { expect_exchanges(gpu, 1000, false); }), fine());
}

TEST_F(Exchange, HostsSynchronize) {
  NcclOptions options;
  options.copy_engines = false;
  const auto body = [&](Gpu& gpu) {
    EXPECT_EQ(gpu.group->exchange_memory(4096), nullptr) << "nobody asked for copy engines";
    const int rank = gpu.group->rank(), size = gpu.group->size();
    for (const std::size_t count : {1, 64, 1024, 3000}) {
      const std::vector<int> mine(count, 100 * rank + static_cast<int>(count));
      std::vector<int> all(count * static_cast<std::size_t>(size));
      gpu.group->all_gather_host(mine.data(), all.data(), count * sizeof(int));
      for (std::size_t i = 0; i < all.size(); ++i)
        ASSERT_EQ(all[i], 100 * static_cast<int>(i / count) + static_cast<int>(count));
    }
  };
  EXPECT_EQ(run(body, options), fine());
}

TEST_F(Exchange, IsCaptured) {
  const auto outcomes = run([](Gpu& gpu) {
    expect_exchanges(gpu, 1000, true);  // the group's first call of this kind
    expect_exchanges(gpu, 500000, false);
    expect_exchanges(gpu, 500000, true);
  });
  EXPECT_EQ(outcomes, fine());
}

TEST_F(Exchange, RanksAgree) {
  const auto outcomes = run([&](Gpu& gpu) {
    const int rank = gpu.group->rank(), size = gpu.group->size();
    const auto add_run = [&](PlanDigest& digest) {
      const VocabRun run{rank * 10, rank * 10 + 10};
      digest.add_vocab(10 * size, {&run, 1});
    };
    EXPECT_NE(agree(*gpu.group, add_run).plan, 0u);
    EXPECT_EQ(outcome_of([&] {
                agree(*gpu.group,
                      [&](PlanDigest& digest) { digest.same("dim", rank == 1 ? 4096 : 4100); });
              }),
              (Outcome{"InvalidArgument", "rank 1: dim 4096, rank 0: 4100"}));
    EXPECT_EQ(outcome_of([&] {
                agree(*gpu.group, [&](PlanDigest&) {
                  if (rank == 1) throw Unsupported("no plan");
                });
              }),
              (Outcome{"Unsupported", "rank 1: no plan"}));
    expect_exchanges(gpu, 100, false);
  });
  EXPECT_EQ(outcomes, fine());
}

TEST_F(Exchange, TwoGroupsOfTheSameRanks) {
  const NcclId id = make_nccl_id();
  const auto outcomes = run([&](Gpu& gpu) {
    Gpu other(gpu.group->rank());
    other.group = make_nccl(id, gpu.group->rank(), gpu.group->size());
    for (int repeat = 0; repeat < 5; ++repeat) {
      expect_exchanges(gpu, 100000, repeat % 2 == 1);
      expect_exchanges(other, 70000, repeat % 2 == 1);
    }
  });
  EXPECT_EQ(outcomes, fine());
}

TEST_F(Exchange, ARankThatDoesNotArriveIsMissed) {
  std::atomic<int> failed{0};
  const auto outcomes = run([&](Gpu& gpu) {
    expect_exchanges(gpu, 1000, false);  // two calls
    const int others = gpu.group->size() - 1;
    if (gpu.group->rank() == 0) {
      while (failed != others) std::this_thread::yield();
      return;
    }
    const DeviceBuffer memory(gpu.context, 4096);
    const Outcome outcome = outcome_of([&] {
      gpu.group->all_gather(memory.data(), memory.as<char>(1024), 8, gpu.queue());
      gpu.group->wait(gpu.queue(), milliseconds(300));
    });
    EXPECT_EQ(outcome.kind, "DeviceError");
    EXPECT_NE(outcome.text.find("wait after call 3 (all_gather of 8 bytes)"), std::string::npos)
        << outcome.text;
    EXPECT_NE(outcome.text.find("not done within 300 ms; rank 0 has made 2 calls"),
              std::string::npos)
        << outcome.text;
    // Calls from here on fail at once, and the stream is idle again.
    const auto call = [&] {
      gpu.group->all_to_all(memory.data(), memory.as<char>(2048), 8, gpu.queue());
    };
    EXPECT_EQ(outcome_of(call), outcome);
    EXPECT_EQ(outcome_of([&] { gpu.group->wait(gpu.queue(), milliseconds(1)); }), outcome);
    gpu.stream.wait();
    ++failed;
  });
  EXPECT_EQ(outcomes, fine());
  // Another group of the same GPUs works.
  EXPECT_EQ(run([](Gpu& gpu) { expect_exchanges(gpu, 1000, false); }), fine());
}

TEST_F(Exchange, ARankThatNeverComesIsMissed) {
  NcclOptions options;
  options.limit = milliseconds(2000);
  const NcclId id = make_nccl_id();
  const Outcome outcome = outcome_of([&] {
    Gpu gpu(0);
    make_nccl(id, 0, 2, options);
  });
  EXPECT_EQ(outcome,
            (Outcome{"DeviceError",
                     "communicator: rank 0 of 2: creation of the group: not done within 2000 ms; "
                     "other ranks have not arrived"}));
}

TEST_F(Exchange, AbortEndsACallInFlight) {
  const auto outcomes = run([](Gpu& gpu) {
    expect_exchanges(gpu, 1000, false);
    if (gpu.group->rank() == 0) return gpu.group->abort("out of memory");
    const DeviceBuffer memory(gpu.context, 4096);
    std::thread aborts([&] {
      std::this_thread::sleep_for(milliseconds(100));
      gpu.group->abort("stopped");
    });
    const Outcome outcome = outcome_of([&] {
      gpu.group->all_gather(memory.data(), memory.as<char>(1024), 8, gpu.queue());
      gpu.group->wait(gpu.queue(), std::chrono::hours(1));
    });
    aborts.join();
    EXPECT_EQ(outcome.kind, "DeviceError");
    gpu.stream.wait();
  });
  EXPECT_EQ(outcomes, fine());
}

TEST_F(Exchange, ARankMayEndFirst) {
  std::atomic<bool> ended{false};
  const auto outcomes = run([&](Gpu& gpu) {
    expect_exchanges(gpu, 1000, false);
    if (gpu.group->rank() == 1) {
      gpu.group.reset();
      ended = true;
    }
    while (!ended) std::this_thread::yield();
  });
  EXPECT_EQ(outcomes, fine());
}

TEST_F(Exchange, SplitsACommunicatorOfOthers) {
  // The caller's own communicator, made with NCCL's simplest call.
  void* const library = dlopen("libnccl.so.2", RTLD_NOW | RTLD_LOCAL);
  ASSERT_NE(library, nullptr);
  int (*make)(void**, int, NcclId, int) = nullptr;
  int (*destroy)(void*) = nullptr;
  void* const found[] = {dlsym(library, "ncclCommInitRank"), dlsym(library, "ncclCommDestroy")};
  std::memcpy(&make, &found[0], sizeof(make));
  std::memcpy(&destroy, &found[1], sizeof(destroy));
  const NcclId id = make_nccl_id();
  // The last thread to end a group frees memory of all GPUs, which waits for all work there:
  // nothing may run.
  std::barrier<> together(ranks_);
  const auto outcomes = run([&](Gpu& gpu) {
    const int rank = gpu.group->rank(), size = gpu.group->size();
    void* theirs = nullptr;
    ASSERT_EQ(make(&theirs, size, id, rank), 0);
    NcclOptions options;
    options.max_ctas = 4;
    options.limit = milliseconds(5000);
    Gpu split(rank);
    split.group = borrow_nccl(theirs, options);
    EXPECT_EQ(split.group->rank(), rank);
    EXPECT_EQ(split.group->size(), size);
    expect_exchanges(split, 12345, false);
    together.arrive_and_wait();
    EXPECT_EQ(destroy(theirs), 0);  // ours is separate
    together.arrive_and_wait();
    expect_exchanges(split, 12345, true);
    expect_exchanges(gpu, 12345, false);
    together.arrive_and_wait();
  });
  EXPECT_EQ(outcomes, fine());
}

TEST_F(Exchange, NamesTheWrongGpu) {
  const auto outcomes = run([&](Gpu& gpu) {
    const int rank = gpu.group->rank();
    const int other = (rank + 1) % gpu.group->size();
    ASSERT_EQ(cudaSetDevice(other), cudaSuccess);
    EXPECT_EQ(outcome_of([&] { gpu.group->all_gather(nullptr, nullptr, 0, gpu.queue()); }),
              (Outcome{"InvalidArgument", "communicator: of GPU " + std::to_string(rank) +
                                              ", but the thread's current one is " +
                                              std::to_string(other)}));
    ASSERT_EQ(cudaSetDevice(rank), cudaSuccess);
    expect_exchanges(gpu, 8, false);
  });
  EXPECT_EQ(outcomes, fine());
}

constexpr const char* kChildId = "LOGITLESS_EXCHANGE_TEST_ID";
constexpr const char* kWatch = "LOGITLESS_EXCHANGE_TEST_WATCH";

constexpr std::size_t kCopied = std::size_t{1} << 20;  // bytes of copies by copy engines

// Rank 1 of the test below in its own process: waits to be killed.
TEST_F(Exchange, Child) {
  const char* const hex = std::getenv(kChildId);
  if (hex == nullptr) GTEST_SKIP() << "a part of AProcessThatIsKilledIsMissed";
  NcclId id;
  for (std::size_t i = 0; i < id.size(); ++i)
    id[i] = static_cast<std::byte>(std::stoi(std::string(hex + 2 * i, 2), nullptr, 16));
  Gpu gpu(1);
  NcclOptions options;
  options.watch = std::getenv(kWatch) != nullptr;
  gpu.group = make_nccl(id, 1, 2, options);
  expect_exchanges(gpu, 1000, false);
  gpu.group->exchange_memory(2 * kCopied);
  pause();
}

// Rank 0's end of a group whose rank 1 was killed: gather(bytes) enqueues an exchange that waits
// for it.
void with_a_killed_rank(
    const NcclOptions& options,
    const std::function<void(Gpu&, const std::function<void(std::size_t)>&)>& body) {
  const NcclId id = make_nccl_id();
  std::string hex;
  for (const std::byte b : id) {
    hex += "0123456789abcdef"[std::to_integer<int>(b) >> 4];
    hex += "0123456789abcdef"[std::to_integer<int>(b) & 15];
  }
  ASSERT_EQ(setenv(kChildId, hex.c_str(), 1), 0);
  ASSERT_EQ(options.watch ? setenv(kWatch, "1", 1) : unsetenv(kWatch), 0);
  std::string program = "/proc/self/exe", filter = "--gtest_filter=Exchange.Child";
  char* arguments[] = {program.data(), filter.data(), nullptr};
  pid_t child = 0;
  ASSERT_EQ(posix_spawn(&child, program.c_str(), nullptr, nullptr, arguments, environ), 0);

  Gpu gpu(0);
  gpu.group = make_nccl(id, 0, 2, options);
  expect_exchanges(gpu, 1000, false);
  const DeviceBuffer memory(gpu.context, 3 * kCopied);
  void* const shared = gpu.group->exchange_memory(2 * kCopied);
  void* const all = shared == nullptr ? memory.as<char>(kCopied) : shared;
  ASSERT_EQ(kill(child, SIGKILL), 0);
  ASSERT_EQ(waitpid(child, nullptr, 0), child);
  body(gpu,
       [&](std::size_t bytes) { gpu.group->all_gather(memory.data(), all, bytes, gpu.queue()); });
}

TEST_F(Exchange, AProcessThatIsKilledIsMissed) {
  for (const std::size_t bytes : {std::size_t{8}, kCopied}) {
    with_a_killed_rank({}, [&](Gpu& gpu, const auto& gather) {
      const Outcome outcome = outcome_of([&] {
        gather(bytes);
        gpu.group->wait(gpu.queue(), milliseconds(1000));
      });
      EXPECT_EQ(outcome.kind, "DeviceError");
      EXPECT_NE(outcome.text.find(concat("(all_gather of ", bytes, " bytes)")), std::string::npos)
          << outcome.text;
      // NCCL may notice the closed connection first.
      if (outcome.text.find("not done within") != std::string::npos) {
        EXPECT_NE(outcome.text.find("rank 1's process has ended"), std::string::npos)
            << outcome.text;
      }
      gpu.stream.wait();
    });
  }
}

// No call polls the group: the watching thread ends the waits.
TEST_F(Exchange, AProcessThatIsKilledIsSeen) {
  NcclOptions options;
  options.watch = true;
  for (const std::size_t bytes : {std::size_t{8}, kCopied}) {
    with_a_killed_rank(options, [&](Gpu& gpu, const auto& gather) {
      const Outcome outcome = outcome_of([&] {
        gather(bytes);
        gpu.stream.wait();
        for (int i = 0; i < 100; ++i) {
          std::this_thread::sleep_for(milliseconds(50));
          gpu.group->check();
        }
      });
      EXPECT_EQ(outcome.kind, "DeviceError");
      EXPECT_NE(outcome.text.find("rank 1's process has ended"), std::string::npos) << outcome.text;
    });
  }
}

}  // namespace
}  // namespace logitless
