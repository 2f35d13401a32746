#!/usr/bin/env python3
"""Tests the far field on whole training runs: the same run with dense, far-backward and far-both gradients.

    python3 bench/experiments/far_proof_text.py --out words                     # tokens, from text on this machine

    python3 bench/experiments/far_proof.py run --words words --vocab 131072 --ways dense,backward,both --seeds 1 --out runs

    build/src/cli/logitless report runs/gpt2_131072_dense_1.jsonl               # a page of a run

    python3 bench/experiments/far_proof.py error runs/gpt2_131072_backward_1 --words words

    python3 bench/experiments/far_proof.py losses runs/gpt2_131072_dense_1 runs/gpt2_131072_both_1 --words words

    python3 bench/experiments/far_proof.py capture runs/gpt2_131072_dense_1 --words words --out head.safetensors

`run` starts a process of `logitless train` for each seed and way, one after the other, with the same initial weights
and batches. The log is runs/NAME.jsonl; with --export the model is in runs/NAME/. A run that would exceed --limit
(for the whole command) or --run-limit is stopped, and its results so far are kept. Arguments after `--` are passed to
every `logitless train`.

`error` and `capture` take the model of a run (--export, or --save for the far field's own order). `error` prints the
errors of gradients by token frequency, `capture` writes the head to a file. Both use a GPU if there is one. `losses`
compares several models on the same held-out tokens: losses and differences, with standard errors.
"""

import argparse
import json
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
WAYS = {"dense": [], "backward": ["--far-field", "{error}"], "both": ["--far-field", "{error}", "--far-both"]}
MODELS = {"gpt2": (12, 768, 12), "gpt2-medium": (24, 1024, 16), "gpt2-large": (36, 1280, 20)}  # layers, dim, heads
LEAST_SECONDS = 15  # least time left to start a run


