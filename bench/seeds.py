#!/usr/bin/env python3
"""Measures whole training steps of real sizes with random weights, with and without logitless.

docs/develop/log/seeds.md describes the four public requests that the rows stand for.

    LOGITLESS_LIBRARY=build/src/liblogitless.so PYTHONPATH=python python3 bench/seeds.py ROW [--json FILE]

    gpt2    GPT-2 124M: memory and time over the number of chunks. Also torch.compile and Inductor's chunker.
    llama3  Llama-3-8B, full fine-tuning under FSDP2 on --ranks GPUs, 2 x 4096 tokens each, gradient checkpointing
    gemma2  Gemma-2-2B (--model qwen2.5-7b: Qwen2.5-7B) with LoRA, 4 x 2048 tokens, gradient checkpointing
    jax3b   a 3B decoder in JAX, 8192 tokens and 153600 entries, FSDP over --ranks GPUs; token ids from the same pass

Each variant of a row runs in a process of its own (under torchrun for llama3). It prints tokens/s of the median step,
the peak memory of a device (of the fullest rank), and the losses of the first steps. These must agree with those of the
row's first variant, to 1e-4 in fp32 and 2e-3 with 16-bit logits. So must 98 % of jax3b's token ids. If they do not, the
exit status is 1. A variant whose package is missing is skipped by name. With --together N, N variants of gpt2 or gemma2
start at a time. They compile and warm up side by side, in memory for all of them, and are measured in turn. --tiny
makes every size small, so that a row runs on a CPU in seconds, all variants in one process.
"""
import argparse
import contextlib
import importlib
import json
import os
import re
import subprocess
import sys
import tempfile
import threading
from pathlib import Path

# The default variants of each row, the plain one first.
ROWS = {
    "gpt2": ["eager", "compile", "chunker", "chunker-2", "chunker-4", "chunker-8", "chunker-16", "head", "head-512MiB", "head-256MiB",
             "head-128MiB", "autochunk-2", "autochunk-4", "autochunk-8", "autochunk-16"],
    "llama3": ["plain", "liger", "lazy", "sharded"],
    "gemma2": ["plain", "liger", "lazy", "far"],
    "jax3b": ["plain", "remat", "logitless", "logitless-sharded"],
}
RTOL = {"float32": 1e-4, "bfloat16": 2e-3}  # of losses; plain 16-bit logits are rounded
MARK = "SEEDS "  # begins the line of a result


def command(args, variants):
    """Returns the command of the process, or processes, that run these variants."""
    start = [sys.executable]
    if args.row == "llama3":
        start += ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={args.ranks}"]
    given = {name: value for name, value in vars(args).items() if name not in ("row", "worker", "json", "tiny", "variant")}
    more = [text for name, value in given.items() if value is not None for text in (f"--{name.replace('_', '-')}", str(value))]
    return [*start, __file__, args.row, *more, *["--tiny"] * args.tiny, "--worker", "--variant", *variants]


class Started:
    """A process that runs variants."""

    def __init__(self, args, variants):
        env = dict(os.environ)
        if args.row == "jax3b":
            env.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
            if args.device == "cpu":
                flag = f"--xla_force_host_platform_device_count={args.ranks}"
                env.update(XLA_FLAGS=f"{env.get('XLA_FLAGS', '')} {flag}", JAX_PLATFORMS="cpu")
        self.variants, self.found, self.errors = variants, {}, tempfile.TemporaryFile("w+")
        self.process = subprocess.Popen(
            command(args, variants), stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self.errors, text=True, env=env)
        self.late = f"no result within {args.limit} s"
        self.timer = threading.Timer(args.limit or threading.TIMEOUT_MAX, self.process.kill)
        self.timer.daemon = True
        self.timer.start()

    def read(self, until=None):
        """Reads what the process prints up to this line, or to the end."""
        for line in self.process.stdout:
            if line.startswith(MARK):
                result = json.loads(line.removeprefix(MARK))
                self.found[result["variant"]] = result
            elif line.strip() == until:
                return

    def results(self):
        """Lets the process measure. Returns a result for each variant."""
        with contextlib.suppress(BrokenPipeError):  # it has ended
            self.process.stdin.write("\n")
            self.process.stdin.close()
        self.read()
        failed = self.process.wait() != 0
        late = not self.timer.is_alive()
        self.timer.cancel()
        with self.errors:
            self.errors.seek(0)
            last = re.findall(r"^(?:\[rank\d+\]: )?([\w.]*(?:Error|Exception|Exit)\b: .*)", self.errors.read(), re.M)
        why = self.late if late else last[-1] if last else f"exit status {self.process.returncode}"
        return [self.found.get(name, {"variant": name, "failed": why if failed else "no result"}) for name in self.variants]


