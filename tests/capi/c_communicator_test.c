// Tests of communicators over the C ABI: threads, callbacks, and refusals.
#include "logitless/c_communicator.h"

#include <pthread.h>
#include <string.h>

#include "expected.h"

enum { kRanks = 3 };

static void refused(const char* what, logitless_status actual, logitless_status status,
                    const char* part) {
  CHECK(actual == status, "%s: status is '%s'", what, logitless_status_name(actual));
  CHECK(strstr(logitless_last_error(), part) != NULL, "%s: expected '%s' in the text", what, part);
}

// Results of a rank, since only one thread counts checks.
typedef struct Rank {
  logitless_communicator* communicator;
  logitless_status all_gather, all_to_all, host;
  int32_t gathered[kRanks], of_all[kRanks], on_hosts[kRanks];
  pthread_t thread;
} Rank;

static void* exchange(void* argument) {
  Rank* rank = argument;
  const int32_t mine = 10 * logitless_communicator_rank(rank->communicator);
  const int32_t slices[kRanks] = {mine, mine + 1, mine + 2};
  rank->all_gather = logitless_communicator_all_gather(rank->communicator, &mine, rank->gathered,
                                                       sizeof mine, NULL);
  rank->all_to_all = logitless_communicator_all_to_all(rank->communicator, slices, rank->of_all,
                                                       sizeof mine, NULL);
  rank->host = logitless_communicator_all_gather_host(rank->communicator, &slices[1],
                                                      rank->on_hosts, sizeof mine);
  return NULL;
}

static void run_ranks(Rank* ranks) {
  int r, from;
  for (r = 0; r < kRanks; ++r) pthread_create(&ranks[r].thread, NULL, exchange, &ranks[r]);
  for (r = 0; r < kRanks; ++r) pthread_join(ranks[r].thread, NULL);
  for (r = 0; r < kRanks; ++r) {
    CHECK(ranks[r].all_gather == LOGITLESS_OK && ranks[r].all_to_all == LOGITLESS_OK &&
              ranks[r].host == LOGITLESS_OK,
          "rank %d", r);
    for (from = 0; from < kRanks; ++from) {
      CHECK(ranks[r].gathered[from] == 10 * from, "rank %d has %d", r, ranks[r].gathered[from]);
      CHECK(ranks[r].of_all[from] == 10 * from + r, "rank %d has %d", r, ranks[r].of_all[from]);
      CHECK(ranks[r].on_hosts[from] == 10 * from + 1, "rank %d has %d", r, ranks[r].on_hosts[from]);
    }
  }
}

static void make_threads(Rank* ranks) {
  logitless_communicator* made[kRanks];
  int r;
  CHECK(logitless_communicator_threads(kRanks, 60000, made) == LOGITLESS_OK, "threads");
  for (r = 0; r < kRanks; ++r) {
    ranks[r].communicator = made[r];
    CHECK(logitless_communicator_rank(made[r]) == r, "rank %d", r);
    CHECK(logitless_communicator_size(made[r]) == kRanks, "rank %d", r);
  }
}

static logitless_status gather(const void* mine, void* all, size_t bytes_each, void* stream,
                               void* user) {
  return logitless_communicator_all_gather(user, mine, all, bytes_each, stream);
}
static logitless_status to_all(const void* slices, void* all, size_t bytes_each, void* stream,
                               void* user) {
  return logitless_communicator_all_to_all(user, slices, all, bytes_each, stream);
}
static void give_up(const char* reason, void* user) {
  CHECK(logitless_communicator_abort(user, reason) == LOGITLESS_OK, "abort");
}

static void test_groups(void) {
  Rank inner[kRanks], outer[kRanks];
  int r;
  make_threads(inner);
  run_ranks(inner);
  for (r = 0; r < kRanks; ++r) {
    logitless_communicator_callbacks_options options;
    logitless_communicator_callbacks_options_init(&options, sizeof options);
    CHECK(options.size == 1, "size is %d", options.size);
    options.rank = r;
    options.size = kRanks;
    options.all_gather = gather;
    options.all_to_all = to_all;
    options.abort = give_up;
    options.user = inner[r].communicator;
    CHECK(logitless_communicator_callbacks(&options, &outer[r].communicator) == LOGITLESS_OK,
          "callbacks");
  }
  run_ranks(outer);
  CHECK(logitless_communicator_wait(outer[0].communicator, NULL, 1) == LOGITLESS_OK, "wait");
  CHECK(logitless_communicator_check(inner[2].communicator) == LOGITLESS_OK, "check");
  CHECK(logitless_communicator_abort(outer[1].communicator, "no memory") == LOGITLESS_OK, "abort");
  refused("after an abort", logitless_communicator_wait(inner[2].communicator, NULL, 1),
          LOGITLESS_DEVICE_ERROR, "rank 1 gave up: no memory");
  refused("check after an abort", logitless_communicator_check(inner[2].communicator),
          LOGITLESS_DEVICE_ERROR, "rank 1 gave up: no memory");
  refused("a failed callback",
          logitless_communicator_all_gather(outer[2].communicator, &r, &r, 1, NULL),
          LOGITLESS_DEVICE_ERROR, "the callback returned status 3 (device error)");
  for (r = 0; r < kRanks; ++r) {
    logitless_communicator_destroy(outer[r].communicator);
    logitless_communicator_destroy(inner[r].communicator);
  }
}

