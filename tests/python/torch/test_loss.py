"""linear_cross_entropy and linear_logprobs against logits in float64, over all options."""

import oracle
import pytest
import torch
import torch.nn.functional as F
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from logitless.torch import LinearCrossEntropy, backend, linear_cross_entropy, linear_logprobs

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def problem(seed, tokens, dim, vocab, dtype, per_token=0, bias=False, ignored=0.2):
    g = oracle.generator(seed)
    hidden = torch.randn(*tokens, dim, generator=g).to(dtype).requires_grad_()
    weight = (torch.randn(vocab, dim, generator=g) * 2 / dim**0.5).to(dtype).requires_grad_()
    b = torch.randn(vocab, generator=g).to(dtype).requires_grad_() if bias else None
    shape = (*tokens, per_token) if per_token else tokens
    target = torch.randint(0, vocab, shape, generator=g)
    target[torch.rand(shape, generator=g) < ignored] = -100
    return hidden, weight, target, b


def compare(hidden, weight, target, bias, upstream=None, **options):
    """Compares loss and gradients of both under the accuracy contract."""
    dtype = hidden.dtype
    found = linear_cross_entropy(hidden, weight, target, bias, **options)
    x, w, b = oracle.leaves(hidden, weight, bias)
    more = {k: v.double() if isinstance(v, torch.Tensor) else v for k, v in options.items() if k != "memory_budget"}
    wanted = oracle.loss(x, w, target, b, **more)
    assert found.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    assert found.shape == wanted.shape
    scale = wanted.detach().abs().max().clamp(min=1.0)
    assert ((found.double() - wanted).abs().max() / scale).item() <= oracle.LOSS[dtype] * 8
    g = torch.ones_like(wanted) if upstream is None else upstream.double()
    inputs = [t for t in (hidden, weight, bias) if t is not None and t.requires_grad]
    exact = [t for t in (x, w, b) if t is not None and t.requires_grad]
    ours = torch.autograd.grad(found, inputs, g.to(found.dtype))
    theirs = torch.autograd.grad(wanted, exact, g)
    for a, e, t in zip(ours, theirs, inputs):
        assert a.dtype == t.dtype and a.shape == t.shape
        if e.norm() > 1e-12:
            assert oracle.error(a, e) <= oracle.GRADIENT[dtype], options
        else:
            assert a.double().norm() <= 1e-6


@settings(max_examples=120, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True)
@given(
    seed=st.integers(0, 1000),
    dtype=st.sampled_from(DTYPES),
    tokens=st.sampled_from([(33,), (3, 20), (2, 3, 5)]),
    dim=st.sampled_from([17, 64]),
    vocab=st.sampled_from([40, 300, 1025]),
    reduction=st.sampled_from(["none", "mean", "sum"]),
    bias=st.booleans(),
    smoothing=st.sampled_from([0.0, 0.1, 0.9]),
    z_loss=st.sampled_from([0.0, 0.01]),
    softcap=st.sampled_from([None, 3.0]),
    scale=st.sampled_from([1.0, 0.5]),
    classes=st.booleans(),
    weights=st.booleans(),
    per_token=st.sampled_from([0, 0, 3]),
    budget=st.sampled_from([None, "256MiB"]),
)
def test_every_option_together(
    seed, dtype, tokens, dim, vocab, reduction, bias, smoothing, z_loss, softcap, scale, classes, weights, per_token, budget
):
    hidden, weight, target, b = problem(seed, tokens, dim, vocab, dtype, per_token, bias)
    target.view(-1)[0] = 0  # a mean over no tokens has its own test
    if per_token:
        target.view(-1, per_token)[0] = 0
    options = dict(
        reduction=reduction, label_smoothing=smoothing, z_loss=z_loss, softcap=softcap, logit_scale=scale, memory_budget=budget
    )
    g = oracle.generator(seed + 1)
    if classes:
        options["class_weight"] = torch.rand(vocab, generator=g) + 0.5
    if weights:
        options["token_weight"] = torch.rand(tokens, generator=g) + 0.5
    if per_token:
        options["target_weight"] = torch.rand(*tokens, per_token, generator=g)
    upstream = torch.randn(tokens, generator=g) if reduction == "none" else torch.tensor(1.7)
    compare(hidden, weight, target, b, upstream, **options)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_normalizer_of_ones_own(dtype):
    hidden, weight, target, _ = problem(1, (40,), 32, 200, dtype)
    compare(hidden, weight, target, None, normalizer=123.0)
    number = linear_cross_entropy(hidden, weight, target, normalizer=123.0)
    tensor = linear_cross_entropy(hidden, weight, target, normalizer=torch.tensor(123))
    assert abs(number.item() - tensor.item()) <= 1e-6 * abs(number.item())


