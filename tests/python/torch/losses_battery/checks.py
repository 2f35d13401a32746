"""Requirements of autochunk, for every loss and executor, with a budget of a quarter of the big value:

  - it takes the function, with the numbers of PyTorch
  - it takes no more memory than the budget, or its message gives the reason and a remedy
  - its report is true

The tables below list the failures that are known, with their causes. A test that passes again fails until its entry is
removed.
"""

import functools
import os
import re
import zlib

import pytest
import torch

from losses_battery.case import CASES, SMALL
from losses_battery.step import outputs_and_gradients, plan_peaks
from logitless.torch import autochunk
from logitless.torch._peak import peak_of
from logitless.torch._autochunk import Unsupported

EXECUTORS = ["auto", "python"] if torch.get_default_device().type == "cpu" else ["auto"]

# Generated code runs every fourth loss, to keep its minutes few; LOGITLESS_TEST_ALL=1 runs all.
ALL = os.environ.get("LOGITLESS_TEST_ALL") == "1"

# Functions with an operation that autochunk does not take.
REFUSED: dict[str, str] = {}

# Losses that take more than a quarter of the big value, without a message that gives a remedy.
MEMORY: dict[str, str] = {}

# Tolerances of losses whose PyTorch numbers are further from float64 than f32 sums in another order.
ROUNDING = {
    "ctc_of_torch": 1.5e-4,  # log-sum-exps along frames: PyTorch's are 6e-5 off
    "maximum_mean_discrepancy": 5e-5,  # a difference of means: PyTorch's is 1.8e-5 off, depending on threads
}

# Functions whose memory differs from the report of generated code.
REPORTS = {"attention_of_torch": "PyTorch's fused attention takes memory of its own, which a plan does not count"}


def expected(known, families, raises):
    """Returns the losses of some families; those that are known to fail are marked."""
    assert set(known) <= set(CASES), f"rows of no loss: {set(known) - set(CASES)}"
    names = [case.name for case in CASES.values() if case.family in families]
    mark = pytest.mark.xfail
    return [
        pytest.param(n, marks=mark(raises=raises, strict=True, reason=known[n])) if n in known else n for n in names
    ]


@functools.cache
def planned(name, executor):
    """Returns the chunked function, arguments and plan, or the reason why there is none."""
    if executor == "python" and not ALL and zlib.crc32(name.encode()) % 4:
        pytest.skip("every fourth loss; LOGITLESS_TEST_ALL=1 runs all")
    case = CASES[name]
    args = case.arguments(SMALL, torch.get_default_device())
    chunked = autochunk(case.function, memory_budget=case.big_bytes(SMALL) // 4, executor=executor)
    try:
        return chunked, args, chunked._planned(tuple(args), {})
    except Unsupported as error:
        return chunked, args, error


def plan_of(name, executor):
    chunked, args, plan = planned(name, executor)
    if isinstance(plan, Unsupported):
        pytest.skip(f"refused: {plan}")
    return chunked, args, plan


def is_taken(name, executor):
    _, _, plan = planned(name, executor)
    if isinstance(plan, Unsupported):
        assert re.search(r"autochunk: .*\baten\.\w+", str(plan)), f"names no operation: {plan}"
        raise plan


def has_the_same_numbers(name, executor):
    """Compares with PyTorch to the rounding of f32 sums in another order; bf16 gradients to the rounding of bf16."""
    chunked, args, _ = plan_of(name, executor)
    expected, actual = (outputs_and_gradients(f, args) for f in (CASES[name].function, chunked))
    rounding = 2**-7 if any(a.dtype == torch.bfloat16 for a in args) else ROUNDING.get(name, 2e-5)
    for found, wanted in zip(actual, expected, strict=True):
        for a, e in zip(found, wanted, strict=True):
            if e is None:
                assert a is None
                continue
            assert a.dtype == e.dtype and a.shape == e.shape and a.isfinite().all()
            assert (a - e).abs().max() <= rounding * e.abs().max()


def explains(text: str) -> bool:
    """Returns whether a message names a value that was not cut, and a remedy."""
    return re.search(r"not chunked: .*\[.*\]: .*(name a budget|would (be|take|cut|do|chunk)|instead)", text) is not None


def takes_a_quarter(name, executor):
    _, _, plan = plan_of(name, executor)
    took = max(made.after for made in (plan.forward, plan.backward) if made is not None)
    text = plan.describe()
    assert took <= CASES[name].big_bytes(SMALL) // 4 or explains(text), text


def reports_what_it_takes(name, executor):
    """Compares the report to within 10 % with the memory that PyTorch's allocator gave out beyond inputs and results.
    Temporaries of kernels count.

    oneDNN is off for 16-bit matrix products: its scratch for each thread (some ten KiB) depends on the processor. No
    report counts it, and it is large beside values as small as these.
    """
    _, args, plan = plan_of(name, executor)
    narrow = any(isinstance(a, torch.Tensor) and a.dtype in (torch.bfloat16, torch.float16) for a in args)
    with torch.backends.mkldnn.flags(enabled=torch.backends.mkldnn.enabled and not narrow):
        peaks = list(plan_peaks(plan, args, lambda run: peak_of(run)[0]))
    for compiled, took in peaks:
        said = compiled.of_threads
        assert abs(said - took) <= 0.1 * took, f"{compiled.name}: reports {said}, takes {took}"
