#include "train/ranks/launched_rank.h"

#include <fmt/format.h>

#include <charconv>
#include <cstdlib>
#include <string_view>

#include "logitless/error.h"

namespace logitless::train {
namespace {

using Environment = std::function<const char*(const char*)>;

// The environment variables of a launcher; null: it has none.
struct Launcher {
  const char* rank;
  const char* size;
  const char* on_host;
  const char* hosts;          // number of hosts, or
  const char* ranks_on_host;  // number of ranks on this host
  const char* also;           // required as well: otherwise the others are not for this process
  const char* job;            // name of the run
};

// A batch script of Slurm also has SLURM_NTASKS, but is no step of the job.
constexpr Launcher kLaunchers[] = {
    {"RANK", "WORLD_SIZE", "LOCAL_RANK", nullptr, nullptr, nullptr, "TORCHELASTIC_RUN_ID"},
    {"OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK", nullptr,
     "OMPI_COMM_WORLD_LOCAL_SIZE", nullptr, "PMIX_NAMESPACE"},
    {"PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", nullptr, "MPI_LOCALNRANKS", nullptr, nullptr},
    {"SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID", "SLURM_NNODES", nullptr, "SLURM_STEP_ID",
     "SLURM_JOB_ID"},
};
constexpr int kMostRanks = 1024;
constexpr int kMostPort = 65535;
// torchrun itself listens on MASTER_PORT.
constexpr const char* kAgentStore = "TORCHELASTIC_USE_AGENT_STORE";
constexpr int kBehindAgent = 1000;

class Reader {
 public:
  explicit Reader(const Environment& environment) : environment_(environment) {}

  bool has(const char* name) const { return name != nullptr && environment_(name) != nullptr; }
  std::string text(const char* name) const { return has(name) ? environment_(name) : ""; }
  int number(const char* name, int least, int most) const {
    const std::string value = text(name);
    int result = 0;
    const auto [end, error] = std::from_chars(value.data(), value.data() + value.size(), result);
    if (error != std::errc() || end != value.data() + value.size() || result < least ||
        result > most)
      throw InvalidArgument(fmt::format("{}: expected a whole number from {} to {}, got '{}'", name,
                                        least, most, value));
    return result;
  }

 private:
  const Environment& environment_;
};

bool on_one_host(const Reader& read, const Launcher& launcher, int size) {
  if (read.has(launcher.hosts)) return read.number(launcher.hosts, 1, kMostRanks) == 1;
  return read.has(launcher.ranks_on_host) &&
         read.number(launcher.ranks_on_host, 1, kMostRanks) == size;
}

// The longest name of a run in a greeting. torchrun gives "none" for a run without a name.
constexpr std::size_t kMostJob = 63;

std::string job_of(const Reader& read, const Launcher& launcher) {
  std::string job = read.text("LOGITLESS_JOB");
  if (job.size() > kMostJob)
    throw InvalidArgument(
        fmt::format("LOGITLESS_JOB: expected {} bytes at most, got {}", kMostJob, job.size()));
  if (!job.empty() || launcher.job == nullptr) return job;
  job = read.text(launcher.job);
  if (job == "none") job.clear();
  if (!job.empty() && launcher.also != nullptr) job += "." + read.text(launcher.also);
  return job.substr(0, kMostJob);
}

LaunchedRank read_rank(const Reader& read, const Launcher& launcher, int size) {
  LaunchedRank found;
  found.output_of = launcher.size;
  found.size = size;
  found.rank = read.number(launcher.rank, 0, size - 1);
  found.job = job_of(read, launcher);
  if (read.has(launcher.on_host)) found.on_host = read.number(launcher.on_host, 0, kMostRanks);
  found.host = read.text("MASTER_ADDR");
  if (found.host.empty() && on_one_host(read, launcher, size)) found.host = "127.0.0.1";
  const auto missing = [&](const char* name, const char* what) {
    throw InvalidArgument(fmt::format("{}: expected {}, since {} is {}, got nothing", name, what,
                                      launcher.size, size));
  };
  if (found.host.empty()) missing("MASTER_ADDR", "the host of rank 0");
  if (!read.has("MASTER_PORT")) missing("MASTER_PORT", "a port of rank 0's host that is free");
  found.port = read.number("MASTER_PORT", 1, kMostPort);
  if (read.text(kAgentStore) == "True")
    found.port += found.port + kBehindAgent <= kMostPort ? kBehindAgent : -kBehindAgent;
  return found;
}

}  // namespace

std::optional<LaunchedRank> find_launched_rank(const Environment& environment) {
  const Reader read(environment);
  for (const Launcher& launcher : kLaunchers) {
    if (!read.has(launcher.rank) || !read.has(launcher.size)) continue;
    if (launcher.also != nullptr && !read.has(launcher.also)) continue;
    const int size = read.number(launcher.size, 1, kMostRanks);
    if (size > 1) return read_rank(read, launcher, size);
  }
  return std::nullopt;
}

std::optional<LaunchedRank> launched_rank() {
  return find_launched_rank([](const char* name) { return std::getenv(name); });
}

}  // namespace logitless::train
