// logitless report: writes a page that shows a training run.
#include <fmt/core.h>

#include <filesystem>
#include <memory>

#include "cli/commands.h"
#include "cli/output.h"
#include "train/run/page.h"
#include "train/run/record.h"

namespace logitless::cli {
namespace {

struct ReportCommand {
  std::string run_path;
  std::string out;
  bool json = false;

  void run();
};

void ReportCommand::run() {
  check_exists("RUN", run_path);
  const std::string log = train::log_file(run_path);
  const std::string page =
      out.empty() ? std::filesystem::path(log).replace_extension(".html").string() : out;
  check_other_file("--out", page, log, "the log");
  check_other_file("--out", page, run_path, "RUN");
  check_output("--out", page, train::FileKind::page);
  const train::RunRecord record = train::read_run(run_path);
  write_file(page, train::run_page(record));
  if (json) {
    const auto last = [](const auto& list) {
      return list.empty() ? Json(nullptr) : Json(list.back().loss);
    };
    print_json({{"page", page},
                {"steps", record.steps.size()},
                {"validations", record.validations.size()},
                {"resumed", record.headers.size() - 1},
                {"loss", last(record.steps)},
                {"validation_loss", last(record.validations)},
                {"torn", record.torn}});
  } else {
    print(fmt::format("wrote {}: {} steps, {} validations\n", page, record.steps.size(),
                      record.validations.size()));
  }
}

}  // namespace

Command add_report(CommandLine& program) {
  Options sub = program.add_command("report", "A page (HTML) of a training run, from its log");
  auto args = std::make_shared<ReportCommand>();
  sub.add_text("RUN", args->run_path, "log of `logitless train`, or the checkpoint it lies beside")
      .required();
  sub.add_text("--out", args->out, "page to write (default: beside the log, .html)")
      .placeholder("FILE");
  sub.add_flag("--json", args->json, "print a JSON object: the page, counts, last losses");
  sub.footer(
      "Examples:\n"
      "  logitless train --save run.safetensors\n"
      "  logitless report run.safetensors          # writes run.log.html");
  return {sub, [args] { args->run(); }};
}

}  // namespace logitless::cli
