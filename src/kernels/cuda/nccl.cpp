// Declares NCCL's functions and structs: it is loaded at run time, in any version from 2.19 on.
#include <limits>

#include "core/check.h"
#include "kernels/cuda/device/error.cuh"
#include "kernels/cuda/dynamic_library.h"
#include "kernels/device/exchange.h"

namespace logitless::cuda {
namespace {

using Comm = void*;

// Values of nccl.h.
constexpr int kSuccess = 0, kInProgress = 7;
constexpr int kUint8 = 1;
constexpr int kOldest = 21900;  // 2.19.0 has ncclCommSplit, the newest call of this file
constexpr int kUndefined = std::numeric_limits<int>::min();

struct Id {
  std::byte bytes[kNcclIdBytes];
};

// ncclConfig_t of 2.19. Later versions are longer, and accept a shorter one by its size and
// version.
struct Config {
  std::size_t size = sizeof(Config);
  unsigned magic = 0xcafebeef;
  unsigned version = kOldest;
  int blocking = 0;
  int cluster_size = kUndefined;
  int min_ctas = kUndefined;
  int max_ctas = kUndefined;
  const char* net_name = nullptr;
  int split_share = 0;
};

struct Functions {
  std::string missing;
  int (*version)(int*) = nullptr;
  int (*make_id)(Id*) = nullptr;
  int (*begin)(Comm*, int size, Id, int rank, Config*) = nullptr;
  int (*split)(Comm, int color, int key, Comm*, Config*) = nullptr;
  int (*state)(Comm, int*) = nullptr;
  int (*count)(Comm, int*) = nullptr;
  int (*rank)(Comm, int*) = nullptr;
  int (*finalize)(Comm) = nullptr;
  int (*destroy)(Comm) = nullptr;
  int (*abort)(Comm) = nullptr;
  int (*begin_group)() = nullptr;
  int (*end_group)() = nullptr;
  int (*all_gather)(const void*, void*, std::size_t, int, Comm, cudaStream_t) = nullptr;
  int (*send)(const void*, std::size_t, int, int peer, Comm, cudaStream_t) = nullptr;
  int (*receive)(void*, std::size_t, int, int peer, Comm, cudaStream_t) = nullptr;
  const char* (*text)(int) = nullptr;
  const char* (*last_error)(Comm) = nullptr;
};

Functions load() {
  // The loader finds the copy that a framework has loaded by this name.
  DynamicLibrary library("NCCL", {"libnccl.so.2"});
  Functions out;
  library.find("ncclGetVersion", out.version);
  library.find("ncclGetUniqueId", out.make_id);
  library.find("ncclCommInitRankConfig", out.begin);
  library.find("ncclCommSplit", out.split);
  library.find("ncclCommGetAsyncError", out.state);
  library.find("ncclCommCount", out.count);
  library.find("ncclCommUserRank", out.rank);
  library.find("ncclCommFinalize", out.finalize);
  library.find("ncclCommDestroy", out.destroy);
  library.find("ncclCommAbort", out.abort);
  library.find("ncclGroupStart", out.begin_group);
  library.find("ncclGroupEnd", out.end_group);
  library.find("ncclAllGather", out.all_gather);
  library.find("ncclSend", out.send);
  library.find("ncclRecv", out.receive);
  library.find("ncclGetErrorString", out.text);
  library.find("ncclGetLastError", out.last_error);
  out.missing = library.missing();
  int version = 0;
  if (out.version != nullptr && out.version(&version) == kSuccess && version < kOldest) {
    out.missing = concat("NCCL (libnccl.so.2) is of version code ", version,
                         "; 2.19 (21900) or a later one is needed");
  }
  return out;
}

const Functions& functions() {
  static const Functions loaded = load();
  return loaded;
}

const Functions& needed() {
  if (!functions().missing.empty()) throw Unsupported(functions().missing);
  return functions();
}

void require_nccl(int result, const char* what, Comm comm) {
  if (result == kSuccess || result == kInProgress) [[likely]]
    return;
  const Functions& nccl = functions();
  const char* const last = comm == nullptr ? nullptr : nccl.last_error(comm);
  throw DeviceError(concat(what, ": ", nccl.text(result),
                           last == nullptr || *last == '\0' ? "" : concat(" (", last, ")")));
}

Config config_of(int max_ctas) {
  Config config;
  if (max_ctas > 0) config.max_ctas = max_ctas;
  return config;
}

}  // namespace

const std::string& nccl_missing() { return functions().missing; }

void make_nccl_id(std::byte* id) {
  Id made;
  require_nccl(needed().make_id(&made), "ncclGetUniqueId", nullptr);
  std::memcpy(id, made.bytes, kNcclIdBytes);
}

NcclRank::NcclRank(const std::byte* id, int rank, int size, int max_ctas)
    : rank_(rank), size_(size) {
  const Functions& nccl = needed();
  Id all;
  std::memcpy(all.bytes, id, kNcclIdBytes);
  Config config = config_of(max_ctas);
  require_nccl(nccl.begin(comm_.get(), size, all, rank, &config), "ncclCommInitRankConfig",
               nullptr);
}

NcclRank::NcclRank(void* parent, int max_ctas) : parent_(parent) {
  const Functions& nccl = needed();
  require_nccl(nccl.count(parent, &size_), "ncclCommCount", nullptr);
  require_nccl(nccl.rank(parent, &rank_), "ncclCommUserRank", nullptr);
  Config config = config_of(max_ctas);
  require_nccl(nccl.split(parent, 0, rank_, comm_.get(), &config), "ncclCommSplit", parent);
}

bool NcclRank::ready() {
  const Functions& nccl = functions();
  int state = kSuccess;
  if (parent_ != nullptr) {
    // Until the parent completes the split there may be no communicator to query.
    require_nccl(nccl.state(parent_, &state), "ncclCommGetAsyncError", parent_);
    require_nccl(state, "ncclCommSplit", parent_);
    if (state == kInProgress || *comm_ == nullptr) return false;
    parent_ = nullptr;
  }
  require_nccl(nccl.state(*comm_, &state), "ncclCommGetAsyncError", *comm_);
  require_nccl(state, "NCCL", *comm_);
  return state == kSuccess;
}

void NcclRank::all_gather(const void* mine, void* all, std::size_t bytes_each, Stream stream) {
  require_nccl(functions().all_gather(mine, all, bytes_each, kUint8, *comm_,
                                      static_cast<cudaStream_t>(stream)),
               "ncclAllGather", *comm_);
}

void NcclRank::all_to_all(const void* slices, void* slices_of_all, std::size_t bytes_each,
                          Stream stream) {
  const Functions& nccl = functions();
  const auto queue = static_cast<cudaStream_t>(stream);
  const auto* from = static_cast<const std::byte*>(slices);
  auto* to = static_cast<std::byte*>(slices_of_all);
  require_nccl(nccl.begin_group(), "ncclGroupStart", *comm_);
  int result = kSuccess;
  const auto keep = [&](int one) {
    if (result == kSuccess || result == kInProgress) result = one;
  };
  for (int peer = 0; peer < size_; ++peer, from += bytes_each, to += bytes_each) {
    keep(nccl.send(from, bytes_each, kUint8, peer, *comm_, queue));
    keep(nccl.receive(to, bytes_each, kUint8, peer, *comm_, queue));
  }
  keep(nccl.end_group());
  require_nccl(result, "ncclSend and ncclRecv", *comm_);
}

void NcclRank::begin_group() { require_nccl(functions().begin_group(), "ncclGroupStart", *comm_); }
void NcclRank::end_group() { require_nccl(functions().end_group(), "ncclGroupEnd", *comm_); }

void NcclRank::finalize() {
  require_nccl(functions().finalize(*comm_), "ncclCommFinalize", *comm_);
}

void NcclRank::destroy() {
  Comm const comm = *comm_;
  *comm_ = nullptr;
  require_nccl(functions().destroy(comm), "ncclCommDestroy", nullptr);
}

void NcclRank::abort() noexcept {
  if (*comm_ != nullptr) functions().abort(*comm_);
  *comm_ = nullptr;
}

}  // namespace logitless::cuda
