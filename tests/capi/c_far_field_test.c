// Tests of the far field from C: steps have the bits of the C++ head, also after resuming; the
// caller's own orders; refusals.
#define _POSIX_C_SOURCE 200809L
#include <math.h>
#include <stddef.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "expected.h"

static void check_error(const char* what, logitless_status actual, logitless_status expected,
                        const char* part) {
  CHECK(actual == expected, "%s: status is '%s'", what, logitless_status_name(actual));
  CHECK(strstr(logitless_last_error(), part) != NULL, "%s: expected '%s'", what, part);
}

static float number(uint64_t* seed) {  // in [-1, 1)
  *seed = *seed * UINT64_C(6364136223846793005) + UINT64_C(1442695040888963407);
  return (float)((double)(*seed >> 40) / (1 << 23) - 1.0);
}

// Makes a problem whose tiles hold similar vocabulary entries, interleaved; tokens have four
// topics.
static FarProblem* make_problem(void) {
  FarProblem* p = malloc(sizeof *p);
  const int tiles = kFarVocab / 128;
  float* centers = malloc(sizeof(float) * (size_t)tiles * kFarDim);
  uint64_t seed = 5;
  int i, k;
  for (i = 0; i < tiles * kFarDim; ++i) centers[i] = 2.0f * number(&seed);
  for (i = 0; i < kFarVocab; ++i) {
    for (k = 0; k < kFarDim; ++k)
      p->weight[i * kFarDim + k] = centers[i % tiles * kFarDim + k] + 0.15f * number(&seed);
  }
  for (i = 0; i < kFarTokens; ++i) {
    for (k = 0; k < kFarDim; ++k)
      p->hidden[i * kFarDim + k] = 1.2f * centers[i % 4 * kFarDim + k] + 0.3f * number(&seed);
    p->targets[i] = (int64_t)((double)(number(&seed) + 1.0f) / 2.0 * (kFarVocab - 1));
  }
  free(centers);
  return p;
}

static void move(FarProblem* p) {
  int i;
  for (i = 0; i < kFarVocab * kFarDim; ++i) p->weight[i] -= 0.5f * p->d_weight[i];
  for (i = 0; i < kFarTokens * kFarDim; ++i) p->hidden[i] -= 0.5f * p->d_hidden[i];
}

static int same_results(const FarProblem* a, const FarProblem* b) {
  return a->loss == b->loss && memcmp(a->d_hidden, b->d_hidden, sizeof a->d_hidden) == 0 &&
         memcmp(a->d_weight, b->d_weight, sizeof a->d_weight) == 0;
}

// A problem as the structs of a call.
typedef struct Call {
  logitless_tensor t[6];
  logitless_cross_entropy_inputs in;
  logitless_cross_entropy_outputs out;
} Call;

static void make_call(Call* c, FarProblem* p) {
  c->t[0] = tensor(p->hidden, LOGITLESS_F32, 2, kFarTokens, kFarDim);
  c->t[1] = tensor(p->weight, LOGITLESS_F32, 2, kFarVocab, kFarDim);
  c->t[2] = tensor(p->targets, LOGITLESS_I64, 1, kFarTokens, 0);
  c->t[3] = tensor(&p->loss, LOGITLESS_F32, 0, 0, 0);
  c->t[4] = tensor(p->d_hidden, LOGITLESS_F32, 2, kFarTokens, kFarDim);
  c->t[5] = tensor(p->d_weight, LOGITLESS_F32, 2, kFarVocab, kFarDim);
  logitless_cross_entropy_inputs_init(&c->in, sizeof c->in);
  c->in.hidden = &c->t[0];
  c->in.weight = &c->t[1];
  c->in.targets = &c->t[2];
  logitless_cross_entropy_outputs_init(&c->out, sizeof c->out);
  c->out.loss = &c->t[3];
  c->out.d_hidden = &c->t[4];
  c->out.d_weight = &c->t[5];
}

