"""One of two gloo processes: python distributed_worker.py RANK PORT. Says "ok" when everything held."""

import os
import sys

import torch
import torch.distributed as dist
from torch import nn


def main(rank: int, port: str) -> None:
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=port, RANK=str(rank), WORLD_SIZE="2")
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=2)
    from logitless.torch import LinearCrossEntropy, linear_cross_entropy, linear_logprobs
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

    mesh = init_device_mesh("cpu", (2,))
    torch.manual_seed(0)
    hidden = torch.randn(2, 20, 16)  # a batch for each rank
    weight = torch.randn(60, 16)
    target = torch.randint(0, 60, (2, 20))

    # A sharded weight: gathered for the loss, its gradient the sum over the ranks' tokens, sharded again.
    for placement in (Shard(0), Shard(1), Replicate()):
        w = distribute_tensor(weight, mesh, [placement]).requires_grad_()
        x = hidden[rank].clone().requires_grad_()
        loss = linear_cross_entropy(x, w, target[rank], reduction="sum")
        loss.backward()
        exact_x, exact_w = hidden.clone().requires_grad_(), weight.clone().requires_grad_()
        nn.functional.cross_entropy((exact_x @ exact_w.t()).reshape(-1, 60), target.reshape(-1), reduction="sum").backward()
        assert isinstance(w.grad, DTensor)
        assert torch.allclose(w.grad.full_tensor(), exact_w.grad, atol=1e-4), placement
        assert torch.allclose(x.grad, exact_x.grad[rank], atol=1e-5)
    # Everything replicated: each rank has the whole gradient.
    w = distribute_tensor(weight, mesh, [Shard(0)]).requires_grad_()
    x = distribute_tensor(hidden[0], mesh, [Replicate()])
    linear_logprobs(x, w, target[0])[0].sum().backward()
    exact = weight.clone().requires_grad_()
    torch.log_softmax(hidden[0] @ exact.t(), -1).gather(1, target[0][:, None]).sum().backward()
    assert torch.allclose(w.grad.full_tensor(), exact.grad, atol=1e-4)
    try:
        linear_cross_entropy(distribute_tensor(hidden[0], mesh, [Shard(0)]), w, target[0])
    except NotImplementedError as error:
        assert "hidden: expected a DTensor placed Replicate" in str(error), error
    else:
        raise AssertionError("a sharded hidden was taken")

    # FSDP2: a network and its head, each sharded, against one process with both batches.
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
    both = (whole(hidden[0], target[0]) + whole(hidden[1], target[1])) / 2
    both.backward()
    for (name, p), q in zip(sharded.named_parameters(), whole.parameters()):
        assert torch.allclose(p.grad.full_tensor(), q.grad, atol=1e-5), name
    dist.destroy_process_group()
    print("ok", flush=True)


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2])
