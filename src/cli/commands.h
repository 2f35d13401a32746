// The commands of the program. Each adds itself to `program`, with its options and help.
#pragma once

#include <string>

#include "cli/args.h"

namespace logitless::cli {

Command add_loss(CommandLine& program);
Command add_order(CommandLine& program);
Command add_plan(CommandLine& program);
Command add_bench(CommandLine& program);
Command add_compile(CommandLine& program);
Command add_train(CommandLine& program);
Command add_report(CommandLine& program);
Command add_kernels(CommandLine& program);

// A command may run as one of several processes (train/launched_rank.h): whether this one prints
// results; and what tells the others that its command line is wrong.
bool speaks_for_run(const std::string& command);
void fail_ranks(const std::string& command, const std::string& reason);

}  // namespace logitless::cli
