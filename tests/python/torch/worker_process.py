"""The processes of test_distributed.py."""

import importlib
import os

import torch
import torch.distributed as dist

OWN_GROUPS = "communicator_worker", "faults_gpu_worker"  # they make and leave their group themselves


def work(name: str, output: str, rank: int, port: str, ranks: int) -> None:
    """Runs main(rank, ranks) of the module `name` in a group of all ranks. Its output goes to the file `output`, and ends
    with "ok" if all checks pass."""
    with open(output, "wb") as file:
        for stream in (1, 2):
            os.dup2(file.fileno(), stream)
    os.environ.update(
        MASTER_ADDR="127.0.0.1", MASTER_PORT=port, RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(ranks))
    main = importlib.import_module(name).main
    if name in OWN_GROUPS:
        main(rank, ranks)
        return
    backend = "gloo"
    if "gpu" in name:
        apart = torch.cuda.device_count() >= ranks  # NCCL needs a GPU for each rank
        torch.cuda.set_device(rank if apart else 0)
        backend = "nccl" if apart else "gloo"
    else:
        torch.set_num_threads(1)
    dist.init_process_group(backend, rank=rank, world_size=ranks)
    main(rank, ranks)
    dist.destroy_process_group()
    print("ok", flush=True)
