#include "core/cores.h"

#include <gtest/gtest.h>
#include <sched.h>

#include <filesystem>
#include <fstream>
#include <string>

#include "support/temp_dir.h"

namespace logitless {
namespace {

namespace fs = std::filesystem;

// A tree of control groups in a separate folder.
class QuotaCores : public testing::Test {
 protected:
  QuotaCores() : root_(directory_.file("cgroups")) {}

  void write(const std::string& path, const std::string& text) const {
    fs::create_directories((root_ / path).parent_path());
    std::ofstream(root_ / path) << text << '\n';
  }
  int cores() const { return quota_cores(root_ / "self", root_); }

  const TempDir directory_;
  const fs::path root_;
};

TEST_F(QuotaCores, NoneWithoutFiles) { EXPECT_EQ(cores(), 0); }

TEST_F(QuotaCores, NoneWithoutALimit) {
  write("self", "0::/a/b");
  write("a/b/cpu.max", "max 100000");
  EXPECT_EQ(cores(), 0);
}

TEST_F(QuotaCores, RoundsUp) {
  write("self", "0::/a");
  write("a/cpu.max", "150000 100000");
  EXPECT_EQ(cores(), 2);
  write("a/cpu.max", "10000 100000");
  EXPECT_EQ(cores(), 1);
  write("a/cpu.max", "400000 100000");
  EXPECT_EQ(cores(), 4);
}

TEST_F(QuotaCores, TheLeastOfTheGroupsAbove) {
  write("self", "0::/a/b/c");
  write("a/cpu.max", "300000 100000");
  write("a/b/c/cpu.max", "800000 100000");
  EXPECT_EQ(cores(), 3);
}

// Inside a container the path is that of the host, and the mount that of the container's own group.
TEST_F(QuotaCores, OfTheMountItself) {
  write("self", "0::/kubepods/pod1/container");
  write("cpu.max", "200000 100000");
  EXPECT_EQ(cores(), 2);
}

TEST_F(QuotaCores, OfVersionOne) {
  write("self", "5:memory:/x\n4:cpu,cpuacct:/docker/abc\n1:name=systemd:/x");
  write("cpu,cpuacct/docker/abc/cpu.cfs_quota_us", "250000");
  write("cpu,cpuacct/docker/abc/cpu.cfs_period_us", "100000");
  EXPECT_EQ(cores(), 3);
  write("cpu,cpuacct/docker/abc/cpu.cfs_quota_us", "-1");
  EXPECT_EQ(cores(), 0);
}

TEST_F(QuotaCores, IgnoresNonsense) {
  write("self", "0::/a\nnonsense\n:\n");
  for (const char* text : {"", "many", "0 0", "100000 0", "-5 100000"}) {
    write("a/cpu.max", text);
    EXPECT_EQ(cores(), 0) << text;
  }
}

TEST(AvailableCores, WithinTheMask) {
  cpu_set_t mask;
  ASSERT_EQ(sched_getaffinity(0, sizeof(mask), &mask), 0);
  EXPECT_GE(available_cores(), 1);
  EXPECT_LE(available_cores(), CPU_COUNT(&mask));
}

}  // namespace
}  // namespace logitless
