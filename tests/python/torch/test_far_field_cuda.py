"""FarFieldHead on a GPU: close to the exact gradients from fewer vocabulary entries, with the same bits when it
is repeated, resumed or on another stream. Runs with LOGITLESS_TEST_DEVICE=cuda."""

import copy
import gc

import far_runs
import oracle
import pytest
import torch
from far_runs import same
from logitless.torch import FarFieldHead, linear_cross_entropy

if oracle.DEVICE == "cpu" or torch.cuda.get_device_capability()[0] < 8:
    pytest.skip("no GPU from compute capability 8.0 on under test (LOGITLESS_TEST_DEVICE=cuda)", allow_module_level=True)
V, D, N = 131072, 128, 2048  # the far field pays
QUICK = dict(error=0.05, audit_every=3, refresh_every=3, refresh_delay=2, sample_rows=256)
STEPS = 8


def problem(dtype=torch.bfloat16, dim=D):
    """Returns hidden [N, D], weight [V, D], target [N]: shuffled clusters of similar vocabulary entries, and
    tokens of four topics."""
    g = torch.Generator("cuda").manual_seed(0)
    normal = lambda *shape: torch.randn(shape, generator=g, device="cuda")  # noqa: E731
    unit = (8 / dim) ** 0.5
    weight = unit * (normal(V // 128, dim).repeat_interleave(128, 0) + 0.02 * normal(V, dim))
    weight = weight[torch.randperm(V, generator=g, device="cuda")]
    hidden = 1.2 * normal(4, dim).repeat_interleave(N // 4, 0) + 0.1 * normal(N, dim)
    return hidden.to(dtype), weight.to(dtype), torch.randint(V, (N,), generator=g, device="cuda")


HIDDEN, WEIGHT, TARGET = problem()


def run(head, steps=STEPS, start=(HIDDEN, WEIGHT)):
    return far_runs.run(lambda hidden, weight: head(hidden, weight, TARGET), steps, start)


# The far field of f16 takes another kernel than exact steps on a Hopper GPU, and pays from more columns on.
@pytest.mark.parametrize("dtype, dim", [(torch.bfloat16, D), (torch.float16, 512)])
def test_a_run_is_near_and_repeats(dtype, dim):
    head = FarFieldHead(**QUICK)
    start = problem(dtype, dim)[:2]
    results, (hidden, weight) = run(head, start=start)
    report = head.report
    assert report.far and report.steps == STEPS and report.audits > 0 and report.last_error < 0.05
    assert head.statistics().passes > 0 and 0 < report.mean_selected < 0.7
    assert same(run(FarFieldHead(**QUICK), start=start)[0], results)
    hidden.requires_grad_(), weight.requires_grad_()
    found = torch.autograd.grad(head(hidden, weight, TARGET), (hidden, weight))
    exact = torch.autograd.grad(linear_cross_entropy(hidden, weight, TARGET), (hidden, weight))
    for f, e in zip(found, exact):
        error = (f.double() - e.double()).norm() / e.double().norm()
        assert 0 < error < 0.05


def test_resumed_copied_and_on_another_stream():
    whole, _ = run(FarFieldHead(**QUICK))
    head = FarFieldHead(**QUICK)
    first, then = run(head, 4)
    loaded = FarFieldHead(**QUICK)
    loaded.load_state_dict(head.state_dict())
    rest = [run(other, STEPS - 4, then)[0] for other in (loaded, copy.deepcopy(head))]
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        rest.append(run(head, STEPS - 4, then)[0])
    torch.cuda.current_stream().wait_stream(side)
    assert all(same(first + r, whole) for r in rest)


def test_a_head_in_a_cycle_is_collected():
    head = FarFieldHead(**QUICK)
    run(head, 4)
    head.itself = [head]
    del head
    gc.collect()
    torch.cuda.synchronize()
    assert same(run(FarFieldHead(**QUICK), 1)[0], run(FarFieldHead(**QUICK), 1)[0])


def test_frozen_weight():
    head = FarFieldHead(**{**QUICK, "refresh_every": 1, "refresh_delay": 0})
    hidden = HIDDEN.clone().requires_grad_()
    loss = head(hidden, WEIGHT, TARGET)
    (found,) = torch.autograd.grad(loss, hidden)
    (exact,) = torch.autograd.grad(linear_cross_entropy(hidden, WEIGHT, TARGET), hidden)
    assert (found.double() - exact.double()).norm() < 0.05 * exact.double().norm()


def test_a_capture_is_refused():
    head = FarFieldHead(**QUICK)
    hidden, weight = HIDDEN.clone().requires_grad_(), WEIGHT.clone().requires_grad_()
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        graph = torch.cuda.CUDAGraph()
        with pytest.raises(Exception, match="(?i)captur|graph"):
            with torch.cuda.graph(graph, stream=side):
                head(hidden, weight, TARGET)
    torch.cuda.synchronize()
    assert FarFieldHead(**QUICK)(hidden, weight, TARGET).isfinite()
