"""torch.func on the calls: right results, or refusals by name."""

import oracle
import pytest
import torch
import torch.nn.functional as F
from logitless.torch import (
    LinearCrossEntropy, autograd, lazy_head, linear_cross_entropy, linear_kept_logprobs, linear_logprobs,
)
from torch.func import functional_call, grad, jacrev, jvp, vmap

G = oracle.generator(0)
X, W, B = torch.randn(5, 8, generator=G), torch.randn(40, 8, generator=G), torch.randn(40, generator=G)
Y = torch.tensor([3, 0, 39, -100, 7])
T = torch.rand(5, generator=G) + 0.5
OURS = {
    "mean": lambda w, x, y: linear_cross_entropy(x, w, y, B),
    "sum": lambda w, x, y: linear_cross_entropy(x, w, y, B, reduction="sum", label_smoothing=0.1),
    "none": lambda w, x, y: linear_cross_entropy(x, w, y, B, reduction="none").square().sum(),
    "log_prob": lambda w, x, y: linear_logprobs(x, w, y, B)[0].sum(),
    "lse": lambda w, x, y: linear_cross_entropy(x, w, y, B, return_lse=True)[1].sum(),
    "tempered": lambda w, x, y: linear_cross_entropy(x, w, y, B, temperature=T),
}
THEIRS = {
    "mean": lambda w, x, y: F.cross_entropy(x @ w.t() + B, y),
    "sum": lambda w, x, y: F.cross_entropy(x @ w.t() + B, y, reduction="sum", label_smoothing=0.1),
    "none": lambda w, x, y: F.cross_entropy(x @ w.t() + B, y, reduction="none").square().sum(),
    "log_prob": lambda w, x, y: -F.cross_entropy(x @ w.t() + B, y, reduction="sum"),
    "lse": lambda w, x, y: torch.where(y != -100, torch.logsumexp(x @ w.t() + B, -1), 0.0).sum(),
    "tempered": lambda w, x, y: F.cross_entropy((x @ w.t() + B) / T[:, None], y),
}


