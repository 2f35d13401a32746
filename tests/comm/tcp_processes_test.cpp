// Tests of TCP ranks that are processes: the behaviour of a group when one of them is killed. The
// program starts no threads: its children are forked.
#include <gtest/gtest.h>
#include <signal.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstddef>
#include <functional>
#include <string>
#include <utility>
#include <vector>

#include "comm/tcp_ranks.h"

namespace logitless {
namespace {

using std::chrono::milliseconds;

constexpr milliseconds kLong = std::chrono::hours(1);
constexpr unsigned kMostSeconds = 60;  // lifetime of a process in any case

// A process for each rank of a group, which reports its outcome by a pipe.
class Processes {
 public:
  using Body = std::function<void(Communicator&)>;

  Processes(int size, milliseconds limit, const Body& body) {
    const int port = free_port();
    for (int r = 0; r < size; ++r) {
      int ends[2] = {};
      if (::pipe(ends) != 0) throw DeviceError("pipe");
      const pid_t child = ::fork();
      if (child == 0) {
        ::prctl(PR_SET_PDEATHSIG, SIGKILL);
        ::alarm(kMostSeconds);
        const Outcome outcome = outcome_of([&] {
          const auto c = make_tcp("127.0.0.1", port, r, size, limit);
          said(ends[1], "here");
          body(*c);
        });
        said(ends[1], outcome.kind + "|" + outcome.text);
        ::_exit(0);
      }
      ::close(ends[1]);
      children_.push_back({child, ends[0]});
    }
  }
  ~Processes() {
    for (const Child& child : children_) {
      if (!child.ended) {
        ::kill(child.id, SIGKILL);
        ::waitpid(child.id, nullptr, 0);
      }
      ::close(child.pipe);
    }
  }
  Processes(const Processes&) = delete;
  Processes& operator=(const Processes&) = delete;

  // Returns a line from the rank; "" when its process has ended instead.
  std::string hear(int rank) {
    std::string line;
    char letter = 0;
    while (::read(child(rank).pipe, &letter, 1) == 1 && letter != '\n') line += letter;
    return line;
  }
  void send(int rank, int signal) { ::kill(child(rank).id, signal); }
  // Returns its exception; waits for its end.
  Outcome outcome(int rank) {
    const std::string line = hear(rank);
    ::waitpid(child(rank).id, nullptr, 0);
    child(rank).ended = true;
    const std::size_t bar = std::min(line.find('|'), line.size());
    return {line.substr(0, bar), line.substr(std::min(bar + 1, line.size()))};
  }

  static void said(int pipe, const std::string& line) {
    const std::string whole = line + "\n";
    if (::write(pipe, whole.data(), whole.size()) < 0) ::_exit(1);
  }

 private:
  struct Child {
    pid_t id = 0;
    int pipe = -1;
    bool ended = false;
  };
  Child& child(int rank) { return children_[static_cast<std::size_t>(rank)]; }

