#!/usr/bin/env python3
"""Measures linear_cross_entropy of fp32 products on a GPU by its precision, beside PyTorch's plain loss.

    python bench/compare/head_fp32.py [--tokens N --dim D --vocab V] [--hidden DTYPE] [--weight DTYPE]
                                      [--precision P ...] [--budget BYTES ...] [--repeat R]

Inputs are random and fresh, fp32, or one of them of 16 bits, which the plain loss casts to fp32. A budget of 0 is none.
Prints:

- the median ms of forward and backward
- the peak MiB of PyTorch's allocator beyond inputs and gradients
- the relative L2 errors of both gradients of 256 tokens against float64
"""
import argparse
import statistics

import torch
import torch.nn.functional as F
from logitless.torch import linear_cross_entropy


def median_ms(run, repeat):
    times = []
    for _ in range(1 + repeat):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        run()
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end))
    return statistics.median(times[1:])


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in (("tokens", 2048), ("dim", 4096), ("vocab", 128256)):
        parser.add_argument(f"--{name}", type=int, default=default)
    for name in ("hidden", "weight"):
        parser.add_argument(f"--{name}", default="float32", choices=("float32", "bfloat16", "float16"))
    parser.add_argument("--precision", nargs="+", default=["ieee", "bf16x3", "tf32"])
    parser.add_argument("--budget", nargs="+", default=["0", "512MiB", "3GiB"])
    parser.add_argument("--repeat", type=int, default=5)
    args = parser.parse_args()
    torch.manual_seed(0)
    hidden = torch.randn(args.tokens, args.dim, device="cuda").to(getattr(torch, args.hidden)).requires_grad_()
    weight = (torch.randn(args.vocab, args.dim, device="cuda") / args.dim**0.5).to(getattr(torch, args.weight)).requires_grad_()
    target = torch.randint(args.vocab, (args.tokens,), device="cuda")

    def plain(tf32):
        torch.backends.cuda.matmul.allow_tf32 = tf32
        F.cross_entropy(hidden.float() @ weight.float().T, target).backward()
        torch.backends.cuda.matmul.allow_tf32 = False

    def ours(precision, budget):
        linear_cross_entropy(hidden, weight, target, precision=precision, memory_budget=budget).backward()

    runs = {f"PyTorch, {'TF32' if tf32 else 'fp32'}": lambda tf32=tf32: plain(tf32) for tf32 in (False, True)}
    for precision in args.precision:
        for budget in args.budget:
            given = None if budget == "0" else budget
            runs[f"{precision}, {given or 'no budget'}"] = lambda p=precision, b=given: ours(p, b)
    print(f"{args.tokens} x {args.dim} x {args.vocab}, {args.hidden} hidden x {args.weight} weight, PyTorch {torch.__version__}, "
          f"{torch.cuda.get_device_name()}")
    gradients = sum(t.numel() * t.element_size() for t in (hidden, weight))
    for name, run in runs.items():
        hidden.grad = weight.grad = None
        torch.cuda.empty_cache()
        run()
        hidden.grad = weight.grad = None
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        run()
        peak = torch.cuda.max_memory_allocated() - before - gradients

        def step(run=run):
            hidden.grad = weight.grad = None
            run()

        print(f"  {name:22s} {median_ms(step, args.repeat):8.2f} ms {peak / 2**20:8.0f} MiB", flush=True)
    hidden.grad = weight.grad = None
    torch.cuda.empty_cache()
    few = hidden.detach()[:256].requires_grad_()
    exact = torch.autograd.grad(F.cross_entropy(few.double() @ weight.double().T, target[:256]), (few, weight))
    for precision in args.precision:
        found = torch.autograd.grad(linear_cross_entropy(few, weight, target[:256], precision=precision), (few, weight))
        errors = [((a - b).norm() / b.norm()).item() for a, b in zip(found, exact)]
        print(f"  {precision:22s} d_hidden {errors[0]:.1e}, d_weight {errors[1]:.1e}")


if __name__ == "__main__":
    main()
