#!/usr/bin/env python3
"""Tests the log of `logitless train`, and the page that `logitless report` makes of it (path of the command in
LOGITLESS_CLI)."""

import json
import os
import resource
import signal
import subprocess
import sys
import unittest
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))
from browser import PageTest, faults  # noqa: E402
from train_test import CLI, CommandTest, SIZES, run  # noqa: E402

QUIET = ["--sample", 0]


def report(*arguments):
    return subprocess.run([CLI, "report", *map(str, arguments)], capture_output=True, text=True, timeout=120, check=False)


def lines_of(path, kind=None):
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    return [line for line in lines if kind in (None, line["kind"])]


class LogTest(CommandTest):
    def test_a_line_for_each_step(self):
        save = self.dir / "lines.safetensors"
        told = self.train(*SIZES, *QUIET, "--steps", 6, "--eval-every", 3, "--save", save)
        log = self.dir / "lines.log.jsonl"
        first, *rest = lines_of(log)
        self.assertEqual([line["kind"] for line in rest], ["step"] * 3 + ["validation"] + ["step"] * 3 + ["validation", "end"])
        self.assertEqual((first["kind"], first["format"], first["first_step"], first["steps"]), ("run", 1, 0, 6))
        self.assertEqual((first["options"]["batch"], first["tokens_per_step"], first["model"]["vocab"]), (2, 16, 300))
        self.assertEqual(first["memory"]["arena_bytes"], told["memory"]["arena_bytes"])
        self.assertGreater(max(first["program"]["timeline"]), 0)
        steps = lines_of(log, "step")
        self.assertEqual([(s["step"], s["tokens"]) for s in steps], [(i, 16 * i) for i in range(1, 7)])
        for name in ("loss", "lr", "grad_norm"):
            self.assertEqual([s[name] for s in steps], [s[name] for s in told["steps"]])
        self.assertEqual([s["seconds"] for s in steps], told["step_seconds"])
        self.assertEqual([v["loss"] for v in lines_of(log, "validation")], [v["loss"] for v in told["validations"]])
        self.assertEqual(lines_of(log, "end")[0]["reason"], "done")

    def test_a_resumed_run_goes_on_where_its_checkpoint_is(self):
        save, other = self.dir / "cut.safetensors", self.dir / "other.safetensors"
        log = self.dir / "cut.log.jsonl"
        self.train(*SIZES, *QUIET, "--steps", 4, "--save", save)
        whole = log.read_bytes()
        # Simulates a run killed before the next checkpoint: lines of steps after the last one, and half a line.
        later = {**lines_of(log, "step")[-1], "step": 5}
        log.write_bytes(whole + json.dumps(later).encode() + b"\n" + b'{"kind":"step","st')
        kept = log.read_bytes()
        self.train("--resume", save, "--save", other, "--steps", 6, *QUIET)
        self.assertEqual(log.read_bytes(), kept)  # another file's run has its own log
        self.train("--resume", save, "--save", save, "--steps", 6, *QUIET)
        for path in (log, self.dir / "other.log.jsonl"):
            self.assertTrue(path.read_bytes().startswith(whole))
            self.assertEqual([s["step"] for s in lines_of(path, "step")], [1, 2, 3, 4, 5, 6])
            self.assertEqual([s["tokens"] for s in lines_of(path, "step")], [16 * i for i in range(1, 7)])
            self.assertEqual([h["first_step"] for h in lines_of(path, "run")], [0, 4])
        # Both runs have the same losses.
        self.assertEqual(*([s["loss"] for s in lines_of(p, "step")] for p in (log, self.dir / "other.log.jsonl")))

    def test_a_run_without_a_file_has_a_log_where_it_is_told_one(self):
        log = self.dir / "alone.jsonl"
        self.train(*SIZES, *QUIET, "--steps", 2, "--log", log)
        self.assertEqual(len(lines_of(log, "step")), 2)
        self.assert_error(["--data", self.data, *SIZES, "--log", self.dir / "no" / "log"], "--log: ")
        self.assert_error(["--data", self.data, *SIZES, "--log", self.data], "--log: '")

    def test_a_run_that_fails_before_its_first_step_leaves_the_log(self):
        log = self.dir / "left.jsonl"
        log.write_text('{"kind":"run","mine":1}\n')
        self.assert_error(["--data", self.data, *SIZES, "--log", log, "--budget", "1KiB"], "--budget: ")
        self.assertEqual(log.read_text(), '{"kind":"run","mine":1}\n')

    def test_a_run_that_diverges_says_so(self):
        log = self.dir / "diverged.jsonl"
        done = run("--data", self.data, *SIZES, *QUIET, "--steps", 50, "--warmup", 0, "--lr", "1e38", "--min-lr", "1e38", "--log", log)
        self.assertEqual(done.returncode, 1)
        self.assertRegex(lines_of(log)[-1]["reason"], "^diverged: the ")

    def test_a_full_disk_stops_no_run(self):
        log, save = self.dir / "full.jsonl", self.dir / "full.safetensors"
        whole = self.train(*SIZES, *QUIET, "--steps", 8, "--log", self.dir / "room.jsonl")
        room = (self.dir / "room.jsonl").read_bytes()
        limit = room.index(b'"step":5') + 10  # in the middle of a line

        def full():
            signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
            resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))

        def train(*arguments):
            command = [CLI, "train", "--data", self.data, *SIZES, *QUIET, "--steps", 8, "--log", log, "--json", *arguments]
            # pylint: disable-next=subprocess-popen-preexec-fn
            return subprocess.run([*map(str, command)], capture_output=True, text=True, timeout=120, preexec_fn=full,
                                  env={**os.environ, "OMP_NUM_THREADS": "1"}, check=False)

        done = train()
        self.assertEqual(done.returncode, 0, done.stderr)
        self.assertEqual(json.loads(done.stdout)["steps"], whole["steps"])
        self.assertEqual(done.stderr.count("cannot be written: File too large; the run goes on"), 1, done.stderr)
        # The log has complete lines up to the limit.
        self.assertEqual([s["step"] for s in lines_of(log, "step")][:3], [1, 2, 3])
        self.assertTrue(log.read_bytes().endswith(b"}\n"))
        self.assertFalse(save.exists())


