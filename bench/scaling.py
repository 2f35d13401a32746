#!/usr/bin/env python3
"""Makes a table of scaling: the head, training, bits, links and a killed rank on 1, 2, 4 and 8 GPUs of a host.

    LOGITLESS_LIBRARY=build/src/liblogitless.so PYTHONPATH=python python3 bench/scaling.py --out scaling
        [--programs build] [--ranks 1,2,4,8] [--real-head FILE] [--only head far train links bits fault] [--dry-run]

- head: compare/distributed.py with all rows of a vocabulary-parallel head, beside a full head on each GPU
- far: the same with the far field (far_both), with a --real-head in 4096 columns
- train: compare/training.py with GPT-2 124M, half a million tokens to a step
- links: bench_links, on the largest number of GPUs
- bits: 100 steps with the same bits on all ranks, on the largest number of GPUs
- fault: SIGKILL of a rank, on the largest number of GPUs

Numbers of GPUs that the host lacks are left out, and listed. Writes the output of each command, the JSON of the first
three, and scaling.md; the exit status is 1 where a command failed.
"""

import argparse
import json
import multiprocessing
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PARTS = ("head", "far", "train", "links", "bits", "fault")
HEAD_ROWS = {"sp": "tokens spread", "vp": "tokens on all", "ft": "tokens move", "fw": "weights move"}
FAR_ROWS = {"far_sp": "far both ways, tokens spread", "far_vp": "far both ways, tokens on all"}
BATCHES = 16  # micro-batches of 32 x 1024 tokens in a training step


def commands(args, ranks, most):
    """Returns (name, command, seconds) for `ranks` GPUs."""
    distributed = [sys.executable, ROOT / "bench/compare/distributed.py", "--ranks", ranks]
    real = ["--real-head", args.real_head, "--dim", 4096]
    if "head" in args.only and ranks > 1:
        yield f"head_{ranks}", [*distributed, "--rounds", 5, "--steps", 8, "--row", "alone", *HEAD_ROWS,
                                "--json", args.out / f"head_{ranks}.json"], 180
    if "far" in args.only and ranks > 1 and args.real_head:
        yield f"far_{ranks}", [*distributed, *real, "--rounds", 5, "--steps", 8, "--row", "far_alone", *FAR_ROWS,
                               "--json", args.out / f"far_{ranks}.json"], 180
    if "train" in args.only:
        yield f"train_{ranks}", [sys.executable, ROOT / "bench/compare/training.py", "--logitless", args.programs / "src/cli/logitless", "--peers", "",
                                 "--ranks", ranks, "--accumulate", BATCHES, "--steps", 8, "--rounds", 3], 240
    if ranks < most or ranks == 1:
        return
    if "links" in args.only:
        yield f"links_{ranks}", [args.programs / "bench/bench_links", ranks], 120
    if "bits" in args.only:
        yield f"bits_{ranks}", [*distributed, "--bits", 100, "--row", *HEAD_ROWS], 240
    if "fault" in args.only:
        yield f"fault_{ranks}", [sys.executable, Path(__file__).resolve(), "--fault", ranks], 120


def run(name, command, seconds, out):
    """Runs a command with its output in `out`. Returns whether it succeeded."""
    start = time.monotonic()
    with open(out / f"{name}.txt", "w", encoding="utf-8") as said:
        process = subprocess.Popen(list(map(str, command)), stdout=said, stderr=subprocess.STDOUT, start_new_session=True)
        try:
            status = process.wait(timeout=seconds)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            status = f"more than {seconds} s"
    print(f"{name}: {'done' if status == 0 else f'failed ({status})'} in {time.monotonic() - start:.0f} s", flush=True)
    return status == 0


