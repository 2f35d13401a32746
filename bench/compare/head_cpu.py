#!/usr/bin/env python3
"""Compares the head on the CPU with PyTorch in bf16, forward and backward, in one run.

    python3 bench/compare/head_cpu.py --bench build/bench/bench_head [--tokens N --dim D --vocab V --threads T --repeat R]

Times cross_entropy(linear(x, w).float(), y) and, where this PyTorch has it, every chunking of linear_cross_entropy,
interleaved with runs of bench_head. Prints medians and their ratios. Inputs are random and fresh. Leave OMP_PROC_BIND
unset: with it, idle threads of PyTorch spin on the cores that bench_head runs on.
"""
import argparse
import json
import resource
import statistics
import subprocess
import time


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--bench", required=True, help="path of bench_head")
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--dim", type=int, default=2048)
    parser.add_argument("--vocab", type=int, default=65536)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--repeat", type=int, default=3)
    args = parser.parse_args()

    import torch
    import torch.nn.functional as F

    torch.set_num_threads(args.threads)
    torch.manual_seed(0)
    x = torch.randn(args.tokens, args.dim).bfloat16().requires_grad_()
    w = (torch.randn(args.vocab, args.dim) * 2 / args.dim**0.5).bfloat16().requires_grad_()
    y = torch.randint(0, args.vocab, (args.tokens,))

    runs = {"cross_entropy(linear.float())": lambda: F.cross_entropy(F.linear(x, w).float(), y)}
    if hasattr(F, "linear_cross_entropy"):
        runs["linear_cross_entropy, reference"] = lambda: F.linear_cross_entropy(x, w, y)
        options = torch.nn.LinearCrossEntropyOptions
        runs["linear_cross_entropy, default chunks"] = lambda: F.linear_cross_entropy(x, w, y, options=options())
        for policy in ("accurate", "balanced"):
            for size in sorted({min(512, args.tokens), min(2048, args.tokens)}):
                chunked = options(batch_chunk_size=size, chunking_method=None, acc_policy=policy)
                runs[f"linear_cross_entropy, {policy}, chunks of {size}"] = lambda chunked=chunked: F.linear_cross_entropy(
                    x, w, y, options=chunked)
    times = {name: [] for name in runs}
    ours = {}
    slow = set()
    for repeat in range(-1, args.repeat):
        for name, run in runs.items():
            if name in slow:
                continue
            x.grad = w.grad = None
            start = time.perf_counter()
            try:
                run().backward()
            except Exception as error:  # a chunking that this version lacks
                if repeat < 0:
                    print(f"{name}: {type(error).__name__}: {str(error)[:200]}")
                continue
            # A very slow run is timed once.
            seconds = time.perf_counter() - start
            if repeat >= 0 or seconds > 15:
                times[name].append(seconds)
            if seconds > 15:
                slow.add(name)
        if repeat >= 0:
            command = [args.bench, "--json", "--repeat", "1"]
            for key in ("tokens", "dim", "vocab", "threads"):
                command += [f"--{key}", str(getattr(args, key))]
            report = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
            for row in report["rows"]:
                ours.setdefault(row["name"], []).append(row["seconds"])

    print(f"torch {torch.__version__}, {args.tokens} tokens x vocabulary {args.vocab} x {args.dim}, bf16, {args.threads} threads")
    dense = statistics.median(ours["dense"])
    for name, seconds in list(ours.items()) + list(times.items()):
        if seconds:
            median = statistics.median(seconds)
            print(f"{name:40s} {median:9.4f} s  {median / dense:6.2f} x dense")
    print(f"peak resident of the torch process: {resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024:.0f} MiB")


main()
