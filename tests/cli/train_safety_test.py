#!/usr/bin/env python3
"""Tests the safety of `logitless train` (path of the command in LOGITLESS_CLI): diverged and stopped runs,
unwritable and hostile files, budgets, and the files next to a model."""

import json
import os
import signal
import struct
import subprocess
import sys
import unittest
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))
from tensor_files import read_safetensors  # noqa: E402
from train_test import CLI, CommandTest, SIZES, run, shard  # noqa: E402

QUIET = ["--sample", 0]


class DivergedTest(CommandTest):
    def test_the_last_good_checkpoint_stays(self):
        save, out = self.dir / "run.safetensors", self.dir / "model.safetensors"
        self.train(*SIZES, *QUIET, "--steps", 4, "--save", save)
        good = save.read_bytes()
        # One more step, after which everything is NaN except the loss, which was computed before the update.
        done = run("--resume", save, "--save", save, "--export", out, "--steps", 5, "--warmup", 0, "--lr", "1e38", "--min-lr",
                   "1e38", "--json", *QUIET)
        self.assertEqual(done.returncode, 1, done.stderr)
        self.assertIn("the learning rate may be too high", json.loads(done.stdout)["error"])
        self.assertEqual(save.read_bytes(), good)
        self.assertFalse(out.exists())

    def test_a_single_step(self):
        save = self.dir / "one.safetensors"
        options = ["--data", self.data, *SIZES[2:], *QUIET, "--steps", 1, "--lr", "1e38", "--min-lr", "1e38", "--save", save]
        for more in (["--vocab", 300], ["--vocab", 300, "--accumulate", 2], ["--vocab", 50257, "--far-field", 0.1]):
            done = run(*options, *more)
            self.assertEqual(done.returncode, 1, done.stderr)
            self.assertRegex(done.stderr, "the (validation )?loss of step 1 is .*; '.*' was not written\n")
            self.assertFalse(save.exists())

    def test_says_which_step_is_kept(self):
        save = self.dir / "kept.safetensors"
        done = run("--data", self.data, *SIZES, *QUIET, "--steps", 400, "--warmup", 400, "--lr", "1e6", "--clip", 0, "--save", save,
                   "--eval-every", 1)
        self.assertEqual(done.returncode, 1, done.stdout[-500:])
        kept = int(done.stderr.strip().rsplit("has step ", 1)[1])
        self.assertGreater(kept, 0)
        self.assertEqual(self.metadata(save)["step"], str(kept))


class StopTest(CommandTest):
    def stopped(self, number, *arguments):
        def fresh():
            signal.signal(number, signal.SIG_DFL)  # a runner in the background may ignore it

        command = [CLI, "train", "--data", str(self.data), *SIZES, *map(str, arguments)]
        # pylint: disable-next=subprocess-popen-preexec-fn
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, preexec_fn=fresh,
                                   env={**os.environ, "OMP_NUM_THREADS": "1"})
        for line in process.stdout:
            if line.startswith("step "):
                break
        process.send_signal(number)
        out, err = process.communicate(timeout=120)
        return process.returncode, out, err

    def test_signals_finish_the_step_and_save(self):
        for number in (signal.SIGINT, signal.SIGTERM):
            name = signal.Signals(number).name
            save, out = self.dir / f"{name}.safetensors", self.dir / f"{name}_model.safetensors"
            code, text, err = self.stopped(number, "--steps", 1000000, "--save", save, "--export", out)
            self.assertEqual(code, 128 + number, err)
            self.assertIn("stopping after this step", err)
            self.assertRegex(text, f"stopped by {name} after step [0-9]+ of 1000000; --resume '{save}' goes on from there")
            self.assertNotIn("Continuation", text)
            self.assertFalse(out.exists())
            step = int(self.metadata(save)["step"])
            self.assertIn(f"after step {step} of", text)
            done = run("--resume", save, "--steps", step + 1, "--warmup", 0, *QUIET, "--json")
            self.assertEqual(done.returncode, 0, done.stderr)
            self.assertEqual(len(json.loads(done.stdout)["steps"]), 1)

    def test_without_save_it_says_that_nothing_is_kept(self):
        code, text, _ = self.stopped(signal.SIGTERM, "--steps", 1000000)
        self.assertEqual(code, 143)
        self.assertRegex(text, "stopped by SIGTERM after step [0-9]+ of 1000000; nothing is saved without --save")


