"""The executor of a function when none is chosen: the library, if it runs on the device and takes the function within
the budget, otherwise generated code."""

from dataclasses import replace
from types import SimpleNamespace

import pytest

torch = pytest.importorskip("torch")

import test_autochunk as cases
from test_autochunk import DEVICE, arguments, check_same, random, z_loss

from logitless import _library as c
from logitless._autochunk.native import Request, multiplies_fp32
from logitless._autochunk.options import AUTO, Limits
from logitless._autochunk.plan import Compiled
from logitless.torch import Unsupported, autochunk
from logitless.torch._autochunk import function, native
from logitless.torch._autochunk.function import Plan, plan_for


def by_the_library(chunked) -> bool:
    native = "run by the library" in chunked.explain()
    assert native == chunked.source().startswith("graph ")
    return native


@pytest.mark.parametrize("fn", cases.FUNCTIONS, ids=lambda f: f.__name__)
def test_the_default_is_the_library(fn):
    """On a GPU products take more scratch than these budgets."""
    chunked = autochunk(fn, **({"memory_budget": "128KiB"} if DEVICE == "cpu" else {"chunks": 3}))
    check_same(fn, chunked, arguments(fn, torch.float64), 1e-12)
    assert by_the_library(chunked)


def test_other_executors_run_as_asked():
    for executor, native in (("python", False), ("native", True)):
        chunked = autochunk(z_loss, chunks=4, executor=executor)
        chunked(*arguments(z_loss, torch.float64))
        assert by_the_library(chunked) == native
    with pytest.raises(ValueError, match="executor: expected one of auto, python, native, got 'xla'"):
        autochunk(z_loss, executor="xla")


def test_what_the_library_does_not_take_is_generated():
    def rising(x, weight):
        return (torch.i0(x) @ weight).square().sum()

    args = random(40, 8), random(8, 300)
    with pytest.raises(Unsupported, match="i0"):
        autochunk(rising, executor="native")(*args)
    chunked = autochunk(rising, chunks=4)
    check_same(rising, chunked, args, 1e-12)
    assert not by_the_library(chunked) and "aten.i0" in chunked.source()
    assert "not by the library: autochunk: test_autochunk_executor.py:" in chunked.explain()


def test_what_neither_takes_is_refused():
    with pytest.raises(Unsupported, match="nonzero.*needs the values of a tensor") as refused:
        autochunk(lambda x: x.nonzero())(random(4, 4))
    assert "executor=" not in str(refused.value)


def test_under_torch_compile():
    args = arguments(z_loss, torch.float64)
    chunked = autochunk(z_loss, chunks=4)
    check_same(z_loss, torch.compile(lambda *given: chunked(*given) * 1, backend="eager"), args, 1e-12)


PRODUCT = """graph f(%h: f32[4, 8], %w: f32[6, 8]) {
  %x = dot %h, %w contract(1; 1) : f32[4, 6]
  return x: %x
}"""


@pytest.fixture
def made(monkeypatch):
    """Replaces compilation by plans of given sizes: made[native] is bytes, or an exception to raise. made["lacks"] is
    what a GPU lacks, made["tf32"] whether its products are in TF32."""
    sizes = {"lacks": "", "tf32": False}

    def make_plan(function, tensors, names, needs, limits, gradients, around):
        assert not limits.auto
        found = sizes[limits.native]
        if isinstance(found, Exception):
            raise found
        size, seconds = found if isinstance(found, tuple) else (found, 1.0)
        return Plan(None, limits, Compiled("forward", "", [], None, size, size, request=Request(PRODUCT), seconds=seconds))

    monkeypatch.setattr(function, "make_plan", make_plan)
    monkeypatch.setattr(native, "missing", lambda machine, index: sizes["lacks"])
    monkeypatch.setattr(native, "machine_of", lambda device: None)
    monkeypatch.setattr(native, "on_device", lambda device, function, *args: function(*args))
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(native, "has_tf32", lambda device: sizes["tf32"])
    return sizes


def plan_on(device="cpu", budget=100):
    limits = Limits(budget=budget, auto=True)
    tensors = [SimpleNamespace(device=torch.device(device))]
    return plan_for(None, tensors, [], [], limits, AUTO, None)


def chosen(budget=100):
    return plan_on(budget=budget).limits.native


def test_the_choice(made):
    made.update({True: 100, False: 50})
    assert chosen()
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


def test_little_more_memory_is_better_than_much_more_time(made):
    """Plans over the budget: 1 % more memory must save 2 % of the time."""
    made.update({True: (110, 1.0), False: (105, 100.0)})
    assert chosen()
    made[False] = (105, 1.0)
    assert not chosen()
    made[False] = (100, 100.0)  # it meets the budget
    plan = plan_on()
    assert not plan.limits.native and "predicted to be 100.0 times as fast" in plan.not_native


def test_the_choice_on_a_gpu(made):
    made.update({True: 100, False: 50})
    assert plan_on("cuda:0").limits.native
    made["tf32"] = True
    plan = plan_on("cuda:0")
    assert not plan.limits.native and "in TF32 by its setting" in plan.not_native
    made.update(tf32=False, lacks="libnvrtc.so.13 was not found")
    plan = plan_on("cuda:0")
    assert not plan.limits.native and plan.not_native == "libnvrtc.so.13 was not found"
    assert plan_on("cpu").limits.native
    plan = plan_on("xpu")
    assert not plan.limits.native and "runs on cpu and cuda (NVIDIA), got xpu" in plan.not_native


@pytest.mark.skipif(DEVICE != "cpu", reason="a machine without a GPU")
def test_what_a_machine_lacks_is_named():
    machine = native.Machine(c.DEVICE_CUDA, 90, threads=0)
    assert "CUDA" in native.missing(machine)
    assert "compute capability 70, expected 80 or more" in native.missing(replace(machine, compute_capability=70))


def test_products_of_fp32():
    assert multiplies_fp32(PRODUCT)
    narrow = PRODUCT.replace("f32[4, 8], %w: f32", "bf16[4, 8], %w: bf16")
    assert not multiplies_fp32(narrow)
    cast = narrow.replace("{\n", "{\n  %v = cast %w : f32[6, 8]\n").replace("dot %h, %w", "dot %v, %v")
    assert multiplies_fp32(cast)
