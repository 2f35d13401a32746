// logitless: the command line. Results go to standard output; errors to standard error, one line
// each, or a JSON object with --json. Exit codes: 0 success, 1 failure while running, 2 invalid
// command line, 128 + n stopped by signal n.
#include <fcntl.h>
#include <fmt/core.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <csignal>
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

// Reports an error; with `json` also as an object on standard output.
int fail(const std::string& command, std::string message, int code, bool json) {
  message = in_options(std::move(message));
  for (std::size_t at = 0; (at = message.find('\n', at)) != std::string::npos;) {
    const bool last = message.find_first_not_of('\n', at) == std::string::npos;
    const bool list = at > 0 && message[at - 1] == ':';  // a list follows
    message.replace(at, last ? std::string::npos : 1, last ? "" : list ? " " : "; ");
  }
  print_note(fmt::format("logitless{}{}: {}\n", command.empty() ? "" : " ", command, message));
  if (!json) return code;
  try {
    print_json({{"error", message}, {"command", command}, {"exit_code", code}});
  } catch (const std::exception&) {
    // Standard output is closed; standard error has the message.
  }
  return code;
}

// Looks for --json without parsing the command line, because parsing may fail.
bool wants_json(int count, char** arguments) {
  return std::any_of(arguments + std::min(1, count), arguments + count,
                     [](const char* text) { return std::string_view(text) == "--json"; });
}

int run(int count, char** arguments) {
  CommandLine program("logitless", kHelp, fmt::format("logitless {}", version()));
  bool parsed = false;
  const auto failed = [&, json = wants_json(count, arguments)](const std::string& message,
                                                               int code) {
    const std::string& command = program.command();
    const int status = fail(command, message, code, json && speaks_for_run(command));
    if (!parsed) fail_ranks(command, message);
    return status;
  };
  try {
    const std::vector<Command> commands = {
        add_loss(program),   add_order(program),   add_plan(program),
        add_bench(program),  add_compile(program), add_train(program),
        add_report(program), add_kernels(program), add_calibrate(program)};
    program.footer(kExamples);
    if (!program.parse(count, arguments)) return 0;
    parsed = true;
    for (const Command& command : commands) {
      if (command.options.chosen()) command.run();
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

// Opens /dev/null in place of standard streams that are closed: a file of the run would take their
// numbers, and what is printed would be written into it. Nothing can be written to standard output
// then, which stays an error.
void open_closed_streams() {
  for (const int stream : {STDIN_FILENO, STDOUT_FILENO, STDERR_FILENO}) {
    if (::fcntl(stream, F_GETFD) == -1 && errno == EBADF)
      static_cast<void>(::open("/dev/null", stream == STDERR_FILENO ? O_WRONLY : O_RDONLY));
  }
}

}  // namespace
}  // namespace logitless::cli

int main(int count, char** arguments) {
  logitless::cli::open_closed_streams();
  // A limit on file sizes becomes an error of the write, as a full disk is.
  std::signal(SIGXFSZ, SIG_IGN);
  return logitless::cli::run(count, arguments);
}
