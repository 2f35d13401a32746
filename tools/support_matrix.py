#!/usr/bin/env python3
"""Writes docs/reference/support.md: which call runs on which device, in which dtype, by which kernel.

    LOGITLESS_LIBRARY=build/src/liblogitless.so tools/support_matrix.py [--check]

The library is asked for plans and programs of each device, which need not be present. Only the kernels' handling of
ignored tokens and the needs of CPU kernels are read from their tables in the sources. With --check nothing is written,
and the exit status is 1 if the page differs.
"""

import argparse
import ctypes
import functools
import os
import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs/reference/support.md"
for variable in ("LOGITLESS_CPU", "LOGITLESS_GPU_KERNELS"):
    os.environ.pop(variable, None)
sys.path.insert(0, str(ROOT / "python"))

from logitless import _build_info, _environment  # noqa: E402
from logitless import _library as c  # noqa: E402
from logitless._compiler import Program  # noqa: E402

CAPABILITIES = (75, 80, 86, 89, 90, 100, 120)
DTYPES = ("bf16", "f16", "f32")
REFUSED = (ValueError, NotImplementedError)
SIZES = dict(tokens=4096, dim=4096, vocab=128256)

PROGRAM = """graph head(%h: DT[64, 32], %w: DT[512, 32], %t: i64[64]) {
  %z = dot %h, %w contract(1; 1) : f32[64, 512]
  %lse = reduce_lse %z dims(1)
  %picked = pick %z, %t axis(1)
  %nll = sub %lse, %picked
  %loss = reduce_sum %nll dims(0)
  return loss: %loss
  differentiate loss wrt %h, %w
}
"""


# --- Questions to the library. A capability of 0 is the CPU.


@functools.cache
def context():
    """Makes a context of the kernel that runs on every processor, so that the page does not depend on this one."""
    options, handle = c.new(c.ContextOptions), ctypes.c_void_p()
    options.kernel = b"scalar"
    c.check(c.lib.logitless_context_create(ctypes.byref(options), ctypes.byref(handle)))
    return handle


def plan(capability, dtype, *, accuracy=0, kind=c.PLAN_ANY, **features):
    """Returns (kernel, kind) of a plan, or raises the library's refusal."""
    given, request = c.new(c.HeadFeatures), c.new(c.PlanRequest)
    given.dtype = c.DTYPES[dtype]
    gradients = c.DTYPES["f32" if dtype == "f16" else dtype]
    for name, value in dict(SIZES, d_hidden=1, d_weight=1, d_hidden_dtype=gradients, d_weight_dtype=gradients, **features).items():
        setattr(given, name, value)
    request.accuracy, request.kind, request.compute_capability = accuracy, kind, capability
    made, info = ctypes.c_void_p(), c.new(c.PlanInfo)
    c.check(c.lib.logitless_plan_head(context(), ctypes.byref(given), ctypes.byref(request), ctypes.byref(made)))
    c.check(c.lib.logitless_plan_get_info(made, ctypes.byref(info)))
    found = (info.kernel.decode(), info.kind)
    c.lib.logitless_plan_destroy(made)
    return found


def far(capability, dtype):
    """A kernel with the far field has both accuracies."""
    return plan(capability, dtype, accuracy=c.ACCURACY_FAR_BACKWARD)[1] == c.PLAN_FAR_BACKWARD


def saves_exponentials(capability, dtype):
    """A saved head is a dense plan, which the call makes one chunk of, on a GPU."""
    return capability != 0 and plan(capability, dtype, kind=c.PLAN_DENSE)[1] == c.PLAN_DENSE


def shards(capability, dtype):
    device = c.DEVICE_CUDA if capability else c.DEVICE_CPU
    return bool(c.lib.logitless_supports_vocab_parallel(device, capability, c.DTYPES[dtype], SIZES["dim"]))


def compiles(capability, dtype):
    device = dict(device=c.DEVICE_CUDA, compute_capability=capability) if capability else {}
    return bool(Program(PROGRAM.replace("DT", dtype), **device).text)


def skips(capability, dtype):
    """The CPU's engine drops ignored tokens before a kernel runs."""
    return capability == 0 or skipping()[plan(capability, dtype)[0]]


