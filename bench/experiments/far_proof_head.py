"""Reads the head of a model from `logitless train --export`, or from the checkpoint of a stopped run, and computes hidden
states of held-out tokens; needs PyTorch."""

import json
import struct
import sys
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from far_field import load  # noqa: E402

ROWS = 1024  # tokens whose logits are held at a time
TILES = 16 * 128  # a truncated vocabulary is a multiple of it


class Head:
    """A head: hidden [N, D] and weight [V, D], f32 with bf16 values; targets [N] i64; counts [V] in the training
    data."""

    def __init__(self, folder, token_folder, tokens, device):
        tensors, length, heads = read_model(folder, device)
        self.vocab, self.dim = tensors["wte.weight"].shape
        stream = read_tokens(token_folder / f"val_{self.vocab}.bin")
        windows = min(-(-tokens // length), (len(stream) - 1) // length)
        if windows < 1:
            raise SystemExit(f"far_proof: --words: expected {length + 1} held-out tokens, found {len(stream)}")
        text = torch.from_numpy(stream[: windows * length + 1].astype(np.int64)).to(device)
        hidden = [gpt2_hidden(tensors, heads, part) for part in text[:-1].view(windows, length).split(4)]
        self.hidden = rounded(torch.cat(hidden).flatten(0, 1)[:tokens])
        self.targets = text[1:][:tokens]
        self.weight = rounded(tensors.get("lm_head.weight", tensors["wte.weight"]))
        train = read_tokens(token_folder / f"train_{self.vocab}.bin")
        self.counts = torch.from_numpy(np.bincount(train, minlength=self.vocab)).to(device)
        self.device = self.hidden.device

    def losses(self, weight=None, targets=None):
        """Returns the loss of each token in nats."""
        weight, targets = self.weight if weight is None else weight, self.targets if targets is None else targets
        return torch.cat([F.cross_entropy(x @ weight.T, t, reduction="none")
                          for x, t in zip(self.hidden.split(ROWS), targets.split(ROWS))])


def read_model(folder, device):
    """Returns the tensors of a GPT-2 by name, its context and its number of heads."""
    exported = folder / "config.json"
    if exported.exists():
        config = json.loads(exported.read_text(encoding="utf-8"))
        if config["model_type"] != "gpt2":
            raise SystemExit(f"far_proof: {folder}: expected a GPT-2, got {config['model_type']}")
        tensors, length, heads = load(folder / "model.safetensors"), config["n_positions"], config["n_head"]
    else:
        checkpoint = folder / "run.safetensors"
        if not checkpoint.exists():
            raise SystemExit(f"far_proof: {folder}: expected config.json of --export, or run.safetensors of --save; there is neither")
        config = json.loads(metadata(checkpoint)["config"])
        tensors, length, heads = load(checkpoint), config["context"], config["heads"]
        if "wpe.weight" not in tensors:
            raise SystemExit(f"far_proof: {checkpoint}: expected a GPT-2, which has wpe.weight")
    return {name: torch.from_numpy(t.copy()).to(device) for name, t in tensors.items() if not name.startswith("optimizer.")}, length, heads


def metadata(path):
    """Returns the metadata of a safetensors file."""
    with path.open("rb") as file:
        return json.loads(file.read(struct.unpack("<Q", file.read(8))[0]))["__metadata__"]


def rounded(tensor):
    return tensor.to(torch.bfloat16).float()


def read_tokens(path):
    """Maps the tokens of a file of llm.c."""
    magic, _, count = struct.unpack("<3i", path.open("rb").read(12))
    return np.memmap(path, "<u2" if magic == 20240520 else "<u4", "r", 1024, (count,))


@torch.no_grad()
def gpt2_hidden(t, heads, tokens):
    """Computes hidden states after the last norm, in f32: [B, T] -> [B, T, D]."""
    dim = t["wte.weight"].shape[1]

    def norm(x, name):
        return F.layer_norm(x, (dim,), t[f"{name}.weight"], t[f"{name}.bias"])

    def product(x, name):  # transformers' Conv1D: [in, out]
        return x @ t[f"{name}.weight"] + t[f"{name}.bias"]

    x = t["wte.weight"][tokens] + t["wpe.weight"][: tokens.shape[1]]
    for i in range(sum(name.endswith(".ln_1.weight") for name in t)):
        q, k, v = (part.unflatten(-1, (heads, -1)).transpose(1, 2)
                   for part in product(norm(x, f"h.{i}.ln_1"), f"h.{i}.attn.c_attn").chunk(3, -1))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
        x = x + product(y, f"h.{i}.attn.c_proj")
        x = x + product(F.gelu(product(norm(x, f"h.{i}.ln_2"), f"h.{i}.mlp.c_fc"), approximate="tanh"), f"h.{i}.mlp.c_proj")
    return norm(x, "ln_f")


def log_lines(folder):
    """Returns the lines of the run's log, which is next to the folder; none without a log."""
    path = folder.with_name(folder.name + ".jsonl")
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()] if path.exists() else []


def log_header(folder):
    """Returns the first line of the run's log; None without a log."""
    return next(iter(log_lines(folder)), None)


def steps_of(folder):
    """Returns the steps that the model was trained for, from the run's log; "?" without a log."""
    if not (folder / "config.json").exists():
        return metadata(folder / "run.safetensors")["step"]
    return max((line["step"] for line in log_lines(folder) if "step" in line), default="?")


def quantised(weight, bits):
    """Quantises rows to int8 with a factor each, for bench_head --real-head and the tests. 4-bit steps are 0.4 of a
    row's root mean square, so that compressed numbers take 3.4 bits each."""
    if bits == 8:
        scale = weight.abs().amax(1, keepdim=True).clamp_min(1e-30) / 127
    else:
        scale = 0.4 * weight.pow(2).mean(1, keepdim=True).sqrt().clamp_min(1e-30)
    return torch.round(weight / scale).clamp(-(2 ** (bits - 1)), 2 ** (bits - 1) - 1).to(torch.int8), scale


def write_capture(path, tensors, about):
    """Writes tensors: name -> (dtype of safetensors, numpy array)."""
    header, at = {"__metadata__": about}, 0
    for name, (kind, values) in tensors.items():
        header[name] = {"dtype": kind, "shape": values.shape, "data_offsets": [at, at + values.nbytes]}
        at += values.nbytes
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with open(path, "wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for _, values in tensors.values():
            file.write(values.tobytes())


def vocab_that_fits(head, most):
    """Returns the most frequent token ids, ascending, whose int8 rows fit into `most` bytes with the hidden states;
    all if they fit."""
    room = int((most - head.hidden.numel() * 2 - len(head.targets) * 4 - 4096) // (head.dim + 4))
    if room >= head.vocab:
        return torch.arange(head.vocab, device=head.device)
    if room < TILES:
        raise SystemExit(f"far_proof: --most: no {TILES} vocabulary entries of {head.dim} numbers fit beside the hidden states; "
                         "fewer --tokens")
    vocab_ids = torch.sort(head.counts, descending=True, stable=True).indices[: room // TILES * TILES]
    return torch.sort(vocab_ids).values


def capture(args):
    """Writes the head to a file. Tokens whose targets were removed are left out; the softmax is over the remaining
    vocabulary."""
    head = Head(args.folder, args.words, args.tokens, args.device)
    before = head.losses().mean().item()
    vocab_ids = vocab_that_fits(head, args.most)
    place = torch.full((head.vocab,), -1, device=head.device)
    place[vocab_ids] = torch.arange(len(vocab_ids), device=head.device)
    targets = place[head.targets]
    kept = targets >= 0
    head.hidden, targets = head.hidden[kept], targets[kept]
    q, scale = quantised(head.weight[vocab_ids], args.bits)
    after = head.losses(rounded(q.float() * scale), targets).mean().item()
    run = log_header(args.folder) or {}
    about = {"what": f"Head of a GPT-2 trained by logitless train: {len(vocab_ids)} of {head.vocab} vocabulary entries (the most frequent), "
                     f"hidden states and next tokens of {len(targets)} held-out tokens. weight = bf16(weight_q * "
                     "weight_scale[:, None]).",
             "training": f"{steps_of(args.folder)} of {run.get('steps', '?')} steps of {run.get('tokens_per_step', '?')} tokens",
             "loss": f"{before:.4f} nats a token with all entries in bf16, {after:.4f} with these in {args.bits} bits"}
    write_capture(args.out, {
        "hidden": ("BF16", head.hidden.to(torch.bfloat16).cpu().view(torch.int16).numpy()), "weight_q": ("I8", q.cpu().numpy()),
        "weight_scale": ("F32", scale[:, 0].float().cpu().numpy()), "targets": ("I32", targets.int().cpu().numpy())}, about)
    print(f"{args.out}: {Path(args.out).stat().st_size / 2**20:.1f} MiB; " + "; ".join(about.values()))
    return 0
