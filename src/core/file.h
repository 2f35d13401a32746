// Files: read by mapping, replaced atomically.
#pragma once

#include <cstddef>
#include <span>
#include <string>

#include "logitless/tensor_file.h"
#include "logitless/tensor_view.h"

namespace logitless {

// A regular file mapped read-only. Throws DeviceError when the operating system refuses,
// InvalidArgument when `path` is a directory, device or pipe. The file must keep its length while
// it is mapped; replacing it by rename is safe.
class MappedFile {
 public:
  explicit MappedFile(const std::string& path);
  ~MappedFile();
  MappedFile(const MappedFile&) = delete;
  MappedFile& operator=(const MappedFile&) = delete;

  std::span<const std::byte> bytes() const { return {data_, size_}; }

 private:
  const std::byte* data_ = nullptr;  // null for an empty file
  std::size_t size_ = 0;
};

// A file that is written completely or not at all: bytes go to a temporary beside `path`, which
// commit() flushes and renames. Without commit() the temporary is removed and `path` is unchanged.
// Temporaries are new files with unpredictable names; those of killed processes beside the same
// `path` are removed first. `use` determines links and permissions. Throws DeviceError, or
// InvalidArgument when `path` exists and is not a file, or is another user's link.
class AtomicFile {
 public:
  explicit AtomicFile(const std::string& path, FileUse use = FileUse::output);
  ~AtomicFile();
  AtomicFile(const AtomicFile&) = delete;
  AtomicFile& operator=(const AtomicFile&) = delete;

  void write(const void* data, std::size_t bytes);
  void commit();

 private:
  [[noreturn]] void fail(const char* what) const;  // with errno's text

  std::string target_;
  std::string temporary_;  // empty once renamed
  int descriptor_ = -1;
};

// Appends the elements of `view`, of any strides, with the last dimension fastest, through a buffer
// of fixed size.
void write_elements(AtomicFile& file, const ConstTensorView& view);

}  // namespace logitless