class ReportTest(CommandTest):
    @classmethod
    def setUpClass(cls):
        super().setUpClass()
        cls.save = cls.dir / "run.safetensors"
        cls.log = cls.dir / "run.log.jsonl"
        done = run("--data", cls.data, *SIZES, *QUIET, "--steps", 5, "--eval-every", 3, "--save", cls.save)
        assert done.returncode == 0, done.stderr

    def page_of(self, *arguments):
        done = report(*arguments)
        self.assertEqual((done.returncode, done.stderr), (0, ""))
        return done.stdout

    def test_a_page_that_stands_alone(self):
        self.assertEqual(self.page_of(self.save), f"wrote {self.dir}/run.log.html: 5 steps, 2 validations\n")
        text = (self.dir / "run.log.html").read_text()
        self.assertEqual(faults(text), [])
        self.assertRegex(text, r"<h1>gpt2 with \d+,\d{3} parameters, 5 steps of 16 tokens, f32</h1>")
        for name, value in {"warmup": 0, "min-lr": "0.0001", "eval-every": 3, "context": 8, "far-field": "no: every gradient is exact"}.items():
            self.assertIn(f"<td>--{name}</td><td>{value}</td>", text)
        self.assertNotIn("<td>-1", text)
        for title in ("Loss", "Speed", "Memory over a step", "What the head and the loops saved", "Learning rate", "Options"):
            self.assertIn(f"<h2>{title}", text)
        self.assertNotIn("Far field", text)

    def test_where_it_goes(self):
        out = self.dir / "page.html"
        told = json.loads(self.page_of(self.log, "--out", out, "--json"))
        self.assertEqual((told["page"], told["steps"], told["validations"], told["resumed"]), (str(out), 5, 2, 0))
        self.assertEqual(told["loss"], lines_of(self.log, "step")[-1]["loss"])
        self.assertIn("<svg", out.read_text())

    def test_a_torn_end(self):
        torn, out = self.dir / "torn.jsonl", self.dir / "torn.html"
        torn.write_bytes(self.log.read_bytes()[:-20])
        self.assertTrue(json.loads(self.page_of(torn, "--out", out, "--json"))["torn"])
        self.assertIn("The last line of the log is not whole", out.read_text())

    def test_names_are_text(self):
        # The options in a header are arbitrary text.
        first, rest = self.log.read_text().split("\n", 1)
        header = json.loads(first)
        header["options"]["text"] = ["<script>x</script>"]
        odd, out = self.dir / "odd.jsonl", self.dir / "odd.html"
        odd.write_text(json.dumps(header) + "\n" + rest)
        self.page_of(odd, "--out", out)
        self.assertNotIn("<script>", out.read_text())

    def test_nonsense_is_refused_with_its_line(self):
        lines = self.log.read_text().splitlines()
        bad = self.dir / "bad.jsonl"

        def changed(line, **fields):
            return json.dumps({**json.loads(line), **fields})

        cases = [
            ([], "there is no run in it"),
            (["hello"], ':1: expected a JSON object, got "hello"'),
            (["[1]"], ':1: expected a JSON object, got "[1]"'),
            (lines[1:], ':1: expected the run itself first, got a line of kind "step"'),
            ([changed(lines[0], format=2)], ":1: 'format': this program reads 1, got 2"),
            ([changed(lines[0], memory=[])], ":1: 'memory': expected an object, got []"),
            ([changed(lines[0], program={})], ":1: 'timeline' is missing"),
            ([*lines[:2], changed(lines[2], loss="low")], ":3: 'loss': expected a number, got \"low\""),
            ([*lines[:2], changed(lines[2], loss=None)], ":3: 'loss': expected a number, got null"),
            ([*lines[:2], changed(lines[2], step=-1)], ":3: 'step': expected a whole number from 0 on, got -1"),
            ([*lines[:2], lines[1]], ":3: step 1 stands after step 1"),
            ([lines[0], '{"kind": "epoch"}'], ":2: 'kind': expected run, step, validation or end, got \"epoch\""),
            ([lines[0], "{}"], ":2: 'kind' is missing"),
        ]
        for text, message in cases:
            with self.subTest(message=message):
                bad.write_text("".join(line + "\n" for line in text))
                done = report(bad)
                self.assertEqual(done.returncode, 2, done.stderr)
                self.assertIn(f"logitless report: {bad}", done.stderr)
                self.assertIn(message, done.stderr)
                self.assertFalse((self.dir / "bad.html").exists())

    def test_wrong_files(self):
        for arguments, message in (
                ([], "RUN is required"), ([self.dir / "none.jsonl"], "none.jsonl"),
                ([self.log, "--out", self.log], "is the log, which it would replace"),
                ([self.save, "--out", self.save], "is RUN, which it would replace"),
                ([self.log, "--out", self.dir / "no" / "page"], "--out"),
                ([self.data], ":1: "), ([self.dir], "there is no file")):
            done = report(*arguments)
            self.assertEqual(done.returncode, 2, done.stderr)
            self.assertIn(message, done.stderr)
        (self.dir / "lone.safetensors").write_bytes(self.save.read_bytes())
        self.assertIn("has no log beside it", report(self.dir / "lone.safetensors").stderr)


