// Tensors on disk: safetensors (https://github.com/huggingface/safetensors) and npy (NumPy's
// format 1.0 to 3.0).
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "logitless/dtype.h"
#include "logitless/export.h"
#include "logitless/tensor_view.h"

namespace logitless {

// A tensor file opened for reading, memory-mapped: opening costs no copy, views live as long as the
// object. Safetensors holds named tensors; npy holds one, found under any name and under "". Throws
// InvalidArgument on a missing tensor, and on any file that is not well formed (truncated, offsets
// that overlap, overflow or leave holes, wrong header length, unknown dtype, rank over kMaxRank,
// Fortran order, big-endian data), with the path and what was wrong; DeviceError when the operating
// system refuses.
class LOGITLESS_API TensorFile {
 public:
  explicit TensorFile(const std::string& path);
  // The same from bytes in memory, which must outlive the object. `name` stands in messages. npy or
  // safetensors, told apart by npy's magic.
  TensorFile(std::span<const std::byte> bytes, const std::string& name);
  ~TensorFile();
  TensorFile(TensorFile&&) noexcept;
  TensorFile& operator=(TensorFile&&) noexcept;

  // Names in file order; {""} for npy.
  const std::vector<std::string>& names() const;
  bool contains(const std::string& name) const;
  // Throws InvalidArgument naming the tensors there are.
  ConstTensorView tensor(const std::string& name) const;
  // Free text pairs of a safetensors header.
  const std::map<std::string, std::string>& metadata() const;

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

struct NamedTensor {
  std::string name = {};
  ConstTensorView view = {};  // any strides; written contiguous
};

// The use of a file that is written.
enum class FileUse {
  output,  // A link of the user's own is followed; permissions are the old file's, or the umask's.
  cache    // A link is replaced and never followed, and the owner alone may open the file.
};

// Written to a temporary beside `path`, flushed, and renamed: readers see the old file or the new
// one, never half of one. Throws InvalidArgument on a repeated or empty name, and where `path` is
// no file or a link of another user; DeviceError when the disk refuses, with the old file as it
// was.
LOGITLESS_API void write_safetensors(const std::string& path, std::span<const NamedTensor> tensors,
                                     const std::map<std::string, std::string>& metadata = {},
                                     FileUse use = FileUse::output);
// Writes any bytes in the same way.
LOGITLESS_API void write_file(const std::string& path, std::string_view bytes,
                              FileUse use = FileUse::output);
// Throws what writing a file at `path` would before its first byte: DeviceError where its folder is
// not there, cannot be written or cannot store the name, InvalidArgument where `path` is no file or
// a link of another user.
// Leaves `path` as it is; temporaries that killed processes left beside it are removed.
LOGITLESS_API void check_writable(const std::string& path);
// bf16 has no npy code: throws InvalidArgument.
LOGITLESS_API void write_npy(const std::string& path, const ConstTensorView& tensor);

}  // namespace logitless
