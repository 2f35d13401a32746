"""The losses of losses_battery through autochunk: those of all else. losses_battery/checks.py says what is asked of each."""

import pytest

torch = pytest.importorskip("torch")

from losses_battery import checks
from losses_battery.checks import MEMORY, REFUSED, REPORTS, expected

from logitless.torch._autochunk import Unsupported

FAMILIES = ["attention", "contrastive", "layers", "margins", "speech", "vision"]


@pytest.mark.parametrize("name", expected(REFUSED, FAMILIES, Unsupported))
def test_is_taken(name):
    checks.is_taken(name)


@pytest.mark.parametrize("name", expected({}, FAMILIES, AssertionError))
def test_has_the_same_numbers(name):
    checks.has_the_same_numbers(name)


@pytest.mark.parametrize("name", expected(MEMORY, FAMILIES, AssertionError))
def test_takes_a_quarter(name):
    checks.takes_a_quarter(name)


@pytest.mark.skipif(torch.get_default_device().type != "cpu", reason="counts what PyTorch's CPU allocator gives out")
@pytest.mark.parametrize("name", expected(REPORTS, FAMILIES, AssertionError))
def test_reports_what_it_takes(name):
    checks.reports_what_it_takes(name)
