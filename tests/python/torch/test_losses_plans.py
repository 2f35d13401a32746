"""Memory of the divergences at a real size on a GPU, by plans that are made without one; and memory of a backward."""

import math
import warnings

import pytest
import torch
from logitless.torch._peak import peak_of
from oracle import generator
from paper_losses import Papers

from logitless import _library as c
from logitless._autochunk.native import Machine, program
from logitless._cache import Cache
from logitless._losses import distillation as shared
from logitless.torch import _xp, losses
from logitless.torch._autochunk import native
from logitless.torch.losses import _formulas, distillation

PAPER = Papers(torch)
MIB = 1 << 20
ROWS, DIM, VOCAB = 8192, 4096, 128256  # Llama-3-8B's head


@pytest.fixture
def planned(monkeypatch):
    """Returns a function from options of a divergence at that size to (bytes, GEMMs over all rows and vocabulary
    entries)."""
    if torch.get_default_device().type != "cpu":
        pytest.skip("plans of empty tensors of the CPU")
    monkeypatch.setattr(native, "machine_of", lambda device: Machine(c.DEVICE_CUDA, 90, threads=0, head_engine=True))
    monkeypatch.setattr(_formulas, "_MADE", Cache(64))
    empty = lambda rows: torch.empty(rows, DIM, dtype=torch.bfloat16)  # noqa: E731: never touched
    student = empty(ROWS).requires_grad_(), empty(VOCAB).requires_grad_()
    teacher = empty(ROWS), empty(VOCAB)

    def plan(beta, **options):
        a = {**distillation.DIVERGENCE, **options}
        call = shared.call(_xp, *student, *teacher, None, None, beta, a)
        chunked = _formulas._MADE[_formulas._key("divergence", call.memory_budget, call.executor)]
        forward = chunked._planned((call.given, tuple(call.form)), {}).forward
        plan.request = forward.request
        [chosen] = [p for p in program(forward.request).report["plans"] if p["chosen"]]
        return forward.after, 4 * (1 + chosen["extra_work"])

    return plan


def test_formulas_of_many_budgets_are_bounded(monkeypatch):
    monkeypatch.setattr(_formulas, "_MADE", Cache(4))
    keys = [_formulas._key("divergence", MIB + budget, "auto") for budget in range(9)]
    assert len(set(keys)) == 9 and len(_formulas._MADE) <= 4 and _formulas._MADE[keys[-1]]


