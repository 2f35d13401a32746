// Groups of ranks: threads of one process, processes, GPUs.
//
// A communicator is one rank's end of a group in a fixed order. It moves bytes and never adds: this
// library sums in the order of ranks, so results have the same bits from run to run.
#pragma once

#include <array>
#include <chrono>
#include <cstddef>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "logitless/context.h"
#include "logitless/export.h"

namespace logitless {

// Every rank makes the same calls in the same order, each from one thread at a time; calls of one
// group never overlap. A call is collective: it ends when all ranks have made it. On the CPU it
// returns then; on a GPU it is enqueued on the stream, a cudaStream_t, and returns at once.
//
// A group fails as a whole and permanently: when a rank aborts, is gone or does not arrive within
// the limit. Each other rank's call then throws DeviceError with the number of the call (counted
// from 1) and the ranks that had not arrived. Every later call throws it at once. Ranks whose calls
// differ in kind or size throw InvalidArgument where the communicator can see it, and the group
// fails.
class LOGITLESS_API Communicator {
 public:
  virtual ~Communicator() = default;

  virtual int rank() const = 0;  // in [0, size())
  virtual int size() const = 0;
  // The device whose memory all_gather and all_to_all move.
  virtual DeviceKind device() const = 0;

  // All-gather: sets all[r] to rank r's `mine`.
  //   mine [bytes_each]      all [size(), bytes_each]; mine may be all[rank()]
  // Any other overlap is not allowed. bytes_each may be 0, and then both may be null: nothing is
  // moved, and only threads wait for each other.
  virtual void all_gather(const void* mine, void* all, std::size_t bytes_each, void* stream) = 0;

  // All-to-all: sets `slices_of_all[r]` to the slice that rank r has for this rank; r = rank()
  // included. Both are [size(), bytes_each] and do not overlap.
  virtual void all_to_all(const void* slices, void* slices_of_all, std::size_t bytes_each,
                          void* stream) = 0;

  // all_gather between host memories, done on return. It serves planning and is not fast.
  virtual void all_gather_host(const void* mine, void* all, std::size_t bytes_each) {
    all_gather(mine, all, bytes_each, nullptr);
  }

  // On a GPU, exchanges between the two calls may be enqueued together at the end, which costs the
  // host less. No result of one of them is used before that.
  virtual void begin_group() {}
  virtual void end_group() {}

  // Returns `bytes` of GPU memory that belong to the group as long as it lives; collective. Calls
  // that ask for no more get the same memory. An all_gather or all_to_all that writes to it, at the
  // same offset on all ranks, runs on the copy engines and occupies no SM. Its source may be
  // anywhere on the GPU. Such calls must run one after another on the device, too: on one stream,
  // or ordered by events. Null, on all ranks, if the group has no such memory. Memory of earlier,
  // smaller requests stays allocated.
  virtual void* exchange_memory(std::size_t bytes) {
    (void)bytes;
    return nullptr;
  }

  // Returns whether calls may be captured into a CUDA graph.
  virtual bool capturable() const = 0;

  // Waits until the stream has completed all calls so far. If that takes longer than the limit, it
  // throws DeviceError and the group has failed. On the CPU it only throws if the group has failed.
  virtual void wait(void* stream, std::chrono::milliseconds limit) = 0;

  // Throws DeviceError if the group is known to have failed; communicates nothing.
  virtual void check() {}

