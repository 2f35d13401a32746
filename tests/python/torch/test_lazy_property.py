"""Random programs see no difference between lazy logits and real ones (lazy_programs.py)."""

import warnings

import lazy_programs
import pytest
import torch
from logitless.torch._lazy import lazy_linear

PROGRAMS = 150


def both(seed, dtype):
    steps = lazy_programs.program(seed)
    seen = []
    for linear in (lazy_linear, torch.nn.functional.linear):
        leaves = lazy_programs.inputs(dtype, bias=seed % 3 == 0)
        with torch.inference_mode(seed % 17 == 7), torch.set_grad_enabled(seed % 17 not in (5, 7)):
            seen.append(lazy_programs.run(linear(*leaves), steps, leaves))
    return steps, seen


@pytest.mark.parametrize("dtype, tolerance", [(torch.float64, 1e-9), (torch.float32, 1e-4)])
def test_random_programs(dtype, tolerance):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for seed in range(PROGRAMS):
            steps, (lazily, really) = both(seed + (dtype == torch.float32) * PROGRAMS, dtype)
            found = lazy_programs.difference(lazily, really, tolerance, tolerance)
            assert found is None, (seed, [s[:2] for s in steps], found)


@pytest.mark.parametrize("kind", lazy_programs.KINDS)
def test_each_operation_and_a_loss(kind):
    for name in lazy_programs.KINDS[kind]:
        calls = [(kind, name, 0.0), ("loss", "cross entropy, sum", 0.0), ("loss", "mean of squares", None)]
        steps = [(*call, False, "") for call in calls]
        seen = []
        for linear in (lazy_linear, torch.nn.functional.linear):
            leaves = lazy_programs.inputs(torch.float64, bias=True)
            seen.append(lazy_programs.run(linear(*leaves), steps, leaves))
        found = lazy_programs.difference(*seen, 1e-9, 1e-9)
        assert found is None, (name, found)


@pytest.mark.parametrize("edit", ["transpose_", "unsqueeze_", "squeeze_", "detach_", "t_", "swapdims_"])
def test_edits_of_the_shape(edit):
    shapes = dict(transpose_=(0, 1), unsqueeze_=(0,), swapdims_=(0, 1))
    for linear in (lazy_linear, torch.nn.functional.linear):
        hidden, weight, _ = lazy_programs.inputs(torch.float64, bias=False)
        z = linear(hidden[0], weight)
        getattr(z, edit)(*shapes.get(edit, ()))
        if linear is lazy_linear:
            lazily = (z.shape, z.stride(), z.requires_grad, z.sum(0))
    assert lazily[:3] == (z.shape, z.stride(), z.requires_grad)
    assert torch.allclose(lazily[3], z.sum(0))
