"""One of several processes (worker_process.py) with a Hopper GPU each by NCCL, or one GPU that they share by gloo.
Prints "ok" when all checks pass: a sharded vocabulary, against one process with all of it."""

import re

import torch
import torch.distributed as dist
from sharded_worker import Traffic, columns_alike, of_rank

DIM, TOKENS = 40, 300


def main(rank: int, ranks: int) -> None:
    from torch.distributed.device_mesh import init_device_mesh

    for dtype in (torch.bfloat16, torch.float16):
        plain(rank, ranks, dtype)
    for borders in ([DIM * r * r // ranks**2 for r in range(ranks + 1)], [0] * ranks + [DIM]):
        columns_alike(rank, borders, problem(ranks, 1031), options(ranks, 1031), close)
    logprobs(rank, ranks)
    samples(rank, ranks)
    refused(rank, ranks)
    if ranks > 1:
        mesh = init_device_mesh("cuda", (ranks,))
        # Uneven shards; one rank without vocabulary, unless the other would have one entry, whose loss is rounding
        # alone.
        own_batches(rank, ranks, mesh, 1031, dtype=torch.float16)
        for vocab in (1031, ranks - 1 if ranks > 2 else 5):
            own_batches(rank, ranks, mesh, vocab)
            own_batches(rank, ranks, mesh, vocab, columns=True)
            same_tokens(rank, ranks, mesh, vocab)
        trained(rank, ranks, mesh)
    if dist.get_backend() == "nccl":
        exchanges(rank, ranks)


def problem(ranks, vocab, dtype=torch.bfloat16):
    """Returns hidden [ranks, tokens, D], weight [V, D], bias [V], targets with some ignored; the same on all ranks."""
    torch.manual_seed(vocab)
    normal = lambda *shape: torch.randn(shape).to("cuda", dtype)  # noqa: E731
    hidden, weight, bias = normal(ranks, TOKENS, DIM), normal(vocab, DIM) / 4, torch.randn(vocab).cuda()
    target = torch.randint(0, vocab, (ranks, TOKENS))
    target[:, ::4] = -100
    target[-1, : TOKENS // 2] = -100  # ranks have different numbers of tokens that count
    return hidden, weight, bias, target.cuda()


def options(ranks, vocab):
    torch.manual_seed(vocab + 1)
    yield {}
    yield dict(reduction="sum", label_smoothing=0.1, z_loss=1e-2)
    yield dict(class_weight=torch.rand(vocab).cuda(), softcap=4.0, logit_scale=0.7)
    yield dict(token_weight=torch.rand(ranks, TOKENS).cuda(), normalizer=5.0)
    yield dict(reduction="none")


def close(a, b, what, bound=1e-2):
    error = (a.float() - b.float()).norm() / b.float().norm().clamp_min(1e-20)
    assert a.shape == b.shape and error <= bound, (what, error)


def rows_of(vocab, ranks, rank):
    step = -(-vocab // ranks)
    return slice(min(rank * step, vocab), min((rank + 1) * step, vocab))


def sharded(whole, mesh, rank, ranks, columns=False):
    """Makes a DTensor from local slices, since gloo scatters no GPU tensors: rows, or columns, of which a bias has
    none."""
    from torch.distributed.tensor import DTensor, Replicate, Shard

    dim = min(int(columns), whole.dim() - 1)
    placement = Shard(dim) if dim == int(columns) else Replicate()
    own = whole[part_of(whole.shape, ranks, rank, columns)].clone()
    made = DTensor.from_local(own, mesh, [placement], run_check=False, shape=whole.shape, stride=whole.stride())
    return made.requires_grad_()


def part_of(shape, ranks, rank, columns):
    """Returns the index of a rank's rows or columns."""
    if columns:
        return (slice(None), rows_of(shape[1], ranks, rank)) if len(shape) == 2 else slice(None)
    return rows_of(shape[0], ranks, rank)


def own_batches(rank, ranks, mesh, vocab, columns=False, dtype=torch.bfloat16):
    """FSDP: each rank has its local loss, and the weight's gradient is the mean; upstream gradients may differ, too."""
    from logitless.torch import linear_cross_entropy

    hidden, weight, bias, target = problem(ranks, vocab, dtype)
    for given in options(ranks, vocab):
        for scale in (torch.ones(ranks), torch.arange(1.0, ranks + 1)):
            x, w, b = (t.clone().requires_grad_() for t in (hidden, weight, bias))
            each = [linear_cross_entropy(x[r], w, target[r], b, **of_rank(given, r)) for r in range(ranks)]
            sum(s * e.sum() for s, e in zip(scale, each)).backward()
            with Traffic() as traffic:
                w_shard, b_shard = (sharded(t, mesh, rank, ranks, columns) for t in (weight, bias))
                own = hidden[rank].clone().requires_grad_()
                loss = linear_cross_entropy(own, w_shard, target[rank], b_shard, **of_rank(given, rank))
                (scale[rank] * loss.sum()).backward()
            assert not traffic.redistributed, traffic.redistributed
            close(loss, each[rank], given, 1e-5)
            close(own.grad, x.grad[rank], given)
            for shard, whole in ((w_shard, w.grad), (b_shard, b.grad)):
                mine = part_of(whole.shape, ranks, rank, columns)
                close(shard.grad.to_local(), whole[mine] / ranks, given)


def same_tokens(rank, ranks, mesh, vocab):
    """Tensor parallelism: a replicated hidden; the same bits on all ranks."""
    from logitless.torch import linear_cross_entropy
    from torch.distributed.tensor import DTensor, Replicate

    hidden, weight, bias, target = problem(ranks, vocab)
    hidden, target = hidden.flatten(0, 1), target.flatten(0, 1)
    for given in options(ranks, vocab):
        given = {k: v.flatten() if k == "token_weight" else v for k, v in given.items()}
        more = dict(return_lse=True, return_argmax=True)
        x, w = (t.clone().requires_grad_() for t in (hidden, weight))
        whole = linear_cross_entropy(x, w, target, **given, **more)
        (whole[0].sum() + 0.3 * whole[1].sum()).backward()
        same = DTensor.from_local(hidden.clone(), mesh, [Replicate()], run_check=False).requires_grad_()
        w_shard = sharded(weight, mesh, rank, ranks)
        found = linear_cross_entropy(same, w_shard, target, **given, **more)
        (found[0].sum() + 0.3 * found[1].sum()).backward()
        close(found[0], whole[0], given, 1e-5)
        close(found[1], whole[1], given, 1e-6)
        assert torch.equal(found[2], whole[2])
        close(same.grad.to_local(), x.grad, given)
        close(w_shard.grad.to_local(), w.grad[rows_of(vocab, ranks, rank)], given)
        everywhere(same.grad.to_local())


def everywhere(t):
    """Checks that a tensor has the same bits on all ranks."""
    if dist.get_world_size() == 1:
        return
    mine = t.float() if dist.get_backend() == "nccl" else t.float().cpu()
    every = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(every, mine)
    assert all(torch.equal(e, every[0]) for e in every)


def plain(rank, ranks, dtype):
    """Rows in plain tensors, with tokens that are the same everywhere or local to each rank. Numbers of tokens vary
    between ranks and calls; the stream is not the default one."""
    from logitless.torch import Sharding, linear_cross_entropy

    hidden, weight, _, target = problem(ranks, 1031, dtype)
    hidden, target = hidden.flatten(0, 1), target.flatten(0, 1)
    mine = rows_of(1031, ranks, rank)
    with torch.cuda.stream(torch.cuda.Stream()):
        uneven, even = [0] + [7] * (ranks - 1), [TOKENS] * ranks
        runs = [(counts, exchange) for exchange in ("tokens", "weights") for counts in (uneven, even)]
        for counts, exchange in (*runs, (None, "planned"), (None, "planned")):
            x, w = (t.clone().requires_grad_() for t in (hidden, weight))
            used = slice(0, sum(counts) if counts else len(hidden))
            whole = linear_cross_entropy(x[used], w, target[used])
            whole.backward()
            first = sum(counts[:rank]) if counts else 0
            part = slice(first, first + counts[rank]) if counts else used
            own, rows = hidden[part].clone().requires_grad_(), weight[mine].clone().requires_grad_()
            where = Sharding(dist.group.WORLD, tokens=bool(counts), exchange=exchange)
            loss = linear_cross_entropy(own, rows, target[part], sharding=where)
            loss.backward()
            everywhere(loss)
            close(loss, whole, counts, 1e-5)
            close(own.grad, x.grad[part], counts)
            close(rows.grad, w.grad[mine], counts)
        torch.cuda.current_stream().synchronize()


def logprobs(rank, ranks):
    from logitless.torch import Sharding, linear_logprobs

    hidden, weight, _, target = problem(ranks, 1031)
    target = target.clamp_min(0)
    x, w = (t.clone().requires_grad_() for t in (hidden, weight))
    whole = linear_logprobs(x, w, target)
    (whole[0].sum() + whole[1].sum()).backward()
    own, rows = hidden.clone().requires_grad_(), weight[rows_of(1031, ranks, rank)].clone().requires_grad_()
    found = linear_logprobs(own, rows, target, sharding=Sharding(dist.group.WORLD))
    (found[0].sum() + found[1].sum()).backward()
    close(found[0], whole[0], "log-probabilities", 1e-6)
    close(found[1], whole[1], "entropy", 1e-5)
    close(own.grad, x.grad, "log-probabilities")
    close(rows.grad, w.grad[rows_of(1031, ranks, rank)], "log-probabilities")


def samples(rank, ranks):
    """Tokens of one process but for near ties, and the bits of linear_logprobs on these ranks."""
    from logitless.torch import Sharding, linear_logprobs, linear_sample, linear_top_logprobs

    hidden, weight, bias, _ = problem(ranks, 1031)
    rows = rows_of(1031, ranks, rank)
    head, given = (hidden, weight[rows]), dict(bias=bias[rows], sharding=Sharding(dist.group.WORLD, 1031, rows.start))
    for filters in ({}, dict(temperature=0.0), dict(top_k=40, top_p=0.8), dict(top_p=0.9), dict(min_p=0.05, temperature=2.0)):
        made = linear_sample(*head, seed=5, **filters, **given)
        one = linear_sample(hidden, weight, bias=bias, seed=5, **filters)
        everywhere(made.tokens)
        assert (made.tokens != one.tokens).float().mean() < 0.01, filters
        assert torch.equal(made.log_prob, linear_logprobs(*head, made.tokens, **given)[0]), filters
        same = made.tokens == one.tokens
        close(made.log_prob[same], one.log_prob[same], filters, 1e-5)
    made = linear_top_logprobs(*head, k=8, **given)
    one = linear_top_logprobs(hidden, weight, bias=bias, k=8)
    assert (made.top_ids != one.top_ids).float().mean() < 0.01
    close(made.top_log_probs, one.top_log_probs, "best entries", 1e-5)


def trained(rank, ranks, mesh):
    """A module under autocast with fp32 weights: its loss falls, and is that of one process."""
    from logitless.torch import LinearCrossEntropy

    hidden, weight, _, target = problem(ranks, 1031)
    losses = {}
    for spread in (False, True):
        head = LinearCrossEntropy(DIM, 1031, device="cuda")
        w = weight.float()
        head.weight = torch.nn.Parameter(sharded(w, mesh, rank, ranks).detach() if spread else w.clone())
        optimizer = torch.optim.SGD(head.parameters(), lr=5.0)
        losses[spread] = []
        for _ in range(5):
            with torch.autocast("cuda", torch.bfloat16):
                each = [head(hidden[rank], target[rank])] if spread else [head(hidden[r], target[r]) for r in range(ranks)]
            (each[0] if spread else sum(each) / ranks).backward()
            optimizer.step()
            optimizer.zero_grad()
            losses[spread].append((each[0] if spread else each[rank]).item())
    assert losses[True][-1] < losses[True][0], losses
    close(torch.tensor(losses[True]), torch.tensor(losses[False]), losses, 2e-3)


def exchanges(rank, ranks):
    """Copy engines, kernels of several widths and the process group give the same bits."""
    from logitless.torch import configure_exchanges

    small = problem(ranks, 1031)
    torch.manual_seed(7)  # exchanges 1 MiB and more for each rank, above the buffers of NCCL
    large = torch.randn(ranks, 2048, 1024).to("cuda", torch.bfloat16), torch.randn(4096 * ranks, 1024).to("cuda", torch.bfloat16) / 32
    large = (*large, None, torch.randint(0, 4096 * ranks, (ranks, 2048)).cuda())
    found = []
    for given in (None, dict(max_ctas=2), dict(copy_engines=False), dict(process_group=True)):
        group = dist.new_group(list(range(ranks)))
        if given is not None:
            configure_exchanges(group, **given)
        found.append([])
        for hidden, weight, _, target in (small, large):
            for share in (dict(tokens=True, exchange="tokens"), dict(tokens=True, exchange="weights"), dict(tokens=False)):
                found[-1] += several_calls(rank, ranks, group, hidden, weight, target, share)
        found[-1] += on_streams(rank, ranks, group, large)
        try:
            configure_exchanges(group, max_ctas=4)
        except RuntimeError as error:
            assert "before the group's first head" in str(error), error
        else:
            raise AssertionError("no error")
    for other in found[1:]:
        assert all(torch.equal(a, b) for a, b in zip(found[0], other))


def several_calls(rank, ranks, group, hidden, weight, target, share):
    """Returns the loss and gradients of the last of three calls."""
    from logitless.torch import Sharding, linear_cross_entropy

    vocab = len(weight)
    rows = rows_of(vocab, ranks, rank)
    own, target = (hidden[rank], target[rank]) if share["tokens"] else (hidden.flatten(0, 1), target.flatten())
    x, w = own.clone().requires_grad_(), weight[rows].clone().requires_grad_()
    for _ in range(3):
        x.grad = w.grad = None
        loss = linear_cross_entropy(x, w, target, sharding=Sharding(group, vocab, rows.start, **share))
        loss.backward()
    return [loss.detach(), x.grad, w.grad]


def on_streams(rank, ranks, group, problem):
    """Heads of one group on two independent streams share one receive buffer."""
    hidden, weight, _, target = problem
    results, streams = [], [torch.cuda.Stream() for _ in range(2)]
    torch.cuda.synchronize()
    for turn in range(4):
        with torch.cuda.stream(streams[turn % 2]):
            results.append(several_calls(rank, ranks, group, hidden, weight, target, dict(tokens=turn > 1)))
    torch.cuda.synchronize()
    assert all(torch.equal(a, b) for pair in (results[:2], results[2:]) for a, b in zip(*pair))
    return [t for result in results for t in result]


def refused(rank, ranks):
    from logitless.torch import Sharding, linear_cross_entropy

    hidden, weight, _, target = problem(ranks, 1031)
    rows = weight[rows_of(1031, ranks, rank)]
    sharding = Sharding(dist.group.WORLD)

    def fails(pattern, *a, **k):
        try:
            linear_cross_entropy(*a, **k)
        except (ValueError, RuntimeError, NotImplementedError) as error:
            assert re.search(pattern, str(error)), str(error)
        else:
            raise AssertionError("no error")

    fails("hopper", hidden.float(), rows.float(), target, sharding=sharding)
    if ranks > 1:
        used = 100 if rank == 0 else 200
        fails("rank [0-2]", hidden[:, :used], rows, target[:, :used], sharding=sharding)
    bad = target.clone()
    bad[0, 1] = 5000
    assert linear_cross_entropy(hidden, rows, bad, sharding=sharding).isnan()
    assert not linear_cross_entropy(hidden, rows, target, sharding=sharding).isnan()
