"""The loss of a token, as an expression of tensors, has the library's derivatives."""

import pytest
import torch
from logitless._options import LossOptions
from logitless._token_loss import Smoothing, formula, of_library

TOKENS = 300


@pytest.mark.parametrize("options", [dict(), dict(z_loss=0.05), dict(label_smoothing=0.2, z_loss=1e-3)], ids=str)
def test_derivatives_of_the_formula(options):
    with torch.device("cpu"):  # Python's numbers live on the CPU, whichever device the library uses
        check_derivatives(LossOptions(**options))


def check_derivatives(options):
    generator = torch.Generator("cpu").manual_seed(3)
    lse = 3 * torch.randn(TOKENS, dtype=torch.float64, generator=generator)
    target = lse - 4 * torch.rand(TOKENS, dtype=torch.float64, generator=generator)
    class_weight = 2 * torch.rand(TOKENS, dtype=torch.float64, generator=generator)
    logit_sum = 50 * torch.randn(TOKENS, dtype=torch.float64, generator=generator)
    leaves = [t.requires_grad_() for t in (lse, target, logit_sum)]
    rest = Smoothing(64, 70.0, logit_sum) if options.label_smoothing else None
    loss = formula(torch, options, lse, lse - target, class_weight, rest)
    found = torch.autograd.grad(loss.sum(), leaves, allow_unused=True)
    plain = Smoothing(64, 70.0, logit_sum.detach().numpy()) if rest else None
    arrays = [lse.detach().numpy(), target.detach().numpy()[:, None], class_weight.numpy()[:, None]]
    made = of_library(options, *arrays, rest=plain)
    expected = (made.d_lse, made.d_target_logit[:, 0], made.d_weighted_logit_sum)
    for gradient, other in zip(found, expected):
        gradient = torch.zeros(TOKENS, dtype=torch.float64) if gradient is None else gradient
        torch.testing.assert_close(gradient, torch.from_numpy(other), rtol=1e-15, atol=1e-15)
    torch.testing.assert_close(loss.detach(), torch.from_numpy(made.loss), rtol=1e-14, atol=1e-14)
