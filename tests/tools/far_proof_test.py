"""Tests of bench/far_proof: its selection of text, where it writes, and its report of logs."""

import array
import contextlib
import gzip
import io
import json
import multiprocessing
import struct
import subprocess
import sys
import tempfile
import unittest
from collections import Counter
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "bench"))

import far_proof_report  # noqa: E402
import far_proof_text  # noqa: E402

SENTENCE = "the {} quick brown fox jumps over a lazy dog and says so at length, more than once\n"
PLACES = ("alpha beta gamma delta epsilon zeta eta theta iota kappa lambda mu nu xi omicron pi rho sigma tau upsilon phi chi psi "
          "omega").split()


def prose(name, lines=8):
    return "".join(SENTENCE.format(name + " " + place) for place in PLACES[:lines])


class Text(unittest.TestCase):
    def collected(self, folder, most=1e9, share=1.0):
        with multiprocessing.Pool(2) as pool:
            return far_proof_text.collect(pool, [str(folder)], 4096, most, share)

    def tree(self, folder, files):
        for name, text in files.items():
            path = Path(folder, name)
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(text if isinstance(text, bytes) else text.encode())

    def test_one_of_each_and_nothing_that_is_no_text(self):
        with tempfile.TemporaryDirectory() as folder:
            self.tree(folder, {
                "a/one.py": prose("one"), "b/copy.py": prose("one"), "two.md": prose("two"),
                "pages/three.1.gz": gzip.compress(prose("three").encode()),
                "again.md": prose("two").upper().replace(",", ";  \n"),  # the same letters
                "short.md": "too short\n", "latin.txt": "\xe9".encode("latin-1") * 400, "table.txt": "12345 67890\n" * 90,
                "small.js": "var a=" + "b(c)," * 2000, "what.bin": prose("four"), "no.c": prose("zero").replace(" ", "\0")})
            Path(folder, "link.py").symlink_to(Path(folder, "what.bin"))
            files, left_out = self.collected(folder)
            found = {Path(f["path"]).name: f["kind"] for f in files}
            self.assertEqual(len(files), 3)
            self.assertEqual((found["one.py"], found["three.1.gz"]), ("python", "manuals"))
            self.assertEqual(len({"two.md", "again.md"} & set(found)), 1)
            self.assertEqual(left_out, Counter({"copies": 1, "begin as another": 1, "no text, short or machine-made": 5}))
            self.assertEqual([f["digest"] for f in files], sorted(f["digest"] for f in files))

    def test_neither_names_nor_folders_matter(self):
        digests = []
        for names in (["a/{}.md", "b/{}.md"], ["z/{}.md", "{}.md"]):
            with tempfile.TemporaryDirectory() as folder:
                self.tree(folder, {names[i % 2].format(vocab_id + names[0][0]): prose(vocab_id) for i, vocab_id in enumerate(PLACES)})
                files, _ = self.collected(folder)
                digests.append([(f["digest"], f["bytes"]) for f in files])
        self.assertEqual(len(digests[0]), len(PLACES))
        self.assertEqual(*digests)

    def test_ceilings(self):
        with tempfile.TemporaryDirectory() as folder:
            self.tree(folder, {f"{vocab_id}.{'py' if i % 4 else 'md'}": prose(vocab_id) for i, vocab_id in enumerate(PLACES)})
            size = len(prose("alpha"))
            files, left_out = self.collected(folder, most=10 * size, share=0.5)
            of = Counter()
            for f in files:
                of[f["kind"]] += f["bytes"]
            self.assertLessEqual(of["python"], 5 * size)
            self.assertGreaterEqual(of["python"], 3 * size)
            self.assertEqual(left_out["over --bytes or --share"], len(PLACES) - len(files))
            long = Path(folder, "long.md")
            long.write_text(prose("long", 24) * 4, encoding="utf-8")
            cut = far_proof_text.text_of(long, 1000)
            self.assertTrue(900 < len(cut) <= 1000 and cut.endswith("\n"))

    def test_a_held_out_file_of_training_lines_is_dropped(self):
        with tempfile.TemporaryDirectory() as folder:
            self.tree(folder, {"train.md": prose("one", 20), "leak.md": prose("one", 12) + prose("two", 4),
                               "clean.md": prose("three", 12) + prose("one", 1)})
            train, *held_out = ({"path": f"{folder}/{name}.md"} for name in ("train", "leak", "clean"))
            clean, lines, met = far_proof_text.without_leaks(2, [train], held_out, 1 << 20)
            self.assertEqual(([Path(f["path"]).stem for f in clean], lines, met), (["clean"], 13, 1))

    def test_token_files(self):
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder, "t.bin")
            counts = far_proof_text.write_tokens(path, (array.array("H", part) for part in ([1, 2, 0], [3, 0], [4])), 50257, 4)
            self.assertEqual(counts, [3, 1])
            header = struct.pack("<3i", 20240520, 1, 4).ljust(1024, b"\0")
            self.assertEqual(path.read_bytes(), header + struct.pack("<4H", 1, 2, 0, 3))
            far_proof_text.write_tokens(path, [array.array("I", [70000])], 131072, 9)
            header = struct.pack("<3i", 20240801, 7, 1).ljust(1024, b"\0")
            self.assertEqual(path.read_bytes(), header + struct.pack("<I", 70000))

    def test_first_words_of_a_tokenizer(self):
        vocab = {vocab_id: i for i, vocab_id in enumerate(["<|end|>", "a", "b", "ab", "abb", "aab"])}
        whole = {"model": {"vocab": vocab, "merges": [["a", "b"], ["ab", "b"], ["a", "ab"]]}}
        self.assertEqual(far_proof_text.first_words(whole, 6), whole)
        self.assertEqual(far_proof_text.first_words(whole, 5)["model"],
                         {"vocab": {w: i for w, i in vocab.items() if i < 5}, "merges": [["a", "b"], ["ab", "b"]]})


