"""One of several processes (worker_process.py) with a Hopper GPU each. One is killed; the others print "ok" if they
raise an error that names its rank."""

import os
import signal
import time

import torch
import torch.distributed as dist


def main(rank: int, ranks: int) -> None:
    torch.cuda.set_device(rank)
    dist.init_process_group("nccl", rank=rank, world_size=ranks, device_id=torch.device("cuda", rank))
    from logitless.torch import Sharding, linear_cross_entropy

    torch.manual_seed(rank)
    hidden = torch.randn(4096, 1024, device="cuda").bfloat16().requires_grad_()
    weight = (torch.randn(4096, 1024, device="cuda") / 32).bfloat16().requires_grad_()
    target = torch.randint(0, 4096 * ranks, (4096,), device="cuda")
    said, start = "", time.monotonic()
    for step in range(1000):
        if rank == ranks - 1 and step == 5:
            time.sleep(1)
            print("ok", flush=True)
            os.kill(os.getpid(), signal.SIGKILL)
        try:
            loss = linear_cross_entropy(hidden, weight, target, sharding=Sharding(dist.group.WORLD, tokens=True))
            loss.backward()
            loss.item()
        except Exception as error:
            said = str(error)
            break
    assert f"rank {ranks - 1}" in said, said
    assert 5 <= step <= 6, step
    print(f"raised after {time.monotonic() - start:.1f} s: {said}")
    print("ok", flush=True)
    os._exit(0)  # destroying PyTorch's own group would wait for the rank that is gone
