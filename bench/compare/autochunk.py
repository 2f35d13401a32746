#!/usr/bin/env python3
"""Compares both executors of logitless.torch.autochunk with the given function, eager and under torch.compile. The losses
are those of tests/python/torch/losses_battery, with their outputs and gradients.

    python bench/compare/autochunk.py [--loss NAME|FAMILY|all ...] [--tokens N --dim D --vocab V] [--dtype T] [--device cpu|cuda]
                                      [--budget BYTES|SHARE ...] [--chunks N ...] [--executors auto python native]
                                      [--inductor plain chunker] [--gemms] [--kernels] [--repeat R] [--json FILE] [--explain]
    python bench/compare/autochunk.py --gpu [--device cpu --tokens N --dim D --vocab V]
    python bench/compare/autochunk.py --summary FILE ... [--clock times|cpu_times]

Inputs are random and fresh. N x V is the size of each loss's large value. A budget of 0 is none, 0.25 a quarter of the
large value. --chunks forces numbers of chunks, which bypasses the head engine. --inductor runs torch.compile, and
torch.compile with its own chunker. --gemms runs the three GEMMs of a head, N x D x V, as well; --gpu compares the losses
"narrow" on a GPU, in bf16 with fp32 logits: the function, torch.compile, autochunk as it comes and within 256 MiB, and the
GEMMs, and prints a table. All are run R times, interleaved, after a warm-up. Prints for each:

- the median ms of forward and backward, by wall clock and by processor time, and the ratios to the function itself;
  processor time is less disturbed by other load, but excludes waiting
- the peak of PyTorch's allocator beyond inputs, gradients included
- the seconds of the first call (tracing, compiling)
- for autochunk's plans, the predicted and the measured memory beyond inputs and results

--kernels prints the milliseconds of a step's kernels by PyTorch's profiler, their number, and the time until the call
returns (GPU only).

--json writes a line for each loss, which --summary reads. --apart runs each loss in its own process. Earlier runs
decide which large values of the function are fresh pages, which changes its time by a factor of up to two. --jobs J
shares the losses among J processes: all compile theirs, then one after another measures.
"""
import argparse
import fcntl
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from pathlib import Path

os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # silences PyTorch's profiler, which counts memory; set before importing torch
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tests/python/torch"))
from losses_battery import CASES, Sizes
from losses_battery.step import outputs_and_gradients, plan_peaks
from logitless.torch import autochunk
from logitless.torch._peak import peak_of

FIRST, GEMMS = "the function", "three GEMMs"
GPU = {"loss": ["narrow"], "tokens": 4096, "dim": 2048, "vocab": 65536, "dtype": "bfloat16", "device": "cuda",
       "budget": ["0", "256MiB"], "executors": ["auto", "native"], "inductor": ["plain"], "gemms": True, "table": True}


def cases(wanted):
    """Returns the cases in the order of their names; those of a family, or all, in the battery's order."""
    found = [c for w in wanted for c in CASES.values() if w in ("all", c.name, c.family)]
    unknown = set(wanted) - {"all"} - {c.name for c in found} - {c.family for c in found}
    if unknown:
        families = ", ".join(sorted({c.family for c in CASES.values()}))
        raise SystemExit(f"--loss: no {', '.join(sorted(unknown))}; expected all, one of {families}, or {', '.join(CASES)}")
    return found


def budget_of(text, case, sizes):
    """Returns the bytes of --budget, or its text; None for no budget."""
    if text == "0":
        return None
    try:
        share = float(text)
    except ValueError:
        return text
    return int(share * case.big_bytes(sizes)) if share <= 1 else int(share)


def runs_of(args, case, sizes):
    """Returns the contenders, by name."""
    runs = {FIRST: case.function}
    for kind in args.inductor:
        runs[f"torch.compile{', its chunker' if kind == 'chunker' else ''}"] = inductor(case.function, kind)
    for executor in args.executors:
        for text in args.budget:
            name = f"autochunk, {executor}, {'no budget' if text == '0' else text}"
            runs[name] = autochunk(case.function, memory_budget=budget_of(text, case, sizes), executor=executor)
        for chunks in args.chunks:
            runs[f"autochunk, {executor}, {chunks} chunks"] = autochunk(case.function, chunks=chunks, executor=executor)
    return runs


