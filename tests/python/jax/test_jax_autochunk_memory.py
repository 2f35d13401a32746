"""The memory that chunked functions take, measured by XLA."""

import re

import jax
import pytest
from autochunk_losses import (
    DIM,
    LOGITS,
    ROWS,
    VOCAB,
    arguments,
    check_same,
    cross_entropy,
    dpo,
    exactly,
    floats,
    per_token,
    random,
    run,
    targets,
    two_heads,
)
from jax_oracle import GRADIENT_ERROR

from logitless.jax import autochunk


def temporaries(function, *args) -> int:
    """Returns bytes of XLA's temporaries, without the scratch of cuBLAS that XLA's autotuner adds on a GPU: 32 MiB on a
    Hopper."""
    compiled = jax.jit(function).lower(*args).compile()
    workspaces = re.findall(r's8\[(\d+)\].* custom-call\(.*custom_call_target="__cublas', compiled.as_text())
    return compiled.memory_analysis().temp_size_in_bytes - max(map(int, workspaces), default=0)


@pytest.mark.parametrize(
    ("fn", "budget"),
    [(cross_entropy, "1MiB"), (per_token, "640KiB"), (two_heads, "1MiB"), (dpo, "640KiB")],
    ids=lambda v: getattr(v, "__name__", v),
)
def test_budgets_are_met(fn, budget):
    """The generated function meets the budget, and so does the jitted code around it."""
    rows, vocab = 400, 3000
    shapes = {ROWS: rows, VOCAB: vocab}
    args = arguments(fn)
    args = [jax.ShapeDtypeStruct([shapes.get(s, s) for s in a.shape], a.dtype) for a in args]
    chunked = autochunk(fn, memory_budget=budget)
    text = chunked.explain(*args)
    assert "met)" in text and "NOT met" not in text, text
    allowed = {"640KiB": 640, "1MiB": 1024}[budget] * 1024
    by = floats(args)
    assert temporaries(jax.value_and_grad(lambda *a: chunked(*a).sum(), by), *args) <= 1.5 * allowed
    assert temporaries(jax.value_and_grad(lambda *a: fn(*a).sum(), by), *args) > rows * vocab * 4


def test_a_head_holds_far_less_than_its_logits():
    n, d, v = 2048, 64, 8192
    args = [jax.ShapeDtypeStruct(*s) for s in (((n, d), "float32"), ((v, d), "float32"), ((n,), "int32"))]
    logits = n * v * 4
    step = jax.value_and_grad(autochunk(cross_entropy, chunks=16), (0, 1))
    assert temporaries(step, *args) < logits / 6
    budget = jax.value_and_grad(autochunk(cross_entropy, memory_budget="6MiB"), (0, 1))
    assert temporaries(budget, *args) <= 6 * 2**20 < logits / 10
    assert temporaries(jax.value_and_grad(cross_entropy, (0, 1)), *args) >= logits


def test_what_explain_says_is_what_xla_says():
    args = arguments(cross_entropy)
    chunked = autochunk(cross_entropy, memory_budget="64KiB")
    text = chunked.explain(*args)
    assert "outputs and gradients in one pass" in text and "without loops" in text
    before, after, *_ = (float(n) for n in re.findall(r"([\d.]+) KiB", text[text.index("forward_and_gradients:") :]))
    assert before >= LOGITS * 4 / 1024 > after and after <= 64
    space = {}
    exec(chunked.source(), space)
    assert abs(temporaries(space["forward_and_gradients"], *args) / 1024 - after) <= 0.06


def test_chunks_of_the_vocabulary():
    """With few rows the vocabulary is cut, and indices count from the first vocabulary entry of the chunk."""
    args = random(2, DIM), random(20000, DIM), targets(2, 20000, ignored=1)
    chunked = autochunk(cross_entropy, memory_budget="64KiB")  # less than a row of logits
    check_same(run(chunked, args), exactly(cross_entropy, args), GRADIENT_ERROR["float32"])
    assert "20000 in " in chunked.explain() and "jnp.logaddexp(" in chunked.source()
    assert "forward_and_gradients" in chunked.source() and "2 phases" in chunked.explain()
