// logitless: the command line. Results go to standard output; errors to standard error, one line
// each, or a JSON object where --json was given. Exit codes: 0 done, 1 it failed while running, 2
// the command line asked for something wrong, 128 + n signal n stopped it.
#include <fmt/core.h>

#include <algorithm>
#include <cstdio>
#include <new>
#include <string>
#include <string_view>
#include <vector>

#include "cli/commands.h"
#include "cli/output.h"

namespace logitless::cli {
namespace {

constexpr const char* kHelp =
    "Large-vocabulary cross entropy and its gradients without the logits.\n"
    "`logitless COMMAND --help` describes a command.";

constexpr const char* kExamples =
    "Examples:\n"
    "  logitless loss --hidden run.safetensors:hidden --weight model.safetensors:lm_head.weight "
    "\\\n"
    "                 --targets run.safetensors:targets\n"
    "  logitless plan --tokens 16384 --dim 4096 --vocab 128256 --budget 2GiB\n"
    "  logitless bench --tokens 2048 --dim 768 --vocab 50257\n"
    "  logitless train --steps 200 --save run.safetensors";

// With `json`, as an object on standard output, too.
int fail(const std::string& command, std::string message, int code, bool json) {
  message = in_options(std::move(message));
  for (std::size_t at = 0; (at = message.find('\n', at)) != std::string::npos;) {
    const bool last = message.find_first_not_of('\n', at) == std::string::npos;
    message.replace(at, last ? std::string::npos : 1, last ? "" : "; ");
  }
  fmt::print(stderr, "logitless{}{}: {}\n", command.empty() ? "" : " ", command, message);
  if (!json) return code;
  try {
    print_json({{"error", message}, {"command", command}, {"exit_code", code}});
  } catch (const std::exception&) {
    // Nobody reads standard output: standard error has it.
  }
  return code;
}

// What CLI11 found wrong, said with the program's own words where those are clearer.
std::string explain(const CLI::ParseError& error, const CLI::App& app, const std::string& name) {
  const std::vector<std::string> rest = app.remaining(true);
  if (!rest.empty() && (rest.front().front() == '-' || !name.empty())) {
    return fmt::format("'{}' is not an option; see logitless{}{} --help", rest.front(),
                       name.empty() ? "" : " ", name);
  }
  if (name.empty()) {
    return fmt::format(
        "{}; expected loss, order, plan, bench, compile, train, report or kernels (see logitless "
        "--help)",
        rest.empty() ? "no command was given"
                     : fmt::format("there is no command '{}'", rest.front()));
  }
  const std::string text = error.what();
  const std::string option = text.substr(0, text.find(':'));
  if (text.find("At Most 1 required") != std::string::npos)
    return option + ": given more than once";
  if (dynamic_cast<const CLI::ArgumentMismatch*>(&error) != nullptr)
    return option + ": expected a value after it";
  return text;
}

// Help as CLI11 makes it, without its runs of empty lines.
std::string tidy(std::string help) {
  for (std::size_t at = 0; (at = help.find("\n\n\n", at)) != std::string::npos;) help.erase(at, 1);
  return help;
}

// Before the command line is parsed, which may be what fails.
bool wants_json(int count, char** arguments) {
  return std::any_of(arguments + std::min(1, count), arguments + count,
                     [](const char* text) { return std::string_view(text) == "--json"; });
}

int run(int count, char** arguments) {
  CLI::App app(kHelp, "logitless");
  app.set_version_flag("--version", fmt::format("logitless {}", version()),
                       "print the version and leave");
  app.set_help_flag("-h,--help", "print this help and leave");
  app.require_subcommand(1);
  app.get_formatter()->column_width(30);
  std::string name;
  const auto failed = [&, json = wants_json(count, arguments)](const std::string& message,
                                                               int code) {
    return fail(name, message, code, json);
  };
  try {
    const std::vector<Command> commands = {add_loss(app),   add_order(app),   add_plan(app),
                                           add_bench(app),  add_compile(app), add_train(app),
                                           add_report(app), add_kernels(app)};
    app.footer(kExamples);  // now, or the commands would inherit it
    // Known before the whole line is parsed, so that errors in options can be told with the
    // command's name.
    for (const Command& command : commands) {
      command.app->preparse_callback(
          [&name, app = command.app](std::size_t) { name = app->get_name(); });
    }
    try {
      app.parse(count, arguments);
    } catch (const CLI::CallForHelp&) {
      print(tidy(app.help()));
      return 0;
    } catch (const CLI::Success& e) {
      return app.exit(e);
    } catch (const CLI::ParseError& e) {
      return failed(explain(e, app, name), kUsageExit);
    }
    for (const Command& command : commands) {
      if (command.app->parsed()) command.run();
    }
    return 0;
  } catch (const Stopped& e) {
    return kSignalExit + e.signal;
  } catch (const UsageError& e) {
    return failed(e.what(), kUsageExit);
  } catch (const InvalidArgument& e) {
    return failed(e.what(), kUsageExit);
  } catch (const InternalError& e) {
    return failed(fmt::format("internal error, please report it: {}", e.what()), kRuntimeExit);
  } catch (const std::bad_alloc&) {
    return failed("out of memory", kRuntimeExit);
  } catch (const std::exception& e) {
    return failed(e.what(), kRuntimeExit);
  }
}

}  // namespace
}  // namespace logitless::cli

int main(int count, char** arguments) { return logitless::cli::run(count, arguments); }
