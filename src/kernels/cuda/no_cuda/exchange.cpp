// Stands in for NCCL in a build without CUDA.
#include "core/check.h"
#include "kernels/device_exchange.h"

namespace logitless::cuda {
namespace {

[[noreturn]] void refuse() { throw Unsupported(nccl_missing()); }

}  // namespace

const std::string& nccl_missing() {
  static const std::string reason = "NCCL: this build has no CUDA";
  return reason;
}
void make_nccl_id(std::byte*) { refuse(); }

NcclRank::NcclRank(const std::byte*, int, int, int, bool) { refuse(); }
NcclRank::NcclRank(void*, int, bool) { refuse(); }
bool NcclRank::ready() { refuse(); }
void NcclRank::all_gather(const void*, void*, std::size_t, Stream) { refuse(); }
void NcclRank::all_to_all(const void*, void*, std::size_t, Stream) { refuse(); }
void NcclRank::begin_group() { refuse(); }
void NcclRank::end_group() { refuse(); }
bool NcclRank::has_windows() { return false; }
void* NcclRank::allocate(std::size_t) { refuse(); }
void NcclRank::free(void*) noexcept {}
void NcclRank::share(void*, std::size_t) { refuse(); }
void NcclRank::unshare() { refuse(); }
void NcclRank::finalize() { refuse(); }
void NcclRank::destroy() { refuse(); }
void NcclRank::abort() noexcept {}

}  // namespace logitless::cuda
