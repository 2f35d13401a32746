"""Attention in autochunk: F.scaled_dot_product_attention as one operation, with both executors."""

import math

import logitless.torch
import pytest

torch = pytest.importorskip("torch")

import torch.nn.functional as F
from generated import autochunk
from test_autochunk import DEVICE, Largest, check_same, copies, random, run

from logitless.torch._autochunk import function
from logitless.torch._autochunk.memory import Recorder

EXECUTORS = ["python", "native"]


def attend(**options):
    def fn(q, k, v):
        return F.scaled_dot_product_attention(q, k, v, **options)

    return fn


def heads(*shape, keys=None, dtype=torch.float32):
    """Returns q of a shape, and k and v of another shape or the same."""
    return [random(*s, dtype=dtype, seed=i, scale=0.7) for i, s in enumerate([shape, keys or shape, keys or shape])]


def is_one(chunked):
    """Returns whether the program has attention as one operation, in the form of its executor."""
    source = chunked.source()
    return "_attend(" in source or " = attention %" in source


@pytest.mark.parametrize("executor", EXECUTORS)
@pytest.mark.parametrize(
    "options, shape, keys",
    [
        ({}, (2, 3, 5, 8), (2, 3, 9, 8)),
        ({"is_causal": True}, (2, 3, 7, 8), None),
        ({"is_causal": True, "scale": 0.3}, (2, 3, 5, 8), (2, 3, 9, 8)),
        ({"is_causal": True}, (2, 3, 9, 8), (2, 3, 5, 8)),
        ({"is_causal": True, "enable_gqa": True}, (2, 6, 7, 8), (2, 2, 7, 8)),
        ({"enable_gqa": True}, (3, 4, 5, 8), (4, 9, 8)),
        ({"is_causal": True}, (6, 7, 8), None),
        ({}, (5, 8), (9, 8)),
        ({}, (2, 2, 3, 5, 8), (2, 2, 1, 9, 8)),
    ],
    ids=["plain", "causal", "more_keys", "fewer_keys", "grouped", "grouped_rank_3", "rank_3", "rank_2", "rank_5"],
)
def test_is_one_operation(executor, options, shape, keys):
    fn = attend(**options)
    chunked = autochunk(fn, executor=executor)
    args = heads(*shape, keys=keys)
    exact = [a.detach().double().requires_grad_() for a in args]
    outputs, grads = run(fn, exact)
    made, made_grads = run(chunked, args)
    for a, e in zip([*made, *made_grads], [*outputs, *grads]):
        assert a.shape == e.shape and a.dtype == torch.float32
        assert (a.double() - e).abs().max() <= 3e-6 * max(1, e.abs().max())
    assert is_one(chunked)


@pytest.mark.parametrize("executor", EXECUTORS)
def test_float64(executor):
    """No kernel of the library takes float64, so attention is written out."""
    for options, shape, keys in [
        ({"is_causal": True}, (2, 4, 7, 8), None),
        ({"is_causal": True}, (2, 4, 7, 8), (2, 4, 5, 8)),
        ({"enable_gqa": True}, (2, 4, 7, 8), (2, 2, 5, 8)),
    ]:
        fn = attend(**options)
        chunked = autochunk(fn, executor=executor)
        check_same(fn, chunked, heads(*shape, keys=keys, dtype=torch.float64), 1e-12)
        assert not is_one(chunked)


@pytest.mark.parametrize("executor", EXECUTORS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_of_16_bit(executor, dtype):
    fn = attend(is_causal=True)
    chunked = autochunk(fn, executor=executor)
    check_same(fn, chunked, heads(2, 2, 40, 16, dtype=dtype), 2e-2 if dtype == torch.bfloat16 else 4e-3)
    assert is_one(chunked)


def test_autocast():
    fn = attend(is_causal=True)
    chunked = autochunk(fn)
    args = heads(2, 2, 12, 16)
    with torch.autocast(DEVICE, dtype=torch.bfloat16):
        assert chunked(*args).dtype == torch.bfloat16
        check_same(fn, chunked, args, 2e-2)


@pytest.mark.parametrize("executor", EXECUTORS)
def test_memory_is_linear_in_the_length(executor):
    """Scores of 4 heads x 1024 x 1024 would be 16 MiB. The plan counts the memory that attention takes."""

    def fn(q, k, v):
        return F.scaled_dot_product_attention(q, k, v, is_causal=True).square().sum()

    args = heads(1, 4, 1024, 64)
    chunked = autochunk(fn, executor=executor)
    chunked(*args)
    plan = chunked.last.forward
    assert plan.before <= 4 << 20 and plan.after <= (2 << 20) + (64 << 10)
    if executor == "native" or DEVICE != "cpu":
        return
    inputs = [a.detach() for a in copies(args)]
    with torch.no_grad(), Recorder(inputs) as recorder:
        made = plan.function(*inputs)
    assert 0.99 * plan.after <= recorder.peak(made) <= plan.after


@pytest.mark.parametrize("dims", [(0, 2, 1, 3), (0, 3, 2, 1)], ids=["rows", "columns"])
def test_fused_kernels_run_for_any_strides(dims):
    def fn(q, k, v):
        return F.scaled_dot_product_attention(*(x.permute(dims) for x in (q, k, v)), is_causal=True).sum()

    args = heads(1, 64, 64, 4)
    chunked = autochunk(fn)
    check_same(fn, chunked, args, 1e-5)
    if DEVICE == "cpu":
        with Largest() as largest:
            chunked(*args)
        assert largest.numbers <= 64 * 64 * 4


def test_gradients_backward():
    """The backward recomputes the log-sum-exps that the forward did not save."""
    fn = attend(is_causal=True, enable_gqa=True)
    for executor in EXECUTORS:
        chunked = autochunk(fn, executor=executor, gradients="backward")
        check_same(fn, chunked, heads(2, 4, 9, 8, keys=(2, 2, 9, 8)), 1e-5)


@pytest.mark.parametrize("chunks", [0, 2, 3])
def test_heads_are_cut(chunks):
    """Chunks of grouped queries are whole groups; log-sum-exps are not saved between loops."""

    def fn(q, k, v, w):
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return torch.tanh(y * w).square().mean()

    args = [*heads(3, 6, 16, 8, keys=(3, 3, 16, 8)), random(3, 6, 16, 8, dtype=torch.float32)]
    chunked = autochunk(fn, chunks=chunks)
    check_same(fn, chunked, args, 1e-5)
    if chunks:
        assert "for start in" in chunked.source()


def masked(q, k, v, mask):
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask)


