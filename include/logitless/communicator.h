// Ranks that work together: threads of one process, processes, GPUs.
//
// A communicator is one rank's end of a group in a fixed order. It moves bytes and never adds: sums
// are made by this library in the order of ranks, so results have the same bits from run to run.
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
// A group fails as a whole and for good. When a rank gives up, is gone or does not arrive within
// the limit, each other rank's call throws DeviceError with the number of the call (counted from 1)
// and the ranks that had not arrived; so does every later call, at once. Ranks whose calls differ
// in kind or size throw InvalidArgument where the communicator can see it, and the group has
// failed, too.
class LOGITLESS_API Communicator {
 public:
  virtual ~Communicator() = default;

  virtual int rank() const = 0;  // in [0, size())
  virtual int size() const = 0;
  // Whose memory all_gather and all_to_all move.
  virtual DeviceKind device() const = 0;

  // all[r] = what rank r gave as mine:
  //   mine [bytes_each]      all [size(), bytes_each]; mine may be all[rank()]
  // Memory that overlaps otherwise is not allowed. bytes_each may be 0, and then both may be null:
  // nothing is moved, and only threads wait for each other.
  virtual void all_gather(const void* mine, void* all, std::size_t bytes_each, void* stream) = 0;

  // pieces_of_all[r] = the piece that rank r gave for this rank, pieces[rank()] of its own:
  //   pieces, pieces_of_all [size(), bytes_each]; they do not overlap
  virtual void all_to_all(const void* pieces, void* pieces_of_all, std::size_t bytes_each,
                          void* stream) = 0;

  // all_gather between the hosts' memories, done when it returns. For plans, not for speed.
  virtual void all_gather_host(const void* mine, void* all, std::size_t bytes_each) {
    all_gather(mine, all, bytes_each, nullptr);
  }

  // Of a GPU: exchanges between the two may be enqueued together, at the end, which costs the host
  // less than one by one. Nothing that one of them writes is used before.
  virtual void begin_group() {}
  virtual void end_group() {}

  // Of a GPU, collective: `bytes` of its memory that belong to the group as long as it lives, and
  // the same memory for every call that asks for no more. An all_gather or all_to_all that writes
  // to it (`all`, `pieces_of_all`), at the same offset on all ranks, is moved by the copy engines
  // and takes nothing of the processors that kernels run on; what is read may be anywhere on the
  // GPU. Calls of the group that use it run one after another on the device, too: on one stream, or
  // ordered by events. Null, on all ranks: the group has no such memory. What was asked for before
  // stays taken.
  virtual void* exchange_memory(std::size_t bytes) {
    (void)bytes;
    return nullptr;
  }

  // Whether calls may be captured into a CUDA graph.
  virtual bool capturable() const = 0;

  // Waits until the stream is done with all calls so far; throws DeviceError when that takes longer
  // than the limit, and the group has failed. On the CPU it only throws if the group has failed.
  virtual void wait(void* stream, std::chrono::milliseconds limit) = 0;

  // Throws DeviceError if the group is known to have failed; asks nobody.
  virtual void check() {}

  // Gives up, for the whole group: calls that other ranks wait in throw with this reason where the
  // communicator can carry it, as does every later call. From any thread, and more than once (the
  // first counts).
  virtual void abort(std::string_view reason) noexcept = 0;
};

// How long a rank waits for the others before it gives the group up.
inline constexpr std::chrono::milliseconds kCommunicatorLimit = std::chrono::minutes(1);

// A group whose ranks are threads of this process, each with one of the communicators, by rank; it
// moves the host's memory. A rank whose communicator is destroyed has left: calls that wait for it
// throw at once. Throws InvalidArgument when size or limit is below 1.
LOGITLESS_API std::vector<std::shared_ptr<Communicator>> make_thread_group(
    int size, std::chrono::milliseconds limit = kCommunicatorLimit);

// A group whose ranks are processes, of one host or several, connected by TCP, each with each; it
// moves the host's memory. Collective: returns when all ranks have called. Rank 0 listens at `port`
// of all its addresses until then, the others find it at `host` and listen at ports that are free.
// For networks whose machines trust each other: nothing is encrypted, and hosts have the same order
// of bytes. A rank whose process has ended, or whose communicator is destroyed, is missed at once
// by calls that wait for it and by check(); one whose host is switched off after 25 seconds. Who
// connects and is no rank of the group ends nothing: ranks of another job are turned away, and
// throw InvalidArgument saying so. Throws InvalidArgument on a rank, size, port, limit or job out
// of range, and where this rank's size is not the others' or another one has its number (on all
// ranks of a job that has a name); DeviceError naming the ranks that have not come within the limit
// and who was turned away, or when the port is taken.
LOGITLESS_API std::shared_ptr<Communicator> make_tcp(
    const std::string& host, int port, int rank, int size,
    std::chrono::milliseconds limit = kCommunicatorLimit);

