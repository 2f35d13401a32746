// Options shared by several commands, and the parsing of their values.
#pragma once

#include <cstdint>
#include <functional>
#include <initializer_list>
#include <set>
#include <string>

#include "cli/options.h"
#include "logitless/logitless.h"
#include "train/run/output_files.h"

namespace logitless::cli {

// A signal ended the work early; the exit code is 128 + its number.
struct Stopped {
  int signal = 0;
};

inline constexpr int kRuntimeExit = 1;
inline constexpr int kUsageExit = 2;
inline constexpr int kSignalExit = 128;

// A command of the program: its options, and the function to call once they are parsed.
struct Command {
  Options options;
  std::function<void()> run;
};

// Checks before the work that an output can be written. Throws UsageError when `path` is a folder,
// or its folder does not exist or cannot be written. An empty path is no output.
void check_writable(const std::string& option, const std::string& path);
// Does the same, and also throws UsageError when a file of another kind exists, which would be
// lost.
void check_output(const std::string& option, const std::string& path, train::FileKind kind);
// Throws UsageError when `path` is the file `other`, described by `is_what` ("the log"); either may
// be empty or missing.
void check_other_file(const std::string& option, const std::string& path, const std::string& other,
                      const std::string& is_what);
// Throws UsageError when there is no file of this name. An empty path is no file.
void check_exists(const std::string& option, const std::string& path);

// Refuses options without effect: throws UsageError "--NAME: `why`" for the first of `names`
// (without dashes) that was given.
void refuse_given(const std::set<std::string>& given, std::initializer_list<const char*> names,
                  const std::string& why);
// Parses the bytes of --budget. Throws UsageError for 0, which means the default in the library.
std::size_t parse_budget(const std::string& text);

// --threads --kernel --verbose
struct DeviceArgs {
  std::int64_t threads = 0;
  std::string kernel;
  bool verbose = false;

  void add(Options& options);
  // Returns a context, with a trace on standard error if verbose.
  Context context() const;
};

// Returns the compute capability of this machine's GPU; 0 without one.
std::int64_t capability_here();

// --device --capability --card: a GPU that need not exist on this machine
struct GpuArgs {
  std::string what;   // the action, in messages
  std::string group;  // heading in the help text
  bool on_gpu = false;
  std::int64_t capability = 0;
  GpuCard card = {};

  void add(Options& options);
  // Throws UsageError for options of the other device, and for a card of another capability.
  void check(const std::set<std::string>& given) const;
  // Returns the limits of the card or the usual one of the capability; without either, those of
  // this machine's GPU, or else of an H200.
  DeviceLimits limits() const;
};

// --plan --budget
struct PlanArgs {
  bool automatic = true;
  PlanKind kind = PlanKind::forward;
  double stored_fraction = 0.0;
  std::size_t budget = 0;
  float expected_ignored = 0.0f;  // of a command that has the option

  bool far() const { return kind == PlanKind::far_backward || kind == PlanKind::far_both; }
  // Returns whether the plan implies gradients even if none are written.
  bool wants_gradients() const { return !automatic && kind != PlanKind::forward; }

  void add(Options& options);
  PlanRequest request(const DeviceLimits& device) const;
};

// Parses "forward", "stored:0.5", ... Throws UsageError.
void parse_plan(const std::string& text, PlanArgs& args);
// Parses f32, bf16 or f16. Throws UsageError.
DType parse_head_dtype(const std::string& text);
// Parses ieee, tf32 or bf16x3. Throws UsageError.
Precision parse_precision(const std::string& text);

// --dtype of hidden and weight, --grad-dtype
struct GradientArgs {
  bool same = true;  // each gradient has the dtype of its input; else f32

  void add(Options& options);
  DType of(DType input) const { return same ? input : DType::f32; }
};

}  // namespace logitless::cli
