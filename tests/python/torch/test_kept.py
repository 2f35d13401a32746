"""linear_logprobs(keep=True): gradients from exponentials that the forward saved. Runs on a GPU with
LOGITLESS_TEST_DEVICE=cuda; elsewhere the call is refused by name."""

import gc
import weakref

import pytest
import torch
from logitless._options import HeadOptions
from logitless.torch import linear_logprobs, losses, saved_head
from logitless.torch.run import Form
from oracle import DEVICE, generator
from torch.utils._python_dispatch import TorchDispatchMode

N, D, V = 700, 64, 5000
gpu = pytest.mark.skipif(DEVICE == "cpu", reason="no GPU under test (LOGITLESS_TEST_DEVICE=cuda)")


def problem(dtype=torch.bfloat16, k=0, bias=False):
    g = generator(3)
    hidden, weight = (torch.randn(*shape, generator=g).to(dtype).requires_grad_() for shape in ((N, D), (V, D)))
    target = torch.randint(V, (N, k) if k else (N,), generator=g)
    target[::7] = -100
    return hidden, weight, target, torch.randn(V, generator=g).requires_grad_() if bias else None


def gradients(loss, *leaves, **options):
    return torch.autograd.grad(loss, [t for t in leaves if t is not None], **options)


def keeps(result):
    """Returns whether the head behind a result's gradient has saved its exponentials."""
    nodes = [result.grad_fn]
    while nodes:
        node = nodes.pop()
        if type(node).__name__ == "SavedHeadBackward":
            return node.saved_tensors[-2] is not None  # the workspace
        nodes += [n for n, _ in node.next_functions if n is not None]
    return False


def loss_of(log_prob, lse):
    """A loss that is not linear in the log-probabilities."""
    return torch.tanh(log_prob.sum(-1) if log_prob.dim() > 1 else log_prob).square().mean() + 1e-3 * lse.square().mean()


@gpu
@pytest.mark.parametrize("case", [dict(), dict(bias=True), dict(k=3), dict(dtype=torch.float32)], ids=str)
@pytest.mark.parametrize("options", [dict(), dict(softcap=10.0), dict(logit_scale=0.5)], ids=str)
def test_has_the_gradients_of_two_calls(case, options):
    hidden, weight, target, bias = problem(**case)
    found = []
    for keep in (False, True):
        budget = "64MiB" if keep else None
        log_prob, _, lse = linear_logprobs(hidden, weight, target, bias, keep=keep, memory_budget=budget, **options)
        assert keeps(log_prob) == keep
        found.append((log_prob.detach(), lse.detach(), *gradients(loss_of(log_prob, lse), hidden, weight, bias)))
    tolerance = 1e-5 if case.get("dtype") else 1e-2
    for a, b in zip(*found):
        assert a.dtype == b.dtype and (a - b).float().norm() <= tolerance * b.float().norm()


@gpu
def test_a_retained_graph_and_the_entropy_under_a_softcap_make_everything_again():
    hidden, weight, target, _ = problem()
    log_prob, entropy, lse = linear_logprobs(hidden, weight, target, keep=True)
    loss = loss_of(log_prob, lse)
    first = gradients(loss, hidden, weight, retain_graph=True)
    second = gradients(loss, hidden, weight)
    expected = gradients(loss_of(*linear_logprobs(hidden, weight, target, keep=False)[::2]), hidden, weight)
    for a, b, c in zip(first, second, expected):
        assert torch.equal(a, c) and (b - c).float().norm() <= 1e-2 * c.float().norm()

    def with_entropy(keep):
        log_prob, entropy, lse = linear_logprobs(hidden, weight, target, softcap=10.0, keep=keep)
        return gradients(loss_of(log_prob, lse) - 0.1 * entropy.mean(), hidden, weight)

    for a, b in zip(with_entropy(True), with_entropy(False)):
        assert torch.equal(a, b)


