"""Compares losses of trained models on the same held-out tokens, token by token; needs PyTorch."""

import json
from pathlib import Path

import torch

from far_proof_head import Head

BANDS = 4  # bands of targets, by frequency in training, with equally many tokens


def of_models(folders, token_folder, tokens, device):
    """Returns losses [N] of each model, targets [N], counts [V] in the training data, and tokens per window."""
    losses = []
    for folder in folders:
        head = Head(folder, token_folder, tokens, device)
        losses.append(head.losses().double())
    length = json.loads((folders[0] / "config.json").read_text(encoding="utf-8"))["n_positions"]
    return losses, head.targets, head.counts, length


def mean_and_error(values, length):
    """Returns the mean and its standard error; windows are independent, tokens of one window are not."""
    whole = values[: len(values) // length * length].view(-1, length).mean(1)
    return values.mean().item(), (whole.std() / len(whole) ** 0.5).item() if len(whole) > 1 else float("nan")


def bands(targets, counts):
    """Groups tokens by the frequency of their target in training, the most frequent first: (least, most, positions)."""
    order = torch.sort(counts[targets], descending=True, stable=True).indices
    return [(counts[targets[part[-1]]].item(), counts[targets[part[0]]].item(), part) for part in order.chunk(BANDS)]


def losses(args):
    folders = [args.folder, *args.others]
    found, targets, counts, length = of_models(folders, args.words, args.tokens, args.device)
    text = f"{len(targets)} held-out tokens, windows of {length}\n\n"
    text += f"| model | loss, nats | minus {folders[0].name} |\n|---|---|---|\n"
    numbers = {"tokens": len(targets), "models": {}}
    for folder, values in zip(folders, found):
        mean, off = mean_and_error(values, length)
        row = {"loss": mean, "standard_error": off}
        cell = ""
        if values is not found[0]:
            row["minus_first"], row["minus_first_standard_error"] = mean_and_error(values - found[0], length)
            cell = f"{row['minus_first']:+.4f} ({row['minus_first_standard_error']:.4f})"
            row["bands"] = [{"learnt": [least, most], "loss": values[part].mean().item(),
                             "minus_first": (values - found[0])[part].mean().item()}
                            for least, most, part in bands(targets, counts)]
        numbers["models"][folder.name] = row
        text += f"| {folder.name} | {mean:.4f} ({off:.4f}) | {cell} |\n"
    text += "\nIn brackets: standard errors, of windows.\n"
    for name, row in numbers["models"].items():
        if "bands" in row:
            text += f"{name}, tokens learnt from so often: " + "; ".join(
                f"{b['learnt'][0]} to {b['learnt'][1]}: {b['loss']:.4f}, {b['minus_first']:+.4f}" for b in row["bands"]) + "\n"
    out = Path(args.out or args.folder.parent)
    out.mkdir(parents=True, exist_ok=True)
    (out / "losses.md").write_text(text, encoding="utf-8")
    (out / "losses.json").write_text(json.dumps(numbers, indent=1), encoding="utf-8")
    print(text)
    return 0
