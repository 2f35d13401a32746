"""Live values in the arena of a GPT-2 step, by instruction, without loops and with the head engine and loops."""

import json
import subprocess

from svg import BLUE, FAINT, GREY, INK, LINE, ORANGE, Picture

ARGUMENTS = ["compile", "--model", "gpt2", "--batch", "4", "--length", "1024"]
LEFT, TOP, WIDTH, HEIGHT = 80, 66, 840, 300


def curve(timeline, top):
    values = [step["bytes"] / 2**20 for step in timeline]
    points = [(LEFT, TOP + HEIGHT)]
    for i, v in enumerate(values):
        for x in (i, i + 1):
            points.append((LEFT + WIDTH * x / len(values), TOP + HEIGHT * (1 - v / top)))
    return points + [(LEFT + WIDTH, TOP + HEIGHT)], max(values)


def draw(path, logitless="build/src/cli/logitless", **_):
    made = subprocess.run([logitless, *ARGUMENTS, "--json"], capture_output=True, text=True, check=True).stdout
    program = json.loads(made)
    p = Picture(960, 434, "Memory over a training step of GPT-2 124M, with and without the head engine and loops")
    p.text(LEFT, 28, "GPT-2 124M, 4 x 1024 tokens: memory of a step beyond parameters and gradients", 16, bold=True)
    p.text(LEFT, 48, "logitless " + " ".join(ARGUMENTS), 12, FAINT)
    top = 2000.0
    for mib in range(0, 2001, 500):
        y = TOP + HEIGHT * (1 - mib / top)
        p.line(LEFT, y, LEFT + WIDTH, y, GREY)
        p.text(LEFT - 8, y + 4, str(mib), 12, FAINT, "end")
    p.text(26, TOP + HEIGHT / 2, "MiB", 12, FAINT, "middle", turn=-90)
    for name, fill, stroke in (("before", "#fff1e5", ORANGE), ("after", "#ddf4ff", BLUE)):
        points, peak = curve(program[name]["timeline"], top)
        p.path(points, fill, stroke)
        y = TOP + HEIGHT * (1 - peak / top)
        label = f"as written: {peak:.0f} MiB" if name == "before" else f"compiled: {peak:.0f} MiB"
        p.text(LEFT + WIDTH * (0.60 if name == "before" else 0.78), y + (14 if name == "before" else -8), label, 13, stroke,
               bold=True)
    p.line(LEFT, TOP + HEIGHT, LEFT + WIDTH, TOP + HEIGHT, LINE)
    p.text(LEFT, TOP + HEIGHT + 20, "first instruction of the forward", 12, FAINT)
    p.text(LEFT + WIDTH, TOP + HEIGHT + 20, "last of the backward", 12, FAINT, "end")
    p.text(LEFT + WIDTH / 2, TOP + HEIGHT + 20, "the head", 12, FAINT, "middle")
    p.text(LEFT, TOP + HEIGHT + 48, "The peak as written is the head: its logits and their gradients. The head engine makes "
           "both a chunk at a time.", 13, INK)
    p.write(path)
