// Shared parts of the tests of far_backward and far_both: a fixture and common checks.
#pragma once

#include <gtest/gtest.h>

#include <cstdint>
#include <string>
#include <vector>

#include "support/far_problem.h"

namespace logitless::test {

// Tests over far_kernels().
class FarKernels : public testing::TestWithParam<std::string> {
 protected:
  RunSpec run() const;
  // Uses bf16 where the kernel has no f32, and multiples of 8 columns where required.
  HeadSpec spec(std::int64_t tokens, std::int64_t dim, std::int64_t vocab,
                std::uint64_t seed) const;
};

// An option that changes the gradient.
struct FarOption {
  const char* name;
  void (*change)(HeadSpec&);
};
// Returns the options one by one and together; those of a softcap, which far_both refuses, if
// wanted.
std::vector<FarOption> far_options(bool softcap);

// Lets the call take [batch, time] tensors and predict the next token. The oracle's targets become
// those of the token after.
void predict_next_tokens(HeadProblem& problem, RunSpec& run, std::int64_t batch, std::int64_t time);

// Lets the call add to gradients that are 0.5, and checks the sums beside those of a plain call.
void add_to_gradients(RunSpec& run);
void expect_added(const HeadResult& added, const HeadResult& plain);

// Returns upstream gradients of the tokens' losses, every third of which is 0.
std::vector<double> some_upstream(std::int64_t tokens);

// Sets the gradients that a call computes: of hidden (1), weight (2) and bias (4).
void set_wanted(RunSpec& run, int wanted);

// Compares outputs and statistics bit by bit.
void expect_same_bits(const HeadResult& a, const HeadResult& b);

// Checks a call that selected every tile: the gradients are exact.
void expect_everything_selected(const HeadResult& a, const OracleGradients& exact, DType dtype);

// Checks a call without a valid token: zeros, and no audit.
void expect_zeros(const HeadResult& a);

// Returns the valid tokens that an audit of so many rows takes, evenly spaced.
std::vector<std::int64_t> audited_tokens(const std::vector<std::int64_t>& valid, std::int64_t rows);

// Checks that the audit measured d_hidden's relative error over these tokens.
void expect_audited_error(const HeadResult& a, const HeadResult& exact,
                          const std::vector<std::int64_t>& tokens, std::int64_t dim);

// Checks that the call takes memory as planned, to the byte, and touches nothing beyond it. Its
// previous contents do not matter. Covers the loss, gradients and, if wanted, lse.
void expect_memory_as_planned(const FarProblem& problem, const std::string& kernel,
                              PlanRequest request, bool with_lse);

}  // namespace logitless::test