  // Aborts the whole group. Waiting and later calls of other ranks throw, with this reason where
  // the communicator can carry it. May be called from any thread and repeatedly; the first reason
  // counts.
  virtual void abort(std::string_view reason) noexcept = 0;
};

// The longest wait of a rank for the others before it aborts the group.
inline constexpr std::chrono::milliseconds kCommunicatorLimit = std::chrono::minutes(1);

// Makes a group whose ranks are threads of this process, each with one of the communicators, by
// rank. It moves host memory. A rank whose communicator is destroyed has left: calls that wait for
// it throw at once. Throws InvalidArgument when size or limit is below 1.
LOGITLESS_API std::vector<std::shared_ptr<Communicator>> make_thread_group(
    int size, std::chrono::milliseconds limit = kCommunicatorLimit);

// Makes a group whose ranks are processes, of one host or several, with a TCP connection between
// each two. It moves host memory. Collective: returns when all ranks have called. Until then rank 0
// listens at `port` of all its addresses. The others connect to it at `host` and listen at free
// ports. Use it in trusted networks only: nothing is encrypted. Hosts must have the same byte
// order.
//
// Waiting calls and check() notice at once when a rank's process ends or its communicator is
// destroyed. They notice after 25 seconds when its host is switched off. Connections from outside
// the group do no harm. Ranks of another job are rejected and throw InvalidArgument that says so.
//
// Throws InvalidArgument on a rank, size, port, limit or job out of range. It also throws it where
// ranks differ in size or share a number (on all ranks of a job that has a name). Throws
// DeviceError when the port is taken, or with the ranks missing at the limit and the rejected
// connections.
LOGITLESS_API std::shared_ptr<Communicator> make_tcp(
    const std::string& host, int port, int rank, int size,
    std::chrono::milliseconds limit = kCommunicatorLimit);

struct TcpOptions {
  std::chrono::milliseconds limit = kCommunicatorLimit;  // to make the group, and of each call
  // Name of the job, at most 63 bytes: the same on all ranks, different for each job that might use
  // the port.
  std::string job = {};
  // Called while the group is made, on the waiting thread, with a text like "rank 0 of 4 waits for
  // ranks 1 and 3 at port 29500". make_tcp passes its exceptions on.
  std::function<void(std::string_view text)> waiting = {};
  // Time before its first call; it doubles with each further call.
  std::chrono::milliseconds waiting_after = std::chrono::seconds(5);
};

LOGITLESS_API std::shared_ptr<Communicator> make_tcp(const std::string& host, int port, int rank,
                                                     int size, const TcpOptions& options);

// The caller's own collectives: MPI, Gloo. The functions have the meaning of the methods above and
// report a failure by throwing.
struct CommunicatorCallbacks {
  int rank = 0;
  int size = 1;
  DeviceKind device = DeviceKind::cpu;
  bool capturable = false;
  std::function<void(const void* mine, void* all, std::size_t bytes_each, void* stream)>
      all_gather = {};
  std::function<void(const void* slices, void* slices_of_all, std::size_t bytes_each, void* stream)>
      all_to_all = {};
  // Required on a GPU and not allowed on the CPU, where all_gather serves and nothing needs waiting
  // for.
  std::function<void(const void* mine, void* all, std::size_t bytes_each)> all_gather_host = {};
  std::function<void(void* stream, std::chrono::milliseconds limit)> wait = {};
  // May be empty; the other ranks then notice by their own limits. Must not throw.
  std::function<void(std::string_view reason)> abort = {};
};

// Makes a communicator that calls the functions one at a time, and not for 0 bytes. Their
// exceptions become DeviceError with the call's number and kind, and every later call throws the
// same at once. Throws InvalidArgument when the rank is not in [0, size), and on a missing function
// or one that the CPU does not use, by name.
LOGITLESS_API std::shared_ptr<Communicator> make_callbacks(CommunicatorCallbacks callbacks);

// Returns "" if NCCL 2.19 or later is found at run time as libnccl.so.2, else the reason. It takes
// the copy that a framework has already loaded, or else the loader's.
LOGITLESS_API std::string nccl_missing();

struct NcclOptions {
  int max_ctas = 0;  // the most CTAs of a call's kernel; 0: NCCL chooses
  // The limit of waits on the host: making the group, enqueueing a call (the first ones connect the
  // ranks), all_gather_host, and calls in flight when the communicator is destroyed.
  std::chrono::milliseconds limit = kCommunicatorLimit;
  // Starts a thread that checks every 200 ms whether the process of another rank on this host has
  // ended. It then aborts the group, after 5 s where that rank had made the same calls. Kernels
  // that wait for the rank end, and the next call throws and names it. It serves programs whose
  // host waits for the GPU without wait().
  bool watch = false;
  // Provides exchange_memory() of 1 MiB and more for each rank, where all ranks are on one host and
  // their GPUs reach each other's memory. When a group fails, waiting work of the other ranks is
  // released a second later. It then still writes to other ranks' exchange_memory. The same on all
  // ranks.
  bool copy_engines = true;
};

// The id that all ranks of a new group need: made on one rank, sent to the others.
using NcclId = std::array<std::byte, 128>;
// Throws Unsupported where NCCL is missing, and DeviceError.
LOGITLESS_API NcclId make_nccl_id();

// Makes the communicator of one rank on the thread's current GPU. Its calls move that GPU's memory
// and may be captured. Ranks are threads or processes, each with its own GPU. Collective: returns
// when all ranks have called.
//
// Device memory: exchange_memory() and NCCL's buffers, which grow with the CTAs. They take some 32
// MB for each CTA that max_ctas allows, 1.4 GB on two H200s where NCCL chooses. Where all ranks are
// on one host, all_gather_host uses its shared memory. Elsewhere it allocates size() + 1 times its
// bytes of device memory while it runs, and waits.
//
// CUDA loads a kernel at its first launch, which may wait for the GPU while the whole process
// launches nothing. With a driver of CUDA 12.4 or later, ranks that are threads of one process
// therefore load the library's kernels when the group is made. Set CUDA_MODULE_LOADING=EAGER with
// an older driver, and where your own kernels are first launched beside exchanges. Such ranks also
// end together: the last destructor frees memory of all their GPUs, which waits for all work there.
// No call of another group may be in flight then.
//
// The output of a failed call is undefined: its waiting kernels are ended. Missing ranks are known
// only if they are on the same host, by some 8 KiB of shared memory a rank. It is a file in
// /dev/shm that has its name only while the group is made. Throws InvalidArgument when the rank is
// not in [0, size), or on an option; Unsupported where NCCL is missing; DeviceError.
LOGITLESS_API std::shared_ptr<Communicator> make_nccl(std::span<const std::byte, 128> id, int rank,
                                                      int size, const NcclOptions& options = {});

// Makes a separate group with the ranks of another ncclComm_t, in their order, by ncclCommSplit.
// The other one is not used afterwards: calls of the two may overlap. Collective; no call of the
// other one may be in flight. The other one must be ready and outlive this function only. If it is
// a blocking one (PyTorch's default), the split itself waits without a limit. Throws as make_nccl
// does.
LOGITLESS_API std::shared_ptr<Communicator> borrow_nccl(void* nccl_comm,
                                                        const NcclOptions& options = {});

}  // namespace logitless
