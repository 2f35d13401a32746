// The commands of the program. Each adds itself to `program`, with its options and help.
#pragma once

#include <string>

#include "cli/args.h"

namespace logitless::cli {

Command add_loss(CommandLine& program);
Command add_order(CommandLine& program);
Command add_plan(CommandLine& program);
Command add_bench(CommandLine& program);
Command add_calibrate(CommandLine& program);
Command add_compile(CommandLine& program);
Command add_train(CommandLine& program);
Command add_report(CommandLine& program);
Command add_kernels(CommandLine& program);

// Support for launched runs (train/launched_rank.h). speaks_for_run() returns whether this process
// prints the results. fail_ranks() reports an invalid command line to the other ranks.
bool speaks_for_run(const std::string& command);
void fail_ranks(const std::string& command, const std::string& reason);

}  // namespace logitless::cli