@pytest.mark.parametrize("tokens, dim, vocab", [((9,), 8, 1), ((1,), 1, 2), ((1,), 3, 5), ((2, 1), 1, 1)])
def test_the_smallest_sizes(tokens, dim, vocab):
    hidden, weight, target, _ = problem(1, tokens, dim, vocab, torch.float32, ignored=0.0)
    x, w = oracle.leaves(hidden, weight)
    loss, wanted = linear_cross_entropy(hidden, weight, target), oracle.loss(x, w, target)
    assert (loss - wanted).abs() < 1e-6
    ours, theirs = torch.autograd.grad(loss, (hidden, weight)), torch.autograd.grad(wanted, (x, w))
    assert all((a - e).abs().max() < 1e-6 for a, e in zip(ours, theirs))


def test_the_mean_of_no_token_is_zero():
    hidden, weight, target, _ = problem(1, (8,), 16, 50, torch.float32)
    loss = linear_cross_entropy(hidden, weight, torch.full_like(target, -100))
    loss.backward()
    assert loss.item() == 0 and not hidden.grad.any() and not weight.grad.any()


@pytest.mark.parametrize("kind", ["transposed", "sliced", "expanded", "column"])
def test_inputs_of_any_strides(kind):
    hidden, weight, target, _ = problem(2, (24,), 32, 120, torch.float32)
    with torch.no_grad():
        if kind == "transposed":
            h, w = hidden.t().contiguous().t(), weight.t().contiguous().t()
        elif kind == "sliced":
            h = torch.zeros(48, 64)[::2, ::2].copy_(hidden)
            w = torch.zeros(120, 64)[:, 1::2].copy_(weight)
        elif kind == "expanded":
            h, w = hidden[:1].expand(24, 32), weight
            target = target[:1].clamp(min=0).expand(24)
        else:
            h, w = hidden, weight
            target = torch.stack([target, target], 1)[:, 0]
    compare(h.detach().requires_grad_(), w.detach().requires_grad_(), target, None)