class FilesTest(CommandTest):
    def test_found_before_the_first_step(self):
        base = ["--data", self.data, *SIZES, "--steps", 1, *QUIET]
        long_name = self.dir / ("n" * 300)
        for option in ("--save", "--export"):
            self.assert_error([*base, option, long_name], f"{option}: '{long_name}': cannot create a temporary file beside it")
            self.assert_error([*base, option, "/proc/x.safetensors"], f"{option}: '/proc/x.safetensors': cannot create")
        text = self.dir / "found_text"
        text.mkdir()
        (text / "a.txt").write_text("int main() { return 0; }\n" * 400)
        words = ["--text", text, "--vocab", 300, "--dim", 16, "--heads", 2, "--layers", 1, "--length", 8, "--steps", 1, *QUIET]
        self.assert_error([*words, "--cache", self.data / "x"], f"--cache: cannot make the folder '{self.data / 'x'}'")
        self.assert_error([*words, "--cache", "/proc"], "--cache: '/proc/tokens': cannot create a temporary file beside it")
        odd = os.fsencode(self.dir) + b"/odd\xff"
        os.mkdir(odd)
        Path(os.fsdecode(odd) + "/a.txt").write_text("int main() { return 0; }\n" * 400)
        done = subprocess.run([CLI, "train", "--text", odd, *map(str, words[2:]), "--cache", self.dir, "--save", self.dir / "odd"],
                              capture_output=True, timeout=120, check=False)
        self.assertEqual(done.returncode, 2, done.stderr)
        self.assertIn(b"--text: expected UTF-8, which is all that --save can store", done.stderr)
        self.assertNotIn(b"step 1", done.stdout)

    def test_a_token_outside_of_the_vocabulary_is_found_first(self):
        tokens = [i % 300 for i in range(70000)]
        for at in (3, 4096, 69999):
            bad = self.dir / "bad.bin"
            shard(bad, [*tokens[:at], 300, *tokens[at + 1:]])
            for options in (["--data", bad], ["--data", self.data, bad], ["--data", self.data, "--val", bad]):
                with self.subTest(at=at, options=options):
                    done = run(*options, *SIZES, *QUIET, "--steps", 1, "--save", self.dir / "bad.safetensors")
                    self.assertEqual(done.returncode, 2, done.stderr)
                    option = "--val" if "--val" in options else "--data"
                    self.assertIn(f"{option}: '{bad}': expected tokens below 300 (vocab), found 300 at {at}\n", done.stderr)
                    self.assertNotIn("step 1", done.stdout)
            self.assertEqual(run("--data", bad, "--vocab", 301, *SIZES[2:], *QUIET, "--steps", 1).returncode, 0)

    def test_what_is_read_is_not_replaced(self):
        one = self.dir / "one.safetensors"
        base = ["--data", self.data, *SIZES, "--steps", 1, *QUIET]
        self.assert_error([*base, "--save", one, "--export", f"{self.dir}/./one.safetensors"],
                          f"--export: '{self.dir}/./one.safetensors' is the file of --save, which it would replace")
        named = self.dir / "named.safetensors"
        named.write_bytes(self.data.read_bytes())
        for option in ("--save", "--export"):
            self.assert_error([*base[2:], "--data", named, option, named],
                              f"{option}: '{named}' is the file of --data, which it would replace")
            self.assert_error([*base, "--val", named, option, named], f"{option}: '{named}' is the file of --val")
        self.assertFalse(one.exists())

    def test_leftovers_of_a_killed_run_go(self):
        save = self.dir / "left.safetensors"
        for path in (save, save.with_suffix(".far.safetensors")):
            Path(f"{path}.1234-0.tmp").write_text("half")
        other = self.dir / "left.safetensors.tmp"
        other.write_text("kept")
        self.train(*SIZES, *QUIET, "--steps", 1, "--save", save, "--far-field", 0.1)
        names = ["left.log.jsonl", "left.safetensors", "left.safetensors.tmp"]
        self.assertEqual(sorted(p.name for p in self.dir.glob("left*")), names)

    def test_a_finished_run_is_written_again(self):
        save, again = self.dir / "finished.safetensors", self.dir / "again.safetensors"
        self.train(*SIZES, *QUIET, "--steps", 3, "--save", save)
        done = run("--resume", save, "--save", again, *QUIET, "--json")
        self.assertEqual(done.returncode, 0, done.stderr)
        got = json.loads(done.stdout)
        self.assertEqual(got["steps"], [])
        self.assertEqual(len(got["validations"]), 1)
        self.assertEqual(save.read_bytes(), again.read_bytes())

    def test_resume_remembers_the_cache(self):
        text, cache, save = self.dir / "words", self.dir / "own_cache", self.dir / "words.safetensors"
        text.mkdir()
        for i in range(20):
            (text / f"{i}.txt").write_text("".join(f"int v{(i * 7 + k) % 31} = f({k % 5});\n" for k in range(60)))
        options = ["--dim", 16, "--heads", 2, "--layers", 1, "--length", 8, *QUIET]
        done = run("--text", text, "--cache", cache, "--vocab", 300, *options, "--steps", 1, "--warmup", 0, "--save", save)
        self.assertEqual(done.returncode, 0, done.stderr)
        done = run("--resume", save, "--steps", 2, *QUIET)
        self.assertEqual(done.returncode, 0, done.stderr)
        self.assertIn(f"tokenizer and tokens from {cache}", done.stdout)
        other = self.dir / "other_cache"
        done = run("--resume", save, "--cache", other, "--steps", 2, *QUIET)
        self.assertEqual(done.returncode, 0, done.stderr)
        self.assertTrue(list(other.iterdir()))

    def test_resume_from_another_folder(self):
        """Relative paths of a checkpoint start from the folder where its run began, or else from the current folder."""
        began, other = self.dir / "began", self.dir / "elsewhere"
        for folder, word in ((began, "int"), (other, "float")):
            (folder / "text").mkdir(parents=True)
            for i in range(20):
                (folder / "text" / f"{i}.txt").write_text("".join(f"{word} v{(i * 7 + k) % 31} = f({k % 5});\n" for k in range(60)))

        def train(folder, *arguments):
            done = subprocess.run([CLI, "train", *map(str, [*arguments, *QUIET])], cwd=folder, capture_output=True, text=True,
                                  check=False, timeout=120, env={**os.environ, "OMP_NUM_THREADS": "1"})
            self.assertEqual(done.returncode, 0, done.stderr)
            return done.stdout

        train(began, "--text", "text", "--cache", "words", "--vocab", 300, "--dim", 16, "--heads", 2, "--layers", 1, "--length", 8,
              "--steps", 1, "--warmup", 0, "--save", "run.safetensors")
        said = train(other, "--resume", "../began/run.safetensors", "--save", "on.safetensors", "--steps", 2)
        self.assertIn(f"tokenizer and tokens from {began}/words/", said)
        self.assertEqual(sorted(p.name for p in other.iterdir()), ["on.log.jsonl", "on.safetensors", "text"])
        # A run resumed in its folder writes the same checkpoint. A folder that was moved finds its files, too.
        train(began, "--resume", "run.safetensors", "--save", "again.safetensors")
        self.assertEqual((began / "run.safetensors").read_bytes(), (began / "again.safetensors").read_bytes())
        moved = began.rename(self.dir / "moved")
        self.assertIn("tokenizer and tokens from words/", train(moved, "--resume", "run.safetensors", "--steps", 2))
        self.assertNotIn("folder", json.loads((moved / "run.log.jsonl").read_text().splitlines()[0])["options"])

    def test_the_sample_of_numbers_is_apart_from_its_prompt(self):
        done = run("--data", self.data, *SIZES, "--steps", 1, "--sample", 3)
        self.assertEqual(done.returncode, 0, done.stderr)
        prompt, sample = done.stdout.split("\nPrompt\n")[1].split("\n\nContinuation\n")
        self.assertEqual((len(prompt.split()), len(sample.split())), (8, 3))
        for number in (prompt + " " + sample).split():
            self.assertLess(int(number), 300)


