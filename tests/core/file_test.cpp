#include "core/file.h"

#include <gtest/gtest.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <csignal>
#include <cstdint>
#include <string>
#include <vector>

#include "file_system.h"
#include "logitless/tensor_file.h"
#include "test_files.h"
#include "test_tensors.h"

namespace logitless {
namespace {

using Names = std::vector<std::string>;

std::string mapped(const std::string& path) {
  const MappedFile file(path);
  return {reinterpret_cast<const char*>(file.bytes().data()), file.bytes().size()};
}

mode_t mode_of(const std::string& path) {
  struct stat status {};
  EXPECT_EQ(stat(path.c_str(), &status), 0) << path;
  return status.st_mode & 07777;
}

TEST(MappedFile, ShowsTheBytes) {
  const TempDir directory;
  const std::string path = directory.file("x");
  for (const std::size_t size : {0u, 1u, 4095u, 4096u, 4097u, 100'000u}) {
    std::string content(size, 'a');
    if (size > 0) content.back() = 'z';
    write_atomically(path, content);
    EXPECT_EQ(mapped(path), content) << size;
  }
}

TEST(MappedFile, OutlivesTheNameAndItsReplacement) {
  const TempDir directory;
  const std::string path = directory.file("x");
  write_atomically(path, "old");
  const MappedFile file(path);
  AtomicFile next(path);
  next.write("new!", 4);
  next.commit();
  EXPECT_EQ(std::memcmp(file.bytes().data(), "old", 3), 0);
  EXPECT_EQ(mapped(path), "new!");
  std::filesystem::remove(path);
  EXPECT_EQ(std::memcmp(file.bytes().data(), "old", 3), 0);
}

TEST(MappedFile, RefusesWhatIsNoFile) {
  const TempDir directory;
  const std::string folder = directory.file("folder");
  const std::string pipe = directory.file("pipe");  // must not wait for a writer
  ASSERT_EQ(mkdir(folder.c_str(), 0777), 0);
  ASSERT_EQ(mkfifo(pipe.c_str(), 0666), 0);
  for (const std::string& path : {folder, pipe, std::string("/dev/null")}) {
    EXPECT_EQ(message_of<InvalidArgument>([&] { MappedFile file(path); }),
              "'" + path + "' is not a regular file");
  }
}

TEST(MappedFile, ReportsTheOperatingSystem) {
  const TempDir directory;
  const auto refusal = [](const std::string& path) {
    return message_of<DeviceError>([&] { MappedFile file(path); });
  };
  const std::string absent = directory.file("absent");
  EXPECT_EQ(refusal(absent), "'" + absent + "': cannot open: No such file or directory");
  EXPECT_EQ(refusal(""), "'': cannot open: No such file or directory");
  write_atomically(directory.file("x"), "x");
  EXPECT_EQ(refusal(directory.file("x/y")),
            "'" + directory.file("x/y") + "': cannot open: Not a directory");
  std::filesystem::create_symlink("loop", directory.file("loop"));
  EXPECT_EQ(refusal(directory.file("loop")),
            "'" + directory.file("loop") + "': cannot open: Too many levels of symbolic links");
}

TEST(MappedFile, NeedsPermission) {
  const TempDir directory;
  const std::string path = directory.file("x");
  write_atomically(path, "x");
  ASSERT_EQ(chmod(directory.file("").c_str(), 0755), 0);
  ASSERT_EQ(chmod(path.c_str(), 0), 0);
  const WithoutRoot rights;
  if (!rights.ok()) GTEST_SKIP() << "the rights of root cannot be dropped here";
  EXPECT_EQ(message_of<DeviceError>([&] { MappedFile file(path); }),
            "'" + path + "': cannot open: Permission denied");
}

TEST(AtomicFile, AppearsWholeWithCommit) {
  const TempDir directory;
  const std::string path = directory.file("x");
  {
    AtomicFile file(path);
    file.write("one ", 4);
    EXPECT_FALSE(std::filesystem::exists(path));
    EXPECT_EQ(directory.listing().size(), 1u);  // the temporary is beside it
    file.write("", 0);
    file.write("two", 3);
    file.commit();
    EXPECT_EQ(directory.listing(), Names{"x"});
    EXPECT_EQ(read_file(path), "one two");
  }
  EXPECT_EQ(directory.listing(), Names{"x"});
  EXPECT_EQ(read_file(path), "one two");
}

TEST(AtomicFile, WithoutCommitNothingHappened) {
  const TempDir directory;
  const std::string path = directory.file("x");
  { AtomicFile(path).write("new", 3); }
  EXPECT_EQ(directory.listing(), Names{});
  write_atomically(path, "old");
  {
    AtomicFile file(path);
    file.write("new", 3);
    EXPECT_EQ(read_file(path), "old");
  }
  EXPECT_EQ(directory.listing(), Names{"x"});
  EXPECT_EQ(read_file(path), "old");
}

// A temporary of a killed process is removed by the next writer of the same file.
TEST(AtomicFile, RemovesWhatAKilledProcessLeft) {
  const TempDir directory;
  const std::string path = directory.file("x");
  const pid_t child = fork();
  if (child == 0) {
    AtomicFile file(path);
    file.write("half", 4);
    raise(SIGKILL);
  }
  int status = 0;
  ASSERT_EQ(waitpid(child, &status, 0), child);
  ASSERT_TRUE(WIFSIGNALED(status));
  ASSERT_EQ(directory.listing().size(), 1u);
  // Names that are not temporaries of x, or not of this library.
  const Names others = {"x.tmp",     "x.1-.tmp",   "x.1-2.tmp2",
                        "x.a-1.tmp", "xy.1-2.tmp", "x.far.1-2.tmp"};
  for (const std::string& name : others) write_atomically(directory.file(name), "kept");
  std::filesystem::create_symlink("absent", directory.file("x.5-6.tmp"));
  std::filesystem::create_directory(directory.file("x.7-8.tmp"));
  AtomicFile alive(path);
  alive.write("other", 5);
  {
    AtomicFile file(path);
    file.write("whole", 5);
    file.commit();
  }
  Names expected = others;
  expected.insert(expected.end(), {"x", "x.5-6.tmp", "x.7-8.tmp"});
  Names left = directory.listing();
  EXPECT_EQ(left.size(), expected.size() + 1) << "and the one that is being written";
  for (const std::string& name : expected)
    EXPECT_NE(std::find(left.begin(), left.end(), name), left.end()) << name;
  alive.commit();
  EXPECT_EQ(read_file(path), "other");
}

TEST(AtomicFile, ChecksAPathWithoutTouchingIt) {
  const TempDir directory;
  const std::string path = directory.file("x");
  check_writable(path);
  EXPECT_EQ(directory.listing(), Names{});
  write_atomically(path, "old");
  check_writable(path);
  EXPECT_EQ(directory.listing(), Names{"x"});
  EXPECT_EQ(read_file(path), "old");
  const std::string long_name = directory.file(std::string(300, 'n'));
  EXPECT_EQ(message_of<DeviceError>([&] { check_writable(long_name); }),
            "'" + long_name + "': cannot create a temporary file beside it: File name too long");
}

TEST(AtomicFile, TwoWritersDoNotMix) {
  const TempDir directory;
  const std::string path = directory.file("x");
  AtomicFile first(path);
  AtomicFile second(path);
  first.write("first", 5);
  second.write("second", 6);
  second.commit();
  EXPECT_EQ(read_file(path), "second");
  first.commit();
  EXPECT_EQ(read_file(path), "first");
  EXPECT_EQ(directory.listing(), Names{"x"});
}

TEST(AtomicFile, KeepsPermissionsAndHonoursTheMask) {
  const TempDir directory;
  const std::string path = directory.file("x");
  const mode_t old_mask = umask(027);
  const auto replace = [&] {
    AtomicFile file(path);
    file.write("x", 1);
    file.commit();
  };
  replace();
  EXPECT_EQ(mode_of(path), 0640u);
  ASSERT_EQ(chmod(path.c_str(), 0606), 0);
  replace();
  EXPECT_EQ(mode_of(path), 0606u);
  umask(old_mask);
}

TEST(AtomicFile, FollowsLinks) {
  const TempDir directory;
  ASSERT_EQ(mkdir(directory.file("folder").c_str(), 0777), 0);
  const std::string target = directory.file("folder/target");
  write_atomically(target, "old");
  std::filesystem::create_symlink("folder/target", directory.file("inner"));
  std::filesystem::create_symlink("inner", directory.file("outer"));
  AtomicFile file(directory.file("outer"));
  file.write("new", 3);
  file.commit();
  EXPECT_EQ(read_file(target), "new");
  EXPECT_TRUE(std::filesystem::is_symlink(directory.file("outer")));
  EXPECT_TRUE(std::filesystem::is_symlink(directory.file("inner")));
}

// Such a link is /dev/stdout, which a rename onto it would replace.
TEST(AtomicFile, RefusesALinkToAPipe) {
  const TempDir directory;
  int ends[2];
  ASSERT_EQ(pipe(ends), 0);
  const std::string link = directory.file("link");
  std::filesystem::create_symlink("/proc/self/fd/" + std::to_string(ends[1]), link);
  EXPECT_EQ(message_of<InvalidArgument>([&] { AtomicFile file(link); }),
            "'" + link + "' exists and is not a regular file");
  EXPECT_TRUE(std::filesystem::is_symlink(link));
  close(ends[0]);
  close(ends[1]);
}

TEST(AtomicFile, FollowsNoLinkOfAnotherUser) {
  const TempDir directory;
  const std::string target = directory.file("target"), link = directory.file("link");
  write_atomically(target, "old");
  std::filesystem::create_symlink("target", link);
  std::filesystem::create_symlink("link", directory.file("outer"));
  constexpr uid_t kNobody = 65534;
  if (geteuid() == kNobody || lchown(link.c_str(), kNobody, kNobody) != 0)
    GTEST_SKIP() << "only root gives files away";
  for (const std::string& path : {link, directory.file("outer")}) {
    EXPECT_EQ(message_of<InvalidArgument>([&] { AtomicFile file(path); }),
              "'" + link + "' is a link of another user, which is not followed");
  }
  EXPECT_EQ(read_file(target), "old");
  write_file(link, "cached", FileUse::cache);
  EXPECT_EQ(read_file(target), "old");
  EXPECT_FALSE(std::filesystem::is_symlink(link));
}

// A cache's file belongs to its owner alone, whatever had its name before.
TEST(AtomicFile, OfACacheReplacesLinksAndIsPrivate) {
  const TempDir directory;
  const std::string target = directory.file("target"), link = directory.file("link");
  write_atomically(target, "old");
  ASSERT_EQ(chmod(target.c_str(), 0666), 0);
  std::filesystem::create_symlink("target", link);
  write_file(link, "new", FileUse::cache);
  EXPECT_EQ(read_file(target), "old");
  EXPECT_EQ(read_file(link), "new");
  EXPECT_EQ(mode_of(link), 0600u);
  write_file(target, "newer", FileUse::cache);
  EXPECT_EQ(mode_of(target), 0600u);
  EXPECT_EQ(directory.listing().size(), 2u);
}

TEST(AtomicFile, NobodyForeseesTheNameOfATemporary) {
  const TempDir directory;
  Names names;
  for (int i = 0; i < 8; ++i) {
    const AtomicFile file(directory.file("x"));
    names.push_back(directory.listing().at(0));
  }
  std::sort(names.begin(), names.end());
  EXPECT_EQ(std::unique(names.begin(), names.end()), names.end());
}

TEST(AtomicFile, RefusesToReplaceWhatIsNoFile) {
  const TempDir directory;
  const std::string folder = directory.file("folder");
  const std::string pipe = directory.file("pipe");
  ASSERT_EQ(mkdir(folder.c_str(), 0777), 0);
  ASSERT_EQ(mkfifo(pipe.c_str(), 0666), 0);
  for (const std::string& path : {folder, pipe, std::string("/dev/full")}) {
    EXPECT_EQ(message_of<InvalidArgument>([&] { AtomicFile file(path); }),
              "'" + path + "' exists and is not a regular file");
  }
  EXPECT_EQ(directory.listing().size(), 2u);
}

TEST(AtomicFile, NeedsAFolderThatIsThere) {
  const TempDir directory;
  write_atomically(directory.file("x"), "old");
  const std::pair<std::string, std::string> cases[] = {
      {directory.file("absent/x"), "No such file or directory"},
      {directory.file("x/y"), "Not a directory"},
      {directory.file(std::string(300, 'n')), "File name too long"},
  };
  for (const auto& [path, text] : cases) {
    EXPECT_EQ(message_of<DeviceError>([&, &where = path] { AtomicFile file(where); }),
              "'" + path + "': cannot create a temporary file beside it: " + text);
  }
  EXPECT_EQ(directory.listing(), Names{"x"});
}

TEST(AtomicFile, NeedsPermission) {
  const TempDir directory;
  const std::string path = directory.file("x");
  write_atomically(path, "old");
  ASSERT_EQ(chmod(path.c_str(), 0666), 0);
  ASSERT_EQ(chmod(directory.file("").c_str(), 0555), 0);
  {
    const WithoutRoot rights;
    if (!rights.ok()) GTEST_SKIP() << "the rights of root cannot be dropped here";
    EXPECT_EQ(message_of<DeviceError>([&] { AtomicFile file(path); }),
              "'" + path + "': cannot create a temporary file beside it: Permission denied");
  }
  EXPECT_EQ(directory.listing(), Names{"x"});
  EXPECT_EQ(read_file(path), "old");
  ASSERT_EQ(chmod(directory.file("").c_str(), 0755), 0);
}

TEST(AtomicFile, FullDiskLeavesTheOldFile) {
  const TempDir directory;
  const std::string path = directory.file("x");
  write_atomically(path, "old");
  const std::string large(100'000, 'x');
  {
    const FileSizeLimit limit(5000);
    ASSERT_TRUE(limit.ok());
    const std::string message = message_of<DeviceError>([&] {
      AtomicFile file(path);
      file.write(large.data(), 4000);
      file.write(large.data(), large.size());  // partly written, then refused
      file.commit();
    });
    EXPECT_EQ(message, "'" + path + "': cannot write: File too large");
  }
  EXPECT_EQ(directory.listing(), Names{"x"});
  EXPECT_EQ(read_file(path), "old");
}

TEST(AtomicFile, RefusedRenameLeavesNothingBehind) {
  const TempDir directory;
  const std::string path = directory.file("x");
  {
    AtomicFile file(path);
    file.write("x", 1);
    ASSERT_EQ(mkdir(path.c_str(), 0777), 0);  // another process created it meanwhile
    EXPECT_EQ(message_of<DeviceError>([&] { file.commit(); }),
              "'" + path + "': cannot rename onto it: Is a directory");
  }
  EXPECT_EQ(directory.listing(), Names{"x"});
  EXPECT_TRUE(std::filesystem::is_directory(path));
}

struct Strided {
  std::vector<std::int64_t> shape;
  std::vector<std::int64_t> strides;
  std::int64_t origin = 0;  // element of the memory at index 0
};

TEST(WriteElements, FollowsEveryStride) {
  const RandomTensor memory(DType::i64, {100'000}, 1);
  const Strided cases[] = {
      {{}, {}},
      {{5}, {1}},
      {{5}, {7}},
      {{5}, {-1}, 4},
      {{5}, {0}},
      {{0}, {3}},
      {{3, 4}, {4, 1}},
      {{3, 4}, {1, 3}},                     // transposed
      {{3, 4}, {-4, -1}, 11},               // reversed
      {{3, 4}, {0, 1}},                     // a repeated row
      {{3, 4}, {9, 2}},                     // every other column of some rows
      {{1, 4}, {99, 1}},                    // strides of sizes 1 do not matter
      {{4, 1}, {1, 99}},                    // nor of the last one
      {{2, 0, 3}, {1, 1, 1}},               // nothing to write
      {{2, 3, 4}, {20, 4, 1}},              // contiguous inside, strided outside
      {{2, 3, 4}, {1, 2, 6}},               // all reversed
      {{2, 3, 1, 2}, {-50, 7, -3, 0}, 50},  // a mixture
      {{70, 700}, {701, 1}},                // runs of 5600 bytes: many stagings
      {{90'000, 3}, {1, 1}},                // runs that overlap, and do not divide the staging
      {{49'000}, {2}},                      // runs of one element, more than one staging
      {{2, 40'000}, {50'000, 1}},           // runs longer than the staging
      {{3, 32'768}, {30'000, 1}},           // exactly as long as the staging
      {{2, 2, 2, 12'000}, {50'000, 25'000, 0, 1}},  // a long run, twice
  };
  const TempDir directory;
  for (const DType dtype : {DType::i8, DType::f16, DType::f32, DType::f64}) {
    for (const Strided& layout : cases) {
      const auto* origin = static_cast<const std::byte*>(memory.view().data()) +
                           layout.origin * static_cast<std::int64_t>(size_of(dtype));
      const ConstTensorView view(origin, dtype, layout.shape, layout.strides);
      AtomicFile file(directory.file("x"));
      file.write("<", 1);
      write_elements(file, view);
      file.write(">", 1);
      file.commit();
      EXPECT_TRUE(read_file(directory.file("x")) == "<" + elements_of(view) + ">")
          << describe(view);
    }
  }
}

}  // namespace
}  // namespace logitless
