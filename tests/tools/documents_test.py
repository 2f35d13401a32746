#!/usr/bin/env python3
"""Tests of links and file names in the documents. Every link leads to a file, heading or picture, and every file of the
tree that they name in backticks exists. documents_test.py SOURCE_DIR"""

import re
import sys
from pathlib import Path


def without_code(text):
    return re.sub(r"^([ \t]*)```.*?^\1```", "", text, flags=re.M | re.S)


def anchors_of(text):
    """Returns the anchor of each heading, by GitHub's rule."""
    made = []
    for heading in re.findall(r"^#+[ \t]+(.*?)[ \t]*$", without_code(text), re.M):
        plain = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading).replace("`", "").lower()
        anchor = re.sub(r"[^\w\- ]", "", plain).replace(" ", "-")
        made.append(anchor if anchor not in made else f"{anchor}-{made.count(anchor)}")
    return made


def documents(source):
    paths = [*source.glob("*.md"), *(source / "docs").glob("**/*.md"), *(source / "examples").glob("**/*.md")]
    return {path.resolve(): path.read_text(encoding="utf-8") for path in paths}


def alternatives(name):
    """Expands a/{b,c}/d to a/b/d, a/c/d."""
    found = re.search(r"\{([^{}]*)\}", name)
    if found is None:
        return [name]
    before, after = name[: found.start()], name[found.end() :]
    return [each for part in found[1].split(",") for each in alternatives(before + part.strip() + after)]


def wrong_files(source, texts):
    """Returns names of missing files: `src/math/softcap.h`, `tests/head/range_test.cpp`, `src/kernels/cpu_*.h`. NAME is
    a wildcard, and endings may be missing. The change log is left out: it names the files of its time."""
    names = [path.name for path in source.iterdir() if path.is_dir()]
    folders = "|".join(name for name in names if not name.startswith(("build", ".")))
    found = 0
    for path, text in texts.items():
        if path.name == "CHANGELOG.md":
            continue
        for name in re.findall(rf"`((?:{folders})/[^`\s:<>]*)`", without_code(text)):
            for each in alternatives(name.rstrip("/")):
                found += 1
                if not any(True for ending in ("", ".*") for _ in source.glob(each.replace("NAME", "*") + ending)):
                    yield f"{path.relative_to(source)}: `{name}`: there is no such file"
    if found < 100:
        yield f"only {found} files are named in {len(texts)} documents: this test does not see them"


def wrong_links(source, texts):
    found = 0
    for path, text in texts.items():
        prose = re.sub(r"`[^`\n]*`", "", without_code(text))
        for target in re.findall(r"\]\(([^)\s]+)\)", prose):
            if "://" in target:
                continue
            found += 1
            name, _, anchor = target.partition("#")
            other = (path.parent / name).resolve() if name else path
            if not other.exists():
                yield f"{path.relative_to(source)}: {target}: there is no such file"
            elif anchor and anchor not in anchors_of(texts.get(other) or other.read_text(encoding="utf-8")):
                yield f"{path.relative_to(source)}: {target}: no heading of that name"
    if found < 50:
        yield f"only {found} links were found in {len(texts)} documents: this test does not see them"


if __name__ == "__main__":
    source = Path(sys.argv[1]).resolve()
    texts = documents(source)
    wrong = [*wrong_links(source, texts), *wrong_files(source, texts)]
    sys.exit("\n".join(wrong) or 0)
