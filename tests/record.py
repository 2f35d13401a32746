#!/usr/bin/env python3
"""Records all results of tests, programs and 20 training steps as hashes. Records are made before a change that must
not change a bit, and compared after it.

    tests/record.py [--build-dir build] [--cuda] [--only REGEX] [--shards N] OUT   # or: make build first, then this
    tests/record.py --compare BEFORE AFTER

Test programs (tests/support/recording.h) record the outputs of every call of the head's tests and the kernel harness:
each kernel that runs here, each plan and option of their tables. They also record the planner's explanations, and
results and decisions of the compiler's programs. The command records losses and checkpoints of 20 training steps, and
compiled programs. With --cuda, only the programs of tests/cuda run. Compare recordings of one machine: kernels differ
between processors.

--compare prints the differences and the names that only one recording has, and fails unless both are equal. With
--common, a test that was added or removed is named, but is no difference.
"""
import argparse
import hashlib
import os
import re
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

TRAIN = {
    "f32": [],
    "bf16": ["--dtype", "bf16"],
    "untied": ["--untied", "--accumulate", "2"],
    "no-head-engine": ["--no-head-engine"],
    "no-chunk": ["--no-chunk", "--no-head-engine"],
    "budget": ["--budget", "64MiB"],
    "far-backward": ["--vocab", "65536", "--far-field", "0.05"],
    "far-both": ["--vocab", "65536", "--far-field", "0.05", "--far-both"],
}
COMPILE = {
    "default": [],
    "f32": ["--dtype", "f32"],
    "budget": ["--budget", "128MiB"],
    "chunks": ["--chunks", "8", "--no-head-engine"],
    "no-chunk": ["--no-chunk"],
}


def run(command, **options):
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, **options)
    if done.returncode != 0:
        sys.exit(f"record: {' '.join(map(str, command))}: status {done.returncode}\n"
                 f"{(done.stdout + done.stderr).decode(errors='replace')[-2000:]}")
    return done.stdout


def digest(data):
    return hashlib.sha256(data).hexdigest()[:16]


def without_times(text):
    return re.sub(rb"compiled in .*|.*[Ss]econds.*|.*tokens_per_s.*", b"", text)


def of_program(program, shard, shards):
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "record")
        env = {"LOGITLESS_RECORD": str(file), "GTEST_TOTAL_SHARDS": str(shards), "GTEST_SHARD_INDEX": str(shard)}
        run([program, "--gtest_brief=1"], env={**os.environ, **env})
        lines = file.read_text().splitlines() if file.exists() else []
    # A parameter without a printer is shown with its addresses.
    return [f"{program.name}\t{re.sub('object <[^>]*>', 'object', line)}" for line in lines]


def of_training(cli, name, options):
    with tempfile.TemporaryDirectory() as folder:
        saved = Path(folder, "saved")
        out = run([cli, "train", "--json", "--steps", "20", "--sample", "0", "--eval-every", "20", "--save", saved,
                   *options], env={**os.environ, "CUDA_VISIBLE_DEVICES": ""})
        losses = re.findall(rb'"(?:loss|grad_norm)": *[^,}]*', out)
        lines = [f"train {name}\t{i}\tloss\t{digest(v)}" for i, v in enumerate(losses)]
        return lines + [f"train {name}\t0\tcheckpoint\t{digest(saved.read_bytes())}"]


def of_compiling(cli, name, options):
    base = [cli, "compile", "--model", "gpt2", "--batch", "1", "--length", "256", *options]
    return [f"compile {name}\t0\t{kind}\t{digest(without_times(run([*base, *arguments])))}"
            for kind, arguments in (("text", ["--text"]), ("explain", ["--explain"]),
                                    ("passes", ["--dump-after", "all"]))]


def record(arguments):
    build, only = Path(arguments.build_dir), re.compile(arguments.only)
    names = ["cuda/cuda_*_test"] if arguments.cuda else ["kernels/*_test", "head/*_test", "compiler/*_test"]
    jobs = [lambda p=p, i=i: of_program(p, i, arguments.shards) for name in names
            for p in sorted(build.glob(f"tests/{name}")) if only.search(p.name) for i in range(arguments.shards)]
    if not arguments.cuda:
        cli = build / "src/cli/logitless"
        jobs += [lambda n=n, o=o: of_training(cli, n, o) for n, o in TRAIN.items() if only.search(f"train {n}")]
        jobs += [lambda n=n, o=o: of_compiling(cli, n, o) for n, o in COMPILE.items() if only.search(f"compile {n}")]
    if not jobs:
        sys.exit(f"record: nothing to record in {build}")
    with ThreadPoolExecutor(arguments.jobs) as pool:
        lines = sorted(line for lines in pool.map(lambda job: job(), jobs) for line in lines)
    Path(arguments.files[0]).write_text("\n".join(lines) + "\n")
    print(f"{len(lines)} records")


def compare(before, after, common):
    a, b = ({line.rpartition("\t")[0]: line.rpartition("\t")[2] for line in Path(f).read_text().splitlines()}
            for f in (before, after))
    differ = sorted(key for key in a.keys() & b.keys() if a[key] != b[key])
    for key in differ:
        print("differs:", key.replace("\t", " | "))
    alone = 0
    for name, keys in (("before", a.keys() - b.keys()), ("after", b.keys() - a.keys())):
        alone += len(keys)
        for test in sorted({key.rsplit("\t", 2)[0] for key in keys}):
            print(f"only {name}:", test.replace("\t", " | "))
    print(f"{len(a.keys() & b.keys()) - len(differ)} equal, {len(differ)} differ, {alone} of one alone")
    return 1 if differ or (alone and not common) else 0


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--build-dir", default="build")
    parser.add_argument("--cuda", action="store_true")
    parser.add_argument("--only", default="", metavar="REGEX")
    parser.add_argument("--jobs", type=int, default=os.cpu_count())
    parser.add_argument("--shards", type=int, default=1, help="processes that share the tests of a program")
    parser.add_argument("--compare", action="store_true")
    parser.add_argument("--common", action="store_true")
    parser.add_argument("files", nargs="+")
    arguments = parser.parse_args()
    if len(arguments.files) != (2 if arguments.compare else 1):
        parser.error("expected OUT, or --compare BEFORE AFTER")
    if arguments.compare:
        return compare(*arguments.files, arguments.common)
    record(arguments)
    return 0


if __name__ == "__main__":
    sys.exit(main())
