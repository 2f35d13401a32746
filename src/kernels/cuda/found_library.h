// A shared library that is loaded at run time. No CUDA headers.
#pragma once

#include <dlfcn.h>

#include <cstring>
#include <initializer_list>
#include <string>

#include "core/check.h"

namespace logitless::cuda {

class DynamicLibrary {
 public:
  // Loads the first of `names` that the loader finds.
  DynamicLibrary(const char* title, std::initializer_list<const char*> names) : title_(title) {
    for (const char* name : names) {
      library_ = dlopen(name, RTLD_NOW | RTLD_LOCAL);
      if (library_ != nullptr) return;
      missing_ += concat(missing_.empty() ? "" : " or ", name);
    }
    missing_ = concat(title, " (", missing_, ") is not found by the loader");
  }
  template <typename F>
  void find(const char* name, F& function) {
    if (library_ == nullptr) return;
    void* const found = dlsym(library_, name);
    if (found == nullptr && missing_.empty()) missing_ = concat(title_, " has no ", name);
    std::memcpy(&function, &found, sizeof(found));
  }
  // Returns what is missing, or empty.
  const std::string& missing() const { return missing_; }

 private:
  const char* title_;
  void* library_ = nullptr;  // never closed: its threads may outlive main
  std::string missing_;
};

}  // namespace logitless::cuda
