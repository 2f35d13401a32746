#!/usr/bin/env python3
"""Measures what a chunked function pays in each call to look at the values it reads besides its arguments:
    OMP_NUM_THREADS=1 python bench/autochunk_guards.py [--reads 200] [--repeat 9]
The functions add up globals, attributes of a module, closed-over variables or items of a dict, and one adds up as many
literals. It prints the processor time of a call in microseconds, and the difference divided by the number of reads."""

import argparse
import statistics
import time

import torch

from logitless.torch import autochunk


class Config(torch.nn.Module):
    pass


def functions(count):
    """name -> a function of a tensor that reads as many values."""
    names = [f"value{i}" for i in range(count)]
    module = Config()
    for i, name in enumerate(names):
        setattr(module, name, float(i))
    variables = {name: float(i) for i, name in enumerate(names)}
    sources = {
        "literals": ("", " + ".join(str(float(i)) for i in range(count))),
        "globals": ("", " + ".join(names)),
        "attributes": ("", " + ".join(f"module.{name}" for name in names)),
        "closed-over variables": ("; ".join(f"{name} = {i}.0" for i, name in enumerate(names)), " + ".join(names)),
        "items of a dict": ("", " + ".join(f"items[{name!r}]" for name in names)),
    }
    for name, (before, total) in sources.items():
        space = {"module": module, "items": variables, **(variables if name == "globals" else {})}
        exec(f"def outer():\n    {before or 'pass'}\n    def f(x):\n        return (x * ({total})).sum()\n    return f", space)
        yield name, space["outer"]()


def microseconds(function, x, calls=200):
    start = time.process_time()
    for _ in range(calls):
        function(x)
    return (time.process_time() - start) / calls * 1e6


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--reads", type=int, default=200)
    parser.add_argument("--repeat", type=int, default=9)
    options = parser.parse_args()
    x = torch.rand(8)
    made = {name: autochunk(function) for name, function in functions(options.reads)}
    for function in made.values():
        function(x)
    taken = {name: [] for name in made}
    for _ in range(options.repeat):  # by turns
        for name, function in made.items():
            taken[name].append(microseconds(function, x))
    least = statistics.median(taken["literals"])
    for name, times in taken.items():
        median = statistics.median(times)
        each = f", {(median - least) / options.reads:.2f} for each of {options.reads}" if name != "literals" else ""
        print(f"{name}: {median:.1f} us a call ({min(times):.1f} to {max(times):.1f}){each}")


if __name__ == "__main__":
    main()
