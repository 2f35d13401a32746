// Options that several commands share, and how their texts are read.
#pragma once

#include <CLI/CLI.hpp>
#include <cstdint>
#include <functional>
#include <optional>
#include <stdexcept>
#include <string>

#include "logitless/logitless.h"

namespace logitless::cli {

// A command line that asks for something wrong: exit code 2.
class UsageError : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

// A signal ended the work early, as it should: exit code 128 + its number.
struct Stopped {
  int signal = 0;
};

inline constexpr int kRuntimeExit = 1;
inline constexpr int kUsageExit = 2;
inline constexpr int kSignalExit = 128;

// A command of the program: what it is called on the command line, and what it does once that is
// parsed.
struct Command {
  CLI::App* app = nullptr;
  std::function<void()> run;
};

// An option whose text `parse` turns into the value; InvalidArgument or UsageError from it names
// the option.
CLI::Option* add_parsed(CLI::App& app, const std::string& name, const std::string& placeholder,
                        std::function<void(const std::string&)> parse,
                        const std::string& description);
CLI::Option* add_number(CLI::App& app, const std::string& name, double& value,
                        const std::string& description);
// The same as a float or as an optional double.
CLI::Option* add_number(CLI::App& app, const std::string& name, float& value,
                        const std::string& description);
CLI::Option* add_number(CLI::App& app, const std::string& name, std::optional<double>& value,
                        const std::string& description);
// A whole number in [least, most].
CLI::Option* add_integer(CLI::App& app, const std::string& name, std::int64_t& value,
                         std::int64_t least, std::int64_t most, const std::string& description);

// An answer that cannot be written is better known before the work: throws UsageError when `path`
// is a folder, or in one that does not exist or cannot be written. An empty path is no answer.
void check_writable(const std::string& option, const std::string& path);
// Throws UsageError when there is no file of this name. An empty path is no file.
void check_exists(const std::string& option, const std::string& path);

// --threads --kernel --verbose
struct DeviceArgs {
  std::int64_t threads = 0;
  std::string kernel;
  bool verbose = false;

  void add(CLI::App& app);
  // With a trace on standard error if verbose.
  Context context() const;
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

  void add(CLI::App& app);
  PlanRequest request(const DeviceLimits& device) const;
};

// "forward", "stored:0.5", ... into the arguments. Throws UsageError.
void parse_plan(const std::string& text, PlanArgs& args);
// f32, bf16 or f16. Throws UsageError.
DType parse_head_dtype(const std::string& text);

// --dtype of hidden and weight, --grad-dtype
struct GradientArgs {
  bool same = true;  // as the input it is the gradient of; else f32

  void add(CLI::App& app);
  DType of(DType input) const { return same ? input : DType::f32; }
};

}  // namespace logitless::cli
