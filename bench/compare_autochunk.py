#!/usr/bin/env python3
"""logitless.torch.autochunk by its two executors against the function it is given: loss and gradients, eagerly.

    python bench/compare_autochunk.py [--loss z_loss|dpo] [--tokens N --dim D --vocab V] [--dtype T] [--device cpu|cuda]
                                      [--budget BYTES ...] [--chunks N ...] [--executors python native] [--repeat R]

Random and fresh; a budget of 0 is none; chunks are forced ones, which take heads off the engine. Each is run R times by turns; prints median ms of forward and backward, the ratio to
the function itself, and what it takes at its peak beyond inputs (gradients among it): of CUDA's allocator, or on a CPU
of the compiled plan alone, beyond inputs and results. What runs out of memory is said to.
"""
import argparse
import statistics
import time

import torch
import torch.nn.functional as F
from logitless.torch import autochunk


def z_loss(hidden, weight, target, *ignored):
    """The mean cross entropy with a z-loss."""
    logits = (hidden @ weight.T).float()
    return F.cross_entropy(logits, target) + 1e-4 * logits.logsumexp(-1).square().mean()


def log_probability(hidden, weight, target):
    logits = (hidden @ weight.T).float()
    return logits.log_softmax(-1).gather(-1, target[:, None]).squeeze(-1).view(16, -1).sum(1)


def dpo(hidden, weight, target, reference, reference_weight):
    """8 chosen and 8 rejected sequences against a reference with a head of its own."""
    margin = log_probability(hidden, weight, target) - log_probability(reference, reference_weight, target)
    return -F.logsigmoid(0.1 * (margin[:8] - margin[8:])).mean()


LOSSES = {f.__name__: f for f in (z_loss, dpo)}


def problem(args):
    generator = torch.Generator(args.device).manual_seed(0)
    dtype = getattr(torch, args.dtype)

    def normal(rows, scale):
        made = torch.randn(rows, args.dim, generator=generator, device=args.device, dtype=torch.float32)
        return made.mul_(scale).to(dtype)

    scale = 2 / args.dim**0.5
    hidden, weight = normal(args.tokens, 1).requires_grad_(), normal(args.vocab, scale).requires_grad_()
    target = torch.randint(args.vocab, (args.tokens,), generator=generator, device=args.device)
    given = [hidden, weight, target]
    return given + [normal(args.tokens, 1), normal(args.vocab, scale)] if args.loss == "dpo" else given


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--loss", choices=sorted(LOSSES), default="z_loss")
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--dim", type=int, default=256)
    parser.add_argument("--vocab", type=int, default=16384)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--budget", nargs="*", default=["0", "64MiB"])
    parser.add_argument("--chunks", nargs="*", type=int, default=[])
    parser.add_argument("--executors", nargs="+", default=["python", "native"])
    parser.add_argument("--repeat", type=int, default=7)
    parser.add_argument("--explain", action="store_true", help="print what was done")
    args = parser.parse_args()
    gpu = args.device == "cuda"
    loss, given = LOSSES[args.loss], problem(args)
    runs = {"the function": loss}
    for budget in args.budget:
        for executor in args.executors:
            name = f"autochunk, {executor}, {'no budget' if budget == '0' else budget}"
            runs[name] = autochunk(loss, memory_budget=None if budget == "0" else budget, executor=executor)

    for chunks in args.chunks:
        for executor in args.executors:
            runs[f"autochunk, {executor}, {chunks} chunks"] = autochunk(loss, chunks=chunks, executor=executor)

    def step(function):
        given[0].grad = given[1].grad = None
        function(*given).backward()

    times, peaks = {}, {}
    for turn in range(args.repeat + 1):
        for name, function in runs.items():
            given[0].grad = given[1].grad = None
            if times.get(name, []) is None:
                continue
            if gpu:
                torch.cuda.synchronize()
                torch.cuda.reset_peak_memory_stats()
                before = torch.cuda.memory_allocated()
            start = time.perf_counter()
            try:
                step(function)
            except torch.OutOfMemoryError:
                times[name] = None
                continue
            if gpu:
                torch.cuda.synchronize()
            times.setdefault(name, [])
            if turn > 0:
                times[name].append(time.perf_counter() - start)
            if gpu:
                peaks[name] = torch.cuda.max_memory_allocated() - before
            elif function is not loss:
                peaks[name] = function.last.forward.after
    kind = torch.cuda.get_device_name() if gpu else f"CPU, {torch.get_num_threads()} threads"
    print(f"{args.loss}, {args.tokens} x {args.dim} x {args.vocab}, {args.dtype}, PyTorch {torch.__version__}, {kind}")
    first = None if times["the function"] is None else statistics.median(times["the function"])
    for name, found in times.items():
        if found is None:
            print(f"{name:36} out of memory", flush=True)
            continue
        median = statistics.median(found)
        ratio = f"{median / first:6.2f}" if first else ""
        held = f"{peaks[name] / 2**20:9.1f} MiB" if name in peaks else ""
        print(f"{name:36} {median * 1e3:9.1f} ms {ratio} {held}", flush=True)
        if args.explain and runs[name] is not loss:
            print(runs[name].explain(), flush=True)


if __name__ == "__main__":
    main()
