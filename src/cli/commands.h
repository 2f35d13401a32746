// The commands of the program. Each adds itself to `program`, with its options and help.
#pragma once

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

}  // namespace logitless::cli