def skipping():
    """Returns whether a GPU kernel, by its name, skips ignored tokens in the forward; "all" if in the gradients, too,
    "expected" if in those of the tokens that expected_ignored leaves."""
    text = (ROOT / "src/kernels/cuda/head/kernels.cpp").read_text(encoding="utf-8")
    rows = re.findall(r'\.name = (\w+|"\w+"),.*?\.skips_ignored = (\w+),\s*\.gemms_skip = GemmsSkip::(\w+)', text, re.S)
    cells = {"ignored": "all", "beyond_expected": "expected", "nothing": "forward"}
    found = {name.strip('"'): cells[gemms] if yes == "true" else "" for name, yes, gemms in rows}
    shared = found.pop("name")  # of the function that makes the rows of these names
    found.update((name, shared) for name in re.findall(r'tiles_of_sm80\(\s*"(\w+)"', text))
    named = dict(re.findall(r'DeviceKernel (\w+) = \{\.name = "(\w+)"', text))
    copies = re.findall(r'DeviceKernel kernel = (\w+);\s*kernel\.name = "(\w+)"', text)
    return {**found, **{name: found[named[of]] for of, name in copies}}


def beside_f32(capability, dtype):
    narrow = 0 if dtype == "f32" else c.DTYPES[dtype]
    return bool(plan(capability, "f32", narrow_hidden=narrow) and plan(capability, "f32", narrow_weight=narrow))


CALLS = (
    ("loss and gradients: `linear_cross_entropy`, `lazy_head`", lambda k, d: bool(plan(k, d))),
    ("the same of one tensor in f32 beside the other", beside_f32),
    ("log-probabilities, entropy: `linear_logprobs`", lambda k, d: bool(plan(k, d, entropy=1, entropy_gradient=1))),
    ("the same with `selected_ids`", lambda k, d: bool(plan(k, d, targets_per_token=65, entropy=1, entropy_gradient=1))),
    ("a temperature of each token; with bias or softcap, or in 16 bits on a GPU, in the framework's operations", lambda k, d: True),
    ("over kept sets: `linear_kept_logprobs`, in the framework's operations", lambda k, d: True),
    ("[ready losses](../use/ready_losses.md)", lambda k, d: bool(plan(k, d, entropy=1, entropy_gradient=1))),
    ("several heads: `losses.multi_token_loss`", lambda k, d: bool(plan(k, d, argmax=1, label_smoothing=1))),
    ("exponentials saved until the backward, one GEMM less", saves_exponentials),
    ("[far field](../use/far_field.md)", far),
    ("[vocabulary over ranks](../use/distributed.md)", shards),
    ("[`autochunk`](../use/autochunk.md), the library's executor", compiles),
    ("ignored tokens are skipped", skips),
)


def served(call, capability):
    """Returns a cell: the dtypes that are served."""
    found = {}
    for dtype in DTYPES:
        try:
            said = call(capability, dtype)
        except REFUSED:
            said = False
        if said:
            found[dtype] = "" if said in (True, "all") else f" ({said})"
    if len(found) == len(DTYPES) and not any(found.values()):
        return "all"
    return ", ".join(dtype + note for dtype, note in found.items()) or "no"


def kernel(capability, dtype):
    try:
        return f"`{plan(capability, dtype)[0]}`"
    except REFUSED:
        return "none"


def cards():
    """Returns the known cards by their compute capability."""
    try:
        c.explain(1, 8, 8, device="cuda", card="?")
    except ValueError as error:
        names = str(error).partition("expected one of ")[2].split(", ")
    found = {}
    for name in names:
        try:  # the refusal of another capability than the card's names the card's
            c.explain(1, 8, 8, device="cuda", card=name, compute_capability=999)
        except ValueError as error:
            found.setdefault(int(re.search(r"the card's (\d+)", str(error))[1]), []).append(name)
    return found


# --- The page.


def table(head, rows):
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def devices():
    """Yields (title, capability) of the columns; capabilities that are served alike share one."""
    columns = []
    for capability in (0, *CAPABILITIES):
        cells = [served(call, capability) for _, call in CALLS]
        kernels = [kernel(capability, dtype) for dtype in DTYPES]
        title = "CPU" if capability == 0 else f"{capability / 10}"
        if columns and columns[-1][1:] == (cells, kernels):
            columns[-1] = (f"{columns[-1][0]}, {title}", cells, kernels)
        else:
            columns.append((title, cells, kernels))
    return columns


NEEDS = {"always": "nothing", "avx2": "AVX2", "avx512": "AVX-512", "dot": "AVX-512 with its bf16 dot product", "amx": "AMX bf16"}


