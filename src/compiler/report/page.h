// The parts of the compiler's page that are worth a test of their own.
#pragma once

#include <string>
#include <vector>

#include "logitless/compiler.h"

namespace logitless::report {

// A section with memory against predicted time, or against multiply-adds where no time is known,
// and a table of the points. Empty of no points.
std::string trade_off(std::vector<PlanPoint> points);

}  // namespace logitless::report
