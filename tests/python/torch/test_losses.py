"""The ready-made losses in PyTorch: dtypes, frozen tensors, memory, torch.compile and batch invariance. Their formulas
are in tests/python/losses."""

import pytest
import torch
from loss_frameworks import ADVANTAGES, BIAS, HIDDEN, REF_HIDDEN, REF_WEIGHT, TARGETS, WEIGHT, B
from logitless.torch import QuantizedWeight
from logitless.torch._peak import peak_of
from oracle import DEVICE, error, generator
from paper_losses import Papers

from logitless.torch import losses

PAPER = Papers(torch)
ON_CPU = DEVICE == "cpu"


def normal(*shape, seed=0, scale=1.0):
    return torch.randn(*shape, generator=generator(seed), dtype=torch.float64) * scale


class Problem:
    """A policy, and a wider reference or teacher."""

    def __init__(self, dtype=torch.float64):
        made = [torch.as_tensor(a, device=DEVICE).to(dtype) for a in (HIDDEN, WEIGHT, BIAS, REF_HIDDEN, REF_WEIGHT)]
        self.hidden, self.weight, self.bias = self.wanted = [t.requires_grad_() for t in made[:3]]
        self.teacher = made[3:]
        self.reference = dict(ref_hidden=made[3], ref_weight=made[4])
        self.target = torch.as_tensor(TARGETS, device=DEVICE)
        self.advantages = torch.as_tensor(ADVANTAGES, device=DEVICE)
        self.sampling = torch.full(self.target.shape, -3.0, device=DEVICE)
        self.arguments = self.hidden, self.weight, self.target


