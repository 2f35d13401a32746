"""Makes Markdown pages of the public headers: a section for each declaration, with its comment and code as they stand."""

import re

FRAME = re.compile(r"#(pragma|include|if|ifdef|ifndef|endif|else)\b|namespace |}  // namespace|extern \"C\" {|}$")
NAMES = (
    r"typedef (?:struct|enum) (\w+)", r"typedef [^;(]*\(\*(\w+)\)", r"typedef [\w ]+ (\w+);", r"#define (\w+)",
    r"(?:class|struct|enum class|enum) (?:LOGITLESS_API )?(\w+)", r"using (\w+) =", r"\b(operator ?[^\s\w]+|\w+)\(",
    r"(\w+)(?:\[\w*\])? ?[={;]",
)


def blocks(lines):
    """Yields the declarations of a header with their comments, and the comments that stand alone."""
    block, depth, ended = [], 0, False
    for line in [*lines, ""]:
        if depth == 0 and FRAME.match(line):
            line = ""
        if depth == 0 and block and (not line or ended and line.startswith(("//", "/*"))):
            yield block
            block, ended = [], False
        if line or depth:
            block.append(line)
            code = re.sub(r"//.*|/\*.*|^ \*.*|\"[^\"]*\"", "", line)
            depth += code.count("{") - code.count("}")
            ended = bool(code.strip())


def name_of(block):
    """Returns the name that a declaration introduces; None for a comment."""
    text = re.sub(r"//.*|/\*.*?\*/", "", "\n".join(block), flags=re.S if block[0].startswith("/*") else 0)
    text = re.sub(r"^\s*(template <.*?> )?", "", re.sub(r"\s+", " ", text))
    return next((found[1] for pattern in NAMES if (found := re.search(pattern, text))), None)


def summary(text):
    """Returns the first sentence of a header's comment."""
    comment = re.sub(r"\n( \*|//) ?", " ", re.sub(r"^(/\*|//) ", "", text.partition("#pragma")[0]))
    return re.match(r".*?(?:[.:] |[.:]?$)", comment.strip().removesuffix("*/").strip(), re.S)[0].strip().rstrip(":")


def page(name, text):
    """Returns the page of the header `name`."""
    made, before = [f"# `{name}`"], None
    for block in blocks(text.rstrip("\n").split("\n")):
        name = name_of(block)
        if name and name != before:  # overloads stand under one name
            made.append(f"## `{name}`")
        before = name or before
        made.append("\n".join(["```cpp", *block, "```"]))
    return "\n\n".join(made) + "\n"
