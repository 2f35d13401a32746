"""Tiles of the vocabulary that blocks of tokens select, on the head of a trained model, and the treatment of the
others."""

import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
from svg import BLUE, FAINT, GREY, INK, LINE, ORANGE, Picture

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "bench"))

TILE, BLOCK, TAU, ROWS = 128, 128, 0.003, 1536
LEFT, TOP, WIDTH = 60, 84, 840


def selected_tiles(head, logitless):
    """Returns [blocks, tiles]: the tiles that a block of tokens, in the order of their targets, selects at TAU."""
    from far_field import load, rotated, save  # from bench/

    tensors = rotated(load(head), 0)
    with tempfile.TemporaryDirectory() as folder:
        plain = f"{folder}/head.safetensors"
        save(plain, tensors)
        names = [text for name in ("hidden", "weight") for text in (f"--{name}", f"{plain}:{name}")]
        subprocess.run([logitless, "order", *names, "--rows", str(ROWS), "--out", f"{folder}/order.safetensors"], check=True,
                       capture_output=True)
        vocab_ids = load(f"{folder}/order.safetensors")["vocab_ids"]
    position = np.empty_like(vocab_ids)
    position[vocab_ids] = np.arange(len(vocab_ids))
    hidden, weight = tensors["hidden"][ROWS:].astype(np.float32), tensors["weight"][vocab_ids].astype(np.float32)
    target = position[tensors["targets"][ROWS:]]
    rows = np.argsort(target, kind="stable")
    rows = rows[: len(rows) // BLOCK * BLOCK]
    tiles = len(vocab_ids) // TILE
    selected = np.zeros((len(rows) // BLOCK, tiles), bool)
    for b in range(len(selected)):
        z = hidden[rows[b * BLOCK:(b + 1) * BLOCK]] @ weight.T
        p = np.exp(z - z.max(1, keepdims=True))
        p /= p.sum(1, keepdims=True)
        selected[b] = (p.reshape(BLOCK, tiles, TILE).sum(2) > TAU).any(0)
    return selected


def draw(path, head=None, logitless="build/src/cli/logitless", **_):
    if head is None:
        return "wants --head FILE, hidden states, weight and targets of a trained model (safetensors)"
    selected = selected_tiles(head, logitless)
    blocks, tiles = selected.shape
    cell = 12
    height = blocks * cell
    p = Picture(960, TOP + height + 150, f"Of {tiles} tiles a block of tokens selects {100 * selected.mean():.0f} percent on average")
    p.text(LEFT, 28, f"A trained model's head: {tiles * TILE} entries in {tiles} tiles, blocks of {BLOCK} tokens", 16, bold=True)
    p.lines(LEFT, 48, [f"Blue: selected, computed exactly ({100 * selected.mean():.1f} %, tau {TAU}). Grey: skipped, a centroid with the tile's mass."],
            12, FAINT)
    p.rect(LEFT, TOP, WIDTH, height, GREY)
    step = WIDTH / tiles
    rects = []
    for b in range(blocks):
        edges = np.flatnonzero(np.diff(np.concatenate([[0], selected[b].astype(int), [0]])))
        rects += [(round(LEFT + a * step, 1), TOP + b * cell, round((e - a) * step, 1), cell - 1) for a, e in edges.reshape(-1, 2)]
    p.cells(rects, BLUE)
    p.text(LEFT - 10, TOP + height / 2, "blocks of tokens", 12, FAINT, "middle", turn=-90)
    p.text(LEFT, TOP + height + 18, "entries of high average probability", 12, FAINT)
    p.text(LEFT + WIDTH, TOP + height + 18, "rare entries", 12, FAINT, "end")
    y = TOP + height + 44
    p.rect(LEFT, y, 26, 26, BLUE)
    p.lines(LEFT + 38, y + 12, ["selected: every logit and its gradient,", "as in the dense plan"], 12, INK)
    p.rect(LEFT + 330, y, 26, 26, GREY, LINE)
    p.rect(LEFT + 341, y + 11, 4, 4, ORANGE)
    p.lines(LEFT + 368, y + 12, ["skipped: the probability of the tile, times its", "centroid, the mean of its rows"], 12, INK)
    p.text(LEFT, y + 62, "Targets are exact wherever they are. Mass is conserved: only its spread inside a skipped tile is approximated.", 13, INK)
    p.write(path)
    return None
