#!/usr/bin/env python3
"""Measures the far field on real heads: selected tiles, errors and times of forward and backward against the dense plan.

    python3 bench/far_field.py --logitless build/src/cli/logitless real_head_late.safetensors
                               [--dim 1024] [--rows 1536] [--tau 0.003] [--repeat 5] [--rounds 3] [--dtype bf16]
                               [--sample-every 16] [--order first|between|same]

The order is made from the first --rows tokens, everything else is measured on the last --rows, which are unseen tokens
of other text. --order between makes it from tokens spread over the file, and measures others between them; --order same
measures the same tokens. --dim multiplies hidden and weight by a random orthonormal [d, dim], which preserves logits.

Times are medians of --repeat calls, in --rounds rounds in which plans alternate; the median of each round's ratio is
printed. Errors are relative L2 errors of the fp32 gradients against the dense plan's. Those of d_weight are also listed
by rows, sorted by the size of the dense gradient; those of d_hidden by the worst tokens. With --sample-every N d_weight
is corrected by a sample, and the error of the mean over N seeds is printed as well.
"""

import argparse
import json
import statistics
import struct
import subprocess
import tempfile
from pathlib import Path

import numpy as np

PLANS = ("dense", "far-backward", "far-both")
ROWS = (0, 1024, 8192, 32768)  # begins of the classes of d_weight's rows, by size


def load(path):
    """Returns the tensors of a safetensors file; bf16 is widened to float32."""
    if not Path(path).is_file():
        raise SystemExit(f"{path} is not there; bench/heads/README.md says how a head is made")
    raw = Path(path).read_bytes()
    size = struct.unpack("<Q", raw[:8])[0]
    kinds = {"BF16": np.uint16, "I8": np.int8, "F32": np.float32, "I32": np.int32, "I64": np.int64}
    out = {}
    for name, tensor in json.loads(raw[8 : 8 + size]).items():
        if name == "__metadata__":
            continue
        first, last = tensor["data_offsets"]
        values = np.frombuffer(raw[8 + size + first : 8 + size + last], kinds[tensor["dtype"]]).reshape(tensor["shape"])
        out[name] = (values.astype(np.uint32) << 16).view(np.float32) if tensor["dtype"] == "BF16" else values
    return out


def save(path, tensors):
    """Writes float32 and int32 arrays as safetensors."""
    header, data = {}, b""
    for name, values in tensors.items():
        kind = {"float32": "F32", "int32": "I32"}[str(values.dtype)]
        header[name] = {"dtype": kind, "shape": values.shape, "data_offsets": [len(data), len(data) + values.nbytes]}
        data += values.tobytes()
    text = json.dumps(header).encode()
    Path(path).write_bytes(struct.pack("<Q", len(text)) + text + data)


def rotated(tensors, dim):
    """Returns the head rotated into `dim` dimensions, with the same logits."""
    weight = tensors["weight"] if "weight" in tensors else tensors["weight_q"] * tensors["weight_scale"][:, None]
    hidden, weight = tensors["hidden"].astype(np.float32), weight.astype(np.float32)
    if dim and dim != hidden.shape[1]:
        basis = np.linalg.qr(np.random.default_rng(0).normal(size=(dim, hidden.shape[1])))[0].T.astype(np.float32)
        hidden, weight = hidden @ basis, weight @ basis
    return {"hidden": hidden, "weight": weight, "targets": tensors["targets"].astype(np.int32)}


def relative(got, exact):
    """Returns the relative L2 error."""
    return float(np.linalg.norm(got - exact) / np.linalg.norm(exact))


def of_order(tensors, rows, order):
    """Returns the tokens that the order is made from, then those that are measured."""
    tokens = len(tensors["hidden"])
    first, last = np.arange(rows), np.arange(tokens - rows, tokens)
    if order == "same":
        first = last
    elif order == "between":
        step = tokens // rows
        if step < 2:
            raise SystemExit(f"far_field: --order between: expected --rows of half of the {tokens} tokens at most, got {rows}")
        first = np.arange(rows) * step
        last = first + step // 2
    chosen = np.concatenate([first, last])
    return {**tensors, "hidden": tensors["hidden"][chosen], "targets": tensors["targets"][chosen]}


def by_tokens(got, exact):
    """Returns the errors of d_hidden's worst tokens, and the error without them."""
    errors, sizes = np.linalg.norm(got - exact, axis=1), np.linalg.norm(exact, axis=1)
    squares = np.sort(errors.astype(np.float64) ** 2)[::-1]
    rest = np.sqrt(squares[16:].sum()) / np.linalg.norm(exact)
    off = errors / np.maximum(sizes, 1e-30)
    return (f"{'':13s} dx: of the squared error {squares[:4].sum() / squares.sum():.2f} by the worst 4 tokens, {squares[:16].sum() / squares.sum():.2f} by 16, "
            f"{rest:.5f} without them; {(off > 0.1).sum()} tokens off by more than a tenth, {(off > 0.5).sum()} by a half")


