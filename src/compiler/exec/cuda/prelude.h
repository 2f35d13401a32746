// What every generated kernel may use.
#pragma once

#include <string_view>

namespace logitless::ir {

// Numbers of 16 bits, functions that CUDA's built-in ones lack, reductions. Reads nothing but what
// prelude_machine() defines, so a test may put the host's in its place.
std::string_view prelude();

// Conversions by PTX and the exchange between lanes.
std::string_view prelude_machine();

}  // namespace logitless::ir
