#!/usr/bin/env python3
"""Runs `logitless compile` (path of the command in LOGITLESS_CLI), and checks its reports, files and refusals."""

import json
import os
import subprocess
import sys
import tempfile
import unittest
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))
from browser import faults  # noqa: E402

CLI = os.environ.get("LOGITLESS_CLI", "")
os.environ["CUDA_VISIBLE_DEVICES"] = ""  # otherwise a GPU's compute capability is the default
PROGRAM = """graph head(%h: bf16[N, 64], %w: bf16[5000, 64], %t: i64[N]) {
  %z = dot %h, %w contract(1; 1) : f32[N, 5000]
  %l = reduce_lse %z dims(1)
  %p = pick %z, %t axis(1)
  %nll = sub %l, %p
  %loss = reduce_sum %nll dims(0)
  return loss: %loss
  differentiate loss wrt %h, %w
}
"""


class CompileTest(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.folder = tempfile.TemporaryDirectory()
        cls.dir = Path(cls.folder.name)
        cls.file = cls.dir / "head.ir"
        cls.file.write_text(PROGRAM)

    @classmethod
    def tearDownClass(cls):
        cls.folder.cleanup()

    def run_command(self, *arguments, stdin=None):
        return subprocess.run([CLI, "compile", *map(str, arguments)], capture_output=True, text=True, timeout=120,
                              input=stdin, check=False)

    def good(self, *arguments, **more):
        done = self.run_command(*arguments, **more)
        self.assertEqual((done.returncode, done.stderr), (0, ""))
        return done.stdout

    def refused(self, code, message, *arguments):
        done = self.run_command(*arguments)
        self.assertEqual((done.returncode, done.stdout), (code, ""))
        self.assertIn(message, done.stderr)

    def test_explains(self):
        text = self.good(self.file, "--size", "N=1000")
        self.assertIn("on the head engine, dense plan", text)
        loops = self.good(self.file, "--size", "N=1000", "--no-head-engine")
        self.assertIn("along dimension 0: 1000 in", loops)
        # The report names the cause of a changed arena, and the peak after it; without a change it names none.
        plain = self.good(self.file, "--size", "N=1000", "--no-chunk")
        for report, after in ((text, "with the head engine"), (loops, "with loops")):
            self.assertRegex(report, rf"\narena: \S+ MiB without loops, \S+ MiB {after}\n")
            self.assertIn("\npeak without loops, ", report)
            self.assertIn(f"\npeak {after}, ", report)
            self.assertNotIn(", no loops\n", report)
        self.assertRegex(plain, r"\narena: \S+ MiB, no loops\n")
        self.assertEqual(plain.count("\npeak, "), 1)
        self.assertNotIn("without loops", plain)
        self.assertEqual(self.good("-", "--size", "N=1000", stdin=PROGRAM).splitlines()[:4], text.splitlines()[:4])

    def test_json_has_the_memory(self):
        report = json.loads(self.good(self.file, "--size", "N=1000", "--json", "--budget", "4MiB"))
        self.assertLess(report["after"]["arena_bytes"], report["before"]["arena_bytes"])
        self.assertGreater(report["before"]["arena_bytes"], 1000 * 5000 * 4)
        self.assertEqual(report["budget"], 4 << 20)
        self.assertTrue(report["heads"] and report["passes"] and report["after"]["timeline"])
        self.assertEqual((report["heads"][0]["tokens"], report["heads"][0]["vocab"]), (1000, 5000))

    def test_options_change_what_they_say(self):
        plain = json.loads(self.good(self.file, "--size", "N=1000", "--json", "--no-chunk"))
        self.assertEqual((plain["regions"], plain["threads"] > 0), ([], True))
        forced = json.loads(self.good(self.file, "--size", "N=1000", "--json", "--chunks", "7", "--threads", "3"))
        self.assertEqual((forced["regions"][0]["chunk"], forced["threads"]), (143, 3))

    def test_text_compiles_again(self):
        for option, what in (("--no-head-engine", "loop c0 extent(1000)"), ("--threads=2", "= head %h, %w, %t")):
            text = self.good(self.file, "--size", "N=1000", option, "--text")
            self.assertIn(what, text)
            self.assertIn("no loops", self.good("-", "--no-chunk", stdin=text))

    def test_the_program_is_not_replaced(self):
        self.refused(2, f"--html: '{self.file}' is the program, which it would replace", self.file, "--html", self.file)
        self.assertEqual(self.file.read_text(), PROGRAM)

    def test_html_and_dump(self):
        page = self.dir / "memory.html"
        self.assertEqual(self.good(self.file, "--size", "N=1000", "--html", page), f"wrote {page}\n")
        text = page.read_text()
        self.assertEqual(faults(text), [])
        self.assertEqual(text.count("<svg"), 2)  # with loops over without, and memory over time
        wanted = {"command": f"logitless compile {self.file} --size N=1000 --html {page}", "program": self.file,
                  "size N": 1000, "dtypes of parameters": "bf16, i64", "logitless": r"\d+\.\d+\.\d+"}
        for name, value in wanted.items():
            self.assertRegex(text, f"<td>{name}</td><td>{value}</td>")
        for curve in ("without loops", "with the head engine"):
            self.assertRegex(text, rf"<text [^>]*>{curve}: peak [0-9.]+ MiB at \w")
        for wanted in ("bytes that live while one runs", ">z<", "dot f32[1000, 5000]", "d_h"):
            self.assertIn(wanted, text)
        self.assertNotIn("Measured time", text)
        done = self.run_command(self.file, "--size", "N=1000", "--html", page, "--json", "--time", "1")
        self.assertEqual(json.loads(done.stdout)["program"], "head")
        self.assertIn(f"wrote {page}\n", done.stderr)
        self.assertIn("Measured time", page.read_text())
        for option in (["--html", page], ["--text"], ["--time", "1"]):
            self.refused(2, f"{option[0]}: cannot be given beside --dump-after", self.file, "--size", "N=1000", "--dump-after",
                         "all", *option)
        self.assertIn("# after choose-chunks", self.good(self.file, "--size", "N=1000", "--dump-after", "choose-chunks"))

    def test_places_of_operations(self):
        program = PROGRAM.replace(" : f32[N, 5000]", ' : f32[N, 5000] @ "loss.py:12"')
        text = self.good("-", "--size", "N=1000", stdin=program)
        self.assertIn(" z (dot) f32[1000, 5000], loss.py:12\n", text)
        text = self.good("-", "--size", "N=1000", "--no-head-engine", "--text", stdin=program)
        self.assertGreaterEqual(text.count('@ "loss.py:12"\n'), 3)  # the logits and both gradients
        report = json.loads(self.good("-", "--size", "N=1000", "--json", "--no-head-engine", stdin=program))
        self.assertIn("loss.py:12", report["regions"][0]["seed"])
        self.assertEqual(report["before"]["at_peak"][0]["location"], "loss.py:12")

    def test_a_model(self):
        text = self.good("--model", "gpt2", "--batch", "1", "--length", "64")
        self.assertRegex(text, r"layer\d+\.mlp\.\w+")
        self.assertNotRegex(text, r"\b(dot|mul|add|cast|tanh)\.\d+\b")  # names, not numbers
        self.assertIn("training step with AdamW: 474.", text)

    def test_a_budget_that_only_the_head_engine_misses(self):
        """The engine's weight in bf16 is not in the memory of its gradient, where that of a plain product is."""
        model = ["--model", "gpt2", "--batch", "1", "--length", "64"]
        self.assertRegex(self.good(*model, "--budget", "400KiB", "--strict"), r"arena: [\d.]+ KiB, no loops \(budget 400.0 KiB, met\)")
        self.assertIn("with the head engine (budget 80.0 MiB, met)", self.good(*model, "--budget", "80MiB"))

    def test_a_gpu_need_not_be_there(self):
        model = ["--model", "gpt2", "--batch", "4", "--length", "256", "--device", "cuda"]
        text = self.good(*model)
        self.assertIn("kernel hopper", text)
        self.assertIn(", a GPU of compute capability 9.0\n", text)
        self.assertEqual(self.good(*model, "--capability", "90").splitlines()[:4], text.splitlines()[:4])
        self.assertNotIn("kernel hopper", self.good(*model, "--capability", "80", "--no-head-engine"))
        done = self.run_command(*model, "--capability", "80")
        if done.returncode != 0:  # without cuBLAS: a list on one line
            self.assertIn("no kernel takes this head: hopper: runs on compute capability 9.0 alone", done.stderr)
        self.refused(2, "--time: this ", *model, "--time", "1")
        self.refused(2, "--threads: cannot be given beside --device cuda", *model, "--threads", "2")
        self.refused(2, "--capability: is of --device cuda", *model[:-2], "--capability", "90")
        self.assertIn("products with epilogues:\n  layer0.attn.c_attn and 11 more, 1024 x 2304 x 768: bias\n", text)
        self.assertNotIn("epilogues:", self.good(*model, "--no-epilogues"))
        self.refused(2, "--no-epilogues: is of --device cuda", *model[:-2], "--no-epilogues")
        self.refused(2, "expected cpu or cuda, got 'tpu'", *model[:-1], "tpu")

    def test_a_llama(self):
        config = {"model_type": "llama", "vocab_size": 512, "max_position_embeddings": 4096, "hidden_size": 64,
                  "intermediate_size": 128, "num_hidden_layers": 1, "num_attention_heads": 4, "num_key_value_heads": 2,
                  "rms_norm_eps": 1e-5, "tie_word_embeddings": True}
        folder = Path(self.folder.name) / "llama"
        folder.mkdir()
        (folder / "config.json").write_text(json.dumps(config))
        text = self.good("--model", folder, "--batch", "2", "--length", "32", "--no-chunk", "--text")
        # Only the small table of sines is concatenated; nothing is copied for positions.
        self.assertEqual([line.split(" : ")[1] for line in text.splitlines() if "= concat" in line], ["f32[32, 2, 8]"])
        self.assertNotIn("= pad", text)
        self.assertEqual(text.count("= flip"), 4)
        self.assertIn("%rope.cos: f32[32, 8]", text)
        # The default length is the context, up to 2048. Weights count as memory of training, tables do not.
        text = self.good("--model", folder / "config.json", "--batch", "1", "--dtype", "f32", "--text", "--no-chunk")
        self.assertIn("%tokens: i64[1, 2048]", text)
        weights = 4 * (512 * 64 + 2 * 64 * 64 + 2 * 32 * 64 + 3 * 128 * 64 + 3 * 64)
        self.assertIn(f"AdamW: {weights / 1024:.1f} KiB of weights", self.good("--model", folder, "--length", "32"))
        self.refused(2, "hidden_size: expected a whole number", "--model", self.broken(folder))
        self.assertIn("head engine", self.good("--model", "llama-3.2-1b", "--batch", "1", "--length", "512"))

    def broken(self, folder):
        (folder / "broken.json").write_text('{"model_type": "llama", "vocab_size": 4, "max_position_embeddings": 4}')
        return folder / "broken.json"

    def test_profiles(self):
        # A loop's instructions are counted in each of its 7 rounds; the loop itself is not counted.
        arguments = [self.file, "--size", "N=1000", "--chunks", "7", "--time", "2", "--profile"]
        table = self.good(*arguments).splitlines()
        self.assertRegex(table[0], r"^time: ")
        self.assertRegex(table[1], r"^instructions +first +count +total ms +each ms +rate$")
        self.assertRegex(table[-1], r"^all ")
        done = self.run_command(*arguments, "--json")
        self.assertEqual(done.returncode, 0)
        profile = json.loads(done.stdout)["profile"]
        self.assertEqual(len(profile), len(table) - 3)
        self.assertEqual([i["seconds"] for i in profile], sorted((i["seconds"] for i in profile), reverse=True))
        self.assertFalse([i for i in profile if i["instructions"].startswith("loop")])
        products = [i for i in profile if i["instructions"].startswith("product ")]
        self.assertEqual({i["count"] for i in products}, {1, 6})  # chunks of 143 rows, and the remainder
        self.assertEqual(sum(i["flops"] for i in products), 3 * 2 * 1000 * 5000 * 64)
        self.refused(2, "--profile goes with --time", self.file, "--size", "N=10", "--profile")

    def test_refusals(self):
        self.refused(2, "logitless compile: --size: the program's N has no value; give --size N=...\n", self.file)
        two = self.dir / "two.ir"
        two.write_text("graph g(%x: f32[N, M, 4]) {\n  %y = exp %x\n  return y: %y\n}")
        self.refused(2, "--size: the program's M, N have no value; give --size M=... --size N=...\n", two)
        self.refused(2, "--size: the program's M has no value; give --size M=...\n", two, "--size", "N=3")
        self.refused(2, "--size: the program has no size M; it has N", self.file, "--size", "N=10", "--size", "M=3")
        self.refused(2, "expected NAME=N, got 'N=x'", self.file, "--size", "N=x")
        self.refused(2, "N is given twice", self.file, "--size", "N=1", "--size", "N=2")
        self.refused(2, "expected FILE or --model, one of them")
        self.refused(2, "--batch and --length go with --model", self.file, "--batch", "2")
        self.refused(2, "there is no pass 'foo'", self.file, "--size", "N=10", "--dump-after", "foo")
        self.refused(2, "nowhere.ir", self.dir / "nowhere.ir")
        self.refused(2, "the budget is 1", self.file, "--size", "N=100", "--budget", "1", "--strict")
        self.refused(2, "gpt3", "--model", "gpt3")
        bad = self.dir / "bad.ir"
        bad.write_text("graph g(%x: f32[4]) {\n  %y = foo %x\n}")
        self.refused(2, "bad.ir:2:8: there is no operation 'foo'", bad)


if __name__ == "__main__":
    unittest.main()
