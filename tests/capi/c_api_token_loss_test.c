// Tests of logitless_token_losses: the formula term by term, its derivatives by differences,
// errors.
#include <math.h>
#include <string.h>

#include "expected.h"

enum { kRows = 4, kTargets = 2 };

// Row 3 and the second target of row 1 are ignored.
typedef struct Rows {
  double lse[kRows], target_logit[kRows * kTargets], target_weight[kRows * kTargets];
  double token_weight[kRows], logit_sum[kRows];
} Rows;

static const Rows kTable = {{1.5, -0.3, 2.25, 0.7},
                            {0.5, -2.0, -1.0, 3.0, 2.0, 1.75, 0.1, 0.2},
                            {0.5, 1.5, 2.0, 0.0, 0.25, 1.0, 1.0, 1.0},
                            {1.0, 0.5, 2.0, 0.0},
                            {-3.0, 0.25, 8.0, 1.0}};
static const double kClassTotal = 12.5;
static const int64_t kVocabCount = 9;

typedef struct Found {
  double loss[kRows], d_lse[kRows], d_target_logit[kRows * kTargets], d_logit_sum[kRows];
} Found;

static logitless_status run(const Rows* rows, const logitless_loss_terms* terms, Found* found) {
  Rows copy = *rows;
  logitless_tensor lse = tensor(copy.lse, LOGITLESS_F64, 1, kRows, 0);
  logitless_tensor logit = tensor(copy.target_logit, LOGITLESS_F64, 2, kRows, kTargets);
  logitless_tensor weight = tensor(copy.target_weight, LOGITLESS_F64, 2, kRows, kTargets);
  logitless_tensor token = tensor(copy.token_weight, LOGITLESS_F64, 1, kRows, 0);
  logitless_tensor sum = tensor(copy.logit_sum, LOGITLESS_F64, 1, kRows, 0);
  logitless_tensor loss = tensor(found->loss, LOGITLESS_F64, 1, kRows, 0);
  logitless_tensor d_lse = tensor(found->d_lse, LOGITLESS_F64, 1, kRows, 0);
  logitless_tensor d_logit = tensor(found->d_target_logit, LOGITLESS_F64, 2, kRows, kTargets);
  logitless_tensor d_sum = tensor(found->d_logit_sum, LOGITLESS_F64, 1, kRows, 0);
  logitless_token_loss_inputs in;
  logitless_token_loss_outputs out;
  logitless_token_loss_inputs_init(&in, sizeof in);
  logitless_token_loss_outputs_init(&out, sizeof out);
  in.lse = &lse;
  in.target_logit = &logit;
  in.target_weight = &weight;
  in.token_weight = &token;
  in.weighted_logit_sum = &sum;
  in.class_total = kClassTotal;
  in.vocab = kVocabCount;
  out.loss = &loss;
  out.d_lse = &d_lse;
  out.d_target_logit = &d_logit;
  out.d_weighted_logit_sum = &d_sum;
  return logitless_token_losses(terms, &in, &out);
}

static double expected_loss(const Rows* r, const logitless_loss_terms* terms, int i) {
  const double eps = terms->label_smoothing, lse = r->lse[i];
  double loss = eps / (double)kVocabCount * (kClassTotal * lse - r->logit_sum[i]);
  int k;
  for (k = i * kTargets; k < (i + 1) * kTargets; ++k)
    loss += (1 - eps) * r->target_weight[k] * (lse - r->target_logit[k]);
  return r->token_weight[i] * (loss + terms->z_loss * lse * lse);
}

// Derivative of row i's loss with respect to one number of `rows`, by differences.
static double difference(Rows* rows, double* number, const logitless_loss_terms* terms, int i) {
  const double step = 1e-5, before = *number;
  Found up, down;
  *number = before + step;
  CHECK(run(rows, terms, &up) == LOGITLESS_OK, "up");
  *number = before - step;
  CHECK(run(rows, terms, &down) == LOGITLESS_OK, "down");
  *number = before;
  return (up.loss[i] - down.loss[i]) / (2 * step);
}

static void check_near(const char* what, double actual, double expected, double tolerance) {
  CHECK(fabs(actual - expected) <= tolerance * (1 + fabs(expected)), "%s is %.17g, expected %.17g",
        what, actual, expected);
}

