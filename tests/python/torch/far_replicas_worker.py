"""One of several gloo processes (worker_process.py). Prints "ok" when all checks pass: FarFieldHead on ranks with the
full vocabulary and local tokens each, as under DistributedDataParallel."""

import pickle

import torch
import torch.distributed as dist
from sharded_far_worker import QUICK, TOKENS, off, problem


def main(rank: int, ranks: int) -> None:
    training(rank, ranks)
    refusals()


def same_on_all(value, ranks):
    values = [None] * ranks
    dist.all_gather_object(values, value)
    return all(v == values[0] for v in values)


def training(rank, ranks):
    from logitless.torch import FarFieldHead, linear_cross_entropy

    hidden, weight, target = problem()
    # Ranks have different numbers of tokens. The first rank has none when the first order is due, nor in one far-field
    # step.
    cut = [0, 32, *(TOKENS * (r + 1) // ranks for r in range(1, ranks))]
    own = slice(cut[rank], cut[rank + 1])
    far, again = FarFieldHead(**QUICK, replicas=dist.group.WORLD), None
    for step in range(1, 8):
        mine = slice(0, 0) if step in (1, 2, 6) and rank == 0 else own
        exact_w, exact_x = weight.clone().requires_grad_(), hidden[mine].clone().requires_grad_()
        linear_cross_entropy(exact_x, exact_w, target[mine], reduction="sum").backward()
        results = []
        for head in filter(None, (far, again)):
            w, x = weight.clone().requires_grad_(), hidden[mine].clone().requires_grad_()
            loss = head(x, w, target[mine], reduction="sum")
            loss.backward()
            results.append((loss.detach(), x.grad, w.grad))
        assert all(torch.equal(a, b) for a, b in zip(results[0], results[-1])), step
        is_far = far.statistics().passes > 0
        assert is_far == (step >= 3), far.explain()
        if x.numel():
            assert off(x.grad, exact_x.grad) < (0.1 if is_far else 3e-5), (step, is_far)
            assert off(w.grad, exact_w.grad) < (0.3 if is_far else 3e-5), (step, is_far)
        # The state that decisions depend on is the same on all ranks, orders included.
        assert same_on_all((far.report, far.explain(), far.get_extra_state()), ranks), far.explain()
        if step == 4:  # the state of any rank serves all
            states = [far.get_extra_state()]
            dist.broadcast_object_list(states, src=ranks - 1)
            again = FarFieldHead(**QUICK, replicas=dist.group.WORLD)
            again.set_extra_state(states[0])
        dist.all_reduce(exact_w.grad)
        weight -= 0.5 / TOKENS * exact_w.grad
    assert far.report.audits >= 2 and far.report.refreshes >= 2, far.explain()
    alone = pickle.loads(pickle.dumps(far))
    assert alone.report == far.report and "replicas=" in repr(alone) and repr(alone) == repr(far), repr(alone)


def refusals():
    from logitless.torch import FarFieldHead, Sharding

    hidden, weight, target = problem()
    for make, text in (
        (lambda: FarFieldHead(replicas="all"), "replicas: expected a torch.distributed.ProcessGroup, got str"),
        (
            lambda: FarFieldHead(replicas=dist.group.WORLD)(
                hidden, weight.requires_grad_(), target, sharding=Sharding(dist.group.WORLD, tokens=True)
            ),
            "sharding: expected none for a FarFieldHead with replicas",
        ),
    ):
        try:
            make()
        except (TypeError, ValueError) as error:
            assert text in str(error), error
        else:
            raise AssertionError(f"nothing was raised where {text} was expected")
