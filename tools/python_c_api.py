#!/usr/bin/env python3
"""Writes Python's declarations of the C ABI from its headers, include/logitless/c_*.h: tools/python_c_api.py

  python/logitless/_c_api.py        structs, constants, functions, defaults and options
  python/logitless/torch/loss.pyi   the terms and weights of the loss, between the lines that say so

With --check it writes nothing, names the files that are not up to date, and fails if there are any. The headers are
plain: typedefs of structs, enums, handles and function pointers, functions marked LOGITLESS_API. A field's comment
gives its default as "default X" (0 where it gives none). It gives a number's range at its beginning as "in [a, b]" or
">= a".
"""

import argparse
import json
import re
import sys
import textwrap
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
HEADERS = (Path("include/logitless/c_api.h"), Path("include/logitless/c_communicator.h"),
           Path("include/logitless/c_far_field.h"), Path("include/logitless/c_sample.h"),
           Path("include/logitless/c_saved_head.h"), Path("include/logitless/c_sharding.h"))
MODULE = Path("python/logitless/_c_api.py")
STUBS = (Path("python/logitless/torch/loss.pyi"),)
WIDTH = 120

PREFIX = "logitless_"
SCALARS = {
    "int32_t": "c_int32", "int64_t": "c_int64", "uint64_t": "c_uint64", "size_t": "c_size_t", "float": "c_float",
    "double": "c_double",
}
# Options that Python passes on as values: the struct, and their name there. Numbers, enums and 64-bit integers; flags
# are arguments of Python's own.
VALUES = {"logitless_cross_entropy_options": "CrossEntropyValues", "logitless_head_options": "HeadValues"}
TERMS = "logitless_loss_terms"
WEIGHTS = "logitless_cross_entropy_inputs", re.compile(r"optional f32 (\[.*\])$")  # fields with such a comment
BEGIN, END = "    # The terms and weights of the loss, written by tools/python_c_api.py {", "    # }"

TOKEN = re.compile(
    r"(?P<comment>/\*.*?\*/|//[^\n]*)|(?P<line>^[ \t]*#(?:\\\n|[^\n])*)|(?P<word>\w+)|(?P<mark>[^\s\w])",
    re.DOTALL | re.MULTILINE,
)


class HeaderError(ValueError):
    pass


@dataclass
class Token:
    kind: str
    text: str
    line: int
    last_line: int


@dataclass
class Field:
    name: str
    kind: str  # type in C, without const: "float", "logitless_tensor *"
    count: str = ""  # of an array
    text: str = ""


@dataclass
class Header:
    constants: dict = field(default_factory=dict)  # of #define
    enums: dict = field(default_factory=dict)  # name -> {constant: value}
    structs: dict = field(default_factory=dict)  # name -> [Field]
    handles: set = field(default_factory=set)
    callbacks: dict = field(default_factory=dict)  # name -> (kind, [kinds of its arguments])
    functions: dict = field(default_factory=dict)  # name -> (kind, [Field])


def plain(comment):
    """Returns the text of a comment on one line."""
    inner = comment[2:-2] if comment.startswith("/*") else comment[2:]
    return " ".join(re.sub(r"^[ \t]*\*(?!/)", " ", inner, flags=re.MULTILINE).split())


def tokens_of(text):
    found, at = [], 0
    for match in TOKEN.finditer(text):
        if text[at : match.start()].strip():
            raise HeaderError(f"line {text.count(chr(10), 0, at) + 1}: cannot read {text[at:match.start()].strip()!r}")
        at = match.end()
        first = text.count("\n", 0, match.start()) + 1
        found.append(Token(match.lastgroup, match.group(), first, first + match.group().count("\n")))
    return found


def declaration(tokens):
    """A field or an argument: its kind, name and count."""
    parts = [t.text for t in tokens if t.kind != "comment" and t.text not in ("const", "struct")]
    count = ""
    if parts[-1] == "]":
        count, parts = parts[-2], parts[:-3]
    name = parts.pop() if len(parts) > 1 and parts[-1] != "*" else ""
    return Field(name, " ".join(parts), count)


def fields_of(tokens):
    """Fields between braces. A comment that begins on the line of a field's end belongs to that field; any other
    one belongs to the next field."""
    fields, part, leading, ended = [], [], "", 0
    for t in tokens:
        if t.kind == "comment":
            if fields and not part and t.line == ended:
                fields[-1].text, ended = (fields[-1].text + " " + plain(t.text)).strip(), t.last_line
            else:
                leading = (leading + " " + plain(t.text)).strip()
        elif t.text == ";":
            fields.append(declaration(part))
            fields[-1].text, part, leading, ended = leading, [], "", t.last_line
        else:
            part.append(t)
    return fields


