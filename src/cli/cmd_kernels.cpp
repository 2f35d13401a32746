// logitless kernels: lists the kernels in this build, and whether they run on this machine.
#include <algorithm>
#include <memory>

#include "cli/commands.h"
#include "cli/output.h"

namespace logitless::cli {
namespace {

void run(bool json) {
  const std::vector<std::string> all = kernel_names(false);
  const std::vector<std::string> here = kernel_names(true);
  Table table({"kernel", "runnable"}, "<<");
  Json list = Json::array();
  for (const std::string& name : all) {
    const bool runnable = std::find(here.begin(), here.end(), name) != here.end();
    table.add({name, runnable ? "yes" : "no"});
    list.push_back({{"name", name}, {"runnable", runnable}});
  }
  if (json) {
    print_json({{"kernels", list}});
  } else {
    print(table.text());
  }
}

}  // namespace

Command add_kernels(CommandLine& program) {
  Options sub =
      program.add_command("kernels", "List the kernels, best first, and which this machine runs");
  auto json = std::make_shared<bool>(false);
  sub.add_flag("--json", *json, "print one JSON object");
  return {sub, [json] { run(*json); }};
}

}  // namespace logitless::cli
