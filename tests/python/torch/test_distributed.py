"""DTensor, FSDP2, DDP, lazy heads and communicators on two and four gloo processes."""

import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch.distributed as dist


@pytest.mark.skipif(not dist.is_available() or not dist.is_gloo_available(), reason="this PyTorch has no gloo")
@pytest.mark.parametrize(
    "name, ranks",
    [
        ("distributed_worker.py", 2),
        ("distributed_worker.py", 4),
        ("distributed_lazy_worker.py", 2),
        ("communicator_worker.py", 2),
    ],
)
def test_processes(name, ranks):
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = str(s.getsockname()[1])
    worker = str(Path(__file__).parent / name)
    processes = [
        subprocess.Popen([sys.executable, worker, str(rank), port, str(ranks)], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        for rank in range(ranks)
    ]
    try:
        outputs = [p.communicate(timeout=300)[0] for p in processes]
    finally:
        for p in processes:
            p.kill()
    for p, output in zip(processes, outputs):
        assert p.returncode == 0 and output.rstrip().endswith("ok"), output