class CraftedTest(CommandTest):
    @classmethod
    def setUpClass(cls):
        super().setUpClass()
        cls.good = cls.dir / "good.safetensors"
        done = run("--data", cls.data, *SIZES, "--steps", 2, *QUIET, "--save", cls.good)
        assert done.returncode == 0, done.stderr

    def crafted(self, change):
        data = self.good.read_bytes()
        size = struct.unpack("<Q", data[:8])[0]
        header = json.loads(data[8:8 + size])
        change(header["__metadata__"])
        text = json.dumps(header).encode()
        text += b" " * (-len(text) % 8)
        bad = self.dir / "bad.safetensors"
        bad.write_bytes(struct.pack("<Q", len(text)) + text + data[8 + size:])
        return run("--resume", bad, "--steps", 3, "--warmup", 0, *QUIET)

    def test_depth(self):
        deep = self.dir / "deep.json"
        deep.write_text('{"model_type": ' + "[" * 1000000 + "]" * 1000000 + "}")
        done = run("--model", deep, "--steps", 1, *QUIET)
        self.assertEqual(done.returncode, 2, done.stderr)
        self.assertIn(f"--model: '{deep}': expected an object", done.stderr)

    def test_options(self):
        def with_option(name, value):
            def change(metadata):
                options = json.loads(metadata["options"])
                options[name] = value
                metadata["options"] = json.dumps(options)
            return change

        numbers = [0, -1, -7, 2**63 - 1, -2**63, 2**63, 2**64 - 1, 2**64, 1.5, 1e300, True, None, "1", [], {}]
        allowed = {"context": [0], "warmup": [0, -1], "eval-every": [0], "seed": [0], "steps": []}
        for name in ("vocab", "dim", "heads", "layers", "context", "batch", "length", "steps", "accumulate", "warmup", "seed",
                     "eval-every"):
            for value in numbers:
                if value in allowed.get(name, []) and not isinstance(value, bool):
                    continue
                if name in ("steps", "warmup"):  # given on the command line, so not read from the file
                    continue
                done = self.crafted(with_option(name, value))
                with self.subTest(name=name, value=value):
                    self.assertEqual(done.returncode, 2, done.stderr)
                    self.assertRegex(done.stderr, f"--resume: '.*': metadata 'options': {name}: expected a whole number")
        for name, values in {"lr": [-1.0, None, "fast", True, []], "min-lr": [-2.0, -0.5, "x"], "weight-decay": [-0.1, None],
                             "clip": [-1.0, {}], "far-field": [-0.1, 1.0, 2.0, "x"], "far-both": [1, "x", None],
                             "untied": [0, "x"], "dtype": ["f16", "i64", 3, ""], "model": ["gpt9", 3], "data": ["x", 3, [1]],
                             "cache": [1], "text": ["x", [2]]}.items():
            for value in values:
                done = self.crafted(with_option(name, value))
                with self.subTest(name=name, value=value):
                    self.assertEqual(done.returncode, 2, done.stderr)
                    self.assertRegex(done.stderr, f"--resume: '.*': metadata 'options': {name}: ")

    def test_metadata(self):
        for name in ("step", "windows", "far_steps"):
            for value in (str(2**63), str(2**64 - 1), str(2**64), str(2**62), "-1", "1.5", "1e3", "true", "", "[]", "null"):
                def change(metadata, name=name, value=value):
                    metadata[name] = value
                done = self.crafted(change)
                with self.subTest(name=name, value=value):
                    self.assertEqual(done.returncode, 2, done.stderr)
                    self.assertRegex(done.stderr, f"--resume: '.*': metadata '{name}': expected a number, found")
        for field in ("vocab", "context", "dim", "heads", "layers"):
            for value in (0, -1, 2**20 + 1, 2**62, 2**63, 1.5, True, None, "8"):
                def craft(metadata, field=field, value=value):
                    config = json.loads(metadata["config"])
                    config[field] = value
                    metadata["config"] = json.dumps(config)
                done = self.crafted(craft)
                with self.subTest(field=field, value=value):
                    self.assertEqual(done.returncode, 2, done.stderr)
                    self.assertIn("metadata 'config': expected the sizes of a model, found", done.stderr)

    def test_the_good_one(self):
        self.assertEqual(self.crafted(lambda metadata: None).returncode, 0)


