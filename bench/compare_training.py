#!/usr/bin/env python3
"""Whole training steps of a GPT-2 on one GPU: `logitless train` beside PyTorch, by turns in one run.

    python3 bench/compare_training.py --logitless build/src/cli/logitless [--batch 32 --length 1024] [--steps 20]
        [--rounds 5] [--peers eager,compile] [--budget BYTES] [--layers 12 --dim 768 --heads 12]

PyTorch's GPT-2 is a module of ours with the same shapes: bf16 autocast over fp32 weights, AdamW (fused), clipping to a
norm of 1, random tokens; `compile` is torch.compile of loss and backward. The vocabulary is 50257 here and there; PyTorch's
table is padded to 50304 rows, which its products are faster with. A round times `--steps` steps of each after some that
are not counted; every run is a process of its own, with the GPU to itself. Prints the rounds, then a line for each:
median tokens/s, the most that its allocator held, and what the driver had taken beyond an empty context. With --json one
JSON object.
"""
import argparse
import json
import os
import random
import statistics
import struct
import subprocess
import sys
import tempfile
import time

VOCAB, PADDED_VOCAB = 50257, 50304
WARM_UP = 8


def make_gpt(args):
    import torch
    import torch.nn as nn
    import torch.nn.functional as F

    dim, heads = args.dim, args.heads

    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.ln_1, self.ln_2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
            self.attention, self.projection = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)
            self.up, self.down = nn.Linear(dim, 4 * dim), nn.Linear(4 * dim, dim)

        def forward(self, x):
            batch, tokens, _ = x.shape
            q, k, v = (part.view(batch, tokens, heads, dim // heads).transpose(1, 2)
                       for part in self.attention(self.ln_1(x)).split(dim, -1))
            y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
            x = x + self.projection(y.transpose(1, 2).reshape(batch, tokens, dim))
            return x + self.down(F.gelu(self.up(self.ln_2(x)), approximate="tanh"))

    class Gpt(nn.Module):
        def __init__(self):
            super().__init__()
            self.words, self.places = nn.Embedding(PADDED_VOCAB, dim), nn.Embedding(args.length, dim)
            self.blocks = nn.ModuleList(Block() for _ in range(args.layers))
            self.norm = nn.LayerNorm(dim)
            self.head = nn.Linear(dim, PADDED_VOCAB, bias=False)
            self.head.weight = self.words.weight
            for parameter in self.parameters():
                if parameter.dim() == 2:
                    nn.init.normal_(parameter, std=0.02)

        def forward(self, tokens, targets):
            x = self.words(tokens) + self.places.weight
            for block in self.blocks:
                x = block(x)
            logits = self.head(self.norm(x))
            return F.cross_entropy(logits.view(-1, PADDED_VOCAB).float(), targets.view(-1))

    return Gpt().to(torch.device("cuda"))


def torch_run(args, kind):
    """Seconds of `steps` steps in a process of its own: this function is that process."""
    import torch

    torch.manual_seed(1)
    torch.set_float32_matmul_precision("high")
    free_before = torch.cuda.mem_get_info()[0]
    model = make_gpt(args)
    matrices = [p for p in model.parameters() if p.dim() == 2]
    others = [p for p in model.parameters() if p.dim() != 2]
    optimizer = torch.optim.AdamW([{"params": matrices, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}],
                                  lr=1e-4, betas=(0.9, 0.95), fused=True)
    loss_of = torch.compile(model) if kind == "compile" else model
    batches = [torch.randint(VOCAB, (2, args.batch, args.length)).pin_memory() for _ in range(4)]

    def step(i):
        tokens, targets = batches[i % len(batches)].to("cuda", non_blocking=True)
        with torch.autocast("cuda", dtype=torch.bfloat16):
            loss = loss_of(tokens, targets)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss

    for i in range(WARM_UP):
        last = step(i)
    torch.cuda.synchronize()
    start = time.perf_counter()
    for i in range(args.steps):
        last = step(i)
    torch.cuda.synchronize()
    seconds = time.perf_counter() - start
    print(json.dumps({"seconds": seconds, "loss": last.item(), "allocator_bytes": torch.cuda.max_memory_allocated(),
                      "driver_bytes": free_before - torch.cuda.mem_get_info()[0], "version": torch.__version__}))


def in_own_process(args, kind):
    command = [sys.executable, __file__, "--as", kind]
    for name in ("batch", "length", "steps", "layers", "dim", "heads"):
        command += [f"--{name}", str(getattr(args, name))]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        sys.exit(f"compare_training: {kind}: {done.stderr[-2000:]}")
    return json.loads(done.stdout.splitlines()[-1])


def our_run(args, shard):
    command = [args.logitless, "train", "--device", "cuda", "--dtype", "bf16", "--data", shard, "--json",
               "--batch", args.batch, "--length", args.length, "--context", args.length, "--vocab", VOCAB,
               "--layers", args.layers, "--dim", args.dim, "--heads", args.heads, "--steps", WARM_UP + args.steps,
               "--lr", "1e-4", "--min-lr", "1e-4", "--sample", 0, "--eval-every", 1 << 30]
    if args.budget:
        command += ["--budget", args.budget]
    done = subprocess.run(list(map(str, command)), capture_output=True, text=True, check=False)
    if done.returncode != 0:
        sys.exit(f"compare_training: logitless: {done.stderr[-2000:]}")
    report = json.loads(done.stdout)
    memory = report["memory"]
    return {"seconds": sum(report["step_seconds"][-args.steps:]), "loss": report["steps"][-1]["loss"],
            "allocator_bytes": memory["device_bytes"] - memory["device"]["libraries and kernels"],
            "driver_bytes": memory["device_taken_bytes"] - memory["device_taken_before_bytes"]}


def write_shard(path, tokens):
    numbers = random.Random(1)
    words = struct.pack(f"<{tokens}H", *(numbers.randrange(VOCAB) for _ in range(tokens)))
    with open(path, "wb") as file:
        file.write(struct.pack("<3i", 20240520, 1, tokens).ljust(1024, b"\0") + words)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--logitless", help="path of the command")
    parser.add_argument("--peers", default="eager,compile", help="of eager and compile; empty: none")
    for name, value in (("batch", 32), ("length", 1024), ("steps", 20), ("rounds", 5), ("layers", 12), ("dim", 768),
                        ("heads", 12)):
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--budget", help="of logitless, such as 4GiB")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--as", dest="kind", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.kind:
        torch_run(args, args.kind)
        return
    if not args.logitless:
        parser.error("--logitless is needed")
    names = ["logitless", *filter(None, args.peers.split(","))]
    runs = {name: [] for name in names}
    with tempfile.TemporaryDirectory() as folder:
        shard = os.path.join(folder, "words.bin")
        write_shard(shard, 4 * (args.batch * args.length + 1) + 4 * args.length)
        for number in range(args.rounds):
            for name in names:
                run = our_run(args, shard) if name == "logitless" else in_own_process(args, name)
                run["tokens_per_second"] = args.steps * args.batch * args.length / run["seconds"]
                runs[name].append(run)
                if not args.json:
                    print(f"round {number + 1} {name:>10}: {run['tokens_per_second']:9.0f} tokens/s, "
                          f"{1e3 * run['seconds'] / args.steps:.2f} ms a step, loss {run['loss']:.4f}", flush=True)
    table = {name: {key: statistics.median(run[key] for run in list_)
                    for key in ("tokens_per_second", "allocator_bytes", "driver_bytes", "loss")}
             for name, list_ in runs.items()}
    if args.json:
        print(json.dumps({"batch": args.batch, "length": args.length, "steps": args.steps, "rounds": args.rounds, **table}))
        return
    for name, row in table.items():
        print(f"{name:>10}: {row['tokens_per_second']:9.0f} tokens/s, allocated {row['allocator_bytes'] / 2**20:.0f} MiB, "
              f"by the driver {row['driver_bytes'] / 2**20:.0f} MiB")


if __name__ == "__main__":
    main()
