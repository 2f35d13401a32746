"""One of several gloo processes (worker_process.py). Prints "ok" when all checks pass: losses whose vocabulary or keys are
on several ranks, against one process with all of them in float64."""

import torch
import torch.distributed as dist
from sharded_worker import Traffic

DIM = 12


def main(rank: int, ranks: int) -> None:
    from torch.distributed.device_mesh import init_device_mesh

    contrast(rank, ranks)
    contrast_errors(rank, ranks)
    replicas(rank, ranks)
    divergences(rank, ranks)
    large_logits(rank, ranks)
    other_vocabularies(rank, ranks)
    compiled(rank, ranks, init_device_mesh("cpu", (ranks,)))
    dtensors(rank, ranks, init_device_mesh("cpu", (ranks,)))
    divergence_errors(rank, ranks)


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


def replicas(rank, ranks):
    """DDP takes the mean over ranks, so the loss is multiplied by their number; encoders run in micro batches."""
    from torch.nn.parallel import DistributedDataParallel

    from logitless.torch import Sharding
    from logitless.torch.losses import grad_cache, info_nce_loss

    torch.manual_seed(6)
    net, whole = (torch.nn.Sequential(torch.nn.Linear(DIM, 16), torch.nn.GELU(), torch.nn.Linear(16, DIM)) for _ in range(2))
    whole.load_state_dict(net.state_dict())
    query, key = torch.randn(2, 5 * ranks, DIM)
    replica, sharding = DistributedDataParallel(net), Sharding(dist.group.WORLD, tokens=True)
    one, other = (grad_cache(replica, t.chunk(ranks)[rank], micro_batch=2) for t in (query, key))
    (ranks * info_nce_loss(one, other, sharding=sharding)).backward()
    info_nce_loss(whole(query), whole(key)).backward()
    for p, q in zip(net.parameters(), whole.parameters()):
        close(p.grad, q.grad.double(), "replicas")


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
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    query = distribute_tensor(x, init_device_mesh("cpu", (ranks,)), [Shard(0)])
    try:
        info_nce_loss(query, x)
        raise AssertionError("nothing was raised for a DTensor")
    except NotImplementedError as error:
        assert "query: expected a tensor, got a DTensor placed" in str(error), error
    found = info_nce_loss(x, x, sharding=everywhere._replace(vocab=4 * ranks, vocab_begin=4 * rank))
    assert torch.equal(found, info_nce_loss(x, x, sharding=everywhere))


VOCAB = 61
CASES = [
    ("jsd_loss", dict(beta=0.3, temperature=1.5, softcap=4.0, logit_scale=0.8, teacher_softcap=5.0, teacher_logit_scale=1.2)),
    ("forward_kl_loss", dict(weight_hard_loss=0.5, weight_soft_loss=0.7, softcap=4.0)),
    ("reverse_kl_loss", dict(reduction="none", temperature=2.0)), ("total_variation_loss", dict(normalizer=7.0)),
    ("forward_kl_loss", dict(reduction="none", weight_hard_loss=0.3)), ("jsd_loss", dict(reduction="sum", target=None)),
]  # fmt: skip


def models(tokens, dtype=torch.float32, vocab=VOCAB):
    """Returns hidden [T, D], weight, bias, and the teacher's three with another width; and targets, some ignored."""
    torch.manual_seed(7)
    shapes = (tokens, DIM), (vocab, DIM), (vocab,), (tokens, DIM + 3), (vocab, DIM + 3), (vocab,)
    target = torch.randint(0, vocab, (tokens,))
    target[1::4] = -100
    return [torch.randn(shape).to(dtype) for shape in shapes], target


def exact(name, given, target, options, shares):
    """Returns the loss of one process in float64, and its gradients by hidden, weight and bias."""
    from logitless.torch import losses

    leaves = [t.double().requires_grad_() for t in given[:3]]
    hidden, weight, bias, of_teacher = *leaves, [t.double() for t in given[3:]]
    loss = getattr(losses, name)(hidden, weight, *of_teacher[:2], bias, of_teacher[2], **{"target": target, **options})
    return loss, torch.autograd.grad((loss * shares).sum() if loss.dim() else loss, leaves)