def run(args, groups):
    """Runs groups of variants, each in a process of its own, ``args.together`` at a time. Yields the results of each."""
    at_a_time = args.together or 1
    for first in range(0, len(groups), at_a_time):
        started = [Started(args, variants) for variants in groups[first : first + at_a_time]]
        for process in started if args.together else ():
            process.read(until="WAITS")
        for process in started:
            yield process.results()


def agreement(results):
    """Sets ``loss_error`` of each result: the largest relative difference of a loss from the first result's."""
    measured = [r for r in results if "losses" in r]
    for result in measured:
        pairs = zip(result["losses"], measured[0]["losses"])
        result["loss_error"] = max(abs(a - b) / abs(b) for a, b in pairs)
        same = [a == b for a, b in zip(result.get("ids", ()), measured[0].get("ids", ()))]
        result["agrees"] = result["loss_error"] <= RTOL[result["dtype"]] and sum(same) >= 0.98 * len(same)


def line_of(result):
    if "losses" not in result:
        return f"{result['variant']:18}{'skipped: ' + result['skipped'] if 'skipped' in result else 'failed: ' + result['failed']}"
    losses = " ".join(f"{loss:.5f}" for loss in result["losses"])
    verdict = "" if result["agrees"] else "  NOT the first variant's"
    return (f"{result['variant']:18}{result['tokens_per_second']:12.0f}{result['milliseconds']:12.2f}"
            f"{result['peak_bytes'] / 2**30:12.3f}  {losses}{verdict}")


def parsed(given=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("row", choices=ROWS)
    parser.add_argument("--variant", nargs="+", help="default: all of the row")
    parser.add_argument("--model", choices=("gemma2-2b", "qwen2.5-7b"), help="of gemma2; default: gemma2-2b")
    parser.add_argument("--ranks", type=int, help="GPUs of llama3 and jax3b; default: all, with --tiny 2")
    parser.add_argument("--layers", type=int, help="cuts the model, where fewer GPUs are there; the result says so")
    parser.add_argument("--sequences", type=int, help="of a batch, on each rank")
    parser.add_argument("--length", type=int, help="tokens of a sequence")
    parser.add_argument("--chunk", type=int, help="tokens of a chunk of jax3b's scan; default: 1024")
    parser.add_argument("--attention", help="of the models of transformers; default: theirs")
    parser.add_argument("--steps", type=int, help="timed steps; default: 10, with --tiny 1")
    parser.add_argument("--together", type=int, metavar="N", help="variants of gpt2 or gemma2 that warm up at a time; default: 1")
    parser.add_argument("--limit", type=float, metavar="SECONDS", help="of a variant's process; default: none")
    parser.add_argument("--device", choices=("cuda", "cpu"), help="default: cuda, with --tiny cpu")
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args(given)
    args.variant = args.variant or ROWS[args.row]
    kinds = {name.partition("-")[0] if args.row == "gpt2" else name for name in ROWS[args.row]}  # chunks and budgets are free
    for name in args.variant:
        if (name.partition("-")[0] if args.row == "gpt2" else name) not in kinds:
            parser.error(f"--variant: expected some of {', '.join(ROWS[args.row])}, got {name}")
    if args.together is not None and (args.row not in ("gpt2", "gemma2") or args.together < 1):
        parser.error(f"--together: expected 1 or more, of gpt2 or gemma2, got {args.together} of {args.row}")
    args.device = args.device or ("cpu" if args.tiny else "cuda")
    args.steps = args.steps or (1 if args.tiny else 10)
    if args.row in ("llama3", "jax3b") and args.ranks is None:
        if not args.tiny and not args.worker:
            import torch

            args.ranks = torch.cuda.device_count() or parser.error("--ranks: expected GPUs, found none; --tiny runs on a CPU")
        else:
            args.ranks = 2
    args.model = args.model or "gemma2-2b"
    return args


def main():
    args = parsed()
    if args.worker:
        importlib.import_module(f"seeds.{args.row}").work(args, lambda result: print(MARK + json.dumps(result), flush=True))
        return
    results = []
    print(f"{args.row:18}{'tokens/s':>12}{'ms a step':>12}{'peak GiB':>12}  losses of the first steps")
    groups = [args.variant] if args.tiny and not args.together else [[name] for name in args.variant]
    for made in run(args, groups):
        results += made
        agreement(results)
        for result in made:
            print(line_of(result), flush=True)
    measured = [r for r in results if "losses" in r]
    if measured:
        same = [r for r in measured if r["agrees"]]
        print(f"{len(same)} of {len(measured)} variants have the losses of {measured[0]['variant']}")
        print(measured[0]["setting"])
        for note in dict.fromkeys(f"{r['note']}" for r in measured if r.get("note")):
            print(f"note: {note}")
    if args.json:
        args.json.write_text(json.dumps(results, indent=1))
    sys.exit(not measured or any("failed" in r or not r.get("agrees", True) for r in results))


if __name__ == "__main__":
    main()
