#!/usr/bin/env python3
"""Compares a head that is sharded over processes as vocabulary-parallel and as weight-gathered: loss and gradients of a
batch for each rank. So does it a divergence from a teacher whose head is sharded as well. Uses gloo on the CPU, or NCCL with a GPU for each process (bfloat16). With one process it measures
the cost of exchanges and merges, compared with a call without them.

    LOGITLESS_LIBRARY=build/src/liblogitless.so PYTHONPATH=python python3 bench/compare/sharded.py
        [--device cpu|cuda] [--ranks 2] [--tokens N] [--dim D] [--vocab V] [--repeat R]
        [--loss cross_entropy|forward_kl|reverse_kl|jsd|total_variation]

Prints medians of R interleaved rounds on rank 0, after a warm-up of each, and with GPUs its peak memory beyond inputs,
gradients included; on the CPU with one thread per process.
"""
import argparse
import multiprocessing
import os
import statistics
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist


def work(rank, args, port):
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), RANK=str(rank), WORLD_SIZE=str(args.ranks))
    torch.set_num_threads(1)
    gpu = args.device == "cuda"
    if gpu:
        torch.cuda.set_device(rank)
    dist.init_process_group("nccl" if gpu else "gloo", rank=rank, world_size=args.ranks)
    torch.set_default_device(args.device)
    from logitless.torch import Sharding, linear_cross_entropy, losses
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    dtype = torch.bfloat16 if gpu else torch.float32
    mesh = init_device_mesh(args.device, (args.ranks,))
    torch.manual_seed(0)
    weight = (torch.randn(args.vocab, args.dim) * args.dim**-0.5).to(dtype)
    torch.manual_seed(rank + 1)
    hidden = torch.randn(args.tokens, args.dim).to(dtype).requires_grad_()
    target = torch.randint(0, args.vocab, (args.tokens,))
    alone = args.ranks == 1
    shard = lambda rows: rows if alone else distribute_tensor(rows, mesh, [Shard(0)])
    divergence = args.loss != "cross_entropy"
    if divergence:
        teacher_hidden = torch.randn(args.tokens, args.dim).to(dtype)
        torch.manual_seed(args.ranks + 1)
        teacher = shard((torch.randn(args.vocab, args.dim) * args.dim**-0.5).to(dtype))
    sharded = shard(weight).requires_grad_()
    del weight

    def step(gather):
        sharded.grad = hidden.grad = None
        whole = lambda rows: rows.redistribute(mesh, [Replicate()]) if gather and not alone else rows
        sharding = Sharding(dist.group.WORLD, tokens=True) if alone and not gather else None
        if divergence:
            loss = getattr(losses, f"{args.loss}_loss")
            loss(hidden, whole(sharded), teacher_hidden, whole(teacher), sharding=sharding).backward()
        else:
            linear_cross_entropy(hidden, whole(sharded), target, sharding=sharding).backward()
        if gpu:
            torch.cuda.synchronize()

    other = "alone" if alone else "gathered"
    times, peaks = {"stays": [], other: []}, {}
    for turn in range(args.repeat + 1):
        for name in times:
            sharded.grad = hidden.grad = None
            if gpu:
                torch.cuda.reset_peak_memory_stats()
                before = torch.cuda.memory_allocated()
            dist.barrier()
            start = time.perf_counter()
            step(name == other)
            if turn:
                times[name].append(time.perf_counter() - start)
            if gpu:
                peaks[name] = f", {(torch.cuda.max_memory_allocated() - before) / 2**20:8.1f} MiB"
    if rank == 0:
        print(f"torch {torch.__version__}, {args.ranks} processes, {args.tokens} tokens each, a vocabulary of {args.vocab}, dim {args.dim}")
        for name, found in times.items():
            print(f"  {args.loss}, {name:9} {statistics.median(found) * 1e3:8.1f} ms{peaks.get(name, '')}")
    dist.destroy_process_group()


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, value in (("ranks", 2), ("tokens", 256), ("dim", 256), ("vocab", 64000), ("repeat", 7)):
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--loss", default="cross_entropy", choices=("cross_entropy", "forward_kl", "reverse_kl", "jsd", "total_variation"))
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    args = parser.parse_args()
    sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tests/python/support"))
    from ports import held_port

    start = multiprocessing.get_context("spawn")
    with held_port() as port:
        processes = [start.Process(target=work, args=(rank, args, port)) for rank in range(args.ranks)]
        for p in processes:
            p.start()
        for p in processes:
            p.join()


if __name__ == "__main__":
    main()
