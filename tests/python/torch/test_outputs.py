"""The outputs of linear_cross_entropy beside the loss: values, gradients, and combinations."""

import itertools

import oracle
import pytest
import torch
from logitless.torch import linear_cross_entropy, linear_logprobs
from test_loss import problem

NAMES = ("return_lse", "accuracy", "return_argmax", "return_target_logits")
DTYPES = [torch.float32, torch.bfloat16, torch.float64]


def expected(hidden, weight, target, bias, name, **options):
    z = oracle.logits(hidden, weight, bias, **options)
    valid = target != -100
    safe = torch.where(valid, target, 0)
    best = z.argmax(-1)
    return {
        "return_lse": torch.where(valid, torch.logsumexp(z, -1), 0.0),
        "accuracy": ((best == target) & valid).sum() / valid.sum(),
        "return_argmax": torch.where(valid, best, -1),
        "return_target_logits": torch.where(valid, z.gather(-1, safe[..., None])[..., 0], 0.0),
    }[name]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("gradients", [False, True])
@pytest.mark.parametrize("names", [n for k in range(1, 5) for n in itertools.combinations(NAMES, k)], ids="+".join)
def test_each_with_each_other(dtype, gradients, names):
    hidden, weight, target, bias = problem(5, (3, 20), 16, 30, dtype, bias=True)
    target[0, :8] = oracle.logits(hidden, weight, bias).argmax(-1)[0, :8]
    with torch.set_grad_enabled(gradients):
        loss, *found = linear_cross_entropy(hidden, weight, target, bias, softcap=4.0, **dict.fromkeys(names, True))
    x, w, b = oracle.leaves(hidden, weight, bias)
    assert abs(loss - oracle.loss(x, w, target, b, softcap=4.0)) <= 1e-5 and len(found) == len(names)
    for name, value in zip(names, found):
        wanted = expected(x, w, target, b, name, softcap=4.0)
        assert value.shape == wanted.shape and value.requires_grad == (
            gradients and name in ("return_lse", "return_target_logits")
        )
        if name == "return_argmax":
            assert value.dtype == torch.int64 and torch.equal(value, wanted)
        else:
            assert torch.allclose(value.double(), wanted.double(), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    "more", [{}, dict(label_smoothing=0.1), dict(class_weight=1), dict(target_weight=1), dict(reduction="none")]
)
@pytest.mark.parametrize("dtype", DTYPES)
def test_gradients_of_loss_lse_and_target_logits(dtype, more):
    per_token = 3 if "target_weight" in more else 0
    hidden, weight, target, bias = problem(6, (25,), 16, 70, dtype, per_token=per_token, bias=True)
    target.view(25, -1)[0] = 1
    options = dict(more)
    g = oracle.generator(7)
    if per_token:
        options["target_weight"] = torch.rand(25, 3, generator=g)
    if "class_weight" in more:
        options["class_weight"] = torch.rand(70, generator=g) + 0.5
    loss, lse, logits = linear_cross_entropy(
        hidden, weight, target, bias, return_lse=True, return_target_logits=True, **options
    )
    x, w, b = oracle.leaves(hidden, weight, bias)
    wide = {k: v.double() if isinstance(v, torch.Tensor) else v for k, v in options.items()}
    z = oracle.logits(x, w, b)
    vocab_ids = target if per_token else target[:, None]
    valid = vocab_ids != -100
    wanted_lse = torch.where(valid.any(-1), torch.logsumexp(z, -1), 0.0)
    wanted_logits = torch.where(valid, z.gather(-1, torch.where(valid, vocab_ids, 0)), 0.0).reshape(target.shape)
    assert logits.shape == target.shape and torch.allclose(logits.double(), wanted_logits, rtol=1e-5, atol=1e-5)
    assert torch.allclose(lse.double(), wanted_lse, rtol=1e-5)
    ours = torch.autograd.grad(loss.sum() + lse.square().sum() + logits.square().sum(), (hidden, weight, bias))
    wanted = oracle.loss(x, w, target, b, **wide).sum() + wanted_lse.square().sum() + wanted_logits.square().sum()
    for a, e in zip(ours, torch.autograd.grad(wanted, (x, w, b))):
        assert oracle.error(a, e) <= oracle.GRADIENT[dtype] * (2 if dtype == torch.bfloat16 else 1)


def test_ties_go_to_the_first_entry():
    _, argmax = linear_cross_entropy(torch.ones(2, 4), torch.ones(9, 4), torch.tensor([3, -100]), return_argmax=True)
    assert argmax.tolist() == [0, -1]
    _, argmax, _ = linear_cross_entropy(
        torch.ones(2, 4), torch.ones(9, 4), torch.tensor([3, -100]), return_argmax=True, return_target_logits=True
    )
    assert argmax.tolist() == [0, -1]