static void test_formula(void) {
  static const double kTerms[][2] = {{0, 0}, {0.1, 0}, {0, 1e-2}, {0.25, 0.5}, {1, 1e-3}};
  size_t t;
  int i, k;
  for (t = 0; t < sizeof kTerms / sizeof kTerms[0]; ++t) {
    Rows rows = kTable;
    Found found;
    logitless_loss_terms terms;
    logitless_loss_terms_init(&terms, sizeof terms);
    terms.label_smoothing = kTerms[t][0];
    terms.z_loss = kTerms[t][1];
    CHECK(run(&rows, &terms, &found) == LOGITLESS_OK, "terms %u", (unsigned)t);
    for (i = 0; i < kRows; ++i) {
      check_near("loss", found.loss[i], expected_loss(&rows, &terms, i), 1e-15);
      check_near("d_lse", found.d_lse[i], difference(&rows, &rows.lse[i], &terms, i), 1e-8);
      check_near("d_logit_sum", found.d_logit_sum[i],
                 difference(&rows, &rows.logit_sum[i], &terms, i), 1e-8);
      for (k = i * kTargets; k < (i + 1) * kTargets; ++k) {
        check_near("d_target_logit", found.d_target_logit[k],
                   difference(&rows, &rows.target_logit[k], &terms, i), 1e-8);
      }
    }
  }
}

// A masked target of weight 0 adds no loss, and neither does an ignored token with any numbers. The
// loss of a token with a logit of +inf is NaN, as a softmax is.
static void test_infinities(void) {
  Rows rows = kTable;
  Found found;
  rows.target_logit[3] = -INFINITY;
  rows.target_logit[5] = INFINITY;
  rows.lse[0] = rows.lse[2] = rows.lse[3] = INFINITY;
  CHECK(run(&rows, NULL, &found) == LOGITLESS_OK, "infinities");
  CHECK(isnan(found.loss[0]) && isnan(found.loss[2]), "losses %g, %g", found.loss[0],
        found.loss[2]);
  check_near("loss", found.loss[1], 0.5 * 2.0 * (-0.3 + 1.0), 1e-15);
  CHECK(found.d_target_logit[3] == 0 && found.loss[3] == 0, "loss %g", found.loss[3]);
}

// Tests only the required inputs, one target a token, and tensors that are not contiguous.
static void test_defaults(void) {
  double lse[4] = {2.0, -1.0, 3.0, -1.0}, logit[2] = {0.5, 1.0}, loss[2] = {-1, -1};
  logitless_tensor t_lse = tensor(lse, LOGITLESS_F64, 1, 2, 0);
  logitless_tensor t_logit = tensor(logit, LOGITLESS_F64, 2, 2, 1);
  logitless_tensor t_loss = tensor(loss, LOGITLESS_F64, 1, 2, 0);
  logitless_token_loss_inputs in;
  logitless_token_loss_outputs out;
  logitless_loss_terms terms;
  t_lse.strides[0] = 2;
  logitless_token_loss_inputs_init(&in, sizeof in);
  logitless_token_loss_outputs_init(&out, sizeof out);
  logitless_loss_terms_init(&terms, sizeof terms);
  in.lse = &t_lse;
  in.target_logit = &t_logit;
  in.vocab = 10;
  out.loss = &t_loss;
  CHECK(logitless_token_losses(NULL, &in, &out) == LOGITLESS_OK, "defaults");
  CHECK(loss[0] == 1.5 && loss[1] == 2.0, "losses %g, %g", loss[0], loss[1]);

#define EXPECT_REFUSED(text)                                                                      \
  CHECK(logitless_token_losses(&terms, &in, &out) == LOGITLESS_INVALID_ARGUMENT, text);           \
  CHECK(strcmp(logitless_last_error(), text) == 0, "said '%s', not '%s'", logitless_last_error(), \
        text)
  terms.label_smoothing = 0.5;
  EXPECT_REFUSED("weighted_logit_sum: label_smoothing needs it, got none");
  terms.label_smoothing = 1.5;
  EXPECT_REFUSED("label_smoothing: expected a number in [0, 1], got 1.5");
  terms.label_smoothing = 0;
  terms.z_loss = -0.5;
  EXPECT_REFUSED("z_loss: expected a number >= 0, got -0.5");
  terms.z_loss = 0;
  in.vocab = 0;
  EXPECT_REFUSED("vocab: expected a number > 0, got 0");
  in.vocab = 10;
  in.lse = NULL;
  EXPECT_REFUSED("lse: expected f64[N], got none");
  in.lse = &t_loss;
  EXPECT_REFUSED("loss: f64[2] shares memory with lse, f64[2]; an output needs memory of its own");
  in.lse = &t_lse;
  t_loss.dtype = LOGITLESS_F32;
  EXPECT_REFUSED("loss: expected f64[2], got f32[2]");
  t_loss.dtype = LOGITLESS_F64;
  t_logit.rank = 1;
  EXPECT_REFUSED("target_logit: expected f64[N, K], got f64[2]");
#undef EXPECT_REFUSED
  CHECK(loss[0] == 1.5 && loss[1] == 2.0, "a failed call wrote %g, %g", loss[0], loss[1]);
}

void test_token_losses(void) {
  test_formula();
  test_infinities();
  test_defaults();
}
