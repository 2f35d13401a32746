"""The names that stand in a function's code."""

from __future__ import annotations

import dis
import types
from dataclasses import dataclass


@dataclass(frozen=True)
class Names:
    """The names in a function's code."""

    all: set[str]  # with string constants, which may be names
    variables: set[str]  # globals that it reads
    stored: frozenset[str]  # globals that it sets
    # Modules that it imports when it runs: levels of a relative import, name. "from a import b" may import a.b.
    imports: list[tuple[int, str]]


def names_of(code: types.CodeType) -> Names:
    """Returns the names in a code and in those nested in it."""
    names, variables, stored, imports, work = set(), set(), set(), [], [code]
    while work:
        code = work.pop()
        names.update(code.co_names)
        level, parts = 0, ()
        for instruction in dis.get_instructions(code):
            if instruction.opname in ("LOAD_GLOBAL", "LOAD_NAME"):
                variables.add(instruction.argval)
            elif instruction.opname == "STORE_GLOBAL":
                stored.add(instruction.argval)
            elif instruction.opname == "IMPORT_NAME":
                module = instruction.argval
                imports += [(level, module), *((level, f"{module}.{part}".lstrip(".")) for part in parts or ())]
            if isinstance(instruction.argval, int):  # the level stands two instructions before the import
                level = instruction.argval
            if "LOAD" in instruction.opname:  # the names from a module stand right before it
                parts = instruction.argval if isinstance(instruction.argval, tuple) else ()
        for constant in code.co_consts:
            if isinstance(constant, str):
                names.add(constant)
            elif isinstance(constant, types.CodeType):  # a comprehension or a nested function
                work.append(constant)
    return Names(names, variables, frozenset(stored), imports)
