"""The memory of programs of a GPU without a budget: the least within 3 % of the fastest plan of at most a share of the
largest value. Compiling needs no GPU."""

import pytest

torch = pytest.importorskip("torch")

from losses_battery import CASES, Maker, Sizes

from logitless import _library as c
from logitless._autochunk.native import Machine, program
from logitless._autochunk.plan import format_bytes
from logitless.torch import autochunk
from logitless.torch._autochunk import native

SIZES = Sizes(4096, 2048, 65536)
NARROW = [name for name, case in CASES.items() if case.family == "narrow"]


class Unmade(Maker):
    """Inputs without numbers."""

    def normal(self, *shape, scale=1.0, grad=True, dtype=None):
        return torch.empty(shape, dtype=dtype or self.dtype, device=self.device).requires_grad_(grad)


@pytest.fixture
def plan_of(monkeypatch):
    monkeypatch.setattr(native, "machine_of", lambda device: Machine(c.DEVICE_CUDA, 90, threads=0, head_engine=True))
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)

    def planned(name, sizes=SIZES, **options):
        with torch.device("cpu"):
            args = CASES[name].inputs(Unmade(sizes, "cpu", torch.bfloat16))
            return autochunk(CASES[name].function, executor="native", **options)._planned(args, {})

    return planned


@pytest.mark.parametrize("name", NARROW)
def test_the_share_of_the_logits(name, plan_of):
    """A quarter, or a fifth more if nothing is recomputed, where the plan is nearly as fast as the fastest of all; else half
    of the logits, or all of them."""
    plan = plan_of(name)
    assert plan.backward is None
    reports = [program(plan.forward.request.on(head_engine=on)).report for on in (True, False)]
    made = program(plan.forward.request).report
    [chosen] = [p for p in made["plans"] if p["chosen"]]
    every = [p for report in reports for p in report["plans"]]
    best = min(p["seconds"] for p in every)
    logits = CASES[name].big_bytes(SIZES)
    assert chosen["seconds"] <= 1.2 * best and chosen["value_bytes"] <= logits
    if plan.forward.most == 0:  # DPO's pairs: the search of a quarter has other axes, and no plan that is fast enough
        return
    assert chosen["value_bytes"] <= plan.forward.most <= logits
    assert f"the fastest plan of at most {format_bytes(plan.forward.most)}" in plan.describe()
    smaller = [p for p in every if p["value_bytes"] <= plan.forward.most // 2 and plan.forward.most > 3 * logits // 10]
    assert all(p["seconds"] > 1.2 * best for p in smaller)
    found = [p for p in made["plans"] if p["value_bytes"] <= plan.forward.most]
    fastest = min(p["seconds"] for p in found)
    assert chosen["seconds"] <= 1.03 * fastest
    assert all(p["seconds"] > 1.03 * fastest for p in found if p["value_bytes"] < chosen["value_bytes"])


def test_no_product_is_computed_again_by_default(plan_of):
    """The loop stores gradients of the logits in 16 bits, and the products that contract them run after it."""
    plan = plan_of("float_grpo_with_entropy")
    [chosen] = [p for p in program(plan.forward.request).report["plans"] if p["chosen"]]
    assert chosen["extra_work"] < 1e-3 and plan.forward.after < 700 << 20


def test_small_functions_have_no_loops(plan_of):
    plan = plan_of("float_softcap_smoothing_z", Sizes(256, 64, 1024))
    assert not plan.forward.regions and plan.forward.after == plan.forward.before


def test_all_of_the_logits_where_less_is_slower(plan_of):
    plan = plan_of("float_distillation", Sizes(2048, 768, 50304))
    assert plan.forward.most == 4 * 2048 * 50304


def test_a_number_of_chunks_is_taken(plan_of):
    plan = plan_of("float_softcap_smoothing_z", chunks=8)
    assert {r["chunk"] for r in plan.forward.regions} == {512}
