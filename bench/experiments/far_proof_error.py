"""Measures errors of the gradients of a trained head, by how often a token was seen in training; needs PyTorch."""

import json
import os
import statistics
import sys
from pathlib import Path

import torch
import torch.nn.functional as F

from far_proof_head import ROWS, Head, log_header

ROOT = Path(__file__).resolve().parents[2]
CLASSES = 10
SAMPLE_EVERY = 16  # as in FarFieldHead
FIRST_ORDER, TRIES = 32, 64  # steps before the first order of a run without one; most steps to wait for far-field ones
LABELS = {"backward": "far_backward", "both": "far_both"}


def exact(head, hidden, targets):
    """Returns (d_hidden, d_weight) of the mean loss, in f64."""
    weight = head.weight.double()
    d_hidden, d_weight = torch.empty_like(hidden, dtype=torch.float64), torch.zeros_like(weight)
    for first in range(0, len(hidden), ROWS):
        x, t = hidden[first : first + ROWS].double(), targets[first : first + ROWS]
        p = torch.softmax(x @ weight.T, 1)
        p[torch.arange(len(t)), t] -= 1.0
        d_hidden[first : first + ROWS] = p @ weight / len(hidden)
        d_weight.addmm_(p.T, x, alpha=1 / len(hidden))
    return d_hidden, d_weight


def gradients(loss_of, head, hidden, targets):
    """Returns the gradients in f32; GEMMs are in bf16."""
    leaves = [hidden.clone().requires_grad_(), head.weight.clone().requires_grad_()]
    with torch.autocast(head.device.type, torch.bfloat16):
        loss = loss_of(*leaves, targets)
    loss.float().backward()
    return [leaf.grad for leaf in leaves]


def torch_loss(hidden, weight, targets):
    return F.cross_entropy(F.linear(hidden, weight).float(), targets)


class Errors:
    """Relative errors in the 2-norm against the exact gradients: d_hidden, d_weight, and classes of d_weight's rows
    by frequency. For each class there is a second error without the targets of these tokens, whose gradient comes
    from the softmax alone."""

    def __init__(self, head, hidden, targets):
        self.d_hidden, self.d_weight = exact(head, hidden, targets)
        self.classes = torch.sort(head.counts, descending=True, stable=True).indices.chunk(CLASSES)
        met = torch.zeros(head.vocab, dtype=torch.bool, device=head.device)
        met[targets] = True
        self.unmet = [vocab_ids[~met[vocab_ids]] for vocab_ids in self.classes]
        self.sizes = self.d_weight.square().sum(1)

    def of(self, d_hidden, d_weight):
        off = (d_weight - self.d_weight).square().sum(1)

        def by_class(classes):
            return [(off[rows].sum() / self.sizes[rows].sum()).sqrt().item() for rows in classes]

        return {"d_hidden": ((d_hidden - self.d_hidden).norm() / self.d_hidden.norm()).item(),
                "d_weight": (off.sum() / self.sizes.sum()).sqrt().item(),
                "by_class": by_class(self.classes), "unmet": by_class(self.unmet)}


def far_steps(logitless, head, hidden, targets, others, accuracy, error, state, count):
    """Returns [(d_hidden, d_weight, selected part)] of at most `count` far-field steps, and the head's report. All
    steps have one order, which was not made from these tokens: that of the run's state, or one from other tokens."""
    def begun():
        more = {} if state else {"refresh_every": FIRST_ORDER}
        far = logitless.FarFieldHead(error, accuracy=accuracy, audit_every=1 << 30, **more)  # no audits, because they change tau
        if state:
            far.set_extra_state(state)
        while not state and far.report.refreshes == 0 and far.report.steps < 2 * FIRST_ORDER:
            gradients(far, head, *others)
        return far

    # Each block of the sample for d_weight is taken once in a period of steps that begins at a multiple of the period.
    # If an order is used for fewer steps than that, any steps are taken.
    for period in (SAMPLE_EVERY, 1):
        far, steps = begun(), []
        orders = far.report.refreshes
        for _ in range(TRIES):
            found = gradients(far, head, hidden, targets)
            seen = far.statistics()
            if far.report.refreshes != orders:
                break
            if seen.passes > 0 and seen.selected < 1 and (steps or far.report.steps % period == 0):
                steps.append((*found, seen.selected))
            if len(steps) == count:
                return steps, far.report
        if steps:
            break
    if not steps:
        raise RuntimeError(f"no far-field step; {far.explain()}")
    return steps, far.report


def library(args):
    """Imports logitless.torch with the library of the arguments."""
    sys.path.insert(0, str(ROOT / "python"))
    os.environ.setdefault("LOGITLESS_LIBRARY", str(args.library))
    import logitless.torch

    return logitless.torch