class BrowserTest(PageTest, CommandTest):
    def test_the_page_of_a_run(self):
        log, out = self.dir / "run.jsonl", self.dir / "run.html"
        self.train(*SIZES, *QUIET, "--steps", 45, "--log", log)
        lines = lines_of(log)
        for line in lines:
            if line["kind"] == "step":
                n = line["step"]
                line["far_field"] = {"steps": n, "dense_steps": min(n, 10), "repeated_steps": 1, "audits": n // 5, "orders": 1,
                                     "last_error": 0.01 / n if n >= 20 else None, "worst_accepted_error": 0.01, "tau": 1e-3,
                                     "mean_selected": 0.3}
        log.write_text("".join(json.dumps(line) + "\n" for line in lines))
        report(log, "--out", out)
        self.assert_legible(out, svgs=7)
        self.assertIn("45 steps of the head, 10 of them dense, 1 done again after an audit; 1 orders.", out.read_text())

    def test_a_long_run(self):
        log, out = self.dir / "long.jsonl", self.dir / "long.html"
        self.train(*SIZES, *QUIET, "--steps", 1, "--log", log)
        header, step = log.read_text().splitlines()[:2]
        many = [json.dumps({**json.loads(step), "step": i, "loss": 4.0 + 6.0 / i, "tokens": 16 * i}) for i in range(1, 20001)]
        log.write_text("\n".join([header, *many]) + "\n")
        report(log, "--out", out)
        self.assertLess(out.stat().st_size, 500000)
        self.assert_legible(out, svgs=5)
        self.assert_legible(out, svgs=5, width=620)

    def test_the_page_of_a_program(self):
        out = self.dir / "program.html"
        done = subprocess.run([CLI, "compile", "--model", "llama-tiny", "--batch", "1", "--length", "64", "--html", out],
                              capture_output=True, text=True, timeout=120, check=False)
        self.assertEqual((done.returncode, done.stdout), (0, f"wrote {out}\n"), done.stderr)
        found = self.assert_legible(out, svgs=2)
        self.assertRegex(out.read_text(), r"<td>layer\{0[-,]\d+\}[.<]")  # equal layers are one row
        self.assertGreater(found["titles"], 100)  # one for each instruction


if __name__ == "__main__":
    unittest.main()
