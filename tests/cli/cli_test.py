#!/usr/bin/env python3
"""Runs the command `logitless` (path in LOGITLESS_CLI) on small files, and compares with a computation in Python."""

import json
import os
import random
import subprocess
import sys
import tempfile
import unittest
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))
from reference import Head, cross_entropy  # noqa: E402
from tensor_files import read_safetensors, rounded, write_npy, write_safetensors  # noqa: E402

CLI = os.environ.get("LOGITLESS_CLI", "")

N, D, V = 7, 5, 23


def run(*arguments, stdout=subprocess.PIPE):
    environment = {k: v for k, v in os.environ.items() if k != "LOGITLESS_CPU"}
    environment["OMP_NUM_THREADS"] = "2"
    return subprocess.run([CLI, *map(str, arguments)], stdout=stdout, stderr=subprocess.PIPE, text=True, timeout=120,
                          env=environment, check=False)


class CliTest(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.folder = tempfile.TemporaryDirectory()
        cls.dir = Path(cls.folder.name)
        numbers = random.Random(5)

        def normal(count, deviation=1.0):
            return rounded([numbers.gauss(0.0, deviation) for _ in range(count)], "F32")

        targets = [numbers.randrange(V) for _ in range(N)]
        targets[3] = -100
        cls.head = Head(N, D, V, normal(N * D, 2.0), normal(V * D), targets)
        cls.bias = normal(V)
        cls.class_weight = rounded([numbers.uniform(0.5, 1.5) for _ in range(V)], "F32")
        cls.token_weight = rounded([numbers.uniform(0.5, 1.5) for _ in range(N)], "F32")
        cls.file = cls.dir / "head.safetensors"
        write_safetensors(cls.file, {
            "hidden": ("F32", [N, D], cls.head.hidden),
            "weight": ("F32", [V, D], cls.head.weight),
            "targets": ("I32", [N], targets),
            "bias": ("F32", [V], cls.bias),
            "class_weight": ("F64", [V], cls.class_weight),
            "token_weight": ("F32", [N], cls.token_weight),
        })

    @classmethod
    def tearDownClass(cls):
        cls.folder.cleanup()

    def basics(self, file=None):
        file = file or self.file
        return ["--hidden", f"{file}:hidden", "--weight", f"{file}:weight", "--targets", f"{file}:targets"]

    def loss(self, *arguments, inputs=None):
        done = run("loss", *(inputs or self.basics()), *arguments, "--json")
        self.assertEqual(done.returncode, 0, done.stderr)
        self.assertEqual(done.stderr, "")
        return json.loads(done.stdout)

    def assert_close(self, actual, expected, tolerance=2e-5, what=""):
        self.assertEqual(len(actual), len(expected), what)
        scale = max(map(abs, expected), default=0.0)
        for i, (a, e) in enumerate(zip(actual, expected)):
            self.assertLessEqual(abs(a - e), tolerance * (scale + abs(e)) + 1e-12, f"{what}[{i}]: {a}, expected {e}")

    def assert_error(self, done, code, *parts):
        """Asserts one line on standard error, and no standard output."""
        self.assertEqual(done.returncode, code, done.stderr)
        self.assertEqual(done.stdout or "", "")
        self.assertEqual(done.stderr.count("\n"), 1, done.stderr)
        for part in parts:
            self.assertIn(part, done.stderr)


class LossTest(CliTest):
    def test_forward(self):
        got = self.loss("--argmax")
        want = cross_entropy(self.head)
        self.assertEqual(list(got), [
            "loss", "reduction", "tokens", "valid_tokens", "normalizer", "mean_lse", "mean_log_prob", "correct", "plan",
            "kernel", "threads", "dim", "vocab", "dtype", "precision", "passes", "chunk_tokens", "workspace_bytes",
            "peak_bytes", "process_peak_bytes", "logits_bytes", "seconds", "predicted_seconds", "repeat"])
        self.assertAlmostEqual(got["loss"], want.loss, delta=1e-5 * want.loss)
        self.assertEqual((got["tokens"], got["valid_tokens"], got["normalizer"]), (N, N - 1, N - 1))
        self.assertAlmostEqual(got["mean_lse"], sum(want.lse) / (N - 1), delta=1e-5)
        self.assertAlmostEqual(got["mean_log_prob"], sum(want.log_prob) / (N - 1), delta=1e-5)
        self.assertEqual(got["correct"], sum(a == t for a, t in zip(want.argmax, self.head.targets)))
        self.assertEqual((got["plan"], got["passes"], got["dtype"]), ("forward", 1.0, "f32"))
        self.assertEqual(got["logits_bytes"], N * V * 4)
        self.assertEqual(got["peak_bytes"], got["workspace_bytes"])
        self.assertGreater(got["workspace_bytes"], 0)
        self.assertGreater(got["seconds"], 0.0)
        self.assertGreater(got["process_peak_bytes"], got["peak_bytes"])

    def test_text(self):
        done = run("loss", *self.basics(), "--repeat", 3, "--threads", 1)
        self.assertEqual(done.returncode, 0, done.stderr)
        want = cross_entropy(self.head)
        lines = dict(line.split("  ", 1) for line in done.stdout.splitlines())
        self.assertAlmostEqual(float(lines["loss"].split()[0]), want.loss, delta=1e-5)
        self.assertIn("(mean)", lines["loss"])
        self.assertEqual(lines["tokens"].strip(), "7, 6 valid")
        self.assertIn("1 thread", lines["plan"])
        self.assertIn("median of 3", lines["time"])

    def test_gradients_of_each_plan(self):
        out = self.dir / "grads.safetensors"
        cases = [
            ([], {}),
            (["--label-smoothing", 0.1, "--z-loss", 0.001], {"label_smoothing": 0.1, "z_loss": 0.001}),
            (["--softcap", 4, "--logit-scale", 0.7], {"softcap": 4.0, "logit_scale": 0.7}),
            (["--reduction", "sum", "--grad-loss", -2.5], {"reduction": "sum", "grad_loss": -2.5}),
            (["--normalizer", 11], {"normalizer": 11.0}),
        ]
        head = Head(**{**vars(self.head), "bias": self.bias, "class_weight": self.class_weight,
                       "token_weight": self.token_weight})
        extra = [f"--{name.replace('_', '-')}={self.file}:{name}" for name in ("bias", "class_weight", "token_weight")]
        for plan in ("auto", "dense", "recompute", "stored", "stored:0.5"):
            for arguments, options in cases:
                with self.subTest(plan=plan, arguments=arguments):
                    want = cross_entropy(head, **options)
                    got = self.loss(*extra, *arguments, "--plan", plan, "--out", out)
                    if plan != "auto":
                        self.assertEqual(got["plan"], plan.split(":")[0])
                    self.assertEqual(got["out"], str(out))
                    self.assertAlmostEqual(got["loss"], want.loss, delta=1e-5 * abs(want.loss))
                    self.assertAlmostEqual(got["normalizer"], want.normalizer, delta=1e-5)
                    tensors = read_safetensors(out)
                    self.assertEqual(sorted(tensors), ["d_bias", "d_hidden", "d_weight", "lse"])
                    self.assertEqual(tensors["d_hidden"][:2], ("F32", [N, D]))
                    self.assertEqual(tensors["d_weight"][:2], ("F32", [V, D]))
                    for name, (_, _, values) in tensors.items():
                        self.assert_close(values, getattr(want, name), what=name)

    def test_reduction_none_and_token_outputs(self):
        out = self.dir / "tokens.safetensors"
        want = cross_entropy(self.head, reduction="none")
        got = self.loss("--reduction", "none", "--entropy", "--argmax", "--plan", "forward", "--out", out)
        self.assertAlmostEqual(got["loss"], sum(want.losses), delta=1e-5 * want.loss)
        tensors = read_safetensors(out)
        self.assertEqual(sorted(tensors), ["argmax", "entropy", "loss", "lse"])
        self.assertEqual(tensors["argmax"], ("I32", [N], want.argmax))
        for name, values in (("loss", want.losses), ("lse", want.lse), ("entropy", want.entropy)):
            self.assert_close(tensors[name][2], values, what=name)

    def test_gradients_without_a_file(self):
        self.assertEqual(self.loss("--plan", "dense")["passes"], 3.0)
        self.assertEqual(self.loss("--plan", "forward")["passes"], 1.0)

    def test_next_token(self):
        batch, length = 2, 4
        file, out = self.dir / "sequences.safetensors", self.dir / "next.safetensors"
        hidden = (self.head.hidden * 2)[:batch * length * D]
        words = [3, 1, 4, 1, 5, 9, 2, 6]
        write_safetensors(file, {"hidden": ("F32", [batch, length, D], hidden),
                                 "weight": ("F32", [V, D], self.head.weight),
                                 "targets": ("I64", [batch, length], words)})
        shifted = [1, 4, 1, -100, 9, 2, 6, -100]
        want = cross_entropy(Head(8, D, V, hidden, self.head.weight, shifted))
        got = self.loss("--next-token", "--out", out, inputs=self.basics(file))
        self.assertEqual((got["tokens"], got["valid_tokens"]), (8, 6))
        self.assertAlmostEqual(got["loss"], want.loss, delta=1e-5 * want.loss)
        tensors = read_safetensors(out)
        self.assertEqual(tensors["d_hidden"][1], [batch, length, D])
        self.assert_close(tensors["d_hidden"][2], want.d_hidden)
        self.assertEqual(tensors["lse"][1], [batch, length])
        first = self.loss("--next-token", "--first", 1, inputs=self.basics(file))
        self.assertEqual((first["tokens"], first["valid_tokens"]), (4, 3))

    def test_several_targets(self):
        file = self.dir / "sparse.safetensors"
        targets = [[(3 * i + k) % V for k in range(3)] for i in range(N)]
        targets[2][1] = -100
        targets[5] = [-100] * 3
        weights = [rounded([0.5, 0.3, 0.1], "F32") for _ in range(N)]
        write_safetensors(file, {"hidden": ("F32", [N, D], self.head.hidden),
                                 "weight": ("F32", [V, D], self.head.weight),
                                 "targets": ("I64", [N, 3], sum(targets, [])),
                                 "target_weight": ("F32", [N, 3], sum(weights, []))})
        want = cross_entropy(Head(N, D, V, self.head.hidden, self.head.weight, targets, target_weight=weights))
        got = self.loss("--target-weight", f"{file}:target_weight", inputs=self.basics(file))
        self.assertAlmostEqual(got["loss"], want.loss, delta=1e-5 * want.loss)
        self.assertEqual(got["valid_tokens"], N - 1)

    def test_ignore_index_and_empty(self):
        want = cross_entropy(Head(**{**vars(self.head), "targets": [-1 if t == -100 else t for t in self.head.targets]}),
                             ignore_index=-1)
        file = self.dir / "ignored.safetensors"
        write_safetensors(file, {"hidden": ("F32", [N, D], self.head.hidden),
                                 "weight": ("F32", [V, D], self.head.weight),
                                 "targets": ("I32", [N], [-1 if t == -100 else t for t in self.head.targets]),
                                 "none": ("I32", [N], [-1] * N)})
        got = self.loss("--ignore-index", "-1", inputs=self.basics(file))
        self.assertAlmostEqual(got["loss"], want.loss, delta=1e-5 * want.loss)
        empty = [a.replace(":targets", ":none") for a in self.basics(file)]
        self.assertEqual(self.loss("--ignore-index=-1", inputs=empty)["loss"], 0.0)
        self.assertIsNone(self.loss("--ignore-index=-1", "--nan-if-empty", inputs=empty)["loss"])

    def test_npy(self):
        parts = {"hidden": ("F64", [N, D], self.head.hidden), "weight": ("F32", [V, D], self.head.weight),
                 "targets": ("I64", [N], self.head.targets)}
        for name, tensor in parts.items():
            write_npy(self.dir / f"{name}.npy", *tensor)
        inputs = ["--hidden", self.dir / "hidden.npy", "--weight", f"{self.dir / 'weight.npy'}:", "--targets",
                  self.dir / "targets.npy", "--dtype", "f32"]
        want = cross_entropy(self.head)
        self.assertAlmostEqual(self.loss(inputs=inputs)["loss"], want.loss, delta=1e-5 * want.loss)

    def test_dtypes(self):
        out = self.dir / "half.safetensors"
        for name, stored in (("bf16", "BF16"), ("f16", "F16")):
            small = Head(N, D, V, rounded(self.head.hidden, stored), rounded(self.head.weight, stored), self.head.targets)
            want = cross_entropy(small)
            with self.subTest(dtype=name):
                got = self.loss("--dtype", name, "--grad-dtype", "f32", "--out", out)
                self.assertEqual(got["dtype"], name)
                self.assertAlmostEqual(got["loss"], want.loss, delta=1e-4 * want.loss)
                tensors = read_safetensors(out)
                self.assertEqual(tensors["d_hidden"][0], "F32")
                self.assert_close(tensors["d_hidden"][2], want.d_hidden, 8e-3)
                self.assert_close(tensors["d_weight"][2], want.d_weight, 8e-3)
                self.loss("--dtype", name, "--out", out)
                tensors = read_safetensors(out)
                self.assertEqual([tensors[t][0] for t in ("d_hidden", "d_weight", "lse")], [stored, stored, "F32"])
                self.assert_close(tensors["d_weight"][2], want.d_weight, 1.2e-2)

                # 16-bit tensors converted to f32 have the same values.
                file = self.dir / f"{name}.safetensors"
                write_safetensors(file, {"hidden": (stored, [N, D], small.hidden), "weight": (stored, [V, D], small.weight),
                                         "targets": ("I32", [N], small.targets)})
                self.assertAlmostEqual(self.loss("--dtype", "f32", inputs=self.basics(file))["loss"], want.loss,
                                       delta=1e-5 * want.loss)

    def test_conversion_to_f16_rounds(self):
        # Ties, subnormals, the largest number and numbers that round to it. With weights of 0 every p is 1/2, and the
        # gradient of the weights is half of the rounded hidden state.
        values = [1.0 + 2.0**-11, 1.0 + 3 * 2.0**-11, 2.0**-24, 2.0**-25, 1.5 * 2.0**-24, 2047.5 * 2.0**-25, 65504.0,
                  65519.0, -1.0 - 2.0**-11, 0.0, -3.1e-6]
        file, out = self.dir / "round.safetensors", self.dir / "rounded.safetensors"
        count = len(values)
        write_safetensors(file, {"hidden": ("F32", [1, count], values), "weight": ("F32", [2, count], [0.0] * 2 * count),
                                 "targets": ("I32", [1], [0])})
        self.loss("--dtype", "f16", "--grad-dtype", "f32", "--out", out, inputs=self.basics(file))
        gradients = read_safetensors(out)["d_weight"][2][count:]
        for got, value in zip(gradients, rounded([65504.0 if v == 65519.0 else v for v in values], "F16")):
            self.assertAlmostEqual(2.0 * got, value, delta=1e-5 * abs(value))

    def test_quantised_weight(self):
        file = self.dir / "quantised.safetensors"
        numbers = random.Random(9)
        q = [numbers.randrange(-127, 128) for _ in range(V * D)]
        scale = rounded([numbers.uniform(0.005, 0.02) for _ in range(V)], "F32")
        weight = [q[i] * scale[i // D] for i in range(V * D)]
        hidden = rounded(self.head.hidden, "BF16")
        write_safetensors(file, {"hidden": ("BF16", [N, D], hidden), "weight_q": ("I8", [V, D], q),
                                 "weight_scale": ("F32", [V], scale), "targets": ("I32", [N], self.head.targets)})
        inputs = ["--hidden", f"{file}:hidden", "--weight", f"{file}:weight_q*weight_scale", "--targets", f"{file}:targets"]
        want = cross_entropy(Head(N, D, V, hidden, rounded(rounded(weight, "F32"), "BF16"), self.head.targets))
        got = self.loss(inputs=inputs)
        self.assertEqual(got["dtype"], "bf16")
        self.assertAlmostEqual(got["loss"], want.loss, delta=1e-4 * want.loss)
        want = cross_entropy(Head(N, D, V, hidden, rounded(weight, "F32"), self.head.targets))
        self.assertAlmostEqual(self.loss("--dtype", "f32", inputs=inputs)["loss"], want.loss, delta=1e-5 * want.loss)
        swapped = [a.replace("weight_q*weight_scale", "weight_scale*weight_q") for a in inputs]
        self.assert_error(run("loss", *swapped), 2, "logitless loss: --weight: expected i8[V, D] before *, got f32[23]")

    def test_data_off_alignment(self):
        file = self.dir / "odd.safetensors"
        write_safetensors(file, {"hidden": ("F32", [N, D], self.head.hidden), "weight": ("F32", [V, D], self.head.weight),
                                 "targets": ("I32", [N], self.head.targets)}, pad=3)
        want = cross_entropy(self.head)
        self.assertAlmostEqual(self.loss(inputs=self.basics(file))["loss"], want.loss, delta=1e-5 * want.loss)

    def test_kernels_agree_and_threads_do_not_matter(self):
        out = [self.dir / f"threads{i}.safetensors" for i in range(3)]
        self.loss("--threads", 1, "--out", out[0])
        self.assertEqual(self.loss("--threads", 3, "--out", out[1])["threads"], 3)
        self.assertEqual(out[0].read_bytes(), out[1].read_bytes())
        got = self.loss("--kernel", "reference", "--out", out[2])
        self.assertEqual(got["kernel"], "reference")
        for name, (_, _, values) in read_safetensors(out[2]).items():
            self.assert_close(read_safetensors(out[0])[name][2], values, what=name)

    def test_budget_and_verbose(self):
        done = run("loss", *self.basics(), "--out", self.dir / "b.safetensors", "--budget", 1)
        self.assert_error(done, 2, "logitless loss: memory_budget: ", "below the least plan")
        done = run("loss", *self.basics(), "--verbose")
        self.assertEqual(done.returncode, 0)
        self.assertIn("plan forward", done.stderr)


class ErrorTest(CliTest):
    def test_what_is_read_is_not_replaced(self):
        kept, order, link = self.file.read_bytes(), self.dir / "kept.order", self.dir / "link.safetensors"
        link.symlink_to(self.file)
        far = ["loss", *self.basics(), "--plan", "far-backward", "--save-order"]
        for arguments, what in (
            (["loss", *self.basics(), "--out", link], "--out: '{}' is a file that is read"),
            ([*far, self.file], "--save-order: '{}' is a file that is read"),
            ([*far, order, "--out", order], "--save-order: '{}' is the file of --out"),
            (["order", *self.basics()[:4], "--out", self.file], "--out: '{}' is a file that is read"),
        ):
            self.assert_error(run(*map(str, arguments)), 2, what.format(arguments[-1]) + ", which it would replace")
        self.assertTrue(self.file.read_bytes() == kept and not order.exists())

    def test_arguments(self):
        basics = self.basics()
        missing = self.dir / "missing.npy"
        torn = self.dir / "torn.safetensors"
        torn.write_bytes(self.file.read_bytes()[:-1])
        cases = [
            (["loss"], "--hidden is required"),
            (["loss", *basics[:2]], "--weight is required"),
            (["loss", *basics, "--frobnicate"], "'--frobnicate' is not an option; see logitless loss --help"),
            (["loss", *basics, "stray"], "'stray' is not an option; see logitless loss --help"),
            (["loss", *basics, "--repeat"], "--repeat: expected a value after it"),
            (["loss", *basics, "--repeat", "2", "--repeat", "3"], "--repeat: given more than once"),
            (["loss", *basics, "--repeat", "0"], "--repeat: expected a whole number from 1 to 1000000, got '0'"),
            (["loss", *basics, "--repeat", "1.5"], "--repeat: expected a whole number from 1 to 1000000, got '1.5'"),
            (["loss", *basics, "--ignore-index", "x"], "--ignore-index: expected a whole number, got 'x'"),
            (["loss", *basics, "--threads", "-2"], "--threads: expected a whole number from 0 to 1024, got '-2'"),
            (["loss", *basics, "--softcap", "much"], "--softcap: expected a number, got 'much'"),
            (["loss", *basics, "--softcap", "nan"], "--softcap: expected a number, got 'nan'"),
            (["loss", *basics, "--softcap", "-1"], "softcap: expected a number > 0, or 0 for none, got -1"),
            (["loss", *basics, "--label-smoothing", "1.5"], "label_smoothing: expected a number in [0, 1], got 1.5"),
            (["loss", *basics, "--reduction", "max"], "--reduction: expected mean, sum or none, got 'max'"),
            (["loss", *basics, "--reduction", "sum", "--normalizer", "3"], "normalizer: only reduction mean divides by it"),
            (["loss", *basics, "--dtype", "int8"], "--dtype: expected f32, bf16 or f16, got 'int8'"),
            (["loss", *basics, "--grad-dtype", "f16"], "--grad-dtype: expected same or f32, got 'f16'"),
            (["loss", *basics, "--plan", "quick"],
             "--plan: 'quick' is unknown; expected auto, forward, dense, recompute, stored, stored:F, far-backward or far-both"),
            (["loss", *basics, "--plan", "dense:0.5"], "--plan: 'dense:0.5': only stored takes a fraction"),
            (["loss", *basics, "--plan", "stored:2"], "--plan: 'stored:2': expected a fraction between 0 and 1"),
            (["loss", *basics, "--budget", "lots"], "--budget: 'lots' is not a number of bytes; expected one such as "),
            (["loss", *basics, "--kernel", "abacus"], "kernel: 'abacus' is unknown; expected one of "),
            (["loss", *basics, "--next-token"], "next_token: expected hidden [B, T, D], got f32[7, 5]"),
            (["loss", *basics, "--entropy"], "--entropy: goes into the file of --out, which was not given"),
            (["loss", *basics, "--out", "/nonexistent/x"], "--out: there is no folder '/nonexistent'"),
            (["loss", *basics, "--out", str(self.dir)], f"--out: '{self.dir}' is a folder"),
            (["loss", *basics, "--bias", str(missing)], f"--bias: there is no file '{missing}'"),
            (["loss", *basics, "--bias", f"{self.file}:nope"], "--bias: "),
            (["loss", *basics, "--bias", f"{self.file}:a*"], f"--bias: '{self.file}:a*': expected FILE:NAME*SCALE"),
            (["loss", *basics, "--bias", f"{torn}:bias"], "--bias: "),
            (["loss", *basics, "--bias", f"{self.file}:targets"], "--bias: i32[7] cannot be converted to f32"),
            (["loss", *basics, "--class-weight", f"{self.file}:token_weight"], "class_weight: expected shape [23]"),
            (["loss", *basics[:4], "--targets", f"{self.file}:bias"], "targets: expected"),
            (["loss", *basics, "--skip", str(N)], f"--skip: expected fewer than the {N} there are, got {N}"),
            (["loss", *basics, "--skip", str(N + 1), "--first", "2"], f"--skip: expected fewer than the {N} there are"),
            (["loss", "--hidden", f"{self.file}:bias", *basics[2:], "--skip", "1"],
             f"--skip: expected hidden [..., D] of several tokens, got f32[{V}]"),
            (["loss", "--hidden", f"{self.file}:bias", *basics[2:], "--first", "1"],
             f"--first: expected hidden [..., D] of several tokens, got f32[{V}]"),
            (["plan", "--tokens", "5", "--dim", "4"], "--vocab is required"),
            (["plan", "--tokens", "0", "--dim", "4", "--vocab", "9"],
             "--tokens: expected a whole number of at least 1, got '0'"),
            (["plan", "--tokens", "5", "--dim", "4", "--vocab", "9", "--budget", "1"], "memory_budget: "),
            (["plan", "--tokens", "5", "--dim", "4", "--vocab", "9", "--softcap", "-1"], "--softcap: expected a number > 0"),
            (["plan", "--tokens", "5", "--dim", "4", "--vocab", "9", "--label-smoothing", "2"],
             "--label-smoothing: expected a number in [0, 1], got 2"),
            (["plan", "--tokens", "5", "--dim", "4", "--vocab", "9999999999"], "vocab: expected 1 to "),
            (["bench", *basics[:2]], "--hidden, --weight, --targets: give all three, or none for random data"),
            (["bench", *basics, "--dim", "3"], "--dim: the tensors of files have sizes and types of their own"),
            (["kernels", "--all"], "'--all' is not an option; see logitless kernels --help"),
        ]
        for arguments, text in cases:
            with self.subTest(arguments=arguments):
                self.assert_error(run(*arguments), 2, f"logitless {arguments[0]}: {text}")

    def test_npy_has_no_names(self):
        write_npy(self.dir / "one.npy", "F32", [V], self.bias)
        for name in ("bias", "a*b"):
            done = run("loss", *self.basics(), "--bias", f"{self.dir / 'one.npy'}:{name}")
            self.assert_error(done, 2, f"--bias: '{self.dir / 'one.npy'}': an npy file holds one tensor, without a name, "
                                       f"got '{name}'")

    def test_errors_are_json_too(self):
        for arguments, code, text in (
                (["loss", *self.basics(), "--threads", "-2", "--json"], 2, "--threads: expected"),
                (["loss", "--json", *self.basics(), "--frobnicate"], 2, "'--frobnicate' is not an option"),
                (["plan", "--json", "--tokens", "5"], 2, "--dim is required"),
                (["train", "--json", "--data", self.dir / "none"], 2, "--data: there is no file"),
                (["compile", "--json", self.dir / "none"], 2, "none"),
                (["loss", *self.basics(), "--kernel", "reference", "--plan", "stored", "--json"], 1, "no plan: stored")):
            with self.subTest(arguments=arguments):
                done = run(*arguments)
                self.assertEqual(done.returncode, code, done.stderr)
                got = json.loads(done.stdout)
                self.assertEqual(sorted(got), ["command", "error", "exit_code"])
                self.assertEqual((got["command"], got["exit_code"]), (arguments[0], code))
                self.assertIn(text, got["error"])
                self.assertEqual(done.stderr, f"logitless {arguments[0]}: {got['error']}\n")
        odd = os.fsencode(self.dir) + b"/\xff"
        done = subprocess.run([CLI, "loss", "--json", "--hidden", odd, *map(str, self.basics()[2:])], capture_output=True,
                              timeout=120, check=False)
        self.assertEqual(done.returncode, 2)
        self.assertIn("there is no file", json.loads(done.stdout)["error"])

    def test_commands(self):
        known = "expected loss, order, plan, bench, compile, train, report, kernels or calibrate (see logitless --help)"
        self.assert_error(run(), 2, f"logitless: no command was given; {known}")
        self.assert_error(run("infer"), 2, f"logitless: there is no command 'infer'; {known}")
        self.assert_error(run("--frob"), 2, "logitless: '--frob' is not an option; see logitless --help")

    def test_bad_target_is_named(self):
        file = self.dir / "bad.safetensors"
        write_safetensors(file, {"hidden": ("F32", [N, D], self.head.hidden), "weight": ("F32", [V, D], self.head.weight),
                                 "targets": ("I32", [N], [0, 1, V, 2, 3, 4, 5])})
        for command in ("loss", "bench"):
            self.assert_error(run(command, *self.basics(file)), 2, f"logitless {command}: targets: 23 at position 2")

    def test_runtime_errors(self):
        done = run("loss", *self.basics(), "--kernel", "reference", "--plan", "stored")
        self.assert_error(done, 1, "logitless loss: no plan: stored: kernel reference does not store exp(z)")
        if not Path("/dev/full").exists():
            self.skipTest("no /dev/full")
        with open("/dev/full", "w", encoding="ascii") as full:
            done = run("kernels", stdout=full)
        self.assert_error(done, 1, "logitless kernels: standard output cannot be written")


class OtherCommandsTest(CliTest):
    def test_help_and_version(self):
        done = run("--version")
        self.assertEqual(done.returncode, 0)
        self.assertRegex(done.stdout, r"^logitless \d+\.\d+\.\d+\n$")
        expected = {
            (): ["loss", "order", "plan", "bench", "train", "kernels", "calibrate", "--version", "Examples:"],
            ("loss",): ["--hidden", "--weight", "--targets", "--bias", "--class-weight", "--token-weight", "--target-weight",
                        "--reduction", "--label-smoothing", "--z-loss", "--softcap", "--logit-scale", "--normalizer",
                        "--next-token", "--ignore-index", "--dtype", "--grad-dtype", "--plan", "--budget", "--threads",
                        "--kernel", "--repeat", "--out", "--json", "NAME*SCALE", "--tau", "--order", "--save-order", "--audit",
                        "Examples:"],
            ("order",): ["--hidden", "--weight", "--bias", "--rows", "--moments", "--tau", "--out", "NAME*SCALE"],
            ("plan",): ["--tokens", "--dim", "--vocab", "--dtype", "--bias", "--no-d-hidden", "--budget", "Example:"],
            ("bench",): ["--tokens", "--hidden", "--repeat", "--unfused-limit", "--json", "--report", "--memory", "Examples:"],
            ("train",): ["--model", "--device", "--dim", "--data", "--text", "--steps", "--budget", "--resume", "--export", "--sample",
                         "--json", "Examples:"],
            ("kernels",): ["--json"], ("calibrate",): ["--refresh", "--json", "LOGITLESS_CALIBRATION=off", "Examples:"],
        }
        for command, parts in expected.items():
            done = run(*command, "--help")
            self.assertEqual(done.returncode, 0)
            self.assertEqual(done.stderr, "")
            for part in parts:
                self.assertIn(part, done.stdout)
            self.assertNotIn("\n\n\n", done.stdout)
            self.assertLessEqual(max(map(len, done.stdout.splitlines())), 120)

    def test_kernels(self):
        done = run("kernels", "--json")
        kernels = json.loads(done.stdout)["kernels"]
        self.assertEqual(kernels[-1], {"name": "reference", "runnable": True})
        lines = run("kernels").stdout.splitlines()
        self.assertEqual([line.split()[0] for line in lines], ["kernel"] + [k["name"] for k in kernels])
        # Runnable kernels run, others are refused.
        for kernel in kernels:
            done = run("loss", *self.basics(), "--kernel", kernel["name"], "--dtype", "bf16")
            self.assertEqual(done.returncode == 0, kernel["runnable"], f"{kernel}: {done.stderr}")

    def test_order(self):
        out = self.dir / "order.safetensors"
        inputs = self.basics()[:4]
        done = run("order", *inputs, "--out", out, "--moments", "--json")
        self.assertEqual(done.returncode, 0, done.stderr)
        said = json.loads(done.stdout)
        self.assertEqual((said["vocab"], said["dim"], said["tiles"], said["rows"]), (V, D, 1, N))
        tensors = read_safetensors(out)
        self.assertEqual(sorted(tensors["vocab_ids"][2]), list(range(V)))
        self.assertEqual({name: tuple(shape) for name, (_, shape, _) in tensors.items()},
                         {"vocab_ids": (V,), "average": (V,), "axes": (D, D), "variance": (1, D), "log2_caution": (1,)})
        self.assertAlmostEqual(sum(tensors["average"][2]), 1.0, delta=1e-5)
        # The order serves a far-field loss.
        far = self.loss("--plan", "far-both", "--order", out, inputs=self.basics())
        self.assertEqual((far["plan"], far["selected"]), ("far_both", 1.0))
        plain = run("order", *inputs, "--out", out)
        self.assertEqual([line.split()[0] for line in plain.stdout.splitlines()], ["order", "time", "written"])
        self.assertNotIn("axes", read_safetensors(out))
        self.assert_error(run("order", *inputs), 2, "logitless order: --out is required")
        self.assert_error(run("order", *inputs, "--out", out, "--moments", "--softcap", 5), 2,
                          "logitless order: --moments: the moments of a tile do not pass through a --softcap")

    def test_plan(self):
        sizes = ["plan", "--tokens", 4096, "--dim", 256, "--vocab", 50000]
        done = run(*sizes)
        self.assertEqual(done.returncode, 0, done.stderr)
        lines = done.stdout.splitlines()
        self.assertEqual(lines[0].split(), ["plan", "passes", "workspace", "predicted", "verdict"])
        self.assertEqual([line.split()[0] for line in lines[1:5]], ["forward", "dense", "stored", "recompute"])
        self.assertIn("gradients are wanted", lines[1])
        self.assertEqual(sum(line.endswith("chosen") for line in lines[1:5]), 1)

        plan = json.loads(run(*sizes, "--budget", "128MiB", "--json").stdout)
        self.assertEqual(plan["memory_budget"], 128 << 20)
        self.assertLessEqual(plan["workspace_bytes"], 128 << 20)
        self.assertEqual(plan["logits_bytes"], 4096 * 50000 * 4)
        self.assertEqual([c["plan"] for c in plan["candidates"] if c["chosen"]], [plan["plan"]])
        self.assertIn(f"plan {plan['plan']}", plan["explain"])
        self.assertEqual(json.loads(run(*sizes, "--plan", "recompute", "--json").stdout)["plan"], "recompute")
        self.assertEqual(json.loads(run(*sizes, "--plan", "forward", "--json").stdout)["passes"], 1.0)
        self.assertEqual(json.loads(run(*sizes, "--no-d-weight", "--no-d-hidden", "--json").stdout)["plan"], "forward")
        one = json.loads(run(*sizes, "--no-d-weight", "--plan", "dense", "--json").stdout)
        self.assertEqual(one["passes"], 2.0)
        entropy = json.loads(run(*sizes, "--entropy-gradient", "--json").stdout)
        self.assertEqual(entropy["plan"], "recompute")

    def test_plan_says_what_makes_it_large(self):
        sizes = ["plan", "--tokens", 16384, "--dim", 4096, "--vocab", 128256]
        done = run(*sizes, "--budget", "300MiB", "--plan", "dense")
        self.assert_error(done, 2, "logitless plan: memory_budget: 300.0 MiB", "is below the least plan, dense, which needs")
        self.assertIn("1002.0 MiB of it what bf16 leaves of the sums of d_weight over several chunks", done.stderr)
        self.assertRegex(done.stderr, r"\([0-9.]+ MiB with --grad-dtype f32\)$")
        self.assertTrue(all(run(*sizes, "--budget", *fits).returncode == 0 for fits in (["300MiB", "--grad-dtype", "f32"], ["30MiB"])))
        text = run("plan", "--tokens", 1024, "--dim", 768, "--vocab", 40000, "--budget", "512MiB").stdout
        self.assertIn("  keeps exp(z) of ", text)
        self.assertRegex(text, r"\nstored +3 .*  all of exp\(z\) fits: that is dense\n")
        self.assertNotIn("not stored: predicted slower", text)

    def test_options_change_plans(self):
        def bytes_of(*arguments):
            done = run("plan", "--tokens", 2048, "--dim", 128, "--vocab", 20000, "--plan", "dense", "--json", *arguments)
            self.assertEqual(done.returncode, 0, done.stderr)
            return json.loads(done.stdout)["workspace_bytes"]

        plain = bytes_of()
        for arguments in (["--bias"], ["--dtype", "f32"], ["--targets-per-token", 8], ["--threads", 7]):
            self.assertNotEqual(bytes_of(*arguments), plain, arguments)

    def check_bench(self, *arguments, tolerance):
        done = run("bench", *arguments, "--repeat", 2, "--json")
        self.assertEqual(done.returncode, 0, done.stderr)
        got = json.loads(done.stdout)
        self.assertEqual([row["plan"] for row in got["plans"]], ["forward", "dense", "recompute", "stored:0.5"])
        for row in got["plans"]:
            self.assertEqual(len(row["all_seconds"]), 2)
            self.assertGreater(row["seconds"], 0.0)
            self.assertEqual(row["peak_bytes"], row["workspace_bytes"])
            self.assertLess(row["loss_difference"], 1e-5)
            self.assertAlmostEqual(row["loss"], got["unfused"]["loss"], delta=1e-5 * row["loss"])
            # A loss alone is compared with a loss alone, and gradients with gradients.
            like = "loss_seconds" if row["plan"] == "forward" else "seconds"
            self.assertAlmostEqual(row["of_unfused"], row["seconds"] / got["unfused"][like], delta=1e-9 * row["of_unfused"])
            if row["plan"] == "forward":
                self.assertIsNone(row["d_hidden_difference"])
                continue
            self.assertLess(row["d_hidden_difference"], tolerance)
            self.assertLess(row["d_weight_difference"], tolerance)
        return got

    def test_bench(self):
        # The sizes are no multiples of any block, and span several of each.
        sizes = ["--tokens", 203, "--dim", 261, "--vocab", 1601]
        got = self.check_bench(*sizes, "--dtype", "f32", tolerance=1e-5)
        self.assertEqual((got["tokens"], got["dim"], got["vocab"], got["dtype"]), (203, 261, 1601, "f32"))
        self.assertEqual(got["unfused"]["workspace_bytes"], 203 * 1601 * 4)
        got = self.check_bench("--tokens", 40, "--dim", 24, "--vocab", 300, "--grad-dtype", "f32", tolerance=4e-3)
        self.assertEqual((got["dtype"], got["grad_dtype"]), ("bf16", "f32"))
        again = self.check_bench("--tokens", 40, "--dim", 24, "--vocab", 300, "--threads", 1, tolerance=6e-3)
        self.assertEqual([r["loss"] for r in again["plans"]], [r["loss"] for r in got["plans"]])
        other = self.check_bench("--tokens", 40, "--dim", 24, "--vocab", 300, "--seed", 2, tolerance=6e-3)
        self.assertNotEqual(other["unfused"]["loss"], got["unfused"]["loss"])

    def test_bench_of_files(self):
        got = self.check_bench(*self.basics(), tolerance=1e-5)
        self.assertAlmostEqual(got["unfused"]["loss"], cross_entropy(self.head).loss, delta=1e-5)
        self.assertEqual(self.check_bench(*self.basics(), "--first", 2, tolerance=1e-5)["tokens"], 2)

    def test_bench_text_and_refusals(self):
        small = ["bench", "--tokens", 30, "--dim", 16, "--vocab", 200, "--repeat", 1]
        lines = run(*small).stdout.splitlines()
        self.assertIn("30 tokens x 200 vocabulary entries x 16, bf16", lines[0])
        self.assertEqual([line.split()[0] for line in lines[2:]],
                         ["plan", "forward", "dense", "recompute", "stored:0.5", "unfused", "unfused"])
        self.assertTrue(lines[-1].startswith("unfused loss"), lines[-1])
        done = run(*small, "--unfused-limit", "1e-9")
        self.assertIn("unfused: would take about ", done.stdout)
        got = json.loads(run(*small, "--unfused-limit", 0, "--kernel", "reference", "--json").stdout)
        self.assertEqual(got["unfused"], {"skipped": "not asked for"})
        skipped = {row["plan"]: row.get("skipped") for row in got["plans"]}
        self.assertIsNone(skipped["recompute"])
        self.assertIn("does not store", skipped["dense"])
        self.assertIsNone(got["plans"][0]["loss_difference"])
        got = json.loads(run(*small, "--budget", 1, "--json").stdout)
        self.assertTrue(all("needs" in row["skipped"] for row in got["plans"]))
        huge = ["bench", "--tokens", 2000000, "--dim", 1, "--vocab", 2000000, "--budget", 1, "--repeat", 1]
        self.assertRegex(run(*huge).stdout, r"unfused: needs 14\.\d TiB of memory, \d+\.\d \w+ are free\n")


if __name__ == "__main__":
    if not CLI:
        sys.exit("LOGITLESS_CLI: expected the path of the command, got nothing")
    unittest.main()
