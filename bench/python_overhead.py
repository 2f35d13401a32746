#!/usr/bin/env python3
"""Measures the host time of linear_cross_entropy on a tiny problem, forward and backward, and of its C calls. It does the
same for a function that autochunk chunks.

    python bench/python_overhead.py [--sizes N D V] [--dtype DTYPE] [--calls N] [--rounds R] [--device cpu|cuda] [--profile]

Prints medians of rounds in microseconds, until the calls have returned; a GPU may still be busy, but rounds are short
enough for its queue. The rows are:

- forward with a gradient to come, and the C call in it
- forward and backward, and their C calls
- the losses of tokens, and linear_logprobs, both without gradients; linear_logprobs with gradients to come
- the losses of tokens and their sum, forward and backward
- PyTorch's cross_entropy(linear(x, w), y), forward and backward on the same tensors
- a z-loss that autochunk chunks, of tensors and of an nn.Linear that it closes over, forward, and forward and backward;
  the time until the library is called is in parentheses
- the same z-loss by PyTorch

--profile lists where Python spends the time.
"""
import argparse
import cProfile
import pstats
import statistics
import time

import torch
import torch.nn.functional as F
from logitless._compiler import PreparedProgram
from logitless.torch import _engine, autochunk, call, linear_cross_entropy, linear_logprobs


def z_loss_of(logits, target):
    logits = logits.float()
    lse = logits.logsumexp(-1)
    return (lse - logits.gather(-1, target[:, None])[:, 0]).mean() + 1e-4 * lse.square().mean()


def z_loss(hidden, weight, target):
    return z_loss_of(hidden @ weight.T, target)


def time_until_library(way) -> float:
    """Returns the microseconds from the start of a call until it enqueues its first program."""
    enqueue, reached = PreparedProgram.enqueue, []

    def marked(*args):
        reached.append(time.perf_counter())
        return enqueue(*args)

    PreparedProgram.enqueue = marked
    try:
        start = time.perf_counter()
        way()
    finally:
        PreparedProgram.enqueue = enqueue
    return (reached[0] - start) * 1e6


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", type=int, nargs=3, default=[64, 64, 512], metavar=("N", "D", "V"))
    parser.add_argument("--dtype", default="bfloat16", help="of hidden and weight")
    parser.add_argument("--calls", type=int, default=20, help="of a round")
    parser.add_argument("--rounds", type=int, default=101)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--profile", action="store_true")
    args = parser.parse_args()
    torch.set_num_threads(1)
    (tokens, dim, vocab), dtype = args.sizes, getattr(torch, args.dtype)
    hidden = torch.randn(tokens, dim, device=args.device).to(dtype).requires_grad_()
    layer = torch.nn.Linear(dim, vocab, bias=False, device=args.device, dtype=dtype)
    weight = layer.weight
    target = torch.randint(0, vocab, (tokens,), device=args.device)
    linear_cross_entropy(hidden, weight, target)
    planned = _engine.calls.find(call.key_of((hidden, weight, target), {})).planned
    workspace = torch.empty(planned.workspace_bytes, dtype=torch.uint8, device=args.device)
    chunked, of_layer = autochunk(z_loss), autochunk(lambda h, y: z_loss_of(layer(h), y))
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
        "linear_logprobs, forward": lambda: linear_logprobs(hidden, weight, target),
        "losses of tokens, both": step(lambda: linear_cross_entropy(hidden, weight, target, reduction="none").sum()),
        "PyTorch, forward and backward": step(lambda: F.cross_entropy(F.linear(hidden, weight), target)),
        "autochunk, forward": lambda: chunked(hidden, weight, target),
        "autochunk, forward and backward": step(lambda: chunked(hidden, weight, target)),
        "autochunk of a layer, forward": lambda: of_layer(hidden, target),
        "its z-loss by PyTorch, both": step(lambda: z_loss(hidden, weight, target)),
    }
    synchronize = torch.cuda.synchronize if args.device == "cuda" else (lambda: None)
    times = {name: [] for name in ways}
    until = {name: [] for name in ways if name.startswith("autochunk")}
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
            if name in until:
                until[name].append(time_until_library(way))
                synchronize()
    print(f"{args.device}, PyTorch {torch.__version__}, one thread; microseconds of the host a call")
    for name, values in times.items():
        before = f" ({statistics.median(until[name]):.1f})" if name in until else ""
        print(f"{name:32} {statistics.median(values):8.1f}{before}")
    if args.profile:
        profile = cProfile.Profile()
        profile.enable()
        for _ in range(500):
            ways["forward and backward"]()
        profile.disable()
        pstats.Stats(profile).sort_stats("tottime").print_stats(25)


if __name__ == "__main__":
    main()
