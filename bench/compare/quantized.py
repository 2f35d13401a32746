#!/usr/bin/env python3
"""Compares a frozen head in 8 bits with the same head in 16 bits: loss and gradient of hidden, through PyTorch.

    LOGITLESS_LIBRARY=build/src/liblogitless.so PYTHONPATH=python python3 bench/compare/quantized.py
        [--tokens N --dim D --vocab V] [--dtype bfloat16|float16|float32] [--device cuda|cpu] [--rounds R]
        [--budget 256MiB ...]

Rows: the head in --dtype, int8 and fp8 with one scale a row, and MXFP8 (scales of 32 columns); torchao's int8 and fp8 where
that is installed. There are rows for the default memory and for each budget. Columns are the median ms over interleaved
rounds, its ratio to the first row, the peak MiB above the inputs (GPU), and an error. It is the relative difference of the
gradient of hidden from that with the dequantised weight.
"""
import argparse
import statistics
import time

import torch

from logitless.torch import QuantizedWeight, linear_cross_entropy


def scaled(w, dtype, groups):
    """Returns w in 8 bits, with the largest magnitude of each of a row's groups as the largest number of the dtype."""
    most = 127.0 if dtype == torch.int8 else torch.finfo(dtype).max
    parts = w.float().view(w.shape[0], groups, -1)
    scale = parts.abs().amax(2, keepdim=True) / most
    if groups > 1:  # powers of two, as MXFP8 has them
        scale = torch.exp2(torch.ceil(torch.log2(scale)))
    data = parts / scale
    data = (data.round() if dtype == torch.int8 else data).to(dtype).view_as(w)
    return QuantizedWeight(data, scale[:, :, 0].to(torch.float8_e8m0fnu if groups > 1 else torch.float32))


def of_torchao(w):
    from torchao.quantization import Float8WeightOnlyConfig, Int8WeightOnlyConfig, quantize_

    for name, config in (("torchao int8", Int8WeightOnlyConfig()), ("torchao fp8", Float8WeightOnlyConfig())):
        layer = torch.nn.Linear(w.shape[1], w.shape[0], bias=False, device=w.device, dtype=w.dtype)
        with torch.no_grad():
            layer.weight.copy_(w)
        quantize_(layer, config)
        yield name, layer.weight.detach()


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--dim", type=int, default=4096)
    parser.add_argument("--vocab", type=int, default=128256)
    parser.add_argument("--dtype", choices=("bfloat16", "float16", "float32"), default="bfloat16")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--budget", nargs="*", default=["256MiB"])
    args = parser.parse_args()

    torch.manual_seed(0)
    dtype, on_gpu = getattr(torch, args.dtype), args.device == "cuda"
    x = torch.randn(args.tokens, args.dim, device=args.device).to(dtype).requires_grad_()
    w = (torch.randn(args.vocab, args.dim, device=args.device) * 2 / args.dim**0.5).to(dtype)
    y = torch.randint(0, args.vocab, (args.tokens,), device=args.device)
    weights = {args.dtype: w, "int8": scaled(w, torch.int8, 1), "fp8": scaled(w, torch.float8_e4m3fn, 1)}
    if args.dim % 32 == 0:
        weights["MXFP8"] = scaled(w, torch.float8_e4m3fn, args.dim // 32)
    try:
        weights.update(of_torchao(w))
    except Exception as error:  # not installed, or without this dtype
        print(f"torchao: not here ({type(error).__name__}: {str(error)[:200]})")

    def synchronize():
        if on_gpu:
            torch.cuda.synchronize()

    def gradient(weight, budget):
        loss = linear_cross_entropy(x, weight, y, memory_budget=budget)
        return torch.autograd.grad(loss, x)[0]

    where = torch.cuda.get_device_name() if on_gpu else "CPU"
    print(f"N {args.tokens}, D {args.dim}, V {args.vocab}, {args.dtype}, PyTorch {torch.__version__}, {where}\n")
    print("| weight | budget | ms | ratio | peak MiB | error |\n|---|---|---|---|---|---|")
    for budget in (None, *args.budget):
        rows = {}
        for name, weight in weights.items():
            try:
                exact = gradient(weight if weight is w else weight.to(dtype) if not isinstance(weight, QuantizedWeight)
                                 else weight.dequantize(dtype), None).double()
                if on_gpu:
                    torch.cuda.empty_cache()
                    torch.cuda.reset_peak_memory_stats()
                before = torch.cuda.memory_allocated() if on_gpu else 0
                found = gradient(weight, budget)
                synchronize()
                peak = (torch.cuda.max_memory_allocated() - before) >> 20 if on_gpu else None
                rows[name] = (peak, ((found.double() - exact).norm() / exact.norm()).item(), [])
            except Exception as error:  # the others are still measured
                print(f"{name}: {type(error).__name__}: {str(error)[:300]}")
        for _ in range(args.rounds):
            for name, (_, _, times) in rows.items():
                synchronize()
                start = time.perf_counter()
                gradient(weights[name], budget)
                synchronize()
                times.append(time.perf_counter() - start)
        first = statistics.median(rows[args.dtype][2])
        for name, (peak, error, times) in rows.items():
            ms = statistics.median(times)
            print(f"| {name} | {budget or 'default'} | {ms * 1e3:.2f} | {ms / first:.2f} | {peak or '-'} | {error:.1e} |")


if __name__ == "__main__":
    main()
