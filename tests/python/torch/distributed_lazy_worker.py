"""One of two gloo processes with lazy heads (worker_process.py). Prints "ok" when all checks pass."""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(1)
        self.body, self.lm_head = nn.Linear(16, 16), nn.Linear(16, 60, bias=False)

    def forward(self, x, y=None):
        z = self.lm_head(self.body(x).tanh())
        return (None if y is None else F.cross_entropy(z.float().view(-1, 60), y.view(-1))), z


def own_losses(spread, x, y, whole, rank):
    """Losses of each rank's local tokens with a sharded vocabulary, against those of one process."""
    from torch.utils.checkpoint import checkpoint

    few = 0 if rank else len(x)
    losses = dict(
        gather=lambda m: -m(x[:few])[1].log_softmax(-1).gather(-1, y[:few, None]).sum(),
        logsumexp=lambda m: m(x[:few])[1].logsumexp(-1).sum(),
        read=lambda m: sum(m(x[: 1 if rank else 5])[1][i].square().sum() for i in (0, -1)),
        checkpoint=lambda m: checkpoint(lambda h: F.cross_entropy(m.lm_head(h), y), x, use_reentrant=False),
    )
    for name, loss in losses.items():
        model = spread()
        whole.zero_grad()
        found, expected = loss(model), loss(whole)
        assert torch.allclose(found, expected, atol=1e-4), (name, found, expected)
        found.backward()
        expected.backward()
        mean = whole.lm_head.weight.grad
        dist.all_reduce(mean)
        assert torch.allclose(model.lm_head.weight.grad.full_tensor(), mean / 2, atol=1e-4), name
    # All ranks raise the error of one rank, and the next call is in step.
    model = spread()
    for wrong in (y.clone().fill_(99) if rank else y, y):
        try:
            F.cross_entropy(model(x)[1], wrong)
        except ValueError as error:
            assert "99 at position 0 is outside [0, 60)" in str(error) and ("rank 1: " in str(error)) == (rank == 0), error
        else:
            assert wrong is y, "a bad target of rank 1 was not told"
            break
    try:
        torch.autograd.grad(F.cross_entropy(model(x)[1], y), model.lm_head.weight, create_graph=True)
    except NotImplementedError as error:
        assert "second derivatives" in str(error)
    else:
        raise AssertionError("a second derivative over ranks")


def flat_units(hidden, target, ranks):
    """FSDP1 frees a unit's weights after its forward: a head that is a unit trains as with real logits. ``ranks``:
    whether the ranks that have the shards are known. If so they gather them; otherwise the head is copied."""
    from logitless.torch import LazyLogits, lazy_head
    from logitless.torch._lazy import _flat
    from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
    from torch.distributed.fsdp import MixedPrecision

    kept = _flat._of_all_ranks
    _flat._of_all_ranks = kept if ranks else lambda flat: False

    def trained(lazy, outside, original, half):
        precision = MixedPrecision(torch.bfloat16) if half else None
        options = dict(device_id=torch.device("cpu"), use_orig_params=original, mixed_precision=precision)
        model = lazy_head(Model()) if lazy else Model()
        model.lm_head = FSDP(model.lm_head, **options)
        model = FSDP(model, **options)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
        losses, z = [], None
        for _ in range(2):
            loss, z = model(hidden, None if outside else target)
            loss = F.cross_entropy(z.float(), target) if outside else loss
            assert not lazy or (isinstance(z, LazyLogits) and not z.is_real)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.detach())
        if lazy and ranks:
            try:
                z.sum()
            except RuntimeError as error:
                assert "LazyLogits: weight was modified" in str(error), error
            else:
                raise AssertionError("logits of changed weights")
        with torch.no_grad():
            loss, z = model(hidden, target)
            return [*losses, loss, z.float() + 0.0]

    for original, half in ((False, False), (True, False), (False, True)):
        for outside in (False, True):
            given = outside, original, half
            for found, wanted in zip(trained(True, *given), trained(False, *given)):
                assert (found - wanted).norm() <= (2e-2 if half else 1e-5) * wanted.norm(), given
    _flat._of_all_ranks = kept