def divergences(rank, ranks):
    """Uneven shards of the vocabulary: of some entries, of all but one rank's none, and of a 16-bit head. All ranks have
    all tokens, or each has its own."""
    from logitless.torch import Sharding, losses

    sizes = [9 - 2 * r for r in range(ranks)]
    tokens = sum(sizes)
    shares = torch.linspace(0.5, 2, tokens)
    for case, (name, options) in enumerate(CASES):
        rows, dtype = [([40, 21], torch.float32), ([0, 61], torch.float32), ([33, 28], torch.bfloat16)][case % 3]
        given, target = models(tokens, dtype)
        expected, gradients = exact(name, given, target, options, shares)
        for own in (False, True):
            hidden, of_teacher, y, share = (t.split(sizes)[rank] if own else t for t in (given[0], given[3], target, shares))
            hidden, weight, bias = (t.clone().requires_grad_() for t in (hidden, *(t.split(rows)[rank] for t in given[1:3])))
            with Traffic() as traffic:
                loss = getattr(losses, name)(
                    hidden, weight, of_teacher, given[4].split(rows)[rank], bias, given[5].split(rows)[rank],
                    sharding=Sharding(dist.group.WORLD, tokens=own), **{"target": y, **options})
                ((loss * share).sum() if loss.dim() else loss).backward()
            what = (name, options, rows, own)
            close(loss, expected.split(sizes)[rank] if own and loss.dim() else expected, what)
            wanted = gradients[0].split(sizes)[rank] if own else gradients[0], *(g.split(rows)[rank] for g in gradients[1:])
            for t, g in zip((hidden, weight, bias), wanted):
                assert t.grad.dtype is dtype
                close(t.grad, g, what, 1e-5 if dtype is torch.float32 else 4e-3)
            if not options.get("weight_hard_loss"):
                assert traffic.bytes < 4 * max(sizes) * (2 * DIM + 8) + 200, (what, traffic.bytes)


def large_logits(rank, ranks):
    """The gradient of an entry with almost all of the probability is a small difference of large log-ratios."""
    from logitless.torch import Sharding, losses

    given, _ = models(16)
    hidden, weight, states, head = (3 * given[i] for i in (0, 1, 3, 4))
    x = hidden.double().requires_grad_()
    losses.reverse_kl_loss(x, weight.double(), states.double(), head.double(), teacher_softcap=3.0).backward()
    rows = [40, 21]
    mine = hidden.clone().requires_grad_()
    losses.reverse_kl_loss(
        mine, weight.split(rows)[rank], states, head.split(rows)[rank], teacher_softcap=3.0,
        sharding=Sharding(dist.group.WORLD)).backward()
    close(mine.grad, x.grad, "large logits", 1e-5)


TEACHER_VOCAB = 50


def other_vocabulary(given):
    """Returns models whose teacher has another vocabulary, and its ids of the student's entries: some on no rank, some
    twice, most on another rank."""
    torch.manual_seed(8)
    ids = torch.randint(0, TEACHER_VOCAB, (VOCAB,)).flip(0)
    ids[::7] = -1
    return [*given[:4], torch.randn(TEACHER_VOCAB, DIM + 3).to(given[0].dtype), torch.randn(TEACHER_VOCAB).to(given[0].dtype)], ids


