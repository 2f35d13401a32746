#!/usr/bin/env python3
"""Every link of the documents leads somewhere: files, headings and pictures. documents_test.py SOURCE_DIR"""

import re
import sys
from pathlib import Path


def without_code(text):
    return re.sub(r"^([ \t]*)```.*?^\1```", "", text, flags=re.M | re.S)


def anchors_of(text):
    """Of each heading, as GitHub makes them."""
    made = []
    for heading in re.findall(r"^#+[ \t]+(.*?)[ \t]*$", without_code(text), re.M):
        plain = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading).replace("`", "").lower()
        anchor = re.sub(r"[^\w\- ]", "", plain).replace(" ", "-")
        made.append(anchor if anchor not in made else f"{anchor}-{made.count(anchor)}")
    return made


def wrong_links(source):
    documents = [*source.glob("*.md"), *(source / "docs").glob("**/*.md"), *(source / "examples").glob("**/*.md")]
    texts = {path.resolve(): path.read_text(encoding="utf-8") for path in documents}
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
    wrong = list(wrong_links(Path(sys.argv[1]).resolve()))
    sys.exit("\n".join(wrong) or 0)
