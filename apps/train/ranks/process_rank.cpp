#include "train/ranks/process_rank.h"

#include <fmt/format.h>

#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <exception>
#include <mutex>
#include <thread>

#include "core/printable.h"
#include "logitless/device.h"
#include "logitless/error.h"
#include "train/ranks/rank_partition.h"

namespace logitless::train {
namespace {

std::shared_ptr<Communicator> join(const LaunchedRank& launched, std::chrono::milliseconds limit,
                                   const Print& waiting) {
  TcpOptions options;
  options.limit = limit;
  options.job = launched.job;
  options.waiting = waiting;
  return make_tcp(launched.host, launched.port, launched.rank, launched.size, options);
}

std::string text_of(const Facts& facts) {
  std::string text;
  for (const auto& [name, value] : facts) (((text += name) += '\0') += value) += '\0';
  return text;
}

Facts facts_of(std::string_view text) {
  Facts facts;
  const auto next = [&] {
    const std::size_t end = std::min(text.find('\0'), text.size());
    const std::string part(text.substr(0, end));
    text.remove_prefix(std::min(end + 1, text.size()));
    return part;
  };
  while (!text.empty()) {
    std::string name = next();
    facts.emplace_back(std::move(name), next());
  }
  return facts;
}

// Returns the facts of all ranks, by rank. Collective.
std::vector<Facts> gather(Communicator& ranks, const Facts& mine) {
  std::string text = text_of(mine);
  const auto bytes = static_cast<std::int64_t>(text.size());
  std::vector<std::int64_t> sizes(static_cast<std::size_t>(ranks.size()));
  ranks.all_gather_host(&bytes, sizes.data(), sizeof(bytes));
  const auto most = static_cast<std::size_t>(*std::max_element(sizes.begin(), sizes.end()));
  text.resize(most);
  std::string all(most * sizes.size(), '\0');
  ranks.all_gather_host(text.data(), all.data(), most);
  std::vector<Facts> facts;
  for (std::size_t r = 0; r < sizes.size(); ++r)
    facts.push_back(
        facts_of(std::string_view(all).substr(r * most, static_cast<std::size_t>(sizes[r]))));
  return facts;
}

// Returns whether one GPU is visible: launchers may show each process a different one.
bool sees_one_gpu() {
  return logitless::gpu_missing(0).empty() && !logitless::gpu_missing(1).empty();
}

std::string value_of(const Facts& facts, const std::string& name) {
  for (const auto& [other, value] : facts) {
    if (other == name) return value;
  }
  return "nothing";
}

// Returns the first difference to rank 0, or "".
std::string difference_of(const std::vector<Facts>& all) {
  const Facts& first = all.front();
  for (std::size_t r = 1; r < all.size(); ++r) {
    for (const auto& [name, value] : first) {
      const std::string other = value_of(all[r], name);
      if (other != value)
        return fmt::format("rank {}: {} {}, rank 0: {}", r, name, printable(other),
                           printable(value));
    }
  }
  return {};
}

}  // namespace

// Aborts the communicator of GPUs when the communicator of hosts has failed, which NCCL does not
// notice.
class ProcessRank::Watch {
 public:
  Watch(std::shared_ptr<Communicator> host, std::shared_ptr<Communicator> gpu)
      : host_(std::move(host)), gpu_(std::move(gpu)), thread_([this] { run(); }) {}
  ~Watch() { stop(); }
  Watch(const Watch&) = delete;
  Watch& operator=(const Watch&) = delete;

  void stop() {
    {
      const std::lock_guard lock(mutex_);
      ended_ = true;
    }
    changed_.notify_all();
    if (thread_.joinable()) thread_.join();
  }
  void abort(std::string_view reason) const noexcept { gpu_->abort(reason); }

 private:
  void run() {
    constexpr std::chrono::milliseconds kBetween{100};
    std::unique_lock lock(mutex_);
    while (!changed_.wait_for(lock, kBetween, [&] { return ended_; })) {
      try {
        host_->check();
      } catch (const std::exception& error) {
        gpu_->abort(error.what());
        return;
      }
    }
  }

  const std::shared_ptr<Communicator> host_, gpu_;
  std::mutex mutex_;
  std::condition_variable changed_;
  bool ended_ = false;
  std::thread thread_;
};

ProcessRank::ProcessRank(const LaunchedRank& launched, const Print& waiting)
    : launched_(launched), host_(join(launched, kRanksLimit, waiting)) {}

ProcessRank::~ProcessRank() = default;

void ProcessRank::run(const std::function<void()>& body) {
  try {
    body();
    meet();
    if (watch_ == nullptr) return;
    // A rank that leaves is no longer a failure; the communicators of GPUs end together.
    watch_->stop();
    meet();
    watch_.reset();
  } catch (const std::exception& error) {
    host_->abort(error.what());
    if (watch_ != nullptr) watch_->abort(error.what());
    throw;
  }
}

void ProcessRank::meet() { host_->all_gather_host(nullptr, nullptr, 0); }

void ProcessRank::agree(const Facts& mine) {
  const std::string difference = difference_of(gather(*host_, mine));
  if (difference.empty()) return;
  try {
    meet();  // all ranks have the same result before any of them ends
  } catch (const DeviceError&) {
    // this rank throws the same
  }
  throw InvalidArgument(difference);
}

void ProcessRank::first_on_rank_0(const std::function<void()>& body) {
  if (rank() == 0) body();
  meet();
  if (rank() > 0) body();
}

std::shared_ptr<Communicator> ProcessRank::communicator(DeviceKind device) {
  if (device == DeviceKind::cpu) return host_;
  use_gpu(gpu());
  const NcclId mine = rank() == 0 ? make_nccl_id() : NcclId{};
  std::vector<NcclId> ids(static_cast<std::size_t>(size()));
  host_->all_gather_host(&mine, ids.data(), sizeof(NcclId));
  NcclOptions options;
  options.limit = kRanksLimit;
  std::shared_ptr<Communicator> made = make_nccl(ids.front(), rank(), size(), options);
  watch_ = std::make_unique<Watch>(host_, made);
  return made;
}

int ProcessRank::gpu() const {
  const int number = std::max(launched_.on_host, 0);
  return sees_one_gpu() ? 0 : number;
}

std::string ProcessRank::gpu_missing() const {
  if (launched_.on_host < 0 && !sees_one_gpu())
    return fmt::format("expected LOCAL_RANK, which GPU is this process's, since {} is {}",
                       launched_.output_of, size());
  const std::string missing = logitless::gpu_missing(gpu());
  if (!missing.empty()) return fmt::format("{} ranks want a GPU each: {}", size(), missing);
  return nccl_missing();
}

void fail_launched_rank(std::string_view reason) noexcept {
  try {
    if (const auto launched = launched_rank())
      join(*launched, kCommunicatorLimit, {})->abort(reason);
  } catch (const std::exception&) {
    // The others notice when this process ends.
  }
}

}  // namespace logitless::train
