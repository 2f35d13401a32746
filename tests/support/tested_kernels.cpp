#include <algorithm>

#include "support/mirror.h"

namespace logitless::test {

std::vector<std::string> tested_kernels() {
  std::vector<std::string> names = kernel_names();
#if defined(__SANITIZE_THREAD__) || defined(__SANITIZE_ADDRESS__)
  // Tests the two engines and the reference once each, not every instruction set.
  const auto other = [](const std::string& name) {
    return name != "avx2" && name != "amx_bf16_emulated" && name != "reference";
  };
  if (std::find(names.begin(), names.end(), "avx2") != names.end()) std::erase_if(names, other);
#endif
  return names;
}

}  // namespace logitless::test
