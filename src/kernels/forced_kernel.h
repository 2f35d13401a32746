// The kernel that the user selects by name, one of kernel_names().
#pragma once

#include <string>
#include <string_view>

namespace logitless {

// Returns LOGITLESS_CPU, or "" where it is unset or empty. Throws InvalidArgument on a name that is
// unknown or cannot run on this machine.
std::string forced_kernel();

// Throws likewise for a name that came from `source`.
void require_head_kernel(std::string_view source, std::string_view name);

}  // namespace logitless
