// A head whose every third token has two logits of +inf, and the results that PyTorch has for it.
#pragma once

#include "support/problem.h"

namespace logitless::test {

// The infinite logits are overflows, at entries 140 and 299. The same entries are masked for the
// other tokens. With `nan` one entry's bias is NaN.
HeadProblem infinite_problem(DType dtype, bool nan = false);

// Expects lse +inf, and NaN for the loss, the log-probability and the gradients; on a GPU no finite
// lse, and NaN for the loss and d_hidden. Expects the other tokens to be right.
void expect_infinite(const HeadProblem& problem, const RunSpec& run, const HeadResult& result);

}  // namespace logitless::test