static logitless_loss_statistics step(logitless_far_head* head, FarProblem* p) {
  Call c;
  logitless_loss_statistics s;
  make_call(&c, p);
  logitless_loss_statistics_init(&s, sizeof s);
  CHECK(logitless_far_head_step(head, NULL, &c.in, &c.out, &s) == LOGITLESS_OK, "step");
  return s;
}

static logitless_context* one_thread(void) {
  logitless_context* context = NULL;
  logitless_context_options options;
  logitless_context_options_init(&options, sizeof options);
  options.threads = 1;
  CHECK(logitless_context_create(&options, &context) == LOGITLESS_OK, "context_create");
  return context;
}

static logitless_far_field_options quick(void) {
  logitless_far_field_options o;
  logitless_far_field_options_init(&o, sizeof o);
  o.error = 0.05;
  o.audit_every = 3;
  o.refresh_every = 3;
  o.refresh_delay = 2;
  o.sample_rows = 64;
  return o;
}

static logitless_far_field_report report_of(const logitless_far_head* head) {
  logitless_far_field_report r;
  logitless_far_field_report_init(&r, sizeof r);
  CHECK(logitless_far_head_report(head, &r) == LOGITLESS_OK, "report");
  return r;
}

// An order is begun at step 3, saved in progress at step 4, put to use and tried at step 5.
static void test_steps(logitless_context* context, const char* path) {
  const logitless_far_field_options options = quick();
  FarProblem* p = make_problem();
  FarProblem* twin = make_problem();
  FarProblem* then = malloc(sizeof *then);
  CppFarHead* cpp = cpp_far_head(&options);
  logitless_far_head* head = NULL;
  logitless_far_head* resumed[2] = {NULL, NULL};
  logitless_loss_statistics again;
  logitless_far_field_report r;
  logitless_vocab_order* order = NULL;
  int i, k, far = 0;
  logitless_context* gone = one_thread();
  CHECK(logitless_far_head_create(gone, &options, &head) == LOGITLESS_OK, "create");
  logitless_context_destroy(gone);  // the head has its own copy
  CHECK(strstr(logitless_far_head_explain(head), "next step: dense") != NULL, "explain");
  CHECK(logitless_far_head_order(head, &order) == LOGITLESS_OK && order == NULL, "order");
  for (i = 1; i <= 7; ++i) {
    const logitless_loss_statistics s = step(head, p);
    CHECK(s.passes == cpp_far_step(cpp, twin), "step %d", i);
    CHECK((s.passes > 0) == (i >= 5), "step %d is %s", i, logitless_far_head_explain(head));
    CHECK((s.audited_error >= 0) == (i == 5), "audit of step %d: %g", i, s.audited_error);
    CHECK(same_results(p, twin), "step %d has other bits than C++", i);
    far += s.passes > 0;
    logitless_loss_statistics_init(&again, sizeof again);
    CHECK(logitless_far_head_statistics(head, &again) == LOGITLESS_OK, "statistics");
    CHECK(again.selected == s.selected && again.mean_lse == s.mean_lse, "statistics");
    move(p);
    move(twin);
    if (i == 4) {
      const void* state;
      size_t bytes;
      memcpy(then, p, sizeof *then);
      CHECK(logitless_far_head_save(head, path) == LOGITLESS_OK, "save");
      CHECK(logitless_far_head_state(head, &state, &bytes) == LOGITLESS_OK, "state");
      for (k = 0; k < 2; ++k)
        CHECK(logitless_far_head_create(context, &options, &resumed[k]) == LOGITLESS_OK, "create");
      CHECK(logitless_far_head_load(resumed[0], path) == LOGITLESS_OK, "load");
      CHECK(logitless_far_head_set_state(resumed[1], state, bytes) == LOGITLESS_OK, "set_state");
    }
  }
  r = report_of(head);
  CHECK(r.steps == 7 && r.dense_steps == 7 - far && r.audits == 1 && r.refreshes == 1, "report");
  CHECK(r.far == 1 && r.last_error > 0 && r.last_error <= 0.05 && r.vocab == kFarVocab, "report");
  CHECK(logitless_far_head_order(head, &order) == LOGITLESS_OK, "order");
  CHECK(logitless_vocab_order_vocab(order) == kFarVocab, "order");
  for (k = 0; k < 2; ++k) {
    memcpy(twin, then, sizeof *twin);
    for (i = 5; i <= 7; ++i) {
      step(resumed[k], twin);
      move(twin);
    }
    CHECK(same_results(p, twin), "resumed");
    CHECK(memcmp(p->weight, twin->weight, sizeof p->weight) == 0, "resumed");
    r.steps = report_of(resumed[k]).steps;
    CHECK(r.steps == 7 && report_of(resumed[k]).mean_selected == r.mean_selected, "resumed");
    logitless_far_head_destroy(resumed[k]);
  }
  logitless_vocab_order_destroy(order);
  logitless_far_head_destroy(head);
  cpp_far_head_destroy(cpp);
  free(then);
  free(twin);
  free(p);
}