def log(way, seed, off=0.0, ms=10.0, far_ms=6.0, steps=40):
    """Returns a log like that of `logitless train`: far from step 11 on, an audit each 5 steps, an order that takes 50
    ms at step 10."""
    far_field = 0.01 if way != "dense" else 0.0
    lines = [{"kind": "run", "logitless": "0.1.0", "steps": steps, "tokens_per_step": 100, "train_tokens": 8000,
              "device": "NVIDIA H200", "model": {"type": "gpt2", "layers": 1, "dim": 8, "vocab": 1000, "dtype": "bf16"},
              "options": {"far-field": far_field, "far-both": way == "both", "seed": seed, "length": 10, "lr": 0.1}}]
    audits, mean = 0, 0.0
    for step in range(1, steps + 1):
        far = way != "dense" and step > 10
        line = {"kind": "step", "step": step, "loss": 9.0, "seconds": 1e-3 * ((far_ms if far else ms) + 50.0 * (step == 10))}
        if way != "dense":
            if step % 5 == 0 and far:
                audits += 1
                mean += ((0.3 if step > 20 else 0.1) - mean) / audits
            line["far_field"] = {"steps": step, "dense_steps": min(step, 10), "repeated_steps": 0, "audits": audits,
                                 "orders": int(step >= 10), "last_error": 0.001 * step if audits else None,
                                 "worst_accepted_error": 0.001 * 10, "tau": 0.003, "mean_selected": mean}
        lines.append(line)
        if step % 10 == 0:
            lines.append({"kind": "validation", "step": step, "loss": 8.0 - 0.1 * step + off, "seconds": 1.0})
    return lines + [{"kind": "end", "step": steps, "reason": "done"}]


# Writes its arguments as its log, and, with a far field, ends on an interrupt; fails for seed 7.
FAKE = """#!/bin/sh
trap 'kill $!; exit 130' INT
case "$*" in *"--seed 7"*) echo "--seed: no such seed"; exit 1;; esac
echo "step 1: validation loss 5.0"
log=$(echo "$*" | sed 's/.*--log \\([^ ]*\\).*/\\1/')
echo "$*" >"$log"
case "$*" in *--far-field*) sleep 60 & wait;; esac
"""