class BudgetTest(CommandTest):
    def test_what_is_compared_is_what_is_taken(self):
        options = ["--data", self.data, "--vocab", 8192, "--dim", 64, "--heads", 2, "--layers", 1, "--length", 64, "--batch", 4,
                   "--dtype", "bf16", "--steps", 1, "--warmup", 0, "--threads", 4, *QUIET, "--json"]
        accepted = []
        for budget in (300, 1000, 1500, 2000, 2300, 2600, 3000, 3500, 4000, 5000, 6000, 8000):
            done = run(*options, "--budget", f"{budget}KiB")
            if done.returncode == 0:
                accepted.append(budget)
                self.assertLessEqual(json.loads(done.stdout)["memory"]["arena_bytes"], budget * 1024)
            else:
                self.assertIn("--budget: a step takes ", done.stderr)
                self.assertEqual(accepted, [], f"{budget} KiB is refused")
        self.assertTrue(accepted)


class ModelFilesTest(CommandTest):
    def test_export_and_init(self):
        folder, out = self.dir / "model", self.dir / "model" / "model.safetensors"
        folder.mkdir()
        self.train(*SIZES, "--untied", "--steps", 2, *QUIET, "--export", out)
        config = json.loads((folder / "config.json").read_text())
        self.assertEqual({k: config[k] for k in ("model_type", "vocab_size", "n_embd", "n_head", "n_layer", "n_positions")},
                         {"model_type": "gpt2", "vocab_size": 300, "n_embd": 16, "n_head": 2, "n_layer": 1, "n_positions": 8})
        self.assertFalse(config["tie_word_embeddings"])
        self.assertFalse((folder / "tokenizer.model").exists())
        # The file defines all sizes.
        got = self.train("--length", 8, "--batch", 2, "--steps", 1, "--lr", 0, *QUIET, "--init", out)
        self.assertEqual({k: got["model"][k] for k in ("vocab", "context", "dim", "heads", "layers", "untied")},
                         {"vocab": 300, "context": 8, "dim": 16, "heads": 2, "layers": 1, "untied": True})
        again = self.dir / "again.safetensors"
        self.train("--length", 8, "--steps", 1, "--lr", 0, *QUIET, "--init", out, "--export", again)
        self.assertEqual(out.read_bytes(), again.read_bytes())
        for option, value, found in (("dim", 32, 16), ("vocab", 301, 300), ("layers", 2, 1), ("context", 9, 8)):
            self.assert_error(["--data", self.data, "--init", out, f"--{option}", value],
                              f"--{option}: '{out}' has {found}, got {value}")
        (folder / "config.json").unlink()
        self.assert_error(["--data", self.data, "--init", out], f"--heads: expected a number: '{out}' does not tell")
        self.assertEqual(self.train("--length", 8, "--steps", 1, *QUIET, "--init", out, "--heads", 4)["model"]["heads"], 4)
        (folder / "config.json").write_text('{"n_head": 0}')
        self.assert_error(["--data", self.data, "--init", out, "--length", 8], f"--init: '{folder / 'config.json'}': n_head: expected")
        # The config.json of another model type is not replaced.
        (folder / "config.json").write_text('{"model_type": "llama"}')
        self.assert_error(["--data", self.data, *SIZES, *QUIET, "--steps", 1, "--export", out],
                          f"--export: '{folder / 'config.json'}': expected that of a GPT-2, which may be replaced, found")

    def test_the_tokenizer_goes_with_the_model(self):
        text, folder = self.dir / "model_text", self.dir / "words_model"
        for made in (text, folder):
            made.mkdir()
        for i in range(20):
            (text / f"{i}.txt").write_text("".join(f"int v{(i * 7 + k) % 31} = f({k % 5});\n" for k in range(60)))
        options = ["--text", text, "--cache", self.dir / "words_cache", "--length", 8, "--steps", 1, "--warmup", 0]
        out = folder / "model.safetensors"
        done = run(*options, *SIZES[2:-4], "--vocab", 320, *QUIET, "--export", out)
        self.assertEqual(done.returncode, 0, done.stderr)
        model = (folder / "tokenizer.model").read_bytes()
        self.assertGreater(len(model), 1000)
        config = json.loads((folder / "config.json").read_text())
        self.assertEqual(config["eos_token_id"], 1)
        fast = json.loads((folder / "tokenizer.json").read_text())
        vocab = fast["model"]["vocab"]
        self.assertEqual((len(vocab), vocab["</s>"], vocab["<0x0A>"]), (config["vocab_size"], 1, vocab["<0x00>"] + 10))
        self.assertEqual([t["content"] for t in fast["added_tokens"]], ["<unk>", "</s>", "\t", "\t" * 2, "\t" * 3, "\t" * 4])
        for left, right in fast["model"]["merges"]:
            self.assertIn(left + right, vocab)
        self.assertGreater(len(fast["model"]["merges"]), 10)
        # Another text keeps the tokenizer.
        (text / "more.txt").write_text("something else altogether, " * 200)
        again = self.dir / "words_again"
        again.mkdir()
        done = run(*options, *QUIET, "--init", out, "--lr", 0, "--export", again / "model.safetensors")
        self.assertEqual(done.returncode, 0, done.stderr)
        self.assertEqual((again / "tokenizer.model").read_bytes(), model)
        self.assertEqual((again / "model.safetensors").read_bytes(), out.read_bytes())
        self.assertEqual(read_safetensors(out)["wte.weight"][1], [config["vocab_size"], 16])


