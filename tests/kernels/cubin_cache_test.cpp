// Cache of machine code: hits, misses, and files that it must not trust.
#include "kernels/cuda/cubin_cache.h"

#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <string>
#include <vector>

#include "core/file_system.h"
#include "core/own_files.h"
#include "core/siphash.h"
#include "kernels/device/module.h"
#include "logitless/error.h"

namespace logitless::cuda {
namespace {

namespace fs = std::filesystem;

// Sets or unsets an environment variable until the end of the scope.
class Variable {
 public:
  Variable(const char* name, const char* value) : name_(name) {
    if (const char* const old = std::getenv(name)) old_ = old, had_ = true;
    set(value);
  }
  ~Variable() { set(had_ ? old_.c_str() : nullptr); }
  Variable(const Variable&) = delete;
  Variable& operator=(const Variable&) = delete;

 private:
  const char* name_;
  std::string old_;
  bool had_ = false;
  void set(const char* value) {
    if (value != nullptr) {
      setenv(name_, value, 1);
    } else {
      unsetenv(name_);
    }
  }
};

class CubinCache : public testing::Test {
 protected:
  void SetUp() override {
    std::string name = (fs::temp_directory_path() / "cubins-XXXXXX").string();
    ASSERT_NE(mkdtemp(name.data()), nullptr);
    folder_ = fs::path(name) / "deep" / "er";
  }
  void TearDown() override { fs::remove_all(folder_.parent_path().parent_path()); }

  // Returns "code of <content>", and counts in made_ whether it was compiled.
  std::string get(const std::string& content) {
    made_ = 0;
    return cached(folder_.string(), content, [&] {
      ++made_;
      return "code of\n" + content + std::string(3, '\0');
    });
  }
  std::string expected(const std::string& content) {
    return "code of\n" + content + std::string(3, '\0');
  }
  std::vector<fs::path> files() const {
    std::vector<fs::path> found;
    for (const auto& entry : fs::directory_iterator(folder_)) {
      if (entry.path().extension() == ".cubin") found.push_back(entry.path());
    }
    return found;
  }
  fs::path key() const { return folder_ / "key"; }
  static std::string read(const fs::path& path) {
    std::ifstream file(path, std::ios::binary);
    return {std::istreambuf_iterator<char>(file), {}};
  }
  static void write(const fs::path& path, const std::string& text) {
    std::ofstream(path, std::ios::binary) << text;
  }