class Run(unittest.TestCase):
    def run_script(self, folder, *more):
        command = [sys.executable, str(Path(far_proof_report.__file__).with_name("far_proof.py")), "run", "--logitless",
                   f"{folder}/logitless", "--words", folder, "--out", f"{folder}/runs", "--vocab", "600", *more]
        return subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)

    def test_each_way_and_what_ends_a_run(self):
        with tempfile.TemporaryDirectory() as folder:
            for name in ("train", "val"):
                Path(folder, f"{name}_600.bin").touch()
            Path(folder, "logitless").write_text(FAKE, encoding="utf-8")
            Path(folder, "logitless").chmod(0o755)
            # 2.5 batches of 4 x 8, rounded to the even 2.
            done = self.run_script(folder, "--ways", "dense,both", "--run-limit", "1", "--tokens", "80", "--batch", "4",
                                   "--length", "8", "--", "--threads", "1")
            self.assertEqual(done.returncode, 0, done.stdout)
            self.assertIn("gpt2_600_dense_1: done", done.stdout)
            self.assertIn("gpt2_600_both_1: stopped after 1 s", done.stdout)
            with gzip.open(f"{folder}/runs/gpt2_600_both_1.jsonl.gz", "rt") as log:
                given = log.read()
            for part in ("train --device cuda", "--vocab 600", "--steps 2", "--dim 768", "--far-field 0.01 --far-both --threads 1"):
                self.assertIn(part, given)
            command = json.loads(Path(folder, "runs/gpt2_600_dense_1.run.json").read_text(encoding="utf-8"))["command"]
            self.assertNotIn("--far-field", command)
            done = self.run_script(folder, "--ways", "dense", "--seeds", "7")
            self.assertEqual(done.returncode, 1)
            self.assertIn("no such seed", done.stdout)
            done = self.run_script(folder, "--ways", "dense", "--limit", "20")
            self.assertIn("gpt2_600_dense_1: not begun", done.stdout)

    def test_refusals(self):
        with tempfile.TemporaryDirectory() as folder:
            self.assertIn("--vocab 600 writes it", self.run_script(folder).stdout)
            self.assertIn("--ways: expected dense, backward, both, got far", self.run_script(folder, "--ways", "far").stdout)


class Report(unittest.TestCase):
    def written(self, logs, head_ms=None):
        with tempfile.TemporaryDirectory() as name, contextlib.redirect_stdout(io.StringIO()):
            folder = Path(name)
            for file, lines in logs.items():
                text = "".join(json.dumps(line) + "\n" if isinstance(line, dict) else line for line in lines)
                (folder / file).write_bytes(gzip.compress(text.encode()) if file.endswith(".gz") else text.encode())
            status = far_proof_report.write_report([folder], folder / "out", [0.6, 0.4], head_ms)
            made = {path.name: path.read_text(encoding="utf-8") for path in (folder / "out").glob("*")} if status == 0 else {}
            return status, made

    def row(self, text, beginning):
        return [cell.strip() for line in text.splitlines() if line.startswith(f"| {beginning} ") for cell in line.split("|")[1:-1]]

    def test_of_whole_runs(self):
        status, made = self.written({"a.jsonl.gz": log("dense", 1), "b.jsonl.gz": log("dense", 2, off=0.25),
                                     "c.jsonl": log("both", 1, off=-0.01)})
        self.assertEqual(status, 0)
        text = made["report.md"]
        both = self.row(text, "both, seed 1")
        self.assertEqual(both[1:6], ["40", "3.9900", "-0.0100", "-0.0100", "done"])
        self.assertIn("Dense, 2 seeds: 0.2500 nats apart at step 40.", text)
        # 1000 x 8 of 1000 x 8 + 12 x 8 x 8 + 10 x 8 multiply-adds: a far step is to take 1 - 0.904 x 0.6.
        self.assertEqual(both[7:16], ["16667", "924", "6.0", "73.3 %", "6.0", "40.0 % of 54.2 %", "90.4 %", "0.56", "0.4"])
        kept = both[17:25]
        self.assertEqual(kept[:3], ["23.3 %", "-, 10.0 %, 30.0 %, 30.0 %", "30.0 %"])
        self.assertEqual(kept[3:5], ["2.8 %", "-, 1.8 %, 2.8 %, 3.8 %"])
        self.assertEqual(both[26:30], ["10 of 40", "11", "0", "1"])
        pictures = [name for name in made if name.endswith(".svg")]
        self.assertEqual(len(pictures), 5)
        for name in pictures:
            self.assertIn(f"]({name})", text)
            self.assertTrue(made[name].startswith("<svg") and "both, seed 1" in made[name])
            self.assertNotIn("nan", made[name])

    def test_of_what_there_is(self):
        killed = log("backward", 3)[:26] + ['{"kind":"step","st']
        status, made = self.written({"b.jsonl": killed})
        self.assertEqual(status, 0)
        self.assertEqual(self.row(made["report.md"], "backward, seed 3")[1:6], ["20", "6.0000", "", "", "killed"])
        self.assertEqual(self.written({})[0], 1)


if __name__ == "__main__":
    unittest.main()
