#!/usr/bin/env python3
"""Changes one line of a source file at a time and lists the changes that no test noticed.

    tools/mutate.py --test COMMAND [--build COMMAND] [--lines A-B] [--sample N] [--seed S] [--timeout T] FILE...

Run it by hand, in a checkout that nobody else edits; it is not part of CI. Each mutant is one edit of one line of
Python or C++ code: a comparison, a logical or arithmetic operator, a number, a boolean, a negation, or a statement
left out. COMMAND runs in a shell in the current folder: for --build, a non-zero status says that the mutant does not
compile; for --test, that a test noticed it. The unchanged files must pass first. Files with uncommitted changes are
refused, and every file is written back, also after an interrupt.

Prints a line a mutant (FILE:LINE, what became of it, the edit), and last the survivors. The exit status is 0 when
every mutant was noticed, 1 when some survived, 2 when it could not run.

    tools/mutate.py python/logitless/torch/call.py --sample 20 \\
      --test "PYTHONPATH=python build/python/bin/python -m pytest -x -q tests/python/torch/test_calls.py"
"""

import argparse
import ast
import io
import os
import random
import re
import signal
import subprocess
import sys
import tokenize
from dataclasses import dataclass
from pathlib import Path

# (regular expression, replacement): each match in a line of code is one mutant.
EDITS = {
    "both": (
        (r"(?<![<>=!+\-*/&|^%])==", "!="), (r"!=", "=="), (r"<=", "<"), (r">=", ">"),
        (r"(?<= )<(?= )", "<="), (r"(?<= )>(?= )", ">="),
        (r"(?<= )\+(?= )", "-"), (r"(?<= )-(?= )", "+"), (r"(?<= )\*(?= )", "/"),
        (r"(?<![\w.])0(?![\w.])", "1"), (r"(?<![\w.])1(?![\w.])", "2"),
    ),
    ".py": (
        (r"\band\b", "or"), (r"\bor\b", "and"), (r"\bnot (?!in\b)", ""), (r"\bTrue\b", "False"), (r"\bFalse\b", "True"),
        (r"\bis not\b", "is"), (r"\bnot in\b", "in"), (r"(?<=\breturn )\S.*", "None"), (r"\.clone\(\)", ""),
    ),
    "C++": (
        (r"&&", "||"), (r"\|\|", "&&"), (r"(?<![\w=])!(?=[\w(])", ""), (r"\btrue\b", "false"), (r"\bfalse\b", "true"),
        (r"\bstd::min\b", "std::max"), (r"\bstd::max\b", "std::min"), (r"\bcontinue;", "break;"),
    ),
}


@dataclass(frozen=True)
class Mutant:
    path: Path
    line: int  # from 1
    before: str
    after: str

    def __str__(self):
        return f"{self.path}:{self.line}: {self.before.strip()}  ->  {self.after.strip() or '(left out)'}"


def python_code(text):
    """Returns {line: [column is code]}; comments and strings are not code."""
    code = {n: [True] * len(line) for n, line in enumerate(text.splitlines(), 1)}
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type in (tokenize.COMMENT, tokenize.STRING):
            (first, begin), (last, end) = token.start, token.end
            for n in range(first, last + 1):
                line = code.get(n, [])
                for column in range(begin if n == first else 0, end if n == last else len(line)):
                    line[column] = False
    return code


def cpp_code(text):
    """python_code for C++: comments, strings and the preprocessor are not code."""
    code = {}
    blank = re.sub(r'//[^\n]*|/\*.*?\*/|"(?:\\.|[^"\\\n])*"|\'(?:\\.|[^\'\\\n])\'|^[ \t]*#[^\n]*',
                   lambda m: re.sub(r"[^\n]", "\0", m.group()), text, flags=re.DOTALL | re.MULTILINE)
    for n, line in enumerate(blank.splitlines(), 1):
        code[n] = [character != "\0" for character in line]
    return code


def python_statements(text):
    """Returns lines that are one whole statement without which the file still compiles: calls and assignments in
    functions."""
    found = set()
    for function in ast.walk(ast.parse(text)):
        if not isinstance(function, (ast.FunctionDef, ast.AsyncFunctionDef)):
            continue
        for node in ast.walk(function):
            if isinstance(node, (ast.Expr, ast.Assign, ast.AugAssign, ast.Raise, ast.Delete)):
                if node.lineno == node.end_lineno and not (isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)):
                    found.add(node.lineno)
    return found


