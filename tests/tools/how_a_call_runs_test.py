"""Tests docs/explain/how_a_call_runs.md: each function of its tables is defined in the file beside it, and the other
names and files exist."""

import re
import unittest
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs/explain/how_a_call_runs.md").read_text(encoding="utf-8")
ROWS = re.findall(r"^\|(?: \d+ \|)? `([\w:]+)` \| `([\w/.]+)` \|", PAGE, re.M)


def defined(name, path):
    text = (ROOT / path).read_text(encoding="utf-8")
    if path.endswith(".py"):
        return re.search(rf"^ *(?:def|class) {name}\b", text, re.M)
    # The definition begins a line with its type, and its body opens before the next semicolon.
    return re.search(rf"^[\w:<>&* ]+[ &*]{re.escape(name)}\([^;]*?\{{", text, re.M)


class HowACallRunsTest(unittest.TestCase):
    def test_each_function_is_defined_in_its_file(self):
        self.assertGreater(len(ROWS), 20)
        for name, path in ROWS:
            with self.subTest(name=name, path=path):
                self.assertTrue(defined(name, path), f"{name} is not defined in {path}")

    def test_a_function_that_is_not_there_is_noticed(self):
        for name, path in ROWS:
            with self.subTest(name=name, path=path):
                self.assertFalse(defined(name + "x", path))

    def test_other_names_exist(self):
        texts = [
            path.read_text(encoding="utf-8")
            for folder in ("src", "python/logitless")
            for path in (ROOT / folder).rglob("*")
            if path.suffix in {".h", ".cpp", ".cu", ".py"}
        ]
        for name in set(re.findall(r"`([A-Za-z_]\w+)`", PAGE)):
            with self.subTest(name=name):
                self.assertTrue(any(re.search(rf"\b{name}\b", text) for text in texts))

    def test_it_is_on_one_screen(self):
        self.assertLessEqual(len(PAGE.split("\n")), 60)


if __name__ == "__main__":
    unittest.main()
