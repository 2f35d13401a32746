#!/usr/bin/env python3
"""Checks the comments of the code, and the terms of code, comments and documents.

  - no comment begins with a word of FIRST_WORDS: a comment is a sentence, or a noun phrase that names the thing
  - no sentence of a comment has more than MAX_WORDS words
  - no comment, identifier or document uses a term of TERMS; docs/reference/glossary.md has the terms to use

One line for each finding, FILE:LINE first; the exit status is 1 if there are any.
"""

import argparse
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path, PurePosixPath
from typing import NamedTuple

MAX_WORDS = 25
FIRST_WORDS = {"What", "Of", "Where", "Whose", "Which", "As", "From", "For", "In", "By", "Whether"}
CHECKED = ("src", "apps", "include", "python", "tests", "bench", "tools", "examples", "cmake", "docs", "README.md", "CONTRIBUTING.md")
SLASHES = (".h", ".c", ".cpp", ".cu", ".cuh")
HASHES = (".py", ".sh", ".cmake", "CMakeLists.txt", "Makefile")

# Files about text, in which a word is a word and a piece is a piece of SentencePiece.
TEXT = ("apps/train/*", "src/cli/*", "src/page/*", "tests/train/*", "tests/python/train/*", "tests/cli/*", "tests/core/*",
        "bench/experiments/*", "bench/heads/*", "examples/log_bilinear.cpp",
        "tests/python/torch/recipes/*", "tests/tools/*", "docs/use/train.md", "docs/develop/log/far_field_figures.md")
# Files about words of 32 or 64 bits.
BITS = ("src/core/*", "src/kernels/cuda/device/tiles_sm90.cuh", "src/kernels/cuda/head/split_sums_sm90.cuh",
        "src/kernels/cuda/head/gradient_sm90.cuh", "src/kernels/cuda/head/block_rows.cu", "src/kernels/cuda/far/selection.cu",
        "src/kernels/cuda/tensor/*", "src/kernels/cpu/*", "src/compiler/exec/cpu/random.cpp", "python/logitless/_autochunk/*",
        "python/logitless/jax/_autochunk/*", "tests/python/jax/test_jax_autochunk_order.py",
        "tests/python/jax/test_jax_autochunk_transforms.py", "python/logitless/jax/sampling.py", "python/logitless/_losses/sampling.py",
        "tests/python/jax/test_jax_sampling.py")
# Files that look at PyTorch's forward-mode derivatives, whose dual numbers have a tangent.
FORWARD_MODE = ("python/logitless/torch/_lazy/_call.py", "tests/python/torch/test_lazy_modes.py",
                "tests/python/jax/test_jax_autochunk_primitives.py")
HEAD = ("src/head/*", "src/kernels/*", "src/math/*", "include/*", "src/capi/*", "tests/head/*", "tests/cuda/*")
RANKS = ("src/comm/*", "src/head/*", "src/kernels/cuda/*", "tests/comm/*", "tests/head/*")


class Term(NamedTuple):
    pattern: str  # in prose
    parts: tuple  # of identifiers, lower case
    use: str
    within: tuple = ()  # the files it is forbidden in; none: all
    but: tuple = ()  # files it is allowed in