def split(tokens, mark=","):
    parts, depth = [[]], 0
    for t in tokens:
        depth += (t.text in "([{") - (t.text in ")]}") if t.kind == "mark" else 0
        if t.text == mark and depth == 0:
            parts.append([])
        else:
            parts[-1].append(t)
    return [p for p in parts if any(t.kind != "comment" for t in p)]


def statements(tokens):
    """Yields the tokens up to its semicolon of each declaration at the outermost level."""
    part, depth = [], 0
    for t in tokens:
        if t.kind == "line" or t.kind == "comment" and not part:
            continue
        part.append(t)
        depth += (t.text in ("{", "(")) - (t.text in ("}", ")"))
        if t.text == ";" and depth == 0:
            yield part[:-1]
            part = []


def read_enum(header, name, tokens):
    values = {}
    for part in split(tokens):
        texts = [t.text for t in part if t.kind != "comment"]
        if len(texts) < 3 or texts[1] != "=":
            raise HeaderError(f"line {part[0].line}: {texts[0]} of {name} has no value of its own")
        values[texts[0]] = int("".join(texts[2:]))
    header.enums[name] = values


def parse(*texts):
    """Returns the declarations of the headers, each header after those that it includes."""
    header = Header()
    for text in texts:
        read(header, text)
    return header


def read(header, text):
    # Only C++ sees extern "C" { and its brace.
    text = re.sub(r"#ifdef __cplusplus.*?#endif", lambda m: "\n" * m.group().count("\n"), text, flags=re.DOTALL)
    tokens, last = tokens_of(text), ""
    for t in tokens:
        if t.kind == "line" and (match := re.match(r"\s*#define LOGITLESS_(\w+) (-?\d+)\s*$", t.text)):
            header.constants[match.group(1)] = int(match.group(2))
    for part in statements(tokens):
        texts = [t.text for t in part if t.kind != "comment"]
        line = part[0].line
        if texts[0] == "LOGITLESS_API":
            open_at = next(i for i, t in enumerate(part) if t.text == "(")
            made = declaration(part[1:open_at])
            arguments = [declaration(p) for p in split(part[open_at + 1 : -1])]
            header.functions[made.name] = (made.kind, [a for a in arguments if a.kind + a.name != "void"])
        elif texts[:2] == ["typedef", "struct"] and "{" in texts:
            name = texts[-1]
            first = next(i for i, t in enumerate(part) if t.text == "{")
            header.structs[name] = fields_of(part[first + 1 : -2])
        elif texts[:2] == ["typedef", "struct"]:
            header.handles.add(texts[-1])
        elif texts[0] == "typedef" and "(" in texts:
            name = texts[texts.index("(") + 2]
            last_open = max(i for i, t in enumerate(part) if t.text == "(")
            arguments = [declaration(p).kind for p in split(part[last_open + 1 : -1])]
            header.callbacks[name] = (texts[1], arguments)
        elif texts[0] == "typedef":
            last = texts[-1]
        elif texts[0] == "enum" and last:
            first = next(i for i, t in enumerate(part) if t.text == "{")
            read_enum(header, last, part[first + 1 : -1])
        else:
            raise HeaderError(f"line {line}: cannot read a declaration that begins with {' '.join(texts[:4])}")


def class_name(name):
    return "".join(part.capitalize() for part in name.removeprefix(PREFIX).split("_"))