  std::vector<Child> children_;
};

TEST(TcpProcesses, MoveWhatThreadsMove) {
  for (int size = 1; size <= 4; ++size) {
    const auto expected = exchanged_by_threads(size);
    Processes ranks(size, kLong, [&](Communicator& c) {
      if (exchange_a_lot(c) != expected[static_cast<std::size_t>(c.rank())])
        throw InternalError("other bytes than those of threads");
    });
    for (int r = 0; r < size; ++r) {
      EXPECT_EQ(ranks.hear(r), "here");
      EXPECT_EQ(ranks.outcome(r), Outcome()) << r;
    }
  }
}

// Rank 1 is killed while the others exchange small and large messages with it.
TEST(TcpProcesses, SurvivorsNameTheOneThatWasKilled) {
  for (const std::size_t bytes : {std::size_t{64}, std::size_t{4} << 20}) {
    Processes ranks(4, kLong, [&](Communicator& c) {
      std::vector<std::byte> mine(4 * bytes), all(4 * bytes);
      while (true) c.all_to_all(mine.data(), all.data(), bytes, nullptr);
    });
    for (int r = 0; r < 4; ++r) EXPECT_EQ(ranks.hear(r), "here");
    ::usleep(50000);
    ranks.send(1, SIGKILL);
    for (const int r : {0, 2, 3}) {
      const Outcome outcome = ranks.outcome(r);
      EXPECT_EQ(outcome.kind, "DeviceError");
      EXPECT_NE(outcome.text.find(": rank 1 of 4 has left"), std::string::npos) << outcome.text;
    }
  }
}

TEST(TcpProcesses, OneThatIsKilledBetweenCallsIsNamedByTheNext) {
  Processes ranks(2, kLong, [&](Communicator& c) {
    char mine = 'a', all[2];
    c.all_gather(&mine, all, 1, nullptr);
    if (c.rank() == 1) ::pause();
    c.all_gather(&mine, all, 1, nullptr);
  });
  EXPECT_EQ(ranks.hear(0), "here");
  EXPECT_EQ(ranks.hear(1), "here");
  ranks.send(1, SIGKILL);
  EXPECT_NE(ranks.outcome(0).text.find("rank 1 of 2 has left"), std::string::npos);
}

// A stopped process sends nothing: the limit ends the call.
TEST(TcpProcesses, OneThatStandsStillIsNamedAtTheLimit) {
  Processes ranks(3, std::chrono::seconds(2), [&](Communicator& c) {
    char mine = 'a', all[3];
    while (true) c.all_gather(&mine, all, 1, nullptr);
  });
  for (int r = 0; r < 3; ++r) EXPECT_EQ(ranks.hear(r), "here");
  ranks.send(2, SIGSTOP);
  for (const int r : {0, 1}) {
    const Outcome outcome = ranks.outcome(r);
    EXPECT_EQ(outcome.kind, "DeviceError");
    EXPECT_NE(outcome.text.find("2 of 3 did not "), std::string::npos) << outcome.text;
    EXPECT_NE(outcome.text.find(" within 2000 ms"), std::string::npos) << outcome.text;
  }
  ranks.send(2, SIGCONT);
  EXPECT_NE(ranks.outcome(2).text.find("2 of 3 did not "), std::string::npos);
}

// Each rank ends as soon as it knows.
TEST(TcpProcesses, CallsThatDifferAreNamedByAll) {
  for (int repeat = 0; repeat < 10; ++repeat) {
    Processes ranks(4, kLong, [&](Communicator& c) {
      RandomDelays delay(c.rank(), static_cast<unsigned>(repeat));
      delay();
      std::vector<std::byte> mine(64), all(256);
      c.all_gather(mine.data(), all.data(), c.rank() == 3 ? 8 : 64, nullptr);
    });
    for (int r = 0; r < 4; ++r) {
      EXPECT_EQ(ranks.hear(r), "here");
      EXPECT_EQ(ranks.outcome(r), (Outcome{"InvalidArgument",
                                           "communicator: call 1: rank 3: all_gather of 8 bytes, "
                                           "rank 0: all_gather of 64 bytes"}));
    }
  }
}

// Rank 0 may open no more files while hundreds of connections are silent.
TEST(TcpProcesses, SilentConnectionsTakeNoFilesThatRanksNeed) {
  const int port = free_port();
  int ends[2] = {};
  ASSERT_EQ(::pipe(ends), 0);
  const pid_t child = ::fork();
  if (child == 0) {
    ::prctl(PR_SET_PDEATHSIG, SIGKILL);
    ::alarm(kMostSeconds);
    const rlimit few = {40, 40};
    ::setrlimit(RLIMIT_NOFILE, &few);
    const Outcome outcome =
        outcome_of([&] { make_tcp("127.0.0.1", port, 0, 2, std::chrono::seconds(30)); });
    Processes::said(ends[1], outcome.kind + "|" + outcome.text);
    ::_exit(0);
  }
  std::vector<Socket> silent(200);
  const auto soon = std::chrono::steady_clock::now() + std::chrono::seconds(30);
  for (Socket& one : silent) one = Socket::connect("127.0.0.1", port, soon);
  EXPECT_EQ(outcome_of([&] { make_tcp("127.0.0.1", port, 1, 2, std::chrono::seconds(30)); }),
            Outcome());
  std::string line(100, ' ');
  line.resize(static_cast<std::size_t>(std::max<ssize_t>(::read(ends[0], line.data(), 100), 0)));
  EXPECT_EQ(line, "|\n");
  ::waitpid(child, nullptr, 0);
  ::close(ends[0]);
  ::close(ends[1]);
}

TEST(TcpProcesses, ReasonsTravel) {
  Processes ranks(3, kLong, [&](Communicator& c) {
    char mine = 'a', all[3];
    if (c.rank() == 1) {
      c.abort("the disk is full");
      throw InvalidArgument("its own");
    }
    c.all_gather(&mine, all, 1, nullptr);
  });
  for (int r = 0; r < 3; ++r) EXPECT_EQ(ranks.hear(r), "here");
  for (const int r : {0, 2}) {
    EXPECT_EQ(ranks.outcome(r),
              (Outcome{"DeviceError",
                       "communicator: call 1 (all_gather of 1 bytes): rank 1 gave "
                       "up: the disk is full"}));
  }
  EXPECT_EQ(ranks.outcome(1).text, "its own");
}

}  // namespace
}  // namespace logitless
