#!/usr/bin/env python3
"""Measures the head's two gradient GEMMs in fp8, for all tiles or for a middle field: errors against float64, and times.

    python3 bench/experiments/fp8_gemms.py errors [real_head_late.safetensors ...] [--only TEXT] [--tokens 1024]
                                         [--text /usr/include ...] [--steps 300] [--early 8 6]
    python3 bench/experiments/fp8_gemms.py times [--shapes 8192,4096,128256 ...] [--repeat 5] [--seconds 50]

errors: computes the gradients of mean cross entropy for each head. E is p without the target's, rounded as each row
states; W and X are rounded as well. Forward, lse and the target's coefficient (p_y - 1, from bf16 rows) are exact.
Heads are the files, complete and cut to their first --vocab token ids (ids run from frequent to rare), and a random
one. Another head is trained from --text, with --vocab entries of --dim numbers. It is measured when a batch's loss
falls below each --early, and after --steps.

Errors are relative L2 errors against float64; those of d_weight are also listed by rows, from the largest to the
smallest. Terms in the rows are:
- "by row": one scale for a token (d_hidden) or vocabulary entry (d_weight), applied to the sums at the end
- "and tile": another scale for each tile of entries or tokens, so that partial sums are rescaled
- "one E": the same E for both GEMMs, with a token's scale folded into x and a tile's into w
- "apart": probabilities above a bound are removed from E and exact, as the target's is

Scales of the rows of w and x are multiplied into E before it is rounded. Sums are in fp32, or cut to 14 bits after
every 32 of k. The latter are promoted to fp32 every 128 of k or never, roughly as in a Hopper tensor core.

The middle field divides tiles of 128 entries for each block of 128 tokens. A tile is near (bf16) where its mass without
the target is above tau near for one of the tokens. It is middle (fp8 by row) where its mass is above tau far, and
otherwise far (mass and centroid). The order is made from other tokens, and tokens are sorted by their selected tiles,
as in the far field. Predicted times are fractions of the roofline. They have one forward, the recomputed logits of near
and middle tiles, and two GEMMs, at half the time for the middle. "stored" reads saved logits instead of recomputing.

times: needs one GPU with fp8. The roofline is the time of the head's three GEMMs by torch.mm. The chunked loss has E in
fp8, one E for both GEMMs in both layouts. It is timed by parts and as a whole, beside the same in bf16. The time of a
part is that of all chunks together. "off" is the error against the fp32 product of the same fp8 numbers; for whole
losses it is against float64, on some tokens and entries of random values. Without a GPU (--device cpu, small --shapes)
only the mathematics is tested.
"""

import argparse
import collections
import hashlib
import re
import sys
import sysconfig
import time
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
import torch.nn.functional as F

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from far_blocks import token_orders  # noqa: E402
from far_field import ROWS, load, rotated  # noqa: E402
from far_training import make_order  # noqa: E402
from fp8_gemms_times import SHAPES, line, times  # noqa: E402

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
LARGEST = {E4M3: 448.0, E5M2: 57344.0}
TILE = BLOCK = 128
CONTEXT, BATCH = 8, 512  # of the model trained in this script
STEP = 32  # k of one instruction
TAU_FAR, TAU_NEAR = (0.003, 0.001, 0.0003, 0.0001), (0.03, 0.1, 0.3)


@dataclass
class Head:
    """A head in f32 with bf16 values: hidden [N, D], weight [V, D], others [M, D] that make the order; targets [N]."""

    name: str
    hidden: torch.Tensor
    weight: torch.Tensor
    targets: torch.Tensor
    others: torch.Tensor


def make_head(name, hidden, weight, targets, others, device):
    hidden, weight, others = (t.to(device).bfloat16().float() for t in (hidden, weight, others))
    return Head(name, hidden, weight, targets.to(device).long(), others)


def name_of(path):
    return Path(path).stem.removeprefix("real_head_")


