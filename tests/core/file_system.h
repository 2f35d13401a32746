// Scopes in which the operating system refuses operations.
#pragma once

#include <sys/resource.h>
#include <unistd.h>

#include <csignal>
#include <cstdlib>

namespace logitless {

// Drops the rights of root, which no permission stops, until the end of the scope. ok() is false
// where that is not allowed.
class WithoutRoot {
 public:
  WithoutRoot() : was_root_(geteuid() == 0) {
    constexpr uid_t kNobody = 65534;
    ok_ = !was_root_ || seteuid(kNobody) == 0;
  }
  ~WithoutRoot() {
    if (was_root_ && ok_ && seteuid(0) != 0) std::abort();
  }
  WithoutRoot(const WithoutRoot&) = delete;
  WithoutRoot& operator=(const WithoutRoot&) = delete;
  bool ok() const { return ok_; }

 private:
  bool was_root_;
  bool ok_ = false;
};

// Files cannot grow past `bytes` until the end of the scope, as on a full disk.
class FileSizeLimit {
 public:
  explicit FileSizeLimit(rlim_t bytes) : old_handler_(std::signal(SIGXFSZ, SIG_IGN)) {
    getrlimit(RLIMIT_FSIZE, &old_);
    rlimit limit = old_;
    limit.rlim_cur = bytes;
    ok_ = setrlimit(RLIMIT_FSIZE, &limit) == 0;
  }
  ~FileSizeLimit() {
    setrlimit(RLIMIT_FSIZE, &old_);
    std::signal(SIGXFSZ, old_handler_);
  }
  FileSizeLimit(const FileSizeLimit&) = delete;
  FileSizeLimit& operator=(const FileSizeLimit&) = delete;
  bool ok() const { return ok_; }

 private:
  void (*old_handler_)(int);
  rlimit old_{};
  bool ok_ = false;
};

}  // namespace logitless