@pytest.mark.parametrize("executor", EXECUTORS)
@pytest.mark.parametrize("shape", [(7, 9), (4, 7, 9), (2, 1, 1, 9), (2, 4, 7, 1)], ids=str)
@pytest.mark.parametrize("boolean", [False, True])
def test_masks(executor, shape, boolean):
    if DEVICE != "cpu" and shape[-1] == 1:
        pytest.skip("PyTorch's kernels of a GPU take no mask of one column")
    mask = random(*shape, dtype=torch.float32).detach()
    mask = mask > -0.5 if boolean else mask
    for dtype, tolerance in ((torch.float32, 1e-5), (torch.float64, 1e-12)):
        args = heads(2, 4, 7, 8, keys=(2, 4, 9, 8), dtype=dtype)
        chunked = autochunk(masked, executor=executor, chunks=2)
        check_same(masked, chunked, [*args, mask if boolean else mask.to(dtype)], tolerance)
        assert is_one(chunked) == (dtype == torch.float32 and (executor == "python" or DEVICE == "cpu"))


def test_what_is_no_attention_of_the_ir_is_spelled_out():
    args = [*heads(2, 2, 5, 8, dtype=torch.float32), random(1, 2, 5, 5, dtype=torch.float32)]
    chunked = autochunk(masked)
    check_same(masked, chunked, args, 1e-5)  # including the gradient of the mask
    assert not is_one(chunked)
    q, k, v = heads(2, 2, 5, 8, dtype=torch.float64)
    longer = autochunk(attend())
    check_same(attend(), longer, [q, k, random(2, 2, 5, 12)], 1e-12)
    assert not is_one(longer)


def layers(count, causal):
    def fn(x, weights):
        for w in weights:
            q, k, v = ((x @ part).view(2, 24, 2, 8).transpose(1, 2) for part in w)
            x = x + F.scaled_dot_product_attention(q, k, v, is_causal=causal).transpose(1, 2).reshape(x.shape)
        return x.square().mean()

    weights = [random(3, 16, 16, dtype=torch.float32, seed=i) for i in range(count)]
    return fn, [random(2, 24, 16, dtype=torch.float32), weights]


@pytest.mark.parametrize("causal", [False, True])
def test_layers_share_no_mask(causal):
    """The source grows by the same lines for each layer, and no [T, T] value is made."""
    lines = []
    for count in (2, 4):
        fn, args = layers(count, causal)
        chunked = autochunk(fn, chunks=0)
        assert math.isclose(chunked(*args).item(), fn(*args).item(), rel_tol=1e-6)
        source = chunked.source()
        assert "24, 24" not in source and "arange" not in source
        lines.append(len(source.splitlines()))
    assert lines[1] <= 2 * lines[0] and lines[1] - lines[0] <= 2 * 64


def test_layers_share_one_mask():
    """Attention written as a softmax: the mask is made once forward and once backward, and each layer adds as many
    lines."""

    def fn(x, weights):
        place = torch.arange(24, device=x.device)
        seen = place[:, None] >= place[None, :]
        for w in weights:
            q, k, v = ((x @ part).view(2, 24, 2, 8).transpose(1, 2) for part in w)
            p = (q @ k.mT).masked_fill(~seen, float("-inf")).softmax(-1)
            x = x + (p @ v).transpose(1, 2).reshape(x.shape)
        return x.square().mean()

    lines = []
    for count in (1, 2, 3):
        args = layers(count, True)[1]
        chunked = autochunk(fn)
        assert math.isclose(chunked(*args).item(), fn(*args).item(), rel_tol=1e-6)
        source = chunked.source()
        assert source.count(">=") <= 2
        lines.append(len(source.splitlines()))
    assert lines[2] - lines[1] == lines[1] - lines[0] <= 100


@pytest.mark.parametrize("dtype, dim, slow", [(torch.bfloat16, 128, False), (torch.float16, 64, False), (torch.bfloat16, 136, True), (torch.float32, 64, True)])
def test_attention_without_tensor_cores_is_known(dtype, dim, slow):
    q, k, v = (torch.randn(1, 2, 16, dim, device="cpu").to(dtype).requires_grad_() for _ in range(3))
    plan = logitless.torch.autochunk(lambda q, k, v: F.scaled_dot_product_attention(q, k, v).sum(), executor="native")._planned((q, k, v), {})
    plan = plan[0] if isinstance(plan, tuple) else plan
    reason = function._wide_attention(plan)
    assert bool(reason) == slow and ("128 dimensions" in reason) == slow