def by_rows(got, exact):
    """Returns the errors of d_weight by classes of rows, and of the median row."""
    sizes = np.linalg.norm(exact, axis=1)
    order = np.argsort(-sizes, kind="stable")
    order = order[sizes[order] > 0.0]
    classes = [order[a:b] for a, b in zip(ROWS, (*ROWS[1:], None))]
    text = [f"{relative(got[rows], exact[rows]):.4f} from row {first}" for first, rows in zip(ROWS, classes) if len(rows)]
    median = np.median(np.linalg.norm(got - exact, axis=1)[order] / sizes[order])
    return f"{'':13s} dw by size of row: " + ", ".join(text) + f"; median row {median:.4f}"


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("head")
    parser.add_argument("--logitless", default="build/src/cli/logitless")
    parser.add_argument("--dim", type=int, default=0, help="0: as captured")
    parser.add_argument("--rows", type=int, default=1536)
    parser.add_argument("--tau", type=float, default=0.003)
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--dtype", default="f32")
    parser.add_argument("--threads", type=int, default=0)
    parser.add_argument("--sample-every", type=int, default=0)
    parser.add_argument("--order", choices=("first", "between", "same"), default="first")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        tensors = of_order(rotated(load(args.head), args.dim), args.rows, args.order)
        tokens = len(tensors["hidden"])
        head, order, out = (f"{folder}/{name}.safetensors" for name in ("head", "order", "out"))
        save(head, tensors)

        def loss(plan, *more):
            far = ["--budget", "64GiB"]
            if plan.startswith("far"):
                far = ["--tau", str(args.tau), "--sample-every", str(args.sample_every)]
            names = [text for name in ("hidden", "weight", "targets") for text in (f"--{name}", f"{head}:{name}")]
            command = [args.logitless, "loss", *names, "--dtype", args.dtype, "--plan", plan, "--threads", str(args.threads)]
            return json.loads(subprocess.run([*command, *far, *more, "--json"], check=True, capture_output=True).stdout)

        loss("far-both", "--first", str(args.rows), "--save-order", order)
        last = ["--skip", str(tokens - args.rows)]
        exact, seconds = None, {plan: [] for plan in PLANS}
        for plan in PLANS:
            far = ["--order", order, "--audit", str(args.rows)] if plan != "dense" else []
            result = loss(plan, *last, *far, "--out", out, "--grad-dtype", "f32")
            gradients = load(out)
            if exact is None:
                exact = gradients
                print(f"N={args.rows} D={result['dim']} V={result['vocab']} {args.dtype} kernel {result['kernel']}, "
                      f"{result['threads']} threads, loss {result['loss']:.4f}")
                continue
            error = {name: relative(gradients[name], exact[name]) for name in ("d_hidden", "d_weight")}
            print(f"{plan:13s} selected {result['selected']:.4f}  dx {error['d_hidden']:.5f}  dw {error['d_weight']:.5f}  "
                  f"loss {result['loss']:.4f}"
                  + (f"  bound {result['bound']:.4f}" if "bound" in result else
                     f"  lse rms {result['audited_lse_error']:.5f} max {result['audited_lse_error_max']:.4f}"))
            print(by_tokens(gradients["d_hidden"], exact["d_hidden"]))
            print(by_rows(gradients["d_weight"], exact["d_weight"]))
            mean = gradients["d_weight"].astype(np.float64) / max(args.sample_every, 1)
            for seed in range(1, args.sample_every):
                loss(plan, *last, "--order", order, "--sample-seed", str(seed), "--out", out, "--grad-dtype", "f32")
                mean += load(out)["d_weight"] / args.sample_every
            if args.sample_every > 0:
                print(by_rows(mean, exact["d_weight"]) + f"; mean over {args.sample_every} seeds")
        for _ in range(args.rounds):
            for plan in PLANS:
                far = ["--order", order] if plan != "dense" else []
                seconds[plan].append(loss(plan, *last, *far, "--repeat", str(args.repeat))["seconds"])
        for plan in PLANS if args.rounds > 0 else ():
            ratio = statistics.median(a / b for a, b in zip(seconds[plan], seconds["dense"]))
            print(f"{plan:13s} {statistics.median(seconds[plan]) * 1e3:8.1f} ms  {ratio:.3f} of dense")


if __name__ == "__main__":
    main()