class Writer:
    def __init__(self, header):
        self.header = header
        self.constant = {c: v for values in header.enums.values() for c, v in values.items()}

    def ctype(self, kind, where):
        """The ctypes expression of a kind."""
        base, stars = kind.replace("*", "").strip(), kind.count("*")
        h = self.header
        if base in h.enums:
            base = "int32_t"
        if base in SCALARS:
            inner = SCALARS[base]
        elif base in h.structs:
            inner = class_name(base)
        elif base in h.callbacks:
            inner = class_name(base)
        elif base in ("void", "char") or base in h.handles:
            if stars == 0:
                if base == "void":
                    return "None"
                raise HeaderError(f"{where}: cannot pass a {base} by value")
            inner, stars = ("c_char_p" if base == "char" else "c_void_p"), stars - 1
        else:
            raise HeaderError(f"{where}: {base} is no type that Python knows")
        for _ in range(stars):
            inner = f"POINTER({inner})"
        return inner

    def field_type(self, f, struct):
        kind = self.ctype(f.kind, f"{struct}.{f.name}")
        return f"{kind} * {f.count.removeprefix('LOGITLESS_')}" if f.count else kind

    @staticmethod
    def packed(parts, indent=" " * 8):
        """Packs the parts, without splitting one, into as few lines as possible."""
        line = ""
        for part in parts:
            if line and len(indent) + len(line) + 1 + len(part) > WIDTH:
                yield indent + line
                line = ""
            line = f"{line} {part}".strip()
        yield indent + line

    def default(self, f):
        match = re.search(r"\bdefault (-?\d+(?:\.\d+)?|LOGITLESS_\w+)", f.text)
        if not match:
            return 0.0 if f.kind in ("float", "double") else 0
        value = match.group(1)
        if value in self.constant:
            return self.constant[value]
        return float(value) if f.kind in ("float", "double") else int(value)

    def bounds(self, f):
        if match := re.match(r"in \[(\S+), (\S+)\]", f.text):
            return float(match.group(1)), float(match.group(2))
        if match := re.match(r">= ([-\d.]+\d|\d)", f.text):
            return float(match.group(1)), float("inf")
        return float("-inf"), float("inf")

    def enums(self):
        for name, values in self.header.enums.items():
            parts = [c.split("_") for c in values]
            common = 0
            while all(len(p) > common + 1 and p[common] == parts[0][common] for p in parts):
                common += 1
            plural = name.removeprefix(PREFIX).upper()
            plural = f"{plural[:-1]}IES" if plural.endswith("Y") else plural + ("ES" if plural.endswith("S") else "S")
            entries = ", ".join(f'"{"_".join(c.split("_")[common:]).lower()}": {v}' for c, v in values.items())
            for constant, value in values.items():
                yield f"{constant.removeprefix('LOGITLESS_')} = {value}"
            yield f"{plural} = {{{entries}}}"
            yield ""

    def struct(self, name, fields):
        yield from ("", f"class {class_name(name)}(Structure):")
        yield "    _fields_ = ["
        yield from self.packed(f'("{f.name}", {self.field_type(f, name)}),' for f in fields)
        yield "    ]"
        defaults = ", ".join(f'"{f.name}": {self.default(f)}' for f in fields if self.default(f))
        if defaults:
            yield f"    defaults: ClassVar[dict[str, float]] = {{{defaults}}}"
        yield ""

    def values(self, name, fields):
        """A NamedTuple of options: enums by their names, integers, floats, doubles, and those of the plan's request."""
        enums = self.header.enums
        order = [lambda k: k in enums, lambda k: k == "int64_t", lambda k: k == "float", lambda k: k == "double"]
        yield from ("", f"class {VALUES[name]}(NamedTuple):")
        yield f'    """Fields of {class_name(name)} that Python sets, and of the request of the plan."""'
        yield ""
        for wanted in order:
            for f in fields:
                if f.count or not wanted(f.kind):
                    continue
                default, kind = repr(self.default(f)), "int" if f.kind == "int64_t" else "float"
                if f.kind in enums:
                    prefix = f"LOGITLESS_{f.kind.removeprefix(PREFIX).upper()}_"
                    named = {v: c.removeprefix(prefix).lower() for c, v in enums[f.kind].items()}
                    default, kind = f'"{named[self.default(f)]}"', "str"
                about = re.sub(r"^default \S+?(; |: |$)", "", f.text)
                yield f"    {f.name}: {kind} = {default}" + (f"  # {about}" if about else "")
        yield "    # Bytes; 0: the library's default; below 0 a hint of so many, which the least plan may exceed."
        yield "    memory_budget: int = 0"
        yield "    expected_ignored: float = 0.0  # in [0, 1]: share of the tokens"
        yield ""

    def terms(self):
        fields = self.header.structs[TERMS][1:]
        yield from ("", "class LossTermArguments(TypedDict, total=False):")
        yield from ('    """The terms of the loss as keyword arguments."""', "")
        yield from (f"    {f.name}: float  # {f.text}" for f in fields)
        yield from ("", "", "# Range, default and text of each term of the loss.", "LOSS_TERMS = {")
        for f in fields:
            least, most = (f'float("{b}")' if b in (float("inf"), float("-inf")) else repr(b) for b in self.bounds(f))
            yield f'    "{f.name}": Term('
            yield f"        {self.default(f)!r}, {least}, {most},"
            yield f"        {json.dumps(f.text)},"
            yield "    ),"
        yield from ("}", "")

    def shapes(self):
        """Returns the shape of each weight of the loss by its name, as the header's comments give it."""
        struct, text = WEIGHTS
        found = ((f.name, text.match(f.text)) for f in self.header.structs[struct])
        return {name: match.group(1) for name, match in found if match}

    def weights(self):
        yield from ("", "class LossWeights(NamedTuple):")
        yield from ('    """The optional weights of the loss, or values of them. They have no gradients."""', "")
        yield from (f"    {name}: Any = None  # {shape}" for name, shape in self.shapes().items())
        yield from ("", "", "# Shape of each weight of the loss: of vocabulary entries, tokens or targets.", "LOSS_WEIGHTS = {")
        yield from (f'    "{name}": "{shape}",' for name, shape in self.shapes().items())
        yield from ("}", "")

    def in_order(self):
        """Returns the names of structs, each after those that it points to."""
        found = []

        def add(name):
            if name in found:
                return
            for f in self.header.structs[name]:
                pointed = f.kind.replace("*", "").strip()
                if pointed in self.header.structs and pointed != name:
                    add(pointed)
            found.append(name)

        for name in self.header.structs:
            add(name)
        return found

    def functions(self):
        yield from ("", "# (type of the result, types of the arguments) by name.")
        yield "FUNCTIONS: dict[str, tuple[Any, list[Any]]] = {"
        for name, (kind, arguments) in self.header.functions.items():
            types = ", ".join(self.ctype(a.kind, f"{name}: {a.name}") for a in arguments)
            entry = f'    "{name}": ({self.ctype(kind, name)}, [{types}]),'
            yield from textwrap.wrap(entry, WIDTH, subsequent_indent=" " * 8)
        yield "}"

    def module(self):
        *names, last = (h.name for h in HEADERS)
        lines = [
            f'"""The C ABI as ctypes: the declarations of {", ".join(names)} and {last}.',
            "",
            'tools/python_c_api.py writes this file from those headers, which describe the fields. A struct has in',
            '`defaults` those that are not 0."""',
            "",
            "from __future__ import annotations",
            "",
            "from ctypes import CFUNCTYPE, POINTER, Structure, c_char_p, c_double, c_float, c_int32, c_int64, c_size_t",
            "from ctypes import c_uint64, c_void_p",
            "from typing import Any, ClassVar, NamedTuple, TypedDict",
            "",
            *(f"{name} = {value}" for name, value in self.header.constants.items()),
            "",
            *self.enums(),
        ]
        for name, (result, kinds) in self.header.callbacks.items():
            types = ", ".join(self.ctype(k, name) for k in (result, *kinds))
            lines += [f"{class_name(name)} = CFUNCTYPE({types})", ""]
        lines += ["", "class Term(NamedTuple):", "    default: float", "    least: float  # the range, ends included"]
        lines += ["    most: float", "    text: str", ""]
        for name in self.in_order():
            lines += self.struct(name, self.header.structs[name])
        for name in VALUES:
            lines += self.values(name, self.header.structs[name])
        lines += [*self.terms(), *self.weights()]
        lines += ["", "# Structs by their C names.", "STRUCTS = {"]
        lines += [f'    "{name}": {class_name(name)},' for name in self.header.structs]
        lines += ["}", "", *self.functions()]
        return re.sub(r"\n{4,}", "\n\n\n", "\n".join(lines)) + "\n"

    def stub(self, text):
        lines = [f"    {f.name}: float = {self.default(f)!r},  # {f.text}" for f in self.header.structs[TERMS][1:]]
        lines += [f"    {name}: Optional[Tensor] = None,  # {shape}" for name, shape in self.shapes().items()]
        found = re.compile(f"^{re.escape(BEGIN)}\n.*?^{re.escape(END)}$", re.DOTALL | re.MULTILINE)
        if not found.search(text):
            raise HeaderError(f"a stub has no line '{BEGIN.strip()}'")
        return found.sub(lambda _: "\n".join([BEGIN, *lines, END]), text)


def outputs(root):
    """Path -> text of every file that is written."""
    writer = Writer(parse(*((root / header).read_text() for header in HEADERS)))
    return {MODULE: writer.module(), **{path: writer.stub((root / path).read_text()) for path in STUBS}}


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--check", action="store_true", help="write nothing, fail if a file is not up to date")
    parser.add_argument("--root", type=Path, default=ROOT)
    arguments = parser.parse_args()
    stale = 0
    for path, text in outputs(arguments.root).items():
        file = arguments.root / path
        if file.exists() and file.read_text() == text:
            continue
        if arguments.check:
            print(f"{path}: is not what the headers say; tools/python_c_api.py writes it")
            stale += 1
        else:
            file.write_text(text)
            print(f"wrote {path}")
    return stale > 0


if __name__ == "__main__":
    sys.exit(main())
