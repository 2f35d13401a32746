"""What is asked of autochunk for every loss, by each executor, with a budget of a quarter of its big value: that it takes the function, the
same numbers as PyTorch's, memory within the budget or a message that says why not and what would, and a report that is
true.

What does not hold yet is in the tables below with its cause, and its test fails when it comes to hold: take the row out
then."""

import functools
import re

import pytest
import torch

from losses_battery.case import CASES, SMALL
from losses_battery.step import outputs_and_gradients, peak_of, plan_peaks
from logitless.torch import autochunk
from logitless.torch._autochunk import Unsupported

EXECUTORS = ["auto", "python"] if torch.get_default_device().type == "cpu" else ["auto"]

# Functions with an operation that cannot be taken.
REFUSED: dict[str, str] = {}

# Memory over a quarter of the big value, and no message that says what would help.
MEMORY: dict[str, str] = {}

# Numbers that PyTorch itself has with a larger error than sums of f32 in another order: against float64.
ROUNDING = {
    "ctc_of_torch": 1.5e-4,  # log-sum-exps along frames, of which PyTorch's are 6e-5 off
    "maximum_mean_discrepancy": 5e-5,  # a difference of means: PyTorch's is 1.8e-5 off, more or less by threads
}

# Memory that is not what the report of generated code says.
REPORTS = {"attention_of_torch": "PyTorch's fused attention takes memory of its own, which a plan does not count"}


def expected(known, families, raises):
    """The losses of some families, with those that are known not to pass marked."""
    assert set(known) <= set(CASES), f"rows of no loss: {set(known) - set(CASES)}"
    names = [case.name for case in CASES.values() if case.family in families]
    mark = pytest.mark.xfail
    return [
        pytest.param(n, marks=mark(raises=raises, strict=True, reason=known[n])) if n in known else n for n in names
    ]


@functools.cache
def planned(name, executor):
    """The chunked function, arguments and plan, or why there is none."""
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
    """To the rounding of f32 sums in another order; bf16 gradients to their own."""
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
    """Whether a message names a value that was not cut, and what would help."""
    return re.search(r"not chunked: .*\[.*\]: .*(name a budget|would (be|take|cut|do|chunk)|instead)", text) is not None


def takes_a_quarter(name, executor):
    _, _, plan = plan_of(name, executor)
    took = max(made.after for made in (plan.forward, plan.backward) if made is not None)
    text = plan.describe()
    assert took <= CASES[name].big_bytes(SMALL) // 4 or explains(text), text


def reports_what_it_takes(name, executor):
    """Within 10 % of what PyTorch's allocator gives out, kernels' temporaries among it, beyond inputs and results.

    Products of 16-bit matrices are those without oneDNN, whose scratch for each thread (some ten KiB, which no report
    counts) depends on the processor, and is much beside values as small as these."""
    _, args, plan = plan_of(name, executor)
    narrow = any(isinstance(a, torch.Tensor) and a.dtype in (torch.bfloat16, torch.float16) for a in args)
    with torch.backends.mkldnn.flags(enabled=torch.backends.mkldnn.enabled and not narrow):
        peaks = list(plan_peaks(plan, args, lambda run: peak_of(run)[0]))
    for compiled, took in peaks:
        said = compiled.of_threads
        assert abs(said - took) <= 0.1 * took, f"{compiled.name}: reports {said}, takes {took}"
