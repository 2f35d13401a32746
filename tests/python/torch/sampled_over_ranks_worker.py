"""One of several gloo processes (worker_process.py). Prints "ok" when all checks pass: samples and best entries of a
sharded vocabulary, against one process with all of it."""

import torch
import torch.distributed as dist
from sharded_worker import Traffic

TOKENS, DIM, VOCAB = 90, 12, 61
SPREAD = torch.linspace(0.0, 2.0, TOKENS)
OPTIONS = [
    dict(), dict(temperature=0.0), dict(temperature=0.0, logit_bias=torch.arange(VOCAB) / 10.0), dict(temperature=SPREAD),
    dict(top_k=3), dict(top_k=45, top_p=0.7, min_p=0.01), dict(top_p=0.6), dict(top_p=1.0),
    dict(top_p=(SPREAD / 2).clamp(min=0.01), temperature=SPREAD), dict(min_p=0.1, temperature=torch.tensor(2.0)), dict(top_k=VOCAB),
    dict(top_p=0.9, min_p=SPREAD / 50, softcap=4.0, logit_scale=0.7, memory_budget="80KiB"),  # several chunks
    dict(counter=torch.arange(TOKENS) * 3 + (1 << 32) - 100, logit_bias=torch.zeros(VOCAB).index_fill(0, torch.arange(0, VOCAB, 2), -torch.inf)),
]  # fmt: skip


def main(rank: int, ranks: int) -> None:
    from logitless.torch import Sharding

    # Uneven shards. Four ranks: one has no vocabulary, and the shards are in another order than the ranks.
    cuts = [(0, 20), (20, VOCAB)] if ranks == 2 else [(45, VOCAB), (0, 10), (10, 10), (10, 45)]
    shard = slice(*cuts[rank]), Sharding(dist.group.WORLD, VOCAB, cuts[rank][0])
    torch.manual_seed(0)
    head = torch.randn(TOKENS, DIM), torch.randn(VOCAB, DIM), torch.randn(VOCAB)
    for options in OPTIONS:
        samples(head, *shard, options)
    samples([t.bfloat16() for t in head], *shard, dict(top_p=0.8, min_p=0.01))
    traffic(rank, ranks)
    seeds(rank, head, *shard)
    ties(*shard)
    best_entries(head, *shard)
    dtensors(rank, ranks, head)
    graphs(ranks, head, *shard)
    errors(rank, ranks, head, *shard)


def samples(head, rows, sharding, options):
    """The tokens of one process, and the bits of linear_logprobs on these ranks."""
    from logitless.torch import linear_logprobs, linear_sample

    hidden, weight, bias = head
    made = linear_sample(hidden, weight[rows], bias[rows], seed=5, sharding=sharding, **options)
    one = linear_sample(hidden, weight, bias, seed=5, **options)
    assert torch.equal(made.tokens, one.tokens), options
    shape = {name: options[name] for name in ("softcap", "logit_scale", "memory_budget") if name in options}
    again = linear_logprobs(hidden, weight[rows], made.tokens, bias[rows], sharding=sharding, **shape)[0]
    assert torch.equal(made.log_prob, again), options
    torch.testing.assert_close(made.log_prob, one.log_prob, rtol=1e-5, atol=1e-5)


def traffic(rank, ranks):
    """Ranks exchange some numbers of a token, and neither logits nor rows of weight."""
    from logitless.torch import Sharding, linear_sample, linear_top_logprobs

    tokens, rows = 8, 5000
    hidden, weight = torch.randn(tokens, DIM), torch.randn(rows, DIM)
    sharding = Sharding(dist.group.WORLD, rows * ranks, rows * rank)
    calls = [(linear_sample, dict(seed=1, **o)) for o in ({}, dict(min_p=0.1), dict(top_k=50, top_p=0.9), dict(top_p=0.9))]
    for call, options in (*calls, (linear_top_logprobs, dict(k=50))):
        with Traffic() as seen:
            call(hidden, weight, sharding=sharding, **options)
        numbers = 50 if "top_k" in options or "k" in options else 128 if "top_p" in options else 0
        assert 0 < seen.bytes < 8 * tokens * (numbers + 100) + 4096 < tokens * rows * 4 / 2, (options, seen.bytes)


def seeds(rank, head, rows, sharding):
    """The seed of the first rank counts, given or drawn."""
    from logitless.torch import linear_sample

    hidden, weight, bias = head
    draw = lambda **given: linear_sample(hidden, weight[rows], bias[rows], sharding=sharding, **given).tokens  # noqa: E731
    assert torch.equal(draw(seed=rank + 7), linear_sample(hidden, weight, bias, seed=7).tokens)
    drawn = draw(generator=torch.Generator().manual_seed(rank + 1))
    assert torch.equal(drawn, linear_sample(hidden, weight, bias, generator=torch.Generator().manual_seed(1)).tokens)
    torch.manual_seed(rank)
    first, second = draw(), draw()
    every = [torch.empty_like(first) for _ in range(dist.get_world_size())]
    dist.all_gather(every, first)
    assert all(torch.equal(first, other) for other in every) and not torch.equal(first, second)


def ties(rows, sharding):
    """The least id of equal entries, and entries equal to the last of top_k are kept."""
    from logitless.torch import linear_sample, linear_top_logprobs

    hidden, weight = torch.zeros(400, DIM), torch.ones(VOCAB, DIM)
    given = dict(sharding=sharding)
    assert not linear_sample(hidden, weight[rows], temperature=0.0, **given).tokens.any()
    assert not linear_sample(hidden, weight[rows], temperature=0.0, logit_bias=torch.ones(VOCAB), **given).tokens.any()
    for options in (dict(top_k=2), dict(top_p=0.1), dict(min_p=1.0)):
        assert linear_sample(hidden, weight[rows], seed=1, **options, **given).tokens.unique().numel() > 50, options
    assert linear_top_logprobs(hidden[:3], weight[rows], k=9, **given).top_ids.tolist() == [list(range(9))] * 3


