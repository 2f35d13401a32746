#!/usr/bin/env python3
"""Checks that options without effect are refused by name, before any work (path of the command in LOGITLESS_CLI)."""

import os
import subprocess
import sys
import tempfile
import unittest
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))
from tensor_files import write_safetensors  # noqa: E402

CLI = os.environ.get("LOGITLESS_CLI", "")
ENVIRONMENT = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
TOKENS, DIM, VOCAB = 4, 8, 16
PROGRAM = "graph square(%x: f32[4]) {\n  %y = mul %x, %x\n  return y: %y\n}\n"
FAR = "only --plan far-backward and far-both have it"
NO_GRADIENT = "no gradient is made without --out, or a --plan that makes gradients"
FORWARD = "is of gradients, and --plan forward makes none"
BESIDE_JSON = "cannot be given beside --json, which is all of it"
STOPS = "cannot be given beside --dump-after, which stops"


class RefusalTest(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.folder = tempfile.TemporaryDirectory()
        cls.dir = Path(cls.folder.name)
        cls.program = cls.dir / "square.ir"
        cls.program.write_text(PROGRAM)
        file = cls.dir / "head.safetensors"
        write_safetensors(file, {
            "hidden": ("F32", [TOKENS, DIM], [0.5] * (TOKENS * DIM)),
            "weight": ("F32", [VOCAB, DIM], [0.25] * (VOCAB * DIM)),
            "targets": ("I32", [TOKENS], [1, 2, 3, 4]),
        })
        cls.head = [f"--{name}={file}:{name}" for name in ("hidden", "weight", "targets")]
        cls.sizes = ["--tokens=64", "--dim=16", "--vocab=512"]

    @classmethod
    def tearDownClass(cls):
        cls.folder.cleanup()

    def run_command(self, *arguments):
        return subprocess.run([CLI, *map(str, arguments)], capture_output=True, text=True, timeout=120, env=ENVIRONMENT,
                              check=False)

    def refused(self, command, arguments, message):
        with self.subTest(command=command, arguments=arguments):
            done = self.run_command(command, *arguments)
            self.assertEqual((done.returncode, done.stdout), (2, ""), done.stderr)
            self.assertEqual(done.stderr, f"logitless {command}: {message}\n")

    def taken(self, *arguments):
        with self.subTest(arguments=arguments):
            done = self.run_command(*arguments)
            self.assertEqual((done.returncode, done.stderr), (0, ""))
            return done.stdout

    def test_loss(self):
        for option in ("--grad-loss=2", "--grad-dtype=f32"):
            name = option.split("=")[0]
            self.refused("loss", [*self.head, option], f"{name}: {NO_GRADIENT}")
            self.refused("loss", [*self.head, option, "--plan=forward", f"--out={self.dir / 'none'}"], f"{name}: {FORWARD}")
            self.taken("loss", *self.head, option, "--plan=recompute")
            self.taken("loss", *self.head, option, f"--out={self.dir / 'out.safetensors'}")
        for reduction in ("none", "sum"):
            self.refused("loss", [*self.head, "--nan-if-empty", f"--reduction={reduction}"],
                         "--nan-if-empty: is of --reduction mean")
        self.refused("loss", [*self.head, "--nan-if-empty", "--normalizer=3"],
                     "--nan-if-empty: a mean that --normalizer divides is 0 over no token")
        ignored = ["--ignore-index=1", "--first=1"]  # a mean over no token
        self.assertRegex(self.taken("loss", *self.head, *ignored, "--nan-if-empty"), r"^loss +nan \(mean\)")
        self.assertRegex(self.taken("loss", *self.head, *ignored, "--normalizer=3"), r"^loss +0 \(mean\)")
        self.refused("loss", [*self.head, "--precision=tf32"], "precision: tf32 is for a GPU, the device is a CPU")
        self.taken("loss", *self.head, "--precision=ieee")
        self.refused("loss", [*self.head, "--audit=2"], f"--audit: {FAR}")
        far = [*self.head, "--plan=far-backward"]
        self.refused("loss", [*far, "--sample-seed=2"], "--sample-seed: is of --sample-every, which is 0")
        self.refused("loss", [*far, f"--order={self.program}", "--order-rows=9"],
                     "--order-rows: is of a fresh order, and --order names a file")
        self.refused("loss", [*far, "--tau=0"], "--tau: expected a number in (0, 1), got 0")
        file = self.dir / "head.safetensors"
        self.refused("loss", [f"--hidden={file}", *self.head[1:]],
                     f"--hidden: '{file}' holds 3 tensors, expected FILE:NAME; there are: 'hidden', 'weight', 'targets'")

    def test_plan(self):
        gradients = ("--grad-dtype=f32", "--no-d-hidden", "--no-d-weight", "--entropy-gradient", "--accumulate")
        for option in gradients:
            self.refused("plan", [*self.sizes, "--plan=forward", option], f"{option.split('=')[0]}: {FORWARD}")
            self.taken("plan", *self.sizes, option)
        for option in ("--grad-dtype=f32", "--entropy-gradient", "--accumulate"):
            self.refused("plan", [*self.sizes, "--no-d-hidden", "--no-d-weight", option],
                         f"{option.split('=')[0]}: is of gradients, and --no-d-hidden and --no-d-weight leave none")

    def test_order(self):
        arguments = [*self.head[:2], f"--out={self.dir / 'order'}"]
        self.refused("order", [*arguments, "--tau=0.01"], "--tau: is of --moments, which was not given")
        self.taken("order", *arguments, "--tau=0.01", "--moments")
        file = self.dir / "nan.safetensors"
        hidden = [0.5] * (TOKENS * DIM)
        hidden[9] = float("nan")
        write_safetensors(file, {"hidden": ("F32", [TOKENS, DIM], hidden)})
        self.refused("order", [f"--hidden={file}", *arguments[1:]],
                     "--hidden, --weight: expected finite numbers; the average probability of vocabulary entry 0 is nan")
        far = [f"--hidden={file}", *self.head[1:], "--plan=far-backward"]
        self.assertRegex(self.taken("loss", *far), r"^loss +nan \(mean\)")

    def test_bench(self):
        self.refused("bench", [*self.sizes, "--first=2"], "--first: is of --hidden; random data has --tokens")
        for option in ("--dim=3", "--dtype=f32"):
            self.refused("bench", [*self.head, option],
                         f"{option.split('=')[0]}: the tensors of files have sizes and types of their own")
        self.refused("bench", [*self.sizes, "--spread=-1"], "--spread: expected a number of at least 0, got '-1'")
        for option in ("--spread=2", "--seed=7"):
            self.refused("bench", [*self.head, option], f"{option.split('=')[0]}: is of random data, and the tensors are of files")

    def test_compile(self):
        file = self.program
        self.refused("compile", [f"--model={file}"], f"--model: '{file}': expected an object")
        self.refused("compile", [file, "--dtype=f32"], "--dtype: goes with --model; a program has types of its own")
        self.refused("compile", [file, "--no-chunk", "--chunks=2"], "--chunks: cannot be given beside --no-chunk")
        self.refused("compile", [file, "--no-chunk", "--strict"],
                     "--strict: beside --no-chunk it is of --budget, which was not given")
        self.taken("compile", file, "--no-chunk", "--strict", "--budget=1MiB")
        for option in ("--explain", "--text"):
            done = self.run_command("compile", file, "--json", option)
            self.assertEqual((done.returncode, done.stderr), (2, f"logitless compile: {option}: {BESIDE_JSON}\n"))
            self.refused("compile", [file, "--dump-after=all", option], f"{option}: {STOPS}")

    def test_train(self):
        texts = self.dir / "texts"
        texts.mkdir()
        (texts / "a.txt").write_text("words\n" * 500)
        link = self.dir / "link"
        link.symlink_to(texts)
        for option in ("--log", "--save", "--export"):
            for folder in (texts, link):
                for name in ("a.txt", "new.safetensors"):
                    if (option, name) == ("--export", "a.txt"):  # a file of another kind is refused anywhere
                        message = f"{option}: '{texts / name}': is a file, expected a folder or FILE.safetensors"
                    else:
                        message = f"{option}: '{texts / name}' lies in '{folder}' of --text, whose files are read"
                    self.refused("train", ["--text", folder, f"{option}={texts / name}"], message)
        self.refused("train", ["--text", texts / "a.txt", "--text", self.dir, "--save", self.dir / "run.safetensors"],
                     f"--save: '{self.dir / 'run.safetensors'}' lies in '{self.dir}' of --text, whose files are read")
        self.assertEqual(sorted(path.name for path in texts.iterdir()), ["a.txt"])
        self.refused("train", ["--temperature=0", "--top-k=5"],
                     "--top-k: is of --temperature above 0, with which there is a choice")

    def test_no_bytes_are_no_budget(self):
        for command, arguments in (("loss", self.head), ("plan", self.sizes), ("bench", self.sizes),
                                   ("compile", [self.program]), ("train", [])):
            for none in ("0", "0MiB", "0.2"):
                self.refused(command, [*arguments, f"--budget={none}"], f"--budget: expected at least one byte, got '{none}'")
        self.refused("train", ["--shard-size=0"], "--shard-size: expected at least one byte, got '0'")

    def test_verbose_says_something(self):
        order = ["order", *self.head[:2], f"--out={self.dir / 'said'}", "--rows=3", "--threads=1"]
        for arguments, said in (
                (["plan", *self.sizes, "--plan=dense"], "plan dense: 3.00 passes over 64 tokens x 512 vocabulary entries x 16"),
                (["loss", *self.head, "--plan=recompute"], f"plan recompute: 4.00 passes over {TOKENS} tokens"),
                (order, f"3 of {TOKENS} tokens are sampled, {VOCAB} vocabulary entries of dim {DIM} in 1 tiles, 1 thread\n")):
            with self.subTest(arguments=arguments):
                self.taken(*arguments)
                self.assertIn(said, self.run_command(*arguments, "--verbose").stderr)

    def test_a_flag_takes_no_value(self):
        for command, option in (("loss", "--json"), ("loss", "--verbose"), ("train", "--untied"), ("compile", "--no-chunk")):
            for value in ("false", "2", "maybe"):
                self.refused(command, [f"{option}={value}"], f"{option}: takes no value")

    def test_standard_streams_that_are_closed_or_full(self):
        verbose = f"'{CLI}' loss {' '.join(self.head)} --verbose --out '{self.dir / 'kept.safetensors'}'"
        for shell, status in ((f"'{CLI}' nothing 2>/dev/full", 2), (f"'{CLI}' nothing >&- 2>&-", 2), (f"{verbose} 2>&-", 0),
                              (f"{verbose} 2>/dev/full", 0), (f"{verbose} >&-", 1), (f"'{CLI}' --version >/dev/full", 1)):
            with self.subTest(shell=shell):
                done = subprocess.run(shell, shell=True, capture_output=True, timeout=120, env=ENVIRONMENT, check=False)
                self.assertEqual(done.returncode, status, done.stderr)

    def test_an_empty_text_is_no_value(self):
        for command, arguments, option, wanted in (
                ("loss", self.head, "--out", "FILE"), ("loss", self.head, "--kernel", "NAME"),
                ("bench", self.head[1:], "--hidden", "TENSOR"), ("plan", self.sizes, "--softcap", "X"),
                ("train", [], "--save", "FILE"), ("train", [], "--prompt", "TEXT"), ("train", [], "--data", "a value"),
                ("compile", [self.program], "--html", "a value"), ("report", [self.program], "--out", "a value")):
            self.refused(command, [*arguments, option, ""], f"{option}: expected {wanted}, got ''")


if __name__ == "__main__":
    unittest.main()