// Runs one call with the caller's own order; its gradients are stored in p.
static logitless_loss_statistics far_call(logitless_context* context, FarProblem* p,
                                          logitless_accuracy accuracy,
                                          const logitless_vocab_order* order) {
  Call c;
  logitless_plan_request request;
  logitless_plan_info info;
  logitless_plan* plan = NULL;
  logitless_loss_statistics s;
  void* block;
  size_t bytes;
  float bounds[kFarTokens];
  logitless_tensor bound = tensor(bounds, LOGITLESS_F32, 1, kFarTokens, 0);
  make_call(&c, p);
  if (accuracy == LOGITLESS_ACCURACY_FAR_BACKWARD) c.out.d_hidden_bound = &bound;
  c.in.order = order;
  c.in.sample_seed = 3;
  logitless_plan_request_init(&request, sizeof request);
  request.accuracy = accuracy;
  request.sample_every = 16;
  request.audit_rows = 16;
  CHECK(logitless_plan_cross_entropy(context, NULL, &c.in, &c.out, &request, &plan) == LOGITLESS_OK,
        "plan");
  logitless_plan_info_init(&info, sizeof info);
  CHECK(logitless_plan_get_info(plan, &info) == LOGITLESS_OK, "info");
  CHECK(info.kind == (accuracy == LOGITLESS_ACCURACY_FAR_BACKWARD ? LOGITLESS_PLAN_FAR_BACKWARD
                                                                  : LOGITLESS_PLAN_FAR_BOTH),
        "kind %d: %s", (int)info.kind, logitless_plan_explain(plan));
  bytes = logitless_plan_workspace_bytes(plan);
  block = malloc(bytes + 64);
  logitless_loss_statistics_init(&s, sizeof s);
  CHECK(logitless_cross_entropy(context, plan, NULL, &c.in, &c.out,
                                (void*)(((uintptr_t)block + 63) / 64 * 64), bytes,
                                &s) == LOGITLESS_OK,
        "run");
  if (c.out.d_hidden_bound != NULL) {
    double of_bounds = 0, of_gradient = 0;
    int i;
    for (i = 0; i < kFarTokens; ++i) of_bounds += (double)bounds[i] * bounds[i];
    for (i = 0; i < kFarTokens * kFarDim; ++i)
      of_gradient += (double)p->d_hidden[i] * p->d_hidden[i];
    CHECK(fabs(sqrt(of_bounds / of_gradient) - s.bound) < 1e-4 * s.bound,
          "bounds of the rows give %g, the statistics %g", sqrt(of_bounds / of_gradient), s.bound);
  }
  free(block);
  logitless_plan_destroy(plan);
  return s;
}

