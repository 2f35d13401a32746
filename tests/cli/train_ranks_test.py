#!/usr/bin/env python3
"""Runs `logitless train --ranks` (path of the command in LOGITLESS_CLI): ranks that are threads, each with a part of
the CPU."""

import json
import os
import signal
import subprocess
import sys
import unittest
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))
from train_safety_test import QUIET, StopTest  # noqa: E402
from train_test import CLI, SIZES, CommandTest, run, shard  # noqa: E402


class RanksTest(CommandTest):
    def test_learn_what_one_rank_learns_of_as_many_batches(self):
        one = self.train(*SIZES, *QUIET, "--steps", 12, "--accumulate", 4)
        two = self.train(*SIZES, *QUIET, "--steps", 12, "--accumulate", 2, "--ranks", 2)
        four = self.train(*SIZES, *QUIET, "--steps", 12, "--ranks", 4)
        self.assertEqual((one["ranks"], two["ranks"], four["ranks"]), (1, 2, 4))
        for other in (two, four):
            self.assertEqual(len(other["steps"]), 12)
            for a, b in zip(one["steps"], other["steps"]):
                self.assertAlmostEqual(a["loss"], b["loss"], delta=2e-5)
                self.assertAlmostEqual(a["grad_norm"], b["grad_norm"], delta=2e-4)
            self.assertAlmostEqual(one["validations"][-1]["loss"], other["validations"][-1]["loss"], delta=2e-5)
        self.assertEqual([s["loss"] for s in two["steps"]],
                         [s["loss"] for s in self.train(*SIZES, *QUIET, "--steps", 12, "--accumulate", 2, "--ranks", 2)["steps"]])

    def test_write_files_once_and_go_on_from_them(self):
        save, out = self.dir / "ranks.safetensors", self.dir / "model.safetensors"
        whole = self.train(*SIZES, *QUIET, "--steps", 8, "--ranks", 2, "--lr", 1e-3, "--warmup", 0, "--min-lr", 1e-3)
        first = self.train(*SIZES, *QUIET, "--steps", 5, "--ranks", 2, "--lr", 1e-3, "--warmup", 0, "--min-lr", 1e-3,
                           "--save", save)
        rest = self.train("--resume", save, "--steps", 8, *QUIET, "--export", out)
        self.assertEqual(rest["ranks"], 2)  # the checkpoint's
        self.assertEqual([s["loss"] for s in first["steps"] + rest["steps"]], [s["loss"] for s in whole["steps"]])
        self.assertTrue(out.exists())
        self.assertTrue((self.dir / "config.json").exists())
        alone = self.train("--resume", save, "--steps", 8, *QUIET, "--ranks", 1, "--accumulate", 2)
        for a, b in zip(rest["steps"], alone["steps"]):
            self.assertAlmostEqual(a["loss"], b["loss"], delta=2e-5)
        log = [json.loads(line) for line in (self.dir / "ranks.log.jsonl").read_text().splitlines()]
        self.assertEqual((log[0]["ranks"], log[0]["tokens_per_step"]), (2, 2 * 2 * 8))
        self.assertEqual([line["step"] for line in log if line["kind"] == "step"], [1, 2, 3, 4, 5])

    def test_share_the_words_of_a_head(self):
        words = ["--vocab", 20001, *SIZES[2:], *QUIET, "--untied", "--lr", 1e-3, "--warmup", 0, "--min-lr", 1e-3]
        save = self.dir / "shared.safetensors"
        whole = self.train(*words, "--steps", 6, "--ranks", 3)
        first = self.train(*words, "--steps", 4, "--ranks", 3, "--shard-head", "--save", save)
        rest = self.train("--resume", save, "--steps", 6, "--sample", 5)
        self.assertEqual((rest["ranks"], len(rest["steps"])), (3, 2))
        alone = self.train("--resume", save, "--steps", 6, "--sample", 5, "--ranks", 1, "--accumulate", 3)
        for other in (first["steps"] + rest["steps"], first["steps"] + alone["steps"]):
            for a, b in zip(whole["steps"], other):
                self.assertAlmostEqual(a["loss"], b["loss"], delta=2e-5)
                self.assertAlmostEqual(a["grad_norm"], b["grad_norm"], delta=2e-4)
        self.assertAlmostEqual(whole["validations"][-1]["loss"], rest["validations"][-1]["loss"], delta=2e-5)
        self.assertEqual(rest["sample"], alone["sample"])
        undone = self.train("--resume", save, "--steps", 6, *QUIET, "--no-shard-head")
        for a, b in zip(rest["steps"], undone["steps"]):
            self.assertAlmostEqual(a["loss"], b["loss"], delta=2e-5)

    def test_diverge_together(self):
        done = run("--data", self.data, *SIZES, *QUIET, "--steps", 50, "--lr", "1e30", "--warmup", 0, "--ranks", 3,
                   "--save", self.dir / "diverged.safetensors")
        self.assertEqual(done.returncode, 1, done.stderr)
        self.assertRegex(done.stderr, "the (validation )?loss of step [0-9]+ is .*was not written")

    def test_end_where_one_cannot_read(self):
        # A token outside the vocabulary, 400 of 300, which only one rank reads, and after the first step.
        bad = self.dir / "bad.bin"
        shard(bad, [1] * 1201)
        command = [CLI, "train", "--data", bad, "--val", self.val, *SIZES, *QUIET, "--steps", 1000000, "--ranks", 2]
        with subprocess.Popen(list(map(str, command)), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
                              env={**os.environ, "OMP_NUM_THREADS": "1"}) as process:
            for line in process.stdout:
                if line.startswith("step "):
                    break
            with bad.open("r+b") as file:
                file.seek(1024 + 2 * 600)
                file.write((400).to_bytes(2, "little"))
            err = process.communicate(timeout=120)[1]
        self.assertEqual(process.returncode, 2, err)
        self.assertRegex(err, "expected tokens below 300 .vocab., found 400 at 600")

    def test_refusals(self):
        base = ["--data", self.data, *SIZES, *QUIET, "--steps", 1]
        self.assert_error([*base, "--ranks", 0], "--ranks: expected a whole number from 1 to 1024, got '0'")
        self.assert_error([*base, "--ranks", 2, "--device", "cuda"], "--device: cuda: 2 ranks want a GPU each: ")
        self.assert_error([*base, "--ranks", 2, "--shard-head"], "--shard-head: expected a head with a matrix of its own (--untied)")
        self.assert_error([*base, "--no-shard-head"], "--no-shard-head: is of --resume, which was not given")
        untied = [*base, "--ranks", 2, "--untied", "--shard-head"]
        self.assert_error([*untied, "--no-shard-head"], "--no-shard-head: cannot be given beside --shard-head")
        self.assert_error([*untied, "--far-field", 0.01], "--shard-head: cannot be given beside --far-field")
        self.assert_error([*untied, "--no-head-engine"], "--shard-head: cannot be given beside --no-head-engine")
        self.assert_error([*untied, "--no-chunk"], "--shard-head: cannot be given beside --no-chunk")
        self.assert_error([*untied, "--device", "cuda"], "--device: cuda does not serve --shard-head without --dtype bf16")
        # Logits of a few kilobytes are too small for the head engine.
        done = run(*untied)
        self.assertEqual(done.returncode, 2, done.stderr)
        self.assertRegex(done.stderr, "shard_head: .*the program has no head operation")


class RanksStopTest(StopTest):
    def test_signals_finish_the_step_of_all_and_save(self):
        save = self.dir / "stopped.safetensors"
        code, text, err = self.stopped(signal.SIGTERM, "--steps", 1000000, "--ranks", 2, "--save", save)
        self.assertEqual(code, 128 + signal.SIGTERM, err)
        self.assertRegex(text, f"stopped by SIGTERM after step [0-9]+ of 1000000; --resume '{save}' goes on from there")
        step = int(self.metadata(save)["step"])
        self.assertIn(f"after step {step} of", text)

    # The base class tests these with one rank.
    test_signals_finish_the_step_and_save = None
    test_without_save_it_says_that_nothing_is_kept = None


del StopTest, CommandTest

if __name__ == "__main__":
    if not CLI:
        sys.exit("LOGITLESS_CLI: expected the path of the command, got nothing")
    unittest.main()
