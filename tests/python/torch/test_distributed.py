"""DTensor, FSDP2, DDP, lazy heads and communicators on two and four gloo processes; on a Hopper GPU that they share, or one each."""

import multiprocessing
import signal
import time

import pytest
import torch
import torch.distributed as dist
import worker_process
from ports import held_port

# Modules that workers import.
PRELOADED = ["logitless.torch", "torch.distributed.fsdp", "torch.distributed.tensor", "torch.nn.parallel"]


@pytest.fixture(scope="module")
def processes():
    """Importing PyTorch takes longer than most workers run, so one fork server imports it for all."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    return context


@pytest.mark.skipif(not dist.is_available() or not dist.is_gloo_available(), reason="this PyTorch has no gloo")
@pytest.mark.parametrize(
    "name, ranks",
    [
        ("distributed_worker", 2),
        ("distributed_worker", 4),
        ("distributed_lazy_worker", 2),
        ("tensor_parallel_worker", 2),
        ("communicator_worker", 2),
        ("sharded_worker", 2),
        ("sharded_worker", 4),
        ("sampled_over_ranks_worker", 2),
        ("sampled_over_ranks_worker", 4),
        ("sharded_far_worker", 2),
        ("sharded_far_worker", 3),
        ("far_replicas_worker", 2),
        ("losses_worker", 2),
        ("sharded_gpu_worker", 1),
        ("sharded_gpu_worker", 2),
        ("sharded_gpu_worker", 3),
        ("sharded_far_gpu_worker", 2),
        ("sharded_far_gpu_worker", 3),
        ("faults_gpu_worker", 2),
    ],
)
def test_processes(name, ranks, processes, tmp_path):
    if "gpu" in name and (not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0)):
        pytest.skip("no Hopper GPU")
    if "gpu" not in name and torch.get_default_device().type != "cpu":
        pytest.skip("of the CPU")
    if name.startswith("faults") and torch.cuda.device_count() < ranks:
        pytest.skip(f"{ranks} GPUs are wanted")
    outputs = [tmp_path / str(rank) for rank in range(ranks)]
    with held_port() as port:
        running = [
            processes.Process(target=worker_process.work, args=(name, str(output), rank, str(port), ranks))
            for rank, output in enumerate(outputs)
        ]
        for p in running:
            p.start()
        end = time.monotonic() + 300
        try:
            for p in running:
                p.join(max(end - time.monotonic(), 0))
        finally:
            for p in running:
                p.kill()
    for p, output in zip(running, outputs):
        said = output.read_text()
        killed = name.startswith("faults") and p is running[-1]  # a pytest run of its own
        assert p.exitcode == (-signal.SIGKILL if killed else 0) and said.rstrip().endswith("ok"), said
