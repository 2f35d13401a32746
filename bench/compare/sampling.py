#!/usr/bin/env python3
"""Compares linear_sample and linear_top_logprobs with the GEMM of the logits, linear_logprobs, and samples of all logits.

    python bench/compare/sampling.py [--tokens N ... --dim D --vocab V] [--dtype T] [--device cuda|cpu] [--repeat R]

Inputs are random and fresh. Prints the median ms of each, by wall clock with a synchronisation, after three warm-ups.
"""
import argparse
import statistics
import time

import torch
from logitless.torch import linear_logprobs, linear_sample, linear_top_logprobs


def median_ms(run, device, repeat):
    times = []
    for round_ in range(3 + repeat):
        start = time.perf_counter()
        run()
        if device == "cuda":
            torch.cuda.synchronize()
        if round_ >= 3:
            times.append(1e3 * (time.perf_counter() - start))
    return statistics.median(times)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, nargs="+", default=[256, 2048])
    parser.add_argument("--dim", type=int, default=4096)
    parser.add_argument("--vocab", type=int, default=128256)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--repeat", type=int, default=9)
    args = parser.parse_args()
    dtype = getattr(torch, args.dtype)
    weight = (torch.randn(args.vocab, args.dim, device=args.device) * 2 / args.dim**0.5).to(dtype)
    for tokens in args.tokens:
        hidden = torch.randn(tokens, args.dim, device=args.device).to(dtype)
        target = torch.randint(0, args.vocab, (tokens,), device=args.device)
        runs = {
            "GEMM of the logits": lambda: hidden @ weight.T,
            "linear_logprobs": lambda: linear_logprobs(hidden, weight, target),
            "softmax of all logits, multinomial": lambda: torch.multinomial((hidden @ weight.T).float().softmax(-1), 1),
            "linear_sample, greedy": lambda: linear_sample(hidden, weight, temperature=0.0),
            "linear_sample": lambda: linear_sample(hidden, weight, seed=1),
            "linear_sample, top_p 0.9": lambda: linear_sample(hidden, weight, seed=1, top_p=0.9),
            "linear_sample, top_k 50, top_p 0.9": lambda: linear_sample(hidden, weight, seed=1, top_k=50, top_p=0.9),
            "linear_top_logprobs, k 5": lambda: linear_top_logprobs(hidden, weight, target, k=5),
        }
        print(f"{tokens} x {args.dim} x {args.vocab}, {args.dtype}, {args.device}")
        with torch.no_grad():
            for name, run in runs.items():
                print(f"  {name:36s} {median_ms(run, args.device, args.repeat):8.2f} ms", flush=True)


if __name__ == "__main__":
    main()
