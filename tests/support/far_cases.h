// What the tests of far_backward and of far_both share: a fixture, and what holds for both.
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
  // In bf16 where the kernel takes no f32, whole eights of columns where it must.
  HeadSpec spec(std::int64_t tokens, std::int64_t dim, std::int64_t vocab,
                std::uint64_t seed) const;
};

// To the bit, and in what is told about them.
void expect_same_bits(const HeadAnswer& a, const HeadAnswer& b);

// A call that found every tile near: the exact gradients.
void expect_everything_kept(const HeadAnswer& a, const OracleGradients& exact, DType dtype);

// A call without a valid token: zeros, and no audit.
void expect_zeros(const HeadAnswer& a);

// Of the valid tokens those that an audit of so many rows takes, evenly spaced.
std::vector<std::int64_t> audited_tokens(const std::vector<std::int64_t>& valid, std::int64_t rows);

// That the audit measured d_hidden's relative error over these tokens.
void expect_audited_error(const HeadAnswer& a, const HeadAnswer& exact,
                          const std::vector<std::int64_t>& tokens, std::int64_t dim);

// The call takes memory as planned, to the byte; nothing beyond it is touched, and what it held
// before does not matter. With the loss, gradients and, if wanted, lse.
void expect_memory_as_planned(const FarProblem& problem, const std::string& kernel,
                              PlanRequest request, bool with_lse);

}  // namespace logitless::test