@pytest.mark.parametrize("beta", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("masked", [False, True])
def test_half_of_ligers_memory_takes_six_products(planned, beta, masked):
    """With the gradients' 1066 MiB, half of the 3062 that Liger's JSD takes. Logits of all tokens are computed once,
    and recomputed once by vocabulary blocks."""
    target = torch.zeros(ROWS, dtype=torch.int64) if masked else None
    taken, products = planned(beta, memory_budget=465 * MIB, target=target)
    assert taken <= 465 * MIB
    assert products < 6.001


def test_a_budget_between_two_plans_takes_the_smaller_one(planned):
    """Here the values of a plan fit, but not the memory of its kernels. The plan of a smaller budget is taken, and not
    chunks by number."""
    taken, _ = planned(0.0, memory_budget=224 * MIB)
    assert taken <= 224 * MIB and planned.request.chunks == 0


def test_smaller_budgets_cost_no_more_products(planned):
    for budget in (320, 256, 128):
        taken, products = planned(0.5, memory_budget=budget * MIB)
        assert taken <= budget * MIB and products < 6.001


def test_the_default_is_the_least_memory_for_a_fifth_of_the_time(planned):
    """fp32 sums of the gradient, 2004 MiB, and chunks of tokens: less than the fp32 logits of one model."""
    taken, products = planned(0.5)
    assert taken < 3300 * MIB < 4 * ROWS * VOCAB
    assert products < 4.001


# --- Runs.


def tensors(rows, dim, vocab, dtype, spread=1.5):
    scale = [1.0, spread / dim**0.5] * 2
    made = [
        (torch.randn(n, dim, generator=generator(i), dtype=torch.float64) * s).to(dtype)
        for i, (n, s) in enumerate(zip((rows, vocab) * 2, scale))
    ]
    return made[0].requires_grad_(), made[1].requires_grad_(), *made[2:]


def test_a_backward_multiplies_gradients_where_they_are():
    if torch.get_default_device().type != "cpu":
        pytest.skip("counts what PyTorch's CPU allocator gives out")
    arrays = tensors(64, 32, 2048, torch.bfloat16)
    loss = losses.jsd_loss(*arrays)
    first = torch.autograd.grad(3 * loss, arrays[:2], retain_graph=True)
    again = torch.autograd.grad(3 * loss, arrays[:2], retain_graph=True)
    peak, last = peak_of(lambda: torch.autograd.grad(3 * loss, arrays[:2]), results_count=True)
    assert peak < 4096 < 2 * sum(g.numel() for g in last)
    assert all(torch.equal(a, b) and torch.equal(a, z) for a, b, z in zip(first, again, last))


@pytest.mark.parametrize("beta", [0.0, 0.03, 0.5, 0.97, 1.0])
def test_models_that_disagree_by_far_and_not_at_all(beta):
    """Entries with probability exp(-300) in one model and almost 1 in the other, and a teacher that is the student."""
    hidden, weight, *teacher = tensors(9, 6, 40, torch.float64, spread=90.0)
    for other in (teacher, (hidden.detach(), weight.detach())):
        p, q = (PAPER.logits(*head).log_softmax(-1) for head in ((hidden, weight), other))
        middle = {0.0: p, 1.0: q}.get(beta)
        if middle is None:  # the papers' formula has the logarithm of 0 here
            middle = torch.logaddexp(p + math.log1p(-beta), q + math.log(beta))
        of_q, of_p = (q.exp() * (q - middle)).sum(), (p.exp() * (p - middle)).sum()
        expected = {0.0: of_q, 1.0: of_p}.get(beta, beta * of_q + (1 - beta) * of_p)
        found = losses.jsd_loss(hidden, weight, *other, beta=beta, reduction="sum")
        assert abs(found - expected).item() < 1e-12 * max(1.0, expected.item())
        pairs = (torch.autograd.grad(x, (hidden, weight)) for x in (found, expected))
        for one, exact in zip(*pairs):
            assert torch.isfinite(one).all()
            assert (one - exact).abs().max() < 1e-9  # of numbers up to 180; a logit is known to 1e-14, and ratios are 300


def test_sharded_weights_are_gathered_with_a_warning():
    """A fake group of two ranks: the gathered numbers are not theirs, and are not checked."""
    distributed = pytest.importorskip("torch.distributed")
    if distributed.is_initialized() or torch.get_default_device().type != "cpu":
        pytest.skip("needs a process group of its own, on the CPU")
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor
    from torch.testing._internal.distributed.fake_pg import FakeStore

    hidden, weight, *teacher = tensors(6, 4, 10, torch.float32)
    distributed.init_process_group("fake", rank=0, world_size=2, store=FakeStore())
    try:
        mesh = init_device_mesh("cpu", (2,))
        with pytest.warns(UserWarning, match=r"^weight: a DTensor sharded as .* over 2 ranks is gathered"):
            losses.forward_kl_loss(hidden, distribute_tensor(weight.detach(), mesh, [Shard(0)]), *teacher)
        with pytest.warns(UserWarning, match=r"^teacher_weight: a DTensor sharded"):
            losses.jsd_loss(hidden, weight, teacher[0], distribute_tensor(teacher[1], mesh, [Shard(1)]))
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            losses.jsd_loss(hidden, distribute_tensor(weight.detach(), mesh, [Replicate()]), *teacher)
    finally:
        distributed.destroy_process_group()
