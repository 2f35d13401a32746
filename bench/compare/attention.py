"""Compares attention on a GPU with PyTorch's: forward and backward of bench_attention's shapes, bf16, causal.

    python3 bench/compare/attention.py [--bench build/bench/bench_attention] [--rounds 11]

Prints one table. PyTorch runs scaled_dot_product_attention with one backend at a time. Its q, k, v are views
[B, H, T, D] of [B, T, H, D], and it handles grouped heads by enable_gqa. Times are medians of 10 calls; causal work
counts half.
"""

import argparse
import json
import statistics
import subprocess

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

BACKENDS = {"flash": SDPBackend.FLASH_ATTENTION, "cudnn": SDPBackend.CUDNN_ATTENTION}


def milliseconds(rounds, call):
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    times = []
    spent = 0.0
    while spent < 50.0 or len(times) < rounds:
        begin.record()
        for _ in range(10):
            call()
        end.record()
        end.synchronize()
        taken = begin.elapsed_time(end)
        if spent >= 50.0:
            times.append(taken / 10)
        spent += taken
    return statistics.median(times)


def measure(shape, backend, deterministic, rounds):
    b, h, kv, t, d = (shape[name] for name in ("batch", "heads", "kv_heads", "length", "dim"))
    torch.use_deterministic_algorithms(deterministic)

    def tensor(heads):
        return torch.randn(b, t, heads, d, device="cuda", dtype=torch.bfloat16).transpose(1, 2).requires_grad_()

    q, k, v, d_out = tensor(h), tensor(kv), tensor(kv), tensor(h).detach()
    product = b * h * t * t * d * (1.0 if shape["causal"] else 2.0)
    with sdpa_kernel([BACKENDS[backend]]):

        def forward():
            return scaled_dot_product_attention(q, k, v, is_causal=shape["causal"], enable_gqa=h != kv)

        with torch.no_grad():
            forward_ms = milliseconds(rounds, forward)
        out = forward()
        backward_ms = milliseconds(rounds, lambda: torch.autograd.grad(out, (q, k, v), d_out, retain_graph=True))
    return (forward_ms, 2 * product / forward_ms * 1e-9, backward_ms, 5 * product / backward_ms * 1e-9)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--bench", default="build/bench/bench_attention")
    parser.add_argument("--rounds", type=int, default=11)
    options = parser.parse_args()
    output = subprocess.run([options.bench, "--rounds", str(options.rounds)], check=True, capture_output=True, text=True)
    print(f"{torch.cuda.get_device_name()}, PyTorch {torch.__version__}, cuDNN {torch.backends.cudnn.version()}")
    print("| B, H / Hkv, T, D | | forward ms | TFLOP/s | backward ms | TFLOP/s |\n|---|---|---|---|---|---|")
    for line in output.stdout.splitlines():
        s = json.loads(line)
        name = f"{s['batch']}, {s['heads']} / {s['kv_heads']}, {s['length']}, {s['dim']}"
        rows = [("logitless", (s["forward_ms"], s["forward_tflops"], s["backward_ms"], s["backward_tflops"]))]
        for backend in BACKENDS:
            for deterministic in (False, True):
                label = f"PyTorch, {backend}" + (", deterministic" if deterministic else "")
                try:
                    rows.append((label, measure(s, backend, deterministic, options.rounds)))
                except RuntimeError as error:
                    rows.append((label + ": " + str(error).splitlines()[0], (0.0,) * 4))
        for label, (forward, forward_rate, backward, backward_rate) in rows:
            print(f"| {name} | {label} | {forward:.3f} | {forward_rate:.0f} | {backward:.3f} | {backward_rate:.0f} |",
                  flush=True)


if __name__ == "__main__":
    main()
