// The commands of the program. Each adds itself to `app`, with its options and help.
#pragma once

#include "cli/args.h"

namespace logitless::cli {

Command add_loss(CLI::App& app);
Command add_order(CLI::App& app);
Command add_plan(CLI::App& app);
Command add_bench(CLI::App& app);
Command add_compile(CLI::App& app);
Command add_train(CLI::App& app);
Command add_report(CLI::App& app);
Command add_kernels(CLI::App& app);

}  // namespace logitless::cli