def gemms(args, dtype):
    """Returns the step of the three GEMMs: logits, and the gradients of hidden and weight."""
    n, d, v = args.tokens, args.dim, args.vocab
    hidden, weight, logits = (torch.randn(*shape, device=args.device, dtype=dtype) for shape in ((n, d), (v, d), (n, v)))
    return lambda: (hidden @ weight.T, logits @ weight, logits.T @ hidden)


def inductor(function, kind):
    if kind == "plain":
        return torch.compile(function, dynamic=False)
    if not hasattr(torch._inductor.config, "auto_chunker"):
        raise SystemExit(f"--inductor chunker: PyTorch {torch.__version__} has none")
    return torch.compile(function, dynamic=False, options={"auto_chunker.enable": True})


class Meter:
    """Measures the time and memory of a step."""

    def __init__(self, device):
        self.gpu = device == "cuda"

    def seconds(self, step):
        """Returns wall-clock seconds, and processor seconds of all threads."""
        if self.gpu:
            torch.cuda.synchronize()
        start, worked = time.perf_counter(), time.process_time()
        step()
        if self.gpu:
            torch.cuda.synchronize()
        return time.perf_counter() - start, time.process_time() - worked

    def peak(self, step, results_count=True):
        if not self.gpu:
            return peak_of(step, results_count, device="cpu")[0]
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        made = step()
        torch.cuda.synchronize()
        kept = 0 if results_count else sum(t.untyped_storage().nbytes() for t in made)
        return torch.cuda.max_memory_allocated() - before - kept


def kernels_of(step):
    """Returns the milliseconds of a step's kernels, their number, and the milliseconds until the call returns."""
    torch.cuda.synchronize()
    start = time.perf_counter()
    step()
    host = 1e3 * (time.perf_counter() - start)
    torch.cuda.synchronize()
    kinds = [torch.profiler.ProfilerActivity.CUDA, torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=kinds) as profile:
        step()
        torch.cuda.synchronize()
    made = [e for e in profile.events() if e.device_type == torch.autograd.DeviceType.CUDA]
    return sum(e.time_range.elapsed_us() for e in made) / 1e3, len(made), host


def report_of(chunked, given, meter):
    """Returns the memory of a plan beyond inputs and results, predicted and measured."""
    plan = chunked.last
    if isinstance(plan, str):
        return None
    peaks = plan_peaks(plan, given, lambda run: meter.peak(run, results_count=False))
    return max((compiled.after, took) for compiled, took in peaks)


class Contest:
    """The contenders of one loss: first prepared, which compiles them, then timed by turns."""

    def __init__(self, args, case, sizes):
        self.args, self.case, self.sizes = args, case, sizes
        self.meter, self.found, self.ready = Meter(args.device), {}, {}
        dtype = getattr(torch, args.dtype)
        given = case.arguments(sizes, args.device, dtype, drawn_on=args.device)
        for name, function in runs_of(args, case, sizes).items():
            self.found[name] = self.prepared(name, function, given)
        if args.gemms:
            self.ready[GEMMS] = gemms(args, dtype)
            first, _ = self.meter.seconds(self.ready[GEMMS])
            self.found[GEMMS] = {"first_s": first, "peak": 0, "times": [], "cpu_times": []}

    def prepared(self, name, function, given):
        """Returns the measurements of the first calls; a function that fails has no others."""
        def step():
            return outputs_and_gradients(function, given)

        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                first, _ = self.meter.seconds(step)
                entry = {"first_s": first, "peak": self.meter.peak(step), "times": [], "cpu_times": []}
            if name.startswith("autochunk"):
                entry["report"] = report_of(function, given, self.meter)
                if self.args.explain:
                    print(function.explain(), flush=True)
        except torch.OutOfMemoryError:
            return {"failed": "out of memory"}
        except Exception as error:  # an unsupported loss is a row of the table
            return {"failed": f"{type(error).__name__}: {error}".splitlines()[0][:300]}
        self.ready[name] = step
        return entry

    def line(self):
        """Times the contenders by turns, and returns {name: measurements} with the loss's name and size."""
        for _ in range(self.args.repeat):
            for name, step in self.ready.items():
                seconds, worked = self.meter.seconds(step)
                self.found[name]["times"].append(seconds)
                self.found[name]["cpu_times"].append(worked)
        if self.args.kernels:
            for name, step in self.ready.items():
                self.found[name]["kernels"] = kernels_of(step)
        return {"loss": self.case.name, "family": self.case.family, "big": self.case.big_bytes(self.sizes),
                "found": self.found}