def head_of_file(name, path, vocab, args):
    """Reads a head: the last tokens, with targets among the first `vocab` ids; the first tokens are the others."""
    tensors = {name: torch.from_numpy(values) for name, values in rotated(load(path), 0).items()}
    weight, others = tensors["weight"][:vocab], tensors["hidden"][: args.rows]
    known = tensors["targets"] < len(weight)
    hidden, targets = tensors["hidden"][known], tensors["targets"][known]
    return make_head(name, hidden[-args.tokens :], weight, targets[-args.tokens :], others, args.device)


def random_head(args):
    random = torch.Generator().manual_seed(0)
    weight = torch.randn(args.vocab, args.dim, generator=random) * 0.02
    hidden = F.layer_norm(torch.randn(args.tokens + args.rows, args.dim, generator=random), (args.dim,))
    frequency = 1 / (torch.arange(args.vocab) + 3.0)
    targets = torch.multinomial(frequency, args.tokens, replacement=True, generator=random)
    return make_head("random", hidden[: args.tokens], weight, targets, hidden[args.tokens :], args.device)


def files_of(folders):
    suffixes = {".c", ".h", ".hpp", ".md", ".py", ".rst", ".txt"}
    found = [path for folder in folders for path in Path(folder).rglob("*") if path.suffix in suffixes]
    return sorted(filter(Path.is_file, found), key=lambda path: hashlib.sha1(str(path).encode()).digest())


def ids_of(folders, vocab, most):
    """Tokenizes `most` characters of text; ids are sorted by frequency, and the last one stands for all rarer tokens."""
    words, size, seen = [], 0, set()
    for path in files_of(folders):
        text = path.read_text(encoding="utf-8", errors="ignore")
        content = hashlib.sha1(text.encode()).digest()
        if content not in seen:
            seen.add(content)
            words += re.findall(r"\w+|[^\w\s]", text)
            size += len(text)
        if size > most:
            break
    ids = {word: i for i, (word, _) in enumerate(collections.Counter(words).most_common(vocab - 1))}
    return torch.tensor([ids.get(word, vocab - 1) for word in words])


class Model:
    """A log-bilinear model: hidden is the layer norm of a sum over CONTEXT embeddings, each multiplied by a matrix
    for its position; tied."""

    def __init__(self, args):
        random = torch.Generator().manual_seed(0)
        self.weight = torch.randn(args.vocab, args.dim, generator=random) * 0.02
        self.matrices = torch.cat([torch.eye(args.dim) / (1 + k) for k in range(CONTEXT)])
        self.parameters = [p.to(args.device).requires_grad_() for p in (self.weight, self.matrices)]
        self.weight, self.matrices = self.parameters

    def hidden(self, text, at):
        context = text[at[:, None] - torch.arange(1, CONTEXT + 1, device=text.device)]
        vectors = F.embedding(context, self.weight).flatten(1)
        return F.layer_norm(vectors @ self.matrices, (self.weight.shape[1],))

    @torch.no_grad()
    def head(self, name, text, args):
        at = torch.linspace(CONTEXT, len(text) - 1, args.rows + args.tokens).long().to(text.device)
        at = at[torch.randperm(len(at), generator=torch.Generator().manual_seed(0)).to(text.device)]
        others, hidden = self.hidden(text, at).split([args.rows, args.tokens])
        return make_head(name, hidden, self.weight.detach().clone(), text[at[args.rows :]], others, args.device)