def field(number, value):
    """Encodes a field of a protocol buffer: bytes, or a number."""
    def varint(count):
        return bytes([count & 127 | 128]) + varint(count >> 7) if count > 127 else bytes([count])
    if isinstance(value, float):
        return varint(number << 3 | 5) + struct.pack("<f", value)
    if isinstance(value, int):
        return varint(number << 3) + varint(value)
    return varint(number << 3 | 2) + varint(len(value)) + value


def sentence_pieces(end=b"</s>", last=b"in", charsmap=b"", dummy_prefix=0):
    """Makes a SentencePiece BPE model of special tokens, bytes, two letters and their pair."""
    pieces = [(b"<unk>", 0.0, 2), (end, 0.0, 3), *((f"<0x{i:02X}>".encode(), 0.0, 6) for i in range(256)),
              (last, 0.0, 1), (b"i", -1.0, 1), (b"n", -2.0, 1)]
    return (b"".join(field(1, field(1, text) + field(2, score) + field(3, kind)) for text, score, kind in pieces)
            + field(2, field(3, 2) + field(35, 1))
            + field(3, field(1, b"identity") + field(2, charsmap) + field(3, dummy_prefix) + field(4, 0)))


class TokenizerFilesTest(CommandTest):
    @classmethod
    def setUpClass(cls):
        super().setUpClass()
        cls.model = cls.dir / "model"
        cls.model.mkdir()
        done = run("--data", cls.data, *SIZES, "--steps", 1, *QUIET, "--export", cls.model)
        assert done.returncode == 0, done.stderr
        (cls.dir / "text").mkdir()
        (cls.dir / "text" / "a.txt").write_text("int main() { return 0; }\n" * 400)

    def run_with(self, model, *arguments, cache="cache", **beside):
        for name in ("tokenizer.json", "tokenizer_config.json"):
            (self.model / name).unlink(missing_ok=True)
        for name, text in beside.items():
            (self.model / f"{name}.json").write_text(text)
        (self.model / "tokenizer.model").write_bytes(model)
        return run("--init", self.model, "--text", self.dir / "text", "--cache", self.dir / cache, "--length", 8, "--steps", 1,
                   *QUIET, *arguments)

    def test_what_cannot_be_used_is_refused_first(self):
        far = struct.pack("<I", 1024) + b"\xff" * 1024 + b"x\0"
        for tokenizer, message in ((sentence_pieces(end=b"<end>"), "with a token between two texts (</s>), found none"),
                                   (sentence_pieces(last=b"\xffn"), "of UTF-8, found other bytes in piece 258"),
                                   (sentence_pieces(charsmap=far), "found a damaged map of characters"),
                                   (b"no model", "expected a SentencePiece model")):
            done = self.run_with(tokenizer, "--save", self.dir / "never.safetensors", "--export", self.dir / "never")
            with self.subTest(message=message):
                self.assertEqual(done.returncode, 2, done.stderr)
                self.assertIn(f"--text: the tokenizer of '{self.model}/model.safetensors': tokenizer: expected a Sen", done.stderr)
                self.assertIn(message, done.stderr)
                self.assertNotIn("step 1", done.stdout)
        self.assertFalse(list(self.dir.glob("never*")))

    def test_an_export_has_the_tokenizer_of_the_run(self):
        out = self.dir / "out"
        files = ("tokenizer.model", "tokenizer.json", "tokenizer_config.json")

        def exported(*arguments, **beside):
            done = self.run_with(*arguments, "--export", out, **beside)
            self.assertEqual(done.returncode, 0, done.stderr)
            return done.stdout, [(out / name).read_bytes() if (out / name).exists() else None for name in files]

        said, found = exported(sentence_pieces())
        self.assertEqual(found[0], sentence_pieces())
        self.assertEqual(json.loads(found[1])["model"]["merges"], [["i", "n"]])
        self.assertEqual(json.loads(found[2])["eos_token"], "</s>")
        # A model with a blank before each text has no equivalent tokenizer.json, but may bring its own.
        llama = sentence_pieces(dummy_prefix=1)
        said, found = exported(llama)
        self.assertIn("without a tokenizer.json, which has not add_dummy_prefix", said)
        self.assertEqual(found, [llama, None, None])
        said, found = exported(llama, tokenizer='{"of": "it"}', tokenizer_config="{}")
        self.assertNotIn("without a tokenizer.json", said)
        self.assertEqual(found, [llama, b'{"of": "it"}', b"{}"])

    def test_a_blank_stands_before_a_text_and_not_before_its_lines(self):
        done = self.run_with(sentence_pieces(dummy_prefix=1), cache="blank_words")
        self.assertEqual(done.returncode, 0, done.stderr)
        words = read_safetensors(next((self.dir / "blank_words").iterdir()))
        blank = [2 + byte for byte in "\u2581".encode()]  # not in this model's vocabulary
        for name, text in (("train", b"int main() { return 0; }\n" * 392), ("held_out", b"int main() { return 0; }\n" * 8)):
            found = words[name][2]
            self.assertEqual(found[:4], [*blank, 258], name)
            self.assertEqual(sum(found[i:i + 3] == blank for i in range(len(found))), 1 + 5 * text.count(b"\n"), name)


if __name__ == "__main__":
    if not CLI:
        sys.exit("LOGITLESS_CLI: expected the path of the command, got nothing")
    unittest.main()
