#!/usr/bin/env python3
"""Compares whole training steps of a GPT-2 or a Llama on one GPU, by `logitless train` and by PyTorch, interleaved.

    python3 bench/compare/training.py --logitless build/src/cli/logitless [--model gpt2 --batch 32 --length 1024]
        [--steps 20] [--rounds 5] [--peers eager,compile,head] [--budget BYTES]

PyTorch's model is a module with the same shapes (torch_models.py): bf16 autocast over fp32 weights, fused AdamW,
clipping to a norm of 1, random tokens. `compile` is torch.compile of loss and backward; `head` is the same with the
loss by logitless.torch.linear_cross_entropy, which must be importable. A round times `--steps` steps of each, after a
warm-up; every run is a process that has the GPU to itself. Prints the rounds, then a line for each contender: median
tokens/s, the peak of its allocator, and the driver's memory beyond an empty context. With --json prints one JSON
object.
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
from pathlib import Path

WARM_UP = 8


def torch_run(args, kind):
    """Measures the seconds of `steps` steps; this function runs in its own process."""
    import torch
    import torch.nn.functional as F

    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
    import torch_models

    torch.manual_seed(1)
    torch.set_float32_matmul_precision("high")
    free_before = torch.cuda.mem_get_info()[0]
    model = torch_models.make(args.model, args.length).cuda()
    if kind == "head":
        from logitless.torch import linear_cross_entropy

    def loss_of(tokens, targets):
        hidden = model(tokens)
        if kind == "head":
            return linear_cross_entropy(hidden.to(torch.bfloat16), model.head.to(torch.bfloat16), targets)
        return F.cross_entropy(F.linear(hidden, model.head).flatten(0, 1).float(), targets.flatten())

    matrices = [p for p in model.parameters() if p.dim() == 2]
    others = [p for p in model.parameters() if p.dim() != 2]
    optimizer = torch.optim.AdamW([{"params": matrices, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}],
                                  lr=1e-4, betas=(0.9, 0.95), fused=True)
    if kind != "eager":
        loss_of = torch.compile(loss_of)
    vocab = torch_models.VOCABS[args.model]
    batches = [torch.randint(vocab, (2, args.batch, args.length)).pin_memory() for _ in range(4)]

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
    for name in ("model", "batch", "length", "steps"):
        command += [f"--{name}", str(getattr(args, name))]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        sys.exit(f"compare_training: {kind}: {done.stderr[-2000:]}")
    return json.loads(done.stdout.splitlines()[-1])


def our_run(args, shard, ranks):
    command = [args.logitless, "train", "--device", "cuda", "--dtype", "bf16", "--data", shard, "--json",
               "--batch", args.batch, "--length", args.length, "--model", args.model,
               "--steps", WARM_UP + args.steps, "--lr", "1e-4", "--min-lr", "1e-4", "--sample", 0, "--eval-every", 1 << 30]
    if ranks > 1 or args.accumulate > 1:
        command += ["--ranks", ranks, "--accumulate", args.accumulate // ranks]
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


def write_shard(path, tokens, llama):
    """Writes a file in llm.c's format: u16 with GPT-2's token ids, or u32 with Llama 3's."""
    numbers = random.Random(1)
    magic, version, vocab, code = (20240801, 7, 128256, "I") if llama else (20240520, 1, 50257, "H")
    ids = struct.pack(f"<{tokens}{code}", *(numbers.randrange(vocab) for _ in range(tokens)))
    with open(path, "wb") as file:
        file.write(struct.pack("<3i", magic, version, tokens).ljust(1024, b"\0") + ids)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--logitless", help="path of the command")
    parser.add_argument("--peers", default="eager,compile", help="of eager, compile and head; empty: none")
    parser.add_argument("--model", default="gpt2", help="gpt2, gpt2-medium, gpt2-large or llama-3.2-1b")
    for name, value in (("batch", 32), ("length", 1024), ("steps", 20), ("rounds", 5)):
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--ranks", default="1", help="of logitless: how many GPUs share a step, such as 1,2,4")
    parser.add_argument("--accumulate", type=int, default=1, help="batches of a step, over all ranks")
    parser.add_argument("--budget", help="of logitless, such as 4GiB")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--as", dest="kind", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.kind:
        torch_run(args, args.kind)
        return
    if not args.logitless:
        parser.error("--logitless is needed")
    ranks = {"logitless" if r == "1" else f"logitless x{r}": int(r) for r in args.ranks.split(",")}
    if any(args.accumulate % r for r in ranks.values()):
        parser.error(f"--accumulate: expected a multiple of {args.ranks}, got {args.accumulate}")
    if args.peers and args.accumulate > 1:
        parser.error("--accumulate: the peers' steps are of one batch; expected --peers '' as well")
    names = [*ranks, *filter(None, args.peers.split(","))]
    runs = {name: [] for name in names}
    with tempfile.TemporaryDirectory() as folder:
        shard = os.path.join(folder, "words.bin")
        write_shard(shard, 4 * args.accumulate * (args.batch * args.length + 1) + 4 * args.length, args.model.startswith("llama"))
        for number in range(args.rounds):
            for name in names:
                run = our_run(args, shard, ranks[name]) if name in ranks else in_own_process(args, name)
                tokens = args.batch * args.length * args.accumulate
                run["tokens_per_second"] = args.steps * tokens / run["seconds"]
                runs[name].append(run)
                if not args.json:
                    print(f"round {number + 1} {name:>12}: {run['tokens_per_second']:9.0f} tokens/s, "
                          f"{1e3 * run['seconds'] / args.steps:.2f} ms a step, loss {run['loss']:.4f}", flush=True)
    table = {name: {key: statistics.median(run[key] for run in list_)
                    for key in ("tokens_per_second", "allocator_bytes", "driver_bytes", "loss")}
             for name, list_ in runs.items()}
    if args.json:
        print(json.dumps({"model": args.model, "batch": args.batch, "length": args.length, "steps": args.steps, "rounds": args.rounds, **table}))
        return
    for name, row in table.items():
        print(f"{name:>12}: {row['tokens_per_second']:9.0f} tokens/s, allocated {row['allocator_bytes'] / 2**20:.0f} MiB, "
              f"by the driver {row['driver_bytes'] / 2**20:.0f} MiB")


if __name__ == "__main__":
    main()
