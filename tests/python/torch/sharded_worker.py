"""One of several gloo processes (worker_process.py). Prints "ok" when all checks pass: a sharded vocabulary, against
one process with all of it."""

import re
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist

DIM = 12
PAGE = Path(__file__).parents[3] / "docs/use/distributed.md"


class Traffic:
    """Counts the bytes that this process passes to PyTorch's collectives, and records each DTensor that was
    gathered."""

    def __init__(self):
        self.bytes = 0
        self.redistributed = []

    def __enter__(self):
        import torch.distributed._functional_collectives as functional
        from torch.distributed.tensor import DTensor, Replicate

        self.name = "all_gather_single" if hasattr(dist, "all_gather_single") else "all_gather_into_tensor"
        self.kept = getattr(dist, self.name), dist.all_to_all_single, DTensor.redistribute
        self.kept_functional = functional.all_gather_tensor

        def gather(out, given, **more):
            self.bytes += given.numel() * given.element_size()
            return self.kept[0](out, given, **more)

        def to_all(out, given, *sizes, **more):
            self.bytes += given.numel() * given.element_size()
            return self.kept[1](out, given, *sizes, **more)

        def redistribute(t, mesh=None, placements=None, **more):
            if any(isinstance(p, Replicate) and not isinstance(q, Replicate) for p, q in zip(placements, t.placements)):
                self.redistributed.append(tuple(t.shape))
            return self.kept[2](t, mesh, placements, **more)

        def gather_inside(t, *arguments, **more):  # called by operators that need the full DTensor
            self.redistributed.append(tuple(t.shape))
            return self.kept_functional(t, *arguments, **more)

        setattr(dist, self.name, gather)
        functional.all_gather_tensor = gather_inside
        dist.all_to_all_single, DTensor.redistribute = to_all, redistribute
        return self

    def __exit__(self, *_):
        import torch.distributed._functional_collectives as functional
        from torch.distributed.tensor import DTensor

        functional.all_gather_tensor = self.kept_functional
        setattr(dist, self.name, self.kept[0])
        _, dist.all_to_all_single, DTensor.redistribute = self.kept


def main(rank: int, ranks: int) -> None:
    from sharded_plans import bits_of_one_rank, bounded, chunks_of_portable_heads, forwards_refuse, out_of_memory
    from torch.distributed.device_mesh import init_device_mesh

    mesh = init_device_mesh("cpu", (ranks,))
    # Uneven shards, a rank without vocabulary, several tiles.
    for vocab in (61, ranks - 1, 700) if ranks == 2 else (61, ranks - 1):
        own_batches(rank, ranks, mesh, vocab)
        if vocab != 700:
            own_batches(rank, ranks, mesh, vocab, columns=True)
        same_tokens(rank, ranks, mesh, vocab)
        shared_tokens(rank, ranks, mesh, vocab)
    logprobs(rank, ranks, mesh)
    fsdp(rank, ranks, mesh)
    replicas(rank, ranks)
    plain(rank, ranks)
    plain_columns(rank, ranks)
    uneven_columns(rank, ranks, mesh)
    if ranks == 2:  # a graph holds the same operators for any number
        compiled(rank, ranks, mesh)
    float16(rank, ranks, mesh)
    mixed(rank, ranks, mesh)
    errors(rank, ranks, mesh)
    beside(rank, ranks)
    out_of_memory(rank, ranks)
    bounded(ranks)
    bits_of_one_rank(rank, ranks, "cpu", (torch.float32, torch.bfloat16))
    chunks_of_portable_heads(rank, ranks)
    forwards_refuse(ranks)