def cpu_kernels():
    text = (ROOT / "src/kernels/cpu/simd_kernels.cpp").read_text(encoding="utf-8")
    rows = re.findall(r'"(\w+)",\s*(\w+)_runnable,\s*[\d.e]+(,\s*supports_bf16)?\)', text)
    assert len(rows) > 6, "the table of CPU kernels reads otherwise now"
    seen = {}
    for name, need, only in rows:
        note = "; NEON, for ARM" if name == "neon" else "; a test of the AMX kernel" if name.endswith("emulated") else ""
        seen.setdefault(name, [f"`{name}`", NEEDS[need] + note, "bf16" if only else "all"])
    return list(seen.values())


def pyproject(pattern):
    return re.search(pattern, (ROOT / "pyproject.toml").read_text(encoding="utf-8"))[1]


def page():
    columns = devices()
    gpus = columns[1:]
    known = cards()
    python, torch, jax = (pyproject(rf'{name}>=([\d.]+)"') for name in ("requires-python = \"", "torch", "jax"))
    return f"""# What is supported
After this page you know which call runs on your device, in which dtype, by which kernel, and what an
installation needs. `python -m logitless` says the same of your machine.

`tools/support_matrix.py` makes this page by asking the library for plans; a test compares it.

## Calls and devices
GPUs by compute capability. A cell has the dtypes of hidden and weight that are served; *all* is
{", ".join(DTYPES)}. float64 runs on the framework's own operations.

{table(["call", *(title for title, _, _ in columns)], [[name, *(cells[k] for _, cells, _ in columns)] for k, (name, _) in enumerate(CALLS)])}

- *(expected)*: ignored tokens cost nothing in the forward, in the gradients those that `expected_ignored` announces
  ([gpu.md](../use/gpu.md#ignored-tokens)).
- `autochunk` runs generated PyTorch or JAX on every device of the framework where the library does not
  take a program, and says so ([autochunk.md](../use/autochunk.md#which-executor)).
- *no* of a loss, and other devices (AMD, TPU, Apple, Intel): PyTorch's and JAX's own operations, chunk by chunk,
  for losses, log-probabilities, ready losses and samples ([pytorch.md](../use/pytorch.md#every-device),
  [jax.md](../use/jax.md#which-devices)).

## GPU kernels
The kernel of a head of {SIZES["dim"]} x {SIZES["vocab"]}; of other widths [gpu.md](../use/gpu.md#which-kernels) says more.

{table(["dtype", *(title for title, _, _ in gpus)], [[dtype, *(kernels[k] for _, _, kernels in gpus)] for k, dtype in enumerate(DTYPES)])}

Cards whose rates are known:

{chr(10).join(f"- {k / 10}: {', '.join(names)}" for k, names in sorted(known.items()))}

Kernels were measured on H100 and H200 alone ([gpu.md](../use/gpu.md#which-kernels)).

## CPU kernels
The first that runs on the processor and takes the dtype is chosen, `avx512` before `avx512_bf16` where that is
faster.

{table(["kernel", "needs", "dtypes"], cpu_kernels())}

## Versions
| | |
|---|---|
| Python | {python} or later |
| PyTorch | {torch} or later |
| JAX | {jax} or later |
| operating system | Linux; wheels are for x86-64, glibc as their manylinux tag says |
| compiler | g++ with C++20 |
| CUDA | nvcc 12 or later for a build with GPU kernels; libraries of CUDA 12 or 13 at run time |

`pip install .` builds GPU kernels where nvcc is in `PATH` or /usr/local/cuda, and a library for the CPU
elsewhere. JAX's handlers are built with the headers of the jaxlib that pip fetches for the build.

## Environment variables
{table(["variable", "meaning", "not set"], [[f"`{v.name}`", v.meaning, v.unset] for v in _environment.VARIABLES])}

Those that the build and the tests read are in [CONTRIBUTING.md](../../CONTRIBUTING.md).
"""


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="compare only")
    args = parser.parse_args()
    if args.check:
        if PAGE.read_text(encoding="utf-8") != page():
            sys.exit(f"support_matrix.py: {PAGE.relative_to(ROOT)} differs; run tools/support_matrix.py")
    else:
        PAGE.write_text(page(), encoding="utf-8")


if __name__ == "__main__":
    main()
