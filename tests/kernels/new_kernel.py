"""Applies the change of docs/develop/adding_a_kernel.md to copies of the files that it names: new_kernel.py OUT

The copies are written below the folder OUT. It fails where the tree does not have the lines that the change begins
with, or where the change touches other files than three."""

import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def patched(lines, before, after, path):
    found = [i for i in range(len(lines)) if lines[i : i + len(before)] == before]
    if len(found) != 1:
        sys.exit(f"new_kernel.py: {path} has {len(found)} places for\n" + "\n".join(before))
    return lines[: found[0]] + after + lines[found[0] + len(before) :]


def main(out):
    page = (ROOT / "docs/develop/adding_a_kernel.md").read_text()
    (change,) = re.findall(r"^```diff\n(.*?)^```$", page, re.M | re.S)
    files = re.split(r"^--- ", change, flags=re.M)[1:]
    if len(files) != 3:
        sys.exit(f"new_kernel.py: the change touches {len(files)} files, expected 3")
    for text in files:
        old, new, *lines = text.split("\n")[:-1]
        path = new.removeprefix("+++ b/")
        made = [] if old == "/dev/null" else (ROOT / path).read_text().split("\n")
        for hunk in re.split(r"^@@\n", "\n".join(lines) + "\n", flags=re.M)[1:]:
            body = hunk.split("\n")[:-1]
            before = [line[1:] for line in body if line[:1] in " -"]
            after = [line[1:] for line in body if line[:1] in " +"]
            made = after if old == "/dev/null" else patched(made, before, after, path)
        copy = Path(out) / path
        copy.parent.mkdir(parents=True, exist_ok=True)
        text = "\n".join(made).rstrip("\n") + "\n"
        if not copy.exists() or copy.read_text() != text:
            copy.write_text(text)


main(sys.argv[1])
