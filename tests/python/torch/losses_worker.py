"""One of several gloo processes (worker_process.py). Prints "ok" when all checks pass: losses whose vocabulary or keys are
on several ranks, against one process with all of them in float64."""

import os

import torch
import torch.distributed as dist
from sharded_worker import Traffic

DIM = 12


def main(rank: int, port: str, ranks: int) -> None:
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=port, RANK=str(rank), WORLD_SIZE=str(ranks))
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=ranks)
    contrast(rank, ranks)
    contrast_errors(rank, ranks)
    dist.destroy_process_group()
    print("ok", flush=True)


def close(found, expected, what, tolerance=1e-5):
    size = max(expected.norm().item(), 1e-3)
    assert (found.double() - expected).norm() <= tolerance * size, (what, found, expected)


def total(t):
    """Returns the sum over ranks."""
    t = t.clone()
    dist.all_reduce(t)
    return t



def contrast(rank, ranks):
    """Ranks have different numbers of queries, keys and negatives."""
    from logitless.torch import Sharding
    from logitless.torch.losses import info_nce_loss

    torch.manual_seed(5)
    sizes, extra = [9 - 2 * r for r in range(ranks)], [r * 3 for r in range(ranks)]
    rows, keys, negatives = (torch.randn(sum(n), DIM) for n in (sizes, sizes, extra))
    target = torch.randint(0, sum(sizes), (sum(sizes),))
    target[2] = -100
    sharding = Sharding(dist.group.WORLD, tokens=True)

    def own(t, n):
        return t.split(n)[rank].clone().requires_grad_()

    for options in (
        dict(), dict(symmetric=True), dict(negatives=True, target=True), dict(negatives=True, symmetric=True),
        dict(reduction="none", symmetric=True), dict(reduction="sum", target=True, temperature=0.3, normalize=False),
    ):
        options = dict(options)
        has_target, has_negatives = options.pop("target", False), options.pop("negatives", False)
        temperature = torch.tensor(0.5, requires_grad=True)
        mine = own(rows, sizes), own(keys, sizes), own(negatives, extra)
        given = dict(negatives=mine[2]) if has_negatives else {}
        given.update(dict(target=target.split(sizes)[rank]) if has_target else {})
        given = {"temperature": temperature, **given, **options}
        with Traffic() as traffic:
            loss = info_nce_loss(*mine[:2], **given, sharding=sharding)
            shares = torch.arange(1.0, sum(sizes) + 1)
            (loss * shares.split(sizes)[rank]).sum().backward() if loss.dim() else loss.backward()
        all_of = [t.double().requires_grad_() for t in (rows, keys, negatives)]
        scalar = temperature.detach().double().requires_grad_()
        given = dict(negatives=all_of[2]) if has_negatives else {}
        given.update(dict(target=target) if has_target else {})
        expected = info_nce_loss(*all_of[:2], **{"temperature": scalar, **given, **options})
        (expected * shares).sum().backward() if expected.dim() else expected.backward()
        close(loss, expected.split(sizes)[rank] if loss.dim() else expected, options)
        for t, whole, n in zip(mine, all_of, (sizes, sizes, extra)):
            if t.grad is not None or whole.grad is not None:
                close(t.grad, whole.grad.split(n)[rank], options)
        if scalar.grad is not None:
            close(total(temperature.grad), scalar.grad, options)
        assert not traffic.redistributed


def contrast_errors(rank, ranks):
    """An error of one rank is raised on all, and what a rank cannot share is refused."""
    from logitless.torch import Sharding
    from logitless.torch.losses import info_nce_loss

    x, everywhere = torch.randn(4, DIM), Sharding(dist.group.WORLD, tokens=True)
    for sharding, wrong, message in (
        (everywhere, dict(key=x[:3]) if rank == 0 else {}, "key: expected [4, 12] without target"),
        (everywhere, dict(target=torch.full((4,), 99)) if rank == 0 else {}, "99"),
        (Sharding(dist.group.WORLD), {}, "sharding: expected tokens=True"),
        (everywhere._replace(vocab=8, vocab_begin=4 * rank), dict(negatives=x), "sharding: expected vocab=None beside negatives"),
        ("ranks", {}, "sharding: expected logitless.torch.Sharding"),
    ):
        try:
            info_nce_loss(**{"query": x, "key": x, **wrong}, sharding=sharding)
            raise AssertionError(f"nothing was raised: {message}")
        except (ValueError, TypeError, RuntimeError) as error:
            assert message in str(error), (message, error)
    found = info_nce_loss(x, x, sharding=everywhere._replace(vocab=4 * ranks, vocab_begin=4 * rank))
    assert torch.equal(found, info_nce_loss(x, x, sharding=everywhere))