static void test_orders(logitless_context* context, const char* path) {
  FarProblem* p = make_problem();
  FarProblem* twin = make_problem();
  float* average = malloc(sizeof(float) * kFarVocab);
  logitless_tensor hidden = tensor(p->hidden, LOGITLESS_F32, 2, kFarTokens, kFarDim);
  logitless_tensor weight = tensor(p->weight, LOGITLESS_F32, 2, kFarVocab, kFarDim);
  logitless_vocab_order* order[4] = {NULL, NULL, NULL, NULL};
  logitless_loss_statistics s;
  double total = 0;
  int i;
  CHECK(logitless_average_probability(context, &hidden, &weight, NULL, 1.0f, 0.0f, 0, average,
                                      kFarVocab) == LOGITLESS_OK,
        "average");
  for (i = 0; i < kFarVocab; ++i) total += average[i];
  CHECK(total > 0.999 && total < 1.001, "probabilities sum to %g", total);
  CHECK(logitless_vocab_order_make(context, &weight, average, kFarVocab, NULL, &order[0]) ==
            LOGITLESS_OK,
        "make");
  CHECK(logitless_vocab_order_save(order[0], path) == LOGITLESS_OK, "save");
  CHECK(logitless_vocab_order_load(path, &order[1]) == LOGITLESS_OK, "load");
  CHECK(logitless_vocab_order_create(logitless_vocab_order_ids(order[0]),
                                     logitless_vocab_order_average(order[0]), kFarVocab,
                                     &order[2]) == LOGITLESS_OK,
        "create");
  CHECK(logitless_vocab_order_measure(context, order[0], &hidden, &weight, NULL, 1.0f, 0.001f,
                                      &order[3]) == LOGITLESS_OK,
        "measure");
  CHECK(logitless_vocab_order_dim(order[0]) == 0 && logitless_vocab_order_dim(order[3]) == kFarDim,
        "dim");
  s = far_call(context, p, LOGITLESS_ACCURACY_FAR_BACKWARD, order[0]);
  CHECK(
      s.selected > 0 && s.selected < 0.6 && s.sampled > 0 && s.passes > 1 && s.dense_fallback == 0,
      "selected %g", s.selected);
  CHECK(s.audited_tokens == 16 && s.audited_error > 0 && s.audited_error < s.bound,
        "error %g of %g", s.audited_error, s.bound);
  for (i = 1; i <= 2; ++i) {
    memset(twin->d_weight, 0, sizeof twin->d_weight);
    far_call(context, twin, LOGITLESS_ACCURACY_FAR_BACKWARD, order[i]);
    CHECK(same_results(p, twin), "order %d gives other bits", i);
  }
  s = far_call(context, p, LOGITLESS_ACCURACY_FAR_BOTH, order[3]);
  CHECK(s.selected < 0.6 && s.bound == -1 && s.audited_lse_error > 0, "selected %g", s.selected);
  for (i = 0; i < 4; ++i) logitless_vocab_order_destroy(order[i]);
  free(average);
  free(twin);
  free(p);
}

// Tests structs from before the far field, whose new fields are not read.
static void test_older_structs(logitless_context* context) {
  FarProblem* p = make_problem();
  Call c;
  logitless_plan_request request;
  logitless_plan* plan = NULL;
  logitless_loss_statistics s;
  void* block;
  size_t bytes;
  make_call(&c, p);
  c.in.struct_size = offsetof(logitless_cross_entropy_inputs, order);
  memset(&c.in.order, 0xff, sizeof c.in.order);
  logitless_plan_request_init(&request, sizeof request);
  request.struct_size = offsetof(logitless_plan_request, sample_every);
  request.tau = -1.0f;
  CHECK(logitless_plan_cross_entropy(context, NULL, &c.in, &c.out, &request, &plan) == LOGITLESS_OK,
        "plan");
  bytes = logitless_plan_workspace_bytes(plan);
  block = malloc(bytes + 64);
  logitless_loss_statistics_init(&s, sizeof s);
  s.struct_size = offsetof(logitless_loss_statistics, selected);
  s.selected = 42.0;
  CHECK(logitless_cross_entropy(context, plan, NULL, &c.in, &c.out,
                                (void*)(((uintptr_t)block + 63) / 64 * 64), bytes,
                                &s) == LOGITLESS_OK,
        "run");
  CHECK(s.tokens == kFarTokens && s.selected == 42.0, "selected %g", s.selected);
  free(block);
  logitless_plan_destroy(plan);
  free(p);
}

