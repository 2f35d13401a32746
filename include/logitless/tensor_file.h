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

// A tensor file opened for reading by memory mapping: opening copies nothing, and views live as
// long as the object. Safetensors holds named tensors; npy holds one, found under any name and
// under "". Throws InvalidArgument with path and reason on a missing tensor and on a malformed
// file. Malformed are truncated files, a wrong header length, and offsets that overlap, overflow or
// leave holes. So are an unknown dtype, rank over kMaxRank, Fortran order, and big-endian data.
// Throws DeviceError when the operating system refuses.
class LOGITLESS_API TensorFile {
 public:
  explicit TensorFile(const std::string& path);
  // The same from bytes in memory, which must outlive the object. `name` appears in messages. The
  // format, npy or safetensors, is recognised by npy's magic number.
  TensorFile(std::span<const std::byte> bytes, const std::string& name);
  ~TensorFile();
  TensorFile(TensorFile&&) noexcept;
  TensorFile& operator=(TensorFile&&) noexcept;

  // Names in file order; {""} for npy.
  const std::vector<std::string>& names() const;
  bool contains(const std::string& name) const;
  // Throws InvalidArgument naming the existing tensors.
  ConstTensorView tensor(const std::string& name) const;
  // Key-value pairs of a safetensors header.
  const std::map<std::string, std::string>& metadata() const;

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

struct NamedTensor {
  std::string name = {};
  ConstTensorView view = {};  // any strides; written contiguous
};

// The purpose of a written file.
enum class FileUse {
  output,  // The user's own link is followed; permissions are the old file's, or the umask's.
  cache    // A link is replaced and never followed, and the owner alone may open the file.
};

// Writes to a temporary beside `path`, flushes and renames it: readers see the old file or the new
// one, never half of one. Throws InvalidArgument on a repeated or empty name, and where `path` is
// no regular file or another user's link. Throws DeviceError when the disk refuses, and leaves the
// old file.
LOGITLESS_API void write_safetensors(const std::string& path, std::span<const NamedTensor> tensors,
                                     const std::map<std::string, std::string>& metadata = {},
                                     FileUse use = FileUse::output);
// Writes any bytes in the same way.
LOGITLESS_API void write_file(const std::string& path, std::string_view bytes,
                              FileUse use = FileUse::output);
// Throws the error that writing a file at `path` would throw before its first byte. DeviceError:
// the folder is missing, cannot be written or cannot store the name. InvalidArgument: `path` is no
// regular file or another user's link. Leaves `path` unchanged and removes temporaries that killed
// processes left beside it.
LOGITLESS_API void check_writable(const std::string& path);
// Writes an npy file. Throws InvalidArgument for bf16, which npy lacks.
LOGITLESS_API void write_npy(const std::string& path, const ConstTensorView& tensor);

}  // namespace logitless
