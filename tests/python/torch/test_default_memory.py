"""The memory of programs of a GPU without a budget: the least within 3 % of the fastest plan of at most a quarter of the
largest value. Compiling needs no GPU."""

import pytest

torch = pytest.importorskip("torch")

from losses_battery import CASES, Maker, Sizes

from logitless import _library as c
from logitless._autochunk.native import Machine, program
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
def test_a_quarter_of_the_logits(name, plan_of):
    """Softcap and others had no loops, which take more time than whole values if these are fused."""
    plan = plan_of(name)
    assert plan.backward is None
    made = program(plan.forward.request).report
    [chosen] = [p for p in made["plans"] if p["chosen"]]
    quarter = CASES[name].big_bytes(SIZES) // 4
    assert chosen["value_bytes"] <= quarter < plan.forward.before / 4
    assert chosen["seconds"] <= 1.6 * made["before"]["predicted_seconds"]
    assert f"the fastest plan of at most {quarter / 2**20:.1f} MiB" in plan.describe()
    found = [p for p in made["plans"] if p["value_bytes"] <= quarter]
    fastest = min(p["seconds"] for p in found)
    assert chosen["seconds"] <= 1.03 * fastest
    assert all(p["seconds"] > 1.03 * fastest for p in found if p["value_bytes"] < chosen["value_bytes"])


def test_more_than_a_quarter_where_that_is_slow(plan_of):
    """Products of small width take little time, so that computing them again pays less."""
    plan = plan_of("float_distillation", Sizes(4096, 1024, 32768))
    assert plan.forward.most == 512 << 20 and 128 << 20 < plan.forward.after <= 512 << 20


def test_small_functions_have_no_loops(plan_of):
    plan = plan_of("float_softcap_smoothing_z", Sizes(256, 64, 1024))
    assert not plan.forward.regions and plan.forward.after == plan.forward.before


def test_what_is_far_slower_is_not_taken(plan_of):
    plan = plan_of("float_distillation", Sizes(2048, 768, 50257))
    assert plan.forward.most == 0 and "no budget" not in plan.describe()


def test_a_number_of_chunks_is_taken(plan_of):
    plan = plan_of("float_softcap_smoothing_z", chunks=8)
    assert [r["chunk"] for r in plan.forward.regions] == [512]
