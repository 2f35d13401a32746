"""The [N, V] logits as the plans of the head iterate over them: chunks, vocabulary blocks, tiles, and the saved part.
"""

from svg import BLUE, FAINT, GREEN, GREY, INK, LINE, ORANGE, PALE_BLUE, PALE_GREEN, Picture

LEFT, TOP, WIDTH, HEIGHT = 40, 92, 250, 230
CHUNKS, BLOCKS = 4, 5
SPACE = 310


def rectangle(p, x, title, rows):
    p.text(x, 28, title, 16, bold=True)
    p.lines(x, 48, rows, 12, FAINT)
    p.rect(x, TOP, WIDTH, HEIGHT, "#ffffff", LINE, dash="4 3")


def draw(path, **_):
    p = Picture(3 * SPACE + 60, 440, "The N by V rectangle of logits: the plain loss keeps all of it, a dense plan one chunk of rows, "
                "a recompute plan one vocabulary block of one chunk")
    chunk, vocab_block = HEIGHT / CHUNKS, WIDTH / BLOCKS

    x = LEFT
    rectangle(p, x, "Plain loss", ["the logits, and their gradient,", "are whole in memory"])
    p.rect(x, TOP, WIDTH, HEIGHT, "#ffd8d3", "#cf222e")
    p.text(x + WIDTH / 2, TOP + HEIGHT / 2 + 5, "all of N x V, more than once", 13, "#a40e26", "middle")
    p.text(x + WIDTH / 2, TOP + HEIGHT + 20, "V entries", 12, FAINT, "middle")
    p.text(x - 10, TOP + HEIGHT / 2, "N tokens", 12, FAINT, "middle", turn=-90)

    x += SPACE
    rectangle(p, x, "Dense plan: 3 GEMMs", ["one chunk of tokens at a time;", "its exponentials are saved for its backward"])
    for i in range(1, CHUNKS):
        p.line(x, TOP + i * chunk, x + WIDTH, TOP + i * chunk, LINE)
    p.rect(x, TOP + chunk, WIDTH, chunk, PALE_BLUE, BLUE)
    p.text(x + WIDTH / 2, TOP + 1.5 * chunk + 5, "exp(z) of a chunk, 16 bit", 13, BLUE, "middle")
    p.text(x + WIDTH / 2, TOP + 0.5 * chunk + 5, "done: d_hidden written, d_weight added", 12, FAINT, "middle")
    p.text(x + WIDTH / 2, TOP + 2.5 * chunk + 5, "not begun", 12, FAINT, "middle")

    x += SPACE
    rectangle(p, x, "Recompute plan: 4 GEMMs", ["one vocabulary block of a chunk at a time;", "logits are computed twice, none is saved"])
    for i in range(1, CHUNKS):
        p.line(x, TOP + i * chunk, x + WIDTH, TOP + i * chunk, LINE)
    p.rect(x, TOP + chunk, WIDTH, chunk, GREY, LINE)
    p.rect(x + 2 * vocab_block, TOP + chunk, vocab_block, chunk, PALE_GREEN, GREEN)
    for i in range(1, 4):
        p.line(x + 2 * vocab_block + i * vocab_block / 4, TOP + chunk, x + 2 * vocab_block + i * vocab_block / 4, TOP + 2 * chunk, GREEN, 0.6)
        p.line(x + 2 * vocab_block, TOP + chunk + i * chunk / 4, x + 3 * vocab_block, TOP + chunk + i * chunk / 4, GREEN, 0.6)
    p.line(x + 2.5 * vocab_block, TOP + 2 * chunk + 22, x + 2.5 * vocab_block, TOP + 2 * chunk + 3, FAINT, arrow=True)
    p.lines(x + WIDTH / 2, TOP + 2 * chunk + 38, ["gradients of a vocabulary block, tile by tile"], 12, FAINT, "middle")

    y = TOP + HEIGHT + 46
    p.rect(LEFT, y, 3 * SPACE - 20, 54, "#ffffff", LINE, radius=6)
    p.text(LEFT + 14, y + 22, "chunk: rows of tokens that go through forward and backward together", 12, BLUE)
    p.text(LEFT + 14, y + 42, "vocabulary block: entries whose gradients are in memory", 12, GREEN)
    p.text(LEFT + 470, y + 22, "tile: the logits that a kernel has in registers (128 entries)", 12, INK)
    p.text(LEFT + 470, y + 42, "beside them in any plan: inputs and their gradients", 12, ORANGE)
    p.write(path)
