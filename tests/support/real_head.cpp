#include "support/real_head.h"

#include <cstdlib>

namespace logitless::test {

std::string real_head_path(const std::string& name) {
  const char* folder = std::getenv("LOGITLESS_DATA_DIR");
  return std::string(folder == nullptr ? "" : folder) + "/real_head_" + name + ".safetensors";
}

Tensor dequantised_weight(const TensorFile& file) {
  const ConstTensorView q = file.tensor("weight_q");
  const ConstTensorView scale = file.tensor("weight_scale");
  Tensor weight(DType::bf16, {q.size(0), q.size(1)});
  const auto* codes = static_cast<const std::int8_t*>(q.data());
  const auto* scales = static_cast<const float*>(scale.data());
  for (std::int64_t at = 0; at < q.numel(); ++at)
    weight.set(at, static_cast<float>(codes[at]) * scales[at / q.size(1)]);
  return weight;
}

}  // namespace logitless::test
