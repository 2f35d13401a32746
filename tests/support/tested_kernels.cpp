#include "support/mirror.h"

namespace logitless::test {

std::vector<std::string> tested_kernels() { return kernel_names(); }

}  // namespace logitless::test
