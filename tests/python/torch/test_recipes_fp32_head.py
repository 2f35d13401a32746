"""The Python of docs/use/recipes/fp32_head.md prints the table of the page."""

import re
from pathlib import Path

PAGE = Path(__file__).parents[3] / "docs/use/recipes/fp32_head.md"


def test_the_page(capsys):
    text = PAGE.read_text()
    stated = [float(n) for n in re.findall(r"\| (\de-\d\d) \|", text)]
    exec(re.search(r"```python\n(.*?)```", text, re.DOTALL)[1], {})
    printed = [float(line.split()[-1]) for line in capsys.readouterr().out.splitlines()]
    assert len(printed) == len(stated) == 4
    for found, said in zip(printed, stated):
        assert said / 4 < found < 4 * said
