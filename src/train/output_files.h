// Files that a command writes over: only those of the kind that it writes itself.
#pragma once

#include <string>

namespace logitless::train {

enum class FileKind {
  checkpoint,  // of logitless train
  weights,     // safetensors, but no checkpoint
  tensors,     // safetensors
  log,         // JSON lines of a run
  page         // HTML
};

// Throws InvalidArgument where `path` is a file of another kind, which `path` was hardly meant to
// replace. An empty file is of any kind.
void check_replaceable(const std::string& path, FileKind kind);

}  // namespace logitless::train
