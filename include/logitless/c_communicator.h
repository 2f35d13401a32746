/* Communicators over the C ABI: communicator.h in C. The conventions are those of c_api.h, and this
 * header is part of its ABI version.
 *
 * A communicator is one rank's end of a group in a fixed order. It moves bytes and never adds.
 * Every rank makes the same calls in the same order, each from one thread at a time. On the CPU a
 * call returns when all ranks have made it; on a GPU it is enqueued on the stream, a cudaStream_t.
 * A group fails as a whole and permanently: LOGITLESS_DEVICE_ERROR with the call's number and,
 * where known, the ranks that did not arrive. */
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

/* Makes `size` communicators, by rank, for threads of this process; they move host memory. limit_ms
 * is the longest wait of a rank for the others. */
LOGITLESS_API logitless_status logitless_communicator_threads(
    int32_t size, int64_t limit_ms, logitless_communicator** communicators);

/* Connects processes, of one host or several, by TCP; the communicator moves host memory.
 * Collective: rank 0 listens at `port` of all its addresses, the others find it at `host`. Nothing
 * is encrypted. limit_ms is the longest wait of a rank for the others, while the group is made and
 * in a call. */
LOGITLESS_API logitless_status logitless_communicator_tcp(const char* host, int32_t port,
                                                          int32_t rank, int32_t size,
                                                          int64_t limit_ms,
                                                          logitless_communicator** communicator);

/* Callbacks. Any status but LOGITLESS_OK fails the call and the group. They may be called on any
 * thread that calls the library with the communicator. */
typedef logitless_status (*logitless_exchange_function)(const void* mine, void* all,
                                                        size_t bytes_each, void* stream,
                                                        void* user);
typedef logitless_status (*logitless_wait_function)(void* stream, int64_t limit_ms, void* user);
typedef void (*logitless_abort_function)(const char* reason, void* user);

/* The caller's own collectives: MPI, Gloo. */
typedef struct logitless_communicator_callbacks_options {
  size_t struct_size;
  int32_t rank;
  int32_t size;            /* default 1 */
  logitless_device device; /* the memory that all_gather and all_to_all move */
  int32_t capturable;      /* calls may be captured into a CUDA graph; only for a GPU */
  logitless_exchange_function all_gather;      /* mine [bytes_each] to all [size, bytes_each] */
  logitless_exchange_function all_to_all;      /* [size, bytes_each] both; slice r is for rank r */
  logitless_exchange_function all_gather_host; /* host memory, done on return, stream NULL; only for
                                                  a GPU, and required there */
  logitless_wait_function wait;   /* waits for the stream; only for a GPU, and required there */
  logitless_abort_function abort; /* NULL: the other ranks notice by their own limits */
  void* user;                     /* passed to all of them */
} logitless_communicator_callbacks_options;
LOGITLESS_API void logitless_communicator_callbacks_options_init(
    logitless_communicator_callbacks_options* options, size_t struct_size);
LOGITLESS_API logitless_status logitless_communicator_callbacks(
    const logitless_communicator_callbacks_options* options, logitless_communicator** communicator);

/* Returns "" if NCCL 2.19 or later is found at run time as libnccl.so.2, else why not. Static. */
LOGITLESS_API const char* logitless_nccl_missing(void);
/* Writes LOGITLESS_NCCL_ID_BYTES bytes: made on one rank and sent to the others. */
LOGITLESS_API logitless_status logitless_nccl_id(void* id);

typedef struct logitless_communicator_nccl_options {
  size_t struct_size;
  /* the id from logitless_nccl_id of a new group; NULL: nccl_comm is given */
  const void* id;
  void* nccl_comm;      /* an ncclComm_t whose ranks form a new group; NULL: id is given */
  int32_t rank;         /* with id */
  int32_t size;         /* with id */
  int32_t max_ctas;     /* the most thread blocks of a call's kernel; 0: NCCL chooses */
  int32_t watch;        /* 1: a thread aborts the group when a rank's process has ended */
  int64_t limit_ms;     /* default 60000; of waits on the host */
  int32_t copy_engines; /* default 1; 0: no memory for exchanges by copy engines, see NcclOptions */
  int32_t reserved;     /* 0 */
} logitless_communicator_nccl_options;
LOGITLESS_API void logitless_communicator_nccl_options_init(
    logitless_communicator_nccl_options* options, size_t struct_size);
/* Makes the communicator. Collective, on the thread's current GPU. */
LOGITLESS_API logitless_status logitless_communicator_nccl(
    const logitless_communicator_nccl_options* options, logitless_communicator** communicator);

LOGITLESS_API void logitless_communicator_destroy(logitless_communicator* communicator);

/* ---- Calls ---- */

/* Rank and size; -1 and 0 for NULL. */
LOGITLESS_API int32_t logitless_communicator_rank(const logitless_communicator* communicator);
LOGITLESS_API int32_t logitless_communicator_size(const logitless_communicator* communicator);

/* Sets all[r] to rank r's `mine`; mine may be all[rank]. */
LOGITLESS_API logitless_status
logitless_communicator_all_gather(logitless_communicator* communicator, const void* mine, void* all,
                                  size_t bytes_each, void* stream);
/* Sets slices_of_all[r] to the slice that rank r has for this rank. */
LOGITLESS_API logitless_status
logitless_communicator_all_to_all(logitless_communicator* communicator, const void* slices,
                                  void* slices_of_all, size_t bytes_each, void* stream);
/* All-gather between host memories, done on return. */
LOGITLESS_API logitless_status logitless_communicator_all_gather_host(
    logitless_communicator* communicator, const void* mine, void* all, size_t bytes_each);
/* Waits until the stream has completed all calls so far. If that takes longer than the limit, the
 * group has failed. */
LOGITLESS_API logitless_status logitless_communicator_wait(logitless_communicator* communicator,
                                                           void* stream, int64_t limit_ms);
/* Returns LOGITLESS_DEVICE_ERROR if the group is known to have failed; communicates nothing. */
LOGITLESS_API logitless_status logitless_communicator_check(logitless_communicator* communicator);
/* Aborts the whole group; from any thread. */
LOGITLESS_API logitless_status logitless_communicator_abort(logitless_communicator* communicator,
                                                            const char* reason);

#ifdef __cplusplus
}
#endif
