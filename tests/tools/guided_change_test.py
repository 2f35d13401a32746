"""Tests of docs/develop/guided_change*.md: their diffs are lines of the tree, and removing them leaves nothing of the option."""

import re
import sys
import tempfile
import unittest
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tools"))

import python_c_api  # noqa: E402

PAGE = ROOT / "docs/develop/guided_change.md"
SECOND_PAGE = ROOT / "docs/develop/guided_change_logits.md"
THIRD_PAGE = ROOT / "docs/develop/guided_change_tensor.md"
# Pages that show all lines of an option: the option, and another that stays in the files that are written.
WHOLE = {PAGE: ("z_loss", "label_smoothing"), THIRD_PAGE: ("class_weight", "token_weight")}
# The most files that an option may take, without tests and generated ones.
MOST_FILES = {PAGE: 6, SECOND_PAGE: 9, THIRD_PAGE: 14}
GENERATED = {Path("python/logitless/_c_api.py"), Path("python/logitless/torch/loss.pyi")}
# It holds the last fields of the first version of a struct, not later ones.
LEAST_SIZES = Path("src/capi/convert.h")


def hunks(text):
    """Yields (path, lines before the change, lines after it) of each hunk."""
    for block in re.findall(r"^```diff\n(.*?)^```$", text, re.M | re.S):
        for part in re.split(r"^--- a/", block, flags=re.M)[1:]:
            old, new, *lines = part.split("\n")[:-1]
            assert new == f"+++ b/{old}", part
            for hunk in re.split(r"^@@\n", "\n".join(lines) + "\n", flags=re.M)[1:]:
                body = hunk.split("\n")[:-1]
                assert all(line[:1] in (" ", "+", "-") for line in body), hunk
                before, after = ([line[1:] for line in body if line[0] in kind] for kind in (" -", " +"))
                yield Path(old), before, after


def place(lines, wanted):
    """Returns the indices at which the wanted lines begin, one after the other."""
    return [i for i in range(len(lines)) if lines[i : i + len(wanted)] == wanted]


class GuidedChangeTest(unittest.TestCase):
    def setUp(self):
        self.text = "".join(page.read_text(encoding="utf-8") for page in (PAGE, SECOND_PAGE, THIRD_PAGE))

    @staticmethod
    def sources():
        """Returns the lines of every source file by its path."""
        files = (path for folder in ("include", "src", "python/logitless") for path in (ROOT / folder).rglob("*"))
        found = (path for path in files if path.suffix in {".h", ".cpp", ".cu", ".cuh", ".py", ".pyi"})
        return {path.relative_to(ROOT): path.read_text(encoding="utf-8").split("\n") for path in found}

    def test_every_hunk_is_in_the_tree(self):
        found = list(hunks(self.text))
        self.assertGreater(len(found), 20)
        for path, before, after in found:
            lines = (ROOT / path).read_text(encoding="utf-8").split("\n")
            with self.subTest(path=path, after=after):
                self.assertNotEqual(before, after)
                self.assertTrue(place(lines, after), "these lines do not stand in the file one after the other")

    def test_an_option_is_in_few_files(self):
        for page, most in MOST_FILES.items():
            files = {path for path, _, _ in hunks(page.read_text(encoding="utf-8"))} - GENERATED
            with self.subTest(page=page.name):
                self.assertLessEqual(len([path for path in files if path.parts[0] != "tests"]), most, sorted(files))

    def test_without_the_hunks_nothing_of_the_option_is_left(self):
        sources = self.sources()
        for page, (option, other) in WHOLE.items():
            with self.subTest(page=page.name):
                texts = {path: list(lines) for path, lines in sources.items()}
                self.check_without(page.read_text(encoding="utf-8"), option, other, texts)

    def check_without(self, page, option, other, texts):
        for path, before, after in hunks(page):
            if path not in texts or path in GENERATED:
                continue
            lines = texts[path]
            at = place(lines, after)
            with self.subTest(path=path, after=after):
                self.assertEqual(len(at), 1, "the lines stand in the file more than once")
                lines[at[0] : at[0] + len(after)] = before
        left = [
            f"{path}:{number}: {line.strip()}"
            for path, lines in texts.items()
            if path not in GENERATED | {LEAST_SIZES} and "integrations" not in path.parts  # these use it
            for number, line in enumerate(lines, 1)
            if option in line
        ]
        self.assertEqual(left, [])

        # The files that are written from the headers have lost it, too.
        with tempfile.TemporaryDirectory() as folder:
            for path in (*python_c_api.HEADERS, *GENERATED):
                target = Path(folder) / path
                target.parent.mkdir(parents=True, exist_ok=True)
                target.write_text("\n".join(texts[path]), encoding="utf-8")
            written = python_c_api.outputs(Path(folder))
        self.assertEqual(set(written), GENERATED)
        for path, text in written.items():
            self.assertIn(other, text)
            self.assertNotIn(option, text, path)

    def test_what_it_names_exists(self):
        sources = [
            path.read_text(encoding="utf-8")
            for folder in ("include", "src", "python", "tests", "tools")
            for path in (ROOT / folder).rglob("*")
            if path.suffix in {".h", ".cpp", ".c", ".cu", ".cuh", ".py", ".pyi"} and path != Path(__file__).resolve()
        ]
        prose = re.sub(r"^```.*?^```$", "", self.text, flags=re.M | re.S)
        for name in set(re.findall(r"`([A-Za-z_]\w+)(?:\(\))?`", prose)):
            with self.subTest(name=name):
                self.assertTrue(any(re.search(rf"\b{name}\b", text) for text in sources))
        # Quoted code that is not a diff.
        for block in re.findall(r"^```cpp\n(.*?)^```$", self.text, re.M | re.S):
            wanted = " ".join(block.split())
            self.assertTrue(any(wanted in " ".join(text.split()) for text in sources), block)


if __name__ == "__main__":
    unittest.main()
