"""One of several gloo processes (worker_process.py). Prints "ok" when all checks pass."""

import torch
from torch import nn


def main(rank: int, ranks: int) -> None:
    from logitless.torch import LinearCrossEntropy, linear_cross_entropy, linear_logprobs, losses
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

    mesh = init_device_mesh("cpu", (ranks,))
    grid = init_device_mesh("cpu", (2, ranks // 2)) if ranks > 2 else None  # replicas x shards, or data x tensor
    torch.manual_seed(0)
    hidden = torch.randn(ranks, 20, 16)  # a batch for each rank
    weight = torch.randn(60, 16)
    bias = torch.randn(60)
    target = torch.randint(0, 60, (ranks, 20))

    def exact(batches, reduction):
        """Returns the gradients of the mean of the batches' losses: d_hidden (each batch by its own loss), d_weight,
        d_bias."""
        x, w, b = (t.clone().requires_grad_() for t in (hidden, weight, bias))
        each = [nn.functional.cross_entropy(x[i] @ w.t() + b, target[i], reduction=reduction) for i in batches]
        d_w, d_b = torch.autograd.grad(sum(each) / len(each), (w, b), retain_graph=True)
        return torch.autograd.grad(sum(each), x)[0], d_w, d_b

    # A sharded weight and the rank's local tokens: the loss gathers the weight. Its gradient is the mean over the
    # ranks, sharded again, as in FSDP.
    layouts = [(mesh, [placement]) for placement in (Shard(0), Shard(1), Replicate())]
    if grid is not None:
        layouts += [(grid, [Replicate(), Shard(0)]), (grid, [Shard(0), Shard(1)])]
    for on, placements in layouts:
        for reduction in ("sum", "mean"):
            w = distribute_tensor(weight, on, placements).requires_grad_()
            b = distribute_tensor(bias, on, [Replicate()] * on.ndim).requires_grad_()
            x = hidden[rank].clone().requires_grad_()
            linear_cross_entropy(x, w, target[rank], b, reduction=reduction).backward()
            d_x, d_w, d_b = exact(range(ranks), reduction)
            assert isinstance(w.grad, DTensor) and w.grad.placements == tuple(placements)
            assert torch.allclose(w.grad.full_tensor(), d_w, atol=1e-4), placements
            assert torch.allclose(b.grad.full_tensor(), d_b, atol=1e-4), placements
            assert torch.allclose(x.grad, d_x[rank], atol=1e-5)
            # Tensor parallelism: every rank has the same tokens in a plain tensor.
            w = distribute_tensor(weight, on, placements).requires_grad_()
            x = hidden[0].clone().requires_grad_()
            linear_cross_entropy(x, w, target[0], bias, reduction=reduction).backward()
            d_x, d_w, _ = exact([0], reduction)
            assert torch.allclose(w.grad.full_tensor(), d_w, atol=1e-4), placements
            assert torch.allclose(x.grad, d_x[0], atol=1e-5)
    # The same step by FSDP has the gradient of a call on its sharded weight.
    head = nn.Linear(16, 60)
    with torch.no_grad():
        head.weight.copy_(weight)
        head.bias.copy_(bias)
    fully_shard(head, mesh=mesh)
    nn.functional.cross_entropy(head(hidden[rank]), target[rank]).backward()
    by_fsdp = [p.grad.full_tensor() for p in (head.weight, head.bias)]
    head.reshard()
    head.zero_grad()
    linear_cross_entropy(hidden[rank], head.weight, target[rank], head.bias).backward()
    for p, g in zip((head.weight, head.bias), by_fsdp):
        assert torch.allclose(p.grad.full_tensor(), g, atol=1e-5)
    # With everything replicated, each rank has the full gradient.
    w = distribute_tensor(weight, mesh, [Shard(0)]).requires_grad_()
    x = distribute_tensor(hidden[0], mesh, [Replicate()])
    linear_logprobs(x, w, target[0])[0].sum().backward()
    plain = weight.clone().requires_grad_()
    torch.log_softmax(hidden[0] @ plain.t(), -1).gather(1, target[0][:, None]).sum().backward()
    assert torch.allclose(w.grad.full_tensor(), plain.grad, atol=1e-4)
    # The sequences of a loss that masks by its targets may be replicated, too.
    w.grad, plain.grad = None, None
    x, y = (distribute_tensor(t, mesh, [Replicate()]) for t in (hidden, target))
    losses.simpo_loss(x, w, y).loss.backward()
    losses.simpo_loss(hidden, plain, target).loss.backward()
    assert torch.allclose(w.grad.full_tensor(), plain.grad, atol=1e-5)
    try:
        linear_cross_entropy(distribute_tensor(hidden[0], mesh, [Shard(1)]), w, target[0])
    except NotImplementedError as error:
        assert "hidden: expected a DTensor placed Replicate" in str(error), error
    else:
        raise AssertionError("a sharded hidden was taken")

    # FSDP2: a network and its head, each sharded, against one process with all batches.
    def network():
        torch.manual_seed(1)
        return nn.ModuleList([nn.Linear(16, 16), LinearCrossEntropy(16, 60, label_smoothing=0.1)])

    def run(model, x, y):
        return model[1](model[0](x).tanh(), y)

    class Step(nn.Module):
        def __init__(self):
            super().__init__()
            self.parts = network()

        def forward(self, x, y):
            return run(self.parts, x, y)

    sharded, whole = Step(), Step()
    fully_shard(sharded.parts[1], mesh=mesh)
    fully_shard(sharded, mesh=mesh)
    loss = sharded(hidden[rank], target[rank])
    loss.backward()
    (sum(whole(x, y) for x, y in zip(hidden, target)) / ranks).backward()
    for (name, p), q in zip(sharded.named_parameters(), whole.parameters()):
        assert torch.allclose(p.grad.full_tensor(), q.grad, atol=1e-5), name
    far_field(rank, ranks, mesh)


def far_field(rank: int, ranks: int, mesh) -> None:
    """FSDP2: the far field of each rank steps with its local tokens, on the gathered weight."""
    from logitless.torch import FarFieldHead
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import DTensor

    vocab, dim = 65536, 8
    torch.manual_seed(2)
    centers = 4 * torch.rand(vocab // 128, dim) - 2
    weight = centers.repeat(128, 1) + 0.15 * (2 * torch.rand(vocab, dim) - 1)
    hidden = 1.2 * centers[: 4 * ranks].repeat(8, 1).view(8, ranks, 4, dim).transpose(0, 1).reshape(ranks, 32, dim)
    target = torch.randint(0, vocab, (ranks, 32))
    options = dict(error=0.05, refresh_every=1, refresh_delay=0)

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(weight.clone())
            self.far = FarFieldHead(**options)

        def forward(self, x, y):
            return self.far(x, self.weight, y)

    for wrapped in (True, False):  # gathered by FSDP for the forward of the head, and by the call
        model = Model()
        fully_shard(model, mesh=mesh)
        forward = model if wrapped else model.forward
        expected = []
        for r in range(ranks):
            w, far = weight.clone().requires_grad_(), FarFieldHead(**options)
            losses = [far(hidden[r], w, target[r]) for _ in range(2)]
            sum(losses).backward()
            expected.append((losses, w.grad, far.report))
        losses = [forward(hidden[rank], target[rank]) for _ in range(2)]
        sum(losses).backward()
        own, _, report = expected[rank]
        assert report.far and model.far.report == report
        assert all(torch.equal(a, b) for a, b in zip(losses, own))
        assert isinstance(model.weight.grad, DTensor)
        mean = sum(g for _, g, _ in expected) / ranks
        assert torch.allclose(model.weight.grad.full_tensor(), mean, rtol=1e-4, atol=1e-8)