@pytest.mark.parametrize("tokens", [100, 300])
@pytest.mark.parametrize("scale", [1.0, 0.5, 0.7, -1.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_the_argmax_of_scaled_logits_with_many_ties(dtype, scale, tokens):
    """Integers, so that logits are exact. The entries are no whole tiles of a GPU, and the last ones do not count."""
    g = oracle.generator(8)
    hidden, weight = (torch.randint(-2, 3, shape, generator=g) for shape in ((tokens, 16), (700, 16)))
    hidden[0] = 0  # all logits are equal
    z = (hidden.float() @ weight.float().T) * (1 if scale > 0 else -1)
    first = torch.where(z == z.amax(-1, keepdim=True), torch.arange(700), 700).amin(-1)
    target = torch.randint(0, 700, (tokens,), generator=g)
    target[::2] = first[::2]
    x, w = hidden.to(dtype).requires_grad_(), weight.to(dtype).requires_grad_()
    log_prob, entropy, lse, argmax = linear_logprobs(x, w, target, logit_scale=scale, return_argmax=True)
    assert torch.equal(argmax, first) and first[0] == 0 and (z == z.amax(-1, keepdim=True)).sum() > 1.5 * tokens
    log_p = (abs(scale) * z.double()).log_softmax(-1)
    assert torch.allclose(log_prob.double(), log_p.gather(-1, target[:, None])[:, 0], rtol=1e-5, atol=1e-5)
    assert torch.allclose(entropy.double(), -(log_p.exp() * log_p).sum(-1), rtol=1e-4, atol=1e-4)
    loss, accuracy = linear_cross_entropy(x, w, target, logit_scale=scale, accuracy=True)
    assert accuracy == (first == target).sum() / tokens and torch.allclose(loss, -log_prob.mean(), rtol=1e-5)


@pytest.mark.parametrize("gradients", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
def test_log_probabilities_with_the_argmax(dtype, gradients):
    hidden, weight, target, bias = problem(5, (3, 20), 16, 30, dtype, bias=True)
    with torch.set_grad_enabled(gradients):
        *found, best = linear_logprobs(hidden, weight, target, bias, softcap=4.0, return_argmax=True)
        without = linear_logprobs(hidden, weight, target, bias, softcap=4.0)
    x, w, b = oracle.leaves(hidden, weight, bias)
    assert best.dtype == torch.int64 and torch.equal(best, expected(x, w, target, b, "return_argmax", softcap=4.0))
    assert len(without) == 3 and all(torch.equal(a, b) for a, b in zip(found, without))
    several = target[..., None].expand(3, 20, 2)
    assert torch.equal(linear_logprobs(hidden, weight, several, bias, softcap=4.0, return_argmax=True)[3], best)
    assert linear_logprobs(hidden[0, 0], weight, target[0, 0], bias, return_argmax=True)[3].shape == ()


def test_one_token_and_shift():
    hidden, weight, target, _ = problem(8, (3, 20), 16, 50, torch.float32)
    names = dict(return_lse=True, return_argmax=True, return_target_logits=True)
    shifted = linear_cross_entropy(hidden, weight, target, shift=1, **names)
    plain = linear_cross_entropy(hidden[:, :-1], weight, target[:, 1:], **names)
    assert all(a.shape == (3, 19) for a in shifted[1:]) and all(torch.equal(a, b) for a, b in zip(shifted, plain))
    one = linear_cross_entropy(hidden[0, 0], weight, torch.tensor(4), **names)
    assert all(value.shape == () for value in one)


def test_they_are_compiled_without_a_break():
    hidden, weight, target, bias = problem(9, (12,), 16, 50, torch.float32, bias=True)

    def call(*args):
        return linear_cross_entropy(*args, return_lse=True, return_argmax=True, return_target_logits=True)

    compiled = torch.compile(call, fullgraph=True, backend="aot_eager")
    eager, traced = call(hidden, weight, target, bias), compiled(hidden, weight, target, bias)
    assert all(torch.allclose(a, b) for a, b in zip(traced, eager)) and not traced[2].requires_grad
    grads = [torch.autograd.grad(o[0] + o[1].sum() + o[3].sum(), (hidden, weight, bias)) for o in (eager, traced)]
    assert all(torch.allclose(a, b, rtol=1e-5, atol=1e-6) for a, b in zip(*grads))


def test_class_probabilities_have_no_target():
    hidden, weight = torch.randn(6, 4), torch.randn(9, 4)
    target = torch.softmax(torch.randn(6, 9), -1)
    with pytest.raises(ValueError, match="return_target_logits: expected False beside class probabilities, got True"):
        linear_cross_entropy(hidden, weight, target, return_target_logits=True)
    loss, lse, argmax = linear_cross_entropy(hidden, weight, target, return_lse=True, return_argmax=True)
    assert torch.allclose(lse, torch.logsumexp(hidden @ weight.t(), -1), rtol=1e-5)
    assert torch.equal(argmax, (hidden @ weight.t()).argmax(-1))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("frozen", [False, True])
def test_a_16_bit_hidden_state_beside_an_fp32_weight(dtype, frozen):
    """The fp32 head of reinforcement learning: values are those of the tensors in float64, and gradients have the
    dtypes of their tensors. The weight is not cast."""
    torch.manual_seed(5)
    hidden, weight, bias, target = torch.randn(40, 24), torch.randn(300, 24), torch.randn(300), torch.randint(300, (40,))
    hidden, weight = hidden.to(dtype).requires_grad_(), weight.requires_grad_(not frozen)
    wanted = [hidden] if frozen else [hidden, weight]
    wide = [t.detach().double().requires_grad_() for t in (hidden, weight)]
    exact = torch.nn.functional.cross_entropy(wide[0] @ wide[1].T + bias.double(), target)
    exact_gradients = torch.autograd.grad(exact, wide)
    loss = linear_cross_entropy(hidden, weight, target, bias)
    assert loss.dtype == torch.float32 and abs(loss.item() - exact.item()) < 1e-6 * exact.item()
    for t, got, want in zip(wanted, torch.autograd.grad(loss, wanted), exact_gradients):
        assert got.dtype == t.dtype
        assert (got - want).norm() / want.norm() < (1e-6 if t is weight else torch.finfo(dtype).eps)
    log_prob = linear_logprobs(hidden, weight, target, bias)[0]
    exact_log_prob = (wide[0] @ wide[1].T + bias.double()).log_softmax(-1).gather(1, target[:, None])[:, 0]
    assert (log_prob - exact_log_prob).abs().max() < 1e-5
    (got,) = torch.autograd.grad(log_prob.sum(), hidden)
    assert got.dtype == dtype
