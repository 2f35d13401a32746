#!/usr/bin/env python3
"""What Python adds to a call: linear_cross_entropy on a tiny problem, against the C call inside it, in one process.

    python bench/python_overhead.py [--calls N] [--device cpu|cuda]

Prints medians of rounds in microseconds: the whole call with a gradient to come, the C call alone, their difference; and
PyTorch's cross_entropy(linear(x, w), y) on the same tensors.
"""
import argparse
import statistics
import time

import torch
import torch.nn.functional as F
from logitless.torch import linear_cross_entropy
from logitless.torch import _fast


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--calls", type=int, default=1000, help="of a round")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    args = parser.parse_args()
    torch.set_num_threads(1)
    hidden = torch.randn(4, 8, device=args.device, requires_grad=True)
    weight = torch.randn(16, 8, device=args.device, requires_grad=True)
    target = torch.tensor([1, 2, 3, 4], device=args.device)
    linear_cross_entropy(hidden, weight, target)
    (call,) = _fast._thread.calls.values()
    workspace = torch.empty(call.call.workspace_bytes, dtype=torch.uint8, device=args.device)

    def rounds(function):
        function()
        start = time.perf_counter()
        for _ in range(args.calls):
            function()
        if args.device == "cuda":
            torch.cuda.synchronize()
        return (time.perf_counter() - start) / args.calls * 1e6

    def c_call():
        call.call.run_function(*call.call.arguments, workspace.data_ptr(), call.call.workspace_bytes, *call.call.extra)

    whole, inside, plain = [], [], []
    for _ in range(9):
        whole.append(rounds(lambda: linear_cross_entropy(hidden, weight, target)))
        kept = call.run(hidden, weight, None, target)  # memory that the C call may write to
        inside.append(rounds(c_call))
        del kept
        plain.append(rounds(lambda: F.cross_entropy(F.linear(hidden, weight), target)))
    extra = statistics.median(a - b for a, b in zip(whole, inside))
    print(
        f"{args.device}, PyTorch {torch.__version__}: linear_cross_entropy {statistics.median(whole):.1f} us, the C call "
        f"{statistics.median(inside):.1f} us, difference {extra:.1f} us; cross_entropy(linear) {statistics.median(plain):.1f} us"
    )


if __name__ == "__main__":
    main()
