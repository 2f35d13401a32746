#include "core/cores.h"

#include <sched.h>

#include <algorithm>
#include <cmath>
#include <fstream>
#include <string>

namespace logitless {
namespace {

namespace fs = std::filesystem;

int affinity_cores() {
  constexpr int kMostCores = 16384;  // beyond the 1024 of a cpu_set_t, which the kernel may refuse
  cpu_set_t masks[kMostCores / CPU_SETSIZE];
  if (sched_getaffinity(0, sizeof(masks), masks) != 0) return 1;
  return std::max(1, CPU_COUNT_S(sizeof(masks), masks));
}

// Version 2: "QUOTA PERIOD" or "max PERIOD", in microseconds. Infinite without a quota.
double quota_v2(const fs::path& group) {
  std::ifstream file(group / "cpu.max");
  double quota = 0.0, period = 0.0;
  return file >> quota >> period && quota > 0.0 && period > 0.0 ? quota / period : HUGE_VAL;
}

// Version 1: one file for each; a quota of -1 is none.
double quota_v1(const fs::path& group) {
  std::ifstream quota_file(group / "cpu.cfs_quota_us"), period_file(group / "cpu.cfs_period_us");
  double quota = 0.0, period = 0.0;
  return quota_file >> quota && period_file >> period && quota > 0.0 && period > 0.0
             ? quota / period
             : HUGE_VAL;
}

// Returns the least quota of `path` (absolute, as the kernel names it) and its parent groups.
// Inside a container the mount may begin at the process's own group: missing folders have no quota.
double least_quota(const fs::path& mount, const fs::path& path, double (*quota)(const fs::path&)) {
  double least = quota(mount);
  fs::path group = mount;
  for (const fs::path& part : path.relative_path()) {
    group /= part;
    least = std::min(least, quota(group));
  }
  return least;
}

}  // namespace

int quota_cores(const fs::path& proc_cgroup, const fs::path& mount) {
  double least = HUGE_VAL;
  std::ifstream file(proc_cgroup);
  for (std::string line; std::getline(file, line);) {  // HIERARCHY:CONTROLLERS:PATH
    const std::size_t first = line.find(':');
    const std::size_t second = first == std::string::npos ? first : line.find(':', first + 1);
    if (second == std::string::npos) continue;
    const std::string controllers = line.substr(first + 1, second - first - 1);
    const fs::path path = line.substr(second + 1);
    if (controllers.empty()) {
      least = std::min(least, least_quota(mount, path, quota_v2));
    } else if (("," + controllers + ",").find(",cpu,") != std::string::npos) {
      for (const fs::path& folder : {mount / controllers, mount / "cpu"}) {
        least = std::min(least, least_quota(folder, path, quota_v1));
      }
    }
  }
  constexpr double kMostCores = 1e6;  // a quota beyond any machine counts as none
  return least < kMostCores ? std::max(1, static_cast<int>(std::ceil(least))) : 0;
}

int available_cores() {
  static const int quota = quota_cores("/proc/self/cgroup", "/sys/fs/cgroup");
  const int cores = affinity_cores();
  return quota > 0 ? std::min(cores, quota) : cores;
}

}  // namespace logitless
