// Options that several commands share, and how their texts are read.
#pragma once

#include <cstdint>
#include <functional>
#include <initializer_list>
#include <set>
#include <string>

#include "cli/options.h"
#include "logitless/logitless.h"
#include "train/output_files.h"

namespace logitless::cli {

// A signal ended the work early, as it should: exit code 128 + its number.
struct Stopped {
  int signal = 0;
};

inline constexpr int kRuntimeExit = 1;
inline constexpr int kUsageExit = 2;
inline constexpr int kSignalExit = 128;

// A command of the program: its options, and what it does once they are parsed.
struct Command {
  Options options;
  std::function<void()> run;
};

// An answer that cannot be written is better known before the work: throws UsageError when `path`
// is a folder, or in one that does not exist or cannot be written. An empty path is no answer.
void check_writable(const std::string& option, const std::string& path);
// The same, and throws UsageError when there is a file of another kind, which would be lost.
void check_output(const std::string& option, const std::string& path, train::FileKind kind);
// Throws UsageError when `path` is the file `other`, which `is_what` says ("the log"); either may
// be empty or not there yet.
void check_other_file(const std::string& option, const std::string& path, const std::string& other,
                      const std::string& is_what);
// Throws UsageError when there is no file of this name. An empty path is no file.
void check_exists(const std::string& option, const std::string& path);

// No option is read and then not used: throws UsageError "--NAME: `why`" for the first of `names`
// (without dashes) that is among those given.
void refuse_given(const std::set<std::string>& given, std::initializer_list<const char*> names,
                  const std::string& why);
// Bytes of --budget. Throws UsageError for 0, which is the default in the library's own calls.
std::size_t parse_budget(const std::string& text);

// --threads --kernel --verbose
struct DeviceArgs {
  std::int64_t threads = 0;
  std::string kernel;
  bool verbose = false;

  void add(Options& options);
  // With a trace on standard error if verbose.
  Context context() const;
};

// Returns the capability of the GPU that is here; 0 without one.
std::int64_t capability_here();
// What is known of a GPU that was named by its capability, or the one that is here, or else a
// Hopper.
DeviceLimits gpu_limits(std::int64_t capability);

// --device --capability: of a GPU that need not be here
struct GpuArgs {
  std::string what;   // is done for it
  std::string group;  // of the help
  bool on_gpu = false;
  std::int64_t capability = 0;

  void add(Options& options);
  // Throws UsageError for options of the other device.
  void check(const std::set<std::string>& given) const;
  DeviceLimits limits() const { return gpu_limits(capability); }
};

// --plan --budget
struct PlanArgs {
  bool automatic = true;
  PlanKind kind = PlanKind::forward;
  double stored_fraction = 0.0;
  std::size_t budget = 0;

  bool far() const { return kind == PlanKind::far_backward || kind == PlanKind::far_both; }
  // Gradients are wanted even if nothing is written.
  bool wants_gradients() const { return !automatic && kind != PlanKind::forward; }

  void add(Options& options);
  PlanRequest request(const DeviceLimits& device) const;
};

// "forward", "stored:0.5", ... into the arguments. Throws UsageError.
void parse_plan(const std::string& text, PlanArgs& args);
// f32, bf16 or f16. Throws UsageError.
DType parse_head_dtype(const std::string& text);

// --dtype of hidden and weight, --grad-dtype
struct GradientArgs {
  bool same = true;  // as the input it is the gradient of; else f32

  void add(Options& options);
  DType of(DType input) const { return same ? input : DType::f32; }
};

}  // namespace logitless::cli