  fs::path folder_;
  int made_ = 0;
};

TEST_F(CubinCache, MakesOnceForEachContent) {
  EXPECT_EQ(get("a"), expected("a"));
  EXPECT_EQ(made_, 1);
  EXPECT_EQ(get("a"), expected("a"));
  EXPECT_EQ(made_, 0);
  EXPECT_EQ(get("b"), expected("b"));
  EXPECT_EQ(made_, 1);
  EXPECT_EQ(files().size(), 2u);
}

TEST_F(CubinCache, DamagedFilesAreMadeAgain) {
  get("a");
  const fs::path path = files().at(0);
  const std::string whole = read(path);
  for (std::size_t i = 0; i < whole.size(); ++i) {
    std::string damaged = whole;
    damaged[i] = static_cast<char>(damaged[i] ^ 1);
    write(path, damaged);
    EXPECT_EQ(get("a"), expected("a")) << "byte " << i;
    EXPECT_EQ(made_, 1) << "byte " << i;
    EXPECT_EQ(read(path), whole);
  }
  for (std::size_t length = 0; length < whole.size(); ++length) {
    write(path, whole.substr(0, length));
    EXPECT_EQ(get("a"), expected("a")) << length << " bytes";
    EXPECT_EQ(made_, 1);
  }
  write(path, whole + "x");
  EXPECT_EQ(get("a"), expected("a"));
  EXPECT_EQ(made_, 1);
}

TEST_F(CubinCache, ForeignFilesAreMadeAgain) {
  get("a");
  const fs::path a = files().at(0);
  const std::string of_a = read(a);
  get("b");
  for (const fs::path& path : files()) write(path, of_a);  // b's name, a's content
  EXPECT_EQ(get("b"), expected("b"));
  EXPECT_EQ(made_, 1);
  EXPECT_EQ(get("a"), expected("a"));
  EXPECT_EQ(made_, 0);
  write(a, "something else\n");
  EXPECT_EQ(get("a"), expected("a"));
  EXPECT_EQ(made_, 1);
}

// Processes that find neither key nor code: each gets the code of its text, and what they leave
// behind is whole.
TEST_F(CubinCache, ProcessesWriteAtOnce) {
  constexpr int kProcesses = 4, kContents = 8;
  int start[2];
  ASSERT_EQ(pipe(start), 0);
  std::vector<pid_t> children;
  for (int p = 0; p < kProcesses; ++p) {
    const pid_t child = fork();
    ASSERT_GE(child, 0);
    if (child == 0) {
      char byte = 0;
      close(start[1]);
      bool right = ::read(start[0], &byte, 1) == 0;  // the parent has started all
      for (int i = 0; i < kContents; ++i) {
        const std::string content = "text " + std::to_string(i);
        right = get(content) == expected(content) && right;
      }
      _exit(right ? 0 : 1);
    }
    children.push_back(child);
  }
  close(start[0]);
  close(start[1]);
  for (const pid_t child : children) {
    int status = -1;
    ASSERT_EQ(waitpid(child, &status, 0), child);
    EXPECT_EQ(status, 0);
  }
  // Codes under a key that another process replaced are made again, once.
  for (const bool again : {false, true}) {
    for (int i = 0; i < kContents; ++i) {
      const std::string content = "text " + std::to_string(i);
      EXPECT_EQ(get(content), expected(content));
      EXPECT_TRUE(made_ == 0 || !again) << content;
    }
  }
  EXPECT_EQ(files().size(), static_cast<std::size_t>(kContents));
  const auto all = std::distance(fs::directory_iterator(folder_), fs::directory_iterator());
  EXPECT_EQ(all, kContents + 1) << "the codes and the key, and nothing unfinished";
}

TEST_F(CubinCache, AFolderThatCannotBeWrittenIsNoError) {
  fs::create_directories(folder_);
  fs::permissions(folder_, fs::perms::owner_read | fs::perms::owner_exec);
  fs::permissions(folder_.parent_path().parent_path(), fs::perms::all);
  {
    const WithoutRoot user;
    ASSERT_TRUE(user.ok());
    EXPECT_EQ(get("a"), expected("a"));
    EXPECT_EQ(get("a"), expected("a"));
    EXPECT_EQ(made_, 1);
  }
  fs::permissions(folder_, fs::perms::all);
  EXPECT_TRUE(files().empty());

  fs::remove_all(folder_);
  write(folder_, "a file where the folder should be");
  EXPECT_EQ(get("a"), expected("a"));
  EXPECT_EQ(made_, 1);
}

// Code that the GPU runs was written by this user, or it is compiled again.
TEST_F(CubinCache, BelievesNothingThatOthersCanHaveWritten) {
  get("a");
  const fs::path path = files().at(0);
  const std::string whole = read(path);
  const fs::path victim = folder_.parent_path() / "victim";
  const auto expect_made_again = [&](const char* what) {
    EXPECT_EQ(get("a"), expected("a")) << what;
    EXPECT_EQ(made_, 1) << what;
    EXPECT_EQ(get("a"), expected("a")) << what;
    EXPECT_EQ(made_, 0) << what;
  };
  write(victim, whole);
  fs::remove(path);
  fs::create_symlink(victim, path);
  expect_made_again("a link, whose target stays");
  EXPECT_EQ(read(victim), whole);
  EXPECT_FALSE(fs::is_symlink(path));
  fs::permissions(path, fs::perms::others_write, fs::perm_options::add);
  expect_made_again("a file that others may write");
  EXPECT_EQ(fs::status(path).permissions(), fs::perms::owner_read | fs::perms::owner_write);
  if (geteuid() == 0) {
    ASSERT_EQ(chown(path.c_str(), 65534, 65534), 0);
    expect_made_again("another user's file");
  }
  fs::permissions(folder_, fs::perms::group_write, fs::perm_options::add);
  for (const int made : {1, 1}) {
    EXPECT_EQ(get("b"), expected("b"));
    EXPECT_EQ(made_, made) << "a folder that others may write";
  }
  EXPECT_EQ(files().size(), 1u);
}

TEST_F(CubinCache, ProvesCodeByAKeyOfItsOwn) {
  get("a");
  const fs::path path = files().at(0);
  EXPECT_EQ(fs::status(key()).permissions(), fs::perms::owner_read | fs::perms::owner_write);
  const std::string secret = read(key()), whole = read(path);
  EXPECT_EQ(secret.size(), kSipHashKey);
  // A different key, or one that others may have read, authenticates nothing.
  for (const bool open : {false, true}) {
    if (open) {
      fs::permissions(key(), fs::perms::others_read, fs::perm_options::add);
    } else {
      write(key(), std::string(kSipHashKey, 'k'));
    }
    EXPECT_EQ(get("a"), expected("a"));
    EXPECT_EQ(made_, 1);
    EXPECT_NE(read(path), whole);
  }
  EXPECT_NE(read(key()), std::string(kSipHashKey, 'k'));
  fs::remove(key());
  fs::create_symlink("/dev/zero", key());
  EXPECT_EQ(get("a"), expected("a"));
  EXPECT_FALSE(fs::is_symlink(key()));
}

// Test vectors of the paper's authors: the key 00 01 .. 0f, the bytes 00 01 .. of each length.
TEST(SipHash, IsThatOfItsAuthors) {
  std::string key, bytes;
  for (char c = 0; c < 16; ++c) key += c;
  EXPECT_EQ(siphash(key, bytes), "a3817f04ba25a8e66df67214c7550293");
  bytes = std::string(1, '\0');
  EXPECT_EQ(siphash(key, bytes), "da87c1d86b99af44347659119b22fc45");
  const std::string base = siphash(key, "some bytes of code");
  EXPECT_NE(base, siphash(key, "some bytes of codf"));
  key[15] ^= 1;
  EXPECT_NE(base, siphash(key, "some bytes of code"));
}

TEST_F(CubinCache, NoFolderNoFiles) {
  const auto make = [] { return std::string("code"); };
  EXPECT_EQ(cached("", "a", make), "code");
}

TEST(CubinFolder, IsThatOfTheEnvironment) {
  const Variable own("LOGITLESS_CACHE", "/here"), xdg("XDG_CACHE_HOME", "/xdg"),
      home("HOME", "/home/me");
  EXPECT_EQ(cache_folder(), "/here");
  {
    const Variable none("LOGITLESS_CACHE", "");
    EXPECT_EQ(cache_folder(), "");
  }
  const Variable unset("LOGITLESS_CACHE", nullptr);
  EXPECT_EQ(cache_folder(), "/xdg/logitless/cubin");
  const Variable no_xdg("XDG_CACHE_HOME", nullptr);
  EXPECT_EQ(cache_folder(), "/home/me/.cache/logitless/cubin");
  const Variable no_home("HOME", nullptr);
  EXPECT_EQ(cache_folder(), "");
}

// End to end, where there is NVRTC.
TEST_F(CubinCache, KeepsWhatNvrtcMakes) {
  const Variable own("LOGITLESS_CACHE", folder_.c_str());
  const std::string text = "extern \"C\" __global__ void f(int* x) { *x = 1; }";
  try {
    const std::string cold = cached_cubin(text, 90);
    EXPECT_EQ(cold, cached_cubin(text, 90));
    EXPECT_EQ(files().size(), 1u);
    EXPECT_NE(cold, cached_cubin(text, 80));
    EXPECT_EQ(files().size(), 2u);
    // Code for another architecture, under the name of this one, is not run.
    fs::path other = files().at(0), of_cold = files().at(1);
    if (read(other).find(cold) != std::string::npos) std::swap(other, of_cold);
    write(of_cold, read(other));
    EXPECT_EQ(cold, cached_cubin(text, 90));
    EXPECT_NE(read(of_cold).find(cold), std::string::npos);
  } catch (const Unsupported& missing) {
    EXPECT_NE(std::string(missing.what()).find("nvidia-cuda-nvrtc"), std::string::npos);
    GTEST_SKIP() << missing.what();
  }
}

}  // namespace
}  // namespace logitless::cuda
