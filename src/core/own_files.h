// The folder of this library's caches, and files that a cache may trust: only the user or root can
// have written them.
#pragma once

#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <optional>
#include <string>
#include <system_error>

namespace logitless {

inline bool is_owned_by_user_or_root(const struct stat& status) {
  return status.st_uid == ::geteuid() || status.st_uid == 0;
}

inline bool may_be_written_by_others(const struct stat& status) {
  return (status.st_mode & (S_IWGRP | S_IWOTH)) != 0;
}

// Returns why a folder is unsuitable for a cache, or "" if it is suitable or does not exist yet.
inline std::string cache_refusal(const std::string& folder) {
  struct stat link {
  }, status{};
  if (::lstat(folder.c_str(), &link) != 0) return "";
  if (!is_owned_by_user_or_root(link) || ::stat(folder.c_str(), &status) != 0 ||
      !is_owned_by_user_or_root(status))
    return "it belongs to another user";
  if (!S_ISDIR(status.st_mode)) return "it is no folder";
  if (may_be_written_by_others(status))
    return "other users may write it (chmod go-w closes it to them)";
  return "";
}

// Makes the folder of a cache, which only its owner may open, and its parent folders. Returns why
// it is unsuitable, or "".
inline std::string make_cache_folder(const std::string& folder) {
  const std::filesystem::path path = std::filesystem::path(folder) / "";  // one form of the name
  const std::filesystem::path itself = path.parent_path();
  std::error_code error;
  if (itself.has_parent_path()) std::filesystem::create_directories(itself.parent_path(), error);
  if (!error && ::mkdir(itself.c_str(), 0700) != 0 && errno != EEXIST)
    error = std::error_code(errno, std::generic_category());
  return error ? error.message() : cache_refusal(folder);
}

// Returns whether `path` is a file that only the user or root can have written, and no link to one.
inline bool is_own_file(const std::string& path) {
  struct stat status {};
  return ::lstat(path.c_str(), &status) == 0 && S_ISREG(status.st_mode) &&
         is_owned_by_user_or_root(status) && !may_be_written_by_others(status);
}

// Returns the bytes of such a file; nothing where it is another's, missing or unreadable.
inline std::optional<std::string> read_own_file(const std::string& path) {
  if (!is_own_file(path)) return std::nullopt;
  std::ifstream file(path, std::ios::binary);
  std::string whole((std::istreambuf_iterator<char>(file)), {});
  if (!file) return std::nullopt;
  return whole;
}

// Returns $LOGITLESS_CACHE, $XDG_CACHE_HOME/logitless/cubin, or ~/.cache/logitless/cubin. Empty:
// none.
inline std::string cache_folder() {
  if (const char* const own = std::getenv("LOGITLESS_CACHE")) return own;
  const auto below = [](const char* variable, const char* rest) -> std::string {
    const char* const folder = std::getenv(variable);
    if (folder == nullptr || *folder == '\0') return {};
    return (std::filesystem::path(folder) / rest).string();
  };
  const std::string folder = below("XDG_CACHE_HOME", "logitless/cubin");
  return folder.empty() ? below("HOME", ".cache/logitless/cubin") : folder;
}

}  // namespace logitless