// Tests states with one changed byte, half of them in the header. They are refused and leave the
// head unchanged, or accepted as valid states, and steps continue.
static void test_damaged_states(logitless_context* context) {
  logitless_far_field_options o = quick();
  logitless_far_head* head = NULL;
  FarProblem* p = make_problem();
  const void* state;
  unsigned char* bytes;
  size_t size;
  uint64_t seed = 11;
  int i, refused = 0, taken = 0;
  o.refresh_every = 1;
  CHECK(logitless_far_head_create(context, &o, &head) == LOGITLESS_OK, "create");
  for (i = 0; i < 4; ++i) step(head, p);  // an order, and another one in progress
  CHECK(logitless_far_head_state(head, &state, &size) == LOGITLESS_OK, "state");
  bytes = malloc(size);
  memcpy(bytes, state, size);
  for (i = 0; i < 48; ++i) {
    const double where = (number(&seed) + 1.0) / 2.0;
    const size_t at = (size_t)(where * (double)(i % 2 == 0 ? 1000 : size - 1));
    const unsigned char was = bytes[at];
    const logitless_far_field_report before = report_of(head);
    bytes[at] ^= (unsigned char)(1u << (i % 8));
    if (logitless_far_head_set_state(head, bytes, size) == LOGITLESS_OK) {
      if (++taken <= 4) step(head, p);
    } else {
      const logitless_far_field_report after = report_of(head);
      ++refused;
      CHECK(memcmp(&before, &after, sizeof before) == 0, "refused, and changed");
    }
    bytes[at] = was;
  }
  CHECK(refused >= 12 && taken > 0, "%d refused, %d taken", refused, taken);
  free(bytes);
  free(p);
  logitless_far_head_destroy(head);
}

