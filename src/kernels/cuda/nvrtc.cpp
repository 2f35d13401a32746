// Compiles CUDA C++ text to machine code with NVRTC.
#include "kernels/cuda/nvrtc.h"

#include <string>
#include <vector>

#include "core/check.h"
#include "core/own_files.h"
#include "kernels/cuda/cubin_cache.h"
#include "kernels/cuda/found_library.h"
#include "kernels/device/gpu_kernels.h"
#include "kernels/device/module.h"

namespace logitless::cuda {
namespace {

using NvrtcProgram = void*;

struct Functions {
  std::string missing;
  int (*version)(int*, int*) = nullptr;
  const char* (*error)(int) = nullptr;
  int (*create)(NvrtcProgram*, const char*, const char*, int, const char* const*,
                const char* const*) = nullptr;
  int (*destroy)(NvrtcProgram*) = nullptr;
  int (*compile)(NvrtcProgram, int, const char* const*) = nullptr;
  int (*log_size)(NvrtcProgram, std::size_t*) = nullptr;
  int (*log)(NvrtcProgram, char*) = nullptr;
  int (*cubin_size)(NvrtcProgram, std::size_t*) = nullptr;
  int (*cubin)(NvrtcProgram, char*) = nullptr;
};

Functions load() {
  DynamicLibrary library("NVRTC", {"libnvrtc.so.13", "libnvrtc.so.12", "libnvrtc.so"});
  Functions out;
  library.find("nvrtcVersion", out.version);
  library.find("nvrtcGetErrorString", out.error);
  library.find("nvrtcCreateProgram", out.create);
  library.find("nvrtcDestroyProgram", out.destroy);
  library.find("nvrtcCompileProgram", out.compile);
  library.find("nvrtcGetProgramLogSize", out.log_size);
  library.find("nvrtcGetProgramLog", out.log);
  library.find("nvrtcGetCUBINSize", out.cubin_size);
  library.find("nvrtcGetCUBIN", out.cubin);
  if (!library.missing().empty())
    out.missing = concat(library.missing(),
                         "; kernels of compiled programs need it: the PyPI package "
                         "nvidia-cuda-nvrtc has it, its folder belongs in LD_LIBRARY_PATH");
  return out;
}

const Functions& functions() {
  static const Functions loaded = load();
  if (!loaded.missing.empty()) throw Unsupported(loaded.missing);
  return loaded;
}

void require_nvrtc(int status, const char* what) {
  check(status == 0, what, ": NVRTC says ", functions().error(status));
}

std::vector<std::string> flags_for(int capability) {
  // Kernels for 9.0 and later may use architecture-specific instructions.
  const bool specific = capability >= 90 && instruction_capability(capability) == capability;
  return {concat("--gpu-architecture=sm_", capability, specific ? "a" : ""), "--std=c++17",
          "--disable-warnings", "--device-as-default-execution-space"};
}

std::string compile(std::string_view source, const std::vector<std::string>& flags) {
  const Functions& f = functions();
  const std::string text(source);
  NvrtcProgram made = nullptr;
  require_nvrtc(f.create(&made, text.c_str(), "program.cu", 0, nullptr, nullptr),
                "nvrtcCreateProgram");
  struct Destroy {
    const Functions& f;
    NvrtcProgram program;
    ~Destroy() { f.destroy(&program); }
  } const program{f, made};

  std::vector<const char*> options;
  for (const std::string& flag : flags) options.push_back(flag.c_str());
  const int status = f.compile(made, static_cast<int>(options.size()), options.data());
  if (status != 0) {
    std::size_t bytes = 0;
    require_nvrtc(f.log_size(made, &bytes), "nvrtcGetProgramLogSize");
    std::string log(bytes, '\0');
    require_nvrtc(f.log(made, log.data()), "nvrtcGetProgramLog");
    throw InternalError(
        concat("generated kernels for ", flags[0], ": ", f.error(status), "\n", log.c_str()));
  }
  std::size_t bytes = 0;
  require_nvrtc(f.cubin_size(made, &bytes), "nvrtcGetCUBINSize");
  std::string cubin(bytes, '\0');
  require_nvrtc(f.cubin(made, cubin.data()), "nvrtcGetCUBIN");
  return cubin;
}

}  // namespace

std::string compile_cuda(std::string_view source, int compute_capability) {
  return compile(source, flags_for(compute_capability));
}

std::string compile_cuda_fast(std::string_view source, int compute_capability) {
  int major = 0, minor = 0;
  require_nvrtc(functions().version(&major, &minor), "nvrtcVersion");
  std::vector<std::string> flags = flags_for(compute_capability);
  if (major >= 13) flags.emplace_back("--Ofast-compile=max");
  return compile(source, flags);
}

std::string cached_cubin(std::string_view source, int compute_capability) {
  int major = 0, minor = 0;
  require_nvrtc(functions().version(&major, &minor), "nvrtcVersion");
  std::string content = concat("NVRTC ", major, ".", minor, "\n");
  for (const std::string& flag : flags_for(compute_capability)) content += flag + "\n";
  content += source;
  return cached(cache_folder(), content, [&] { return compile_cuda(source, compute_capability); });
}

}  // namespace logitless::cuda