def compared(args, chosen, sizes):
    """Yields the measurements of each loss. Processes of --jobs wait for each other: all compile, then one measures."""
    if not args.lock:
        for case in chosen:
            yield case, Contest(args, case, sizes).line()
            torch._dynamo.reset()
        return
    torch._dynamo.config.recompile_limit = len(chosen) + 8  # losses that one function makes share its code
    with args.lock.open() as lock:
        fcntl.flock(lock, fcntl.LOCK_SH)
        contests = [Contest(args, case, sizes) for case in chosen]
        fcntl.flock(lock, fcntl.LOCK_EX)
        for contest in contests:
            yield contest.case, contest.line()


def gathered(args, chosen):
    """Runs --jobs or --apart: this program for parts of the losses, whose lines --json gathers."""
    others = [argument for argument in sys.argv if argument != "--apart"]

    def started(part, *options):  # the last --loss is effective, --jobs 1 ends the division
        names = [case.name for case in part]
        return subprocess.Popen([sys.executable, *others, "--jobs", "1", *options, "--loss", *names])

    if args.jobs > 1:
        with tempfile.NamedTemporaryFile() as lock:
            running = [started(chosen[job :: args.jobs], "--lock", lock.name) for job in range(args.jobs)]
            failed = any([process.wait() for process in running])
    else:
        failed = any([started([case]).wait() for case in chosen])
    if failed:
        raise SystemExit("a process failed: see above")
    return [json.loads(text) for text in args.json.read_text().splitlines()]


def ratio(found, name, clock):
    """Returns the ratio of medians to the function's; NaN where the function does not run."""
    first = found[FIRST]
    return statistics.median(found[name][clock]) / statistics.median(first[clock]) if clock in first else float("nan")


def show(case, sizes, found):
    print(f"{case.family}: {case.name}, {case.big}, {case.big_bytes(sizes) / 2**20:.0f} MiB", flush=True)
    for name, entry in found.items():
        if "failed" in entry:
            print(f"  {name:34} {entry['failed']}", flush=True)
            continue
        median = statistics.median(entry["times"])
        text = f"  {name:34} {median * 1e3:9.1f} ms {ratio(found, name, 'times'):6.2f} {ratio(found, name, 'cpu_times'):6.2f}"
        text += f" {entry['peak'] / 2**20:9.1f} MiB"
        text += f"   first call {entry['first_s']:6.2f} s"
        if entry.get("report"):
            text += "   reports {:.1f}, measured {:.1f} MiB".format(*(b / 2**20 for b in entry["report"]))
        if "kernels" in entry:
            text += "   {1} kernels of {0:.3f} ms, host {2:.3f} ms".format(*entry["kernels"])
        print(text, flush=True)


def print_table(lines):
    """Prints a row for each loss: median ms over the time of the GEMMs, and MiB of the peak beyond inputs."""
    names = [n for n in dict.fromkeys(name for line in lines for name in line["found"]) if n != GEMMS]
    print(f"\n| loss | {' | '.join(names)} |\n|{'---|' * (len(names) + 1)}")
    for line in lines:
        cells = []
        least = statistics.median(line["found"][GEMMS]["times"])
        for entry in (line["found"].get(name, {"failed": "not run"}) for name in names):
            if "failed" in entry:
                cells.append(entry["failed"][:40])
                continue
            median = statistics.median(entry["times"])
            cells.append(f"{median * 1e3:.1f} ({median / least:.2f}), {entry['peak'] / 2**20:.0f}")
        print(f"| {line['loss']} | {' | '.join(cells)} |")
    of_gemms = statistics.median(t for line in lines for t in line["found"][GEMMS]["times"])
    print(f"\nms (over the time of the three GEMMs, {of_gemms * 1e3:.2f} ms), peak MiB beyond inputs")