@pytest.mark.parametrize("side", ["hidden", "weight"])
@pytest.mark.parametrize("kind", ["first column dropped", "first row dropped", "an element on"])
def test_memory_that_begins_anywhere(side, kind):
    """Rows that are not aligned to 16 bytes, also after a call with an aligned tensor of the same shape and strides."""
    hidden, weight, target, _ = problem(2, (24,), 32, 120, torch.bfloat16)
    given = {"hidden": hidden, "weight": weight}
    values = given[side].detach()
    rows, dim = values.shape
    linear_cross_entropy(hidden, weight, target)
    with torch.no_grad():
        if kind == "first column dropped":
            moved = torch.zeros(rows, dim + 1, dtype=values.dtype)[:, 1:].copy_(values)
        elif kind == "first row dropped":
            moved = torch.zeros(rows + 1, dim + 3, dtype=values.dtype)[1:, :dim].copy_(values)
        else:
            moved = torch.zeros(rows * dim + 1, dtype=values.dtype)[1:].view(rows, dim).copy_(values)
    given[side] = moved.requires_grad_()
    compare(given["hidden"], given["weight"], target, None)
    log_prob, expected = (linear_logprobs(h, w, target)[0] for h, w in (given.values(), (hidden, weight)))
    if backend(hidden).name == "native" or hidden.device.type == "cpu":
        assert torch.equal(log_prob, expected)
    else:  # the bits of PyTorch's product depend on the alignment
        torch.testing.assert_close(log_prob, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("side", ["hidden", "weight", "bias", "all"])
def test_a_frozen_side_has_no_gradient(side):
    hidden, weight, target, bias = problem(3, (20,), 16, 90, torch.float32, bias=True)
    frozen = {"hidden": [hidden], "weight": [weight], "bias": [bias], "all": [hidden, weight, bias]}[side]
    for t in frozen:
        t.requires_grad_(False)
    loss = linear_cross_entropy(hidden, weight, target, bias)
    if side == "all":
        assert not loss.requires_grad
        return
    loss.backward()
    for t in (hidden, weight, bias):
        assert (t.grad is None) == (t in [f for f in frozen if f is t])


def test_the_same_bits_every_time_and_for_any_number_of_threads():
    hidden, weight, target, _ = problem(4, (300,), 64, 5000, torch.bfloat16)
    runs = []
    threads = torch.get_num_threads()
    try:
        for n in (1, 1, 2, 3):
            torch.set_num_threads(n)
            loss = linear_cross_entropy(hidden, weight, target)
            runs.append((loss, *torch.autograd.grad(loss, (hidden, weight))))
    finally:
        torch.set_num_threads(threads)
    for run in runs[1:]:
        assert all(torch.equal(a, b) for a, b in zip(run, runs[0]))


def test_accuracy_and_lse():
    hidden, weight, target, _ = problem(5, (3, 20), 16, 30, torch.float32)
    best = oracle.logits(hidden, weight).argmax(-1)
    target = torch.where(torch.rand(target.shape) < 0.5, best, target)
    loss, lse, accuracy = linear_cross_entropy(hidden.detach(), weight.detach(), target, return_lse=True, accuracy=True)
    valid = target != -100
    assert abs(accuracy.item() - ((best == target) & valid).sum().item() / valid.sum().item()) < 1e-6
    z = oracle.logits(hidden.double(), weight.double())
    assert torch.allclose(lse.double(), torch.where(valid, torch.logsumexp(z, -1), 0.0), rtol=1e-5)
    loss, accuracy = linear_cross_entropy(hidden, weight, target, accuracy=True)
    loss.backward()
    assert hidden.grad is not None and accuracy.dtype == torch.float32


def test_lse_has_a_gradient():
    hidden, weight, target, bias = problem(6, (25,), 16, 70, torch.float32, bias=True)
    loss, lse = linear_cross_entropy(hidden, weight, target, bias, return_lse=True)
    x, w, b = oracle.leaves(hidden, weight, bias)
    valid = target != -100
    wanted = oracle.loss(x, w, target, b) + torch.where(valid, torch.logsumexp(oracle.logits(x, w, b), -1), 0.0).square().sum()
    ours = torch.autograd.grad(loss + lse.square().sum(), (hidden, weight, bias))
    for a, e in zip(ours, torch.autograd.grad(wanted, (x, w, b))):
        assert oracle.error(a, e) <= 1e-5


@settings(max_examples=40, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True)
@given(
    seed=st.integers(0, 1000),
    dtype=st.sampled_from(DTYPES),
    tokens=st.sampled_from([(33,), (3, 20), (2, 3, 5)]),
    vocab=st.sampled_from([7, 300]),
    bias=st.booleans(),
    softcap=st.sampled_from([None, 3.0]),
    per_token=st.sampled_from([0, 4]),
    used=st.sampled_from(["log_prob", "entropy", "lse", "all"]),
)
def test_logprobs(seed, dtype, tokens, vocab, bias, softcap, per_token, used):
    hidden, weight, target, b = problem(seed, tokens, 24, vocab, dtype, per_token, bias)
    found = linear_logprobs(hidden, weight, target, b, softcap=softcap, logit_scale=0.7)
    x, w, exact_b = oracle.leaves(hidden, weight, b)
    wanted = oracle.logprobs(x, w, target, exact_b, softcap=softcap, logit_scale=0.7)
    for a, e in zip(found, wanted):
        assert a.shape == e.shape and a.dtype == torch.float32
        assert (a.double() - e).abs().max() <= 1e-5
    names = ["log_prob", "entropy", "lse"]
    take = [i for i, n in enumerate(names) if used in (n, "all")]
    g = oracle.generator(seed)
    ups = [torch.randn(wanted[i].shape, generator=g) for i in take]
    inputs = [t for t in (hidden, weight, b) if t is not None]
    exact = [t for t in (x, w, exact_b) if t is not None]
    ours = torch.autograd.grad([found[i] for i in take], inputs, ups)
    theirs = torch.autograd.grad([wanted[i] for i in take], exact, [u.double() for u in ups])
    for a, e in zip(ours, theirs):
        if e.norm() > 1e-9:
            assert oracle.error(a, e) <= oracle.GRADIENT[dtype] * (2 if dtype != torch.float32 else 1)


def test_class_probabilities():
    hidden, weight, _, _ = problem(7, (3, 10), 16, 40, torch.float32)
    p = torch.softmax(torch.randn(3, 10, 40), -1)
    for smoothing in (0.0, 0.2):
        for reduction in ("none", "mean", "sum"):
            found = linear_cross_entropy(hidden, weight, p, reduction=reduction, label_smoothing=smoothing)
            z = oracle.logits(hidden, weight).reshape(30, 40)
            wanted = torch.nn.functional.cross_entropy(z, p.reshape(30, 40), reduction=reduction, label_smoothing=smoothing)
            assert torch.allclose(found.reshape(wanted.shape), wanted, rtol=1e-5)


def test_one_token_without_a_batch():
    hidden, weight = torch.randn(16), torch.randn(30, 16)
    found = linear_cross_entropy(hidden, weight, torch.tensor(4), reduction="none")
    assert found.shape == () and abs(found - oracle.loss(hidden[None], weight, torch.tensor([4]))) < 1e-5
    log_prob, entropy, lse = linear_logprobs(hidden, weight, torch.tensor(4))
    assert log_prob.shape == entropy.shape == lse.shape == () and abs(log_prob + found) < 1e-5


def test_shift_reads_the_next_token():
    hidden, weight, target, _ = problem(8, (3, 20), 16, 50, torch.float32)
    for shift in (True, 1, 2):
        n = int(shift)
        found = linear_cross_entropy(hidden, weight, target, shift=shift)
        wanted = linear_cross_entropy(hidden[:, :-n], weight, target[:, n:])
        assert torch.equal(found, wanted)


def test_the_module():
    torch.manual_seed(0)
    head = LinearCrossEntropy(16, 50, bias=True, label_smoothing=0.1, softcap=5.0)
    hidden, target = torch.randn(7, 16), torch.randint(0, 50, (7,))
    wanted = linear_cross_entropy(hidden, head.weight, target, head.bias, label_smoothing=0.1, softcap=5.0)
    assert torch.equal(head(hidden, target), wanted)
    assert head(hidden, target, reduction="none").shape == (7,)
    assert set(head.state_dict()) == {"weight", "bias"} and "label_smoothing=0.1" in repr(head)
    with pytest.raises(TypeError, match="unexpected keyword argument 'lable_smoothing'; did you mean 'label_smoothing'"):
        LinearCrossEntropy(16, 50, lable_smoothing=0.1)
    with pytest.raises(ValueError, match="label_smoothing: expected a number from 0 to 1"):
        LinearCrossEntropy(16, 50, label_smoothing=1.5)


def test_memory_stays_within_the_budget():
    # The library counts by itself: the plan of the call and the tensors around it.
    import logitless

    text = logitless.explain(4096, 64, 50000, "bf16", memory_budget="24MiB")
    assert "workspace" in text
    hidden, weight, target, _ = problem(9, (512,), 32, 20000, torch.float32)
    with pytest.raises(ValueError, match="below the least plan"):
        linear_cross_entropy(hidden, weight, target, memory_budget=1000)


@pytest.mark.native
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_budget_is_a_ceiling(monkeypatch, dtype):
    """A small head takes no more with a large budget than without; a larger head takes no more than its fp32 logits."""
    from logitless.torch import _engine

    taken = []
    made = _engine.Call.__init__

    def noted(self, *arguments):
        made(self, *arguments)
        taken.append(self.workspace_bytes)

    monkeypatch.setattr(_engine.Call, "__init__", noted)
    for tokens, dim, vocab in ((1024, 64, 8192), (512, 16, 40000)):
        hidden, weight, target, _ = problem(11, (tokens,), dim, vocab, dtype)
        taken.clear()
        for budget in (None, "256MiB", "16GiB"):
            linear_cross_entropy(hidden, weight, target, memory_budget=budget)
        default, budgeted, plenty = taken
        assert budgeted == plenty
        if tokens * vocab * 4 <= 64 << 20:
            assert budgeted <= default
        if hidden.device.type == "cpu":
            assert budgeted < tokens * vocab * 4


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_a_logit_of_infinity(dtype):
    """The third row has one; PyTorch's log-sum-exp of it is infinite, its softmax NaN."""
    torch.manual_seed(0)
    hidden, weight = (torch.randn(n, 8, dtype=dtype) for n in (5, 300))
    hidden[:, 0], weight[140, 0] = -4, 3e38 if dtype != torch.float64 else 1e308
    hidden[2, 0] = 4
    target = torch.tensor([1, 2, 3, 4, 5])
    leaves = [t.clone().requires_grad_() for t in (hidden, weight)]
    loss, lse = linear_cross_entropy(*leaves, target, reduction="none", return_lse=True)
    z = hidden.float() @ weight.float().T if dtype != torch.float64 else hidden @ weight.T
    z.requires_grad_()
    wanted = F.cross_entropy(z, target, reduction="none")
    assert torch.allclose(loss.to(z.dtype), wanted, rtol=1e-5, equal_nan=True)
    assert torch.allclose(lse.to(z.dtype), torch.logsumexp(z, 1), rtol=1e-5)
    log_prob = linear_logprobs(hidden, weight, target)[0]
    assert torch.allclose(log_prob.to(z.dtype), -wanted, rtol=1e-5, equal_nan=True)
    (d_z,) = torch.autograd.grad(wanted.sum(), z)
    d_hidden, d_weight = torch.autograd.grad(loss.sum(), leaves)
    assert torch.isnan(d_z[2]).all() and torch.isnan(d_weight).all()
    assert torch.isnan(d_hidden).all(1).tolist() == torch.isnan(d_z).all(1).tolist()


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_a_token_of_weight_0_is_left_out(reduction):
    hidden, weight = torch.randn(12, 8), torch.randn(50, 8, requires_grad=True)
    target, of_token = torch.randint(0, 50, (12,)), torch.rand(12) + 0.5
    of_token[::3] = 0.0
    counted = of_token != 0.0
    hidden[::3] = float("nan")
    hidden.requires_grad_()
    wanted = linear_cross_entropy(
        hidden[counted], weight, target[counted], token_weight=of_token[counted], reduction=reduction, label_smoothing=0.1
    )
    gradients = torch.autograd.grad(wanted.sum(), (hidden, weight))
    loss = linear_cross_entropy(hidden, weight, target, token_weight=of_token, reduction=reduction, label_smoothing=0.1)
    torch.testing.assert_close(loss[counted] if reduction == "none" else loss, wanted)
    assert reduction != "none" or not loss[~counted].any()
    found = torch.autograd.grad(loss.sum(), (hidden, weight))
    assert not found[0][::3].any()
    torch.testing.assert_close(found, gradients)
    # Other results of a token are computed, whatever it weighs.
    _, lse = linear_cross_entropy(hidden.detach().nan_to_num(0.5), weight, target, token_weight=of_token, return_lse=True)
    assert (lse != 0.0).all()
    assert linear_cross_entropy(hidden.detach(), weight, target, token_weight=torch.zeros(12)) == 0.0
