// logitless calibrate: measures the rates of the GPU, with which plans predict times.
#include <fmt/core.h>

#include <memory>

#include "cli/commands.h"
#include "cli/output.h"
#include "cli/rates.h"

namespace logitless::cli {
namespace {

Context context_of_gpu() {
  const std::string missing = gpu_missing();
  if (!missing.empty()) throw Unsupported(fmt::format("no GPU to measure: {}", missing));
  ContextOptions options;
  options.device = DeviceKind::cuda;
  return Context(std::move(options));
}

Json to_json(const GpuCalibration& c) {
  Json rates = Json::object();
  for (const RateRow& row : rate_rows(c))
    rates[row.name] = {{"nominal", row.nominal}, {"measured", row.measured}, {"used", row.used}};
  return {{"card", c.nominal.name},
          {"compute_capability", c.nominal.compute_capability},
          {"sms", c.nominal.sms},
          {"driver_cuda", c.driver},
          {"rates", rates},
          {"from_file", c.from_file},
          {"seconds", c.seconds},
          {"file", c.file},
          {"not_stored", c.not_stored}};
}

void run(bool refresh, bool json) {
  const GpuCalibration c = calibrate_gpu(context_of_gpu(), refresh);
  if (json) return print_json(to_json(c));
  Table table({"rate", "nominal", "measured", "plans use"}, "<>>>");
  for (const RateRow& row : rate_rows(c))
    table.add({row.what, row.text(row.nominal), row.text(row.measured), row.text(row.used)});
  const std::string from =
      c.from_file ? fmt::format("read from {}; --refresh measures again\n", c.file)
      : c.not_stored.empty()
          ? fmt::format("measured in {}, stored in {}\n", format_seconds(c.seconds), c.file)
          : fmt::format("measured in {}; not stored, so plans do not use it: {}\n",
                        format_seconds(c.seconds), c.not_stored);
  print(fmt::format("{}, compute capability {}.{}, {} SMs, CUDA {} of the driver\n\n{}\n{}",
                    c.nominal.name, c.nominal.compute_capability / 10,
                    c.nominal.compute_capability % 10, c.nominal.sms, c.driver, table.text(),
                    from));
}

}  // namespace

Command add_calibrate(CommandLine& program) {
  Options sub = program.add_command(
      "calibrate", "Measure the rates of this machine's GPU, with which plans predict times");
  struct Flags {
    bool refresh = false, json = false;
  };
  auto flags = std::make_shared<Flags>();
  sub.add_flag("--refresh", flags->refresh, "measure again where rates are stored");
  sub.add_flag("--json", flags->json, "print one JSON object");
  sub.footer(
      "The rates are stored beside the cache of kernels, under the card's name, and count for this "
      "driver and version\n"
      "of the library. Plans use those that differ by more than 5 % from the nominal ones, in "
      "processes that start\n"
      "afterwards. They may then choose other chunks, whose sums differ in the last bits; "
      "LOGITLESS_CALIBRATION=off\n"
      "ignores the file. Let nothing else run on the GPU meanwhile. Exits with 1 without a GPU.\n\n"
      "Examples:\n"
      "  logitless calibrate\n"
      "  CUDA_VISIBLE_DEVICES=1 logitless calibrate --refresh --json");
  return {sub, [flags] { run(flags->refresh, flags->json); }};
}

}  // namespace logitless::cli
