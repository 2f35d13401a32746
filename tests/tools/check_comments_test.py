"""tools/check_comments.py finds first words, long sentences and terms of other fields, and nothing in good comments."""

import importlib.util
import unittest
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
spec = importlib.util.spec_from_file_location("check_comments", ROOT / "tools/check_comments.py")
check_comments = importlib.util.module_from_spec(spec)
spec.loader.exec_module(check_comments)


def found(path, text):
    return [(one.line, one.rule) for one in check_comments.check_file(path, text)]


class FirstWord(unittest.TestCase):
    def test_a_block_a_tail_and_a_docstring(self):
        self.assertEqual(found("src/a.cpp", "int a;\n// Of the rows\n// of a matrix.\nint b;  // What is left\n"),
                         [(2, "first word"), (4, "first word")])
        self.assertEqual(found("tools/a.py", 'def f():\n    """Whether it is there."""\n'), [(2, "first word")])
        self.assertEqual(found("include/a.h", "/* Where it lies. */\n"), [(1, "first word")])

    def test_sentences_and_noun_phrases(self):
        self.assertEqual(found("src/a.cpp", "// Returns the rows.\n// hidden [N, D] bf16\nint ofs;  // offset of Whole\n"), [])


class Sentence(unittest.TestCase):
    def test_more_than_25_words(self):
        self.assertEqual(found("src/a.cpp", "// " + "Rows " * 26 + ".\n"), [(1, "sentence")])
        self.assertEqual(found("src/a.cpp", "// " + "Rows " * 25 + ".\n"), [])

    def test_formulas_code_and_lists_do_not_count(self):
        formula = "//     s = " + "a + b " * 20 + "\n"
        self.assertEqual(found("src/a.cpp", "// The sum:\n" + formula + formula), [])
        self.assertEqual(found("tools/a.py", '"""Lists.\n\n' + "- one two three four five six seven eight\n" * 4 + '"""\n'), [])


class Terms(unittest.TestCase):
    def test_prose_names_and_documents(self):
        self.assertEqual(found("src/head/a.cpp", "// Sums over words.\n"), [(1, "term")])
        self.assertEqual(found("src/head/a.cpp", "int first_word, FarSlab;\n"), [(1, "name"), (1, "name")])
        self.assertEqual(found("docs/a.md", "Two\nslabs, `omega`.\n"), [(2, "term")])

    def test_bits_and_text_have_words(self):
        self.assertEqual(found("src/kernels/a.cpp", "// A 32-bit word.\n"), [])
        self.assertEqual(found("apps/train/tokenizer/tokenizer.cpp", "int word;  // a word of the text\n"), [])

    def test_strings_and_includes_are_no_names(self):
        self.assertEqual(found("src/head/a.cpp", 'auto a = "omega";\n'), [])


class Tree(unittest.TestCase):
    def test_is_clean(self):
        self.assertEqual([str(one) for path in check_comments.files_below(ROOT, check_comments.CHECKED)
                          for one in check_comments.check_file(path, (ROOT / path).read_text(errors="replace"))], [])


if __name__ == "__main__":
    unittest.main()
