#include "comm/rank_board.h"

#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <functional>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "core/check.h"

namespace logitless {
namespace {

std::string name_of_test() {
  const auto* const test = testing::UnitTest::GetInstance()->current_test_info();
  return concat("test-", test->name(), "-", getpid());
}

// Runs `body` in a child process that then ends abruptly, as if killed.
void in_a_child(const std::function<void()>& body) {
  const pid_t child = fork();
  if (child == 0) {
    body();
    _exit(0);
  }
  ASSERT_EQ(waitpid(child, nullptr, 0), child);
}

TEST(RankBoard, SaysWhoHasNotArrived) {
  const std::string name = name_of_test();
  auto first = std::make_unique<RankBoard>(name, 0, 3);
  EXPECT_EQ(first->late_ranks(1), "rank 0 has made 0 calls");  // the others have not joined yet
  first->post_call(3);
  EXPECT_EQ(first->late_ranks(3), "of 2 ranks nothing is known on this host");
  RankBoard second(name, 1, 3);
  auto third = std::make_unique<RankBoard>(name, 2, 3);
  EXPECT_TRUE(std::filesystem::exists("/dev/shm/logitless-" + name));
  first->remove_name();
  EXPECT_FALSE(std::filesystem::exists("/dev/shm/logitless-" + name));
  second.post_call(1);
  third->post_call(2);
  EXPECT_EQ(first->late_ranks(3), "rank 1 has made 1 call, rank 2 has made 2 calls");
  EXPECT_EQ(second.late_ranks(2), "rank 1 has made 1 call");
  third.reset();
  EXPECT_EQ(first->late_ranks(3), "rank 1 has made 1 call, rank 2 has left after 2 calls");
  EXPECT_EQ(first->late_ranks(1), "all ranks have made the call, and one has not run it");
}

// A foreign file of its name is neither followed nor trusted.
TEST(RankBoard, FilesOfOthersAreLeftAlone) {
  const std::string name = name_of_test();
  const std::filesystem::path path = "/dev/shm/logitless-" + name,
                              target = path.string() + "-target";
  const auto expect_alone = [&] {
    RankBoard board(name, 0, 2);
    EXPECT_EQ(board.late_ranks(1), "of 2 ranks nothing is known on this host");
    board.remove_name();
    EXPECT_EQ(std::filesystem::file_size(target), 0U);
    EXPECT_TRUE(std::filesystem::exists(std::filesystem::symlink_status(path)));
    std::filesystem::remove(path);
  };
  std::ofstream(target).close();
  std::filesystem::create_symlink(target, path);
  expect_alone();
  std::filesystem::create_hard_link(target, path);
  expect_alone();
  std::ofstream(path).close();
  std::filesystem::permissions(path, std::filesystem::perms::all);
  expect_alone();
  std::filesystem::remove(target);
}

TEST(RankBoard, AProcessThatHasEnded) {
  const std::string name = name_of_test();
  RankBoard mine(name, 0, 2);
  mine.post_call(2);
  in_a_child([&] {
    RankBoard other(name, 1, 2);
    other.post_call(1);
    _exit(0);  // without a destructor
  });
  EXPECT_EQ(mine.late_ranks(2), "rank 1's process has ended");
  EXPECT_EQ(mine.late_ranks(1), "all ranks have made the call, and one has not run it");
}

// A rank that has made the call before a normal exit is not missing from it; one that has not is.
// The fork also has the parent's board, and does not touch it.
TEST(RankBoard, AProcessThatEndsInOrderHasLeft) {
  const std::string name = name_of_test();
  RankBoard mine(name, 0, 2);
  mine.post_call(2);
  in_a_child([&] {
    static auto* const other = new RankBoard(name, 1, 2);  // as in plans that are never freed
    other->post_call(2);
    std::exit(0);
  });
  EXPECT_EQ(mine.lost_ranks(2), "");
  EXPECT_TRUE(mine.all_called(2));
  EXPECT_FALSE(mine.all_called(3));
  EXPECT_EQ(mine.lost_ranks(3), "rank 1 has left after 2 calls");
  RankBoard again(name, 1, 2);
  EXPECT_EQ(again.lost_ranks(3), "");
}

TEST(RankBoard, NamesWhoIsGone) {
  const std::string name = name_of_test();
  RankBoard mine(name, 0, 3);
  in_a_child([&] {
    RankBoard other(name, 1, 3);
    _exit(0);
  });
  auto third = std::make_unique<RankBoard>(name, 2, 3);
  EXPECT_EQ(mine.lost_ranks(2), "rank 1's process has ended");
  third->post_call(1);
  third.reset();
  EXPECT_EQ(mine.lost_ranks(2), "rank 1's process has ended, rank 2 has left after 1 call");
  EXPECT_FALSE(mine.all_called(1));  // rank 1 has not made it
  EXPECT_EQ(mine.lost_ranks(1), "rank 1's process has ended");
}

TEST(RankBoard, AnEndThatNobodyHasAskedAboutIsAnEnd) {
  const std::string name = name_of_test();
  RankBoard mine(name, 0, 2);
  const pid_t child = fork();
  if (child == 0) {
    RankBoard other(name, 1, 2);
    _exit(0);
  }
  siginfo_t ended;
  ASSERT_EQ(waitid(P_PID, static_cast<id_t>(child), &ended, WEXITED | WNOWAIT), 0);
  EXPECT_EQ(mine.lost_ranks(1), "rank 1's process has ended");
  ASSERT_EQ(waitpid(child, nullptr, 0), child);
}

TEST(RankBoard, NamesWhoHasGivenUp) {
  const std::string name = name_of_test();
  RankBoard a(name, 0, 2);
  auto b = std::make_unique<RankBoard>(name, 1, 2);
  a.post_call(3);
  b->post_call(3);
  EXPECT_EQ(a.lost_ranks(3), "");
  b->post_abort();
  EXPECT_EQ(a.lost_ranks(3), "rank 1 gave up");
  b.reset();
  EXPECT_EQ(a.lost_ranks(3), "rank 1 gave up");
  a.post_abort();
  EXPECT_EQ(a.lost_ranks(3), "rank 1 gave up") << "of the others";
}

TEST(RankBoard, Exchanges) {
  constexpr int kSize = 3, kRounds = 200;
  const std::string name = name_of_test();
  std::vector<std::unique_ptr<RankBoard>> boards;
  for (int r = 0; r < kSize; ++r) {
    EXPECT_TRUE(r == 0 || !boards[0]->all_joined());
    boards.push_back(std::make_unique<RankBoard>(name, r, kSize));
  }
  EXPECT_TRUE(boards[0]->all_joined());
  std::vector<std::thread> threads;
  std::atomic<int> wrong = 0;
  for (int r = 0; r < kSize; ++r) {
    threads.emplace_back([&, r] {
      RankBoard& board = *boards[static_cast<std::size_t>(r)];
      for (int round = 0; round < kRounds; ++round) {
        const std::size_t bytes = 4 * static_cast<std::size_t>(1 + round % 1000);
        const std::vector<int> mine(bytes / 4, 1000 * r + round);
        std::vector<int> all(kSize * bytes / 4);
        board.put(mine.data(), bytes);
        while (!board.all_put()) std::this_thread::yield();
        if (!board.take(all.data(), bytes)) ++wrong;
        for (std::size_t i = 0; i < all.size(); ++i)
          wrong += all[i] != 1000 * static_cast<int>(i / (bytes / 4)) + round;
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(wrong, 0);
}

TEST(RankBoard, SeesThatBytesDiffer) {
  const std::string name = name_of_test();
  RankBoard a(name, 0, 2), b(name, 1, 2);
  int value = 1, all[2] = {};
  a.put(&value, sizeof(value));
  EXPECT_FALSE(a.all_put());
  b.put(&value, 2);
  EXPECT_TRUE(a.all_put());
  EXPECT_FALSE(a.take(all, sizeof(value)));
}

TEST(RankBoard, WithoutSharedMemory) {
  RankBoard nowhere("no/such/folder", 0, 2);
  nowhere.post_call(1);
  EXPECT_EQ(nowhere.late_ranks(1), "of 2 ranks nothing is known on this host");
}

TEST(RankBoard, Moves) {
  RankBoard board;
  board = RankBoard(name_of_test(), 0, 1);
  EXPECT_EQ(board.late_ranks(1), "rank 0 has made 0 calls");
  board.post_call(1);
  EXPECT_EQ(board.late_ranks(1), "all ranks have made the call, and one has not run it");
}

TEST(RankBoard, HasBytesBesideIt) {
  const std::string name = name_of_test();
  const auto page = static_cast<std::size_t>(sysconf(_SC_PAGESIZE));
  RankBoard a(name, 0, 2, 2 * page), b(name, 1, 2, 2 * page);
  auto* const of_a = static_cast<unsigned char*>(a.more());
  auto* const of_b = static_cast<unsigned char*>(b.more());
  ASSERT_NE(of_a, nullptr);
  EXPECT_NE(of_a, of_b);
  EXPECT_EQ(reinterpret_cast<std::uintptr_t>(of_a) % page, 0u);
  EXPECT_TRUE(std::all_of(of_b, of_b + 2 * page, [](unsigned char c) { return c == 0; }));
  of_a[2 * page - 1] = 7;
  EXPECT_EQ(of_b[2 * page - 1], 7);
  a.post_call(3);  // the areas do not overlap
  EXPECT_EQ(of_b[0], 0);
  const RankBoard moved = std::move(a);
  EXPECT_EQ(moved.more(), of_a);
  EXPECT_EQ(RankBoard().more(), nullptr);
}

TEST(RankBoard, WhoHasMemoryOpen) {
  const std::string name = name_of_test();
  RankBoard a(name, 0, 3), b(name, 1, 3);
  auto c = std::make_unique<RankBoard>(name, 2, 3);
  a.post_memory_closed();
  EXPECT_FALSE(a.all_closed_memory());
  b.post_memory_closed();
  EXPECT_FALSE(a.all_closed_memory());
  c.reset();  // has left
  EXPECT_TRUE(a.all_closed_memory());
  EXPECT_TRUE(RankBoard().all_closed_memory());
}

}  // namespace
}  // namespace logitless