def main(rank: int, ranks: int) -> None:
    from logitless.torch import LazyLogits, lazy_head, sharded_head
    from sharded_worker import Traffic
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
    from torch.nn.parallel import DistributedDataParallel

    mesh = init_device_mesh("cpu", (ranks,))

    def root():
        return fully_shard(lazy_head(Model()), mesh=mesh)

    def unit(**options):
        model = lazy_head(Model(), **options)
        fully_shard(model.lm_head, mesh=mesh)
        return fully_shard(model, mesh=mesh)

    def patched_after():
        model = Model()
        fully_shard(model.lm_head, mesh=mesh)
        return lazy_head(fully_shard(model, mesh=mesh))

    def spread():
        model = lazy_head(Model())
        return fully_shard(model, mesh=mesh, ignored_params=sharded_head(model.lm_head, mesh))

    makers = dict(
        root=root, unit=unit, patched_after=patched_after, spread=spread, far=lambda: unit(far_field=0.01),
        ddp=lambda: DistributedDataParallel(lazy_head(Model())),
        ddp_static=lambda: DistributedDataParallel(lazy_head(Model()), static_graph=True),
        ddp_unused=lambda: DistributedDataParallel(lazy_head(Model()), find_unused_parameters=True),
    )
    torch.manual_seed(0)
    hidden, target = torch.randn(2, 5, 16), torch.randint(0, 60, (2, 5))
    whole = Model()
    ((whole(hidden[0], target[0])[0] + whole(hidden[1], target[1])[0]) / 2).backward()
    for name, make in makers.items():
        for outside in (False, True):  # the loss is computed inside the model's forward, or from its logits
            model = make()
            for _ in range(2):
                loss, z = model(hidden[rank], None if outside else target[rank])
                if outside:
                    loss = F.cross_entropy(z, target[rank])
                loss.backward()
                assert isinstance(z, LazyLogits) and not z.is_real, name
                for (n, p), q in zip(model.named_parameters(), whole.parameters()):
                    g = p.grad.full_tensor() if hasattr(p.grad, "full_tensor") else p.grad
                    assert torch.allclose(g, q.grad, atol=1e-5), (name, outside, n)
                model.zero_grad()
            if name == "far":  # the steps are dense because the vocabulary is small
                assert model.lm_head.far_field.report.steps == 2
    for known in (True, False):
        flat_units(hidden[rank], target[rank], known)
    # After a step, reading the logits of the old weights raises an error.
    for make in (root, unit, spread):
        model = make()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        loss, z = model(hidden[rank], target[rank])
        loss.backward()
        optimizer.step()
        try:
            z.sum()
        except RuntimeError as error:
            assert "LazyLogits: " in str(error) and "weight" in str(error), error
        else:
            raise AssertionError("logits of changed weights")
    # Reading them before the step gives the real logits.
    for make in (unit, spread):
        _, z = make()(hidden[rank])
        assert torch.allclose(z.detach() + 0, whole(hidden[rank])[1].detach(), atol=1e-5)
    # Sharded vocabulary: a loss gathers nothing of the head, for any number of tokens; code that reads the logits does.
    model = spread()
    for tokens in (5, 5 * rank):
        x, y = hidden[rank, :tokens], target[rank, :tokens]
        with Traffic() as traffic:
            loss, z = model(x, y)
            loss.nan_to_num().backward()
        assert isinstance(z, LazyLogits) and not z.is_real and not traffic.redistributed and traffic.bytes > 0
        assert loss.isnan() == (tokens == 0)  # PyTorch's mean over no tokens
        model.zero_grad()
    whole.zero_grad()
    sum(whole.lm_head(x).square().mean() for x in hidden).div(2).backward()
    for compiled in (False, True):
        model = spread()
        head = torch.compile(model.lm_head, backend="aot_eager", fullgraph=True) if compiled else model.lm_head
        head(hidden[rank]).square().mean().backward()
        assert torch.allclose(model.lm_head.weight.grad.full_tensor(), whole.lm_head.weight.grad, atol=1e-5), compiled
    own_losses(spread, hidden[rank], target[rank], whole, rank)
    # bf16 layers: the head's fp32 rows are cast like those that FSDP gathers.
    model = lazy_head(Model())
    fully_shard(model, mesh=mesh, ignored_params=sharded_head(model.lm_head, mesh), mp_policy=MixedPrecisionPolicy(torch.bfloat16))
    loss, z = model(hidden[rank], target[rank])
    loss.backward()
    whole.zero_grad()
    (sum(whole(x, y)[0] for x, y in zip(hidden, target)) / 2).backward()
    found, wanted = model.lm_head.weight.grad.full_tensor(), whole.lm_head.weight.grad
    assert z.dtype == torch.bfloat16 and not z.is_real and found.dtype == torch.float32
    assert (found - wanted).norm() < 0.01 * wanted.norm()
    # Logits of a part of the vocabulary are computed from the gathered head.
    model, x, y = spread(), hidden[rank], target[rank] % 32
    assert torch.allclose(F.cross_entropy(model(x)[1][:, :32], y), F.cross_entropy(whole(x)[1][:, :32], y), atol=1e-5)
