#!/usr/bin/env python3
"""Compares ways to group tokens into blocks of the far field: selected tiles and errors, by the order of tokens.

    python3 bench/experiments/far_blocks.py --logitless build/src/cli/logitless real_head_late.safetensors [--block 256] [--tiles 2]

Masses and errors are computed in float32, without a kernel's roundings. Gradients are made from the tiles selected for
a block of --block tokens, --tiles at a time. The masses of skipped tiles are put at their centroids. The errors are
against all tiles. The vocabulary order is made from the first --rows tokens. The GPU uses the order "kept tiles"
(sort_tokens in src/kernels/device/far.h).
"""

import argparse
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from far_field import load, rotated, save  # noqa: E402

TILE = 128  # vocabulary entries
CLASSES, PLACES = 64, 1024  # resolution of the last selected tile, and of the mean position


def log_sums(hidden, weight):
    """Returns lse of each token; computes 512 tokens at a time."""
    lse = np.empty(len(hidden), np.float32)
    for i in range(0, len(hidden), 512):
        z = hidden[i : i + 512] @ weight.T
        top = z.max(1)
        lse[i : i + 512] = top + np.log(np.exp(z - top[:, None]).sum(1))
    return lse


def token_orders(wanted, target_position):
    """Returns the compared orders of tokens. wanted [tokens, tiles]: the tiles that each token selects by itself."""
    tiles = wanted.shape[1]
    breadth = wanted.sum(1)
    place = (wanted * np.arange(tiles)).sum(1) / np.maximum(breadth, 1)
    last = np.where(wanted.any(1), tiles - 1 - np.argmax(wanted[:, ::-1], 1), tiles)  # without a tile: after all others
    return {
        "as they come": np.arange(len(wanted)),
        "target": np.argsort(target_position, kind="stable"),
        "breadth": np.argsort(breadth, kind="stable"),
        "breadth, target": np.lexsort((target_position, np.floor(2 * np.log2(np.maximum(breadth, 1))))),
        "kept tiles": np.lexsort((place * PLACES // tiles, last * CLASSES // tiles)),
    }


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("head")
    parser.add_argument("--logitless", default="build/src/cli/logitless")
    parser.add_argument("--rows", type=int, default=1536)
    parser.add_argument("--block", type=int, default=256)
    parser.add_argument("--tiles", type=int, default=2)
    parser.add_argument("--tau", type=float, nargs="+", default=[0.003, 0.002, 0.0015, 0.001])
    args = parser.parse_args()
    tensors = rotated(load(args.head), 0)
    with tempfile.TemporaryDirectory() as folder:
        head, path = f"{folder}/head.safetensors", f"{folder}/order.safetensors"
        save(head, tensors)
        names = [text for name in ("hidden", "weight") for text in (f"--{name}", f"{head}:{name}")]
        subprocess.run([args.logitless, "order", *names, "--rows", str(args.rows), "--out", path], check=True)
        order = load(path)
    vocab_ids, average = order["vocab_ids"], order["average"]
    position = np.empty_like(vocab_ids)
    position[vocab_ids] = np.arange(len(vocab_ids))
    hidden, target = tensors["hidden"], position[tensors["targets"]]
    weight = tensors["weight"][vocab_ids]
    tokens, tiles = len(hidden), len(vocab_ids) // TILE
    share = average[vocab_ids].reshape(tiles, TILE) + 1e-30
    share /= share.sum(1, keepdims=True)
    lse = log_sums(hidden, weight)
    mass = np.empty((tokens, tiles), np.float32)
    for tile in range(tiles):
        mass[:, tile] = np.exp(hidden @ weight[tile * TILE : (tile + 1) * TILE].T - lse[:, None]).sum(1)

    cases = []
    for tau in args.tau:
        wanted = mass > tau
        for name, rows in token_orders(wanted, target).items():
            if tau != args.tau[0] and name != "kept tiles":
                continue
            blocks = wanted[rows].reshape(tokens // args.block, args.block, tiles // args.tiles, args.tiles).any((1, 3))
            kept = np.empty_like(wanted)
            kept[rows] = np.repeat(np.repeat(blocks, args.block, 0), args.tiles, 1)
            cases.append({"name": name, "tau": tau, "part": blocks.mean(), "kept": kept, "dw": 0.0, "dx": 0.0 * hidden})
    d_hidden, d_weight_squared = 0.0 * hidden, 0.0
    for tile in range(tiles):
        w = weight[tile * TILE : (tile + 1) * TILE]
        p = np.exp(hidden @ w.T - lse[:, None])
        own = np.flatnonzero(target // TILE == tile)
        rest = p.copy()
        rest[own, target[own] % TILE] = 0.0  # a target's coefficient is exact
        p[own, target[own] % TILE] -= 1.0
        d_hidden += p @ w
        d_weight_squared += np.square(p.T @ hidden).sum()
        off = rest - rest.sum(1, keepdims=True) * share[tile]
        for case in cases:
            far = off * ~case["kept"][:, tile : tile + 1]
            case["dx"] += far @ w
            case["dw"] += np.square(far.T @ hidden).sum()
    for case in cases:
        dx = np.linalg.norm(case["dx"]) / np.linalg.norm(d_hidden)
        dw = np.sqrt(case["dw"] / d_weight_squared)
        print(f"{case['name']:16s} tau {case['tau']:.4f}  kept {case['part']:.4f}  d_hidden {dx:.5f}  d_weight {dw:.5f}")


if __name__ == "__main__":
    main()
