"""torch.compile(backend="logitless") against eager execution: values that it chunks or leaves, with the same
results."""

import importlib.metadata
import math
import os
import re
import shutil

import pytest

torch = pytest.importorskip("torch")

import torch.nn.functional as F
from torch import _inductor

from logitless._library import parse_bytes
from logitless.torch import explain_compiled
from logitless.torch._compile import register

register()
DEVICE = torch.get_default_device().type  # conftest.py
BATCH, LENGTH, DIM, VOCAB = 4, 32, 16, 2000
# Inductor compiles for many seconds: all other tests use AOTAutograd alone.
OPTIONS = {"memory_budget": "600KiB", "min_bytes": "256KiB", "inner": "aot_eager"}


class Block(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.norms = torch.nn.ModuleList(torch.nn.LayerNorm(DIM) for _ in range(2))
        self.qkv, self.out = torch.nn.Linear(DIM, 3 * DIM), torch.nn.Linear(DIM, DIM)
        self.up, self.down = torch.nn.Linear(DIM, 4 * DIM), torch.nn.Linear(4 * DIM, DIM)

    def forward(self, x):
        parts = (y.view(*y.shape[:-1], 2, -1).transpose(1, 2) for y in self.qkv(self.norms[0](x)).chunk(3, -1))
        x = x + self.out(F.scaled_dot_product_attention(*parts, is_causal=True).transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.norms[1](x))))


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = torch.nn.Embedding(VOCAB, DIM)
        self.block = Block()
        self.head = torch.nn.Linear(DIM, VOCAB, bias=False)
        self.register_buffer("steps", torch.zeros(()))

    def forward(self, ids, targets, with_logits=False):
        self.steps += 1
        logits = self.head(self.block(self.embedding(ids))).float()
        loss = F.cross_entropy(logits.view(-1, logits.size(-1)), targets.view(-1))
        return (loss, logits) if with_logits else loss


def random(*shape, seed=0):
    generator = torch.Generator("cpu").manual_seed(sum(shape) + seed)
    return torch.randn(shape, generator=generator, device="cpu").to(DEVICE)


def tokens(batch=BATCH, seed=0):
    generator = torch.Generator("cpu").manual_seed(seed)
    return torch.randint(0, VOCAB, (batch, LENGTH), generator=generator, device="cpu").to(DEVICE)


@pytest.fixture(autouse=True)
def fresh():
    torch._dynamo.reset()
    torch.manual_seed(0)


def compiled(fn, dynamic=False, **options):
    return torch.compile(fn, backend="logitless", fullgraph=True, dynamic=dynamic, options={**OPTIONS, **options})


def gradients(fn, *args):
    """Returns outputs, and gradients of the floating arguments."""
    leaves = [a.detach().clone().requires_grad_(a.is_floating_point()) for a in args]
    made = fn(*leaves)
    outputs = made if isinstance(made, tuple) else (made,)
    torch.autograd.backward([o.sum() for o in outputs if o.requires_grad])
    return *outputs, *(leaf.grad for leaf in leaves if leaf.is_floating_point())


def check_same(actual, expected):
    for a, e in zip(actual, expected, strict=True):
        assert a.dtype == e.dtype and a.shape == e.shape
        # A difference of losses has the rounding of its terms, each about log(VOCAB).
        assert (a - e).abs().max() <= 1e-5 * e.abs().max() + 1e-6 * math.log(VOCAB) * (a.dim() == 0)


def check_function(fn, *args, chunked, **options):
    check_same(gradients(compiled(fn, **options), *args), gradients(fn, *args))
    text = explain_compiled()
    assert text.count("\n  chunked: ") == chunked, text
    return text


def test_a_model_and_its_loss():
    model = Model().to(DEVICE)
    ids, targets = tokens(), tokens(seed=1)
    expected = model(ids, targets)
    expected.backward()
    gradient = {name: p.grad for name, p in model.named_parameters()}
    model.zero_grad()
    graphs = []

    def inner(graph, inputs):
        graphs.append(graph)
        return torch._dynamo.lookup_backend("aot_eager")(graph, inputs)

    step = compiled(model, inner=inner)
    loss = step(ids, targets)
    loss.backward()
    torch.testing.assert_close(loss, expected, rtol=1e-6, atol=0)
    for name, p in model.named_parameters():
        torch.testing.assert_close(p.grad, gradient[name], rtol=1e-5, atol=1e-7)
    assert model.steps == 2
    # One graph, in which no logits are made.
    [graph] = graphs
    assert sum(node.name.startswith("logitless_region") for node in graph.graph.nodes) == 1
    text = explain_compiled()
    assert re.search(r"\n  chunked: test_compile_backend\.py:\d+: logits = self\.head\(.*: linear float32\[4, 32, 2000\]\n", text)
    sizes = r"forward_and_gradients: ([\d.]+ [KM]iB) beyond .* without loops, ([\d.]+ [KM]iB) with"
    before, after = (parse_bytes(size.replace(" ", "")) for size in re.search(sizes, text).groups())
    assert after < 0.75 * before

    # A call that returns the logits has to make them, also without gradients.
    with torch.no_grad():
        torch.testing.assert_close(step(ids, targets), expected.detach())
        with pytest.warns(UserWarning, match="linear float32.* whole; compile a function that returns the loss alone, as torch.co"):
            logits = step(ids, targets, True)[1]
        torch.testing.assert_close(logits, model(ids, targets, True)[1])
    text = explain_compiled()
    assert "outputs alone" in text and "linear float32[4, 32, 2000]: the graph returns a value of its size" in text
    assert model.steps == 5