struct TcpOptions {
  std::chrono::milliseconds limit = kCommunicatorLimit;  // to be made, and of each call
  // The same on all ranks, and another one in each job that might use the port: 63 bytes at most.
  std::string job = {};
  // Called while the group is made, on the thread that waits, with what it waits for: "rank 0 of 4
  // waits for ranks 1 and 3 at port 29500". What it throws make_tcp throws.
  std::function<void(std::string_view text)> waiting = {};
  // When it is called first; the next time is after twice as long, and so on.
  std::chrono::milliseconds waiting_after = std::chrono::seconds(5);
};

LOGITLESS_API std::shared_ptr<Communicator> make_tcp(const std::string& host, int port, int rank,
                                                     int size, const TcpOptions& options);

// Collectives of the caller's: MPI, Gloo. The functions have the meaning of the methods above, and
// tell a failure by throwing.
struct CommunicatorCallbacks {
  int rank = 0;
  int size = 1;
  DeviceKind device = DeviceKind::cpu;
  bool capturable = false;
  std::function<void(const void* mine, void* all, std::size_t bytes_each, void* stream)>
      all_gather = {};
  std::function<void(const void* pieces, void* pieces_of_all, std::size_t bytes_each, void* stream)>
      all_to_all = {};
  // Of a GPU's only, and needed there; on the CPU all_gather serves, and there is nothing to wait
  // for.
  std::function<void(const void* mine, void* all, std::size_t bytes_each)> all_gather_host = {};
  std::function<void(void* stream, std::chrono::milliseconds limit)> wait = {};
  // May be empty: then the others learn of it by limits of the caller's. Must not throw.
  std::function<void(std::string_view reason)> abort = {};
};

// Calls the functions one at a time, and not for 0 bytes. What one throws comes out as DeviceError
// with the call's number and kind, and every later call throws the same at once. Throws
// InvalidArgument when the rank is not in [0, size), or naming a function that is missing, or that
// the CPU has no use for.
LOGITLESS_API std::shared_ptr<Communicator> make_callbacks(CommunicatorCallbacks callbacks);

// GPUs by NCCL, 2.19 or later, found at run time as libnccl.so.2: the copy that a framework has
// loaded already, or else the loader's. Empty, or why there is none.
LOGITLESS_API std::string nccl_missing();

struct NcclOptions {
  int max_ctas = 0;  // the most thread blocks of a call's kernel; 0: NCCL chooses
  // Of the host's waits: for the group to be made, a call to be enqueued (the first ones connect
  // the ranks), all_gather_host, and calls in flight when the communicator is destroyed.
  std::chrono::milliseconds limit = kCommunicatorLimit;
  // A thread that looks every 200 ms whether the process of another rank of this host has ended,
  // and then gives the group up, after 5 s where that rank had made the same calls: kernels that
  // wait for it end, and the next call throws naming it.
  // For programs whose host waits for the GPU without wait().
  bool watch = false;
  // Has exchange_memory() of 1 MiB for each rank and more, where all ranks are on one host and
  // their GPUs reach each other's memory. When a group fails, what waits in one of the others is
  // let go a second later, and writes to other ranks' exchange_memory what it would have written.
  // The same on all ranks.
  bool copy_engines = true;
};

// What the ranks of a group that is made must all be given: made on one rank, sent to the others.
using NcclId = std::array<std::byte, 128>;
// Throws Unsupported where NCCL is missing, DeviceError.
LOGITLESS_API NcclId make_nccl_id();

// One rank on the thread's current GPU; its calls move that GPU's memory and may be captured. Ranks
// are threads or processes, each with a GPU of its own. Collective: returns when all ranks have
// called. Device memory: NCCL's buffers, which grow with the thread blocks: some 32 MB for each
// that max_ctas allows, 1.4 GB on two H200s where NCCL chooses; and exchange_memory(). Where all
// ranks are on one host all_gather_host goes by its shared memory; elsewhere it allocates size() +
// 1 times its bytes of the device's while it runs, and waits. Ranks that are threads of one process
// load the library's kernels into their GPU when the group is made, with a driver of CUDA 12.4 or
// later: CUDA loads a kernel at its first launch, which may wait for the GPU while the whole
// process launches nothing, so set CUDA_MODULE_LOADING=EAGER with an older one, and where kernels
// of your own are first launched beside exchanges. They end together: the last one to be destroyed
// frees memory of all their GPUs, which waits for whatever runs there, so no call of another group
// may be in flight. What a call that failed has written is undefined: the kernels that waited are
// ended. Which ranks are missing is known of those on the same host, by some 8 KiB a rank of shared
// memory (a file in /dev/shm that has its name only while the group is made). Throws
// InvalidArgument when the rank is not in [0, size), or on an option; Unsupported where NCCL is
// missing; DeviceError.
LOGITLESS_API std::shared_ptr<Communicator> make_nccl(std::span<const std::byte, 128> id, int rank,
                                                      int size, const NcclOptions& options = {});

// A group of its own with the ranks and their order of another ncclComm_t, which is not used any
// further (ncclCommSplit): calls of the two may overlap. Collective; no call of the other one may
// be in flight. The other one must be ready and outlive this function only. Of a blocking one
// (PyTorch's default) the split itself waits without a limit. Throws as make_nccl.
LOGITLESS_API std::shared_ptr<Communicator> borrow_nccl(void* nccl_comm,
                                                        const NcclOptions& options = {});

}  // namespace logitless
