"""logitless.torch.main_grad: the weight's gradient is added to a given tensor, against logits in float64."""

import oracle
import os

import pytest
import torch
from expecting import expected_shares
from logitless.torch import _engine, linear_cross_entropy
from logitless.torch._peak import peak_of
from logitless.torch.main_grad import MainGrad, token_losses

N, D, V = 60, 24, 130
WEIGHTS = [torch.float32, torch.bfloat16, torch.float16, torch.float64]


def made(dtype, tokens=(N,), dim=D, vocab=V, seed=0):
    g = oracle.generator(seed)
    hidden = torch.randn(*tokens, dim, generator=g).to(dtype).requires_grad_()
    weight = (torch.randn(vocab, dim, generator=g) * 2 / dim**0.5).to(dtype).requires_grad_()
    bias = torch.randn(vocab, generator=g).to(dtype).requires_grad_()
    target = torch.randint(0, vocab, tokens, generator=g)
    target[torch.rand(tokens, generator=g) < 0.2] = -100
    return hidden, weight, target, bias, torch.rand(tokens, generator=g) + 0.5


def losses(hidden, weight, target, bias, tensor, added=lambda: None, **options):
    given = dict(ignore_index=-100, logit_scale=1.0, return_argmax=False, sharding=None, memory_budget=None)
    return token_losses(hidden, weight, target, bias, main_grad=MainGrad(tensor, added), **{**given, **options})


@pytest.mark.parametrize("dtype", WEIGHTS)
@pytest.mark.parametrize("number", [torch.float32, torch.bfloat16, torch.float64])
def test_sum_of_microbatches(dtype, number):
    """The tensor gets the sum over calls beside what it held; other gradients and the losses are as ever."""
    weight, bias = made(dtype)[1], made(dtype)[3]
    before = (torch.randn(V, D, generator=oracle.generator(9)) / 8).to(number)
    tensor, wanted = before.clone(), before.double()
    for k in range(3):
        hidden, _, target, _, upstream = made(dtype, (3, 20) if k == 1 else (N,), seed=k)
        found = losses(hidden, weight, target, bias, tensor, logit_scale=0.7)
        x, w, b = oracle.leaves(hidden, weight, bias)
        exact = oracle.loss(x, w, target, b, reduction="none", logit_scale=0.7)
        assert (found.double() - exact).abs().max() <= 8 * oracle.LOSS[dtype] * exact.abs().max()
        bias.grad = None
        found.backward(upstream.to(found.dtype))
        exact.backward(upstream.double())
        wanted = wanted + w.grad
        assert weight.grad is None
        assert oracle.error(hidden.grad, x.grad) <= oracle.GRADIENT[dtype] and (hidden.grad[target == -100] == 0).all()
        assert oracle.error(bias.grad, b.grad) <= oracle.GRADIENT[dtype]
    coarser = max((dtype, number), key=lambda d: torch.finfo(d).eps)
    assert oracle.error(tensor, wanted) <= oracle.GRADIENT[coarser] and oracle.error(before, wanted) > 0.5


def test_the_share_of_ignored_tokens_arrives(monkeypatch):
    seen = expected_shares(monkeypatch, _engine)
    hidden, weight, target, bias, upstream = made(torch.float32)
    sums = []
    for options in ({}, dict(expected_ignored=0.296875)):
        sums.append(torch.zeros(V, D))
        losses(hidden, weight, target, bias, sums[-1], **options).backward(upstream)
    assert seen[-1] == 0.296875 and torch.equal(*sums)


@pytest.mark.parametrize("dtypes", [(torch.float32, torch.bfloat16), (torch.bfloat16, torch.float32)])
def test_two_dtypes(dtypes):
    """The unrounded gradient of a bf16 weight beside fp32 hidden states, and of the reverse."""
    hidden, weight = (t.detach().to(d).requires_grad_() for t, d in zip(made(torch.float32), dtypes))
    target, upstream = made(torch.float32)[2], made(torch.float32)[4]
    tensor = torch.ones(V, D)
    losses(hidden, weight, target, None, tensor).backward(upstream)
    x, w = oracle.leaves(hidden, weight)
    oracle.loss(x, w, target, reduction="none").backward(upstream.double())
    assert oracle.error(tensor, w.grad + 1.0) <= oracle.GRADIENT[torch.float32]
    assert hidden.grad.dtype == dtypes[0] and oracle.error(hidden.grad, x.grad) <= oracle.GRADIENT[dtypes[0]]


