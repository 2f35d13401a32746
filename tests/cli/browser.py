"""Checks the HTML of a page, and measures its texts and pictures in a real browser where one is installed."""

import html.parser
import json
import re
import shutil
import subprocess
import tempfile
import unittest
from pathlib import Path

BROWSER = next((path for name in ("chromium", "chromium-browser", "google-chrome", "chrome")
                if (path := shutil.which(name))), None)

# Finds overlapping texts of a picture, texts outside it, and whether the page is wider than the window. A text's box is
# taller than its letters: two lines may touch.
MEASURE = """<script>
const found = {overlaps: [], outside: [], svgs: 0, paths: 0, titles: 0};
for (const svg of document.querySelectorAll('svg')) {
  ++found.svgs;
  found.paths += svg.querySelectorAll('path').length;
  found.titles += svg.querySelectorAll('title').length;
  const around = svg.getBoundingClientRect();
  const texts = [...svg.querySelectorAll('text')].map(t => [t.textContent, t.getBoundingClientRect()]);
  texts.forEach(([text, box], i) => {
    if (box.left < around.left || box.right > around.right || box.top < around.top || box.bottom > around.bottom)
      found.outside.push(text);
    for (const [other, b] of texts.slice(i + 1))
      if (box.left < b.right && b.left < box.right && box.top + 3 < b.bottom && b.top + 3 < box.bottom)
        found.overlaps.push([text, other]);
  });
}
// Contrast of every text with the page, as WCAG 2 defines it.
const luminance = colour => {
  const [r, g, b] = colour.match(/[\d.]+/g).slice(0, 3).map(c => c / 255)
    .map(c => c <= 0.04045 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4);
  return 0.2126 * r + 0.7152 * g + 0.0722 * b;
};
found.paper = luminance(getComputedStyle(document.body).backgroundColor);
found.contrast = Math.min(...[...document.querySelectorAll('h1, h2, p, td, th, pre, text')].map(e => {
  const ink = luminance(getComputedStyle(e)[e.tagName == 'text' ? 'fill' : 'color']);
  return (Math.max(ink, found.paper) + 0.05) / (Math.min(ink, found.paper) + 0.05);
}));
found.wide = document.documentElement.scrollWidth > window.innerWidth;
found.width = window.innerWidth;
document.body.setAttribute('data-found', JSON.stringify(found));
</script></body>"""


VOID = {"meta", "line", "rect", "circle", "path"}


class Balanced(html.parser.HTMLParser):
    """Checks that elements are closed in the order of nesting, and records what the page would fetch."""

    def __init__(self):
        super().__init__()
        self.open, self.fetched, self.wrong = [], [], []

    def handle_starttag(self, tag, attrs):
        if tag not in VOID:
            self.open.append(tag)
        self.fetched += [value for name, value in attrs if name in ("src", "href")] + ["script"] * (tag == "script")

    def handle_endtag(self, tag):
        if tag not in VOID and (not self.open or self.open.pop() != tag):
            self.wrong.append(tag)


def faults(page):
    """Returns the elements of a page's text that are not closed in order, and what it would fetch."""
    parser = Balanced()
    parser.feed(page)
    return parser.open + parser.fetched + parser.wrong


@unittest.skipUnless(BROWSER, "there is no Chromium or Chrome here")
class PageTest(unittest.TestCase):
    def assert_legible(self, page, svgs, width=1100):
        """Opens a page in light and dark, and returns the measurements in light."""
        light, dark = (self.measured(page, width, scheme) for scheme in (1, 0))
        for found in (light, dark):
            self.assertEqual(found["svgs"], svgs)
            self.assertGreaterEqual(found["paths"], svgs)
            self.assertEqual((found["overlaps"], found["outside"], found["wide"]), ([], [], False))
            self.assertGreater(found["contrast"], 4.5)
        self.assertGreater(light["paper"], 0.9)
        self.assertLess(dark["paper"], 0.1)
        return light

    def measured(self, page, width, scheme):
        with tempfile.TemporaryDirectory() as folder:
            copy = Path(folder) / "page.html"
            copy.write_text(page.read_text().replace("</body>", MEASURE))
            done = subprocess.run([BROWSER, "--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage",
                                   f"--blink-settings=preferredColorScheme={scheme}", f"--user-data-dir={folder}/profile",
                                   f"--window-size={width},900", "--dump-dom", copy.as_uri()],
                                  capture_output=True, text=True, timeout=120, check=False)
        text = re.search(r'data-found="([^"]*)"', done.stdout)
        self.assertTrue(text, done.stderr[-2000:])
        return json.loads(text.group(1).replace("&quot;", '"').replace("&lt;", "<").replace("&gt;", ">").replace("&amp;", "&"))