def beside(rank, ranks):
    """A process group that cannot exchange CPU memory (such as NCCL's) gets a group of the hosts, whatever other groups
    its ranks are in."""
    from unittest import mock

    from logitless.torch import Sharding, groups, linear_cross_entropy

    if rank == 0:
        dist.new_group([0], use_local_synchronization=True)
    hidden, weight, bias, target = (t.flatten(0, 1) if t.dim() > 2 else t for t in problem(ranks, 61))
    target, rows = target.flatten(), [slice(61 * r // ranks, 61 * (r + 1) // ranks) for r in range(ranks)][rank]
    for _ in range(2):  # another group of the same ranks has its own group of hosts
        group = dist.new_group(list(range(ranks)))
        with mock.patch.object(groups, "backend_of", lambda group, device: None):
            loss = linear_cross_entropy(hidden, weight[rows], target, bias[rows], sharding=Sharding(group))
        assert isinstance(groups.group_of(group.group_name)._hosts, groups._Hosts)
        close(loss, linear_cross_entropy(hidden, weight, target, bias), "beside")
        own = hidden[:3].clone().requires_grad_()
        linear_cross_entropy(own, weight[rows], target[:3], sharding=Sharding(group, tokens=True)).backward()
        assert own.grad.isfinite().all()
        assert groups.group_of(group.group_name).gather(np.array([rank])).tolist() == [[r] for r in range(ranks)]


def problem(ranks, vocab, tokens=9):
    """Returns hidden [ranks, tokens, D], weight [V, D], bias [V], targets with some ignored."""
    torch.manual_seed(vocab)
    hidden, weight, bias = torch.randn(ranks, tokens, DIM), torch.randn(vocab, DIM), torch.randn(vocab)
    target = torch.randint(0, vocab, (ranks, tokens))
    target[:, ::4] = -100
    target[-1, : tokens // 2] = -100  # ranks have different numbers of tokens that count
    return hidden, weight, bias, target


def options(ranks, vocab, tokens=9):
    """Yields options by name; values for tokens have one row for each rank."""
    torch.manual_seed(vocab + 1)
    token_weight = torch.rand(ranks, tokens)
    yield {}
    yield dict(reduction="sum", label_smoothing=0.1, z_loss=1e-2)
    yield dict(class_weight=torch.rand(vocab), softcap=4.0, logit_scale=0.7)
    yield dict(token_weight=token_weight, normalizer=5.0)
    yield dict(reduction="none", class_weight=torch.rand(vocab), label_smoothing=0.1)


def of_rank(given, rank):
    return {k: v[rank] if k == "token_weight" else v for k, v in given.items()}


def close(a, b, what):
    assert a.shape == b.shape and torch.allclose(a, b, rtol=1e-5, atol=1e-5), (what, (a - b).abs().max())


def sharded(weight, mesh, columns=False):
    """Shards by vocabulary, or by columns, of which a bias has none."""
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    placement = Shard(0) if not columns else Shard(1) if weight.dim() == 2 else Replicate()
    return distribute_tensor(weight, mesh, [placement]).requires_grad_()


def own_batches(rank, ranks, mesh, vocab, columns=False):
    """FSDP: each rank has its local loss, and the weight's gradient is the mean; upstream gradients may differ, too."""
    from functools import partial

    from logitless.torch import linear_cross_entropy

    sharded = partial(globals()["sharded"], columns=columns)
    hidden, weight, bias, target = problem(ranks, vocab)
    for given in options(ranks, vocab):
        for scale in (torch.ones(ranks), 2 * torch.ones(ranks), torch.arange(1.0, ranks + 1)):
            x, w, b = (t.clone().requires_grad_() for t in (hidden, weight, bias))
            each = [linear_cross_entropy(x[r], w, target[r], b, **of_rank(given, r)) for r in range(ranks)]
            sum(s * e.sum() for s, e in zip(scale, each)).backward()
            with Traffic() as traffic:
                w_shard, b_shard, own = sharded(weight, mesh), sharded(bias, mesh), hidden[rank].clone().requires_grad_()
                loss = linear_cross_entropy(own, w_shard, target[rank], b_shard, **of_rank(given, rank))
                (scale[rank] * loss.sum()).backward()
            assert not traffic.redistributed, traffic.redistributed
            close(loss, each[rank], given)
            close(own.grad, x.grad[rank], given)
            close(w_shard.grad.full_tensor(), w.grad / ranks, given)
            close(b_shard.grad.full_tensor(), b.grad / ranks, given)
            with torch.no_grad():
                close(linear_cross_entropy(own, w_shard, target[rank], b_shard, **of_rank(given, rank)), each[rank], given)
    # Several targets a token, and class probabilities: a mean counts tokens.
    torch.manual_seed(vocab + 2)
    several = torch.randint(0, vocab, (ranks, 9, 3)), dict(target_weight=torch.rand(ranks, 9, 3))
    several[0][:, ::4] = -100
    for targets, given in (several, (torch.rand(ranks, 9, vocab), {})):
        given["class_weight"] = torch.rand(vocab)
        mine = lambda r: {k: v[r] if k == "target_weight" else v for k, v in given.items()}  # noqa: B023, E731
        w, w_shard = weight.clone().requires_grad_(), sharded(weight, mesh)
        each = [linear_cross_entropy(hidden[r], w, targets[r], **mine(r)) for r in range(ranks)]
        sum(each).backward()
        loss = linear_cross_entropy(hidden[rank], w_shard, targets[rank], **mine(rank))
        loss.backward()
        close(loss, each[rank], "several")
        close(w_shard.grad.full_tensor(), w.grad / ranks, "several")
    # One token counts on each rank but one, which has none.
    for without in (0, ranks - 1):
        heavy = torch.where(torch.arange(target.shape[1]) == 5, vocab // 2, -100).expand_as(target).clone()
        heavy[without] = -100
        x, w, w_shard = hidden.clone().requires_grad_(), weight.clone().requires_grad_(), sharded(weight, mesh)
        each = [linear_cross_entropy(x[r], w, heavy[r], bias, reduction="sum") for r in range(ranks)]
        sum(each).backward()
        own = hidden[rank].clone().requires_grad_()
        loss = linear_cross_entropy(own, w_shard, heavy[rank], sharded(bias, mesh), reduction="sum")
        loss.backward()
        for found, wanted in ((loss, each[rank]), (own.grad, x.grad[rank]), (w_shard.grad.full_tensor(), w.grad / ranks)):
            close(found, wanted, "heavy")
    # Numbers of tokens vary between ranks and calls, down to none.
    for tokens in ([3] * ranks, [9] + [2] * (ranks - 1), [9] * ranks, [0] + [4] * (ranks - 1)):
        w, w_shard = weight.clone().requires_grad_(), sharded(weight, mesh)
        for r in range(ranks):
            linear_cross_entropy(hidden[r, : tokens[r]], w, target[r, : tokens[r]]).backward()
        linear_cross_entropy(hidden[rank, : tokens[rank]], w_shard, target[rank, : tokens[rank]]).backward()
        close(w_shard.grad.full_tensor(), w.grad / ranks, tokens)


def uneven_columns(rank, ranks, mesh):
    """Ranks have different numbers of columns, and neither the weight nor its gradient is gathered."""
    from logitless.torch import linear_cross_entropy

    torch.manual_seed(9)
    hidden, weight, target = torch.randn(ranks, 5, DIM + 1), torch.randn(20, DIM + 1), torch.randint(0, 20, (ranks, 5))
    w = weight.clone().requires_grad_()
    sum(linear_cross_entropy(hidden[r], w, target[r]) for r in range(ranks)).backward()
    shard = sharded(weight, mesh, columns=True)
    for _ in range(2):  # the second gradient is added to the first
        with Traffic() as traffic:
            linear_cross_entropy(hidden[rank], shard, target[rank]).backward()
        assert not traffic.redistributed, traffic.redistributed
    assert shard.grad.placements == shard.placements
    close(shard.grad.full_tensor(), 2 * w.grad / ranks, "uneven columns")


def columns_alike(rank, borders, made, choices, close):
    """A weight sharded by columns at `borders` gives the results of the full weight; a mean is over all ranks' tokens.
    made: a result of problem()."""
    from logitless.torch import Sharding, linear_cross_entropy

    hidden, weight, bias, target = made
    mine = slice(borders[rank], borders[rank + 1])
    where = Sharding(dist.group.WORLD, tokens=True, weight="columns")
    for given in choices:
        if given.get("reduction") == "none":
            continue
        x, w, b = (t.clone().requires_grad_() for t in (hidden, weight, bias))
        flat = {k: v.flatten() if k == "token_weight" else v for k, v in given.items()}
        whole = linear_cross_entropy(x.flatten(0, 1), w, target.flatten(), b, **flat)
        whole.backward()
        own, columns, of_bias = (t.clone().requires_grad_() for t in (hidden[rank], weight[:, mine].contiguous(), bias))
        loss = linear_cross_entropy(own, columns, target[rank], of_bias, sharding=where, **of_rank(given, rank))
        loss.backward()
        close(loss, whole, given)
        close(own.grad, x.grad[rank], given)
        close(columns.grad, w.grad[:, mine], given)
        close(of_bias.grad, b.grad, given)


def plain_columns(rank, ranks):
    """Uneven columns, and none on the first of many ranks."""
    from logitless.torch import Sharding, linear_logprobs

    made = hidden, weight, bias, target = problem(ranks, 61)
    borders = [DIM * r * r // ranks**2 for r in range(ranks + 1)]
    columns_alike(rank, borders, made, options(ranks, 61), close)
    where, targets = Sharding(dist.group.WORLD, tokens=True, weight="columns"), target[rank].clamp(min=0)
    columns = weight[:, borders[rank] : borders[rank + 1]].contiguous()
    found = linear_logprobs(hidden[rank], columns, targets, bias, sharding=where)[0]
    close(found, linear_logprobs(hidden[rank], weight, targets, bias)[0], "log-probabilities")


def same_tokens(rank, ranks, mesh, vocab):
    """Tensor parallelism: hidden is replicated, and each rank has the full results, in the same bits."""
    from logitless.torch import linear_cross_entropy
    from torch.distributed.tensor import DTensor, Replicate

    hidden, weight, bias, target = problem(ranks, vocab)
    hidden, target = hidden.flatten(0, 1), target.flatten(0, 1)
    for given in options(ranks, vocab):
        given = {k: v.flatten() if k == "token_weight" else v for k, v in given.items()}
        more = dict(return_lse=True, return_argmax=True, return_target_logits=True)
        x, w, b = (t.clone().requires_grad_() for t in (hidden, weight, bias))
        whole = linear_cross_entropy(x, w, target, b, **given, **more)
        (whole[0].sum() + 0.3 * whole[1].sum()).backward()
        same = DTensor.from_local(hidden.clone(), mesh, [Replicate()]).requires_grad_()
        w_shard, b_whole = sharded(weight, mesh), bias.clone().requires_grad_()
        found = linear_cross_entropy(same, w_shard, target, b_whole, **given, **more)
        for f, e in zip(found, whole):
            close(f.double(), e.double(), given)
        (found[0].sum() + 0.3 * found[1].sum()).backward()
        assert same.grad.placements == (Replicate(),)
        close(same.grad.to_local(), x.grad, given)
        close(w_shard.grad.full_tensor(), w.grad, given)
        close(b_whole.grad, b.grad, given)
        every = [torch.empty_like(x.grad) for _ in range(ranks)]
        dist.all_gather(every, same.grad.to_local())
        assert all(torch.equal(e, every[0]) for e in every)


def shared_tokens(rank, ranks, mesh, vocab):
    """Sequence-parallel input: hidden is sharded by tokens, and the loss is that of all tokens."""
    from logitless.torch import linear_cross_entropy
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    hidden, weight, bias, target = problem(ranks, vocab)
    for given in options(ranks, vocab):
        x, w, b = (t.clone().requires_grad_() for t in (hidden, weight, bias))
        whole = linear_cross_entropy(x, w, target, b, **given)
        whole.sum().backward()
        for dim in (0, 1):  # batches, or slices of the sequences
            if dim and "token_weight" in given:
                continue
            own = distribute_tensor(hidden, mesh, [Shard(dim)]).requires_grad_()
            w_shard, b_shard = sharded(weight, mesh), sharded(bias, mesh)
            targets = distribute_tensor(target, mesh, [Replicate()])
            mine = {k: v[rank : rank + 1] if k == "token_weight" else v for k, v in given.items()}
            with Traffic() as traffic:
                loss = linear_cross_entropy(own, w_shard, targets, b_shard, **mine)
                loss.sum().backward()
            assert not traffic.redistributed, traffic.redistributed
            if given.get("reduction") != "none":
                close(loss, whole, given)
            like = distribute_tensor(hidden, mesh, [Shard(dim)]).requires_grad_()
            like.to_local().sum().backward()  # PyTorch versions differ for uneven shards
            assert own.grad.placements == like.grad.placements, own.grad.placements
            close(own.grad.full_tensor(), x.grad, given)
            close(w_shard.grad.full_tensor(), w.grad, given)
            close(b_shard.grad.full_tensor(), b.grad, given)


def logprobs(rank, ranks, mesh):
    from logitless.torch import linear_logprobs
    from logitless.torch.losses import orpo_loss, selective_log_softmax

    hidden, weight, bias, target = problem(ranks, 61)
    x, w = hidden.clone().requires_grad_(), weight.clone().requires_grad_()
    each = [linear_logprobs(x[r], w, target[r], bias) for r in range(ranks)]
    sum(a.sum() + 0.2 * b.sum() + 0.1 * c.sum() for a, b, c in each).backward()
    own, w_shard = hidden[rank].clone().requires_grad_(), sharded(weight, mesh)
    with Traffic() as traffic:
        found = linear_logprobs(own, w_shard, target[rank], bias)
        sum(f * t.sum() for f, t in zip((1.0, 0.2, 0.1), found)).backward()
        close(selective_log_softmax(own, w_shard, target[rank], bias), each[rank][0], "selective")
        pairs = (hidden[rank].expand(2, -1, -1), target[rank].expand(2, -1))
        close(orpo_loss(pairs[0], w_shard, pairs[1]).loss, orpo_loss(pairs[0], weight, pairs[1]).loss, "orpo")
    assert not traffic.redistributed
    for f, e in zip(found, each[rank]):
        close(f, e, "logprobs")
    close(own.grad, x.grad[rank], "logprobs")
    close(w_shard.grad.full_tensor(), w.grad / ranks, "logprobs")


def fsdp(rank, ranks, mesh):
    """A head that FSDP ignores, as in docs/use/distributed.md, exchanges tokens: fewer bytes than the weight."""
    from logitless.torch import LinearCrossEntropy
    from torch import nn
    from torch.distributed.tensor import DTensor

    vocab = 3001
    torch.manual_seed(3)
    hidden, target = torch.randn(ranks, 10, DIM), torch.randint(0, vocab, (ranks, 10))

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(4)
            self.body, self.head = nn.Linear(DIM, DIM), LinearCrossEntropy(DIM, vocab)

        def forward(self, x, y):
            return self.head(self.body(x).tanh(), y)

    model, whole = Model(), Model()
    (snippet,) = [c for c in re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL) if "sharded_head" in c]
    exec(snippet, dict(model=model, mesh=mesh, dim=DIM, vocab=vocab))
    with torch.no_grad():
        whole.head.weight.copy_(model.head.weight.full_tensor())
    assert isinstance(model.head.weight, DTensor) and model.head.weight.to_local().shape[0] < vocab
    optimizers = [torch.optim.AdamW(m.parameters(), 0.1) for m in (model, whole)]
    for _ in range(3):
        with Traffic() as traffic:
            loss = model(hidden[rank], target[rank])
            loss.backward()
        assert not traffic.redistributed
        assert 0 < traffic.bytes < 4 * vocab * DIM / 2, traffic.bytes
        losses = [whole(x, y) for x, y in zip(hidden, target)]
        (sum(losses) / ranks).backward()
        close(loss, losses[rank], "fsdp")
        for (name, p), q in zip(model.named_parameters(), whole.named_parameters()):
            close(p.grad.full_tensor(), q[1].grad, name)
        for o in optimizers:
            o.step()
            o.zero_grad()


def replicas(rank, ranks):
    """HSDP: the vocabulary is sharded over one dimension of the mesh, and replicated over the other."""
    from logitless.torch import LinearCrossEntropy, linear_cross_entropy, sharded_head
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

    if ranks < 4:
        return
    mesh = init_device_mesh("cpu", (2, ranks // 2), mesh_dim_names=("replicas", "vocab"))
    hidden, weight, bias, target = problem(ranks, 61)
    x, w, b = (t.clone().requires_grad_() for t in (hidden, weight, bias))
    sum(linear_cross_entropy(x[r], w, target[r], b) for r in range(ranks)).backward()
    w_shard = distribute_tensor(weight, mesh, [Replicate(), Shard(0)]).requires_grad_()
    b_whole = distribute_tensor(bias, mesh, [Replicate(), Replicate()]).requires_grad_()
    own = hidden[rank].clone().requires_grad_()
    linear_cross_entropy(own, w_shard, target[rank], b_whole).backward()
    assert w_shard.grad.placements == (Replicate(), Shard(0))
    close(own.grad, x.grad[rank], "hsdp")
    close(w_shard.grad.full_tensor(), w.grad / ranks, "hsdp")
    close(b_whole.grad.full_tensor(), b.grad / ranks, "hsdp")
    # This hidden gives no placement over the replicas, so it may differ between them.
    on_rows = DTensor.from_local(hidden[rank], mesh["vocab"], [Replicate()])
    try:
        linear_cross_entropy(on_rows, w_shard, target[rank])
    except NotImplementedError as error:
        assert "hidden: expected a DTensor on the mesh of weight" in str(error), error
    else:
        raise AssertionError("a hidden of one dimension was taken")
    head = LinearCrossEntropy(DIM, 61)
    with torch.no_grad():
        head.weight.copy_(weight)
    assert sharded_head(head, mesh) == {head.weight}
    head(hidden[rank], target[rank]).backward()
    plain = weight.clone().requires_grad_()
    sum(linear_cross_entropy(hidden[r], plain, target[r]) for r in range(ranks)).backward()
    close(head.weight.grad.full_tensor(), plain.grad / ranks, "hsdp")


def plain(rank, ranks):
    """Plain tensors and a group: consecutive rows, or at offsets that the call gives; cut_cross_entropy's argument."""
    from types import SimpleNamespace

    from logitless.torch import Sharding, linear_cross_entropy, linear_logprobs

    hidden, weight, bias, target = problem(ranks, 61)
    group = dist.group.WORLD
    cut = [0, 5, *range(20, 20 + 9 * (ranks - 2), 9), 61][: ranks] + [61]
    first, end = cut[rank], cut[rank + 1]
    x, w, b = (t.clone().requires_grad_() for t in (hidden, weight, bias))
    whole = linear_cross_entropy(x, w, target, b)
    whole.backward()
    for given in (
        dict(sharding=Sharding(group)),
        dict(sharding=Sharding(group, vocab=61, vocab_begin=first)),
        dict(vocab_parallel_options=SimpleNamespace(start=first, stop=end, group=group, reduce_e_grad=True)),
        dict(sharding=Sharding(group, tokens=True)),
        dict(sharding=Sharding(group, tokens=True, exchange="weights")),
    ):
        tokens = given.get("sharding") is not None and given["sharding"].tokens
        rows, bias_rows = (t[first:end].clone().requires_grad_() for t in (weight, bias))
        states = (hidden[rank] if tokens else hidden).clone().requires_grad_()
        loss = linear_cross_entropy(states, rows, target[rank] if tokens else target, bias_rows, **given)
        loss.backward()
        close(loss, whole, given)
        close(states.grad, x.grad[rank] if tokens else x.grad, given)
        close(rows.grad, w.grad[first:end], given)
        close(bias_rows.grad, b.grad[first:end], given)
    found = linear_logprobs(hidden, weight[first:end], target, bias[first:end], sharding=Sharding(group))
    for f, e in zip(found, linear_logprobs(hidden, weight, target, bias)):
        close(f, e, "logprobs")
    # A group of some ranks, in another order.
    pair = dist.new_group([0, ranks - 1])
    if rank in (0, ranks - 1):
        half = slice(0, 30) if rank == 0 else slice(30, 61)
        close(linear_cross_entropy(hidden, weight[half], target, bias[half], sharding=Sharding(pair)), whole, "pair")


def compiled(rank, ranks, mesh):
    from logitless.torch import Sharding, linear_cross_entropy

    hidden, weight, bias, target = problem(ranks, 61)
    x, w = hidden.clone().requires_grad_(), weight.clone().requires_grad_()
    each = [linear_cross_entropy(x[r], w, target[r]) for r in range(ranks)]
    sum(each).backward()
    step = torch.compile(linear_cross_entropy, fullgraph=True, backend="aot_eager")
    own, w_shard = hidden[rank].clone().requires_grad_(), sharded(weight, mesh)
    loss = step(own, w_shard, target[rank])
    loss.backward()
    close(loss, each[rank], "compiled")
    close(own.grad, x.grad[rank], "compiled")
    close(w_shard.grad.full_tensor(), w.grad / ranks, "compiled")
    size = -(-61 // ranks)
    first = min(rank * size, 61)
    rows = weight[first : first + size].clone().requires_grad_()
    where = Sharding(dist.group.WORLD, vocab=61, vocab_begin=first, tokens=True)
    call = lambda h, r, t: linear_cross_entropy(h, r, t, reduction="sum", sharding=where)  # noqa: E731
    loss = torch.compile(call, fullgraph=True, backend="aot_eager")(hidden[rank], rows, target[rank])
    loss.backward()
    close(rows.grad, torch.autograd.grad(linear_cross_entropy(x, w, target, reduction="sum"), w)[0][first : first + size], "sum")


def float16(rank, ranks, mesh):
    """Gradients below the least float16 until the loss scale is multiplied in: of local losses and of the global
    one."""
    from logitless.torch import Sharding, linear_cross_entropy

    scale = 2.0**30
    hidden, weight, bias, target = problem(ranks, 61)
    hidden, weight = hidden.half(), weight.half()
    size = -(-61 // ranks)
    first = min(rank * size, 61)
    x, w = hidden.float().requires_grad_(), weight.float().requires_grad_()
    each = [linear_cross_entropy(x[r], w, target[r], bias, reduction="sum") for r in range(ranks)]
    sum(each).backward()
    same = lambda a, b: (a.float() - b).norm() <= 4e-3 * b.norm()  # noqa: E731
    for columns in (False, True):
        own, w_shard = hidden[rank].clone().requires_grad_(), sharded(weight, mesh, columns)
        (scale * linear_cross_entropy(own, w_shard, target[rank], bias, normalizer=scale)).backward()
        assert own.grad.dtype == w_shard.grad.dtype == torch.float16 and same(own.grad, x.grad[rank]), columns
        assert same(w_shard.grad.full_tensor(), w.grad / ranks), columns
    for tokens in (False, True):
        states = (hidden[rank] if tokens else hidden).clone().requires_grad_()
        rows = weight[first : first + size].clone().requires_grad_()
        where = Sharding(dist.group.WORLD, tokens=tokens)
        given = (states, rows, target[rank] if tokens else target, bias[first : first + size])
        (scale * linear_cross_entropy(*given, normalizer=scale, sharding=where)).backward()
        assert same(states.grad, x.grad[rank] if tokens else x.grad), tokens
        assert same(rows.grad, w.grad[first : first + size]), tokens


def mixed(rank, ranks, mesh):
    """A bfloat16 hidden state of one rank beside an fp32 weight is cast, without changing its value."""
    from logitless.torch import linear_cross_entropy

    hidden, weight, _, target = problem(ranks, 61)
    given = (hidden[rank].bfloat16() if rank else hidden[rank]).detach()
    found = []
    for x in (given.clone().requires_grad_(), given.float().requires_grad_()):
        w = sharded(weight, mesh)
        loss = linear_cross_entropy(x, w, target[rank])
        loss.backward()
        assert x.grad.dtype == x.dtype
        found.append((loss, x.grad.to(given.dtype), w.grad.to_local()))
    assert all(torch.equal(a, b) for a, b in zip(*found)), rank


def errors(rank, ranks, mesh):
    """All ranks raise the error of one rank, and the next call works."""
    from logitless.torch import Sharding, linear_cross_entropy

    hidden, weight, _, target = problem(ranks, 61)
    last = ranks - 1

    def refused(call, *parts):
        try:
            call()
        except Exception as error:
            for part in parts:
                assert part in str(error), (rank, error)
        else:
            raise AssertionError(f"rank {rank}: nothing was raised where {parts} was expected")
        good = sharded(weight, mesh)
        linear_cross_entropy(hidden[rank], good, target[rank]).backward()

    far = target[rank].clone()
    if rank == last:
        far[1] = 99
    refused(lambda: linear_cross_entropy(hidden[rank], sharded(weight, mesh), far), "99 at position 1")
    softcap = 3.0 if rank == last else None
    refused(lambda: linear_cross_entropy(hidden[rank], sharded(weight, mesh), target[rank], softcap=softcap), "softcap")
    # These errors arise before the library is called.
    given = None if rank == last else target[rank]
    refused(lambda: linear_cross_entropy(hidden[rank], sharded(weight, mesh), given), "target: expected a tensor")
    wide = hidden[rank].double() if rank == last else hidden[rank]
    refused(lambda: linear_cross_entropy(wide, sharded(weight, mesh), target[rank]), "weight: expected torch.float64")
    cut = target[rank, 1:] if rank == last else target[rank]
    refused(lambda: linear_cross_entropy(hidden[rank], sharded(weight, mesh), cut), "target: expected [9]")
    group = dist.group.WORLD
    from logitless.torch import configure_exchanges

    for given, kind, said in (
        (dict(copy_engines=1), TypeError, "copy_engines: expected True or False, got 1"),
        (dict(max_ctas=65), ValueError, "max_ctas: expected an int from 0 to 64, or None, got 65"),
        (dict(max_ctas=True), ValueError, "max_ctas: expected an int"),
        (dict(process_group=None), TypeError, "process_group: expected True or False, got None"),
        ({}, NotImplementedError, "group: expected ranks of one host with NCCL"),
    ):
        try:
            configure_exchanges(group, **given)
        except kind as error:
            assert said in str(error), error
        else:
            raise AssertionError(f"{given}: nothing was raised")
    rows = weight[rank * 10 : rank * 10 + 10]
    overlap = Sharding(group, vocab=10 * ranks, vocab_begin=5 if rank == last else 10 * rank)
    refused(lambda: linear_cross_entropy(hidden, rows, target.clamp(max=9), sharding=overlap), "vocabulary entry")
    for wrong, part in (
        (dict(sharding=3), "sharding: expected logitless.torch.Sharding"),
        (dict(sharding=Sharding("tp")), "sharding.group"),
        (dict(sharding=Sharding(group, vocab=9)), "expected vocab_begin"),
        (dict(sharding=Sharding(group, vocab=9.0, vocab_begin=0)), "sharding.vocab"),
        (dict(sharding=Sharding(group, tokens=True, exchange="both")), "sharding.exchange: expected one of 'planned', 'tokens', 'weights'"),
        (dict(sharding=Sharding(group, exchange="weights")), "sharding.exchange: expected 'planned'"),
        (dict(sharding=Sharding(group, tokens=True), shift=True), "shift"),
        (dict(sharding=Sharding(group, tokens=True), accuracy=True), "accuracy"),
        (dict(sharding=Sharding(group, interleaved=1)), "sharding.interleaved: expected True or False"),
        (dict(sharding=Sharding(group, tokens=True, weight="vocab")), "sharding.weight: expected one of 'rows', 'columns'"),
        (dict(sharding=Sharding(group, weight="columns")), "sharding.weight: 'columns' move to each rank's own tokens"),
        (dict(sharding=Sharding(group, 10, 3, tokens=True, weight="columns")), "sharding: columns are of all 10 vocabulary entries"),
        (dict(sharding=Sharding(group, tokens=True, weight="columns")), "on all ranks together, as hidden has"),
    ):
        refused(lambda wrong=wrong: linear_cross_entropy(hidden, rows, target, **wrong), part)
