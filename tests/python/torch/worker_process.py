"""The processes of test_distributed.py."""

import importlib
import os


def work(name: str, output: str, *arguments) -> None:
    """Runs main(*arguments) of the module `name`; its output goes to the file `output`."""
    with open(output, "wb") as file:
        for stream in (1, 2):
            os.dup2(file.fileno(), stream)
    importlib.import_module(name).main(*arguments)
