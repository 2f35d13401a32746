#!/usr/bin/env python3
"""Draws the pictures of the documents: docs/pictures/NAME.svg.

    tools/pictures.py [NAME ...] [--head real_head_late.safetensors] [--logitless build/src/cli/logitless]

- head: how the plans iterate over the logits
- memory: that of a GPT-2 step, from `logitless compile`
- far_field: the selected tiles of a trained model's head (--head; numpy)
- layers: which layer may include which
- ranks: a sharded vocabulary

Without a name it draws all that this machine can.
"""

import argparse
import importlib
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent
NAMES = {"head": "head", "memory": "memory", "far_field": "selected_tiles", "layers": "layers", "ranks": "ranks"}  # to modules


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help=", ".join(NAMES))
    parser.add_argument("--head")
    parser.add_argument("--logitless", default=str(ROOT.parent / "build/src/cli/logitless"))
    args = parser.parse_args()
    unknown = [name for name in args.names if name not in NAMES]
    if unknown:
        parser.error(f"no picture is called {unknown[0]}; expected one of {', '.join(NAMES)}")
    sys.path.insert(0, str(ROOT / "pictures"))
    for name in args.names or NAMES:
        path = ROOT.parent / "docs/pictures" / f"{name}.svg"
        why_not = importlib.import_module(NAMES[name]).draw(path, head=args.head, logitless=args.logitless)
        print(f"{name}: {why_not or path.relative_to(ROOT.parent)}")
        if why_not and args.names:
            sys.exit(1)


if __name__ == "__main__":
    main()
