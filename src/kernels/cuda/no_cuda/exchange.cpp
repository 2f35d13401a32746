// Stubs of NCCL and of peer copies for a build without CUDA.
#include "kernels/device/exchange.h"

#include "core/check.h"
#include "kernels/device/peers.h"

namespace logitless::cuda {
namespace {

[[noreturn]] void refuse() { throw Unsupported(nccl_missing()); }

}  // namespace

const std::string& nccl_missing() {
  static const std::string reason = "NCCL: this build has no CUDA";
  return reason;
}
void make_nccl_id(std::byte*) { refuse(); }

NcclRank::NcclRank(const std::byte*, int, int, int) { refuse(); }
NcclRank::NcclRank(void*, int) { refuse(); }
bool NcclRank::ready() { refuse(); }
void NcclRank::all_gather(const void*, void*, std::size_t, Stream) { refuse(); }
void NcclRank::all_to_all(const void*, void*, std::size_t, Stream) { refuse(); }
void NcclRank::begin_group() { refuse(); }
void NcclRank::end_group() { refuse(); }
void NcclRank::finalize() { refuse(); }
void NcclRank::destroy() { refuse(); }
void NcclRank::abort() noexcept {}

std::size_t PeerCopies::flag_bytes(int) { return 0; }
PeerCopies::PeerCopies(int, int, void*) { refuse(); }
PeerCopies::~PeerCopies() = default;
PeerMemory PeerCopies::allocate(std::size_t) { refuse(); }
bool PeerCopies::open(std::span<const PeerMemory>) { refuse(); }
void PeerCopies::free_latest() noexcept {}
void* PeerCopies::memory_of(std::size_t) const { refuse(); }
bool PeerCopies::holds(const void*, std::size_t) const { refuse(); }
void PeerCopies::all_gather(const void*, void*, std::size_t, Stream) const { refuse(); }
void PeerCopies::all_to_all(const void*, void*, std::size_t, Stream) const { refuse(); }
bool PeerCopies::done() const { refuse(); }
void PeerCopies::release_waits() const noexcept {}
void PeerCopies::close() noexcept {}
void PeerCopies::free() noexcept {}

}  // namespace logitless::cuda
