#!/usr/bin/env python3
"""Compares a training step of GPT-2 (124M) on the CPU with PyTorch's, forward and backward, interleaved in one run.

    python3 bench/compare/training_cpu.py --logitless build/src/cli/logitless [--batch B --length T --threads N]
                                         [--rounds R] [--dtype bf16|f32|both]

A round times one step of PyTorch (bf16: autocast over fp32 weights; f32: plain) after a warm-up step, and
`logitless compile --model gpt2 --time 1`, with fp32 weights and the same dtype of activations. Neither updates weights.
Tokens are random. Prints the rounds, medians and the median of the rounds' ratios. On a busy machine PyTorch's threads
wait for each other and the ratio is unreliable: compare processor time with one thread instead. Leave OMP_PROC_BIND
unset: with it, idle threads of PyTorch spin on the cores that logitless runs on.
"""
import argparse
import re
import statistics
import subprocess
import time

DIM, HEADS, LAYERS, VOCAB = 768, 12, 12, 50257


def make_gpt(length):
    import torch.nn as nn
    import torch.nn.functional as F

    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.ln_1, self.ln_2 = nn.LayerNorm(DIM), nn.LayerNorm(DIM)
            self.attention, self.projection = nn.Linear(DIM, 3 * DIM), nn.Linear(DIM, DIM)
            self.up, self.down = nn.Linear(DIM, 4 * DIM), nn.Linear(4 * DIM, DIM)

        def forward(self, x):
            batch, tokens, _ = x.shape
            q, k, v = (part.view(batch, tokens, HEADS, DIM // HEADS).transpose(1, 2)
                       for part in self.attention(self.ln_1(x)).split(DIM, -1))
            y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
            x = x + self.projection(y.transpose(1, 2).reshape(batch, tokens, DIM))
            return x + self.down(F.gelu(self.up(self.ln_2(x)), approximate="tanh"))

    class Gpt(nn.Module):
        def __init__(self):
            super().__init__()
            self.embedding, self.places = nn.Embedding(VOCAB, DIM), nn.Embedding(length, DIM)
            self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))
            self.norm = nn.LayerNorm(DIM)

        def forward(self, tokens, targets):
            x = self.embedding(tokens) + self.places.weight
            for block in self.blocks:
                x = block(x)
            logits = self.norm(x) @ self.embedding.weight.T
            return F.cross_entropy(logits.view(-1, VOCAB).float(), targets.view(-1))

    return Gpt()


def torch_step(model, tokens, targets, dtype):
    import torch

    start, processor = time.perf_counter(), time.process_time()
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=dtype == "bf16"):
        loss = model(tokens, targets)
    loss.backward()
    times = time.perf_counter() - start, time.process_time() - processor
    model.zero_grad()
    return times


def our_step(args, dtype):
    command = [args.logitless, "compile", "--model", "gpt2", "--dtype", dtype, "--time", "1"]
    for name in ("batch", "length", "threads"):
        command += [f"--{name}", str(getattr(args, name))]
    text = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    return float(re.search(r"time: ([0-9.e+-]+) s", text).group(1))


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--logitless", required=True, help="path of the command")
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--length", type=int, default=1024)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--dtype", choices=("bf16", "f32", "both"), default="both")
    args = parser.parse_args()

    import torch

    torch.set_num_threads(args.threads)
    torch.manual_seed(0)
    model = make_gpt(args.length)
    tokens, targets = (torch.randint(0, VOCAB, (args.batch, args.length)) for _ in range(2))
    print(f"torch {torch.__version__}, GPT-2 124M, batch {args.batch} x {args.length}, {args.threads} threads")
    for dtype in ("bf16", "f32") if args.dtype == "both" else (args.dtype,):
        theirs, ours = [], []
        for number in range(args.rounds):
            torch_step(model, tokens, targets, dtype)  # warms up memory and threads
            seconds, processor = torch_step(model, tokens, targets, dtype)
            theirs.append(seconds)
            ours.append(our_step(args, dtype))
            print(f"{dtype} round {number}: PyTorch {seconds:.2f} s ({processor:.2f} s of processors), "
                  f"logitless {ours[-1]:.2f} s", flush=True)
        ratio = statistics.median(a / b for a, b in zip(theirs, ours))
        print(f"{dtype}: PyTorch {statistics.median(theirs):.2f} s, logitless {statistics.median(ours):.2f} s, "
              f"PyTorch / logitless {ratio:.2f}")


main()
