#!/usr/bin/env python3
"""Runs `logitless train` (path of the command in LOGITLESS_CLI) on small files: runs, resumed runs and refusals."""

import json
import math
import os
import random
import struct
import subprocess
import sys
import tempfile
import unittest
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))
from tensor_files import read_safetensors, write_safetensors  # noqa: E402

CLI = os.environ.get("LOGITLESS_CLI", "")
# All runs here are on the CPU; tests/train/device_trainer_test.cpp runs on a GPU.
os.environ["CUDA_VISIBLE_DEVICES"] = ""
SIZES = ["--vocab", "300", "--dim", "16", "--heads", "2", "--layers", "1", "--length", "8", "--batch", "2"]


def run(*arguments):
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.run([CLI, "train", *map(str, arguments)], capture_output=True, text=True, timeout=120,
                          env=environment, check=False)


def shard(path, tokens, magic=20240520, version=1):
    header = struct.pack("<3i", magic, version, len(tokens)).ljust(1024, b"\0")
    path.write_bytes(header + struct.pack(f"<{len(tokens)}H", *tokens))


class CommandTest(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.folder = tempfile.TemporaryDirectory()
        cls.dir = Path(cls.folder.name)
        numbers = random.Random(3)
        cls.data = cls.dir / "data.bin"
        tokens = [0]
        while len(tokens) < 2000:
            tokens.append((tokens[-1] * 5 + 1) % 64 if numbers.random() < 0.8 else numbers.randrange(300))
        shard(cls.data, tokens)
        cls.val = cls.dir / "val.bin"
        shard(cls.val, tokens[:100])

    @classmethod
    def tearDownClass(cls):
        cls.folder.cleanup()

    @staticmethod
    def metadata(path):
        data = path.read_bytes()
        return json.loads(data[8:8 + struct.unpack("<Q", data[:8])[0]])["__metadata__"]

    def train(self, *arguments):
        done = run("--data", self.data, "--json", *arguments)
        self.assertEqual(done.returncode, 0, done.stderr)
        return json.loads(done.stdout)

    def assert_error(self, arguments, text, code=2):
        with self.subTest(arguments=arguments):
            done = run(*arguments)
            self.assertEqual(done.returncode, code, done.stderr)
            last = done.stderr.strip().splitlines()[-1]
            self.assertTrue(last.startswith(f"logitless train: {text}"), last)


class TrainErrorTest(CommandTest):
    def test_wrong_values(self):
        cases = [
            (["--model", "gpt3"], "--model: 'gpt3' is unknown; expected gpt2, gpt2-medium, gpt2-large, gpt2-xl"),
            (["--vocab", "0"], "--vocab: expected a whole number from 1 to 1048576, got '0'"),
            (["--dim", "x"], "--dim: expected a whole number from 1 to 1048576, got 'x'"),
            (["--heads", "0"], "--heads: expected a whole number from 1 to 1048576, got '0'"),
            (["--vocab", "299"], "--vocab: expected at least 300 for --text, got 299"),
            (["--heads", "7"], "--heads: expected a divisor of --dim"),
            (["--layers", "-1"], "--layers: expected a whole number from 1 to 4096, got '-1'"),
            (["--context", "0"], "--context: expected a whole number from 1 to 1048576, got '0'"),
            (["--length", "9", "--context", "8"], "--length: expected at most --context 8, got 9"),
            (["--model", "gpt2", "--length", "1025"], "--length: expected at most --context 1024, got 1025"),
            (["--dtype", "f16"], "--dtype: expected f32 or bf16, got 'f16'"),
            (["--device", "gpu"], "--device: expected cpu or cuda, got 'gpu'"),
            (["--device", "cuda", "--threads", "2"], "--device: cuda does not serve --threads; expected cpu beside it"),
            (["--batch", "0"], "--batch: expected a whole number from 1 to 1048576, got '0'"),
            (["--steps", "0"], "--steps: expected a whole number from 1"),
            (["--accumulate", "0"], "--accumulate: expected a whole number from 1 to 1048576, got '0'"),
            (["--lr", "fast"], "--lr: expected a number, got 'fast'"),
            (["--lr", "-1"], "--lr: expected a number of at least 0, got '-1'"),
            (["--min-lr", "-1"], "--min-lr: expected a number of at least 0, got '-1'"),
            (["--lr", "0.1", "--min-lr", "0.2"], "--min-lr: expected at most --lr 0.1, got 0.2"),
            (["--steps", "5", "--warmup", "6"], "--warmup: expected at most --steps 5, got 6"),
            (["--warmup", "-1"], "--warmup: expected a whole number from 0"),
            (["--weight-decay", "-0.1"], "--weight-decay: expected a number of at least 0, got '-0.1'"),
            (["--clip", "-1"], "--clip: expected a number of at least 0, got '-1'"),
            (["--seed", "-1"], "--seed: expected a whole number from 0"),
            (["--eval-every", "0"], "--eval-every: expected a whole number from 1"),
            (["--budget", "lots"], "--budget: 'lots' is not a number of bytes"),
            (["--threads", "-1"], "--threads: expected a whole number from 0 to 1024, got '-1'"),
            (["--sample", "-1"], "--sample: expected a whole number from 0 to 1048576, got '-1'"),
            (["--temperature", "-1"], "--temperature: expected a number of at least 0, got '-1'"),
            (["--top-k", "-1"], "--top-k: expected a whole number from 0 to 1048576, got '-1'"),
            (["--steps"], "--steps: expected a value after it"),
            (["--steps", "1", "--steps", "2"], "--steps: given more than once"),
            (["--fast"], "'--fast' is not an option; see logitless train --help"),
            (["--far-field", "0"], "--far-field: expected a number between 0 and 1, both excluded, got '0'"),
            (["--far-field", "1"], "--far-field: expected a number between 0 and 1, both excluded, got '1'"),
            (["--far-field", "nan"], "--far-field: expected a number between 0 and 1, both excluded, got 'nan'"),
            (["--far-field", "much"], "--far-field: expected a number"),
        ]
        for arguments, text in cases:
            self.assert_error(arguments, text)

    def test_options_that_do_not_go_together(self):
        for size in ("vocab", "dim", "heads", "layers", "context"):
            self.assert_error(["--model", "gpt2", f"--{size}", "12"],
                              f"--{size}: cannot be given beside --model: the model has its own sizes")
        data = ["--data", self.data]
        self.assert_error([*data, "--text", self.dir], "--text: cannot be given beside --data")
        self.assert_error([*data, "--cache", self.dir], "--cache: cannot be given beside --data")
        self.assert_error(["--no-chunk", "--budget", "1MiB"], "--budget: cannot be given beside --no-chunk")
        self.assert_error(["--val", self.val], "--val: validates --data, which was not given")
        self.assert_error([*data, "--prompt", "int"], "--prompt: the tokens of --data have no text")
        for name, value in (("prompt", "int"), ("temperature", "1"), ("top-k", "3")):
            self.assert_error(["--sample", "0", f"--{name}", value], f"--{name}: is of --sample, which is 0")
        self.assert_error(["--resume", self.data, "--init", self.data], "--init: cannot be given beside --resume")
        self.assert_error([*data, "--far-both"], "--far-both: is of --far-field, which was not given")
        for name in ("no-chunk", "no-head-engine"):
            self.assert_error([*data, "--far-field", "0.01", f"--{name}"],
                              f"--far-field: cannot be given beside --{name}: it is of losses on the head engine")

    def test_a_gpu_that_is_not_there(self):
        self.assert_error(["--data", self.data, *SIZES, "--device", "cuda"], "--device: cuda: this ")
        self.assert_error(["--data", self.data, *SIZES, "--device", "cpu", "--no-epilogues"],
                          "--no-epilogues: is of a GPU; this run would be on the CPU")
        for device in ([], ["--device", "cpu"]):
            got = self.train(*SIZES, "--steps", 1, "--sample", 0, *device)
            self.assertEqual(got["device"], {"kind": "cpu", "name": "", "cpu_reason": ""})
            self.assertEqual((got["memory"]["device"], got["memory"]["device_bytes"]), ({}, 0))

    def test_files(self):
        none = self.dir / "none"
        for option in ("data", "resume", "init"):
            self.assert_error([f"--{option}", none], f"--{option}: there is no file '{none}'")
        self.assert_error(["--data", self.data, "--val", none], f"--val: there is no file '{none}'")
        self.assert_error(["--text", none], f"--text: '{none}' does not exist")
        self.assert_error(["--save", none / "x"], f"--save: there is no folder '{none}'")
        self.assert_error(["--save", self.dir], f"--save: '{self.dir}' is a folder")
        damaged = self.dir / "damaged.bin"
        shard(damaged, [1, 2, 3], magic=20240802)
        self.assert_error(["--data", damaged],
                          f"--data: '{damaged}': expected magic number 20240520 (u16 tokens) or 20240801 (u32), found 20240802")
        shard(damaged, [1, 2, 3], version=7)
        self.assert_error(["--data", self.data, "--val", damaged], f"--val: '{damaged}': expected version 1, found 7")
        shard(damaged, list(range(12)))
        self.assert_error(["--data", damaged, *SIZES], "--data: expected two windows of --length 8 or more")
        self.assert_error(["--data", damaged, "--length", "64"],
                          "--data: length: windows of 64 tokens and one more do not fit into 12 tokens")
        self.assert_error(["--data", self.data, *SIZES[2:], "--vocab", "64"],
                          f"--data: '{self.data}': expected tokens below 64 (vocab), found ")
        self.assert_error(["--data", self.data, *SIZES, "--budget", "1KiB"], "--budget: a step takes ")
        self.assert_error(["--data", self.data, *SIZES, "--resume", self.data], f"--resume: '{self.data}': ")
        other = self.dir / "other.safetensors"
        write_safetensors(other, {"wte.weight": ("F32", [2, 2], [0.0] * 4)})
        self.assert_error(["--data", self.data, *SIZES, "--init", other],
                          f"--init: '{other}': tensor 'wpe.weight': expected a matrix, found none")
        write_safetensors(other, {"wte.weight": ("F32", [2, 16], [0.0] * 32), "wpe.weight": ("F32", [8, 16], [0.0] * 128),
                                  "h.0.ln_1.weight": ("F32", [16], [0.0] * 16)})
        self.assert_error(["--data", self.data, *SIZES, "--init", other], f"--vocab: '{other}' has 2, got 300")
        self.assert_error(["--resume", other], f"--resume: '{other}': metadata 'format': expected a checkpoint of logitless train")

    def test_resume_keeps_to_the_checkpoint(self):
        save = self.dir / "resume.safetensors"
        self.train(*SIZES, "--steps", 3, "--sample", 0, "--save", save)
        for name, value, had in (("dim", "32", "16"), ("heads", "1", "2"), ("layers", "2", "1"), ("vocab", "301", "300"),
                                 ("length", "4", "8"), ("seed", "2", "1"), ("dtype", "bf16", '"f32"')):
            self.assert_error(["--resume", save, f"--{name}", value], f"--{name}: the checkpoint has {had}, got ")
        self.assert_error(["--resume", save, "--untied"], "--untied: the checkpoint has false, got true")
        self.assert_error(["--resume", save, "--steps", "2", "--warmup", "0"], "--steps: the checkpoint has done 3, got 2")
        self.assert_error(["--resume", save, "--steps", "5", "--data", self.val], f"'{save}': metadata 'data': expected ")


class TrainTest(CommandTest):
    def test_learns_and_reports(self):
        got = self.train(*SIZES, "--steps", 60, "--lr", 0.01, "--sample", 5, "--eval-every", 20)
        self.assertEqual(got["model"], {"type": "gpt2", "vocab": 300, "context": 8, "dim": 16, "heads": 2, "layers": 1, "untied": False,
                                        "dtype": "f32", "parameters": 300 * 16 + 8 * 16 + 12 * 16 * 16 + 13 * 16 + 32})
        self.assertEqual([s["step"] for s in got["steps"]], list(range(1, 61)))
        self.assertAlmostEqual(got["steps"][0]["loss"], math.log(300), delta=0.1)
        self.assertLess(got["steps"][-1]["loss"], got["steps"][0]["loss"] - 0.5)
        self.assertAlmostEqual(got["steps"][2]["lr"], 0.01)
        self.assertAlmostEqual(got["steps"][-1]["lr"], 0.001)
        self.assertEqual([v["step"] for v in got["validations"]], [20, 40, 60])
        self.assertEqual(len(got["step_seconds"]), 60)
        self.assertGreater(min(got["step_seconds"]), 0.0)
        self.assertEqual(got["held_out_tokens"], 4 * 8)  # a fiftieth of 249 windows
        self.assertEqual(len(got["sample"].split()), 5)
        memory = got["memory"]
        self.assertLessEqual(memory["arena_bytes"], memory["unchunked_arena_bytes"])
        self.assertEqual(memory["moment_bytes"], 2 * memory["parameter_bytes"])

    def test_options_reach_the_run(self):
        steps = ["--steps", 4, "--sample", 0]
        base = self.train(*SIZES, *steps)
        losses = [s["loss"] for s in base["steps"]]

        def changed(*arguments):
            return [s["loss"] for s in self.train(*SIZES, *steps, *arguments)["steps"]]

        for same in (["--threads", 2], ["--no-chunk"], ["--budget", "64MiB"]):
            for a, b in zip(changed(*same), losses):
                self.assertAlmostEqual(a, b, delta=1e-5, msg=str(same))
        for other in (["--seed", 2], ["--lr", 0.01], ["--warmup", 3], ["--min-lr", 0.0009], ["--weight-decay", 10],
                      ["--clip", 0.01], ["--accumulate", 2], ["--untied"], ["--dtype", "bf16"]):
            self.assertNotEqual(changed(*other), losses, str(other))
        self.assertEqual(self.train(*SIZES, *steps, "--context", 20)["model"]["context"], 20)
        self.assertEqual(self.train(*SIZES, *steps, "--threads", 2)["threads"], 2)
        got = self.train(*SIZES, *steps, "--val", self.val)
        self.assertEqual(got["held_out_tokens"], 12 * 8)
        self.assertEqual(got["train_tokens"], 249 * 8)
        self.assertNotEqual(got["validations"], base["validations"])

    def test_resume_is_the_same_run(self):
        whole, half, rest = (self.dir / f"{name}.safetensors" for name in ("whole", "half", "rest"))
        options = [*SIZES, "--accumulate", 2, "--sample", 0, "--warmup", 1, "--lr", 0.01, "--min-lr", 0.01]
        expected = self.train(*options, "--steps", 6, "--save", whole)
        self.train(*options, "--steps", 3, "--save", half)
        done = run("--resume", half, "--steps", 6, "--json", "--save", rest, "--sample", 0)
        self.assertEqual(done.returncode, 0, done.stderr)
        got = json.loads(done.stdout)
        self.assertEqual(got["steps"], expected["steps"][3:])
        self.assertEqual(whole.read_bytes(), rest.read_bytes())

    def test_far_field(self):
        whole, half, rest, none = (self.dir / f"far_{name}.safetensors" for name in ("whole", "half", "rest", "none"))
        # A vocabulary order is started at step 100 and used from 104; the first half stops between.
        options = [*SIZES[2:], "--vocab", 50257, "--sample", 0, "--warmup", 1, "--lr", 0.001, "--min-lr", 0.001,
                   "--eval-every", 200, "--far-field", 0.3]
        expected = self.train(*options, "--steps", 112, "--save", whole)
        far = expected["far_field"]
        self.assertEqual(far["steps"], 112)
        self.assertEqual(far["orders"], 1)
        self.assertLess(far["dense_steps"], 112)
        self.assertLess(far["last_error"], 0.3)
        self.assertGreater(expected["memory"]["far_workspace_bytes"], 0)
        self.assertEqual(expected["far_refusal"], "")
        self.train(*options, "--steps", 102, "--save", half)
        self.assertTrue(half.with_suffix(".far.safetensors").exists())
        done = run("--resume", half, "--steps", 112, "--save", rest, "--sample", 0)  # the far field's options are the checkpoint's
        self.assertEqual(done.returncode, 0, done.stderr)
        for part in ("far field: workspace ", f"far field: dense {far['dense_steps']} of 112, orders 1, selected ",
                     f"far field +{far['dense_steps']} of 112 steps of the head dense"):
            self.assertRegex(done.stdout, part)
        self.assertEqual(whole.read_bytes(), rest.read_bytes())
        beside = [path.with_suffix(".far.safetensors") for path in (whole, rest, half)]
        self.assertEqual(beside[0].read_bytes(), beside[1].read_bytes())
        again = ["--resume", half, "--steps", 112]
        self.assert_error([*again, "--far-both"],
                          f"{beside[2]}: saved with accuracy far_backward, this head has far_both")
        self.assert_error([*again, "--no-chunk"], "--far-field: cannot be given beside --no-chunk")
        self.train(*options[:-2], "--steps", 1, "--save", none)
        again = ["--resume", none, "--steps", 2, "--sample", 0]
        self.assertEqual(self.train(*again)["far_field"], None)
        self.assertEqual(self.train(*again, "--far-field", 0.1)["far_field"]["steps"], 1)

    def test_checkpoints_older_than_the_far_field(self):
        save = self.dir / "older.safetensors"
        self.train(*SIZES, "--steps", 2, "--sample", 0, "--save", save)
        data = save.read_bytes()
        size = struct.unpack("<Q", data[:8])[0]
        header = data[8:8 + size].replace(rb',\"far-field\":0.0,\"far-both\":false', b"")
        self.assertLess(len(header), size)
        save.write_bytes(data[:8] + header.ljust(size) + data[8 + size:])
        self.assertEqual(self.train("--resume", save, "--steps", 3, "--warmup", 0, "--sample", 0)["far_field"], None)

    def test_far_field_of_a_small_vocabulary(self):
        done = run("--data", self.data, *SIZES, "--steps", 3, "--sample", 0, "--far-field", 0.01, "--far-both")
        self.assertEqual(done.returncode, 0, done.stderr)
        self.assertEqual(done.stdout.count("far field: every step is dense: the program has no head operation"), 1)
        self.assertRegex(done.stdout, "far field +every step was dense")

    def test_hugging_face_files(self):
        out, again = self.dir / "model.safetensors", self.dir / "again.safetensors"
        options = [*SIZES, "--sample", 0, "--lr", 0]
        self.train(*SIZES, "--steps", 3, "--sample", 0, "--export", out)
        tensors = read_safetensors(out)
        self.assertEqual(tensors["h.0.attn.c_attn.weight"][:2], ("F32", [16, 48]))
        self.assertNotIn("lm_head.weight", tensors)
        self.train(*options, "--steps", 1, "--init", out, "--export", again)
        self.assertEqual(out.read_bytes(), again.read_bytes())

    def test_text(self):
        text = self.dir / "text"
        text.mkdir()
        for i in range(30):
            (text / f"{i}.txt").write_text("".join(f"int value_{(i * 37 + k * 11) % 101} = f({k % 7});\n" for k in range(40)))
        done = run("--text", text, "--cache", self.dir / "cache", "--vocab", 400, "--dim", 16, "--heads", 2, "--layers", 1,
                   "--length", 16, "--steps", 40, "--batch", 4, "--lr", 0.01, "--prompt", "int value_", "--sample", 12)
        self.assertEqual(done.returncode, 0, done.stderr)
        self.assertEqual(done.stderr, "")
        for part in ("step 40/40", "validation loss", "arena of a step", "without chunks", "moments", "Prompt\nint value_\n\nContinuation\n"):
            self.assertIn(part, done.stdout)
        self.assertTrue(list((self.dir / "cache").iterdir()))
        self.assertIn("Prompt\nint value_\n\nContinuation\n", run(
            "--text", text, "--cache", self.dir / "cache", "--vocab", 400, "--dim", 16, "--heads", 2, "--layers", 1,
            "--length", 16, "--steps", 1, "--prompt", "int value_", "--temperature", 0).stdout)


if __name__ == "__main__":
    if not CLI:
        sys.exit("LOGITLESS_CLI: expected the path of the command, got nothing")
    unittest.main()
