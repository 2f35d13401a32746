"""Reports the logs of `far_proof.py run` in report.md."""

import gzip
import json
import statistics
from collections import defaultdict

WAYS = ("dense", "backward", "both")
QUARTERS = 4
ORDER_BEFORE, ORDER_AFTER = 6, 1  # steps before and after the first one with a new order, in which the order is made
ABOUT = 20                        # steps on each side, whose median is the time of a step without an order


class Run:
    """The data of one log. steps: [step, loss, seconds, far field's counts or None]."""

    def __init__(self, path):
        with (gzip.open if path.suffix == ".gz" else open)(path, "rt", encoding="utf-8") as file:
            lines = []
            for text in file:
                if text.endswith("\n"):  # a killed run may leave half a line
                    lines.append(json.loads(text))
        self.path = path
        self.header = next(line for line in lines if line["kind"] == "run")
        self.steps = [line for line in lines if line["kind"] == "step"]
        self.validations = {line["step"]: line["loss"] for line in lines if line["kind"] == "validation"}
        self.validation_seconds = sum(line["seconds"] for line in lines if line["kind"] == "validation")
        self.reason = next((line["reason"] for line in reversed(lines) if line["kind"] == "end"), "killed")
        options = self.header["options"]
        self.way = ("both" if options["far-both"] else "backward") if options["far-field"] > 0 else "dense"
        self.seed, self.wanted = options["seed"], options["far-field"]
        self.on_gpu = not self.header["device"].startswith("CPU")
        model = self.header["model"]
        self.kind = (model["type"], model["layers"], model["dim"], model["vocab"], self.header["tokens_per_step"],
                     options["length"], options["lr"], self.header["steps"])
        self.name = f"{self.way}, seed {self.seed}"

    def seconds(self, keep=lambda far: True):
        return [s["seconds"] for s, far in zip(self.steps, self.far_steps()) if keep(far)]

    def far_steps(self):
        """Returns whether the head was far in each step. A GPU's log may be off by a step."""
        before, out = 0, []
        for step in self.steps:
            far = step.get("far_field")
            out.append(far is not None and far["dense_steps"] == before)
            before = far["dense_steps"] if far else 0
        return out

    def audits(self):
        """Returns [(step, error)] of the lines with a new audit."""
        count, out = 0, []
        for step in self.steps:
            far = step.get("far_field")
            if far and far["audits"] > count:
                out.append((step["step"], far["last_error"]))
                count = far["audits"]
        return out

    def kept(self):
        """Returns [(step, selected part)], from the running mean: of each far-field step; on a GPU of audited steps."""
        count, mean, out = 0, 0.0, []
        for step in self.steps:
            far = step.get("far_field")
            if not far:
                continue
            now = far["audits"] if self.on_gpu else far["steps"] - far["dense_steps"] + far["repeated_steps"]
            if now > count:
                out.append((step["step"], (far["mean_selected"] * now - mean * count) / (now - count)))
                count, mean = now, far["mean_selected"]
        return out

    def orders(self):
        """Returns [(step, seconds)]: the extra time of steps that make and adopt an order, over the median of their
        neighbours."""
        count, out, times = 0, [], [s["seconds"] for s in self.steps]
        for i, step in enumerate(self.steps):
            far = step.get("far_field")
            if far and far["orders"] > count:
                usual = statistics.median(times[max(0, i - ABOUT): i + ABOUT])
                made = times[max(0, i - ORDER_BEFORE): i + ORDER_AFTER + 1]
                out.append((step["step"], sum(t - usual for t in made)))
                count = far["orders"]
        return out

    def quarter(self, step):
        return min(QUARTERS - 1, (step - 1) * QUARTERS // self.header["steps"])

    def by_quarter(self, pairs, of, text):
        parts = [[value for step, value in pairs if self.quarter(step) == q] for q in range(QUARTERS)]
        return ", ".join(text(of(part)) if part else "-" for part in parts)

    def head_share(self):
        """Returns the head's share of the multiply-adds in a step's GEMMs; causal attention counts half. None for
        other kinds of models."""
        kind, layers, dim, vocab, _, length = self.kind[:6]
        if kind != "gpt2":
            return None
        head = vocab * dim
        return head / (head + layers * (12 * dim * dim + length * dim))


def percent(value, digits=1):
    return f"{100 * value:.{digits}f} %"


def two(value):
    return f"{100 * value:.2g} %"


def table(head, rows):
    return "\n".join(["| " + " | ".join(head) + " |", "|" + "---|" * len(head),
                      *("| " + " | ".join(map(str, row)) + " |" for row in rows), ""])


def loss_table(runs, dense):
    """Returns validation losses at the last common step of a run and the dense run of its seed."""
    rows = []
    for run in runs:
        if not run.validations:
            rows.append((run.name, "-", "-", "-", "-", run.reason))
            continue
        last, other = max(run.validations), dense.get(run.seed)
        row = [run.name, last, f"{run.validations[last]:.4f}"]
        shared = sorted(set(run.validations) & set(other.validations)) if other and other is not run else []
        if shared:
            off = {step: run.validations[step] - other.validations[step] for step in shared}
            most = max(off.values(), key=abs)
            row += [f"{off[shared[-1]]:+.4f}" + ("" if shared[-1] == last else f" (step {shared[-1]})"), f"{most:+.4f}"]
        else:
            row += ["", ""]
        rows.append((*row, run.reason))
    text = table(("run", "step", "validation loss", "minus dense, same seed", "furthest of any validation", "end"), rows)
    ends = defaultdict(list)
    for run in dense.values():
        for step, loss in run.validations.items():
            ends[step].append(loss)
    last = max((step for step, losses in ends.items() if len(losses) == len(dense)), default=None)
    if len(dense) > 1 and last:
        text += f"\nDense, {len(dense)} seeds: {max(ends[last]) - min(ends[last]):.4f} nats apart at step {last}.\n"
    return text


def speed_table(runs, dense, promised, head_ms):
    rows = []
    base = statistics.median([statistics.median(r.seconds()) for r in dense.values() if r.steps]) if dense else None
    for run in runs:
        if not run.steps:
            continue
        tokens, times = run.header["tokens_per_step"], run.seconds()
        whole = tokens * len(times) / (sum(times) + run.validation_seconds)
        step = statistics.median(times)
        other = dense.get(run.seed)
        shared = min(len(times), len(other.steps)) if other and other is not run else 0
        row = [run.name, f"{tokens / step:.0f}", f"{whole:.0f}", f"{1e3 * step:.1f}",
               percent(sum(times[:shared]) / sum(other.seconds()[:shared])) if shared else ""]
        far = run.seconds(lambda far: far)
        share = 1e-3 * head_ms / base if head_ms and base else run.head_share()
        if run.way == "dense" or not far:
            row += ["", "", percent(share) if share else "-", "", ""]
        else:
            of = statistics.median(other.seconds()) if other and other.steps else base
            far_step = statistics.median(far)
            row += [f"{1e3 * far_step:.1f}"]
            if of and share:
                part = promised[WAYS.index(run.way) - 1]
                gained, hoped = 1 - far_step / of, share * (1 - part)
                row += [f"{percent(gained)} of {percent(hoped)}", percent(share), f"{1 - gained / share:.2f}", part]
            else:
                row += ["", percent(share) if share else "-", "", ""]
        rows.append(row)
    note = ("The head's share is of its time alone (--head-ms)." if head_ms else
            "The head's share is of the step's multiply-adds; products of other shapes run at other speeds.")
    names = ("run", "tokens/s, median step", "with validations", "ms, median step", "all steps, of dense", "ms, median far step",
             "gained of promised, a far step", "head's share", "far head of dense head", "promised")
    return f"{table(names, rows)}\n{note}\n"


def far_table(runs):
    rows, times = [], []
    for run in runs:
        last = next((s["far_field"] for s in reversed(run.steps) if s.get("far_field")), None)
        if last is None:
            continue
        kept, audits, orders = run.kept(), run.audits(), run.orders()
        errors = [error for _, error in audits]
        first = next((s["step"] for s, far in zip(run.steps, run.far_steps()) if far), None)
        rows.append((run.name, percent(last["mean_selected"]), run.by_quarter(kept, statistics.fmean, percent),
                     percent(max((part for _, part in kept), default=0.0)),
                     two(statistics.median(errors)) if errors else "-",
                     run.by_quarter(audits, statistics.median, two), run.by_quarter(audits, max, two),
                     two(last["worst_accepted_error"]), f"{sum(e > run.wanted for e in errors)} of {last['audits']}"))
        times.append((run.name, f"{last['dense_steps']} of {last['steps']}", first or "none", last["repeated_steps"],
                      last["orders"], f"{1e3 * statistics.median([s for _, s in orders]):.0f}" if orders else "-",
                      percent(sum(s for _, s in orders) / sum(run.seconds()), 2) if orders else "-", f"{last['tau']:.2g}"))
    if not rows:
        return ""
    return "\n".join(
        [table(("run", "kept", "by quarter", "most", "audited error, median", "by quarter", "worst by quarter", "worst accepted",
                "audits that missed"), rows),
         table(("run", "dense steps", "first far step", "done again", "orders", "ms of an order, median",
                "of the run's steps", "last tau"), times)])


def text_table(folders):
    """Returns a table of the training text."""
    for folder in folders:
        if (folder / "text.json").exists():
            made = json.loads((folder / "text.json").read_text(encoding="utf-8"))
            rows = []
            for kind, row in sorted(made["kinds"].items(), key=lambda item: -item[1]["bytes"]):
                tokens = [f"{t['train']['by_kind'].get(kind, 0) / 1e6:.2f}M" for t in made["vocab"].values()]
                rows.append((kind, row["files"], f"{row['bytes'] / 1e6:.1f} MB", *tokens))
            whole = [f"{t['train']['tokens'] / 1e6:.2f}M, {t['val']['tokens']} held out" for t in made["vocab"].values()]
            rows.append(("all", sum(r["files"] for r in made["kinds"].values()),
                         f"{sum(r['bytes'] for r in made['kinds'].values()) / 1e6:.1f} MB", *whole))
            return "## Text\n" + table(("kind", "files", "bytes", *(f"tokens, vocabulary {v}" for v in made["vocab"])), rows) + "\n"
    return ""


def read_runs(folders):
    groups = defaultdict(list)
    for folder in folders:
        for path in sorted([*folder.glob("*.jsonl"), *folder.glob("*.jsonl.gz")]):
            run = Run(path)
            groups[run.kind].append(run)
    return groups


def write_report(folders, out, promised, head_ms):
    groups = read_runs(folders)
    if not groups:
        print(f"far_proof: expected logs (*.jsonl.gz) in {', '.join(map(str, folders))}, found none")
        return 1
    out.mkdir(parents=True, exist_ok=True)
    text = text_table(folders)
    for kind, runs in sorted(groups.items(), key=str):
        runs.sort(key=lambda run: (WAYS.index(run.way), run.seed))
        dense = {run.seed: run for run in runs if run.way == "dense"}
        name, layers, dim, vocab, tokens, length, _, steps = kind
        title = f"{name}, {layers} layers of {dim}, vocabulary {vocab}, {tokens} tokens a step"
        header = runs[0].header
        epochs = tokens * steps / header["train_tokens"]
        text += (f"## {title}\n{steps} steps, {tokens * steps / 1e6:.1f}M tokens, {epochs:.2f} times the "
                 f"{header['train_tokens'] / 1e6:.1f}M there are; rows of {length}; {header['model']['dtype']}, "
                 f"{header['device']}, logitless {header['logitless']}\n\n")
        text += "\n".join((loss_table(runs, dense), speed_table(runs, dense, promised, head_ms), far_table(runs))) + "\n"
    (out / "report.md").write_text(text, encoding="utf-8")
    print(text)
    return 0
