"""Draws curves and marks over one axis, as SVG in the style of docs/pictures."""

import math
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tools/pictures"))

from svg import BLUE, FAINT, GREEN, GREY, INK, LINE, ORANGE, Picture  # noqa: E402

COLOURS = {"dense": INK, "backward": BLUE, "both": ORANGE, "bf16": GREEN}
LEFT, TOP, WIDTH, HEIGHT = 80, 78, 700, 280


def ticks(low, high, count=6):
    """Returns round numbers from low to high."""
    raw = (high - low) / count or 1.0
    unit = 10.0 ** math.floor(math.log10(raw))
    step = min((m * unit for m in (1, 2, 5, 10) if m * unit >= raw * 0.999), default=raw)
    first = math.ceil(low / step - 1e-9)
    return [step * i for i in range(first, int(math.floor(high / step + 1e-9)) + 1)]


def log_ticks(low, high):
    """Returns logarithms of 1, 2 and 5 times powers of ten."""
    powers = range(math.floor(low), math.ceil(high) + 1)
    return [y for power in powers for y in (power, power + math.log10(2), power + math.log10(5)) if low <= y <= high]


class Chart:
    """Collects curves and horizontal lines.

    curves: {"label", "colour", "points": [(x, y)], "dots": only dots, "width"}; lines: (y, label). log: logarithmic
    y axis, all y above 0.
    """

    def __init__(self, title, note, x_name, y_name, log=False):
        self.log, self.title, self.note, self.x_name, self.y_name = log, title, note, x_name, y_name
        self.curves, self.lines = [], []

    def add(self, label, colour, points, dots=False, width=1.8):
        if self.log:
            points = [(x, math.log10(y)) for x, y in points]
        points = [(x, y) for x, y in points if math.isfinite(x) and math.isfinite(y)]
        if points:
            self.curves.append({"label": label, "colour": colour, "points": points, "dots": dots, "width": width})

    def write(self, path, low=None, high=None):
        """Writes the picture, and returns whether there is one. Points outside [low, high] are drawn at the edge."""
        if not self.curves:
            return False
        xs = [x for c in self.curves for x, _ in c["points"]]
        ys = [y for c in self.curves for _, y in c["points"]] + [y for y, _ in self.lines]
        low, high = min(ys) if low is None else low, max(ys) if high is None else high
        space = 0.06 * ((high - low) or abs(high) or 1.0)
        low, high = low - space if low != 0.0 else 0.0, high + space
        first, last = min(xs), max(xs)
        last = last if last > first else first + 1.0
        p = Picture(LEFT + WIDTH + 180, TOP + HEIGHT + 60, self.title)
        p.text(LEFT, 28, self.title, 16, bold=True)
        p.text(LEFT, 48, self.note, 12, FAINT)

        def at(x, y):
            y = min(max(y, low), high)
            return LEFT + WIDTH * (x - first) / (last - first), TOP + HEIGHT * (high - y) / (high - low)

        for y in log_ticks(low, high) if self.log else ticks(low, high):
            p.line(LEFT, at(first, y)[1], LEFT + WIDTH, at(first, y)[1], GREY)
            p.text(LEFT - 8, at(first, y)[1] + 4, f"{10**y if self.log else y:.6g}", 12, FAINT, "end")
        for x in ticks(first, last, 8):
            p.text(at(x, low)[0], TOP + HEIGHT + 18, f"{x:.6g}", 12, FAINT, "middle")
        for y, label in self.lines:
            p.line(LEFT, at(first, y)[1], LEFT + WIDTH, at(first, y)[1], LINE, dash="4 3")
            p.text(LEFT + WIDTH - 4, at(first, y)[1] - 5, label, 11, FAINT, "end")
        p.line(LEFT, TOP + HEIGHT, LEFT + WIDTH, TOP + HEIGHT, LINE)
        p.text(LEFT + WIDTH / 2, TOP + HEIGHT + 40, self.x_name, 12, FAINT, "middle")
        p.text(22, TOP + HEIGHT / 2, self.y_name, 12, FAINT, "middle", turn=-90)
        for i, curve in enumerate(self.curves):
            places = [at(x, y) for x, y in curve["points"]]
            if curve["dots"]:
                p.cells([(round(x - 2, 1), round(y - 2, 1), 4, 4) for x, y in places], curve["colour"])
            else:
                p.path(places, stroke=curve["colour"], width=curve["width"])
            y = TOP + 12 + 20 * i
            p.rect(LEFT + WIDTH + 18, y - 8, 14, 4 if not curve["dots"] else 6, curve["colour"])
            p.text(LEFT + WIDTH + 40, y, curve["label"], 12)
        p.write(Path(path))
        return True