def command_of(args, way, seed, log):
    vocab, rows = args.vocab, args.batch * args.length * args.ranks
    steps = max(1, round(args.tokens / rows / args.accumulate))
    command = [args.logitless, "train", "--device", args.device, "--dtype", args.dtype, "--vocab", vocab,
               "--data", args.words / f"train_{vocab}.bin", "--val", args.words / f"val_{vocab}.bin",
               "--batch", args.batch, "--length", args.length, "--accumulate", args.accumulate, "--steps", steps,
               "--ranks", args.ranks, "--lr", args.lr, "--seed", seed, "--eval-every", max(1, steps // args.validations), "--sample", 0, "--log", log]
    if args.model != "none":
        layers, dim, heads = MODELS[args.model]  # --model has its own vocabulary
        command += ["--layers", layers, "--dim", dim, "--heads", heads]
    if args.export:
        command += ["--export", log.with_suffix("")]
    if args.save:
        command += ["--save", log.with_suffix("") / "run.safetensors"]
    return [str(part) for part in (*command, *(text.format(error=args.error) for text in WAYS[way]), *args.more)]


def run_one(args, command, log, seconds):
    """Runs a command and stops it by SIGINT after `seconds`; prints its output. Returns the meaning of the exit
    status."""
    with open(log.with_suffix(".txt"), "w", encoding="utf-8") as said:
        process = subprocess.Popen(command, stdout=said, stderr=subprocess.STDOUT)
        try:
            status = process.wait(timeout=seconds)
        except (subprocess.TimeoutExpired, KeyboardInterrupt) as stopped:
            process.send_signal(signal.SIGINT)
            try:
                process.wait(timeout=args.grace)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
            if isinstance(stopped, KeyboardInterrupt):
                raise
            return f"stopped after {seconds:.0f} s"
    return "done" if status == 0 else f"exit status {status}"


def machine():
    try:
        query = ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"]
        gpu = subprocess.run(query, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        gpu = None
    return {"gpu": gpu, "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())}


def run(args):
    unknown = [way for way in args.ways if way not in WAYS]
    if unknown:
        sys.exit(f"far_proof: --ways: expected {', '.join(WAYS)}, got {unknown[0]}")
    for name in ("train", "val"):
        path = args.words / f"{name}_{args.vocab}.bin"
        if not path.exists():
            sys.exit(f"far_proof: --words: there is no {path}; bench/experiments/far_proof_text.py --vocab {args.vocab} writes it")
    args.out.mkdir(parents=True, exist_ok=True)
    if (args.words / "text.json").exists():
        shutil.copy(args.words / "text.json", args.out / "text.json")
    begin, failed = time.monotonic(), False
    for seed in args.seeds:
        for way in args.ways:
            left = args.limit - args.grace - (time.monotonic() - begin)
            name = f"{args.model}_{args.vocab}_{way}_{seed}"
            if left < LEAST_SECONDS:
                print(f"{name}: not begun, {max(0, left):.0f} s are left of --limit", flush=True)
                continue
            log = args.out / f"{name}.jsonl"
            if args.save or args.export:
                log.with_suffix("").mkdir(exist_ok=True)
            command = command_of(args, way, seed, log)
            (args.out / f"{name}.run.json").write_text(json.dumps({"command": command, **machine()}), encoding="utf-8")
            start = time.monotonic()
            end = run_one(args, command, log, min(left, args.run_limit))
            failed = failed or end.startswith("exit")
            lines = log.with_suffix(".txt").read_text(encoding="utf-8", errors="replace").splitlines()
            said = [line for line in lines if "validation loss" in line] or lines
            print(f"{name}: {end} in {time.monotonic() - start:.0f} s; {said[-1] if said else 'it said nothing'}", flush=True)
            if end.startswith("exit"):
                print("\n".join(lines[-8:]), flush=True)
    return 1 if failed else 0


def error(args):
    from far_proof_error import error as act

    return act(args)


def capture(args):
    from far_proof_head import capture as act

    return act(args)


def losses(args):
    from far_proof_losses import losses as act

    return act(args)


def numbers(kind):
    return lambda text: [kind(part) for part in text.split(",")]


def add_run(commands):
    parser = commands.add_parser("run", help="train each way", formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--logitless", default=str(ROOT / "build/src/cli/logitless"), help="path of the command")
    parser.add_argument("--words", type=Path, required=True, help="folder that far_proof_text.py wrote")
    parser.add_argument("--out", type=Path, default=Path("runs"), help="folder of the logs")
    parser.add_argument("--vocab", type=int, default=50257)
    parser.add_argument("--ways", type=numbers(str), default="dense,backward,both")
    parser.add_argument("--seeds", type=numbers(int), default="1")
    parser.add_argument("--tokens", type=float, default=100e6, help="that a run learns from")
    parser.add_argument("--model", default="gpt2", choices=(*MODELS, "none"), help="sizes; none: those after --")
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--length", type=int, default=1024)
    parser.add_argument("--accumulate", type=int, default=1)
    parser.add_argument("--ranks", type=int, default=1, help="GPUs, each with a --batch of its own in every step")
    parser.add_argument("--lr", type=float, default=6e-4)
    parser.add_argument("--error", type=float, default=0.01, help="of --far-field")
    parser.add_argument("--validations", type=int, default=20, help="in a run")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--dtype", default="bf16")
    parser.add_argument("--limit", type=float, default=570, help="seconds for all runs together")
    parser.add_argument("--run-limit", type=float, default=1e9, help="seconds for each")
    parser.add_argument("--grace", type=float, default=15, help="seconds for a run to end by itself after its signal")
    parser.add_argument("--export", action="store_true", help="write each model (not where a run was stopped)")
    parser.add_argument("--save", action="store_true", help="write each checkpoint, at every validation (12 bytes a parameter)")
    parser.set_defaults(act=run)


def add_head(commands):
    for name, act, what in (("error", error, "error of the head's gradients by token frequency"),
                            ("capture", capture, "hidden states, targets and the head, as a file for bench_head")):
        parser = commands.add_parser(name, help=what, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
        parser.add_argument("folder", type=Path, help="of a model that run --export or --save wrote (the far field's state: --save)")
        parser.add_argument("--words", type=Path, required=True, help="folder that far_proof_text.py wrote")
        parser.add_argument("--tokens", type=int, default=8192, help="held-out tokens of a call")
        parser.add_argument("--device", help="default: the GPU where there is one")
        parser.set_defaults(act=act)
        if name == "capture":
            parser.add_argument("--out", type=Path, required=True, help="file, .safetensors")
            parser.add_argument("--bits", type=int, default=8, choices=(4, 8), help="of a number of the head; 4 for a file to be packed")
            parser.add_argument("--most", type=float, default=60 * 2**20, help="bytes; more: without the rarest words")
        else:
            parser.add_argument("--out", type=Path, help="folder; None: the one that the run's is in")
            parser.add_argument("--loss-tokens", type=int, default=131072, help="most tokens that the exact loss is taken of")
            parser.add_argument("--samples", type=int, default=16, help="far-field steps whose mean is looked at, too")
            parser.add_argument("--error", type=float, default=0.01, help="wanted, of a run that was dense")
            parser.add_argument("--library", type=Path, default=ROOT / "build/src/liblogitless.so",
                                help="where LOGITLESS_LIBRARY does not say")


def add_losses(commands):
    parser = commands.add_parser("losses", help="of several models on the same held-out tokens",
                                 formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("folder", type=Path, help="of a model that run --export wrote: the one to compare with")
    parser.add_argument("others", type=Path, nargs="*", help="of more")
    parser.add_argument("--words", type=Path, required=True, help="folder that far_proof_text.py wrote")
    parser.add_argument("--tokens", type=int, default=1 << 20, help="held-out tokens at most")
    parser.add_argument("--device", help="default: the GPU where there is one")
    parser.add_argument("--out", type=Path, help="folder of losses.md and losses.json; None: the one that the first run's is in")
    parser.set_defaults(act=losses)


def main():
    words = sys.argv[1:]
    more = words[words.index("--") + 1:] if "--" in words else []
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    add_run(commands)
    add_head(commands)
    add_losses(commands)
    args = parser.parse_args(words[: words.index("--")] if "--" in words else words)
    args.more = more
    if args.command in ("error", "capture", "losses") and args.device is None:
        import torch

        args.device = "cuda" if torch.cuda.is_available() else "cpu"
    if more and args.command != "run":
        parser.error("--: options for `logitless train` go with run alone")
    sys.exit(args.act(args))


if __name__ == "__main__":
    main()
