"""float16: gradients underflow until they are multiplied by the loss scale."""

import oracle
import pytest
import torch
import torch.nn.functional as F
from logitless.torch import FarFieldHead, linear_cross_entropy, linear_logprobs
from logitless.torch._lazy._patch import lazy_linear
from logitless.torch.losses import TopK, top_k_loss

N, D, V, SCALE = 2048, 32, 200, 65536.0


def faint():
    """Hidden states near their targets' rows: half of the gradients of a mean are below the least float16."""
    g = oracle.generator(0)
    normal = lambda *shape: torch.randn(shape, generator=g, device=oracle.DEVICE)  # noqa: E731
    weight, bias = (normal(V, D) / 6).half(), (normal(V) / 4).half()
    target = torch.randint(0, V, (N,), generator=g, device=oracle.DEVICE)
    return (20 * weight[target].float() + normal(N, D)).half(), weight, target, bias


def mean_logits(x, w, y, b):
    return F.cross_entropy(x @ w.t() + b, y)


def functional(x, w, y, b):
    """Returns a value whose gradients are those of torch.func."""
    made = torch.func.grad(lambda *leaves: SCALE * linear_cross_entropy(*leaves[:2], y, leaves[2]), (0, 1, 2))(x, w, b)
    return sum((t * g.detach()).sum() / SCALE for t, g in zip((x.double(), w.double(), b.double()), made))


def lazy(x, w, y, b):
    return F.cross_entropy(lazy_linear(x, w, b).float(), y)


def under_autocast(x, w, y, b):
    with torch.autocast(oracle.DEVICE, torch.float16):
        return F.cross_entropy(lazy_linear(x, w, b), y)


def traced(x, w, y, b):
    return torch.compile(linear_cross_entropy, fullgraph=True, backend="aot_eager")(x, w, y, b)


def far_field(x, w, y, b):
    return FarFieldHead().train()(x, w, y, b)


def far_field_traced(x, w, y, b):
    return torch.compile(FarFieldHead().train(), fullgraph=True, backend="aot_eager")(x, w, y, b)


MEANS = {
    "remembered": lambda x, w, y, b: linear_cross_entropy(x, w, y, b),
    "checked": lambda x, w, y, b: linear_cross_entropy(x, w, y, b, token_weight=torch.ones(N, device=x.device)),
    "sum": lambda x, w, y, b: linear_cross_entropy(x, w, y, b, reduction="sum") / N,
    "none": lambda x, w, y, b: linear_cross_entropy(x, w, y, b, reduction="none").mean(),
    "normalizer": lambda x, w, y, b: linear_cross_entropy(x, w, y, b, normalizer=torch.tensor(float(N))),
    "lse": lambda x, w, y, b: linear_cross_entropy(x, w, y, b, return_lse=True)[0],
    "positions": lambda x, w, y, b: linear_cross_entropy(x, w[:, None], y[:, None], b[:, None]),
    "probabilities": lambda x, w, y, b: linear_cross_entropy(x, w, F.one_hot(y, V).float(), b),
    "logprobs": lambda x, w, y, b: -linear_logprobs(x, w, y, b)[0].mean(),
    "top_k": lambda x, w, y, b: top_k_loss(x, w, TopK(y[:, None], torch.zeros(N, 1, device=x.device)), b),
    "functional": functional,
    "traced": traced,
    "lazy": lazy,
    "under_autocast": under_autocast,
    "far_field": far_field,
    "far_field_traced": far_field_traced,
}


@pytest.mark.parametrize("name", MEANS)
def test_gradients_are_rounded_after_the_loss_scale(name):
    hidden, weight, target, bias = faint()
    wide = [t.double().requires_grad_() for t in (hidden, weight, bias)]
    wanted = torch.autograd.grad(SCALE * mean_logits(wide[0], wide[1], target, wide[2]), wide)
    leaves = [t.clone().requires_grad_() for t in (hidden, weight, bias)]
    found = torch.autograd.grad(SCALE * MEANS[name](leaves[0], leaves[1], target, leaves[2]), leaves)
    for made, exact in zip(found, wanted):
        assert made.dtype == torch.float16 and oracle.error(made, exact) <= oracle.GRADIENT[torch.float16]
        assert ((made == 0) & (exact.half() != 0)).double().mean() <= 0.01


@pytest.mark.parametrize("name", ["sum", "normalizer", "traced_sum"])
def test_a_sum_does_not_overflow(name):
    """The gradient of weight is 8 times the largest float16 before it is divided."""
    tokens = 16384
    call = {
        "sum": lambda x, w, y: linear_cross_entropy(x, w, y, reduction="sum") / tokens,
        "normalizer": lambda x, w, y: linear_cross_entropy(x, w, y, normalizer=torch.tensor(float(tokens))),
        "traced_sum": lambda x, w, y: torch.compile(linear_cross_entropy, backend="aot_eager")(x, w, y, reduction="sum") / tokens,
    }[name]
    hidden = torch.full((tokens, 4), 64.0, device=oracle.DEVICE).half()
    weight = torch.zeros(2, 4, device=oracle.DEVICE).half().requires_grad_()
    target = torch.zeros(tokens, dtype=torch.int64, device=oracle.DEVICE)
    (made,) = torch.autograd.grad(call(hidden, weight, target), weight)
    assert torch.equal(made, torch.tensor([[-32.0], [32.0]], device=made.device).expand(2, 4).half())


def test_a_retained_graph_keeps_what_is_not_rounded():
    hidden, weight, target, bias = faint()
    leaves = [t.clone().requires_grad_() for t in (hidden, weight, bias)]
    loss = linear_cross_entropy(leaves[0], leaves[1], target, leaves[2])
    first = torch.autograd.grad(loss, leaves, torch.tensor(SCALE, device=loss.device), retain_graph=True)
    again = torch.autograd.grad(loss, leaves, torch.tensor(SCALE, device=loss.device))
    assert all(torch.equal(a, b) for a, b in zip(first, again))
