/* Ranks that work together, over the C ABI: communicator.h in C. Conventions are c_api.h's, of
 * whose ABI version this is a part.
 *
 * A communicator is one rank's end of a group in a fixed order; it moves bytes and never adds.
 * Every rank makes the same calls in the same order, each from one thread at a time. On the CPU a
 * call returns when all ranks have made it, on a GPU it is enqueued on the stream, a cudaStream_t.
 * A group fails as a whole and for good: LOGITLESS_DEVICE_ERROR with the call's number and, where
 * they are known, the ranks that did not arrive. */
#pragma once

#include <stddef.h>
#include <stdint.h>

#include "logitless/c_api.h"
#include "logitless/export.h"

#ifdef __cplusplus
extern "C" {
#endif

#define LOGITLESS_NCCL_ID_BYTES 128

typedef struct logitless_communicator logitless_communicator;

/* ---- Groups ---- */

/* `size` communicators, by rank, for threads of this process; they move the host's memory.
 * limit_ms: how long a rank waits for the others. */
LOGITLESS_API logitless_status logitless_communicator_threads(
    int32_t size, int64_t limit_ms, logitless_communicator** communicators);

/* Processes, of one host or several, connected by TCP; it moves the host's memory. Collective: rank
 * 0 listens at `port` of all its addresses, the others find it at `host`. Nothing is encrypted.
 * limit_ms: how long a rank waits for the others, to be made and in a call. */
LOGITLESS_API logitless_status logitless_communicator_tcp(const char* host, int32_t port,
                                                          int32_t rank, int32_t size,
                                                          int64_t limit_ms,
                                                          logitless_communicator** communicator);

/* Of callbacks: anything but LOGITLESS_OK is a failure, and the group has failed. They may be
 * called on any thread that calls the library with the communicator. */
typedef logitless_status (*logitless_exchange_function)(const void* mine, void* all,
                                                        size_t bytes_each, void* stream,
                                                        void* user);
typedef logitless_status (*logitless_wait_function)(void* stream, int64_t limit_ms, void* user);
typedef void (*logitless_abort_function)(const char* reason, void* user);

/* Collectives of the caller's: MPI, Gloo. */
typedef struct logitless_communicator_callbacks_options {
  size_t struct_size;
  int32_t rank;
  int32_t size;            /* default 1 */
  logitless_device device; /* whose memory all_gather and all_to_all move */
  int32_t capturable;      /* calls may be captured into a CUDA graph; of a GPU's only */
  logitless_exchange_function all_gather;      /* mine [bytes_each] to all [size, bytes_each] */
  logitless_exchange_function all_to_all;      /* [size, bytes_each] both; piece r is for rank r */
  logitless_exchange_function all_gather_host; /* between the hosts, done when it returns, stream
                                                  NULL; of a GPU's only, and needed there */
  logitless_wait_function wait;   /* for the stream; of a GPU's only, and needed there */
  logitless_abort_function abort; /* NULL: the others learn of it by limits of the caller's */
  void* user;                     /* handed to all of them */
} logitless_communicator_callbacks_options;
LOGITLESS_API void logitless_communicator_callbacks_options_init(
    logitless_communicator_callbacks_options* options, size_t struct_size);
LOGITLESS_API logitless_status logitless_communicator_callbacks(
    const logitless_communicator_callbacks_options* options, logitless_communicator** communicator);

/* NCCL, 2.19 or later, found at run time as libnccl.so.2. "", or why there is none. Static. */
LOGITLESS_API const char* logitless_nccl_missing(void);
/* LOGITLESS_NCCL_ID_BYTES bytes, made on one rank and sent to the others. */
LOGITLESS_API logitless_status logitless_nccl_id(void* id);

typedef struct logitless_communicator_nccl_options {
  size_t struct_size;
  const void*
      id; /* of a group to be made: what logitless_nccl_id wrote; NULL: nccl_comm is given */
  void* nccl_comm;      /* an ncclComm_t whose ranks make a group of their own; NULL: id is given */
  int32_t rank;         /* with id */
  int32_t size;         /* with id */
  int32_t max_ctas;     /* the most thread blocks of a call's kernel; 0: NCCL chooses */
  int32_t watch;        /* 1: a thread gives the group up when a rank's process has ended */
  int64_t limit_ms;     /* default 60000; of the host's waits */
  int32_t copy_engines; /* default 1; 0: no memory into which they exchange, see NcclOptions */
  int32_t reserved;     /* 0 */
} logitless_communicator_nccl_options;
LOGITLESS_API void logitless_communicator_nccl_options_init(
    logitless_communicator_nccl_options* options, size_t struct_size);
/* Collective, on the thread's current GPU. */
LOGITLESS_API logitless_status logitless_communicator_nccl(
    const logitless_communicator_nccl_options* options, logitless_communicator** communicator);

LOGITLESS_API void logitless_communicator_destroy(logitless_communicator* communicator);

/* ---- Calls ---- */

/* -1 and 0 for NULL. */
LOGITLESS_API int32_t logitless_communicator_rank(const logitless_communicator* communicator);
LOGITLESS_API int32_t logitless_communicator_size(const logitless_communicator* communicator);

/* all[r] = what rank r gave as mine; mine may be all[rank]. */
LOGITLESS_API logitless_status
logitless_communicator_all_gather(logitless_communicator* communicator, const void* mine, void* all,
                                  size_t bytes_each, void* stream);
/* pieces_of_all[r] = the piece that rank r gave for this rank. */
LOGITLESS_API logitless_status
logitless_communicator_all_to_all(logitless_communicator* communicator, const void* pieces,
                                  void* pieces_of_all, size_t bytes_each, void* stream);
/* Between the hosts' memories, done when it returns. */
LOGITLESS_API logitless_status logitless_communicator_all_gather_host(
    logitless_communicator* communicator, const void* mine, void* all, size_t bytes_each);
/* Waits until the stream is done with all calls so far; when that takes longer, the group has
 * failed. */
LOGITLESS_API logitless_status logitless_communicator_wait(logitless_communicator* communicator,
                                                           void* stream, int64_t limit_ms);
/* LOGITLESS_DEVICE_ERROR if the group is known to have failed; asks nobody. */
LOGITLESS_API logitless_status logitless_communicator_check(logitless_communicator* communicator);
/* Gives up, for the whole group; from any thread. */
LOGITLESS_API logitless_status logitless_communicator_abort(logitless_communicator* communicator,
                                                            const char* reason);

#ifdef __cplusplus
}
#endif