static void test_refused(logitless_context* context, const char* path) {
  logitless_far_field_options o = quick();
  logitless_far_head* head = NULL;
  logitless_vocab_order* order = NULL;
  logitless_loss_statistics s;
  const int64_t vocab_ids[3] = {0, 2, 2};
  const float average[3] = {1, 1, 1};
  FarProblem* p = make_problem();
  Call c;
  const void* state;
  unsigned char* bytes;
  size_t size, at;
  logitless_far_field_report before, after;

  o.error = 1.5;
  check_error("error", logitless_far_head_create(context, &o, &head), LOGITLESS_INVALID_ARGUMENT,
              "error: expected a number in (0, 1), got 1.5");
  o = quick();
  o.accuracy = 3;
  check_error("accuracy", logitless_far_head_create(context, &o, &head), LOGITLESS_INVALID_ARGUMENT,
              "accuracy: 3");
  o.accuracy = LOGITLESS_ACCURACY_EXACT;
  check_error("exact", logitless_far_head_create(context, &o, &head), LOGITLESS_INVALID_ARGUMENT,
              "accuracy: expected far_backward or far_both");
  o = quick();
  o.audit_every = INT64_MAX;
  check_error("audit_every", logitless_far_head_create(context, &o, &head),
              LOGITLESS_INVALID_ARGUMENT,
              "audit_every: expected 1 to 1099511627776, got 9223372036854775807");
  check_error("vocab_ids", logitless_vocab_order_create(vocab_ids, average, 3, &order),
              LOGITLESS_INVALID_ARGUMENT, "vocab_ids");
  check_error("file", logitless_vocab_order_load("/nowhere/order", &order), LOGITLESS_DEVICE_ERROR,
              "/nowhere/order");
  check_error("NULL", logitless_vocab_order_save(NULL, path), LOGITLESS_INVALID_ARGUMENT, "order");
  check_error("NULL", logitless_far_head_step(NULL, NULL, NULL, NULL, NULL),
              LOGITLESS_INVALID_ARGUMENT, "head: expected a handle");
  CHECK(head == NULL && order == NULL, "a failed call wrote its output");
  CHECK(strcmp(logitless_far_head_explain(NULL), "") == 0, "explain");
  logitless_far_head_destroy(NULL);
  logitless_vocab_order_destroy(NULL);

  o = quick();
  o.refresh_every = 1;
  CHECK(logitless_far_head_create(context, &o, &head) == LOGITLESS_OK, "create");
  logitless_loss_statistics_init(&s, sizeof s);
  check_error("statistics", logitless_far_head_statistics(head, &s), LOGITLESS_INVALID_ARGUMENT,
              "statistics: expected a step before");
  make_call(&c, p);
  c.out.d_hidden = NULL;
  check_error("d_hidden", logitless_far_head_step(head, NULL, &c.in, &c.out, NULL),
              LOGITLESS_INVALID_ARGUMENT, "d_hidden");
  step(head, p);
  // The order in progress covers the full vocabulary, but the weight is now smaller.
  make_call(&c, p);
  c.t[1].shape[0] = c.t[5].shape[0] = kFarVocab - 128;
  check_error("vocab", logitless_far_head_step(head, NULL, &c.in, &c.out, NULL),
              LOGITLESS_INVALID_ARGUMENT, "weight: expected 65536 vocabulary entries");
  make_call(&c, p);
  p->targets[1] = kFarVocab;
  check_error("target", logitless_far_head_step(head, NULL, &c.in, &c.out, NULL),
              LOGITLESS_INVALID_ARGUMENT, "targets: 65536 at position 1 is outside [0, 65536)");
  before = report_of(head);
  CHECK(before.steps == 1, "a refused step is none");

  CHECK(logitless_far_head_state(head, &state, &size) == LOGITLESS_OK, "state");
  bytes = malloc(size);
  memcpy(bytes, state, size);
  check_error("cut", logitless_far_head_set_state(head, bytes, size / 2),
              LOGITLESS_INVALID_ARGUMENT, "state");
  check_error("none", logitless_far_head_set_state(head, bytes, 0), LOGITLESS_INVALID_ARGUMENT,
              "state");
  bytes[size / 2] ^= 0x40;  // in the order: no permutation, or an invalid average
  bytes[size / 2 + 7] ^= 0x7f;
  check_error("flipped", logitless_far_head_set_state(head, bytes, size),
              LOGITLESS_INVALID_ARGUMENT, "vocab_ids");
  memcpy(bytes, state, size);
  for (at = 0; at + 12 < size && memcmp(bytes + at, "far_backward", 12) != 0; ++at) {
  }
  memcpy(bytes + at, "far_both    ", 12);
  check_error("accuracy", logitless_far_head_set_state(head, bytes, size),
              LOGITLESS_INVALID_ARGUMENT, "saved with accuracy far_both");
  after = report_of(head);
  CHECK(memcmp(&before, &after, sizeof before) == 0, "a state that is refused changes nothing");
  free(bytes);
  logitless_far_head_destroy(head);
  free(p);
}

void test_far_field(void) {
  char path[64];
  logitless_context* context = one_thread();
  if (context == NULL) return;
  snprintf(path, sizeof path, "/tmp/c_far_field_test.%ld.safetensors", (long)getpid());
  test_steps(context, path);
  test_orders(context, path);
  test_older_structs(context);
  test_damaged_states(context);
  test_refused(context, path);
  remove(path);
  logitless_context_destroy(context);
}
