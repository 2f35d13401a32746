"""One of several gloo processes (worker_process.py). Prints "ok" when all checks pass.

The communicator is made with the code of docs/use/groups.md.
"""

import os
import re
from datetime import timedelta
from pathlib import Path

import numpy as np
import torch.distributed as dist
from logitless import LogitlessError

PAGE = Path(__file__).parents[3] / "docs/use/groups.md"


def exchange(communicator, seed):
    """Checks both exchanges with random bytes that every rank can generate, in odd sizes."""
    size, rank = communicator.size, communicator.rank
    for bytes_each in (1, 37, 100003):
        given = np.random.default_rng(seed).integers(0, 256, (size, size, bytes_each), np.uint8)  # from, to
        of_all = np.empty((size, bytes_each), np.uint8)
        communicator.all_gather(given[rank, 0], of_all)
        assert (of_all == given[:, 0]).all()
        communicator.all_to_all(given[rank], of_all)
        assert (of_all == given[:, rank]).all()


def main(rank: int, ranks: int) -> None:
    dist.init_process_group("gloo", rank=rank, world_size=ranks, timeout=timedelta(seconds=30))
    (snippet,) = [c for c in re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL) if "def from_group" in c]
    space = {}
    exec(snippet, space)
    communicator = space["from_group"]()
    assert (communicator.rank, communicator.size) == (rank, ranks)
    exchange(communicator, 1)
    # A group of some ranks, in another order.
    some = dist.new_group([ranks - 1, 0])
    if rank in (0, ranks - 1):
        exchange(space["from_group"](some), 2)
    exchange(communicator, 3)

    # When a process ends, the other ranks' next call fails, and so does every later one.
    if rank == 1:
        print("ok", flush=True)
        os._exit(0)
    mine, all = bytearray(8), bytearray(8 * ranks)
    for _ in range(2):
        try:
            communicator.all_gather(mine, all)
        except LogitlessError as error:
            assert f"call 13 (all_gather of 8 bytes) on rank {rank}" in str(error), error
            assert error.__cause__ is not None
        else:
            raise AssertionError("the group lacks a rank")
    print("ok", flush=True)
    os._exit(0)  # destroying the process group would wait for ranks that are gone