def best_entries(head, rows, sharding):
    from logitless.torch import linear_logprobs, linear_top_logprobs

    hidden, weight, bias = head[0].view(9, 10, DIM), *head[1:]
    target = torch.arange(TOKENS).view(9, 10) % VOCAB
    own = linear_logprobs(hidden, weight[rows], target, bias[rows], sharding=sharding)[0]
    for k in (1, 40, VOCAB):
        made = linear_top_logprobs(hidden, weight[rows], target, bias[rows], k=k, sharding=sharding)
        one = linear_top_logprobs(hidden, weight, target, bias, k=k)
        assert torch.equal(made.top_ids, one.top_ids), k
        again = linear_logprobs(hidden, weight[rows], made.top_ids, bias[rows], sharding=sharding)[0]
        assert torch.equal(made.top_log_probs, again) and torch.equal(made.log_prob, own), k
    assert linear_top_logprobs(hidden, weight[rows], k=2, sharding=sharding).log_prob is None


def dtensors(rank, ranks, head):
    """A weight whose rows are sharded is not gathered beside replicated hidden states."""
    from logitless.torch import linear_sample, linear_top_logprobs
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    mesh = init_device_mesh("cpu", (ranks,))
    placements = (Replicate(), Shard(0), Shard(0))
    hidden, weight, bias = (distribute_tensor(t, mesh, [p]) for t, p in zip(head, placements))
    with Traffic() as traffic:
        made = linear_sample(hidden, weight, bias, seed=5, top_k=9)
        greedy = linear_sample(hidden, weight, bias, temperature=0)
        best = linear_top_logprobs(hidden, weight, bias=bias, k=5)
    assert not traffic.redistributed
    assert torch.equal(made.tokens, linear_sample(*head, seed=5, top_k=9).tokens)
    assert torch.equal(greedy.tokens, linear_sample(*head, temperature=0).tokens)
    assert torch.equal(best.top_ids, linear_top_logprobs(*head[:2], bias=head[2], k=5).top_ids)


def graphs(ranks, head, rows, sharding):
    """One graph of torch.compile, and the same samples. On four ranks, one without vocabulary, of one set of options."""
    from logitless.torch import linear_sample, linear_top_logprobs

    hidden, weight, bias = head
    for options in (dict(seed=5, top_p=0.8, temperature=0.7), dict(temperature=0.0))[: 2 if ranks == 2 else 1]:
        draw = lambda h, w, b: linear_sample(h, w, b, sharding=sharding, **options)  # noqa: B023, E731
        made = torch.compile(draw, fullgraph=True, backend="aot_eager")(hidden, weight[rows], bias[rows])
        assert all(torch.equal(a, b) for a, b in zip(made, draw(hidden, weight[rows], bias[rows]))), options
    if ranks > 2:
        return
    best = lambda h, w: linear_top_logprobs(h, w, k=4, sharding=sharding)[1:]  # noqa: E731
    made = torch.compile(best, fullgraph=True, backend="aot_eager")(hidden, weight[rows])
    assert all(torch.equal(a, b) for a, b in zip(made, best(hidden, weight[rows])))


def errors(rank, ranks, head, rows, sharding):
    """All ranks raise the error of one rank, or that their arguments differ; and the next call works."""
    from logitless.torch import linear_sample, linear_top_logprobs

    hidden, weight, bias = head
    last = rank == ranks - 1

    def refused(call, *parts, **given):
        try:
            call(hidden, weight[rows], **{**dict(bias=bias[rows], sharding=sharding), **given})
        except Exception as error:
            for part in parts:
                assert part in str(error), (rank, error)
        else:
            raise AssertionError(f"rank {rank}: nothing was raised where {parts} was expected")

    draw, best = linear_sample, linear_top_logprobs
    refused(draw, "top_k: expected at most 61, the vocabulary of weight, got 62", top_k=62 if last else 5)
    refused(draw, "top_p: expected a number above 0 to 1, got 2.0", top_p=2.0 if last else 0.5)
    refused(draw, "logit_bias: expected [61], got [3]", logit_bias=torch.zeros(3 if last else VOCAB))
    refused(draw, "seed: expected an int or None, got 1.5", seed=1.5 if last else 1)
    refused(best, "k: expected at most 61", k=62 if last else 5)
    refused(best, "target: expected [90], got [3]", k=1, target=torch.zeros(3 if last else TOKENS, dtype=torch.long))
    refused(draw, "top_k: expected the same on all ranks, got [5", top_k=6 if last else 5)
    refused(draw, "temperature: expected the same on all ranks, got [1.0", temperature=2.0 if last else 1.0)
    refused(draw, "bias: expected the same on all ranks, got ['given'", bias=None if last else bias[rows])
    refused(draw, "memory_budget", memory_budget=100)
    refused(draw, "sharding: samples and best entries are of the same tokens", sharding=sharding._replace(tokens=True))
    refused(draw, "sharding: expected logitless.torch.Sharding", sharding=3)
    try:
        draw(hidden[: 80 if last else 90], weight[rows], sharding=sharding)
    except ValueError as error:
        assert "hidden: expected the same on all ranks, got [[90, 12]" in str(error), error
    else:
        raise AssertionError("other tokens on one rank were taken")
    samples(head, rows, sharding, dict(top_k=5))
