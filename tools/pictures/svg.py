"""A minimal SVG writer for the pictures of the documents: rectangles, lines and text, on white or, in dark mode, black."""

import re
from xml.sax.saxutils import escape

INK, FAINT, LINE = "#24292f", "#57606a", "#8c959f"
BLUE, PALE_BLUE = "#0969da", "#ddf4ff"
ORANGE, PALE_ORANGE = "#bc4c00", "#fff1e5"
GREEN, PALE_GREEN = "#1a7f37", "#dafbe1"
GREY = "#eaeef2"

# Each colour of the pictures, and its colour in dark mode.
DARK = {
    "#ffffff": "#0d1117", INK: "#e6edf3", FAINT: "#9198a1", LINE: "#656c76", GREY: "#2a313c",
    BLUE: "#4493f8", PALE_BLUE: "#0c2d4d", ORANGE: "#f0883e", PALE_ORANGE: "#43260c", GREEN: "#3fb950", PALE_GREEN: "#0f3a1d",
    "#d9e9ff": "#102e54", "#ffe9d6": "#4a2a10", "#e6dcf7": "#33245c", "#ffd8d3": "#5c1a1d", "#a40e26": "#ff9c99", "#cf222e": "#f85149",
}


def dark_style(svg):
    """Returns the style element that gives the fills and strokes of a picture their dark colours."""
    used = dict.fromkeys(re.findall(r'(fill|stroke)="(#\w+)"', svg))
    rules = "".join(f'[{kind}="{colour}"]{{{kind}:{DARK[colour]}}}' for kind, colour in used)
    return f"<style>@media (prefers-color-scheme:dark){{{rules}}}</style>\n"


class Picture:
    """An SVG picture. Coordinates are pixels, y downwards; `about` is its text alternative."""

    def __init__(self, width, height, about):
        self.width, self.height, self.about = width, height, about
        self.parts = []

    def rect(self, x, y, width, height, fill="none", stroke="none", dash="", radius=0):
        more = f' stroke-dasharray="{dash}"' if dash else ""
        more += f' rx="{radius}"' if radius else ""
        self.parts.append(f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" fill="{fill}" '
                          f'stroke="{stroke}"{more}/>')

    def line(self, x1, y1, x2, y2, stroke=LINE, width=1.0, dash="", arrow=False):
        more = f' stroke-dasharray="{dash}"' if dash else ""
        more += ' marker-end="url(#arrow)"' if arrow else ""
        self.parts.append(f'<line x1="{x1:g}" y1="{y1:g}" x2="{x2:g}" y2="{y2:g}" stroke="{stroke}" '
                          f'stroke-width="{width:g}"{more}/>')

    def path(self, points, fill="none", stroke="none", width=1.5):
        steps = " ".join(f"{'L' if i else 'M'}{x:.1f} {y:.1f}" for i, (x, y) in enumerate(points))
        self.parts.append(f'<path d="{steps}" fill="{fill}" stroke="{stroke}" stroke-width="{width:g}"/>')

    def cells(self, rects, fill):
        """Draws many rectangles of one colour, (x, y, width, height) each."""
        d = "".join(f"M{x:g} {y:g}h{w:g}v{h:g}h-{w:g}z" for x, y, w, h in rects)
        self.parts.append(f'<path d="{d}" fill="{fill}"/>')

    def text(self, x, y, text, size=13, fill=INK, anchor="start", bold=False, turn=0):
        more = ' font-weight="600"' if bold else ""
        more += f' transform="rotate({turn} {x:g} {y:g})"' if turn else ""
        self.parts.append(f'<text x="{x:g}" y="{y:g}" font-size="{size}" fill="{fill}" text-anchor="{anchor}"{more}>'
                          f"{escape(text)}</text>")

    def lines(self, x, y, rows, size=13, fill=INK, anchor="start", step=None):
        for i, row in enumerate(rows):
            self.text(x, y + i * (step or size * 1.35), row, size, fill, anchor)

    def box(self, x, y, width, height, rows, fill=GREY, stroke=LINE, size=13):
        """Draws a rounded box with lines of text in its middle, the first in bold."""
        self.rect(x, y, width, height, fill, stroke, radius=6)
        top = y + height / 2 - (len(rows) - 1) * size * 0.675 + size * 0.35
        for i, row in enumerate(rows):
            self.text(x + width / 2, top + i * size * 1.35, row, size if i == 0 else size - 1,
                      INK if i == 0 else FAINT, "middle", bold=i == 0)

    def write(self, path):
        body = (f'<rect width="{self.width}" height="{self.height}" fill="#ffffff"/>\n' + "\n".join(self.parts) + "\n</svg>\n")
        marker = ('<defs><marker id="arrow" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" '
                  f'orient="auto"><path d="M0 0L8 4L0 8z" fill="{FAINT}"/></marker></defs>\n')
        head = (f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {self.width} {self.height}" width="{self.width}" '
                f'height="{self.height}" role="img" font-family="Helvetica, Arial, sans-serif">\n'
                f"<title>{escape(self.about)}</title>\n")
        path.write_text(head + dark_style(marker + body) + marker + body, encoding="utf-8")
