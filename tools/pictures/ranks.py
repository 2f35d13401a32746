"""A vocabulary-parallel head on three ranks: their shards, and the exchanges."""

from svg import BLUE, FAINT, GREEN, GREY, INK, LINE, ORANGE, PALE_BLUE, PALE_GREEN, Picture

RANKS, LEFT, WIDTH, SPACE = 3, 60, 230, 270
END = LEFT + (RANKS - 1) * SPACE + WIDTH
COLOURS = ("#d9e9ff", "#ffe9d6", "#e6dcf7")  # tokens of rank 0, 1, 2


def band(p, y, text, more):
    """Draws an exchange between all ranks."""
    for r in range(RANKS):
        x = LEFT + r * SPACE + WIDTH / 2
        p.line(x, y - 22, x, y - 3, FAINT, arrow=True)
        p.line(x, y + 45, x, y + 64, FAINT, arrow=True)
    p.rect(LEFT, y, END - LEFT, 42, PALE_BLUE, BLUE, radius=6)
    p.text((LEFT + END) / 2, y + 18, text, 13, BLUE, "middle", bold=True)
    p.text((LEFT + END) / 2, y + 34, more, 12, FAINT, "middle")


def tokens(p, x, y, own, note):
    """Draws the tokens of a chunk: all of them, or those of one rank."""
    for r in range(RANKS):
        if own is None or own == r:
            p.rect(x + r * WIDTH / RANKS, y, WIDTH / RANKS, 24, COLOURS[r], LINE)
    p.rect(x, y, WIDTH, 24, "none", LINE, dash="3 3")
    p.text(x + WIDTH / 2, y + 40, note, 12, FAINT, "middle")


def draw(path, **_):
    p = Picture(END + 60, 624, "Three ranks with a third of the vocabulary each: tokens are gathered, a record of each token is exchanged "
                "between forward and backward, slices of d_hidden are summed in the order of ranks")
    for r in range(RANKS):
        x = LEFT + r * SPACE
        p.text(x + WIDTH / 2, 26, f"rank {r}", 16, INK, "middle", bold=True)
        tokens(p, x, 40, r, "hidden: its own tokens")
        tokens(p, x, 176, None, "hidden of a chunk, of all ranks")
        p.rect(x, 232, WIDTH, 44, "#ffffff", LINE, dash="4 3")
        p.text(x + WIDTH / 2, 250, "logits of its local vocabulary", 12, INK, "middle")
        p.text(x + WIDTH / 2, 267, "weight [V/3, D] stays; tile by tile", 12, FAINT, "middle")
        p.rect(x, 370, WIDTH, 28, GREY, LINE)
        p.text(x + WIDTH / 2, 389, "loss: the same bits on all ranks", 12, INK, "middle")
        p.rect(x, 406, WIDTH, 28, PALE_GREEN, GREEN)
        p.text(x + WIDTH / 2, 425, "d_weight [V/3, D]: done, and stays", 12, GREEN, "middle")
        tokens(p, x, 442, None, "d_hidden of its shard: slices, fp32")
        tokens(p, x, 574, r, "d_hidden: its own tokens")
    band(p, 106, "all_gather", "hidden and targets of a chunk; nothing where tokens are on all ranks")
    band(p, 300, "all_gather", "a record of each token: exponent and sum, target's logit, what the options need; merged in the order of ranks")
    band(p, 508, "all_to_all", "each token's slices to its rank, which adds them in the order of ranks and rounds once")
    p.text(END + 20, 320, "Neither weight nor d_weight travels", 12, ORANGE, "middle", turn=-90)
    p.write(path)
