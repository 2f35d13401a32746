#include "comm/rank_board.h"

#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <filesystem>
#include <memory>
#include <string>

#include "core/check.h"

namespace logitless {
namespace {

std::string name_of_test() {
  const auto* const test = testing::UnitTest::GetInstance()->current_test_info();
  return concat("test-", test->name(), "-", getpid());
}

TEST(RankBoard, SaysWhoHasNotArrived) {
  const std::string name = name_of_test();
  auto first = std::make_unique<RankBoard>(name, 0, 3);
  EXPECT_EQ(first->missing(1), "rank 0 has made 0 calls");  // the others are nowhere yet
  first->arrive(3);
  EXPECT_EQ(first->missing(3), "of 2 ranks nothing is known on this host");
  RankBoard second(name, 1, 3);
  auto third = std::make_unique<RankBoard>(name, 2, 3);
  EXPECT_TRUE(std::filesystem::exists("/dev/shm/logitless-" + name));
  first->close();
  EXPECT_FALSE(std::filesystem::exists("/dev/shm/logitless-" + name));
  second.arrive(1);
  third->arrive(2);
  EXPECT_EQ(first->missing(3), "rank 1 has made 1 call, rank 2 has made 2 calls");
  EXPECT_EQ(second.missing(2), "rank 1 has made 1 call");
  third.reset();
  EXPECT_EQ(first->missing(3), "rank 1 has made 1 call, rank 2 has left after 2 calls");
  EXPECT_EQ(first->missing(1), "all ranks have made the call, and one has not run it");
}

TEST(RankBoard, AProcessThatHasEnded) {
  const std::string name = name_of_test();
  RankBoard mine(name, 0, 2);
  mine.arrive(2);
  const pid_t child = fork();
  if (child == 0) {
    RankBoard other(name, 1, 2);
    other.arrive(1);
    _exit(0);  // as if killed: nothing is said
  }
  ASSERT_EQ(waitpid(child, nullptr, 0), child);
  EXPECT_EQ(mine.missing(2), "rank 1's process has ended");
  EXPECT_EQ(mine.missing(1), "all ranks have made the call, and one has not run it");
}

TEST(RankBoard, WithoutSharedMemory) {
  RankBoard nowhere("no/such/folder", 0, 2);
  nowhere.arrive(1);
  EXPECT_EQ(nowhere.missing(1), "of 2 ranks nothing is known on this host");
}

TEST(RankBoard, Moves) {
  RankBoard board;
  board = RankBoard(name_of_test(), 0, 1);
  EXPECT_EQ(board.missing(1), "rank 0 has made 0 calls");
  board.arrive(1);
  EXPECT_EQ(board.missing(1), "all ranks have made the call, and one has not run it");
}

}  // namespace
}  // namespace logitless
