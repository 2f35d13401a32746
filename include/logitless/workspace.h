// The memory of a call beyond its inputs and outputs.
#pragma once

#include <cstddef>
#include <memory>

#include "logitless/context.h"
#include "logitless/export.h"
#include "logitless/memory.h"
#include "logitless/plan.h"

namespace logitless {

// One allocation of exactly plan.workspace_bytes(), counted by the context's meter. Reuse it
// between calls.
class LOGITLESS_API Workspace {
 public:
  Workspace(const Context& context, const LossPlan& plan);
  // One of this many bytes, for plans of other kinds.
  Workspace(const Context& context, std::size_t bytes);
  // The caller's memory, aligned to 64 bytes; on a GPU device memory, aligned to 256.
  Workspace(void* data, std::size_t bytes) : data_(data), bytes_(bytes) {}
  void* data() const { return data_; }
  std::size_t bytes() const { return bytes_; }

 private:
  Buffer owned_;
  std::shared_ptr<void> device_memory_;
  void* data_ = nullptr;
  std::size_t bytes_ = 0;
};

}  // namespace logitless