def mutants_of(path, text, lines=None):
    """Returns all mutants of a file, in the order of its lines. lines: (first, last), inclusive."""
    is_python = path.suffix == ".py"
    code = python_code(text) if is_python else cpp_code(text)
    edits = EDITS["both"] + EDITS[".py" if is_python else "C++"]
    whole = python_statements(text) if is_python else set()
    found = []
    for n, line in enumerate(text.splitlines(), 1):
        if lines and not lines[0] <= n <= lines[1]:
            continue
        after = []
        for expression, replacement in edits:
            for match in re.finditer(expression, line):
                if all(code[n][match.start():match.end()]):
                    after.append(line[:match.start()] + replacement + line[match.end():])
        if is_python and n in whole:
            after.append(line[:len(line) - len(line.lstrip())] + "pass")
        elif not is_python and re.fullmatch(r"\s+[\w.\->:\[\]]+(\(.*\)| [-+*/|&]?= .*);", line) and all(code[n][-1:]):
            after.append("")
        found += [Mutant(path, n, line, changed) for changed in dict.fromkeys(after) if changed != line]
    return [m for m in found if not is_python or compiles(apply(text, m))]


def apply(text, mutant):
    lines = text.splitlines(keepends=True)
    end = lines[mutant.line - 1][len(lines[mutant.line - 1].rstrip("\r\n")):]
    lines[mutant.line - 1] = mutant.after + end
    return "".join(lines)


def compiles(text):
    try:
        compile(text, "mutant", "exec")
    except SyntaxError:
        return False
    return True


def run(command, timeout):
    """Returns the command's exit status, None when it took longer than timeout seconds. Its processes are ended."""
    # Python compares its cached bytecode with a file by size and whole seconds, which may be equal for two mutants.
    environment = {**os.environ, "PYTHONDONTWRITEBYTECODE": "1"}
    process = subprocess.Popen(command, shell=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
                               start_new_session=True, env=environment)
    try:
        return process.wait(timeout)
    except subprocess.TimeoutExpired:
        return None
    finally:
        try:
            os.killpg(process.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass
        process.wait()


def verdict(arguments):
    """Returns the fate of the mutant that the files hold."""
    if arguments.build and run(arguments.build, arguments.timeout) != 0:
        return "does not compile"
    status = run(arguments.test, arguments.timeout)
    return "survived" if status == 0 else "took too long" if status is None else "noticed"


def parse_arguments(argv):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="+", type=Path, metavar="FILE")
    parser.add_argument("--test", required=True, help="shell command whose non-zero status says that a mutant was noticed")
    parser.add_argument("--build", help="shell command before each test, for files that are compiled")
    parser.add_argument("--lines", help="A-B: only these lines of each file")
    parser.add_argument("--sample", type=int, help="only this many mutants, drawn at random")
    parser.add_argument("--seed", type=int, default=0, help="of the drawing")
    parser.add_argument("--timeout", type=float, default=600, help="seconds for one command")
    return parser.parse_args(argv)


def main(argv):
    arguments = parse_arguments(argv)
    if arguments.lines and not re.fullmatch(r"\d+-\d+", arguments.lines):
        print(f"mutate: --lines is '{arguments.lines}'; expected A-B, as 10-20", file=sys.stderr)
        return 2
    lines = tuple(map(int, arguments.lines.split("-"))) if arguments.lines else None
    changed = subprocess.run(["git", "status", "--porcelain", "--", *map(str, arguments.files)], stdout=subprocess.PIPE,
                             text=True)
    if changed.returncode != 0 or changed.stdout:
        print(f"mutate: files with uncommitted changes, or outside of a checkout:\n{changed.stdout}", file=sys.stderr)
        return 2
    texts = {path: path.read_text() for path in arguments.files}
    mutants = [m for path, text in texts.items() for m in mutants_of(path, text, lines)]
    if arguments.sample is not None and arguments.sample < len(mutants):
        mutants = sorted(random.Random(arguments.seed).sample(mutants, arguments.sample), key=lambda m: (str(m.path), m.line))
    if (first := verdict(arguments)) != "survived":
        print(f"mutate: the unchanged files: {first.replace('noticed', 'the test command fails')}", file=sys.stderr)
        return 2
    survivors = []
    try:
        for mutant in mutants:
            mutant.path.write_text(apply(texts[mutant.path], mutant))
            try:
                found = verdict(arguments)
            finally:
                mutant.path.write_text(texts[mutant.path])
            print(f"{found}: {mutant}", flush=True)
            survivors += [mutant] * (found == "survived")
    finally:
        if arguments.build:
            run(arguments.build, arguments.timeout)
    print(f"\n{len(mutants)} mutants, {len(survivors)} survived")
    for mutant in survivors:
        print(mutant)
    return 1 if survivors else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
