"""Measures texts and pictures of a page in a real browser, where one is installed."""

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
found.wide = document.documentElement.scrollWidth > window.innerWidth;
found.width = window.innerWidth;
document.body.setAttribute('data-found', JSON.stringify(found));
</script></body>"""


@unittest.skipUnless(BROWSER, "there is no Chromium or Chrome here")
class PageTest(unittest.TestCase):
    def assert_legible(self, page, svgs, width=1100):
        """page: path of a page. Returns the measurements."""
        with tempfile.TemporaryDirectory() as folder:
            copy = Path(folder) / "page.html"
            copy.write_text(page.read_text().replace("</body>", MEASURE))
            done = subprocess.run([BROWSER, "--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage",
                                   f"--user-data-dir={folder}/profile", f"--window-size={width},900", "--dump-dom",
                                   copy.as_uri()], capture_output=True, text=True, timeout=120, check=False)
        text = re.search(r'data-found="([^"]*)"', done.stdout)
        self.assertTrue(text, done.stderr[-2000:])
        found = json.loads(text.group(1).replace("&quot;", '"').replace("&lt;", "<").replace("&gt;", ">").replace("&amp;", "&"))
        self.assertEqual(found["svgs"], svgs)
        self.assertGreaterEqual(found["paths"], svgs)
        self.assertEqual((found["overlaps"], found["outside"], found["wide"]), ([], [], False))
        return found
