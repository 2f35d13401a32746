#include "kernels/cpu/tensor/level.h"

#include <hwy/highway.h>

#include "kernels/cpu/features.h"
#include "kernels/forced_kernel.h"

namespace logitless::cpu {
namespace {

TensorLevel& level() {
  static TensorLevel chosen = tensor_level_of(forced_kernel());
  return chosen;
}

}  // namespace

TensorLevel tensor_level_of(std::string_view kernel) {
  TensorLevel best;
  best.targets = hwy::SupportedTargets();
#if HWY_ARCH_X86
  constexpr std::int64_t kAvx512 = HWY_AVX3 | HWY_AVX3_DL;
  if (kernel.empty()) {
    best.tiles = amx_bf16_missing().empty();
    best.dot = !best.tiles && avx512_bf16_missing().empty() && dot_product_is_fast();
    return best;
  }
  best.tiles = kernel == "amx_bf16";
  best.dot = kernel == "avx512_bf16";
  if (best.tiles || best.dot || kernel == "avx512") return best;
  best.targets &= ~kAvx512;
  if (kernel == "avx2") return best;
#else
  if (kernel.empty() || kernel == "neon") return best;
#endif
  best.targets = 0;
  best.emulated = kernel == "amx_bf16_emulated";
  return best;
}

const TensorLevel& tensor_level() { return level(); }
void set_tensor_level(const TensorLevel& wanted) { level() = wanted; }

}  // namespace logitless::cpu