TERMS = (
    Term(r"(?<!bit )(?<!machine )\bwords?\b(?! of (32|64) bits)", ("word", "words"), "vocabulary entry, token id, class",
         but=(*TEXT, *BITS)),
    Term(r"\bslabs?\b", ("slab", "slabs"), "vocabulary block"),
    Term(r"\bomega\b", ("omega",), "logit weights"),
    Term(r"\b(dealt|deals?|dealing) (out|words|vocab)|\bdealt\b", ("dealt", "deal"), "interleaved vocabulary"),
    Term(r"\b(lent|lends?|lending)\b", ("lent", "lends"), "aliased, reused"),
    Term(r"(?<!hyperbolic )\btangents?\b", ("tangent", "tangents"), "cotangent, upstream gradient",
         but=FORWARD_MODE),
    Term(r"\banew\b", ("anew",), "again, recompute"),
    Term(r"second-level cache|tensor memory accelerator|multiprocessors?\b", (), "L2, TMA, SM"),
    Term(r"\bladders?\b", ("ladder", "ladders"), "optimisation log"),
    Term(r"\bkept (tiles?|pairs)\b|\btiles? kept\b|\bfar tiles?\b", (), "selected tile, skipped tile", within=HEAD),
    Term(r"\bpieces?\b", ("piece", "pieces"), "shard, partition, slice", but=TEXT),
    Term(r"\b(meets?|meetings?|met)\b", ("meet", "meeting"), "barrier, rendezvous", within=RANKS),
    Term(r"\b(told|tells?|telling)\b", ("told", "tell"), "propagate, exchange, agree, report", within=RANKS),
    Term(r"\blanes?\b", ("lane",), "communication stream", within=("src/comm/*", "src/head/cuda/*", "src/head/*.h")),
    Term(r"(?<!in )(?<!in-)(?<!takes )(?<!took )(?<!its )(?<!decimal )\bplaces?\b(?! of\b)", (),
         "index, position, offset", within=HEAD),
    Term(r"\broom\b", ("room",), "scratch, capacity", within=HEAD),
    Term(r"\banswers?\b", ("answer", "answers"), "per-token gradient coefficients", within=HEAD),
    Term(r"\b(house|wing|door)s?\b", (), "module, package, interface"),
)


class Finding(NamedTuple):
    path: str
    line: int
    rule: str
    text: str

    def __str__(self):
        return f"{self.path}:{self.line}: {self.rule}: {self.text}"


class Comment(NamedTuple):
    line: int
    text: str


def matches(path, patterns):
    return any(PurePosixPath(path).match(pattern) or path.startswith(pattern[:-1]) and pattern.endswith("*")
               for pattern in patterns)


def comments_of(path, text):
    """Blocks of comment lines, comments at the end of a line, /* */ blocks and docstrings."""
    lines = text.split("\n")
    mark = "//" if path.endswith(SLASHES) else "#"
    block = re.compile(rf"\s*{mark}+[<!]*(?: (.*)|$)")
    tail = re.compile(r"[^\"]\s// (.*)$") if mark == "//" else re.compile(r"\S\s\s?# (.*)$")
    found, gathered, start = [], [], 0
    for number, line in enumerate([*lines, ""], 1):
        match = block.match(line)
        if match and not line.startswith("#!"):
            start = start if gathered else number
            gathered.append(match.group(1) or "")
            continue
        if gathered:
            found.append(Comment(start, "\n".join(gathered)))
            gathered = []
        match = tail.search(line)
        if match and match.group(1).count('"') % 2 == 0:
            found.append(Comment(number, match.group(1)))
    pattern = r"^[ ]*(?:[rf]?)\"\"\"(.*?)\"\"\"" if path.endswith(".py") else r"/\*+(.*?)\*/"
    if path.endswith((*SLASHES, ".py")):
        for match in re.finditer(pattern, text, re.DOTALL | re.MULTILINE):
            stripped = re.sub(r"^\s*\* ?", "", match.group(1), flags=re.MULTILINE) if mark == "//" else match.group(1)
            found.append(Comment(text.count("\n", 0, match.start()) + 1, stripped))
    return found


def sentences(text):
    """The sentences of prose. Code, usage, formulas and tables do not count, and list items end a sentence."""
    text = re.sub(r"```.*?```", "", text, flags=re.DOTALL)
    text = re.sub(r"^.*(\[--|^  +[^ ].* = ).*$", "", text, flags=re.MULTILINE)
    text = re.sub(r"`[^`]*`", "code", text)
    for paragraph in re.split(r"\n\s*\n|\n(?=\s*(?:[-*|]|\d+\.|@\w+|[\w*, ]+:\s))", text):
        if paragraph.lstrip().startswith("|"):
            continue
        paragraph = " ".join(paragraph.split())
        yield from re.split(r"(?<=[.!?:;])[\"')]*\s+", paragraph)


