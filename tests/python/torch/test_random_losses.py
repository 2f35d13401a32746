"""Random combinations of losses, and heads whose two operands are one value, against plain PyTorch in float64.

LOGITLESS_RANDOM_LOSSES=2000 tries so many, with other random choices each time, instead of the few of every run.
"""

import os

import oracle
import pytest

torch = pytest.importorskip("torch")

import torch.nn.functional as F
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from logitless.torch import autochunk
from logitless.torch._compile import register

register()
ASKED = int(os.environ.get("LOGITLESS_RANDOM_LOSSES", "0"))
N, D = 520, 16  # 1 MiB of logits, if the vocabulary is as large
VOCAB = [N, 1000]


def normalised(x):
    return F.normalize(x, dim=-1)


def rms(x):
    return F.rms_norm(x, (x.shape[-1],))


def attended(h):
    x = h.view(2, 2, N // 4, D)
    return F.scaled_dot_product_attention(x, x, x, is_causal=True).reshape(N, D)


# Hidden states x [.., D] from h [N, D], w [V, D], m [2 D, D] and t [N].
HIDDEN = {
    "plain": lambda h, w, m, t: h,
    "rms": lambda h, w, m, t: rms(h),
    "layer norm": lambda h, w, m, t: F.layer_norm(h, (D,), m[0] + 1, m[1]),
    "normalised": lambda h, w, m, t: normalised(h) * 4,
    "mlp": lambda h, w, m, t: h + F.gelu(h @ m.T, approximate="tanh") @ m,
    "next token": lambda h, w, m, t: torch.cat([rms(h), rms(F.embedding(t % w.shape[0], w))], -1) @ m,
    "both directions": lambda h, w, m, t: torch.cat([h, h.flip(0)], -1) @ m,
    "columns": lambda h, w, m, t: torch.cat([h[:, 6:], h[:, :6]], -1),
    "rows": lambda h, w, m, t: torch.cat([h[N // 2 :], h[: N // 2]]),
    "shifted": lambda h, w, m, t: h.roll(1, 0) + h,
    "sequences": lambda h, w, m, t: h.view(4, N // 4, D),
    "no last": lambda h, w, m, t: h.view(2, N // 2, D)[:, :-1],
    "embedding": lambda h, w, m, t: F.embedding(t % w.shape[0], w) + h,
    "product": lambda h, w, m, t: (h @ m[:D]) @ m[D:],
    "attention": lambda h, w, m, t: attended(h),
    "square": lambda h, w, m, t: h * h - h,
    "turned": lambda h, w, m, t: h.T.contiguous().tanh().T,
    "detached half": lambda h, w, m, t: torch.cat([h[: N // 2].detach(), h[N // 2 :]]),
    "running mean": lambda h, w, m, t: h.cumsum(0) / torch.arange(1, N + 1, dtype=h.dtype)[:, None],
    "gated": lambda h, w, m, t: F.silu(h @ m[:D]) * (h @ m[D:]),
}
# Weights [V, D] from x, h, w and m.
WEIGHT = {
    "plain": lambda x, h, w, m: w,
    "normalised": lambda x, h, w, m: normalised(w) * 4,
    "adapter": lambda x, h, w, m: w + (w @ m[:2].T) @ m[2:4],
    "joined": lambda x, h, w, m: torch.cat([w[64:], w[:64].detach()]),
    "scaled": lambda x, h, w, m: w * (1 + m[0]),
    "fewer": lambda x, h, w, m: w[:-16],
    "hidden": lambda x, h, w, m: h,
    "hidden, detached": lambda x, h, w, m: h.detach(),
    "itself": lambda x, h, w, m: x.reshape(-1, D),
    "itself, turned": lambda x, h, w, m: x.reshape(-1, D).T.contiguous().T,
    "itself, normalised": lambda x, h, w, m: normalised(x.reshape(-1, D)) * 4,
    "part of itself": lambda x, h, w, m: x.reshape(-1, D)[:512],
}
# Logits from logits, w and m.
LOGITS = {
    "temperature": lambda z, w, m: z / 1.5,
    "scale": lambda z, w, m: 0.7 * z,
    "learned scale": lambda z, w, m: z * (m[0, 0] + 1),
    "softcap": lambda z, w, m: 3 * torch.tanh(z / 3),
    "bias": lambda z, w, m: z + (w @ m[0])[torch.arange(z.shape[-1]) % w.shape[0]],
    "fewer": lambda z, w, m: z[..., :-16],
    "masked": lambda z, w, m: z.masked_fill(torch.arange(z.shape[-1]) % 50 == 7, -1e4),
    "not itself": lambda z, w, m: z.masked_fill(torch.eye(*z.shape[-2:], dtype=torch.bool), -1e4),
    "float": lambda z, w, m: z.to(torch.promote_types(z.dtype, torch.float32)),
}


def log_probs(z, t):
    return z.log_softmax(-1).gather(1, t[:, None]).squeeze(1)


# Losses of logits [n, v] with labels [n].
LOSSES = {
    "mean": lambda z, t: F.cross_entropy(z, t),
    "sum": lambda z, t: F.cross_entropy(z, t, reduction="sum") / N,
    "ignored": lambda z, t: F.cross_entropy(z, torch.where(t % 5 == 0, -100, t)),
    "smoothed": lambda z, t: F.cross_entropy(z, t, label_smoothing=0.1),
    "z loss": lambda z, t: F.cross_entropy(z, t) + 1e-2 * z.logsumexp(-1).square().mean(),
    "weighted": lambda z, t: (F.cross_entropy(z, t, reduction="none") * (t % 3)).mean(),
    "by hand": lambda z, t: (z.logsumexp(-1) - z[torch.arange(z.shape[0]), t]).mean(),
    "focal": lambda z, t: -((1 - log_probs(z, t).exp()) ** 2 * log_probs(z, t)).mean(),
    "entropy": lambda z, t: F.cross_entropy(z, t) + 0.1 * (z.softmax(-1) * z.log_softmax(-1)).sum(-1).mean(),
    "distillation": lambda z, t: F.kl_div(
        z.log_softmax(-1), z.detach().flip(0).log_softmax(-1), log_target=True, reduction="batchmean"
    ),
    "ratio": lambda z, t: (torch.exp(log_probs(z, t) - log_probs(z, t).detach()) * (t % 3 - 1.3)).clamp(-1, 0.5).mean(),
    "both ways": lambda z, t: F.cross_entropy(z, t) + z.logsumexp(0).mean(),
    "squares": lambda z, t: F.cross_entropy(z, t) + 1e-2 * (z * z).mean(),
    "sigmoid": lambda z, t: F.binary_cross_entropy_with_logits(z, F.one_hot(t, z.shape[1]).to(z.dtype)),
    "pairs": lambda z, t: -F.logsigmoid(log_probs(z, t).view(2, -1).diff(dim=0)).mean(),
}
OPTIONS = [{}, {"memory_budget": "1MiB"}, {"memory_budget": 1}, {"chunks": 3}, {"gradients": "backward"}]


def written(hidden, weight, logits, loss):
    """Returns the loss of these names as a function of h, w, m and t."""

    def fn(h, w, m, t):
        x = HIDDEN[hidden](h, w, m, t)
        z = x @ WEIGHT[weight](x, h, w, m).T
        for name in logits:
            z = LOGITS[name](z, w, m)
        z = z.flatten(0, -2)
        z = z[: z.shape[0] // 2 * 2]
        return LOSSES[loss](z, t[: z.shape[0]] % z.shape[1])

    return fn


def arguments(vocab, dtype):
    g = oracle.generator(vocab)
    made = [torch.randn(size, generator=g, device=oracle.DEVICE) for size in ((N, D), (vocab, D), (2 * D, D))]
    made[2] = made[2] / 4
    t = torch.randint(0, vocab, (N,), generator=g, device=oracle.DEVICE)
    return *(a.to(dtype).requires_grad_() for a in made), t


def results(fn, vocab, dtype):
    h, w, m, t = arguments(vocab, dtype)
    loss = fn(h, w, m, t)
    return [loss, *torch.autograd.grad(loss, (h, w, m), allow_unused=True)]


def check(fn, made, vocab=N):
    """Compares under the contract with float64, or to the error of the function itself in fp32.

    The parts of a gradient that cancel are up to the size of the largest gradient, and each is rounded to 2^-24 of it.
    """
    exact, plain = (results(fn, vocab, dtype) for dtype in (torch.float64, torch.float32))
    largest = max(e.norm() for e in exact[1:] if e is not None)
    for i, (found, p, e) in enumerate(zip(results(made, vocab, torch.float32), plain, exact)):
        contract = (oracle.GRADIENT if i else oracle.LOSS)[torch.float32]
        if e is None or found is None:
            assert e is None or e.norm() == 0
            continue
        scale = (torch.maximum(e.norm(), 2**-24 / contract * largest) if i else e.norm()).clamp(min=1e-30)
        error, of_plain = ((x.double() - e).norm() / scale for x in (found, p))
        assert error <= max(contract, of_plain), (("loss", "d_h", "d_w", "d_m")[i], error.item(), of_plain.item())


@settings(
    max_examples=ASKED or 16,
    deadline=None,
    suppress_health_check=list(HealthCheck),
    derandomize=not ASKED,
    database=None,
    phases=[Phase.generate],  # the failure of one example has all details, and shrinking would take minutes
)
@given(
    hidden=st.sampled_from(list(HIDDEN)),
    weight=st.sampled_from(list(WEIGHT)),
    logits=st.lists(st.sampled_from(list(LOGITS)), max_size=2, unique=True),
    loss=st.sampled_from(list(LOSSES)),
    vocab=st.sampled_from(VOCAB),
    executor=st.sampled_from(["native", "python"]),
    options=st.sampled_from(OPTIONS),
)
def test_random_losses(hidden, weight, logits, loss, vocab, executor, options):
    fn = written(hidden, weight, logits, loss)
    check(fn, autochunk(fn, executor=executor, **options), vocab)


# Cases that once lost gradients silently: one value is both operands, or most of both.
ALIASED = [
    ("plain", "itself", [], "mean"),
    ("plain", "itself", ["scale", "bias"], "mean"),
    ("plain", "itself", ["softcap"], "mean"),
    ("plain", "itself", ["temperature"], "z loss"),
    ("plain", "itself", ["not itself"], "ignored"),
    ("plain", "itself", [], "both ways"),
    ("plain", "itself", [], "smoothed"),
    ("plain", "hidden, detached", [], "mean"),
    ("plain", "itself, turned", [], "mean"),
    ("normalised", "itself", [], "mean"),
    ("normalised", "hidden", [], "sum"),
    ("rows", "itself", [], "by hand"),
    ("turned", "itself, normalised", [], "mean"),
    ("detached half", "itself", [], "mean"),
    ("no last", "part of itself", [], "mean"),
    ("both directions", "itself", [], "mean"),
]


def described(names):
    return " ".join([*names[:2], *names[2], names[3]])


@pytest.mark.parametrize("names", ALIASED, ids=described)
def test_both_sides_are_one_value(names):
    fn = written(*names)
    check(fn, autochunk(fn, executor="native"))


@pytest.mark.parametrize("names", ALIASED[::4], ids=described)
def test_both_sides_are_one_value_in_python(names):
    fn = written(*names)
    check(fn, autochunk(fn, executor="python"))


@pytest.mark.parametrize("names", [ALIASED[i] for i in (0, 7, 11)], ids=described)
def test_both_sides_are_one_value_compiled(names):
    torch._dynamo.reset()
    fn = written(*names)
    check(fn, torch.compile(fn, backend="logitless", options={"inner": "aot_eager"}))


def test_several_tokens_ahead():
    """The second head of DeepSeek-V3, behind a concatenation of the state and the next embedding."""

    def fn(h, w, m, t):
        x = HIDDEN["next token"](h, w, m, t)
        return F.cross_entropy(h @ w.T, t) + 0.3 * F.cross_entropy(x @ w.T, t.roll(-1))

    check(fn, autochunk(fn, executor="native"), VOCAB[1])
