"""Checks of sharded_worker.py for the plans and bits of collective calls."""

import torch
import torch.distributed as dist


def out_of_memory(rank, ranks):
    """One rank runs out of memory: all raise an error, and the next call works."""
    from unittest import mock

    from logitless.torch import Sharding, _engine, linear_cross_entropy
    from sharded_worker import problem

    hidden, weight, _, target = problem(ranks, 61)
    rows, sharding = weight[:7], Sharding(dist.group.WORLD)
    with mock.patch.object(_engine.torch, "empty", wraps=torch.empty) as empty:
        if rank == 1:
            empty.side_effect = lambda *size, **more: (
                (_ for _ in ()).throw(RuntimeError("no memory")) if more.get("dtype") is torch.uint8 else mock.DEFAULT
            )
        try:
            linear_cross_entropy(hidden, rows, target % 7, sharding=sharding)
        except (RuntimeError, ValueError) as error:
            assert ("no memory" if rank == 1 else "rank 1: workspace") in str(error), str(error)
        else:
            raise AssertionError("no error")
    assert linear_cross_entropy(hidden, rows, target % 7, sharding=sharding).isfinite()


def bounded(ranks):
    """Plans of collective calls are cached up to the bound, also where ranks cache different numbers; each call is
    right."""
    from unittest import mock

    from logitless._cache import ThreadCache
    from logitless.torch import Sharding, _engine, linear_cross_entropy
    from sharded_worker import close, problem

    hidden, weight, _, target = problem(ranks, 3 * ranks)
    rank = dist.get_rank()
    rows = weight[3 * rank : 3 * rank + 3]
    with mock.patch.object(_engine, "calls", ThreadCache(3 + rank)):
        for tokens in (1, 2, 3, 4, 5, 6, 1, 2):
            given = hidden[0, :tokens], target[1, -tokens:]
            found = linear_cross_entropy(given[0], rows, given[1], sharding=Sharding(dist.group.WORLD))
            close(found, linear_cross_entropy(given[0], weight, given[1]), tokens)
            assert len(_engine.calls) <= 3 + rank


def chunks_of_portable_heads(rank, ranks):
    """Ranks of different numbers of rows take the same chunks of tokens, also where the budget of one allows larger ones;
    a budget below the plan of one rank is an error of all."""
    from unittest import mock

    from logitless.torch import Sharding, linear_logprobs

    torch.manual_seed(0)
    vocab, few = 600, 20
    hidden, weight, target = torch.randn(500, 8), torch.randn(vocab, 8), torch.randint(0, vocab, (500,))
    cuts = [0, *range(vocab - few * (ranks - 1), vocab, few), vocab]
    rows, sharding = weight[cuts[rank] : cuts[rank + 1]], Sharding(dist.group.WORLD)
    with mock.patch.dict("os.environ", LOGITLESS_BACKEND="portable"):
        found = linear_logprobs(hidden, rows, target, sharding=sharding, memory_budget=130_000)[0]
        exact = (hidden @ weight.T).log_softmax(-1).gather(1, target[:, None])[:, 0]
        torch.testing.assert_close(found, exact, rtol=1e-5, atol=1e-5)
        for budget in range(40_000, 130_000, 6_000):
            try:
                linear_logprobs(hidden, rows, target, sharding=sharding, memory_budget=budget)
            except (ValueError, RuntimeError) as error:
                assert "memory_budget" in str(error), error


def forwards_refuse(ranks):
    """A forward refuses a budget that its backward could not meet, on all ranks."""
    import re

    from logitless.torch import Sharding, linear_cross_entropy, linear_logprobs

    rank, g = dist.get_rank(), torch.Generator().manual_seed(5)
    hidden, weight = torch.randn(64, 32, generator=g), torch.randn(1200 * ranks, 32, generator=g)
    target, sharding = torch.randint(len(weight), (64,), generator=g), Sharding(dist.group.WORLD)
    for call in (
        lambda *a, **more: linear_cross_entropy(*a, reduction="none", **more).sum(),
        lambda *a, **more: linear_logprobs(*a, **more)[0].sum(),
    ):
        x, rows = hidden.clone().requires_grad_(), weight[1200 * rank : 1200 * (rank + 1)].clone().requires_grad_()
        budget, refused = 1, 0
        while refused < 8:
            try:
                loss = call(x, rows, target, sharding=sharding, memory_budget=budget)
                break
            except ValueError as error:
                assert "memory_budget" in str(error), error
                budget, refused = int(re.findall(r"(\d+) bytes", str(error))[-1]), refused + 1
        loss.backward()
        assert refused and x.grad.isfinite().all() and rows.grad.isfinite().all()
        with torch.no_grad():
            assert call(x, rows, target, sharding=sharding, memory_budget=budget).isfinite()


def bits_of_one_rank(rank, ranks, device, dtypes):
    """A head over a group of one rank has the bits of one with tensor parallelism, if each shard is whole blocks of 256
    entries. They depend neither on the number of tokens nor on other logits."""
    from logitless.torch import Sharding, linear_logprobs

    own, vocab, tokens = dist.new_group([rank], use_local_synchronization=True), 512 * ranks + 100, 60
    made = torch.Generator("cpu").manual_seed(3)
    hidden, weight = (torch.randn(n, 24, generator=made, device="cpu").to(device) for n in (tokens, vocab))
    target = torch.randint(0, vocab, (tokens,), generator=made, device="cpu").to(device)
    rows, few = slice(512 * rank, None if rank == ranks - 1 else 512 * rank + 512), slice(20, 23)
    for dtype in dtypes:
        x, w = hidden.to(dtype), weight.to(dtype)
        alone = linear_logprobs(x, w, target, sharding=Sharding(own))
        over = linear_logprobs(x, w[rows], target, sharding=Sharding(dist.group.WORLD))
        larger = torch.where(torch.arange(tokens, device=device)[:, None] % 3 == 2, x, 9 * x)[few]
        some = linear_logprobs(larger, w[rows], target[few], sharding=Sharding(dist.group.WORLD))
        for output in (0, 2):
            assert torch.equal(alone[output], over[output]), (dtype, output)
            assert torch.equal(some[output][0], over[output][few][0]), (dtype, output)