def close(a, b):
    return torch.allclose(a, b, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", OURS)
def test_transforms(name):
    ours, theirs = OURS[name], THEIRS[name]
    for argnum in (0, 1):
        assert close(grad(ours, argnum)(W, X, Y), grad(theirs, argnum)(W, X, Y))
    xs, ys = X.expand(3, 5, 8) * torch.tensor([1.0, 0.5, 2.0])[:, None, None], Y.clamp(min=0).expand(3, 5)
    ws = torch.stack([W, 2 * W, -W])
    assert close(vmap(ours, (None, 0, 0))(W, xs, ys), vmap(theirs, (None, 0, 0))(W, xs, ys))
    assert close(vmap(ours, (0, None, None))(ws, X, Y), vmap(theirs, (0, None, None))(ws, X, Y))
    assert close(vmap(grad(ours), (None, 0, 0))(W, xs, ys), vmap(grad(theirs), (None, 0, 0))(W, xs, ys))
    wanted = grad(lambda w: vmap(theirs, (None, 0, 0))(w, xs, ys).sum())(W)
    assert close(grad(lambda w: vmap(ours, (None, 0, 0))(w, xs, ys).sum())(W), wanted)
    assert close(jacrev(lambda w: ours(w, X, Y))(W), jacrev(lambda w: theirs(w, X, Y))(W))
    # PyTorch's usual gradients flow, and have the same bits where nothing is transformed.
    w = W.clone().requires_grad_()
    assert torch.equal(grad(ours)(W, X, Y), torch.autograd.grad(ours(w, X, Y), w)[0])
    vmap(ours, (None, 0, 0))(w, xs, ys).sum().backward()
    assert close(w.grad, wanted)


@pytest.mark.parametrize("name", OURS)
def test_refused_by_name(name):
    with pytest.raises(NotImplementedError, match="forward-mode derivatives"):
        jvp(lambda w: OURS[name](w, X, Y), (W,), (W,))
    with pytest.raises(NotImplementedError, match="second derivatives"):
        grad(lambda w: grad(OURS[name])(w, X, Y).square().sum())(W)
    weight = W.clone().requires_grad_()
    with pytest.raises(NotImplementedError, match="batches of upstream gradients .*is_grads_batched"):
        torch.autograd.grad(OURS[name](weight, X, Y), weight, torch.ones(2), is_grads_batched=True)


def kept(w, x, y):
    return linear_kept_logprobs(x, w, y, B, kept_ids=torch.arange(40).expand(5, 40), temperature=T)[0].square().sum()


def of_all(w, x, y):
    return F.cross_entropy((x @ w.t() + B) / T[:, None], y, reduction="none").square().sum()


def test_kept_sets_have_all_reverse_derivatives():
    wanted = [grad(of_all, argnum)(W, X, Y) for argnum in (0, 1)]
    for argnum in (0, 1):
        assert close(grad(kept, argnum)(W, X, Y), wanted[argnum])
    xs, ys = torch.stack([X, 0.5 * X]), Y.clamp(min=0).expand(2, 5)
    assert close(vmap(grad(kept), (None, 0, 0))(W, xs, ys), vmap(grad(of_all), (None, 0, 0))(W, xs, ys))
    assert close(jacrev(grad(kept, 1), 1)(W, X, Y), jacrev(grad(of_all, 1), 1)(W, X, Y))
    weight, hidden = W.clone().requires_grad_(), X.clone().requires_grad_()
    first = [torch.autograd.grad(f(weight, hidden, Y), hidden, create_graph=True)[0] for f in (kept, of_all)]
    one, other = [torch.autograd.grad(d.square().sum(), weight)[0] for d in first]
    assert (one - other).norm() <= 1e-5 * other.norm()
    with pytest.raises(NotImplementedError, match="forward-mode derivatives"):
        jvp(lambda w: kept(w, X, Y), (W,), (W,))
    torch.compile(kept, fullgraph=True)(weight, hidden, Y).backward()
    assert close(weight.grad, wanted[0]) and close(hidden.grad, wanted[1])


@pytest.mark.parametrize("output", range(3))
def test_outputs_that_are_not_used_have_no_cotangent(output, monkeypatch):
    """A zero cotangent of the entropy would recompute the logits."""
    given, kept = [], autograd.head_backward
    monkeypatch.setattr(autograd, "head_backward", lambda *a: (given.append([t is not None for t in a[4:7]]), kept(*a))[1])
    grad(lambda w: linear_logprobs(X, w, Y, B)[output].sum())(W)
    assert given and all(names == [k == output for k in range(3)] for names in given)


class Blind(torch.autograd.Function):
    """The identity, without a gradient."""

    generate_vmap_rule = True
    setup_context = staticmethod(lambda ctx, inputs, output: None)
    forward = staticmethod(lambda x: x.clone())
    backward = staticmethod(lambda ctx, d: None)


@pytest.mark.parametrize("name", OURS)
def test_a_gradient_that_nothing_follows_from(name):
    found = grad(lambda w: (Blind.apply(grad(OURS[name])(w, X, Y)) + 2 * w).sum())(W)
    assert torch.equal(found, torch.full_like(W, 2.0))


def test_functional_call():
    module = LinearCrossEntropy(8, 40)
    plain = torch.nn.Linear(8, 40, bias=False)
    loss = lambda p: functional_call(module, p, (X, Y))  # noqa: E731
    theirs = lambda p: F.cross_entropy(functional_call(plain, p, (X,)), Y)  # noqa: E731
    assert close(grad(loss)({"weight": W})["weight"], grad(theirs)({"weight": W})["weight"])


def test_a_lazy_head_under_transforms():
    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.lm_head = torch.nn.Linear(8, 40)

        def forward(self, x, y):
            return F.cross_entropy(self.lm_head(x), y)

    model = Model()
    parameters = dict(model.named_parameters())
    loss = lambda p, x, y: functional_call(model, p, (x, y))  # noqa: E731
    wanted, each = grad(loss)(parameters, X, Y), vmap(loss, (None, 0, 0))(parameters, X[:3, None], Y[:3, None])
    lazy_head(model)
    found = grad(loss)(parameters, X, Y)
    assert all(close(wanted[n], found[n]) for n in wanted)
    assert close(vmap(loss, (None, 0, 0))(parameters, X[:3, None], Y[:3, None]), each)
    assert close(torch.func.hessian(lambda b: loss({**parameters, "lm_head.bias": b}, X, Y))(B).sum(), torch.tensor(0.0))