def test_small_gradients_are_not_rounded():
    """bf16 gradients of microbatches lose what float32 keeps."""
    weight = made(torch.bfloat16)[1]
    tensor, rounded, wanted = torch.zeros(V, D), torch.zeros(V, D), torch.zeros(V, D, dtype=torch.float64)
    for k in range(16):
        hidden, _, target, _, upstream = made(torch.bfloat16, seed=k)
        losses(hidden.detach(), weight, target, None, tensor).backward(upstream)
        found = linear_cross_entropy(hidden.detach(), weight, target, reduction="none")
        rounded += torch.autograd.grad(found, weight, upstream)[0].float()
        w = weight.detach().double().requires_grad_()
        oracle.loss(hidden.detach().double(), w, target, reduction="none").backward(upstream.double())
        wanted += w.grad
    assert oracle.error(tensor, wanted) < oracle.error(rounded, wanted)


def test_gradient_of_autograd():
    """Autograd gets what ``added`` returns, after the sum."""
    hidden, weight, target, bias, upstream = made(torch.float32)
    tensor, seen = torch.zeros(V, D), []

    def added():
        seen.append(tensor.norm().item())
        return weight.new_ones(()).expand(weight.shape)

    found = losses(hidden, weight, target, bias, tensor, added)
    assert seen == []
    found.backward(upstream)
    assert len(seen) == 1 and seen[0] > 0 and (weight.grad == 1).all()


def test_frozen_weight():
    hidden, weight, target, bias, upstream = made(torch.float32)
    tensor = torch.zeros(V, D)
    losses(hidden, weight.detach(), target, bias, tensor, lambda: pytest.fail("added")).backward(upstream)
    assert (tensor == 0).all() and hidden.grad.norm() > 0
    with torch.no_grad():
        losses(hidden, weight, target, bias, tensor)
    assert (tensor == 0).all()


def test_argmax():
    hidden, weight, target, bias, upstream = made(torch.float32)
    found, index = losses(hidden, weight, target, bias, torch.zeros(V, D), return_argmax=True)
    best = oracle.logits(hidden, weight, bias).argmax(-1)
    assert torch.equal(index, torch.where(target == -100, -1, best)) and found.requires_grad


@pytest.mark.native
@pytest.mark.skipif(os.environ.get("LOGITLESS_TEST_DEVICE", "cpu") != "cpu", reason="a GPU's least plan takes more")
def test_memory():
    """No memory of the weight's size where the library adds."""
    wide, half = torch.float32, torch.bfloat16
    for dtype, of, number in ((wide,) * 3, (half, half, wide), (half,) * 3, (wide, half, wide), (half, wide, wide)):
        hidden, weight, target, bias, upstream = made(dtype, (64,), 128, 4096)
        weight = weight.detach().to(of).requires_grad_()
        tensor = torch.zeros(4096, 128, dtype=number)
        taken = {}
        for name, function in (
            ("added", lambda: losses(hidden, weight, target, None, tensor, memory_budget="1MiB")),
            ("returned", lambda: linear_cross_entropy(hidden, weight, target, reduction="none", memory_budget="1MiB")),
        ):
            for _ in range(2):  # the second call reuses its workspace
                found = function()
                taken[name], _ = peak_of(lambda: found.backward(upstream))  # noqa: B023
                weight.grad = None
        assert taken["added"] < 1 << 17 < weight.numel() * weight.element_size() <= taken["returned"], taken


@pytest.mark.native
def test_budget_covers_the_backward():
    hidden, weight, target, bias, _ = made(torch.float32)
    with pytest.raises(ValueError, match="memory_budget"):
        losses(hidden, weight, target, bias, torch.zeros(V, D), memory_budget=1)


def test_refusals():
    hidden, weight, target, bias, _ = made(torch.float32)
    for tensor, error in (
        (torch.zeros(V, D + 1), ValueError), (torch.zeros(V, D, dtype=torch.int32), TypeError),
        (torch.zeros(V, D, device="meta"), ValueError),
    ):
        with pytest.raises(error, match="main_grad: expected"):
            losses(hidden, weight, target, bias, tensor)
    with pytest.raises(NotImplementedError, match="main_grad: expected an eager call"):
        torch.func.grad(lambda w: losses(hidden.detach(), w, target, None, torch.zeros(V, D)).sum())(weight.detach())
