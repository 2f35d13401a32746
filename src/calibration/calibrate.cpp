#include <chrono>

#include "calibration/measure.h"
#include "core/check.h"
#include "core/own_files.h"
#include "device/card_file.h"
#include "kernels/device/cards.h"
#include "kernels/device/head.h"
#include "logitless/calibration.h"

namespace logitless {
namespace {

void require_gpu(const Context& context, const char* function) {
  require(context.device().kind == DeviceKind::cuda, function,
          ": context: expected a GPU's, got the CPU's");
}

}  // namespace

GpuCalibration measure_gpu(const Context& context) {
  require_gpu(context, "measure_gpu");
  const int index = cuda::current_device();
  GpuCalibration out;
  out.nominal = cuda::local_card(index);
  out.used = context.device().card;
  out.driver = cuda::card_facts(index).driver;
  const auto start = std::chrono::steady_clock::now();
  out.measured = measure_rates(context);
  out.seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
  return out;
}

GpuCalibration calibrate_gpu(const Context& context, bool refresh) {
  require_gpu(context, "calibrate_gpu");
  const int index = cuda::current_device();
  return calibrate(cuda::local_card(index), cuda::card_facts(index), cache_folder(), refresh,
                   [&] { return measure_rates(context); });
}

}  // namespace logitless
