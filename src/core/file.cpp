#include "core/file.h"

#include <fcntl.h>
#include <sys/file.h>
#include <sys/mman.h>
#include <sys/random.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <filesystem>
#include <string_view>
#include <system_error>

#include "core/check.h"
#include "logitless/memory.h"

namespace logitless {
namespace {

class Descriptor {
 public:
  explicit Descriptor(int descriptor) : descriptor_(descriptor) {}
  ~Descriptor() {
    if (descriptor_ >= 0) ::close(descriptor_);
  }
  Descriptor(const Descriptor&) = delete;
  Descriptor& operator=(const Descriptor&) = delete;
  int get() const { return descriptor_; }

 private:
  int descriptor_;
};

[[noreturn]] void fail_with_errno(const std::string& path, const char* what) {
  const int code = errno;
  throw DeviceError(concat("'", path, "': ", what, ": ", std::generic_category().message(code)));
}

// Returns the end of a chain of links, so that a rename replaces the file and not the link. A
// dangling link is replaced itself. Another user's link is refused: it could choose the file that
// is overwritten.
std::string follow_links(const std::string& path) {
  constexpr int kMostLinks = 40;
  std::string end = path;
  struct stat status {};
  for (int i = 0; i < kMostLinks; ++i) {
    if (::lstat(end.c_str(), &status) != 0) return path;
    if (!S_ISLNK(status.st_mode)) return end;
    require(status.st_uid == ::geteuid() || status.st_uid == 0, "'", end,
            "' is a link of another user, which is not followed");
    std::error_code error;
    const std::filesystem::path to = std::filesystem::read_symlink(end, error);
    if (error) return path;
    end = (std::filesystem::path(end).parent_path() / to).string();
  }
  return path;
}

// Returns whether `name` is TARGET.PID-NUMBER.tmp, the form of AtomicFile's temporaries.
bool is_temporary_of(std::string_view target, std::string_view name) {
  const auto take_digits = [&] {
    const std::size_t count = std::min(name.find_first_not_of("0123456789"), name.size());
    name.remove_prefix(count);
    return count > 0;
  };
  const auto take = [&](std::string_view text) {
    if (!name.starts_with(text)) return false;
    name.remove_prefix(text.size());
    return true;
  };
  return take(target) && take(".") && take_digits() && take("-") && take_digits() && name == ".tmp";
}

// Removes the temporaries of `target` that no writer holds locked: those of killed processes.
// Removes none where the file system has no locks.
void remove_leftovers(const std::string& target) {
  const std::filesystem::path path(target);
  const std::string name = path.filename().string();
  std::error_code error;
  const std::filesystem::path folder = path.has_parent_path() ? path.parent_path() : ".";
  for (std::filesystem::directory_iterator entry(folder, error), end; !error && entry != end;
       entry.increment(error)) {
    if (!is_temporary_of(name, entry->path().filename().string())) continue;
    const std::string leftover = entry->path().string();
    const Descriptor file(::open(leftover.c_str(), O_RDWR | O_CLOEXEC | O_NOFOLLOW | O_NONBLOCK));
    struct stat status {};
    if (file.get() < 0 || ::fstat(file.get(), &status) != 0 || !S_ISREG(status.st_mode)) continue;
    if (::flock(file.get(), LOCK_EX | LOCK_NB) == 0) ::unlink(leftover.c_str());
  }
}

// Creates a file that this process holds locked, so that others do not remove it; -1 with errno on
// failure.
int create_locked(const std::string& path, mode_t mode) {
  // O_EXCL never opens another process's file, not even one planted under the name.
  const int file = ::open(path.c_str(), O_RDWR | O_CREAT | O_EXCL | O_CLOEXEC, mode);
  if (file < 0) return -1;
  struct stat status {};
  // Another process may have removed the file as a leftover between the two calls.
  if (::flock(file, LOCK_EX) != 0 || ::fstat(file, &status) != 0 || status.st_nlink > 0) {
    return file;
  }
  ::close(file);
  errno = EEXIST;
  return -1;
}

}  // namespace

MappedFile::MappedFile(const std::string& path) {
  // O_NONBLOCK: opening a pipe without a writer would block forever. It has no effect on files.
  const Descriptor file(::open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK));
  if (file.get() < 0) fail_with_errno(path, "cannot open");
  struct stat status {};
  if (::fstat(file.get(), &status) != 0) fail_with_errno(path, "cannot stat");
  require(S_ISREG(status.st_mode), "'", path, "' is not a regular file");
  if (status.st_size == 0) return;
  const std::size_t size = static_cast<std::size_t>(status.st_size);
  void* data = ::mmap(nullptr, size, PROT_READ, MAP_PRIVATE, file.get(), 0);
  if (data == MAP_FAILED) fail_with_errno(path, "cannot map");
  data_ = static_cast<const std::byte*>(data);
  size_ = size;
}