def test_the_loss_alone_of_a_model_that_returns_logits():
    """The warning's advice works: no graph has the logits."""
    model = Model().to(DEVICE)
    ids, targets = tokens(), tokens(seed=1)
    step = compiled(lambda **batch: model(**batch)[0])
    loss = step(ids=ids, targets=targets, with_logits=True)
    torch.testing.assert_close(loss, model(ids, targets), rtol=1e-6, atol=0)
    loss.backward()
    assert re.search(r"\n  chunked: .*linear float32\[4, 32, 2000\]\n", explain_compiled())


def test_a_bad_label_is_an_error_of_the_compiled_step():
    """A CPU raises an error with the name, as in a step that is not compiled; a GPU returns NaN."""
    hidden, weight = torch.rand(64, 16, requires_grad=True), torch.rand(4000, 16)
    target = torch.arange(64)
    target[5] = 4000
    step = compiled(lambda h, w, y: F.cross_entropy(h @ w.T, y), inner="aot_eager")
    if DEVICE != "cpu":
        assert step(hidden, weight, target).isnan()
        return
    with pytest.raises(IndexError, match=r"index 4000 at \[5\] is out of bounds for dimension 1 with size 4000"):
        step(hidden, weight, target)


@pytest.mark.skipif(DEVICE == "cpu" and not shutil.which("g++"), reason="Inductor compiles with g++")
def test_the_rest_goes_to_inductor():
    body, head = torch.nn.Linear(DIM, DIM).to(DEVICE), random(VOCAB, DIM, seed=1).requires_grad_()
    hidden, targets = random(BATCH * LENGTH, DIM), tokens().flatten()

    def loss(hidden, head):
        return F.cross_entropy(F.gelu(body(hidden)) @ head.T, targets)

    _inductor.metrics.reset()
    step = torch.compile(loss, backend="logitless", options={k: v for k, v in OPTIONS.items() if k != "inner"})
    check_same(gradients(step, hidden, head), gradients(loss, hidden, head))
    assert "\n  chunked: " in explain_compiled()
    assert _inductor.metrics.generated_kernel_count > 0


def z_loss(hidden, weight, target):
    logits = hidden @ weight.T
    return F.cross_entropy(logits, target) + 1e-3 * logits.logsumexp(-1).square().mean()


def per_token(hidden, weight, target):
    return F.cross_entropy(hidden @ weight.T, target, reduction="none")


def two_parts(hidden, weight, target):
    """Operations between the two uses of the logits belong to the region."""
    logits = hidden @ weight.T
    largest = logits.detach().amax(-1, keepdim=True)
    return ((logits - largest).exp().sum(-1).log() + largest.squeeze(-1)).mean() - F.cross_entropy(logits, target)


def head():
    return random(BATCH * LENGTH, DIM), random(VOCAB, DIM), tokens().flatten()


@pytest.mark.parametrize("fn", [z_loss, per_token, two_parts], ids=lambda f: f.__name__)
def test_heads(fn):
    text = check_function(fn, *head(), chunked=1)
    assert ("outputs now, gradients in backward" in text) == (fn is per_token)


def test_a_budget():
    text = check_function(z_loss, *head(), chunked=1, memory_budget="512KiB")
    assert "(budget 512.0 KiB, met)" in text


def test_scores_of_attention_and_a_wide_layer():
    def attention(q, k, v):
        return (q @ k.transpose(-1, -2)).softmax(-1) @ v

    check_function(attention, *(random(4, 256, 8, seed=i) / 2 for i in range(3)), chunked=1)

    def mlp(x, up, down):
        return F.gelu(x @ up.T) @ down.T

    args = random(2048, DIM), random(16 * DIM, DIM), random(4 * DIM, 16 * DIM)
    torch._dynamo.reset()
    text = check_function(mlp, *args, chunked=0)
    assert re.search(r"matmul float32\[2048, 256\]: what is kept of it has 131072 numbers, it 524288: less than ratio=8 times", text)
    torch._dynamo.reset()
    check_function(mlp, *args, chunked=1, ratio=4)


