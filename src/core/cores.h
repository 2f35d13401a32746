// How many cores this process may use.
#pragma once

#include <filesystem>

namespace logitless {

// Cores that the calling thread may use at once, at least 1: those of its affinity mask, but no
// more than the process's control groups let it use on average.
int available_cores();

// Quota of processor time of the control groups named in proc_cgroup (a /proc/PID/cgroup) and of
// those above them, whose files are below `mount` (/sys/fs/cgroup), in cores rounded up; version 1
// and 2. 0: no quota, or no such files.
int quota_cores(const std::filesystem::path& proc_cgroup, const std::filesystem::path& mount);

}  // namespace logitless
