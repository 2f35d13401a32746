#!/usr/bin/env python3
"""Tests of links and file names in the documents. Every link leads to a file, heading or picture, and every file of the
tree that they name in backticks exists. So does every document that sources name. The site's navigation has each page once,
and no page has Markdown that the site would show otherwise. documents_test.py SOURCE_DIR"""

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
    folders = (source / name for name in ("docs", "examples", "bench", "fuzz"))
    paths = [*source.glob("*.md"), *(path for folder in folders for path in folder.glob("**/*.md"))]
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


# Folders whose sources name documents: all but the tests of these checks, and kernels/cuda until its two names are right.
NAMING = ("apps", "bench", "cmake", "examples", "fuzz", "include", "python", "src", "tests", "tools")
UNNAMED = ("tests/tools/",)


def wrong_names(source, texts):
    """Returns names of missing documents in sources: docs/explain/losses.md, docs/use/groups.md#groups."""
    found = 0
    for path in (path for folder in NAMING for path in (source / folder).rglob("*")):
        name = path.relative_to(source).as_posix()
        if not path.is_file() or name.startswith(UNNAMED) or "__pycache__" in name:
            continue
        for document, anchor in re.findall(r"\b(docs/[\w/.]+\.md)(?:#([\w-]+))?", path.read_text(encoding="utf-8", errors="replace")):
            found += 1
            if source / document not in texts:
                yield f"{name}: {document}: there is no such document"
            elif anchor and anchor not in anchors_of(texts[source / document]):
                yield f"{name}: {document}#{anchor}: no heading of that name"
    if found < 50:
        yield f"only {found} documents are named in sources: this test does not see them"


def wrong_on_the_site(source, texts):
    """Returns pages that the navigation lacks or has twice, entries without a page, long pages without contents, and Markdown
    that GitHub alone reads."""
    site = source / "tools/site"
    entries = re.findall(r"^ +- (\S+\.md)$", (site / "mkdocs.yml").read_text(encoding="utf-8"), re.M)
    outside = dict(re.findall(r'"(\S+\.md)": "(\S+\.md)"', (site / "hooks.py").read_text(encoding="utf-8")))
    yield from (f"tools/site/hooks.py: {path}: there is no such document" for path in outside if source / path not in texts)
    docs = {path.relative_to(source / "docs").as_posix() for path in texts if source / "docs" in path.parents}
    for page in docs | set(entries) | set(outside.values()):
        if page not in docs | set(outside.values()):
            yield f"tools/site/mkdocs.yml: {page}: there is no such page"
        elif entries.count(page) != 1:
            yield f"tools/site/mkdocs.yml: {page} is in the navigation {entries.count(page)} times"
    for path, text in texts.items():
        lines = without_code(text).split("\n")
        for before, line in zip(lines, lines[1:]):
            item = re.match(r"( *)([-*]|\d+\.) ", line)
            within = re.match(r" *([-*]|\d+\.) |#|  ", before)
            if before and ((item and not within) or (line.startswith("|") and not before.startswith(("|", "#")))):
                yield f"{path.relative_to(source)}: an empty line is missing before {line[:60]!r}"
            if item and len(item[1]) % 4:
                yield f"{path.relative_to(source)}: a list within a list is not indented by 4: {line[:60]!r}"
        name = path.relative_to(source).as_posix()
        if not name.startswith("docs/") or name.startswith("docs/develop/log/"):
            continue
        if len(lines) > 250:
            yield f"{name}: {len(lines)} lines; at most 250"
        sections = re.findall(r"^## ", without_code(text), re.M)
        if len(lines) > 110 and len(sections) > 2 and len(re.findall(r"\]\(#", text.partition("\n## ")[0])) < len(sections) / 2:
            yield f"{name}: a page of two screens and more begins with links to its sections"
    for picture in (source / "docs/pictures").glob("*.svg"):
        if "prefers-color-scheme:dark" not in picture.read_text(encoding="utf-8"):
            yield f"{picture.relative_to(source)} has no colours for dark mode: tools/pictures/svg.py"


if __name__ == "__main__":
    source = Path(sys.argv[1]).resolve()
    texts = documents(source)
    wrong = [*wrong_links(source, texts), *wrong_files(source, texts), *wrong_names(source, texts), *wrong_on_the_site(source, texts)]
    sys.exit("\n".join(wrong) or 0)