def parts_of(identifier):
    """The parts of a name in snake or camel case, in lower case."""
    apart = re.sub(r"([a-z0-9])([A-Z])", r"\1_\2", identifier)
    apart = re.sub(r"([A-Z]+)([A-Z][a-z])", r"\1_\2", apart)
    return {part.lower() for part in apart.split("_") if part}


def check_comment(path, comment, terms):
    first = re.match(r"\W*(\w+)", comment.text)
    if first and first.group(1) in FIRST_WORDS:
        yield Finding(path, comment.line, "first word", " ".join(comment.text.split())[:80])
    for sentence in sentences(comment.text):
        count = len([word for word in sentence.split() if re.search("[A-Za-z]", word)])
        if count > MAX_WORDS:
            yield Finding(path, comment.line, "sentence", f"{count} words: {sentence[:70]}")
    yield from check_prose(path, comment.line, comment.text, terms)


def check_prose(path, line, text, terms):
    text = re.sub(r"`[^`]*`", lambda match: " " * len(match.group()), text)
    for term in terms:
        for match in re.finditer(term.pattern, text, re.IGNORECASE):
            yield Finding(path, line + text.count("\n", 0, match.start()), "term", f'"{match.group()}": {term.use}')


def code_of(path, text):
    """The code without comments, docstrings and strings: the same lines."""
    blank = lambda match: "\n" * match.group().count("\n")
    if path.endswith(SLASHES):
        return re.sub(r"/\*.*?\*/|//[^\n]*|\"(?:[^\"\\\n]|\\.)*\"", blank, text, flags=re.DOTALL)
    return re.sub(r'"""(?:.*?)"""|(?:^|(?<=\s))#[^\n]*|"(?:[^"\\\n]|\\.)*"', blank, text, flags=re.DOTALL)


def check_names(path, text, terms):
    for number, line in enumerate(code_of(path, text).split("\n"), 1):
        for name in dict.fromkeys(re.findall(r"[A-Za-z_]\w*", line)):
            parts = parts_of(name)
            for term in terms:
                if parts.intersection(term.parts) and "word_embed" not in name:
                    yield Finding(path, number, "name", f"{name}: {term.use}")


def check_file(path, text):
    terms = [term for term in TERMS
             if (not term.within or matches(path, term.within)) and not matches(path, term.but)]
    if path.endswith(".md"):
        prose = re.sub(r"```.*?```", lambda match: "\n" * match.group().count("\n"), text, flags=re.DOTALL)
        yield from check_prose(path, 1, prose, terms)
        return
    for comment in comments_of(path, text):
        yield from check_comment(path, comment, terms)
    yield from check_names(path, text, terms)


def files_below(root, folders):
    listed = subprocess.run(["git", "ls-files", "-z", *folders], cwd=root, capture_output=True, text=True, check=True)
    for path in listed.stdout.split("\0"):
        if path.endswith((*SLASHES, *HASHES, ".md")) and path != "tools/check_comments.py" and (root / path).is_file():
            yield path


def main():
    root = Path(__file__).resolve().parents[1]
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("paths", nargs="*", help="files and folders (default: all that is checked)")
    parser.add_argument("--rule", choices=("first word", "sentence", "term", "name"), help="this rule alone")
    parser.add_argument("--summary", action="store_true", help="counts by folder, exit status 0")
    arguments = parser.parse_args()
    findings = []
    for path in files_below(root, arguments.paths or CHECKED):
        found = check_file(path, (root / path).read_text(errors="replace"))
        findings += [one for one in found if not arguments.rule or one.rule == arguments.rule]
    if arguments.summary:
        counts = Counter((str(PurePosixPath(*PurePosixPath(one.path).parts[:2])), one.rule) for one in findings)
        for (folder, rule), count in sorted(counts.items()):
            print(f"{folder:32} {rule:12} {count}")
        print({rule: sum(count for (_, kind), count in counts.items() if kind == rule)
               for rule in ("first word", "sentence", "term", "name")})
        return 0
    print(*findings, sep="\n", end="\n" if findings else "")
    return 1 if findings else 0


if __name__ == "__main__":
    sys.exit(main())
