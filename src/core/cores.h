// Number of cores that this process may use.
#pragma once

#include <filesystem>

namespace logitless {

// Returns the cores that the calling thread may use at once, at least 1. They are those of its
// affinity mask, but no more than the process's control groups allow on average.
int available_cores();

// Returns the quota of processor time in cores, rounded up; 0 without a quota or its files. It is
// the least of the control groups named in proc_cgroup (a /proc/PID/cgroup) and their parents.
// Their files, of version 1 or 2, are below `mount` (/sys/fs/cgroup).
int quota_cores(const std::filesystem::path& proc_cgroup, const std::filesystem::path& mount);

}  // namespace logitless
