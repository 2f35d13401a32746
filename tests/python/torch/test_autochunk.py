"""autochunk against the function it was given: outputs, gradients, memory, refusals."""

import re

import pytest

torch = pytest.importorskip("torch")

import torch.nn.functional as F
import torch.utils._pytree as pytree
from autochunk_options import check_options
from generated import autochunk
from torch.utils._python_dispatch import TorchDispatchMode

from logitless.torch._autochunk import Unsupported

DEVICE = torch.get_default_device().type  # conftest.py
ROWS, DIM, VOCAB = 50, 8, 600
LOGITS = ROWS * VOCAB  # numbers


class Largest(TorchDispatchMode):
    """Records the most elements of a tensor that an operation returns."""

    def __init__(self):
        super().__init__()
        self.numbers = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        made = func(*args, **(kwargs or {}))
        for tensor in pytree.tree_leaves(made):
            if isinstance(tensor, torch.Tensor):
                self.numbers = max(self.numbers, tensor.untyped_storage().nbytes() // tensor.element_size())
        return made


def random(*shape, dtype=torch.float64, scale=0.5, seed=0):
    generator = torch.Generator("cpu").manual_seed(sum(shape) + seed)
    made = torch.randn(shape, dtype=torch.float64, generator=generator, device="cpu") * scale
    return made.to(DEVICE, dtype).requires_grad_()


def whole(high, *shape, seed=7):
    generator = torch.Generator("cpu").manual_seed(seed)
    return torch.randint(0, high, shape, generator=generator, device="cpu").to(DEVICE)


def targets(rows=ROWS, vocab=VOCAB, ignored=3):
    made = whole(vocab, rows)
    made[ignored] = -100
    return made


def cross_entropy(hidden, weight, target):
    return F.cross_entropy(hidden @ weight.T, target)


def z_loss(hidden, weight, target):
    logits = hidden @ weight.T
    return F.cross_entropy(logits, target) + 1e-3 * logits.logsumexp(-1).square().mean()


def smoothed(hidden, weight, target):
    return F.cross_entropy(F.linear(hidden, weight), target, label_smoothing=0.1)


def softcapped(hidden, weight, target):
    return F.cross_entropy(30 * torch.tanh(hidden @ weight.T / 30), target, reduction="sum")


def per_token(hidden, weight, target):
    return F.cross_entropy(hidden @ weight.T, target, reduction="none")


def two_heads(hidden, weight, other, target):
    return F.cross_entropy(hidden @ weight.T, target) + F.cross_entropy(hidden @ other.T, target)


def log_probabilities(hidden, weight, target):
    index = target.clamp(min=0)
    return (hidden @ weight.T).log_softmax(-1).gather(-1, index[:, None]).squeeze(-1)


def dpo(hidden, weight, reference, reference_weight, target):
    policy = log_probabilities(hidden, weight, target).view(10, -1).sum(1)
    frozen = log_probabilities(reference, reference_weight, target).view(10, -1).sum(1)
    margin = policy - frozen
    return -F.logsigmoid(0.1 * (margin[:5] - margin[5:])).mean()


def distillation(hidden, weight, teacher, teacher_weight):
    student = F.log_softmax(hidden @ weight.T, -1)
    return F.kl_div(student, F.log_softmax(teacher @ teacher_weight.T, -1), log_target=True, reduction="batchmean")


def mlp(x, gain, bias, up, up_bias, down):
    y = F.layer_norm(x, (x.shape[-1],), gain, bias)
    return x + F.gelu(F.linear(y, up, up_bias), approximate="tanh") @ down


def contrastive(image, text):
    logits = F.normalize(image, dim=-1) @ F.normalize(text, dim=-1).T * 5.0
    labels = torch.arange(image.shape[0])
    return F.cross_entropy(logits, labels) + F.cross_entropy(logits.T, labels)


def head(dtype):
    return random(ROWS, DIM, dtype=dtype), random(VOCAB, DIM, dtype=dtype)


def arguments(fn, dtype):
    hidden, weight = head(dtype)
    if fn is two_heads:
        return hidden, weight, random(VOCAB, DIM, dtype=dtype, seed=1), targets()
    if fn is dpo:
        frozen = random(ROWS, DIM, dtype=dtype, seed=2).detach(), random(VOCAB, DIM, dtype=dtype, seed=3).detach()
        return hidden, weight, *frozen, targets()
    if fn is distillation:
        return hidden, weight, random(ROWS, DIM, dtype=dtype, seed=4), random(VOCAB, DIM, dtype=dtype, seed=5)
    if fn is mlp:
        sizes = (DIM,), (DIM,), (VOCAB, DIM), (VOCAB,), (VOCAB, DIM)
        return hidden, *(random(*s, dtype=dtype, seed=i) for i, s in enumerate(sizes))
    if fn is contrastive:
        return random(200, DIM, dtype=dtype), random(200, DIM, dtype=dtype, seed=6)
    return hidden, weight, targets()


FUNCTIONS = [
    cross_entropy,
    z_loss,
    smoothed,
    softcapped,
    per_token,
    log_probabilities,
    two_heads,
    dpo,
    distillation,
    mlp,
    contrastive,
]


def copies(args):
    return [a.detach().clone().requires_grad_(a.requires_grad) if isinstance(a, torch.Tensor) else a for a in args]


def run(fn, args, cotangent_seed=11):
    """Returns outputs, and gradients of the arguments for random cotangents."""
    args = copies(args)
    outputs = [o for o in pytree.tree_leaves(fn(*args)) if isinstance(o, torch.Tensor)]
    graded = [o for o in outputs if o.requires_grad]
    cotangents = [random(*o.shape, dtype=o.dtype, seed=cotangent_seed).detach() + 1.5 for o in graded]
    torch.autograd.backward(graded, cotangents)
    return outputs, [a.grad for a in args if isinstance(a, torch.Tensor)]


def check_same(fn, chunked, args, tolerance):
    expected, expected_grads = run(fn, args)
    actual, actual_grads = run(chunked, args)
    assert len(actual) == len(expected)
    for a, e in zip([*actual, *actual_grads], [*expected, *expected_grads]):
        if e is None:
            assert a is None
            continue
        assert a.dtype == e.dtype and a.shape == e.shape
        scale = max(e.double().abs().max().item(), 1e-30)
        assert (a.double() - e.double()).abs().max().item() <= tolerance * scale


@pytest.mark.parametrize("fn", FUNCTIONS, ids=lambda f: f.__name__)
def test_float64_and_no_value_of_the_size_of_the_logits(fn):
    args = arguments(fn, torch.float64)
    chunked = autochunk(fn, memory_budget="128KiB")
    check_same(fn, chunked, args, 1e-12)
    assert "for start in range(" in chunked.source()
    text = chunked.explain()
    assert " chunks of " in text and "met)" in text and "NOT met" not in text
    numbers = 200 * 200 if fn is contrastive else LOGITS
    args = copies(args)
    with Largest() as largest:
        outputs = chunked(*args)
        outputs.sum().backward()
    assert largest.numbers <= numbers / 2, text


@pytest.mark.parametrize("fn", [cross_entropy, z_loss, dpo, distillation, mlp], ids=lambda f: f.__name__)
def test_float32_and_bfloat16(fn):
    chunked = autochunk(fn, memory_budget="64KiB")
    check_same(fn, chunked, arguments(fn, torch.float32), 1e-5)
    # bf16 rounds every stored value: the result is as close to the exact gradients as that of the function itself.
    args = arguments(fn, torch.bfloat16)
    doubles = [a.detach().double().requires_grad_(a.requires_grad) if a.is_floating_point() else a for a in args]
    exact, plain, mine = ([*o, *g] for o, g in (run(fn, doubles), run(fn, args), run(chunked, args)))
    for e, p, m in zip(exact, plain, mine):
        if e is not None:
            assert m.dtype == p.dtype == torch.bfloat16
            error, allowed = (m - e).abs().max(), (p - e).abs().max()
            assert error <= 1.5 * allowed + 2**-7 * e.abs().max()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_logits_in_fp32_of_16_bit(dtype):
    def upcast(hidden, weight, target):
        return F.cross_entropy((hidden @ weight.T).float(), target)

    args = arguments(upcast, dtype)
    chunked = autochunk(upcast, memory_budget="64KiB")
    check_same(upcast, chunked, args, 2e-2)
    loss = chunked(*args)
    exact = upcast(*(a.double() if a.is_floating_point() else a for a in args))
    assert abs(loss.item() - exact.item()) < 2e-3


def test_the_scale_of_an_fp16_loss():
    """Gradients that underflow fp16 until they are multiplied by the cotangent."""

    def faint(hidden, weight, target):
        return F.cross_entropy((hidden @ weight.T).float(), target) * 1e-8

    args = copies(arguments(faint, torch.float16))
    doubles = [a.detach().double().requires_grad_(a.requires_grad) if a.is_floating_point() else a for a in args]
    (autochunk(faint, memory_budget="64KiB")(*args) * 1e8).backward()
    (cross_entropy(*doubles)).backward()
    for a, e in zip(args[:2], doubles[:2]):
        assert (a.grad - e.grad).abs().max() < 2e-2 * e.grad.abs().max()


@pytest.mark.parametrize("chunks", [1, 3, 7, ROWS])
def test_ragged_chunks(chunks):
    chunked = autochunk(cross_entropy, chunks=chunks)
    check_same(cross_entropy, chunked, arguments(cross_entropy, torch.float64), 1e-12)
    if chunks > 1:
        assert f"range(0, {ROWS}, {-(-ROWS // chunks)})" in chunked.source()


def test_memory_is_what_runs():
    args = copies(arguments(cross_entropy, torch.float32))
    chunked = autochunk(cross_entropy, memory_budget="64KiB")
    text = chunked.explain(*args)
    assert "outputs and gradients in one pass" in text and "without loops" in text
    before, after, *_ = (float(n) for n in re.findall(r"([\d.]+) KiB", text[text.index("forward_and_gradients:") :]))
    assert before > LOGITS * 4 / 1024 > after and after <= 64
    assert chunked.source(*args) == chunked.source(*args)


def test_gradients_backward_and_forward():
    args = arguments(cross_entropy, torch.float64)
    late = autochunk(cross_entropy, memory_budget="128KiB", gradients="backward")
    check_same(cross_entropy, late, args, 1e-12)
    assert "def forward(" in late.source() and "def backward(" in late.source()
    with pytest.raises(ValueError, match=r"needs one differentiable output of one element, got \[50\]; use 'backward'"):
        autochunk(per_token, gradients="forward")(*arguments(per_token, torch.float64))


@pytest.mark.parametrize("gradients", ["auto", "backward"])
def test_retain_graph(gradients):
    hidden, weight, target = copies(arguments(cross_entropy, torch.float64))
    loss = autochunk(cross_entropy, memory_budget="128KiB", gradients=gradients)(hidden, weight, target)
    (2.5 * loss).backward(retain_graph=True)
    first = weight.grad.clone()
    loss.backward()
    torch.testing.assert_close(weight.grad, first * 1.4, rtol=1e-12, atol=0)
    with pytest.raises(RuntimeError, match="second time"):
        loss.backward()


def test_what_needs_no_gradient():
    hidden, weight, target = copies(arguments(cross_entropy, torch.float64))
    chunked = autochunk(cross_entropy, memory_budget="128KiB")
    chunked(hidden, weight.detach(), target).backward()
    assert hidden.grad is not None and weight.grad is None and "d_weight" not in chunked.source()
    with torch.no_grad():
        loss = chunked(hidden, weight, target)
    assert not loss.requires_grad and "outputs alone" in chunked.explain()
    torch.testing.assert_close(loss, cross_entropy(hidden, weight, target), rtol=1e-12, atol=0)


def test_several_outputs_and_nested_arguments():
    def fn(batch, *, scale, sizes):
        logits = batch["hidden"] @ batch["weight"].T * scale
        losses = F.cross_entropy(logits, batch["target"], reduction="none")
        rows = batch["target"].shape[0]
        return {"loss": losses.mean(), "each": losses, "best": logits.detach().argmax(-1), "rows": rows, "sizes": sizes}

    hidden, weight, target = copies(arguments(cross_entropy, torch.float64))
    chunked = autochunk(fn, memory_budget="128KiB")
    batch = {"hidden": hidden, "weight": weight, "target": target}
    actual = chunked(batch, scale=0.5, sizes=(1, 2))
    expected = fn(batch, scale=0.5, sizes=(1, 2))
    assert actual["rows"] == ROWS and actual["sizes"] == (1, 2) and not actual["best"].requires_grad
    torch.testing.assert_close(actual["best"], expected["best"])
    (actual["loss"] + (actual["each"] ** 2).sum()).backward()
    mine, hidden.grad = hidden.grad, None
    (expected["loss"] + (expected["each"] ** 2).sum()).backward()
    torch.testing.assert_close(mine, hidden.grad, rtol=1e-12, atol=1e-14)


def test_new_shapes_and_constants_are_traced_again():
    calls = []

    @autochunk(memory_budget="128KiB")
    def loss(hidden, weight, target, smoothing):
        """A loss."""
        calls.append(hidden.shape)
        return F.cross_entropy(hidden @ weight.T, target, label_smoothing=smoothing)

    hidden, weight, target = arguments(cross_entropy, torch.float64)
    for _ in range(2):
        loss(hidden, weight, target, 0.0)
    traced = len(calls)
    loss(hidden[:20], weight, target[:20], 0.0)
    assert len(calls) > traced
    a, b = loss(hidden, weight, target, 0.1), F.cross_entropy(hidden @ weight.T, target, label_smoothing=0.1)
    torch.testing.assert_close(a, b, rtol=1e-12, atol=0)
    assert loss.__name__ == "loss" and loss.__doc__ == "A loss."


class Head(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = torch.nn.LayerNorm(DIM)
        self.head = torch.nn.Linear(DIM, VOCAB)
        self.register_buffer("scale", torch.tensor(0.5))

    def forward(self, hidden, target):
        return F.cross_entropy(self.head(self.norm(hidden)) * self.scale, target)

    def summed(self, hidden, target):
        return F.cross_entropy(self.head(hidden), target, reduction="sum")


@pytest.mark.parametrize("how", ["module", "method", "closure"])
def test_modules(how):
    torch.manual_seed(0)
    model = Head().double()
    fn = {"module": model, "method": model.summed, "closure": lambda hidden, target: model(hidden, target) * 2}[how]
    hidden, target = random(ROWS, DIM), targets()
    parameters = list(model.parameters()) if how != "method" else list(model.head.parameters())
    expected = torch.autograd.grad(fn(hidden, target), [hidden, *parameters])
    chunked = autochunk(fn, memory_budget="128KiB")
    actual = torch.autograd.grad(chunked(hidden, target), [hidden, *parameters])
    for a, e in zip(actual, expected):
        torch.testing.assert_close(a, e, rtol=1e-11, atol=1e-14)
    assert "head_weight" in chunked.source() and "for start" in chunked.source()


def test_closed_over_tensors():
    hidden, weight, target = arguments(cross_entropy, torch.float64)
    with pytest.raises(ValueError, match=r"closes over a tensor \[600, 8\] that requires a gradient"):
        autochunk(lambda hidden: cross_entropy(hidden, weight, target))(hidden)
    frozen = weight.detach()
    chunked = autochunk(lambda hidden: cross_entropy(hidden, frozen, target), memory_budget="128KiB")
    check_same(lambda hidden: cross_entropy(hidden, frozen, target), chunked, (hidden,), 1e-12)


def test_autocast():
    hidden, weight, target = arguments(cross_entropy, torch.float32)
    chunked = autochunk(cross_entropy, memory_budget="64KiB")
    with torch.autocast(DEVICE, dtype=torch.bfloat16):
        check_same(cross_entropy, chunked, (hidden, weight, target), 2e-2)
    assert "bfloat16" in chunked.source()
    chunked(hidden, weight, target)
    assert "bfloat16" not in chunked.source()


def test_chunks_of_the_vocabulary():
    """With few rows the vocabulary is cut, and indices count from the first vocabulary entry of the chunk."""
    args = random(2, DIM), random(5000, DIM), targets(2, 5000, ignored=1)
    chunked = autochunk(cross_entropy, memory_budget="40KiB")
    check_same(cross_entropy, chunked, args, 1e-12)
    assert "_pick(" in chunked.source() and "torch.logaddexp(" in chunked.source()


def test_embedding_and_attention():
    def fn(tokens, table, query, weight):
        x = F.embedding(tokens, table, padding_idx=0)
        q = (x @ query).view(2, 25, 2, 4).transpose(1, 2)
        y = F.scaled_dot_product_attention(q, q, q, is_causal=True).transpose(1, 2).reshape(2, 25, DIM)
        return F.cross_entropy((y[:, :-1] @ weight.T).flatten(0, 1), tokens[:, 1:].flatten())

    args = whole(30, 2, 25), random(30, DIM), random(DIM, DIM), random(VOCAB, DIM)
    chunked = autochunk(fn, chunks=3)
    check_same(fn, chunked, args, 1e-11)
    assert len(re.findall(r"for start\w* in range\(", chunked.source())) == 3


def test_chunks_of_a_table():
    """A large table is read and added into one block of its rows at a time."""

    def fn(index, table, projection):
        return F.embedding(index, (table @ projection).log_softmax(1)).square().sum()

    args = whole(3000, 20), random(3000, 4), random(4, 32)
    chunked = autochunk(fn, memory_budget="128KiB")
    check_same(fn, chunked, args, 1e-12)
    assert "_take(" in chunked.source() and "_scatter_add(" in chunked.source()


def sequence_log_probabilities(hidden, weight, tokens, mask):
    logits = (hidden @ weight.T)[:, :-1]
    logp = logits.log_softmax(-1).gather(-1, tokens[:, 1:, None]).squeeze(-1)
    return (logp * mask[:, 1:]).sum(-1), logits


def shifted_dpo(hidden, weight, tokens, mask):
    chosen, rejected = sequence_log_probabilities(hidden, weight, tokens, mask)[0].chunk(2)
    return -F.logsigmoid(0.1 * (chosen - rejected)).mean()


def simpo(hidden, weight, tokens, mask):
    average = sequence_log_probabilities(hidden, weight, tokens, mask)[0] / mask[:, 1:].sum(-1)
    half = len(average) // 2
    return -F.logsigmoid(2.0 * (average[:half] - average[half:]) - 0.5).mean()


def cpo(hidden, weight, tokens, mask):
    total, half = sequence_log_probabilities(hidden, weight, tokens, mask)[0], len(tokens) // 2
    return -F.logsigmoid(0.1 * (total[:half] - total[half:])).mean() - total[:half].mean()


def kto(hidden, weight, tokens, mask):
    total, half = sequence_log_probabilities(hidden, weight, tokens, mask)[0], len(tokens) // 2
    parts = torch.sigmoid(0.1 * (total[:half] - 0.3)), torch.sigmoid(0.1 * (0.3 - total[half:]))
    return 1 - torch.cat(parts).mean()


def rows_of_pairs(hidden, weight, tokens, mask):
    logits = hidden.flatten(0, 1) @ weight.T
    logp = logits.log_softmax(-1).gather(-1, tokens.reshape(-1, 1)).view(len(tokens), -1).sum(1)
    return -F.logsigmoid(0.1 * (logp[: len(tokens) // 2] - logp[len(tokens) // 2 :])).mean()


def shifted_labels(hidden, weight, tokens, mask):
    logits = (hidden @ weight.T)[..., :-1, :].contiguous().view(-1, len(weight))
    return F.cross_entropy(logits, tokens[:, 1:].contiguous().view(-1))


@pytest.mark.parametrize(
    "fn", [shifted_dpo, simpo, cpo, kto, rows_of_pairs, shifted_labels], ids=lambda f: f.__name__
)
def test_sequences_and_pairs_are_one_phase(fn):
    hidden, weight = random(16, 17, 4), random(512, 4)
    args = hidden, weight, whole(512, 16, 17), torch.ones(16, 17, dtype=hidden.dtype)
    chunked = autochunk(fn)
    check_same(fn, chunked, args, 1e-11)
    assert " 1 phase" in chunked.explain() and "2 phases" not in chunked.explain(), chunked.explain()
    assert "% more" not in chunked.explain()


def test_many_indices_of_a_row_are_one_operation():
    def fn(hidden, weight, index, share):
        logp = (hidden @ weight.T).log_softmax(-1)
        return -(logp.gather(-1, index) * share).sum(-1).mean()

    index, share = whole(VOCAB, ROWS, 40), random(ROWS, 40).detach()
    index[:, 1] = index[:, 0]  # two rows that add up
    chunked = autochunk(fn, memory_budget="128KiB")
    check_same(fn, chunked, (*head(torch.float64), index, share), 1e-11)
    assert chunked.source().count(".gather(") == 1 and chunked.source().count(".scatter_add_(") == 1


def arithmetic(x, i):
    a = (x**3).clamp(-1, 1) + x.abs().sqrt() - x / (1 + x * x) + torch.where(x > 0, 1.0, 0.0) * x + x.sign() * x
    return a.sum() + torch.maximum(x, x.mean(0)).sum() + torch.minimum(x, x.detach() * 2).sum() + (2 - x).exp().sum()


def activations(x, i):
    return F.gelu(x) + F.silu(x) + F.softplus(x) + F.elu(x) + F.leaky_relu(x) + F.mish(x) + F.relu6(x) + torch.erf(x)


def reductions(x, i):
    normed = F.rms_norm(x, (x.shape[-1],)).var() + x.norm() + x.std(1).sum() + x.amin(0).sum() + x.mean()
    return normed + x.max(1).values.sum(), x.argmax(1), x.argmin(0), (x > 1).any(1), (x > -9).all()


def softmaxes(x, i):
    masked = x.masked_fill(i[:, None] > 3, float("-inf"))
    return masked.softmax(0) + x.log_softmax(1) * x.logsumexp(1, keepdim=True) + torch.logaddexp(x, x[:1])


def losses(x, i):
    weighted = F.cross_entropy(x, i, weight=torch.arange(1.0, x.shape[1] + 1).double())
    soft = F.cross_entropy(x, x.detach().softmax(1)) + F.binary_cross_entropy_with_logits(x, (x > 0).double())
    far = F.smooth_l1_loss(x, i[:, None].double().expand_as(x)) + F.huber_loss(x, x.detach() * 3)
    return weighted + soft + far + F.cosine_similarity(x, x.roll(1, 0)).sum()


def shapes(x, i):
    parts = torch.cat([x[:, :3], x[:, 5:]], 1).square().sum() + x.chunk(3, 1)[1].sum() + sum(x.unbind(1)).sum()
    moved = (x.movedim(0, 1) @ x.tril()).sum() + torch.stack([x, x * 2]).sum() + x.repeat(2, 3).exp().sum()
    return parts + moved + F.pad(x, (1, 2), value=3.0).exp().sum() + x[-3:, 2].sum() + x.roll(2, 1)[:, 0].sum()


def indices(x, i):
    one = x[torch.arange(x.shape[0]), i].sum() + x[i].exp().sum() + x[:, i].exp().sum() + x[i, i].exp().sum()
    two = x.gather(1, torch.stack([i, (i + 1) % 5], 1)).exp().sum() + x.index_select(1, i).exp().sum()
    return one + two + (torch.zeros_like(x).scatter_add(1, i[:, None], x[:, :1]) * x).sum()


def products(x, i):
    batched = torch.bmm(x.view(4, 6, 10), x.view(4, 10, 6)).exp().sum() + (x.view(4, 6, 10) @ x[:10]).exp().sum()
    return batched + torch.einsum("ab,cb->ac", x, x).sum() + (x @ x[0]).exp().sum() + torch.outer(x[0], x[1]).sum()


def constants(x, i):
    scaled = x * torch.tensor([2.0] * x.shape[1], dtype=x.dtype) + torch.ones(x.shape[1], dtype=x.dtype)
    return x, scaled.sum(), {"transposed": x.T, "rows": 3, "none": None}


@pytest.mark.parametrize(
    "fn",
    [arithmetic, activations, reductions, softmaxes, losses, shapes, indices, products, constants],
    ids=lambda f: f.__name__,
)
def test_operations(fn):
    check_same(fn, autochunk(fn, chunks=3), (random(24, 10), whole(5, 24)), 1e-11)


@pytest.mark.parametrize(
    ("fn", "named"),
    [
        (lambda x: torch.poisson(x).sum(), r"aten\.poisson.*rand"),
        (lambda x: x.to(torch.complex64).abs().sum(), r"torch\.complex64"),
        (lambda x: x[(x > 0).nonzero()].sum(), r"aten\.nonzero\.default needs the values"),
        (lambda x: x * x.sum().item(), r"aten\._local_scalar_dense\.default needs the values"),
    ],
    ids=["poisson", "complex", "mask", "item"],
)
def test_refusals_name_the_operation(fn, named):
    with pytest.raises(NotImplementedError, match=named):
        autochunk(fn)(random(4, 6, dtype=torch.float32))


def test_writing_in_place():
    def into_a_view(x, view):
        y = x * 2
        view(y).zero_()
        return y.sum()

    with pytest.raises(Unsupported, match=r"aten\.copy_\.default\(.*\) writes into memory that aten\.\w+"):
        autochunk(into_a_view)(random(4, 6), lambda y: y.view(6, 4).diagonal(1))
    with pytest.raises(Unsupported, match="writes into an input"):
        autochunk(lambda x: x.mul_(2).sum())(random(4, 6).detach())

    def of_its_own(x):
        return (x * 2).add_(1).relu_().sum()

    check_same(of_its_own, autochunk(of_its_own), (random(4, 6),), 1e-12)


def test_a_matrix_and_its_transpose():
    """No operation writes into memory that it reads in another order."""

    def fn(x):
        product = x @ x.T + 1
        return ((product - product.T * 2) ** 2).sum() + (product.exp() / product.exp().T).mean()

    check_same(fn, autochunk(fn, memory_budget="16KiB"), (random(40, DIM, scale=0.2),), 1e-11)


def test_unsupported_can_run_unchunked():
    chunked = autochunk(lambda x: x[x.nonzero()[:, 0]].sum(), unsupported="run")
    with pytest.warns(UserWarning, match=r"runs unchunked: .*aten\.nonzero"):
        assert chunked(torch.ones(2, 3)).item() == 18
    assert "aten.nonzero" in chunked.explain()
    with pytest.raises(RuntimeError, match="runs unchunked"):
        chunked.source()


def test_strict():
    args = arguments(cross_entropy, torch.float32)
    with pytest.raises(ValueError, match=r"strict: forward_and_gradients takes [\d.]+ \w+ beyond .*, memory_budget is 100 B"):
        autochunk(cross_entropy, memory_budget=100, strict=True)(*args)
    assert "NOT met" in autochunk(cross_entropy, memory_budget=100).explain(*args)


def test_second_derivatives_are_refused():
    hidden, weight, target = arguments(cross_entropy, torch.float64)
    for gradients in ("forward", "backward"):
        loss = autochunk(cross_entropy, gradients=gradients)(hidden, weight, target)
        [slope] = torch.autograd.grad(loss, hidden, create_graph=True)
        torch.testing.assert_close(slope.mul_(2), torch.autograd.grad(2 * cross_entropy(hidden, weight, target), hidden)[0])
        with pytest.raises(NotImplementedError, match="second derivatives"):  # a gradient penalty would be left out
            torch.autograd.grad(slope.square().sum() + hidden.sum(), hidden)


def test_options():
    check_options(autochunk, cross_entropy, torch.ones(2), "a tensor")


def test_layers_that_share_the_body_of_a_loop():
    def layers(x, *weights):
        for w in weights:
            x = x + torch.tanh(x @ w) @ w.T
        return x.square().mean()

    args = random(256, 32), *(random(32, 512, scale=0.1) for _ in range(3))
    chunked = autochunk(layers, memory_budget="600KiB")  # the source has a comment that names the layers
    check_same(layers, chunked, args, 1e-11)