def summarize(lines, clock):
    """Prints for each contender the losses chunked within a quarter, median and worst ratio, and predicted over
    measured memory."""
    names = dict.fromkeys(name for line in lines for name in line["found"] if name != FIRST)
    print(f"{len(lines)} losses")
    for name in names:
        ratios, quarter, report, refused = {}, 0, {}, []
        for line in lines:
            entry, first = line["found"].get(name), line["found"][FIRST]
            if entry is None or "failed" in first:
                continue
            if "failed" in entry:
                refused.append(line["loss"])
                continue
            ratios[line["loss"]] = ratio(line["found"], name, clock)
            if entry.get("report"):
                said, was = entry["report"]
                quarter += was <= line["big"] / 4
                report[line["loss"]] = said / max(was, 1) - 1
        if not ratios:
            continue
        worst = sorted(ratios, key=ratios.get, reverse=True)
        print(f"{name}: {len(ratios)} run, {len(refused)} do not; time over the function's: median "
              f"{statistics.median(ratios.values()):.2f}, over 1.3 in {sum(r > 1.3 for r in ratios.values())}, worst "
              + ", ".join(f"{n} {ratios[n]:.2f}" for n in worst[:8]))
        if report:
            off = sorted(report, key=lambda n: abs(report[n]), reverse=True)
            print(f"  within a quarter of the big value: {quarter}; report within 10 % of measured: "
                  f"{sum(abs(r) <= 0.1 for r in report.values())} of {len(report)}, worst "
                  + ", ".join(f"{n} {100 * report[n]:+.0f} %" for n in off[:8]))


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gpu", action="store_true", help="what a GPU is compared by; other options change it")
    parser.add_argument("--gemms", action="store_true", help="times the three GEMMs, too")
    parser.add_argument("--table", action="store_true", help="prints a table at the end; with --gemms")
    parser.add_argument("--loss", nargs="+", default=["z_loss"])
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--dim", type=int, default=256)
    parser.add_argument("--vocab", type=int, default=16384)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--budget", nargs="*", default=["0", "64MiB"])
    parser.add_argument("--chunks", nargs="*", type=int, default=[])
    parser.add_argument("--executors", nargs="*", choices=["auto", "python", "native"], default=["python", "native"])
    parser.add_argument("--inductor", nargs="*", choices=["plain", "chunker"], default=[])
    parser.add_argument("--repeat", type=int, default=7)
    parser.add_argument("--clock", choices=["times", "cpu_times"], default="times", help="that summaries are of")
    parser.add_argument("--apart", action="store_true", help="each loss in a process of its own")
    parser.add_argument("--jobs", type=int, default=1, help="processes that share the losses")
    parser.add_argument("--lock", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--summary", type=Path, nargs="+")
    parser.add_argument("--explain", action="store_true", help="print what was done")
    parser.add_argument("--kernels", action="store_true", help="print the time of a step's kernels on a GPU")
    if parser.parse_known_args()[0].gpu:
        parser.set_defaults(**GPU)
    args = parser.parse_args()
    if args.kernels and args.device != "cuda":
        raise SystemExit("--kernels: expected --device cuda as well")
    if args.table and not args.gemms:
        raise SystemExit("--table: expected --gemms as well")
    if args.summary:
        lines = [json.loads(text) for path in args.summary for text in path.read_text().splitlines()]
        return summarize(lines, args.clock)
    chosen, sizes = cases(args.loss), Sizes(args.tokens, args.dim, args.vocab)
    if args.apart or args.jobs > 1:
        if not args.json:
            raise SystemExit("--apart, --jobs: expected --json as well, to gather what the processes find")
        return summarize(gathered(args, chosen), args.clock)
    kind = torch.cuda.get_device_name() if args.device == "cuda" else f"CPU, {torch.get_num_threads()} threads"
    print(f"{args.tokens} x {args.dim} x {args.vocab}, {args.dtype}, PyTorch {torch.__version__}, {kind}", flush=True)
    lines = []
    for case, line in compared(args, chosen, sizes):
        show(case, sizes, line["found"])
        lines.append(line)
        if args.json:
            with args.json.open("a") as file:
                file.write(json.dumps(lines[-1]) + "\n")
    if args.table:
        print_table(lines)
    if len(lines) > 1:
        summarize(lines, args.clock)


if __name__ == "__main__":
    main()
