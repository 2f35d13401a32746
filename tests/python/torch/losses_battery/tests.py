"""The tests of the FAMILIES of the module that imports them; checks.py has the requirements."""

import pytest
import torch

from losses_battery import checks
from logitless.torch._autochunk import Unsupported

__all__ = [
    "pytest_generate_tests",
    "test_has_the_same_numbers",
    "test_is_taken",
    "test_reports_what_it_takes",
    "test_takes_a_quarter",
]

_KNOWN = {"test_is_taken": (checks.REFUSED, Unsupported), "test_takes_a_quarter": (checks.MEMORY, AssertionError)}


def pytest_generate_tests(metafunc):
    known, error = _KNOWN.get(metafunc.function.__name__, ({}, AssertionError))
    metafunc.parametrize("name", checks.expected(known, metafunc.module.FAMILIES, error))
    metafunc.parametrize("executor", checks.EXECUTORS)


def test_is_taken(name, executor):
    checks.is_taken(name, executor)


def test_has_the_same_numbers(name, executor):
    checks.has_the_same_numbers(name, executor)


def test_takes_a_quarter(name, executor):
    checks.takes_a_quarter(name, executor)


@pytest.mark.skipif(torch.get_default_device().type != "cpu", reason="counts what PyTorch's CPU allocator gives out")
def test_reports_what_it_takes(request, name, executor):
    if name in checks.REPORTS and not checks.plan_of(name, executor)[2].limits.native:
        request.applymarker(pytest.mark.xfail(raises=AssertionError, strict=True, reason=checks.REPORTS[name]))
    checks.reports_what_it_takes(name, executor)
