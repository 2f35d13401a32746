#!/usr/bin/env python3
"""Measures the host time of linear_cross_entropy on a tiny problem, forward and backward, and of its C calls.

    python bench/python_overhead.py [--calls N] [--rounds R] [--device cpu|cuda] [--profile]

Prints medians of rounds in microseconds, until the calls have returned; a GPU may still be busy, but rounds are short
enough for its queue. The rows are:

- forward with a gradient to come, and the C call in it
- forward and backward, and their C calls
- the losses of tokens, and linear_logprobs, both without gradients
- PyTorch's cross_entropy(linear(x, w), y), forward and backward on the same tensors

--profile lists where Python spends the time.
"""
import argparse
import cProfile
import pstats
import statistics
import time

import torch
import torch.nn.functional as F
from logitless.torch import _engine, call, linear_cross_entropy, linear_logprobs


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--calls", type=int, default=20, help="of a round")
    parser.add_argument("--rounds", type=int, default=101)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--profile", action="store_true")
    args = parser.parse_args()
    torch.set_num_threads(1)
    hidden = torch.randn(64, 64, device=args.device).bfloat16().requires_grad_()
    weight = torch.randn(512, 64, device=args.device).bfloat16().requires_grad_()
    target = torch.randint(0, 512, (64,), device=args.device)
    linear_cross_entropy(hidden, weight, target)
    planned = _engine.calls.find(call.key_of((hidden, weight, target), {})).planned
    workspace = torch.empty(planned.workspace_bytes, dtype=torch.uint8, device=args.device)
    made = None
    factor = torch.full((), 1.0, device=args.device)

    def step(loss):
        def run():
            hidden.grad = weight.grad = None
            loss().backward()

        return run

    def fresh():
        """Allocates the outputs of the C calls and keeps them alive: each call of another row leaves its own
        addresses in the arguments."""
        nonlocal made
        made = planned.replay((hidden, weight, target))

    def c_call():
        planned.run_function(*planned.arguments, workspace.data_ptr(), planned.workspace_bytes, *planned.extra)

    def c_calls():
        c_call()
        _engine.scale(made[1:], factor)

    ways = {
        "forward": lambda: linear_cross_entropy(hidden, weight, target),
        "its C call": c_call,
        "forward and backward": step(lambda: linear_cross_entropy(hidden, weight, target)),
        "their C calls": c_calls,
        "losses of tokens, no gradients": torch.no_grad()(
            lambda: linear_cross_entropy(hidden, weight, target, reduction="none")),
        "linear_logprobs, no gradients": torch.no_grad()(lambda: linear_logprobs(hidden, weight, target)),
        "PyTorch, forward and backward": step(lambda: F.cross_entropy(F.linear(hidden, weight), target)),
    }
    synchronize = torch.cuda.synchronize if args.device == "cuda" else (lambda: None)
    times = {name: [] for name in ways}
    for _ in range(args.rounds):
        for name, way in ways.items():
            fresh()
            way()
            synchronize()
            start = time.perf_counter()
            for _ in range(args.calls):
                way()
            times[name].append((time.perf_counter() - start) / args.calls * 1e6)
            synchronize()
    print(f"{args.device}, PyTorch {torch.__version__}, one thread; microseconds of the host a call")
    for name, values in times.items():
        print(f"{name:32} {statistics.median(values):8.1f}")
    if args.profile:
        profile = cProfile.Profile()
        profile.enable()
        for _ in range(500):
            ways["forward and backward"]()
        profile.disable()
        pstats.Stats(profile).sort_stats("tottime").print_stats(25)


if __name__ == "__main__":
    main()
