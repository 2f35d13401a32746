// Calibration of the GPU here: rates near the nominal ones, stored once, and contexts of a process
// that keep the rates they began with.
#include "logitless/calibration.h"

#include <gtest/gtest.h>

#include <cstdlib>
#include <fstream>

#include "logitless/device.h"
#include "logitless/plan.h"
#include "support/temp_dir.h"

namespace logitless {
namespace {

Context gpu_context() {
  ContextOptions options;
  options.device = DeviceKind::cuda;
  return Context(std::move(options));
}

TEST(CudaCalibration, IsStoredOnceAndChangesNoRunningProcess) {
  if (const std::string missing = gpu_missing(); !missing.empty()) GTEST_SKIP() << missing;
  const TempDir folder;
  setenv("LOGITLESS_CACHE", folder.file("cache").c_str(), 1);
  unsetenv("LOGITLESS_CALIBRATION");
  const Context context = gpu_context();
  EXPECT_FALSE(context.device().card.calibrated);

  const GpuCalibration first = calibrate_gpu(context);
  EXPECT_FALSE(first.from_file);
  ASSERT_EQ(first.not_stored, "");
  EXPECT_LT(first.seconds, 2.0);
  EXPECT_EQ(first.nominal, context.device().card);
  // Nominal rates may be off on a card that nobody measured, but not by so much.
  const auto near = [](double measured, double nominal) {
    EXPECT_GT(measured, nominal / 3);
    EXPECT_LT(measured, nominal * 3);
  };
  near(first.measured.gemm_flops, first.nominal.gemm_flops);
  near(first.measured.copy_bytes_per_second, first.nominal.copy_bytes_per_second);
  near(first.measured.row_bytes_per_second, first.nominal.row_bytes_per_second);
  if (context.device().compute_capability >= 80)
    near(first.measured.tile_flops, first.nominal.tile_flops);
  else
    EXPECT_EQ(first.measured.tile_flops, 0.0);

  const GpuCalibration second = calibrate_gpu(context);
  EXPECT_TRUE(second.from_file);
  EXPECT_EQ(second.measured, first.measured);
  EXPECT_EQ(second.used, first.used);
  EXPECT_EQ(gpu_context().device().card, context.device().card);

  std::ofstream(first.file) << "{";
  EXPECT_FALSE(calibrate_gpu(context).from_file);
  EXPECT_TRUE(calibrate_gpu(context).from_file);
  EXPECT_FALSE(calibrate_gpu(context, /*refresh=*/true).from_file);
  EXPECT_EQ(measure_gpu(context).used, context.device().card);
}

}  // namespace
}  // namespace logitless
