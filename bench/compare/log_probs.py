#!/usr/bin/env python3
"""Compares log-probabilities and entropies of a head, with their gradients, with plain PyTorch and the other packages.

    LOGITLESS_LIBRARY=build/src/liblogitless.so PYTHONPATH=python python3 bench/compare/log_probs.py
        [--tokens N --dim D --vocab V] [--rounds R] [--only TEXT]

The loss is that of a policy gradient with an entropy bonus, -(advantage log p + 0.01 H) summed over tokens. Inputs are
bf16 on a GPU, and the gradients are those of hidden and weight. Contenders, each where its package is installed:
- PyTorch eager, and torch.compile of it
- Liger's scaled cross entropy, by its Hopper kernel where CUTLASS's Python package is there, else by verl's chunks
- linear_logprobs with and without saved exponentials, with and without the gradient of the entropy

Times are medians of R interleaved rounds, each after 100 ms of the same; forward and backward are timed apart. The
peak is that of PyTorch's allocator above the inputs, gradients included. The last columns are the relative errors of
d_hidden of 64 tokens and d_weight of 64 vocabulary entries, in the 2-norm, beside float64.
"""
import argparse
import statistics
import time

import torch
import torch.nn.functional as F


def plain(x, w, y):
    log_p = F.linear(x, w).float().log_softmax(-1)
    return log_p.gather(-1, y[:, None])[:, 0], -(log_p.exp() * log_p).sum(-1)


def contenders():
    from logitless.torch import linear_logprobs

    both = lambda keep: lambda x, w, y: linear_logprobs(x, w, y, keep=keep)[:2]
    first = lambda keep: lambda x, w, y: (linear_logprobs(x, w, y, keep=keep)[0], None)
    yield "logitless", both(None)
    yield "logitless, keep=False", both(False)
    yield "logitless, no entropy", first(None)
    yield "logitless, no entropy, keep=False", first(False)
    yield "PyTorch eager", plain
    yield "torch.compile", torch.compile(plain)
    try:
        from liger_kernel.ops import fused_linear_scaled_cross_entropy as liger
    except ImportError:
        return

    try:
        function = liger._resolve_implementation(torch.device("cuda"))
    except ImportError:
        function = liger._FusedLinearPPOFallbackFunction
    chunks = function is liger._FusedLinearPPOFallbackFunction

    def scaled(x, w, y):
        loss, entropy = function.apply(x, w, y, 1.0, -100, *([] if chunks else [1]), True)
        return -loss, entropy

    yield "Liger's copy of verl's chunks" if chunks else "Liger for Hopper", scaled


def exact(x, w, y, advantage, tokens, entries):
    """Returns d_hidden of some tokens and d_weight of some entries in float64."""
    w64, d_hidden, d_weight = w.double(), [], 0
    for first in range(0, x.shape[0], 512):
        part = slice(first, first + 512)
        log_p = (x[part].double() @ w64.T).log_softmax(-1)
        p = log_p.exp()
        entropy = -(p * log_p).sum(-1, keepdim=True)
        dz = p * (advantage[part].double()[:, None] + 0.01 * (entropy + log_p))
        dz[torch.arange(dz.shape[0], device=dz.device), y[part]] -= advantage[part].double()
        d_weight = d_weight + dz[:, entries].T @ x[part].double()
        d_hidden += [dz[t - first] @ w64 for t in tokens.tolist() if first <= t < first + 512]
    return torch.stack(d_hidden), d_weight


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in (("tokens", 8192), ("dim", 4096), ("vocab", 128256), ("rounds", 7)):
        parser.add_argument("--" + name, type=int, default=default)
    parser.add_argument("--only", default="")
    args = parser.parse_args()
    torch.manual_seed(0)
    x = torch.randn(args.tokens, args.dim, device="cuda").bfloat16().requires_grad_()
    w = (torch.randn(args.vocab, args.dim, device="cuda") * 2 / args.dim**0.5).bfloat16().requires_grad_()
    y = torch.randint(0, args.vocab, (args.tokens,), device="cuda")
    advantage = torch.randn(args.tokens, device="cuda")
    tokens = torch.arange(0, args.tokens, args.tokens // 64)[:64]
    entries = torch.arange(0, args.vocab, args.vocab // 64, device="cuda")[:64]
    right = exact(x.detach(), w.detach(), y, advantage, tokens, entries)
    torch.cuda.empty_cache()

    def step(function, times=None):
        marks = [torch.cuda.Event(enable_timing=True) for _ in range(3)]
        marks[0].record()
        log_prob, entropy = function(x, w, y)
        marks[1].record()
        loss = -(advantage * log_prob).sum()
        if entropy is not None:
            loss = loss - 0.01 * entropy.sum()
        found = torch.autograd.grad(loss, (x, w))
        marks[2].record()
        if times is not None:
            torch.cuda.synchronize()
            times.append((marks[0].elapsed_time(marks[1]), marks[1].elapsed_time(marks[2])))
        return found, entropy is not None

    rows = {}
    for name, function in contenders():
        if args.only not in name:
            continue
        try:
            step(function)
            torch.cuda.synchronize()
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
            found, complete = step(function)
            peak = torch.cuda.max_memory_allocated() - before
        except torch.cuda.OutOfMemoryError:
            print(f"{name}: out of memory")
            continue
        parts = (found[0][tokens.to(x.device)], found[1][entries])
        errors = [((a.double() - b).norm() / b.norm()).item() for a, b in zip(parts, right)]
        errors = [f"{error:.1e}" if complete else "-" for error in errors]
        del found, parts
        rows[name] = (function, [], peak, errors)
    for _ in range(args.rounds):
        for function, times, *_ in rows.values():
            end = time.monotonic() + 0.1
            while time.monotonic() < end:
                step(function)
                torch.cuda.synchronize()
            step(function, times)
    print(f"{torch.cuda.get_device_name()}, {args.tokens} x {args.dim} x {args.vocab}")
    print("| | forward ms | backward ms | both ms | peak MiB | d_hidden | d_weight |\n|---|---|---|---|---|---|---|")
    for name, (_, times, peak, errors) in rows.items():
        forward, backward = (statistics.median(t) for t in zip(*times))
        both = statistics.median(sum(t) for t in times)
        print(f"| {name} | {forward:.2f} | {backward:.2f} | {both:.2f} | {peak / 2**20:.0f} | {' | '.join(errors)} |")


if __name__ == "__main__":
    main()
