"""Adds pages to the site: the API of the Python packages, the public headers, and the documents outside of docs/. Links
to files that the site lacks become text."""

import importlib
import inspect
import posixpath
import re
import sys
from pathlib import Path

from mkdocs.structure.files import File

sys.path.insert(0, str(Path(__file__).parent))
import headers  # noqa: E402
from api import PACKAGES, exported  # noqa: E402

ROOT = Path(__file__).resolve().parents[2]
# Documents elsewhere in the tree, by their page.
OUTSIDE = {
    "README.md": "readme.md", "CONTRIBUTING.md": "contributing.md", "CHANGELOG.md": "changelog.md", "SECURITY.md": "security.md",
    "bench/heads/README.md": "develop/log/heads.md",
}


def package_page(package):
    """Returns the page of a package: a section for each name that it exports."""
    text = [f"# {package}", inspect.getdoc(importlib.import_module(package))]
    # The source of a class has the comments of its fields.
    text += [f"::: {name}" + "\n    options: {show_source: true}" * inspect.isclass(value) for name, value in exported(package).items()]
    return "\n\n".join(text) + "\n"


def on_config(config):
    paths = sorted((ROOT / "include/logitless").glob("*.h"))
    made = {f"reference/api/{package}.md": package_page(package) for package in PACKAGES}
    made |= {f"reference/api/{path.stem}_h.md": headers.page(f"logitless/{path.name}", path.read_text("utf-8")) for path in paths}
    rows = [f"| [`{path.name}`]({path.stem}_h.md) | {headers.summary(path.read_text('utf-8'))} |" for path in paths]
    made["reference/api/headers.md"] = "\n".join(
        ["# C++ and C headers", "", "`#include <logitless/logitless.h>` has all of C++, `c_api.h` is the C ABI.", "",
         "| header | |", "|---|---|", *rows, ""])
    made["site.css"] = ".md-grid { max-width: 76rem; }\n"  # 100 columns of code
    made |= {page: (ROOT / path).read_text(encoding="utf-8") for path, page in OUTSIDE.items()}
    config.extra["pages"] = made
    (reference,) = (entry["Reference"] for entry in config.nav if "Reference" in entry)
    reference.append({"Python": [f"reference/api/{package}.md" for package in PACKAGES]})
    reference.append({"C++ and C": ["reference/api/headers.md", *(f"reference/api/{path.stem}_h.md" for path in paths)]})
    return config


def on_files(files, config):
    for page, text in config.extra["pages"].items():
        files.append(File.generated(config, page, content=text))
    return files


def on_page_markdown(markdown, page, config, files):
    """Turns links of the tree into links of the site."""
    known = {posixpath.join("docs", file.src_uri): file.src_uri for file in files} | OUTSIDE
    here = next((path for path, made in OUTSIDE.items() if made == page.file.src_uri), posixpath.join("docs", page.file.src_uri))

    def link(found):
        text, target = found[1], found[2]
        path, _, anchor = target.partition("#")
        if "://" in target or not path or page.file.src_uri.startswith("reference/api/"):
            return found[0]
        path = posixpath.normpath(posixpath.join(posixpath.dirname(here), path))
        if path not in known:
            return text
        to = posixpath.relpath(known[path], posixpath.dirname(page.file.src_uri) or ".")
        return f"[{text}]({to}{'#' * bool(anchor)}{anchor})"

    code = re.compile(r"(^[ \t]*```.*?^[ \t]*```|`[^`\n]*`)", re.M | re.S)
    parts = code.split(markdown)
    # A link's text may hold code, so links are found in the whole, where they do not begin in code.
    inside = set()
    at = 0
    for k, part in enumerate(parts):
        if k % 2:
            inside.update(range(at, at + len(part)))
        at += len(part)
    return re.sub(r"\[([^\[\]]*)\]\(([^)\s]+)\)", lambda f: f[0] if f.start() in inside else link(f), markdown)
