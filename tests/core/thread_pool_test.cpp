#include "core/thread_pool.h"

#include <gtest/gtest.h>
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <mutex>
#include <set>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

namespace logitless {
namespace {

#if defined(__SANITIZE_THREAD__)
constexpr bool kThreadSanitizer = true;  // it ends a forked child that starts threads
#else
constexpr bool kThreadSanitizer = false;
#endif

// A gate at which tasks wait. Waiting yields: the machine may have one core.
class Gate {
 public:
  void open() { open_.store(true); }
  void wait() const {
    while (!open_.load()) std::this_thread::yield();
  }

 private:
  std::atomic<bool> open_{false};
};

std::int64_t sum_of(ThreadPool& pool, int threads, std::int64_t tasks) {
  std::atomic<std::int64_t> sum{0};
  pool.run(threads, tasks, [&](std::int64_t task, int) { sum += task; });
  return sum;
}
constexpr std::int64_t sum_below(std::int64_t n) { return n * (n - 1) / 2; }

// Runs two tasks that wait for each other: it ends only with two threads.
void meet(ThreadPool& pool) {
  std::atomic<int> begun{0};
  pool.run(2, 2, [&](std::int64_t, int) {
    ++begun;
    while (begun.load() < 2) std::this_thread::yield();
  });
}

TEST(ThreadPool, WorksTogether) {
  ThreadPool pool(2);
  meet(pool);
  EXPECT_EQ(pool.helpers(), 1);
}

TEST(ThreadPool, HasNoMoreThreadsThanCores) {
  ThreadPool pool(3);
  std::mutex mutex;
  std::set<int> numbers;
  std::atomic<int> now{0}, most{0};
  pool.run(1000000, 3000, [&](std::int64_t, int thread) {
    const int others = now.fetch_add(1) + 1;
    most.store(std::max(most.load(), others));
    const std::lock_guard<std::mutex> lock(mutex);
    numbers.insert(thread);
    now.fetch_sub(1);
  });
  EXPECT_EQ(pool.helpers(), 2);
  EXPECT_LE(most, 3);
  EXPECT_LE(*numbers.rbegin(), 2);
}

TEST(ThreadPool, TakesTheCoresOfTheCallersMask) {
  ThreadPool pool;
  std::int64_t sum = 0;
  std::thread([&] {  // has its own mask
    cpu_set_t mask;
    ASSERT_EQ(sched_getaffinity(0, sizeof(mask), &mask), 0);
    int first = 0;
    while (!CPU_ISSET(first, &mask)) ++first;
    CPU_ZERO(&mask);
    CPU_SET(first, &mask);
    ASSERT_EQ(sched_setaffinity(0, sizeof(mask), &mask), 0);
    sum = sum_of(pool, 8, 100);
  })
      .join();
  EXPECT_EQ(sum, sum_below(100));
  EXPECT_EQ(pool.helpers(), 0);
}

TEST(ThreadPool, StartsOnlyWhatALoopNeeds) {
  ThreadPool pool(8);
  EXPECT_EQ(sum_of(pool, 8, 1), 0);
  EXPECT_EQ(sum_of(pool, 1, 50), sum_below(50));
  EXPECT_EQ(pool.helpers(), 0);
  EXPECT_EQ(sum_of(pool, 3, 50), sum_below(50));
  EXPECT_EQ(pool.helpers(), 2);
  EXPECT_EQ(sum_of(pool, 8, 4), sum_below(4));
  EXPECT_EQ(pool.helpers(), 3);
}

TEST(ThreadPool, GoesOnWithTheThreadsItGets) {
  ThreadPool none(4, [](ThreadPool&, int) { return false; });
  for (int i = 0; i < 3000; ++i) ASSERT_EQ(sum_of(none, 4, 20), sum_below(20));
  EXPECT_EQ(none.helpers(), 0);

  ThreadPool one(4, [](ThreadPool& pool, int index) {
    return index == 1 && ThreadPool::start_thread(pool, index);
  });
  for (int i = 0; i < 100; ++i) meet(one);
  EXPECT_EQ(sum_of(one, 4, 1000), sum_below(1000));
  EXPECT_EQ(one.helpers(), 1);
}

// The system's limit: no process of this user may start another thread.
TEST(ThreadPool, GoesOnWhereTheSystemStartsNoThread) {
  if (kThreadSanitizer) GTEST_SKIP() << "needs a child of its own";
  const pid_t child = fork();
  ASSERT_GE(child, 0);
  if (child == 0) {
    const rlimit none{0, 0};
    bool right = setrlimit(RLIMIT_NPROC, &none) == 0;
    // The limit does not apply to root.
    right = right && (getuid() != 0 || setuid(65534) == 0);
    ThreadPool pool(4);
    right = right && sum_of(pool, 4, 100) == sum_below(100) && pool.helpers() == 0;
    _exit(right ? 0 : 1);
  }
  int status = 0;
  ASSERT_EQ(waitpid(child, &status, 0), child);
  EXPECT_TRUE(WIFEXITED(status) && WEXITSTATUS(status) == 0) << status;
}

// The helper counts as started, but the system does not let it run.
TEST(ThreadPool, DoesNotWaitForAHelperThatHasNotEntered) {
  static Gate gate;
  ThreadPool pool(2, [](ThreadPool& owner, int) {
    std::thread([&owner] {
      gate.wait();
      owner.serve();
    }).detach();
    return true;
  });
  for (int i = 0; i < 100; ++i) ASSERT_EQ(sum_of(pool, 2, 20), sum_below(20));
  gate.open();
  meet(pool);  // the late helper still works
}

TEST(ThreadPool, DoesNotWaitForAnotherCallersTask) {
  ThreadPool pool(3);
  Gate gate;
  std::atomic<int> begun{0};
  std::thread other([&] {  // occupies itself and both helpers
    pool.run(3, 3, [&](std::int64_t, int) {
      ++begun;
      gate.wait();
    });
  });
  while (begun.load() < 3) std::this_thread::yield();
  for (int i = 0; i < 100; ++i) ASSERT_EQ(sum_of(pool, 3, 20), sum_below(20));
  gate.open();
  other.join();
}

// A caller that found the pool occupied gets it as soon as it is free, in the middle of its loop.
TEST(ThreadPool, HelpsACallerThatBeganAlone) {
  ThreadPool pool(2);
  Gate gate, left;
  std::atomic<int> begun{0};
  std::thread other([&] {
    pool.run(2, 2, [&](std::int64_t, int) {
      ++begun;
      gate.wait();
    });
    left.open();
  });
  while (begun.load() < 2) std::this_thread::yield();
  std::atomic<int> met{0};
  pool.run(2, 3, [&](std::int64_t task, int) {
    if (task == 0) {
      gate.open();
      left.wait();
    } else {
      ++met;
      while (met.load() < 2) std::this_thread::yield();  // ends with two threads only
    }
  });
  other.join();
  EXPECT_EQ(met, 2);
}

TEST(ThreadPool, ServesManyCallersAtOnce) {
  ThreadPool pool(4);
  std::vector<std::thread> callers;
  std::atomic<int> wrong{0};
  for (int caller = 0; caller < 4; ++caller) {
    callers.emplace_back([&, caller] {
      for (int i = 0; i < 2000; ++i) {
        const std::int64_t tasks = 1 + (i * 7 + caller) % 40;
        std::vector<std::int64_t> of_thread(4, 0);  // would race if two threads had one number
        pool.run(4, tasks, [&](std::int64_t task, int thread) {
          of_thread[static_cast<std::size_t>(thread)] += task;
        });
        std::int64_t sum = 0;
        for (const std::int64_t part : of_thread) sum += part;
        if (sum != sum_below(tasks)) ++wrong;
      }
    });
  }
  for (std::thread& caller : callers) caller.join();
  EXPECT_EQ(wrong, 0);
}

TEST(ThreadPool, RunsLoopsOfTasksOnTheirThread) {
  ThreadPool pool(3);
  std::atomic<int> elsewhere{0}, runs{0};
  pool.run(3, 12, [&](std::int64_t, int) {
    const std::thread::id self = std::this_thread::get_id();
    pool.run(3, 5, [&](std::int64_t, int thread) {
      ++runs;
      if (std::this_thread::get_id() != self || thread != 0) ++elsewhere;
    });
  });
  EXPECT_EQ(runs, 60);
  EXPECT_EQ(elsewhere, 0);
  meet(pool);  // the caller is outside a loop again
}

TEST(ThreadPool, IsWholeAfterErrors) {
  ThreadPool pool(3);
  for (int i = 0; i < 200; ++i) {
    std::string first;
    try {
      pool.run(3, 50, [&](std::int64_t task, int) {
        if (task % 10 == 7) throw std::runtime_error(std::to_string(task));
      });
    } catch (const std::runtime_error& error) {
      first = error.what();
    }
    ASSERT_EQ(first, "7");
  }
  meet(pool);
}

TEST(ThreadPool, RunsManySmallLoops) {
  ThreadPool pool(3);
  for (int i = 0; i < 100000; ++i) {
    std::int64_t parts[3] = {};
    const std::int64_t tasks = 2 + i % 4;
    pool.run(3, tasks, [&](std::int64_t task, int thread) { parts[thread] += task; });
    ASSERT_EQ(parts[0] + parts[1] + parts[2], sum_below(tasks)) << i;
    if (i % 20000 == 0) std::this_thread::sleep_for(std::chrono::milliseconds(2));  // they sleep
  }
}

TEST(ThreadPool, HelpersHaveNamesAndTakeNoSignals) {
  ThreadPool pool(2);
  std::atomic<int> begun{0};
  std::string name;
  sigset_t mask;
  sigemptyset(&mask);
  pool.run(2, 2, [&](std::int64_t, int thread) {
    ++begun;
    while (begun.load() < 2) std::this_thread::yield();
    if (thread == 0) return;
    char text[16] = {};
    pthread_getname_np(pthread_self(), text, sizeof(text));
    name = text;
    pthread_sigmask(SIG_SETMASK, nullptr, &mask);
  });
  EXPECT_EQ(name, "logitless-1");
  for (const int taken : {SIGINT, SIGTERM, SIGCHLD, SIGALRM, SIGUSR1}) {
    EXPECT_EQ(sigismember(&mask, taken), 1) << taken;
  }
  EXPECT_EQ(sigismember(&mask, SIGSEGV), 0);
}

// fork() copies only the calling thread; the child must not wait for the others.
TEST(ThreadPool, ChildHasAPoolOfItsOwn) {
  if (kThreadSanitizer) GTEST_SKIP() << "forked children may not start threads under it";
  ThreadPool& parent = ThreadPool::process();
  ASSERT_EQ(sum_of(parent, 4, 100), sum_below(100));
  const pid_t child = fork();
  ASSERT_GE(child, 0);
  if (child == 0) {
    alarm(60);
    std::atomic<std::int64_t> sum{0};
    for (int i = 0; i < 100; ++i) {
      parallel_for(4, 100, [&](std::int64_t task, int) { sum += task; });
    }
    const bool right = sum == 100 * sum_below(100) && &ThreadPool::process() != &parent;
    _exit(right ? 0 : 1);
  }
  int status = 0;
  ASSERT_EQ(waitpid(child, &status, 0), child);
  EXPECT_TRUE(WIFEXITED(status) && WEXITSTATUS(status) == 0) << status;
  EXPECT_EQ(sum_of(parent, 4, 100), sum_below(100));
}

// A child of a task has lost the helpers in the loop: it fails by name, and does not hang.
TEST(ThreadPool, ChildForkedInsideALoopCannotGoOnWithIt) {
  if (kThreadSanitizer) GTEST_SKIP() << "forked children may not start threads under it";
  cpu_set_t mask;
  ASSERT_EQ(sched_getaffinity(0, sizeof(mask), &mask), 0);
  if (CPU_COUNT(&mask) < 2) GTEST_SKIP() << "one core: the process's pool has no helper";
  std::atomic<int> begun{0};
  std::atomic<pid_t> child{-1};
  bool in_child = false, named = false;
  const auto body = [&](std::int64_t, int thread) {
    ++begun;
    while (begun.load() < 2) std::this_thread::yield();
    if (thread == 0) {
      child = fork();
      in_child = child == 0;
      if (in_child) alarm(60);
    } else {
      while (child.load() < 0) std::this_thread::yield();
    }
  };
  try {
    parallel_for(2, 2, body);
  } catch (const std::runtime_error& error) {
    named = std::string(error.what()).find("forked inside") != std::string::npos;
  }
  if (in_child) _exit(named ? 0 : 1);
  ASSERT_FALSE(named);
  int status = 0;
  ASSERT_EQ(waitpid(child, &status, 0), child);
  EXPECT_TRUE(WIFEXITED(status) && WEXITSTATUS(status) == 0) << status;
}

}  // namespace
}  // namespace logitless
