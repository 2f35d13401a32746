"""The battery in bf16 on a GPU, by each executor: 16-bit products, generated epilogues and groups of rows. They are
compared with the function in float32 of the same rounded inputs, whose own error is a thousandth of bf16's.

LOGITLESS_TEST_ALL=1 runs it on a CPU, too.
"""

import functools

import pytest
import torch
from losses_battery.case import CASES, Sizes
from losses_battery.checks import ALL
from losses_battery.step import outputs_and_gradients
from oracle import DEVICE

from logitless.torch import autochunk

pytestmark = pytest.mark.skipif(DEVICE == "cpu" and not ALL, reason="kernels of a GPU in bf16")

SIZES = Sizes(512, 64, 4096)  # rows that a group of them takes, products with whole tiles of 16 bits
SEEDS = 4
# Distances to float32, over its norm: at most this many times as far as the function in bf16 and one more rounding. Losses
# that choose numbers (top-k, margins) choose others where two are nearly equal. A sum that cancels is off by chance, so
# that eight times the function's distance counts for single numbers.
FACTOR, FACTOR_OF_A_NUMBER, ROUNDING = 2.0, 8.0, 2.0**-7


def distances(found, exact):
    """Returns (numbers, |a - e| / |e|) of each tensor, by 2-norms over the seeds."""
    result = []
    for tensors, wanted in zip(zip(*found, strict=True), zip(*exact, strict=True), strict=True):
        if wanted[0] is None:
            assert not any(a is not None for a in (*tensors, *wanted))
            result.append((0, 0.0))
            continue
        assert all(a.shape == e.shape and a.isfinite().all() for a, e in zip(tensors, wanted, strict=True))
        off, norm = (torch.stack([t.double().norm() for t in which]).norm().item()
                     for which in ([a.double() - e for a, e in zip(tensors, wanted, strict=True)], wanted))
        result.append((wanted[0].numel(), off / max(norm, 1e-30)))
    return result


def numbers(function, args):
    outputs, gradients = outputs_and_gradients(function, args)
    return [*outputs, *gradients]


@functools.cache
def compared(name):
    """Returns the arguments by seeds, the exact numbers, and the distances of the function in bf16."""
    case = CASES[name]
    draws = [case.arguments(SIZES, DEVICE, torch.bfloat16, seed=seed) for seed in range(SEEDS)]
    exact, rounded = [], []
    try:
        for args in draws:
            wide = [a.detach().float().requires_grad_(a.requires_grad) if a.dtype == torch.bfloat16 else a for a in args]
            exact.append(numbers(case.function, wide))
            rounded.append(numbers(case.function, args))
    except (RuntimeError, NotImplementedError) as error:
        pytest.skip(f"PyTorch does not run it: {error}")
    return draws, exact, distances(rounded, exact)


@pytest.mark.parametrize("options", [{"executor": "native"}, {"executor": "native", "chunks": 3}, {"executor": "python"}],
                         ids=["native", "native in chunks", "python"])
@pytest.mark.parametrize("name", CASES)
def test_is_as_exact_as_the_function(name, options):
    draws, exact, allowed = compared(name)
    chunked = autochunk(CASES[name].function, **options)
    found = [numbers(chunked, args) for args in draws]
    for (count, distance), (_, own) in zip(distances(found, exact), allowed, strict=True):
        factor = FACTOR if count > 1 else FACTOR_OF_A_NUMBER
        assert distance <= factor * own + ROUNDING, (count, distance, own)