def measured(args, head, way, error, state):
    """Returns the errors, the rows of the table (name -> numbers), failures with their reasons, and the number of
    tokens."""
    count = min(args.tokens, len(head.hidden) // 2)  # the others make an order if the run has none
    hidden, targets = head.hidden[:count], head.targets[:count]
    others = head.hidden[count : 2 * count], head.targets[count : 2 * count]
    errors, rows, missing = Errors(head, hidden, targets), {}, []

    def add_dense():
        rows["dense"] = errors.of(*gradients(library(args).linear_cross_entropy, head, hidden, targets))

    def add_far(name):
        steps, report = far_steps(library(args), head, hidden, targets, others, LABELS[name], error, state, args.samples)
        more = {"kept": statistics.fmean(kept for *_, kept in steps), "last audit": report.last_error, "tau": report.tau}
        rows[name] = {**errors.of(*steps[0][:2]), **more}
        mean = [sum(step[i].double() for step in steps) / len(steps) for i in range(2)]
        rows[f"{name}, mean of {len(steps)}"] = {**errors.of(*mean), **more}

    rows["bf16 (PyTorch)"] = errors.of(*gradients(torch_loss, head, hidden, targets))
    for name in ("dense", *([way] if state else LABELS)):
        try:
            add_dense() if name == "dense" else add_far(name)
        except Exception as why:  # the other rows took minutes on a GPU
            missing.append(f"{name}: {type(why).__name__}: {why}")
    return errors, rows, missing, count


def percent(value):
    return "-" if value is None or value != value else f"{100 * value:.2g} %"


def table(head, errors, rows):
    """Returns the table as Markdown."""
    tokens, weights = head.counts.sum(), errors.sizes.sum()
    lines = [["entries, by frequency", "times learnt from", "of tokens learnt", "of d_weight", *rows], ["---"] * (4 + len(rows))]
    for part, classes in (("by_class", errors.classes), ("unmet", errors.unmet)):
        for i, vocab_ids in enumerate(classes):
            name = f"tenth {i + 1}" + (f", the {len(vocab_ids)} that are no target here" if part == "unmet" else "")
            counts = head.counts[vocab_ids]
            lines.append([name, f"{counts.max()} to {counts.min()}" if len(vocab_ids) else "-",
                          percent((counts.sum() / tokens).item()),
                          percent((errors.sizes[vocab_ids].sum() / weights).sqrt().item()),
                          *(percent(row[part][i]) for row in rows.values())])
    for name in ("d_weight", "d_hidden"):
        lines.append([f"{name}, all", "", "", "", *(percent(row[name]) for row in rows.values())])
    for name in ("kept", "last audit", "tau"):
        lines.append([name, "", "", "", *((percent(row[name]) if name != "tau" else f"{row[name]:.2g}") if name in row else ""
                                          for row in rows.values())])
    return "\n".join("| " + " | ".join(line) + " |" for line in lines) + "\n"


def error(args):
    run = log_header(args.folder)
    options = run["options"] if run else {"far-field": 0.0, "far-both": False}
    way = "dense" if options["far-field"] <= 0 else "both" if options["far-both"] else "backward"
    path = args.folder / "run.far.safetensors"
    state = path.read_bytes() if way != "dense" and path.exists() else b""
    head = Head(args.folder, args.words, max(2 * args.tokens, args.loss_tokens), args.device)
    losses = head.losses()[: args.loss_tokens]
    errors, rows, missing, count = measured(args, head, way, options["far-field"] if way != "dense" else args.error, state)
    source = "the order and tau of the run's end" if state else f"orders of {count} other held-out tokens"
    text = (f"{args.folder.name}: vocabulary {head.vocab}, dim {head.dim}; loss of {len(losses)} held-out tokens {losses.mean():.4f} "
            f"nats (standard error {losses.std() / len(losses) ** 0.5:.4f}); gradients of {count} of them, {source}; "
            f"{device_name(head)}\n\n")
    text += table(head, errors, rows) + "".join(f"\nNot measured: {why}\n" for why in missing)
    out = args.out or args.folder.parent
    out.mkdir(parents=True, exist_ok=True)
    name = f"error_{args.folder.name}"
    (out / f"{name}.md").write_text(text, encoding="utf-8")
    numbers = {"loss": losses.mean().item(), "tokens": count, "rows": rows, "missing": missing}
    (out / f"{name}.json").write_text(json.dumps(numbers, indent=1), encoding="utf-8")
    print(text)
    return 1 if missing else 0


def device_name(head):
    return torch.cuda.get_device_name() if head.device.type == "cuda" else "CPU"
