"""The losses of losses_battery with heads, by autochunk. losses_battery/checks.py has the requirements."""

import pytest

torch = pytest.importorskip("torch")

from losses_battery import checks
from losses_battery.checks import MEMORY, REFUSED, expected

from logitless.torch._autochunk import Unsupported

FAMILIES = ["language", "narrow", "preference", "reinforcement", "distillation"]

executors = pytest.mark.parametrize("executor", checks.EXECUTORS)


@executors
@pytest.mark.parametrize("name", expected(REFUSED, FAMILIES, Unsupported))
def test_is_taken(name, executor):
    checks.is_taken(name, executor)


@executors
@pytest.mark.parametrize("name", expected({}, FAMILIES, AssertionError))
def test_has_the_same_numbers(name, executor):
    checks.has_the_same_numbers(name, executor)


@executors
@pytest.mark.parametrize("name", expected(MEMORY, FAMILIES, AssertionError))
def test_takes_a_quarter(name, executor):
    checks.takes_a_quarter(name, executor)


@pytest.mark.skipif(torch.get_default_device().type != "cpu", reason="counts what PyTorch's CPU allocator gives out")
@executors
@pytest.mark.parametrize("name", expected({}, FAMILIES, AssertionError))
def test_reports_what_it_takes(name, executor):
    checks.reports_what_it_takes(name, executor)