CALLS = {
    "dpo_loss": lambda p, **o: losses.dpo_loss(*p.arguments, p.bias, **p.reference, **o).loss,
    "orpo_loss": lambda p, **o: losses.orpo_loss(*p.arguments, p.bias, **o).loss,
    "grpo_loss": lambda p, **o: losses.grpo_loss(*p.arguments, p.advantages, p.bias, **p.reference, beta=0.1, **o).loss,
    "vespo_loss": lambda p, **o: losses.vespo_loss(
        *p.arguments, p.advantages, p.bias, sampling_per_token_logps=p.sampling, top_entropy_quantile=0.5,
        importance_sampling_mode="token_mask", off_policy_mask_threshold=0.5, **o).loss,
    "arcface_loss": lambda p, **o: losses.arcface_loss(p.hidden, p.weight, p.target, **o),
    "forward_kl_loss": lambda p, **o: losses.forward_kl_loss(p.hidden, p.weight, *p.teacher, p.bias, **o),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", ["dpo_loss", "orpo_loss", "grpo_loss"])
def test_other_dtypes(name, dtype):
    p, exact = Problem(dtype), Problem()
    for one, other in zip((*exact.wanted, *exact.teacher), (*p.wanted, *p.teacher)):
        one.data.copy_(other.detach())
    found, expected = CALLS[name](p), CALLS[name](exact)
    assert found.dtype == torch.float32 and error(found, expected) < 1e-5
    tolerance = 1e-4 if dtype == torch.float32 else 8e-3
    for one, other in zip(torch.autograd.grad(found, p.wanted), torch.autograd.grad(expected, exact.wanted)):
        assert one.dtype == dtype and error(one, other) < tolerance


@pytest.mark.parametrize("name", CALLS)
def test_frozen_sides_have_no_gradients(name):
    p = Problem()
    p.weight.requires_grad_(False)
    CALLS[name](p).backward()
    assert p.weight.grad is None and p.hidden.grad is not None
    with torch.no_grad():
        assert not CALLS[name](p).requires_grad


@pytest.mark.skipif(not ON_CPU, reason="counts what PyTorch's CPU allocator gives out")
@pytest.mark.parametrize("name", ["dpo_loss", "orpo_loss", "grpo_loss"])
def test_memory_is_far_below_the_logits(name):
    length, dim, vocab = 64, 16, 16384
    p = Problem(torch.float32)
    shapes = (2 * B, length, dim), (vocab, dim), (vocab,), (2 * B, length, dim + 2), (vocab, dim + 2)
    made = [normal(*shape, seed=i).float() for i, shape in enumerate(shapes)]
    p.hidden, p.weight, p.bias = p.wanted = [t.requires_grad_() for t in made[:3]]
    p.reference = dict(ref_hidden=made[3], ref_weight=made[4])
    p.arguments = p.hidden, p.weight, torch.randint(0, vocab, (2 * B, length), generator=generator(6))
    gradients = sum(4 * t.numel() for t in p.wanted)
    peak, _ = peak_of(lambda: torch.autograd.grad(CALLS[name](p, memory_budget="1MiB"), p.wanted))
    assert peak < gradients + (3 << 19) < 4 * 2 * B * length * vocab / 8


@pytest.mark.skipif(not ON_CPU, reason="counts what PyTorch's CPU allocator gives out")
def test_budgets_are_met():
    """bf16 gradients are right to their rounding, and a budget below the least program is an error."""
    rows, dim, vocab = 256, 16, 2048
    shapes = (rows, dim), (vocab, dim), (rows, dim + 2), (vocab, dim + 2), (vocab,)
    scales = 1.0, 1.5 / dim**0.5, 1.0, 1.5 / dim**0.5, 0.3
    made = [normal(*shape, seed=i, scale=s).bfloat16() for i, (shape, s) in enumerate(zip(shapes, scales))]
    wanted, teacher = [t.requires_grad_() for t in made[:2]], made[2:4]
    budget, logits = 1 << 19, 4 * rows * vocab
    losses.jsd_loss(*made, memory_budget=budget).backward()  # planned
    peak, gradients = peak_of(
        lambda: torch.autograd.grad(2.0 * losses.jsd_loss(*made, memory_budget=budget), wanted)
    )
    gradients = [g / 2.0 for g in gradients]  # the backward scaled them in place, in the forward's memory
    assert peak < budget + (1 << 14) < logits / 2
    exact = [t.detach().double().requires_grad_(t.requires_grad) for t in made]
    z_p = PAPER.logits(exact[0], exact[1], exact[4])
    reference = torch.autograd.grad(PAPER.jsd(z_p, PAPER.logits(exact[2], exact[3]), 0.5).mean(), exact[:2])
    assert all(error(one, other) < 4e-3 for one, other in zip(gradients, reference))
    text = losses.explain_divergence(*made, memory_budget=budget)
    assert "512.0 KiB, met)" in text and "forward_and_gradients" in text
    with pytest.raises(ValueError, match="budget"):
        losses.jsd_loss(*made, memory_budget=1 << 12)
    peak, _ = peak_of(lambda: losses.teacher_top_k(*teacher, k=4, memory_budget=budget), results_count=True)
    assert peak < budget + rows * 4 * 24


def test_a_divergence_has_no_second_derivatives():
    p = Problem(torch.float32)
    [gradient] = torch.autograd.grad(CALLS["forward_kl_loss"](p), p.hidden, create_graph=True)
    with pytest.raises(NotImplementedError, match="second derivatives"):
        torch.autograd.grad(gradient.sum(), p.hidden)


@pytest.mark.parametrize("name", CALLS)
def test_compiles_in_one_graph(name):
    p = Problem(torch.float32)
    whole = torch.compile(lambda: CALLS[name](p), backend="eager", fullgraph=True)()
    assert torch.equal(whole, CALLS[name](p))


def test_a_divergence_with_arguments_compiles_in_one_graph():
    p = Problem()
    found = torch.compile(
        lambda *a: 2 * losses.jsd_loss(*a, softcap=5.0, reduction="none"), backend="eager", fullgraph=True
    )(p.hidden, p.weight, *p.teacher)
    expected = 2 * PAPER.jsd(PAPER.logits(p.hidden, p.weight, softcap=5.0), PAPER.logits(*p.teacher), 0.5)
    assert error(found, expected) < 1e-12
    gradients = (torch.autograd.grad(x.sum(), (p.hidden, p.weight)) for x in (found, expected))
    assert all(error(one, other) < 1e-11 for one, other in zip(*gradients))


# --- Batch invariance.


def restored(threads):
    """Sets the number of threads. Returns a function that restores the number before."""
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    return lambda: torch.set_num_threads(before)


@pytest.mark.native
@pytest.mark.parametrize("options", [{}, dict(softcap=9.0, temperature=0.7)], ids=["plain", "capped"])
@pytest.mark.parametrize("dtype", [*[torch.float32] * ON_CPU, torch.bfloat16, torch.float16])
def test_the_same_bits_whatever_the_batch(dtype, options):
    """A token has the same bits alone, in another batch, at another position, with gradients, budgets and threads."""
    count, dim, vocab = 70, 33, 9001  # 71 tiles of the vocabulary: an odd number, the last one partial
    hidden = normal(count, dim, seed=1)
    hidden[3], hidden[40] = hidden[3] * 1000, 0.0
    hidden, weight = hidden.to(dtype), normal(vocab, dim, seed=2, scale=0.4).to(dtype)
    bias = normal(vocab, seed=3).float()
    index = torch.randint(0, vocab, (count,), generator=generator(4))

    def scored(rows, threads=1, grad=False, vocab_ids=None, **more):
        back = restored(threads)
        try:
            taken = hidden[rows].clone().requires_grad_(grad)
            return losses.selective_log_softmax(
                taken, weight, index[rows] if vocab_ids is None else vocab_ids, bias, batch_invariant=True, **options, **more
            ).detach()
        finally:
            back()

    every = torch.arange(count)
    alone = torch.cat([scored(every[i : i + 1]) for i in range(0, count, 6)])
    together = scored(every, threads=2, grad=True, memory_budget="64MiB")
    assert torch.equal(alone, together[::6])
    for size in (2, 7, 16, 17, 33, 64):
        rows = torch.randperm(count, generator=generator(size))[:size]
        assert torch.equal(scored(rows), together[rows]), size
    vocab_ids = index.clone()
    vocab_ids[::2] = -100  # tokens that are ignored are not computed
    assert torch.equal(scored(every, vocab_ids=vocab_ids)[1::2], together[1::2])
    several = torch.stack([index.flip(0), index, index], -1)
    if ON_CPU:  # a GPU's exponentials are relative to the token's own targets
        assert torch.equal(scored(every, vocab_ids=several)[:, 1], together)
    assert torch.equal(scored(every[9:11], vocab_ids=several[9:11]), scored(every, vocab_ids=several)[9:11])


@pytest.mark.native
def test_bits_that_are_not_promised_are_refused():
    """Refused are float64, quantised weights, temperatures that divide logits, and fp32 on a GPU."""
    p, single = Problem(), Problem(torch.float32).arguments
    quantised = single[0], QuantizedWeight(torch.ones(single[1].shape, dtype=torch.int8), torch.ones(()) / 8), single[2]
    each, own = torch.ones(p.target.shape), "expected the library's kernels, got PyTorch's own operations: "
    cases = [
        (own + "the library has no kernels for float64", p.arguments, {}), (own + "they may multiply", quantised, {}),
        (own + "they divide", single, dict(temperature=each, softcap=3.0)),
        (own + "they divide", single, dict(temperature=each, bias=p.bias.float())),
    ] + [("expected a kernel among hopper, .*, got cublas", single, {})] * (not ON_CPU)
    for message, arguments, options in cases:
        with pytest.raises(NotImplementedError, match="batch_invariant: " + message):
            losses.selective_log_softmax(*arguments, batch_invariant=True, **options)
    with pytest.raises(ValueError, match=r"index: expected \[6, 6\] or"):
        losses.selective_log_softmax(p.hidden, p.weight, p.target[1:])


def test_grad_cache_repeats_dropout_and_holds_one_micro_batch():
    """Gradients are those of the same calls of the encoder without it. Three activations of
    the whole batch have 2 MiB each."""
    rows, dim, wide = 512, 8, 512
    torch.manual_seed(0)
    encoder = torch.nn.Sequential(torch.nn.Linear(dim, wide), torch.nn.GELU(), torch.nn.Dropout(0.3), torch.nn.Linear(wide, dim))
    query, key = torch.randn(2, rows, dim)

    def gradients(encoded):
        torch.manual_seed(1)
        loss = losses.info_nce_loss(encoded(query), encoded(key), symmetric=True)
        return torch.autograd.grad(loss, list(encoder.parameters()))

    found = gradients(lambda x: losses.grad_cache(encoder, x, micro_batch=64))
    expected = gradients(lambda x: torch.cat([encoder(part) for part in x.split(64)]))
    for one, other in zip(found, expected):
        assert error(one, other) < 1e-6
    if ON_CPU:
        peaks = [
            peak_of(lambda e=e: gradients(e))[0] for e in (lambda x: losses.grad_cache(encoder, x, micro_batch=64), encoder)
        ]
        assert peaks[0] < 3 << 20 < 7 << 20 < peaks[1], peaks