def fault(ranks):
    """Starts processes of faults_gpu_worker.py and kills the last one; the others must raise an error with its rank."""
    sys.path[:0] = [str(ROOT / "tests/python" / name) for name in ("torch", "support")]
    import worker_process
    from ports import held_port

    with held_port() as port, tempfile.TemporaryDirectory() as folder:
        outputs = [Path(folder, str(r)) for r in range(ranks)]
        processes = [multiprocessing.get_context("spawn").Process(target=worker_process.work, args=("faults_gpu_worker", str(o), r, str(port), ranks))
                     for r, o in enumerate(outputs)]
        for p in processes:
            p.start()
        end = time.monotonic() + 100
        for p in processes:
            p.join(max(0.1, end - time.monotonic()))
        codes = [p.exitcode for p in processes]
        for p in processes:
            p.kill()
        print("\n".join(f"rank {r}: {codes[r]}\n{o.read_text(errors='replace')}" for r, o in enumerate(outputs)))
    return 0 if codes == [0] * (ranks - 1) + [-signal.SIGKILL] else 1


def read_json(path):
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}


def tokens_per_second(path):
    """Returns logitless's tokens/s in the output of compare/training.py; None if it is missing."""
    found = re.findall(r"logitless(?: x\d+)?: +([0-9.]+) tokens/s", path.read_text(encoding="utf-8")) if path.exists() else []
    return float(found[-1]) if found else None


def table(out, ranks):
    """Returns the table as Markdown."""
    lines = ["| | " + " | ".join(f"{g} GPU{'s' if g > 1 else ''}" for g in ranks) + " |", "|---" * (len(ranks) + 1) + "|"]

    def row(title, cell):
        lines.append(f"| {title} | " + " | ".join(cell(g) or "" for g in ranks) + " |")

    for kind, alone, rows in (("head", "alone", HEAD_ROWS), ("far", "far_alone", FAR_ROWS)):
        found = {g: read_json(out / f"{kind}_{g}.json") for g in ranks}
        if not any(found.values()):
            continue
        row("a whole head on each" if kind == "head" else "far both ways, a whole head on each",
            lambda g: f"{found[g][alone]['ms']:.2f} ms" if alone in found[g] else "")
        for name, title in rows.items():
            row(title, lambda g: f"{found[g][name]['ms']:.2f} ms, {found[g][name]['efficiency']:.2f}" if name in found[g] else "")
    speeds = {g: tokens_per_second(out / f"train_{g}.txt") for g in ranks}
    if any(speeds.values()):
        one = speeds.get(1)
        row("GPT-2 124M, tokens/s", lambda g: speeds[g] and f"{speeds[g]:.0f}" + (f", {speeds[g] / one:.2f} times one" if one and g > 1 else ""))
    return "\n".join(lines) + "\n"


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("scaling"))
    parser.add_argument("--programs", type=Path, default=ROOT / "build", help="a build tree")
    parser.add_argument("--ranks", type=lambda text: [int(n) for n in text.split(",")], default=[1, 2, 4, 8])
    parser.add_argument("--real-head", type=Path)
    parser.add_argument("--only", nargs="+", choices=PARTS, default=PARTS)
    parser.add_argument("--dry-run", action="store_true", help="print the commands, whatever GPUs there are")
    parser.add_argument("--fault", type=int, default=0, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.fault > 0:
        sys.exit(fault(args.fault))
    if any(g < 1 for g in args.ranks):
        parser.error(f"--ranks: expected numbers of GPUs, got {','.join(map(str, args.ranks))}")
    ranks = sorted(set(args.ranks))
    if not args.dry_run:
        import torch

        missing = [g for g in ranks if g > torch.cuda.device_count()]
        ranks = [g for g in ranks if g not in missing]
        if missing:
            print(f"not run: {', '.join(map(str, missing))} GPUs; this host has {torch.cuda.device_count()}", flush=True)
        if not ranks:
            sys.exit(1)
        args.out.mkdir(parents=True, exist_ok=True)
    if "far" in args.only and not args.real_head:
        print("not run: the far field, which wants a --real-head", flush=True)
    well = True
    for g in ranks:
        for name, command, seconds in commands(args, g, ranks[-1]):
            if args.dry_run:
                print(name, *map(str, command))
            else:
                well = run(name, command, seconds, args.out) and well
    if not args.dry_run:
        text = table(args.out, ranks)
        (args.out / "scaling.md").write_text(text, encoding="utf-8")
        print(text, end="")
    sys.exit(not well)


if __name__ == "__main__":
    main()