def trained_heads(args):
    """Trains a model; returns its heads, early and late, with hidden states of unseen text."""
    text = ids_of(args.text, args.vocab, args.characters).to(args.device)
    train, held_out = text.tensor_split([len(text) * 19 // 20])
    model, random = Model(args), torch.Generator().manual_seed(1)
    optimiser = torch.optim.AdamW(model.parameters, lr=args.lr, betas=(0.9, 0.95), weight_decay=0.01)
    early = sorted(args.early)
    for step in range(1, args.steps + 1):
        optimiser.param_groups[0]["lr"] = args.lr * min(1, step / 20, 1.1 - step / args.steps)
        at = torch.randint(CONTEXT, len(train), (BATCH,), generator=random).to(text.device)
        loss = F.cross_entropy(model.hidden(train, at) @ model.weight.T, train[at])
        while early and loss.item() < early[-1]:
            early.pop()
            yield model.head(f"trained, {step - 1} steps", held_out, args)
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
    yield model.head(f"trained, {args.steps} steps", held_out, args)


class Exact:
    """Exact gradients of the sum (not the mean), in f64; p [N, V] without the targets', and their coefficients, in
    f32."""

    def __init__(self, head):
        self.head, weight, tokens = head, head.weight.double(), len(head.hidden)
        self.p = head.hidden.new_empty(tokens, len(weight))
        self.coefficient = head.hidden.new_empty(tokens)
        self.d_hidden, self.d_weight, losses = [], torch.zeros_like(weight), []
        for first in range(0, tokens, BLOCK):
            part = slice(first, first + BLOCK)
            x, y = head.hidden[part].double(), head.targets[part, None]
            z = x @ weight.T
            losses.append(torch.logsumexp(z, 1) - z.gather(1, y)[:, 0])
            p = torch.softmax(z, 1)
            self.coefficient[part] = (p.gather(1, y) - 1)[:, 0]
            self.p[part] = p.scatter(1, y, 0.0)
            p.scatter_add_(1, y, torch.full_like(y, -1.0, dtype=p.dtype))
            self.d_hidden.append(p @ weight)
            self.d_weight.addmm_(p.T, x)
        self.d_hidden, self.loss = torch.cat(self.d_hidden), torch.cat(losses).mean().item()
        self.sizes = self.d_weight.norm(dim=1)
        self.by_size = torch.sort(self.sizes, descending=True, stable=True).indices
        self.by_size = self.by_size[self.sizes[self.by_size] > 0]

    def with_targets(self, d_hidden, d_weight):
        head = self.head
        d_hidden = d_hidden + self.coefficient[:, None] * head.weight[head.targets]
        return d_hidden, d_weight.index_add(0, head.targets, self.coefficient[:, None] * head.hidden)

    def errors(self, d_hidden, d_weight):
        """Returns errors of d_hidden, d_weight, its classes of rows and its median row."""
        off = (d_weight - self.d_weight).norm(dim=1)
        classes = [self.by_size[a:b] for a, b in zip(ROWS, (*ROWS[1:], None)) if a < len(self.by_size)]
        parts = [(off[rows].norm() / self.sizes[rows].norm()).item() for rows in classes]
        median = (off / self.sizes)[self.by_size].median().item()
        of_hidden = ((d_hidden - self.d_hidden).norm() / self.d_hidden.norm()).item()
        return [of_hidden, (off.norm() / self.sizes.norm()).item(), *parts, median]


@dataclass(frozen=True)
class Form:
    """The operands of the GEMMs: E (kind, scales), and w and x: scaled by `rows`, by `one` scale, or bf16."""

    name: str
    kind: torch.dtype = E4M3
    operands: str = "rows"
    tile: int = 0  # 0: a scale for each row
    power: bool = False  # scales are powers of two
    shared: str = ""  # one E for both GEMMs: scaled by "token", or by "token and tile"
    apart: float = 0.0  # larger probabilities are removed and exact, as the targets' are
    sums: int | None = None  # sums in 14 bits, promoted to fp32 after this many of k; 0: never


ROW = Form("E by row; w, x by row")
FORMS = (
    Form("E in bf16", kind=torch.bfloat16, operands="bf16"),
    Form("E by row; w, x in bf16", operands="bf16"),
    Form("E in bf16; w, x by row", kind=torch.bfloat16),
    ROW,
    Form("the same, powers of two", power=True),
    Form("E by row; w, x by one scale", operands="one"),
    Form("E by row and tile of 128", tile=128),
    Form("the same, powers of two", tile=128, power=True),
    Form("E by row and tile of 256", tile=256),
    Form("one E by token; w, x by one scale", operands="one", shared="token"),
    Form("one E by token and tile of 128", operands="one", shared="token and tile"),
    Form("E in e5m2 by row", kind=E5M2),
    Form("E by row, p over 0.03 apart", apart=0.03),
    Form("E by row, p over 0.01 apart", apart=0.01),
    Form("E by row, p over 0.003 apart", apart=0.003),
    Form("one E by token and tile, p over 0.03 apart", operands="one", shared="token and tile", apart=0.03),
    Form("E by row, 14 bits, fp32 every 128", sums=128),
    Form("E by row, 14 bits", sums=0),
    Form("E by row, p over 0.03 apart, 14 bits", apart=0.03, sums=0),
)


def scale_of(largest, kind, power=False):
    scale = largest.clamp_min(1e-30) / LARGEST[kind]
    return torch.exp2(torch.ceil(torch.log2(scale))) if power else scale


def rounded(values, kind, scale):
    """Returns the rounded values, still divided by their scale."""
    return (values / scale).to(kind).float()


def rounded_rows(e, form):
    """Rounds e [M, K] >= 0 with a scale for each row, or for each row and `tile` columns."""
    if form.kind == torch.bfloat16:
        return e.bfloat16().float()
    parts = e.unflatten(1, (-1, form.tile or e.shape[1]))
    scale = scale_of(parts.amax(2, keepdim=True), form.kind, form.power)
    return rounded(parts, form.kind, scale).mul_(scale).flatten(1)


def operand(m, form):
    """Returns w or x in e4m3, and the factors of its rows that E must include."""
    if form.operands == "bf16":
        return m, None
    if form.operands == "one":
        scale = scale_of(m.abs().amax(), E4M3)
        return rounded(m, E4M3, scale) * scale, None
    scale = scale_of(m.abs().amax(1, keepdim=True), E4M3, form.power)
    return rounded(m, E4M3, scale), scale[:, 0]


def multiply(a, b, sums):
    if sums is None:
        return a @ b
    total = a.new_zeros(len(a), b.shape[1])
    part = torch.zeros_like(total)
    for first in range(0, len(b), STEP):
        part += a[:, first : first + STEP] @ b[first : first + STEP]
        part.view(torch.int32).bitwise_and_(-1 << 10)
        if sums and (first + STEP) % sums == 0:
            total += part
            part.zero_()
    return total + part


def product(e, m, form):
    m, factors = operand(m, form)
    return multiply(rounded_rows(e if factors is None else e * factors, form), m, form.sums)


def shared_gemms(p, w, x, form):
    """Uses one E for both GEMMs: a token's scale is folded into x, a tile's into w."""
    token = scale_of(p.amax(1, keepdim=True), form.kind)
    tile = p.new_ones(len(w))
    if form.shared == "token and tile":
        largest = (p / token).amax(0).view(-1, TILE).amax(1)
        tile = scale_of(largest, form.kind, True).repeat_interleave(TILE)
    e = rounded(p, form.kind, token * tile)
    w, x = operand(w * tile[:, None], form)[0], operand(x * token, form)[0]
    return (e @ w) * token, (e.T @ x) * tile[:, None]


def both_gemms(p, w, x, form):
    if form.shared:
        return shared_gemms(p, w, x, form)
    return product(p, w, form), product(p.T.contiguous(), x, form)


def with_largest_apart(p, w, x, form):
    """Returns both products, and the mean number of removed entries of a token."""
    rows, vocab_ids = torch.nonzero(p > form.apart, as_tuple=True)
    values = p[rows, vocab_ids][:, None]
    d_hidden, d_weight = both_gemms(p * (p <= form.apart), w, x, form)
    d_hidden.index_add_(0, rows, values * w[vocab_ids])
    d_weight.index_add_(0, vocab_ids, values * x[rows])
    return d_hidden, d_weight, len(rows) / len(p)


def eager(head):
    """Returns d_hidden and d_weight from bf16 logits, as in eager PyTorch: their gradient and the results are bf16."""
    tokens = len(head.hidden)
    p = torch.softmax((head.hidden @ head.weight.T).bfloat16().float(), 1)
    p[torch.arange(tokens, device=p.device), head.targets] -= 1
    p = (p / tokens).bfloat16().float()
    return [(m * tokens).bfloat16().double() for m in (p @ head.weight, p.T @ head.hidden)]


class Field:
    """The vocabulary in the tiles of an order: masses, shares and centroids."""

    def __init__(self, head, exact):
        self.head, self.exact = head, exact
        average = sum(torch.softmax(x @ head.weight.T, 1).sum(0) for x in head.others.split(BLOCK)) / len(head.others)
        self.vocab_ids = make_order(head.weight, average)
        position = torch.argsort(self.vocab_ids)
        self.target = position[head.targets]
        self.p, self.w = exact.p[:, self.vocab_ids], head.weight[self.vocab_ids]
        share = average[self.vocab_ids].view(-1, TILE) + 1e-30
        self.share = share / share.sum(1, keepdim=True)
        self.centroid = (self.share[..., None] * self.w.view(-1, TILE, self.w.shape[1])).sum(1)
        self.rest = self.p.view(len(self.p), -1, TILE).sum(2)
        self.mass = self.rest.scatter_add(1, self.target[:, None] // TILE, 1 + exact.coefficient[:, None])

    def fields(self, tau_far, tau_near):
        """Returns near, middle, far [N, tiles]; tokens sorted by their selected tiles form blocks."""
        wanted = self.mass > tau_far
        rows = torch.from_numpy(token_orders(wanted.cpu().numpy(), self.target.cpu().numpy())["kept tiles"])
        rows = rows.to(wanted.device)

        def of_blocks(choice):
            out = torch.empty_like(choice)
            out[rows] = choice[rows].view(-1, BLOCK, choice.shape[1]).any(1).repeat_interleave(BLOCK, 0)
            return out

        kept = of_blocks(wanted)
        near = kept & of_blocks(self.rest > tau_near) if tau_near else kept
        return near, kept & ~near, ~kept

    def gradients(self, near, middle, far):
        p, x = self.p.view(*self.rest.shape, TILE), self.head.hidden
        e = (p * near[..., None]).flatten(1).bfloat16().float()
        d_hidden, d_weight = e @ self.w, e.T @ x
        if middle.any():
            e = (p * middle[..., None]).flatten(1)
            d_hidden, d_weight = (a + b for a, b in zip((d_hidden, d_weight), both_gemms(e, self.w, x, ROW)))
        mass = self.rest * far
        d_hidden += mass @ self.centroid
        d_weight += (self.share[..., None] * (mass.T @ x)[:, None]).flatten(0, 1)
        out = torch.empty_like(d_weight)
        out[self.vocab_ids] = d_weight
        return self.exact.with_targets(d_hidden, out)


def percent(value):
    return f"{100 * value:.2g} %" if value < 0.995 else "100 %"


def error_columns(exact):
    bounds = [str(b - 1) for b in ROWS[1:]] + [""]
    names = [f"row {a} to {b}".strip() for a, b in zip(ROWS, bounds) if a < len(exact.by_size)]
    return ["d_hidden", "d_weight", *names, "median row"]


def print_forms(head, exact, only):
    names = ["E in e4m3 unless said otherwise", *error_columns(exact)]
    line(*names)
    line(*["---"] * len(names))
    line("bf16 logits (PyTorch)", *map(percent, exact.errors(*eager(head))))
    for form in FORMS:
        if only and only not in form.name:
            continue
        name = form.name
        if form.apart:
            *both, count = with_largest_apart(exact.p, head.weight, head.hidden, form)
            name += f" ({count:.1f} a token)"
        else:
            both = both_gemms(exact.p, head.weight, head.hidden, form)
        line(name, *map(percent, exact.errors(*exact.with_targets(*both))))


def print_fields(head, exact):
    field = Field(head, exact)
    names = ["tau far", "tau near", "near", "middle", "far", *error_columns(exact), "of the floor", "stored"]
    print()
    line(*names)
    line(*["---"] * len(names))
    for tau_far in TAU_FAR:
        for tau_near in (None, *TAU_NEAR):
            parts = field.fields(tau_far, tau_near)
            near, middle, far = (part.float().mean().item() for part in parts)
            errors = exact.errors(*field.gradients(*parts))
            points = 2 / TILE if far else 0
            again, stored = ((1 + (near + middle) * more + 2 * near + middle + points) / 3 for more in (1, 0))
            numbers = *map(percent, (near, middle, far, *errors)), f"{again:.3f}", f"{stored:.3f}"
            line(tau_far, tau_near or "far field", *numbers)


def heads(args):
    ways = {"random": random_head}
    for path in reversed(args.heads):
        cases = {name_of(path): None, f"{name_of(path)}, cut": args.vocab}
        ways = {name: partial(head_of_file, name, path, vocab) for name, vocab in cases.items()} | ways
    yield from (make(args) for name, make in ways.items() if args.only in name)
    if args.only in "trained":
        yield from trained_heads(args)


@torch.no_grad()
def errors_of(head, args):
    start, exact = time.perf_counter(), Exact(head)
    vocab, dim = head.weight.shape
    print(f"\n### {head.name}: V {vocab}, D {dim}, N {len(head.hidden)}, loss {exact.loss:.2f}\n")
    print_forms(head, exact, args.forms)
    if not args.no_fields:
        print_fields(head, exact)
    print(f"\n{time.perf_counter() - start:.0f} s", flush=True)


def errors(args):
    torch.set_num_threads(args.threads)
    for head in heads(args):
        errors_of(head, args)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parts = parser.add_subparsers(dest="part", required=True)
    part = parts.add_parser("errors")
    part.set_defaults(run=errors)
    part.add_argument("heads", nargs="*", help="safetensors: hidden, weight or weight_q and weight_scale, targets")
    part.add_argument("--only", default="", help="heads whose names have this in them; trained: those trained here")
    part.add_argument("--forms", default="", help="rows whose names have this in them")
    part.add_argument("--no-fields", action="store_true")
    part.add_argument("--tokens", type=int, default=1024, help="a multiple of 128")
    part.add_argument("--rows", type=int, default=1536, help="other tokens, which make the order")
    part.add_argument("--vocab", type=int, default=32768, help="16 * 128 times a power of two")
    part.add_argument("--dim", type=int, default=512)
    python = [sysconfig.get_paths()[name] for name in ("stdlib", "purelib")]
    part.add_argument("--text", nargs="+", default=["/usr/include", "/usr/share/doc", *python], help="folders")
    part.add_argument("--characters", type=float, default=40e6, help="of the text, at most")
    part.add_argument("--steps", type=int, default=300)
    part.add_argument("--early", nargs="*", type=float, default=[8.0, 6.0])
    part.add_argument("--lr", type=float, default=0.002)
    part.add_argument("--threads", type=int, default=1)
    part = parts.add_parser("times")
    part.set_defaults(run=times)
    part.add_argument("--shapes", nargs="+", default=SHAPES, help="N,D,V")
    part.add_argument("--repeat", type=int, default=5)
    part.add_argument("--warm", type=float, default=0.08, help="seconds of the same before it is timed")
    part.add_argument("--seconds", type=float, default=50, help="no other part is begun after")
    for part in parts.choices.values():
        part.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    args = parser.parse_args()
    args.run(args)


if __name__ == "__main__":
    main()
