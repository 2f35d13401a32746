// Guards against overwriting files of another kind than the command writes.
#pragma once

#include <string>

namespace logitless::train {

enum class FileKind {
  checkpoint,  // of `logitless train`
  weights,     // safetensors, but no checkpoint
  tensors,     // safetensors
  log,         // JSON lines of a run
  page         // HTML
};

// Throws InvalidArgument where `path` is a file of another kind, probably named by mistake. An
// empty file is of any kind.
void check_replaceable(const std::string& path, FileKind kind);

}  // namespace logitless::train
