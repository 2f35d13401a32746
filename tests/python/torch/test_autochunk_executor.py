"""The executor of a function when none is chosen: on a CPU the library, if it takes the function within the budget,
otherwise generated code."""

from types import SimpleNamespace

import pytest

torch = pytest.importorskip("torch")

import test_autochunk as cases
from test_autochunk import DEVICE, arguments, check_same, random, z_loss

from logitless._autochunk.options import AUTO, Limits
from logitless.torch import Unsupported, autochunk
from logitless.torch._autochunk import function
from logitless.torch._autochunk.function import Plan, plan_for

on_a_cpu = pytest.mark.skipif(DEVICE != "cpu", reason="of the CPU")


def by_the_library(chunked) -> bool:
    native = "run by the library" in chunked.explain()
    assert native == chunked.source().startswith("graph ")
    return native


@pytest.mark.parametrize("fn", cases.FUNCTIONS, ids=lambda f: f.__name__)
def test_the_default_is_the_library_on_a_cpu(fn):
    chunked = autochunk(fn, memory_budget="128KiB")
    check_same(fn, chunked, arguments(fn, torch.float64), 1e-12)
    assert by_the_library(chunked) == (DEVICE == "cpu")


def test_other_executors_run_as_asked():
    for executor, native in (("python", False), ("native", True)):
        chunked = autochunk(z_loss, chunks=4, executor=executor)
        chunked(*arguments(z_loss, torch.float64))
        assert by_the_library(chunked) == native
    with pytest.raises(ValueError, match="executor: expected one of auto, python, native, got 'xla'"):
        autochunk(z_loss, executor="xla")


def test_what_the_library_does_not_take_is_generated():
    def rising(x, weight):
        return (torch.cummax(x, -1).values @ weight).square().sum()

    args = random(40, 8), random(8, 300)
    with pytest.raises(Unsupported, match="cummax"):
        autochunk(rising, executor="native")(*args)
    chunked = autochunk(rising, chunks=4)
    check_same(rising, chunked, args, 1e-12)
    assert not by_the_library(chunked) and "cummax" in chunked.source()
    if DEVICE == "cpu":
        assert "not by the library: autochunk: test_autochunk_executor.py:" in chunked.explain()


def test_what_neither_takes_is_refused():
    with pytest.raises(Unsupported, match="nonzero.*needs the values of a tensor") as refused:
        autochunk(lambda x: x.nonzero())(random(4, 4))
    assert "executor=" not in str(refused.value)


def test_under_torch_compile():
    args = arguments(z_loss, torch.float64)
    chunked = autochunk(z_loss, chunks=4)
    check_same(z_loss, torch.compile(lambda *given: chunked(*given) * 1, backend="eager"), args, 1e-12)


@pytest.fixture
def made(monkeypatch):
    """Replaces compilation by plans of given sizes: made[native] is bytes, or an exception to raise."""
    sizes = {}

    def make_plan(function, tensors, names, needs, limits, gradients, around):
        assert not limits.auto
        found = sizes[limits.native]
        if isinstance(found, Exception):
            raise found
        return Plan(None, limits, SimpleNamespace(after=found))

    monkeypatch.setattr(function, "make_plan", make_plan)
    return sizes


def chosen(budget=100, device="cpu"):
    limits = Limits(budget=budget, auto=True)
    tensors = [SimpleNamespace(device=torch.device(device))]
    return plan_for(None, tensors, [], [], limits, AUTO, None).limits.native


def test_the_choice(made):
    made.update({True: 100, False: 50})
    assert chosen() and not chosen(device="cuda")
    made[True] = 101  # over the budget
    assert not chosen() and chosen(budget=0)
    made[False] = 102  # further over the budget
    assert chosen()
    made[False] = 101
    assert chosen()
    for error in (Unsupported("no"), ValueError("strict")):
        made[True] = error
        assert not chosen()
    made[False] = ValueError("strict")
    with pytest.raises(ValueError, match="strict"):
        chosen()
