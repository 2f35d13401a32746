"""One of several processes (worker_process.py) with a Hopper GPU each by NCCL, or one GPU that they share by gloo.
Prints "ok" when all checks pass: FarFieldHead with a sharded vocabulary, against exact gradients of one process."""

import torch
import torch.distributed as dist
from sharded_far_worker import off

VOCAB, DIM, TOKENS = 258048, 128, 2048  # large enough that a far-field plan is predicted to be faster
CLUSTER = 12 * 128  # 12 tiles: equally many clusters for 2, 3 or 4 ranks, few enough to tell apart by 4 topics
QUICK = dict(error=0.05, refresh_every=2, refresh_delay=1, audit_every=2, audit_rows=256, sample_rows=512)


def main(rank: int, ranks: int) -> None:
    for accuracy in ("far_backward", "far_both"):
        for tokens in (False, True):
            training(rank, ranks, accuracy, tokens)


def problem(ranks):
    """Clusters of whole tiles of the vocabulary, shuffled within each rank, and tokens of a few topics. All ranks have
    the same."""
    torch.manual_seed(5)
    unit = (2.0 / DIM) ** 0.5  # two moments distinguish tiles of two clusters
    centers = unit * torch.randn(VOCAB // CLUSTER, DIM).repeat_interleave(CLUSTER, 0)
    order = torch.cat([own[torch.randperm(len(own))] for own in torch.arange(VOCAB).chunk(ranks)])
    weight = (centers + 0.02 * unit * torch.randn(VOCAB, DIM))[order]
    hidden = 1.2 * torch.randn(4, DIM).repeat_interleave(TOKENS // 4, 0) + 0.1 * torch.randn(TOKENS, DIM)
    return [t.cuda() for t in (hidden.bfloat16(), weight.bfloat16(), torch.randint(0, VOCAB, (TOKENS,)))]


def training(rank, ranks, accuracy, tokens):
    from logitless.torch import FarFieldHead, Sharding, linear_cross_entropy

    hidden, weight, target = problem(ranks)
    rows = slice(VOCAB * rank // ranks, VOCAB * (rank + 1) // ranks)
    own = slice(TOKENS * rank // ranks, TOKENS * (rank + 1) // ranks) if tokens else slice(None)
    sharding = Sharding(dist.group.WORLD, VOCAB, rows.start, tokens, interleaved=True)  # frequent entries are spread evenly
    far, again, far_steps = FarFieldHead(accuracy=accuracy, **QUICK), None, 0
    for step in range(1, 9):
        whole, states = weight.clone().requires_grad_(), hidden.clone().requires_grad_()
        exact = linear_cross_entropy(states, whole, target)
        exact.backward()
        results = []
        for head in filter(None, (far, again)):
            w, x = weight[rows].clone().requires_grad_(), hidden[own].clone().requires_grad_()
            loss = head(x, w, target[own], sharding=sharding)
            (2.0 * loss).backward()
            results.append((loss.detach(), x.grad, w.grad))
        # A head that was loaded continues with the same bits.
        assert all(torch.equal(a, b) for a, b in zip(results[0], results[-1])), step
        is_far = far.statistics().passes > 0
        assert 1 <= far.statistics().imbalance <= ranks, far.statistics()
        far_steps += is_far
        assert abs(loss - exact) < (0.05 if is_far else 1e-4), (step, loss, exact)
        assert off(x.grad.float(), 2.0 * states.grad[own].float()) < (0.1 if is_far else 1e-2), (step, is_far)
        assert off(w.grad.float(), 2.0 * whole.grad[rows].float()) < (0.4 if is_far else 1e-2), (step, is_far)
        reports = [None] * ranks
        dist.all_gather_object(reports, str((far.report._replace(vocab=0), far.statistics()._replace(tokens=0))))
        assert all(r == reports[0] for r in reports), reports
        if step == 5:
            again = FarFieldHead(accuracy=accuracy, **QUICK)
            again.set_extra_state(far.get_extra_state())
        with torch.no_grad():
            weight = (weight - 0.5 * whole.grad).bfloat16()
            hidden = (hidden - 0.5 * states.grad).bfloat16()
    assert far_steps >= 4, far.explain()
