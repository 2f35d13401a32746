#!/usr/bin/env python3
"""Measures the throughput of `logitless train` beside busy processes, relative to a fair share of the cores.

    python3 bench/busy_machine.py [--busy 0,1,2] [--rounds 5] [--steps 60] [NAME=COMMAND ...] [-- TRAINING OPTIONS]

COMMAND is a logitless command, with `env NAME=VALUE` before it where needed; several are compared, interleaved round by
round (default: this=build/src/cli/logitless). Prints a row for each command and number of busy processes:

- the median tokens/s, and its ratio to the same command's on the idle machine
- that ratio over a fair share, which is min(1, C / (T + B)) for T threads on C cores beside B busy processes
- processor time per token, and how often a thread slept or lost its core in a step
- the mean number of runnable threads of other programs, which make the shares too low

On a machine that others use, --most-others 0.3 waits for quiet moments, and repeats the runs that were disturbed.
"""
import argparse
import json
import os
import shlex
import statistics
import subprocess
import sys
import threading
import time



def runnable():
    """Returns the number of runnable threads on the machine."""
    with open("/proc/stat") as file:
        return next(int(line.split()[1]) for line in file if line.startswith("procs_running"))


class Watch:
    """Measures the mean of runnable() while it is open."""

    def __enter__(self):
        self.samples, self.end = [], threading.Event()
        self.thread = threading.Thread(target=self.look)
        self.thread.start()
        return self

    def look(self):
        while not self.end.wait(0.05):
            self.samples.append(runnable() - 1)  # excludes this thread

    def __exit__(self, *_):
        self.end.set()
        self.thread.join()

    def mean(self):
        return statistics.mean(self.samples) if self.samples else 0.0


def wait_for_quiet(most, limit):
    end = time.monotonic() + limit
    calm = 0
    while calm < 8 and time.monotonic() < end:  # 80 ms
        time.sleep(0.01)
        calm = calm + 1 if runnable() - 1 <= most else 0


def measure(command, training, busy, threads, limit):
    """Returns tokens/s, processor seconds, sleeps and preemptions per second, and the runnable threads of other
    programs."""
    loads = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(busy)]
    try:
        time.sleep(0.2)
        with Watch() as watch:
            start = time.perf_counter()
            process = subprocess.Popen([*shlex.split(command), "train", "--json", *training], stdout=subprocess.PIPE,
                                       stderr=subprocess.DEVNULL)
            timer = threading.Timer(limit, process.kill)
            timer.start()
            text = process.stdout.read()
            _, status, usage = os.wait4(process.pid, 0)
            timer.cancel()
            seconds = time.perf_counter() - start
    finally:
        for load in loads:
            load.kill()
            load.wait()
    if os.waitstatus_to_exitcode(status) != 0:
        return None
    report = json.loads(text)
    return (report["tokens_per_second"], (usage.ru_utime + usage.ru_stime) / seconds, usage.ru_nvcsw / seconds,
            usage.ru_nivcsw / seconds, max(0.0, watch.mean() - busy - threads))


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("commands", nargs="*", metavar="NAME=COMMAND")
    parser.add_argument("--busy", default="0,1,2", help="numbers of busy processes")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=60, help="of one run")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--limit", type=float, default=300.0, help="seconds of one run, which counts as 0 tokens/s beyond")
    parser.add_argument("--most-others", type=float, default=1e9, help="threads of other programs that a run may meet")
    parser.add_argument("--tries", type=int, default=8, help="runs of which the least disturbed counts")
    split = sys.argv.index("--") if "--" in sys.argv else len(sys.argv)
    args = parser.parse_args(sys.argv[1:split])
    training = ["--eval-every", "1000000", "--sample", "0", "--threads", str(args.threads), *sys.argv[split + 1:]]
    commands = dict(text.split("=", 1) for text in args.commands or ["this=build/src/cli/logitless"])
    counts = [int(text) for text in args.busy.split(",")]
    cores = len(os.sched_getaffinity(0))

    for command in commands.values():  # caches tokenizer and token ids
        first = [*shlex.split(command), "train", "--json", *training, "--steps", "1"]
        subprocess.run(first, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, check=True)
    training += ["--steps", str(args.steps)]
    runs = {}
    for _ in range(args.rounds):
        for busy in counts:
            for name, command in commands.items():
                kept = None
                for _ in range(args.tries):
                    wait_for_quiet(args.most_others, args.limit)
                    run = measure(command, training, busy, args.threads, args.limit) or (0.0, 0.0, 0.0, 0.0, 0.0)
                    kept = run if kept is None or run[4] < kept[4] else kept
                    if kept[4] <= args.most_others:
                        break
                runs.setdefault((name, busy), []).append(kept)

    print(f"{cores} cores, {args.threads} threads, {args.rounds} rounds: train {' '.join(training)}")
    print(f"{'':16} {'busy':>4} {'tokens/s':>9} {'least':>9} {'of idle':>8} {'of fair':>8} {'cores':>6} {'sleeps/s':>9}"
          f" {'preempted/s':>11} {'others':>6}")
    for name in commands:
        for busy in counts:
            speed, used, sleeps, preempted, others = (statistics.median(part) for part in zip(*runs[name, busy]))
            idle = statistics.median(run[0] for run in runs[name, counts[0]])
            fair = min(1.0, cores / (args.threads + busy))
            share = speed / idle if idle else 0.0
            print(f"{name:16} {busy:4} {speed:9.0f} {min(run[0] for run in runs[name, busy]):9.0f} {share:8.2f}"
                  f" {share / fair:8.2f} {used:6.2f} {sleeps:9.0f} {preempted:11.0f}"
                  f" {others:6.1f}")


if __name__ == "__main__":
    main()