@gpu
@pytest.mark.parametrize("case", [dict(), dict(bias=True), dict(k=3), dict(dtype=torch.float16)], ids=str)
@pytest.mark.parametrize("alone", [False, True])
def test_a_gradient_of_the_entropy_comes_from_them(case, alone):
    hidden, weight, target, bias = problem(**case)
    leaves = hidden, weight, bias

    def loss(log_prob, entropy, lse):
        return 0.1 * entropy.square().mean() if alone else loss_of(log_prob, lse) - 0.1 * entropy.mean()

    log_prob, entropy, lse = linear_logprobs(hidden, weight, target, bias)
    assert keeps(entropy)
    found = gradients(loss(log_prob, entropy, lse), *leaves)
    wide = [None if t is None else t.detach().double().requires_grad_() for t in leaves]
    expected = gradients(loss(*linear_logprobs(wide[0], wide[1], target, wide[2])), *wide)
    for a, b in zip(found, expected):
        assert (a.double() - b).norm() <= 4e-3 * b.norm()


@gpu
def test_the_default_keeps_what_fits_and_serves():
    hidden, weight, target, _ = problem()
    assert keeps(linear_logprobs(hidden, weight, target)[0])
    assert not keeps(linear_logprobs(hidden, weight, target, keep=False)[0])
    assert not keeps(linear_logprobs(hidden, weight, target, memory_budget="2MiB")[0])
    assert not keeps(linear_logprobs(hidden, weight, target, softcap=10.0)[0])
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: t):
        assert not keeps(linear_logprobs(hidden, weight, target)[0])


@gpu
def test_outputs_may_be_written_over():
    hidden, weight, target, _ = problem()
    found = []
    for change in (False, True):
        log_prob, _, lse = linear_logprobs(hidden, weight, target, keep=True)
        scaled = log_prob.mul_(2.0) if change else log_prob * 2.0
        found.append(gradients(scaled.sum(), hidden, weight))
    assert all(torch.equal(a, b) for a, b in zip(*found))


@gpu
def test_weight_gets_its_own_memory_and_accumulates():
    hidden, weight, target, _ = problem()
    for _ in range(2):
        losses.simpo_loss(hidden[:512].view(4, 128, D), weight, target[:512].view(4, 128)).loss.backward()
    whole = weight.grad
    weight.grad = None
    losses.simpo_loss(hidden[:512].view(4, 128, D), weight, target[:512].view(4, 128)).loss.backward()
    assert (whole - 2 * weight.grad).float().norm() <= 1e-2 * whole.float().norm()


@gpu
def test_losses_keep_what_fits():
    hidden, weight, target, _ = problem()
    hidden, target = hidden[:512].view(4, 128, D), target[:512].view(4, 128)

    assert keeps(losses.simpo_loss(hidden, weight, target).loss)
    assert not keeps(losses.simpo_loss(hidden, weight, target, memory_budget="2MiB").loss)


@gpu
def test_a_budget_too_small_is_named():
    hidden, weight, target, _ = problem()
    with pytest.raises(ValueError, match="keep: memory_budget: 1.0 MiB .* is below the least plan, dense"):
        linear_logprobs(hidden, weight, target, keep=True, memory_budget="1MiB")


@gpu
def test_memory_is_what_the_plan_says():
    hidden, weight, target, _ = problem()
    linear_logprobs(hidden, weight, target, keep=True)[0].sum().backward()  # allocations that persist
    weight.grad = hidden.grad = None
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    out = linear_logprobs(hidden, weight, target, keep=True)
    held = torch.cuda.memory_allocated() - before
    exponentials = 2 * 768 * 5120
    assert exponentials <= held <= exponentials + 2 * V * D + (4 << 20)
    out[0].sum().backward()
    del out
    assert torch.cuda.memory_allocated() - before <= 2 * (V * D + N * D) + (1 << 20)


def test_a_refused_plan_holds_no_tensor():
    hidden, weight, target, _ = problem()
    form = Form(HeadOptions(memory_budget=1), needs=3, entropy=False)
    made = saved_head.problem_of(hidden, weight, target, None, form)
    seen = [weakref.ref(t) for t in (hidden, weight, *made.outputs.values()) if t is not None]
    refused = saved_head.pair_of(made)
    assert isinstance(refused, Exception) and refused.__traceback__ is None
    del hidden, weight, target, made
    gc.collect()
    assert [t() is None for t in seen] == [True] * 4


@gpu
def test_hooks_of_saved_tensors_get_nothing_that_is_kept():
    hidden, weight, target, _ = problem()
    views = hidden[:512].view(4, 128, D), weight, target[:512].view(4, 128)
    expected = gradients(losses.simpo_loss(*views).loss, hidden, weight)
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: t):
        loss = losses.simpo_loss(*views).loss
        with pytest.raises(ValueError, match="keep: expected no hooks of saved tensors"):
            linear_logprobs(hidden, weight, target, keep=True)
    assert not keeps(loss)
    for a, b in zip(gradients(loss, hidden, weight), expected):
        assert (a - b).float().norm() <= 1e-2 * b.float().norm()