def other_vocabularies(rank, ranks):
    """A teacher of another vocabulary, whose rows are sharded by themselves; a rank may have none of it, or no entry that it
    has."""
    from logitless.torch import Sharding, losses

    sizes = [9 - 2 * r for r in range(ranks)]
    shares = torch.linspace(0.5, 2, sum(sizes))
    for case, (name, options) in enumerate(CASES):
        if name == "reverse_kl_loss":  # infinite
            continue
        rows, of_teacher, dtype = [
            ([40, 21], [31, 19], torch.float32), ([33, 28], [50, 0], torch.bfloat16), ([60, 1], [7, 43], torch.float32)][case % 3]
        given, target = models(sum(sizes), dtype)
        given, ids = other_vocabulary(given)
        if rows[-1] == 1:
            ids[-1] = -1
        options = {**options, "teacher_ids": ids}
        expected, gradients = exact(name, given, target, options, shares)
        for own in (False, True):
            hidden, states, y, share = (t.split(sizes)[rank] if own else t for t in (given[0], given[3], target, shares))
            leaves = [t.clone().requires_grad_() for t in (hidden, *(t.split(rows)[rank] for t in given[1:3]))]
            head = [t.split(of_teacher)[rank] for t in given[4:]]
            for has_bias in (True, False) if case == 0 else (True,):
                wanted, found = (expected, gradients) if has_bias else exact(
                    name, [*given[:5], torch.zeros(TEACHER_VOCAB)], target, options, shares)
                with Traffic() as traffic:
                    loss = getattr(losses, name)(
                        leaves[0], leaves[1], states, head[0], leaves[2], head[1] if has_bias else None,
                        sharding=Sharding(dist.group.WORLD, tokens=own), **{"target": y, **options})
                    made = torch.autograd.grad((loss * share).sum() if loss.dim() else loss, leaves)
                what = (name, rows, own, has_bias)
                close(loss, wanted.split(sizes)[rank] if own and loss.dim() else wanted, what, 1e-5 if dtype is torch.float32 else 4e-3)
                parts = found[0].split(sizes)[rank] if own else found[0], *(g.split(rows)[rank] for g in found[1:])
                for g, w in zip(made, parts):
                    close(g, w, what, 1e-5 if dtype is torch.float32 else 8e-3)
                if not options.get("weight_hard_loss"):  # each row is sent at most once for each entry
                    sent = (DIM + 4) * dtype.itemsize * VOCAB
                    assert traffic.bytes < sent + 4 * max(sizes) * (2 * DIM + 8) + 400, (what, traffic.bytes)


def compiled(rank, ranks, mesh):
    """One graph computes what an eager call does, of all tokens (the first case) or of each rank's own."""
    from torch.distributed.tensor import Shard, distribute_tensor

    from logitless.torch import Sharding, losses

    sizes, rows, of_teacher = [9 - 2 * r for r in range(ranks)], [40, 21], [31, 19]
    shares = torch.linspace(0.5, 2, sum(sizes))
    for case, (name, options) in enumerate((CASES[0], CASES[1], CASES[4])):
        given, target = models(sum(sizes))
        ids = None
        if case == 1:
            given, ids = other_vocabulary(given)
        options = {**options, "teacher_ids": ids}
        expected, gradients = exact(name, given, target, options, shares)
        own = case > 0
        hidden, states, y, share = (t.split(sizes)[rank] if own else t for t in (given[0], given[3], target, shares))
        leaves = [t.clone().requires_grad_() for t in (hidden, *(t.split(rows)[rank] for t in given[1:3]))]
        head = [t.split(rows if ids is None else of_teacher)[rank] for t in given[4:]]
        sharding = Sharding(dist.group.WORLD, vocab=VOCAB, vocab_begin=40 * rank, tokens=own)

        def step(hidden, weight, bias, states, *head, name=name, sharding=sharding, more={**options, "target": y}):  # noqa: B006
            return getattr(losses, name)(hidden, weight, states, head[0], bias, head[1], sharding=sharding, **more)

        torch._dynamo.reset()
        loss = torch.compile(step, fullgraph=True, backend="aot_eager")(*leaves, states, *head)
        made = torch.autograd.grad((loss * share).sum() if loss.dim() else loss, leaves)
        what = ("compiled", name, own)
        close(loss, expected.split(sizes)[rank] if own and loss.dim() else expected, what)
        parts = gradients[0].split(sizes)[rank] if own else gradients[0], *(g.split(rows)[rank] for g in gradients[1:])
        for g, w in zip(made, parts):
            close(g, w, what)
    given, target = models(4)
    heads = [distribute_tensor(t, mesh, [Shard(0)]).requires_grad_() for t in (given[1], given[4])]
    torch._dynamo.reset()
    step = torch.compile(losses.forward_kl_loss, fullgraph=True, backend="aot_eager")
    hidden = given[0].clone().requires_grad_()
    with Traffic() as traffic:
        loss = step(hidden, heads[0], given[3], heads[1])
        loss.backward()
    assert not any(shape[0] == VOCAB for shape in traffic.redistributed), traffic.redistributed
    expected, gradients = exact("forward_kl_loss", [*given[:2], torch.zeros(VOCAB), *given[3:5], torch.zeros(VOCAB)], None, {}, None)
    close(loss, expected, "compiled DTensors")
    close(hidden.grad, gradients[0], "compiled DTensors")
    close(heads[0].grad.full_tensor(), gradients[1], "compiled DTensors")


