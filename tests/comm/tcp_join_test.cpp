// Tests of the rendezvous of TCP ranks, as threads of one process, with foreign connections.
#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <cstddef>
#include <mutex>
#include <set>
#include <string>
#include <string_view>
#include <thread>
#include <utility>
#include <vector>

#include "comm/tcp_callers.h"
#include "comm/tcp_ranks.h"
#include "comm/tcp_wire.h"

namespace logitless {
namespace {

using std::chrono::milliseconds;

constexpr milliseconds kShort{500};
constexpr milliseconds kLong = std::chrono::hours(1);
const Outcome kFine;

Outcome join(int port, int rank, int size, const TcpOptions& options) {
  return outcome_of([&] {
    const auto c = make_tcp("localhost", port, rank, size, options);
    std::vector<int> all(static_cast<std::size_t>(size));
    c->all_gather(&rank, all.data(), sizeof(int), nullptr);
    for (int r = 0; r < size; ++r) EXPECT_EQ(all[static_cast<std::size_t>(r)], r);
  });
}

TcpOptions within(milliseconds limit, const std::string& job = {}) {
  TcpOptions options;
  options.limit = limit;
  options.job = job;
  return options;
}

std::vector<Outcome> join_all(const std::vector<std::pair<int, int>>& rank_and_size, int port,
                              const TcpOptions& options, milliseconds late = milliseconds(0)) {
  std::vector<Outcome> outcomes(rank_and_size.size());
  std::vector<std::thread> threads;
  for (std::size_t i = 0; i < rank_and_size.size(); ++i) {
    threads.emplace_back([&, i] {
      const auto [rank, size] = rank_and_size[i];
      if (i + 1 == rank_and_size.size()) std::this_thread::sleep_for(late);
      outcomes[i] = join(port, rank, size, options);
    });
  }
  for (std::thread& thread : threads) thread.join();
  return outcomes;
}

Socket call(int port) {
  return Socket::connect("127.0.0.1", port,
                         std::chrono::steady_clock::now() + std::chrono::minutes(1));
}
bool say(const Socket& socket, const std::string& bytes) {
  return socket.send_all(bytes.data(), bytes.size(),
                         std::chrono::steady_clock::now() + std::chrono::minutes(1));
}
std::string bytes_of(const TcpHello& hello) {
  return {reinterpret_cast<const char*>(&hello), sizeof(hello)};
}
// Returns the failure text and kind that arrive before the end of the connection.
std::string received(const Socket& socket) {
  const auto soon = std::chrono::steady_clock::now() + std::chrono::minutes(1);
  TcpHeader header;
  if (!socket.receive_all(&header, sizeof(header), soon)) return "";
  EXPECT_EQ(header.kind, TcpKind::invalid);
  std::string text(header.bytes, ' ');
  EXPECT_TRUE(socket.receive_all(text.data(), text.size(), soon));
  char more = 0;
  EXPECT_FALSE(socket.receive_all(&more, 1, soon));
  return text;
}

TEST(TcpJoin, WaitsForTheLastOne) {
  for (const int last : {0, 1, 2}) {
    std::vector<std::pair<int, int>> ranks = {{0, 3}, {1, 3}, {2, 3}};
    std::swap(ranks[2], ranks[static_cast<std::size_t>(last)]);
    EXPECT_EQ(join_all(ranks, free_port(), within(kLong), milliseconds(150)),
              std::vector<Outcome>(3));
  }
}

TEST(TcpJoin, NamesWhoDoesNotCome) {
  const auto outcomes = join_all({{0, 4}, {2, 4}}, free_port(), within(kShort));
  const Outcome expected = {"DeviceError",
                            "make_tcp: ranks 1 and 3 of 4 did not arrive within 500 ms"};
  EXPECT_EQ(outcomes, std::vector<Outcome>(2, expected));
  const int port = free_port();
  const auto alone = join_all({{1, 2}}, port, within(kShort));
  EXPECT_EQ(alone[0].kind, "DeviceError");
  EXPECT_NE(alone[0].text.find("make_tcp: rank 1: cannot connect to localhost, port " +
                               std::to_string(port) + ": "),
            std::string::npos)
      << alone[0].text;
}

// With a job name the ranks belong together, and all of them throw.
TEST(TcpJoin, SizesAndRanksMustAgree) {
  const auto sizes = join_all({{0, 3}, {1, 2}}, free_port(), within(kLong, "a"));
  const Outcome size = {"InvalidArgument", "make_tcp: size: rank 1 has 2, rank 0: 3"};
  EXPECT_EQ(sizes, std::vector<Outcome>(2, size));
  const auto ranks = join_all({{0, 3}, {1, 3}, {1, 3}}, free_port(), within(kLong, "a"));
  const Outcome twice = {"InvalidArgument", "make_tcp: rank: two are rank 1 of 3"};
  EXPECT_EQ(ranks, std::vector<Outcome>(3, twice));
}

TEST(TcpJoin, APortThatIsTaken) {
  const Socket taken = Socket::listen(0);
  const auto outcomes = join_all({{0, 2}}, taken.port(), within(kLong));
  EXPECT_EQ(outcomes[0], (Outcome{"DeviceError", "make_tcp: cannot listen at port " +
                                                     std::to_string(taken.port()) +
                                                     ": Address already in use"}));
}

// A foreign connection that sends bytes at once or one at a time, while rank 0 waits for rank 1.
struct Stranger {
  const char* name;
  std::string bytes;
  std::string received = {};                        // "": nothing, and the connection ends
  enum { answered, leaves, stays } end = answered;  // leaves before an answer, or never
};

TcpHello hello_of(const std::string& job, int rank, int size,
                  TcpChannel channel = TcpChannel::control) {
  TcpHello hello = {kTcpMagic, rank, size, 1, channel, 7, {}};
  job.copy(hello.job.data(), kMostTcpJob);
  return hello;
}

std::vector<Stranger> strangers() {
  TcpHello other_version = hello_of("", 1, 2);
  ++other_version.magic;
  TcpHello port = hello_of("", 1, 2);
  port.port = 70000;
  const std::string right = bytes_of(hello_of("", 1, 2));
  return {
      {"web", "GET / HTTP/1.1\r\nHost: localhost\r\n\r\n"},
      {"zeros", std::string(1000, '\0')},
      {"half", right.substr(0, 40), "", Stranger::leaves},
      {"slow_loris", right.substr(0, 40), "", Stranger::stays},
      {"size", bytes_of(hello_of("", 1, 3)), "size: rank 1 has 3, rank 0: 2"},
      {"large", bytes_of(hello_of("", 900, 1 << 30)), "size: rank 900 has 1073741824, rank 0: 2"},
      {"rank", bytes_of(hello_of("", 2, 2)), "rank: 2 came to rank 0"},
      {"negative", bytes_of(hello_of("", -1, 2)), "rank: -1 came to rank 0"},
      {"port", bytes_of(port), "port: rank 1 listens at 70000"},
      {"channel", bytes_of(hello_of("", 1, 2, TcpChannel{9})),
       "channel: rank 1 has none of number 9"},
      {"job", bytes_of(hello_of("b\x1b[31m", 1, 2)),
       "job: rank 1 is of 'b\\x1b[31m', rank 0 of none"},
      {"version", bytes_of(other_version),
       "version: a rank is of a version of logitless whose greeting is another one"},
      {"old_version", bytes_of(other_version).substr(0, 24),
       "version: a rank is of a version of logitless whose greeting is another one"},
  };
}

class TcpStranger : public testing::TestWithParam<Stranger> {};

TEST_P(TcpStranger, IsReportedAndEndsNothing) {
  for (const bool slow : {false, true}) {
    const int port = free_port();
    Outcome first, second;
    std::thread waits([&] { first = join(port, 0, 2, within(kLong)); });
    {
      const Socket silent = call(port);
      const Socket stranger = call(port);
      const std::string& bytes = GetParam().bytes;
      for (std::size_t at = 0; slow && at + 1 < bytes.size(); ++at) {
        if (!say(stranger, bytes.substr(at, 1))) break;  // it has been recognised already
        if (at % 16 == 0) std::this_thread::sleep_for(milliseconds(1));
      }
      if (!slow) {
        EXPECT_TRUE(say(stranger, bytes));
      }
      if (slow) say(stranger, bytes.substr(bytes.size() - 1));
      if (GetParam().end == Stranger::answered) {
        EXPECT_EQ(received(stranger), GetParam().received);
      }
      if (GetParam().end == Stranger::stays) second = join(port, 1, 2, within(kLong));
    }
    if (GetParam().end != Stranger::stays) second = join(port, 1, 2, within(kLong));
    waits.join();
    EXPECT_EQ(first, kFine);
    EXPECT_EQ(second, kFine);
  }
}

INSTANTIATE_TEST_SUITE_P(Each, TcpStranger, testing::ValuesIn(strangers()),
                         [](const auto& of) { return of.param.name; });

// Their own error names the reason, and so does rank 0's if the right ranks do not come.
TEST(TcpJoin, RanksOfOtherJobsAreTurnedAway) {
  const int port = free_port();
  std::vector<Outcome> outcomes;
  std::thread waits([&] {
    outcomes = join_all({{0, 2}, {1, 2}}, port, within(kLong, "a"), milliseconds(200));
  });
  EXPECT_EQ(join(port, 1, 2, within(kLong, "b")),
            (Outcome{"InvalidArgument", "make_tcp: job: rank 1 is of 'b', rank 0 of 'a'"}));
  EXPECT_EQ(join(port, 4, 8, within(kLong)),
            (Outcome{"InvalidArgument", "make_tcp: job: rank 4 is of none, rank 0 of 'a'"}));
  waits.join();
  EXPECT_EQ(outcomes, std::vector<Outcome>(2));

  const int other = free_port();
  const auto unnamed = join_all({{0, 3}, {1, 2}}, other, within(kShort));
  EXPECT_EQ(unnamed[1], (Outcome{"InvalidArgument", "make_tcp: size: rank 1 has 2, rank 0: 3"}));
  EXPECT_EQ(unnamed[0].kind, "DeviceError");
  EXPECT_NE(
      unnamed[0].text.find("ranks 1 and 2 of 3 did not arrive within 500 ms; connections turned "
                           "away: "),
      std::string::npos)
      << unnamed[0].text;
  EXPECT_NE(unnamed[0].text.find("size: rank 1 has 2, rank 0: 3"), std::string::npos);
}

// Another process has the same number and size: the first one counts, with both of its connections.
TEST(TcpJoin, ASecondOfTheSameNumberIsTurnedAway) {
  const int port = free_port();
  const auto outcomes = join_all({{0, 3}, {1, 3}, {1, 3}}, port, within(kShort));
  const Outcome twice = {"InvalidArgument", "make_tcp: rank: two are rank 1 of 3"};
  const Outcome late = {
      "DeviceError",
      "make_tcp: rank 2 of 3 did not arrive within 500 ms; connections turned away: "};
  EXPECT_EQ((outcomes[1] == twice) + (outcomes[2] == twice), 1);
  EXPECT_EQ(outcomes[0].text.substr(0, late.text.size()), late.text);

  // A connection for calls arrives before its control connection.
  const int third = free_port();
  std::thread waits([&] { EXPECT_EQ(join(third, 0, 2, within(kLong)), kFine); });
  const Socket before = call(third);
  EXPECT_TRUE(say(before, bytes_of(hello_of("", 1, 2, TcpChannel::calls))));
  std::this_thread::sleep_for(milliseconds(100));
  EXPECT_EQ(join(third, 1, 2, within(kLong)), kFine);
  waits.join();
}

// Tests more connections than there are descriptors, and more than it ever keeps.
TEST(TcpJoin, HundredsThatSayNothing) {
  const int port = free_port();
  Outcome first;
  std::thread waits([&] { first = join(port, 0, 2, within(kLong)); });
  std::vector<Socket> silent(2 * TcpCallers::kMost);
  for (Socket& one : silent) one = call(port);
  EXPECT_EQ(join(port, 1, 2, within(kLong)), kFine);
  waits.join();
  EXPECT_EQ(first, kFine);
}

TEST(TcpJoin, SaysWhoIsMissing) {
  const auto texts_of = [](std::vector<std::pair<int, int>> ranks, int port) {
    std::mutex mutex;
    std::set<std::string> texts;
    TcpOptions options = within(kShort);
    options.waiting_after = milliseconds(10);
    options.waiting = [&](std::string_view text) {
      const std::lock_guard lock(mutex);
      texts.emplace(text);
    };
    join_all(ranks, port, options);
    return texts;
  };
  const int port = free_port();
  const std::string at = std::to_string(port);
  EXPECT_EQ(texts_of({{0, 3}}, port),
            (std::set<std::string>{"rank 0 of 3 waits for ranks 1 and 2 at port " + at}));
  EXPECT_EQ(texts_of({{2, 3}}, port),
            (std::set<std::string>{"rank 2 of 3 waits for rank 0 at localhost, port " + at +
                                   ": Connection refused"}));
  const auto two = texts_of({{0, 3}, {1, 3}}, port);
  EXPECT_EQ(two.count("rank 0 of 3 waits for rank 2 at port " + at), 1U);
  EXPECT_EQ(two.count("rank 1 of 3 waits for rank 0 at localhost, port " + at +
                      ", which waits for others"),
            1U);
  TcpOptions stops = within(kLong);
  stops.waiting_after = milliseconds(1);
  stops.waiting = [](std::string_view) { throw DeviceError("enough"); };
  EXPECT_EQ(join(port, 0, 2, stops), (Outcome{"DeviceError", "make_tcp: enough"}));
}

// Another program listens at rank 0's port, and sends something or nothing.
TEST(TcpJoin, WhatListensMayBeNoRank) {
  const auto result = [](const std::string& bytes) {
    const Socket listener = Socket::listen(0);
    std::string full;
    std::atomic<bool> over = false;
    std::thread listening([&] {
      Socket here;
      while (!here.is_open()) here = listener.accept(full);
      EXPECT_TRUE(say(here, bytes));
      while (!over) std::this_thread::sleep_for(milliseconds(1));
    });
    const Outcome outcome = join(listener.port(), 1, 2, within(kShort));
    over = true;
    listening.join();
    return outcome.text;
  };
  const std::string no_rank = "make_tcp: rank 1: who listens there is not rank 0 of this group";
  EXPECT_EQ(result("HTTP/1.1 400 Bad Request\r\nConnection: close\r\n\r\n"), no_rank);
  EXPECT_EQ(result(failure_bytes(TcpKind::endpoints, "none")), no_rank);
  EXPECT_EQ(result(""), "make_tcp: rank 1: rank 0 still waits for others after 500 ms");
  EXPECT_EQ(result(failure_bytes(TcpKind::failure, "\x1b[2Jno\n")), "make_tcp: \\x1b[2Jno\\n");
}

// A connection that claims to be a rank, and then sends garbage.
TEST(TcpJoin, ARankThatLeavesAgainIsNamed) {
  const int port = free_port();
  std::vector<Outcome> outcomes;
  std::thread ranks([&] { outcomes = join_all({{0, 3}}, port, within(kLong)); });
  {
    const Socket rank = call(port);
    EXPECT_TRUE(say(rank, bytes_of(hello_of("", 2, 3))));
  }
  ranks.join();
  EXPECT_EQ(outcomes[0], (Outcome{"DeviceError", "make_tcp: rank 2 of 3 has left"}));
}

TEST(TcpJoin, RefusesWhatIsNoGroup) {
  const auto refused = [](int port, int rank, int size, milliseconds limit = kShort) {
    const Outcome outcome = outcome_of([&] { make_tcp("localhost", port, rank, size, limit); });
    EXPECT_EQ(outcome.kind, "InvalidArgument");
    return outcome.text;
  };
  EXPECT_EQ(refused(1, 0, 0), "make_tcp: size: expected 1 or more, got 0");
  EXPECT_EQ(refused(1, 2, 2), "make_tcp: rank: expected one in [0, 2), got 2");
  EXPECT_EQ(refused(1, -1, 2), "make_tcp: rank: expected one in [0, 2), got -1");
  EXPECT_EQ(refused(0, 0, 2), "make_tcp: port: expected one in [1, 65535], got 0");
  EXPECT_EQ(refused(65536, 0, 2), "make_tcp: port: expected one in [1, 65535], got 65536");
  EXPECT_EQ(refused(1, 0, 2, milliseconds(0)), "make_tcp: limit: expected 1 ms or more, got 0");
  EXPECT_EQ(join(1, 0, 2, within(kLong, std::string(64, 'x'))).text,
            "make_tcp: job: expected 63 bytes at most, got 64");
  EXPECT_EQ(join(1, 0, 2, within(kLong, std::string(3, '\0'))).text,
            "make_tcp: job: expected text, got a byte 0");
}

}  // namespace
}  // namespace logitless