def test_layers_of_one_width_are_no_region():
    layers = torch.nn.Sequential(*(torch.nn.Linear(DIM, DIM) for _ in range(3))).to(DEVICE)
    wide = torch.nn.Sequential(torch.nn.Linear(DIM, 600), *(torch.nn.Linear(600, 600) for _ in range(9))).to(DEVICE)
    x = random(BATCH * LENGTH, DIM)
    check_function(lambda x: layers(x.sin()).square().sum(), x, chunked=0, min_bytes=64)
    assert "no product is large enough" in explain_compiled()
    torch._dynamo.reset()
    check_function(lambda x: wide(x).square().mean(), x, chunked=0)
    assert "values of its size come from more than 8 products" in explain_compiled()


def test_what_has_no_form_is_left():
    def ordered(hidden, weight, target):
        logits = hidden @ weight.T
        return logits.mode(-1).values.sum() + F.cross_entropy(logits, target)

    text = check_function(ordered, *head(), chunked=0)
    assert re.search(r"not chunked: test_compile_backend\.py:\d+: logits = .*aten\.mode\.default", text)


def test_random_numbers_are_left():
    def noisy(hidden, weight, target):
        logits = hidden @ weight.T
        return F.cross_entropy(torch.where(torch.rand_like(logits) < 2, logits, 0), target)

    assert "it draws random numbers" in check_function(noisy, *head(), chunked=0)


def test_writing_in_place():
    def into_logits(hidden, weight, target):
        logits = hidden @ weight.T
        logits[:, 0] = 0
        logits /= 2
        return F.cross_entropy(logits, target)

    def into_what_is_kept(hidden, weight, target):
        losses = per_token(hidden, weight, target)
        first = losses[:1]
        first.mul_(3)
        return losses.sum()

    def into_an_input(hidden, weight, target, count):
        logits = hidden @ weight.T
        count.add_(target[0])
        return F.cross_entropy(logits, target) * count

    for fn in (into_logits, into_what_is_kept):
        torch._dynamo.reset()
        check_function(fn, *head(), chunked=0)
    torch._dynamo.reset()
    total = torch.zeros((), device=DEVICE)

    def into_a_sum(hidden, weight, target):
        loss = z_loss(hidden, weight, target)
        total.add_(loss.detach())
        return loss

    check_function(into_a_sum, *head(), chunked=1)
    torch.testing.assert_close(total, 2 * z_loss(*head()))
    torch._dynamo.reset()
    counts = torch.ones((), device=DEVICE), torch.ones((), device=DEVICE)
    step = compiled(into_an_input)
    for count, fn in zip(counts, (into_an_input, step)):
        fn(*head(), count)
    assert torch.equal(*counts) and "writes into memory" in explain_compiled()


def test_gradients_off_and_autocast_within():
    def distillation(hidden, weight, target):
        with torch.no_grad():
            teacher = (hidden @ weight.T).softmax(-1)
        return F.cross_entropy(hidden @ weight.T * 2, teacher)

    def cast(hidden, weight, target):
        with torch.autocast(DEVICE, dtype=torch.bfloat16):
            logits = hidden @ weight.T
        return F.cross_entropy(logits.float(), target)

    check_function(distillation, *head(), chunked=0)
    torch._dynamo.reset()
    check_function(cast, *head(), chunked=0)
    assert "changes how values are computed" in explain_compiled()
    # With autocast around the step, its operations are those under autocast.
    torch._dynamo.reset()
    step = compiled(z_loss)
    with torch.autocast(DEVICE, dtype=torch.bfloat16):
        made, expected = (fn(*head()) for fn in (step, z_loss))
    torch.testing.assert_close(made, expected, rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize("dynamic", [True, None])
def test_other_shapes(dynamic):
    step = compiled(z_loss, dynamic=dynamic)
    hidden, weight, target = head()
    for rows in (128, 120, 112, 128):
        args = hidden[:rows], weight, target[:rows]
        check_same(gradients(step, *args), gradients(z_loss, *args))
    assert "\n  chunked: " in explain_compiled()


def test_options():
    def message(**options):
        torch._dynamo.reset()
        with pytest.raises(Exception) as raised:
            compiled(z_loss, **options)(*head())
        return str(raised.value)

    assert "there is no option 'memory'; expected memory_budget, min_bytes, ratio, inner, inner_options" in message(memory=1)
    assert "min_bytes: expected bytes, or text such as" in message(min_bytes=0)
    assert "ratio: expected a number, 1 or more, got 0.5" in message(ratio=0.5)
    assert "inner: expected another backend of torch.compile, got 'logitless'" in message(inner="logitless")
    assert "inner_options: expected a dict, got 3" in message(inner_options=3)
    assert "'much' is not a number of bytes" in message(memory_budget="much")


@pytest.mark.skipif("LOGITLESS_LIBRARY" in os.environ, reason="another package than the one installed")
def test_the_entry_point():
    [found] = importlib.metadata.entry_points(group="torch_dynamo_backends", name="logitless")
    assert found.value == "logitless.torch._compile:backend" and callable(found.load())