static void test_tcp_alone(void) {
  logitless_communicator* alone = NULL;
  const int32_t mine = 7;
  int32_t all = 0;
  CHECK(logitless_communicator_tcp("localhost", 1, 0, 1, 1000, &alone) == LOGITLESS_OK, "tcp");
  CHECK(logitless_communicator_rank(alone) == 0 && logitless_communicator_size(alone) == 1, "tcp");
  CHECK(logitless_communicator_all_gather(alone, &mine, &all, sizeof mine, NULL) == LOGITLESS_OK,
        "tcp");
  CHECK(all == 7, "all is %d", all);
  logitless_communicator_destroy(alone);
}

static void test_refusals(void) {
  logitless_communicator_callbacks_options options;
  logitless_communicator_nccl_options nccl;
  logitless_communicator* made = NULL;
  const char id[LOGITLESS_NCCL_ID_BYTES] = {0};
  refused("no ranks", logitless_communicator_threads(0, 1, &made), LOGITLESS_INVALID_ARGUMENT,
          "size: expected 1 or more, got 0");
  refused("no limit", logitless_communicator_threads(1, 0, &made), LOGITLESS_INVALID_ARGUMENT,
          "limit_ms: expected 1 ms or more, got 0");
  refused("no host", logitless_communicator_tcp(NULL, 1, 0, 1, 1, &made),
          LOGITLESS_INVALID_ARGUMENT, "host");
  refused("no port", logitless_communicator_tcp("localhost", 0, 0, 1, 1, &made),
          LOGITLESS_INVALID_ARGUMENT, "port: expected one in [1, 65535], got 0");
  refused("no limit", logitless_communicator_tcp("localhost", 1, 0, 1, 0, &made),
          LOGITLESS_INVALID_ARGUMENT, "limit_ms: expected 1 ms or more, got 0");
  refused("NULL", logitless_communicator_all_gather(NULL, id, &made, 1, NULL),
          LOGITLESS_INVALID_ARGUMENT, "communicator: expected a handle");
  CHECK(logitless_communicator_rank(NULL) == -1 && logitless_communicator_size(NULL) == 0, "NULL");
  logitless_communicator_destroy(NULL);

  logitless_communicator_callbacks_options_init(&options, sizeof options);
  refused("no functions", logitless_communicator_callbacks(&options, &made),
          LOGITLESS_INVALID_ARGUMENT, "all_gather: expected a function");
  options.device = 7;
  refused("device", logitless_communicator_callbacks(&options, &made), LOGITLESS_INVALID_ARGUMENT,
          "options.device: 7");

  CHECK(logitless_communicator_threads(1, 1000, &made) == LOGITLESS_OK, "one");
  refused("no memory", logitless_communicator_all_to_all(made, id, NULL, 1, NULL),
          LOGITLESS_INVALID_ARGUMENT, "expected pointers, got NULL");
  logitless_communicator_destroy(made);

  logitless_communicator_nccl_options_init(&nccl, sizeof nccl);
  CHECK(nccl.limit_ms == 60000, "limit");
  refused("neither", logitless_communicator_nccl(&nccl, &made), LOGITLESS_INVALID_ARGUMENT,
          "expected either id or nccl_comm, got neither");
  nccl.id = id;
  nccl.size = 2;
  nccl.rank = 2;
  refused("rank", logitless_communicator_nccl(&nccl, &made), LOGITLESS_INVALID_ARGUMENT,
          "rank: expected one in [0, 2), got 2");
  nccl.rank = 1;
  nccl.max_ctas = -1;
  refused("max_ctas", logitless_communicator_nccl(&nccl, &made), LOGITLESS_INVALID_ARGUMENT,
          "max_ctas: expected 0 or more, got -1");
  nccl.max_ctas = 4;
  if (logitless_nccl_missing()[0] != '\0') {
    refused("no NCCL", logitless_communicator_nccl(&nccl, &made), LOGITLESS_UNSUPPORTED,
            logitless_nccl_missing());
    refused("no id", logitless_nccl_id(&nccl), LOGITLESS_UNSUPPORTED, logitless_nccl_missing());
  }
}

void test_communicators(void) {
  test_groups();
  test_tcp_alone();
  test_refusals();
}
