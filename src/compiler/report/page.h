// Parts of the HTML report that have tests.
#pragma once

#include <string>
#include <vector>

#include "logitless/compiler.h"

namespace logitless::report {

// Returns a section with a chart of memory against predicted time and a table of the points.
// Without known times the chart has multiply-adds. Returns an empty text without points.
std::string trade_off(std::vector<PlanPoint> points);

}  // namespace logitless::report