MappedFile::~MappedFile() {
  if (data_ != nullptr) ::munmap(const_cast<std::byte*>(data_), size_);
}

AtomicFile::AtomicFile(const std::string& path, FileUse use)
    : target_(use == FileUse::output ? follow_links(path) : path) {
  struct stat status {};
  // A link that is not followed counts as a file: the rename replaces it.
  const bool exists = ::lstat(target_.c_str(), &status) == 0;
  // A link of /proc/self/fd leads to a pipe that has no name, and is not followed by name.
  struct stat led {};
  const bool leads_elsewhere =
      use == FileUse::output && ::stat(path.c_str(), &led) == 0 && !S_ISREG(led.st_mode);
  require(!leads_elsewhere && (!exists || S_ISREG(status.st_mode) || S_ISLNK(status.st_mode)), "'",
          path, "' exists and is not a regular file");
  const bool keeps_mode = use == FileUse::output && exists && S_ISREG(status.st_mode);

  remove_leftovers(target_);
  constexpr int kTries = 100;
  for (int i = 0; i < kTries; ++i) {
    std::uint32_t number = 0;
    if (::getrandom(&number, sizeof(number), 0) != sizeof(number)) fail("cannot draw a name");
    temporary_ = concat(target_, ".", ::getpid(), "-", number, ".tmp");
    descriptor_ = create_locked(temporary_, keeps_mode || use == FileUse::cache ? 0600 : 0666);
    if (descriptor_ >= 0 || errno != EEXIST) break;
  }
  if (descriptor_ < 0) {
    temporary_.clear();
    fail("cannot create a temporary file beside it");
  }
  // Changing the mode of another owner's file may fail; the new file is then more private than the
  // old one.
  if (keeps_mode) static_cast<void>(::fchmod(descriptor_, status.st_mode & 0777));
}

AtomicFile::~AtomicFile() {
  if (descriptor_ >= 0) ::close(descriptor_);
  if (!temporary_.empty()) ::unlink(temporary_.c_str());
}

void AtomicFile::fail(const char* what) const { fail_with_errno(target_, what); }

void AtomicFile::write(const void* data, std::size_t bytes) {
  const char* rest = static_cast<const char*>(data);
  while (bytes > 0) {
    const ssize_t written = ::write(descriptor_, rest, bytes);
    if (written < 0 && errno == EINTR) continue;
    if (written < 0) fail("cannot write");
    rest += written;
    bytes -= static_cast<std::size_t>(written);
  }
}

void AtomicFile::commit() {
  if (::fsync(descriptor_) != 0) fail("cannot flush to the disk");
  // Closing unlocks it, and a temporary without a lock is a leftover that others remove.
  if (::rename(temporary_.c_str(), target_.c_str()) != 0) fail("cannot rename onto it");
  temporary_.clear();
  const int closed = ::close(descriptor_);
  descriptor_ = -1;
  if (closed != 0) fail("cannot close");
  // Flushing the directory makes the rename survive a power failure. Some file systems cannot; the
  // file is complete either way.
  const std::string parent = std::filesystem::path(target_).parent_path().string();
  const Descriptor directory(
      ::open(parent.empty() ? "." : parent.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC));
  if (directory.get() >= 0) static_cast<void>(::fsync(directory.get()));
}

void write_elements(AtomicFile& file, const ConstTensorView& view) {
  if (view.numel() == 0) return;
  const std::size_t item = size_of(view.dtype());
  const auto* data = static_cast<const std::byte*>(view.data());

  // Contiguous trailing dimensions form runs; the `outer` dimensions are iterated by stride.
  int outer = view.rank();
  std::int64_t run = 1;
  while (outer > 0 && (view.size(outer - 1) == 1 || view.stride(outer - 1) == run))
    run *= view.size(--outer);
  const std::size_t run_bytes = static_cast<std::size_t>(run) * item;
  if (outer == 0) return file.write(data, run_bytes);

  constexpr std::size_t kStaging = std::size_t{256} << 10;
  const Buffer staging(run_bytes < kStaging ? kStaging : 0);
  std::size_t staged = 0;
  std::array<std::int64_t, kMaxRank> index{};
  for (std::int64_t left = view.numel() / run; left > 0; --left) {
    std::int64_t offset = 0;
    for (int d = 0; d < outer; ++d) offset += index[d] * view.stride(d);
    const std::byte* source = data + offset * static_cast<std::int64_t>(item);
    if (run_bytes >= kStaging) {
      file.write(source, run_bytes);
    } else {
      if (staged + run_bytes > kStaging) {
        file.write(staging.data(), staged);
        staged = 0;
      }
      std::memcpy(staging.as<std::byte>() + staged, source, run_bytes);
      staged += run_bytes;
    }
    for (int d = outer - 1; d >= 0 && ++index[d] == view.size(d); --d) index[d] = 0;
  }
  file.write(staging.data(), staged);
}

}  // namespace logitless