@gpu
@pytest.mark.parametrize("frozen", ["hidden", "weight", None])
def test_under_autocast_and_with_a_frozen_side(frozen):
    hidden, weight, target, _ = problem(torch.float32)
    sides = dict(hidden=hidden, weight=weight)
    leaves = [t for name, t in sides.items() if name != frozen]
    if frozen:
        sides[frozen].requires_grad_(False)
    found = []
    for keep in (False, True):
        with torch.autocast("cuda", dtype=torch.bfloat16):
            log_prob, _, lse = linear_logprobs(hidden, weight, target, keep=keep, memory_budget="64MiB")
        assert keeps(log_prob) == keep
        found.append(gradients(loss_of(log_prob, lse), *leaves))
    for a, b in zip(*found):
        assert a.dtype == torch.float32 and (a - b).norm() <= 1e-2 * b.norm()


class Casts(TorchDispatchMode):
    """Counts the conversions of float32 tensors of a shape."""

    def __init__(self, shape):
        super().__init__()
        self.shape, self.count = shape, 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is torch.ops.aten._to_copy.default and args[0].dtype == torch.float32:
            self.count += tuple(args[0].shape) == self.shape
        return func(*args, **(kwargs or {}))


class Formula:
    """The engine's pair of calls on a CPU, by PyTorch's operations: what it saves is the number of its forwards."""

    workspace_bytes = 1

    @property
    def forward(self):
        return self

    def run(self, tensors, workspace):
        hidden, weight, target, log_prob, entropy, lse, *_ = tensors
        assert hidden.dtype == weight.dtype == torch.bfloat16
        z = hidden.float() @ weight.float().T
        lse.copy_(z.logsumexp(-1))
        log_prob.copy_((z - lse[:, None]).gather(-1, target[:, None])[:, 0])
        workspace.fill_(1)

    def backward(self, inputs, cotangents, gradients, workspace):
        assert workspace.item() == 1
        x, w = (inputs[name].float() for name in ("hidden", "weight"))
        d_z = -torch.softmax(x @ w.T, -1)
        d_z[torch.arange(x.shape[0]), inputs["targets"]] += 1
        d_z *= cotangents["log_prob"][:, None]
        gradients["d_hidden"].copy_(d_z @ w)
        gradients["d_weight"].copy_(d_z.T @ x)


def test_autocast_casts_the_weight_once(monkeypatch):
    g = generator(4)
    hidden, weight = (torch.randn(*shape, generator=g).requires_grad_() for shape in ((40, 16), (96, 16)))
    target, upstream = torch.randint(96, (40,), generator=g), torch.randn(40, generator=g)
    if DEVICE == "cpu":
        monkeypatch.setattr(saved_head, "why_not", lambda *_: "")
        monkeypatch.setattr(saved_head, "pair_of", lambda _: Formula())
    with Casts((96, 16)) as casts:
        with torch.autocast(DEVICE, dtype=torch.bfloat16):
            log_prob = linear_logprobs(hidden, weight, target, memory_budget="16MiB")[0]
        assert keeps(log_prob)
        found = gradients((log_prob * upstream).sum(), hidden, weight)
    assert casts.count == 1
    wanted = (hidden @ weight.T).log_softmax(-1).gather(-1, target[:, None])[:, 0]
    for a, b in zip(found, gradients((wanted * upstream).sum(), hidden, weight)):
        assert a.dtype == torch.float32 and (a - b).norm() <= 2e-2 * b.norm()


def test_where_it_cannot_be_it_is_refused():
    hidden, weight, target, _ = problem(torch.float64 if DEVICE != "cpu" else torch.float32)
    message = "got cpu" if DEVICE == "cpu" else "got float64"
    with pytest.raises(ValueError, match=f"keep: expected .* {message}"):
        linear_logprobs(hidden, weight, target, keep=True)
    with pytest.raises(TypeError, match="keep: expected True, False or None, got 1"):
        linear_logprobs(hidden, weight, target, keep=1)
    with torch.no_grad():  # no backward, so nothing is saved
        assert len(linear_logprobs(hidden, weight, target, keep=True)) == 3