def dtensors(rank, ranks, mesh):
    """Heads that are DTensors are not gathered. Hidden states of each rank's own (FSDP) give it a loss of its own, and the
    weights the mean of the gradients; replicated ones and those that are sharded by tokens give one loss."""
    from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

    from logitless.torch import losses

    tokens = 4 * ranks
    for case, (name, options) in enumerate((*CASES[:2], CASES[5])):
        given, target = models(tokens)
        if case == 2:
            given, options = other_vocabulary(given)[0], {"teacher_ids": other_vocabulary(given)[1]}
        heads = [distribute_tensor(t, mesh, [Shard(0)]) for t in (given[1], given[2], given[4], given[5])]
        explained = losses.explain_divergence(
            given[0], heads[0], given[3], heads[2], heads[1], heads[3], target=target, teacher_ids=options.get("teacher_ids"))
        assert f"This rank's {len(heads[0].to_local())} entries and {tokens} tokens" in explained, explained
        for kind in ("replicated", "tokens", "own"):
            placed = [Shard(0)] if kind == "tokens" else [Replicate()]
            part = slice(4 * rank, 4 * rank + 4) if kind == "own" else slice(None)
            states = [given[0][part], given[3][part]]
            if kind != "own":
                states = [distribute_tensor(t, mesh, placed) for t in states]
            leaves = [t.detach().clone().requires_grad_() for t in (states[0], *heads[:2])]
            y = distribute_tensor(target, mesh, placed) if kind == "tokens" else target[part]
            with Traffic() as traffic:
                loss = getattr(losses, name)(
                    leaves[0], leaves[1], states[1], heads[2], leaves[2], heads[3], **{**options, "target": y})
                loss.backward()
            assert not any(shape[0] in (VOCAB, TEACHER_VOCAB) for shape in traffic.redistributed), traffic.redistributed
            parts = [slice(4 * r, 4 * r + 4) for r in range(ranks)] if kind == "own" else [slice(None)]
            results = []
            for p in parts:
                rows = [given[0][p], *given[1:3], given[3][p], *given[4:]]
                results.append(exact(name, rows, target[p], options, None))
            what, (expected, gradients) = (name, kind), results[rank if kind == "own" else 0]
            close(loss, expected, what)
            grad = leaves[0].grad
            close(grad.full_tensor() if isinstance(grad, DTensor) else grad, gradients[0], what)
            for i in (1, 2):
                mean = sum(g[i] for _, g in results) / len(results)
                close(leaves[i].grad.full_tensor(), mean, what)


def divergence_errors(rank, ranks):
    """An error of one rank is raised on all."""
    from logitless.torch import Sharding, losses

    given, target = models(4, vocab=4)
    here, sharding = slice(2 * rank, 2 * rank + 2), Sharding(dist.group.WORLD)
    plain = dict(hidden=given[0], weight=given[1][here], teacher_hidden=given[3], teacher_weight=given[4][here], sharding=sharding)
    few = dict(hidden=given[0][:3], teacher_hidden=given[3][:3])
    for wrong, message in (
        (dict(teacher_weight=given[4]) if rank == 0 else {}, "teacher_weight: expected [2, D]"),
        (few if rank == 0 else {}, "hidden: expected the same tokens on all ranks, got [3, 4]"),
        (dict(target=torch.full((4,), 9)), "target: expected token ids in [0, 4)"),
        (dict(teacher_ids=torch.arange(2)), "teacher_ids: expected [4]"),
        (dict(teacher_ids=torch.tensor([0, 4, 1, 2])), "teacher_ids: expected token ids below 4, got 4"),
        (dict(teacher_ids=torch.arange(4), teacher_weight=given[4][here, : DIM + rank]), "teacher_weight: expected columns and a dtype"),
        (dict(teacher_ids=torch.tensor([0, 1, 2, rank])), "teacher_ids: expected the same on all ranks"),
        (dict(sharding=sharding._replace(tokens=True, weight="columns")), "sharding.weight: 'columns' have no divergences"),
        (dict(sharding="ranks"), "sharding: expected logitless.torch.Sharding"),
        (dict(hidden=given[0].double(), weight=given[1][here].double()), "sharding: expected float32"),
    ):
        try:
            losses.jsd_loss(**{**plain, **wrong})
            raise AssertionError(f"nothing was raised: {message}")
        except (ValueError, TypeError, RuntimeError, NotImplementedError) as error:
            assert message in str(error), (message, error)
