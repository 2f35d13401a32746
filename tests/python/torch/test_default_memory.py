"""The memory of programs of a GPU without a budget: the least within 3 % of the fastest plan of at most a share of the
largest value. Compiling needs no GPU."""

import pytest

torch = pytest.importorskip("torch")

from losses_battery import CASES, Maker, Sizes

from logitless import _library as c
from logitless._autochunk.native import Machine, program
from logitless._autochunk.plan import format_bytes
from logitless.torch import autochunk
from logitless.torch._autochunk import function as chunked
from logitless.torch._autochunk import native
from losses_battery.step import outputs_and_gradients

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
    if plan.forward.near:
        assert chosen["value_bytes"] == min(p["value_bytes"] for p in every if p["seconds"] <= 1.1 * best)
        assert chosen["value_bytes"] <= plan.itself() // 2 and "within 10 % of the fastest plan" in plan.describe()
        return
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


@pytest.mark.parametrize("sizes", [SIZES, Sizes(2048, 1024, 32768)])
def test_a_head_without_gradients_has_one_chunk(sizes, plan_of):
    """Less than 64 MiB is no reason for more time."""
    with torch.no_grad():
        plan = plan_of("float_cross_entropy", sizes)
    [head] = plan.forward.heads
    assert head["chunk_tokens"] == sizes.rows and plan.forward.after < 64 << 20


def test_a_large_head_without_gradients_has_large_chunks(plan_of):
    with torch.no_grad():
        plan = plan_of("float_cross_entropy", Sizes(8192, 4096, 128256))
    [head] = plan.forward.heads
    assert head["chunk_tokens"] >= 2048 and plan.forward.after < 64 << 20


WIDE = Sizes(2048, 1024, 32768)
UNITS = 2 * WIDE.rows * WIDE.vocab  # bytes of hidden units in 16 bits


@pytest.mark.parametrize("name, values", [("mlp_gelu", 1), ("swiglu", 2), ("causal_attention", 0)])
def test_layers_keep_products_for_their_gradients(name, values, plan_of):
    """They take half of the function's own memory at most, and a tenth of the time less. The attention's products contract
    short rows."""
    plan = plan_of(name, WIDE)
    assert plan.kept_bytes == values * UNITS
    assert ("of matrix products, which are kept" in plan.describe()) == (values > 0)
    again = plan_of(name, WIDE, gradients="backward")
    assert again.kept_bytes == 0
    if values > 0:
        assert 2 * plan.kept_bytes <= plan.itself() and plan.seconds <= 0.9 * again.seconds


def test_a_budget_keeps_nothing_for_the_gradients(plan_of):
    assert plan_of("swiglu", WIDE, memory_budget="256MiB").kept_bytes == 0


def test_nearly_the_fastest_plan_within_half_of_the_memory(plan_of):
    """The least plan takes a tenth more time than the fastest."""
    plan = plan_of("swiglu", WIDE, gradients="backward")
    [chosen] = [p for p in program(plan.backward.request).report["plans"] if p["chosen"]]
    every = program(plan.backward.request).report["plans"]
    best = min(p["seconds"] for p in every)
    near = [p for p in every if p["seconds"] <= 1.1 * best and p["value_bytes"] <= plan.itself() // 2]
    assert plan.backward.near and chosen["value_bytes"] == min(p["value_bytes"] for p in near)


@pytest.fixture
def keeps(monkeypatch):
    monkeypatch.setattr(chunked, "_may_keep", lambda limits, device: limits.native)
    monkeypatch.setattr(chunked, "_WORTH", float("inf"))


@pytest.mark.parametrize("how", ["plain", "compiled", "checkpoint", "vjp"])
def test_kept_products_give_the_same_gradients(how, keeps):
    case = CASES["norm_swiglu_residual"]
    args = case.arguments(Sizes(32, 256, 320))
    chunked_one = autochunk(case.function, executor="native")
    run = chunked_one
    if how == "compiled":
        run = torch.compile(lambda *given: chunked_one(*given), backend="aot_eager", fullgraph=True)
    elif how == "checkpoint":
        run = lambda *given: torch.utils.checkpoint.checkpoint(chunked_one, *given, use_reentrant=False)  # noqa: E731
    if how == "vjp":
        out, back = torch.func.vjp(chunked_one, *(a.detach() for a in args))
        up = torch.ones_like(out)
        up.view(-1)[1] = 2.0
        found = [out], list(back(up))
    else:
        found = outputs_and_gradients(run, args)
    assert chunked_one.last.kept_bytes == 2 * 4 * 32 * 320
    wanted = outputs_and_gradients(case.function, args)
    for a, b in zip(wanted[0] + wanted[1], found[0] + found[1]):
        torch.testing.assert_close(b, a, rtol=1e-4, atol=1e-5 * float(a.detach().abs().max()))
