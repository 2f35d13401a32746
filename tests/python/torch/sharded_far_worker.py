"""One of several gloo processes (worker_process.py). Prints "ok" when all checks pass: FarFieldHead with a sharded
vocabulary, against exact gradients of one process."""

import torch
import torch.distributed as dist

VOCAB, DIM, TOKENS = 131072, 8, 128
QUICK = dict(error=0.05, refresh_every=2, refresh_delay=1, audit_every=2, audit_rows=1000, sample_rows=TOKENS)


def main(rank: int, ranks: int) -> None:
    even = [VOCAB * r // ranks for r in range(ranks + 1)]
    for tokens in (False, True):
        training(rank, ranks, even, tokens)
    training(rank, ranks, [0] + [VOCAB // 2] * (ranks - 1) + [VOCAB], False)  # inner ranks have no vocabulary
    errors(rank, ranks, even)


def problem():
    """Returns a vocabulary of shuffled clusters, and tokens of a few topics."""
    torch.manual_seed(5)
    centers = torch.randn(VOCAB // 128, DIM).repeat_interleave(128, 0)
    weight = (centers + 0.1 * torch.randn(VOCAB, DIM))[torch.randperm(VOCAB)]
    hidden = 1.2 * torch.randn(4, DIM).repeat_interleave(TOKENS // 4, 0) + 0.2 * torch.randn(TOKENS, DIM)
    return hidden, weight, torch.randint(0, VOCAB, (TOKENS,))


def off(a, b):
    return ((a - b).norm() / b.norm()).item()


def training(rank, ranks, cut, tokens):
    from logitless.torch import FarFieldHead, Sharding, linear_cross_entropy

    hidden, weight, target = problem()
    rows, own = slice(cut[rank], cut[rank + 1]), slice(TOKENS * rank // ranks, TOKENS * (rank + 1) // ranks)
    mine = own if tokens else slice(None)
    sharding = Sharding(dist.group.WORLD, tokens=tokens)
    far, again = FarFieldHead(**QUICK), None
    for step in range(1, 7):
        whole = weight.clone().requires_grad_()
        states = hidden.clone().requires_grad_()
        exact = linear_cross_entropy(states, whole, target)
        exact.backward()
        before = far.get_extra_state()
        results = []
        for head in filter(None, (far, again)):
            w, x = weight[rows].clone().requires_grad_(), hidden[mine].clone().requires_grad_()
            loss = head(x, w, target[mine], sharding=sharding)
            assert abs(loss - exact) < 1e-5 * exact, (step, loss, exact)
            (2.0 * loss).backward()
            assert w.grad.shape == w.shape
            results.append((loss.detach(), x.grad, w.grad))
        # A head that was loaded continues with the same bits.
        assert all(torch.equal(a, b) for a, b in zip(results[0], results[-1])), step
        is_far = far.statistics().passes > 0
        assert 1 <= far.statistics().imbalance <= ranks, far.statistics()
        assert is_far == (step >= 3), far.explain()
        assert off(x.grad, 2.0 * states.grad[mine]) < (0.1 if is_far else 3e-5), (step, is_far)
        if w.numel():
            assert off(w.grad, 2.0 * whole.grad[rows]) < (0.3 if is_far else 3e-5), (step, is_far)
        reports = [None] * ranks
        dist.all_gather_object(reports, (far.report._replace(vocab=0), far.statistics()._replace(tokens=0)))
        assert all(str(r) == str(reports[0]) for r in reports), reports
        if step == 4:
            again = FarFieldHead(**QUICK)
            again.set_extra_state(far.get_extra_state())
        weight -= 0.5 * whole.grad
        hidden -= 0.5 * states.grad
    assert before != far.get_extra_state()
    far.eval()
    w, x = weight[rows].clone().requires_grad_(), hidden[mine].clone().requires_grad_()
    state = far.get_extra_state()
    loss = far(x, w, target[mine], sharding=sharding)
    other = linear_cross_entropy(x.detach(), w.detach(), target[mine], sharding=sharding)
    assert abs(loss - other) < 1e-6 * other and state == far.get_extra_state()


def errors(rank, ranks, cut):
    """All ranks raise the error of one rank, the call is no step, and the next call works."""
    from logitless.torch import FarFieldHead, Sharding

    hidden, weight, target = problem()
    w = weight[cut[rank] : cut[rank + 1]].requires_grad_()
    sharding, last = Sharding(dist.group.WORLD), rank == ranks - 1
    far = FarFieldHead(**QUICK)
    other = FarFieldHead(**{**QUICK, "error": 0.02}) if last else FarFieldHead(**QUICK)
    bad = target.clone()
    bad[3] = VOCAB
    for call, text in (
        (lambda: far(hidden, w, bad if last else target, sharding=sharding), f"{VOCAB} at position 3"),
        (lambda: far(hidden, w, None if last else target, sharding=sharding), "target"),
        (lambda: far(hidden.double() if last else hidden, w, target, sharding=sharding), "float64"),
        (lambda: other(hidden, w, target, sharding=sharding), "error 0.02"),
    ):
        try:
            call()
        except Exception as error:
            assert text in str(error), (rank, text, error)
        else:
            raise AssertionError(f"rank {rank}: nothing was raised where {text} was expected")
        assert far.report.steps == 0
    far(hidden, w, target, sharding=sharding)
    assert far.report.steps == 1
