#!/usr/bin/env python3
"""Compares log-probabilities of few tokens, as a sampler asks for them, with the product of their logits alone, on a GPU.

    LOGITLESS_LIBRARY=build/src/liblogitless.so PYTHONPATH=python python3 bench/compare/few_tokens.py
        [--dim D --vocab V] [--tokens N ...] [--dtype bfloat16|float16]

Columns are milliseconds of the product, of log_softmax of its fp32 logits, of linear_logprobs, and of replays of a CUDA graph
of that. The last is the ratio of these replays to the product's. A call takes the host's time where that is longer. Medians of
5 rounds of 20 calls.
"""
import argparse
import statistics

import torch

from logitless.torch import linear_logprobs


def timed(run, calls=20, rounds=5):
    for _ in range(4):
        run()
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    times = []
    for _ in range(rounds):
        torch.cuda.synchronize()
        begin.record()
        for _ in range(calls):
            run()
        end.record()
        torch.cuda.synchronize()
        times.append(begin.elapsed_time(end) / calls)
    return statistics.median(times)


def captured(run):
    """Returns a function that replays a call."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        run()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    return graph.replay


@torch.no_grad()
def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dim", type=int, default=4096)
    parser.add_argument("--vocab", type=int, default=128256)
    parser.add_argument("--tokens", type=int, nargs="+", default=[1, 8, 32, 64, 128, 160, 192, 256, 320, 512, 1024])
    parser.add_argument("--dtype", choices=("bfloat16", "float16"), default="bfloat16")
    args = parser.parse_args()
    dtype = getattr(torch, args.dtype)
    w = (torch.randn(args.vocab, args.dim, device="cuda") * 2 / args.dim**0.5).to(dtype)
    print(f"D {args.dim}, V {args.vocab}, {args.dtype}, PyTorch {torch.__version__}, {torch.cuda.get_device_name()}\n")
    print("| tokens | product | log_softmax | linear_logprobs | in a graph | ratio |\n|---|---|---|---|---|---|")
    for tokens in args.tokens:
        x = torch.randn(tokens, args.dim, device="cuda").to(dtype)
        y = torch.randint(0, args.vocab, (tokens,), device="cuda")
        product = lambda: x @ w.T
        plain = lambda: torch.log_softmax((x @ w.T).float(), -1).gather(1, y[:, None])
        ours = lambda: linear_logprobs(x, w, y)
        times = [timed(run) for run in (product, plain, ours, captured(ours))]
        ratio = times[3] / timed(captured(product))
        print(f"| {tokens} | {' | '.join(f'{t:.3f}' for t in times)} | {ratio:.2f} |", flush=True)


if __name__ == "__main__":
    main()
