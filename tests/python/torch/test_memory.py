"""Tensors whose memory is on another device, freed or in another layout: an error that names the argument, and no
crash."""

import oracle
import pytest
import torch
import torch.nn.functional as F
from logitless.torch import FarFieldHead, autochunk, linear_cross_entropy, linear_logprobs
from logitless.torch._lazy._patch import lazy_linear
from logitless.torch.run import rows_are_aligned
from logitless.torch.losses import (
    TopK, cpo_loss, dpo_loss, grpo_loss, jsd_loss, kto_loss, orpo_loss, selective_log_softmax, teacher_top_k, top_k_loss,
)
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

B, T, D, V, DEVICE = 4, 3, 8, 40, oracle.DEVICE
ELSEWHERE = ["meta"] if DEVICE == "cpu" else ["meta", "cpu"]


def normal(*shape, seed=0):
    return torch.randn(shape, generator=oracle.generator(seed), device=DEVICE)


def whole(*shape, below=V):
    return torch.randint(0, below, shape, generator=oracle.generator(1), device=DEVICE)


def ones(*shape):
    return torch.ones(shape, device=DEVICE)


def top_k(hidden, vocab_ids, log_probs, **given):
    return top_k_loss(hidden, top_k=TopK(vocab_ids, log_probs), **given)


def chunked_native(hidden, weight, target):
    return CHUNKED(hidden, weight, target)


CHUNKED = autochunk(lambda h, w, t: F.cross_entropy(F.linear(h, w), t), executor="native", chunks=2)
HEAD = dict(hidden=normal(B, T, D), weight=normal(V, D, seed=2), target=whole(B, T), bias=normal(V, seed=3))
REFERENCE = dict(ref_hidden=normal(B, T, D, seed=4), ref_weight=normal(V, D, seed=5), ref_bias=normal(V, seed=6))
TEACHER = dict(teacher_hidden=normal(B, T, D, seed=4), teacher_weight=normal(V, D, seed=5), teacher_bias=normal(V, seed=6))
WIDE = {name: t if t.dtype == torch.int64 else t.double() for name, t in HEAD.items()}
# Calls and their tensors, by name. Tests move each tensor to another device in turn.
CALLS = {
    "loss": (linear_cross_entropy, dict(HEAD, class_weight=ones(V), token_weight=ones(B, T), normalizer=ones()[()] * 7)),
    "remembered": (lambda **a: linear_cross_entropy(*a.values()), HEAD),
    "each": (lambda **a: linear_cross_entropy(reduction="none", **a), HEAD),
    "float64": (linear_cross_entropy, dict(WIDE, token_weight=ones(B, T).double())),
    "words": (linear_cross_entropy, dict(HEAD, target=whole(B, T, 2), target_weight=ones(B, T, 2))),
    "probabilities": (linear_cross_entropy, dict(HEAD, target=normal(B, T, V).softmax(-1))),
    "positions": (
        linear_cross_entropy,
        dict(hidden=normal(B, D), weight=normal(V, 2, D), target=whole(B, 2), bias=normal(V, 2), class_weight=ones(V)),
    ),
    "logprobs": (linear_logprobs, HEAD),
    "far_field": (lambda **a: FarFieldHead()(**a), dict(HEAD, token_weight=ones(B, T), class_weight=ones(V))),
    "selective": (
        selective_log_softmax, dict(hidden=HEAD["hidden"], weight=HEAD["weight"], index=whole(B, T), bias=HEAD["bias"])
    ),
    "dpo": (dpo_loss, dict(HEAD, **REFERENCE)),
    "orpo": (orpo_loss, dict(HEAD, nll_target=whole(B, T))),
    "cpo": (cpo_loss, HEAD),
    "kto": (
        lambda **a: kto_loss(kl=0.0, **a), dict(HEAD, preference_labels=whole(B, below=2).bool(), ref_logps=normal(B))
    ),
    "grpo": (
        lambda **a: grpo_loss(beta=0.1, **a),
        dict(HEAD, advantages=normal(B), mask=ones(B, T), old_per_token_logps=normal(B, T), ref_per_token_logps=normal(B, T)),
    ),
    "jsd": (jsd_loss, dict(HEAD, **TEACHER)),
    "top_k": (top_k, dict(HEAD, vocab_ids=whole(B, T, 2), log_probs=normal(B, T, 2))),
    "teacher_top_k": (lambda **a: teacher_top_k(k=2, **a), TEACHER),
    "autochunk": (chunked_native, dict(hidden=normal(B, D), weight=normal(V, D), target=whole(B))),
}
NAMES = dict(vocab_ids="top_k.vocab_ids", log_probs="top_k.log_probs")
OTHERS = [(call, name) for call, (_, tensors) in CALLS.items() if call != "autochunk" for name in list(tensors)[1:]]


@pytest.mark.parametrize("call, name", OTHERS)
def test_a_tensor_elsewhere_is_named(call, name):
    function, tensors = CALLS[call]
    first = next(iter(tensors))
    for device in ELSEWHERE:
        if name == "normalizer" and device == "cpu":
            continue
        with pytest.raises(ValueError, match=f"^{NAMES.get(name, name)}: expected it on {DEVICE}.*, where {first} is, got {device}"):
            function(**{**tensors, name: tensors[name].to(device)})


@pytest.mark.parametrize("call, name", [(call, name) for call, (_, tensors) in CALLS.items() for name in tensors])
def test_memory_that_is_gone_is_named(call, name):
    """FSDP frees a storage between uses, of a tensor alone in it or of a view behind others."""
    function, tensors = CALLS[call]
    for before, left in ((0, 0), (3, 0), (3, 1)):  # one missing element is enough
        flat = torch.cat([ones(before).to(tensors[name].dtype), tensors[name].flatten()])
        given = {**tensors, name: flat[before:].view(tensors[name].shape)}
        function(**given)  # cached calls, too
        flat.untyped_storage().resize_((flat.numel() - 1) * flat.element_size() * left)
        wanted = "input . of a program" if call == "autochunk" else NAMES.get(name, name)
        with pytest.raises(ValueError, match=f"^{wanted}: its memory, [0-9]+ bytes, is not there"):
            function(**given)


@pytest.mark.parametrize("name", ["hidden", "weight", "target", "bias", "class_weight", "token_weight"])
def test_layouts_are_named(name):
    tensors = CALLS["loss"][1]
    given = [("sparse_coo", tensors[name].to_sparse())]
    given += [("nested", torch.nested.nested_tensor(list(tensors[name])))] if tensors[name].dim() > 1 else []
    if tensors[name].is_floating_point() and DEVICE == "cpu":
        given.append(("quantized", torch.quantize_per_tensor(tensors[name], 0.1, 0, torch.qint8)))
    for kind, t in given:
        with pytest.raises(TypeError, match=f"^{name}: expected a dense tensor, got a {kind} one"):
            linear_cross_entropy(**{**tensors, name: t})
        if name in HEAD:  # by position, for cached calls
            with pytest.raises(TypeError, match=f"^{name}: expected a dense tensor, got a {kind} one"):
                linear_cross_entropy(*{**HEAD, name: t}.values())


def negated(t):
    """Returns the same numbers, stored with the other sign."""
    return torch.complex(torch.zeros_like(t), -t).conj().imag


@pytest.mark.parametrize("name", ["hidden", "weight", "bias", "class_weight", "token_weight"])
def test_a_negative_bit_is_heeded(name):
    function, tensors = CALLS["loss"]
    other = negated(tensors[name])
    assert other.is_neg() and torch.equal(other, tensors[name])
    for more in ({}, dict(reduction="none", normalizer=None)):
        assert torch.equal(function(**{**tensors, name: other, **more}), function(**tensors, **more) if not more else function(**{**tensors, **more}))
    plain = {n: HEAD[n] for n in ("hidden", "weight", "target", "bias")}
    if name in plain:  # cached calls
        values = [linear_cross_entropy(*{**plain, name: t}.values()) for t in (tensors[name], other, tensors[name])]
        assert values[0] == values[1] == values[2]


def test_a_negative_bit_of_upstream_gradients_is_heeded():
    hidden = HEAD["hidden"].clone().requires_grad_()
    upstream = normal(B, T, seed=9)
    for call in (
        lambda: linear_cross_entropy(hidden, HEAD["weight"], HEAD["target"], reduction="none"),
        lambda: linear_logprobs(hidden, HEAD["weight"], HEAD["target"])[0],
        lambda: linear_logprobs(hidden, HEAD["weight"], HEAD["target"])[1],
    ):
        wanted, found = (torch.autograd.grad(call(), hidden, g)[0] for g in (upstream, negated(upstream)))
        assert torch.equal(wanted, found)
    call = lambda: linear_cross_entropy(hidden, HEAD["weight"], HEAD["target"])  # noqa: E731
    wanted, found = (torch.autograd.grad(call(), hidden, g)[0] for g in (upstream[0, 0], negated(upstream)[0, 0]))
    assert torch.equal(wanted, found)


@pytest.mark.parametrize("call", [
    lambda x, w, y: linear_cross_entropy(x, w, y, reduction="none"), lambda x, w, y: linear_logprobs(x, w, y)[0],
])
@pytest.mark.parametrize("name", ["hidden", "weight"])
def test_memory_that_is_gone_before_the_backward_is_named(call, name):
    given = {n: HEAD[n].clone() for n in ("hidden", "weight", "target")}
    call(given["hidden"].requires_grad_(), given["weight"].requires_grad_(), given["target"]).sum().backward()  # planned
    leaves = {n: t.requires_grad_() if t.is_floating_point() else t for n, t in given.items()}
    loss = call(*leaves.values()).sum()
    leaves[name].untyped_storage().resize_(0)
    with pytest.raises(ValueError, match=f"^{name}: its memory"):
        loss.backward()


def test_zeros_without_memory_are_named():
    """PyTorch's zero tensors stand for gradients that nobody computes."""
    with pytest.raises(ValueError, match="^bias: expected a tensor with memory of its own"):
        linear_cross_entropy(*{**HEAD, "bias": torch._efficientzerotensor(V, device=DEVICE)}.values())
    zeros = torch._efficientzerotensor(V, device=DEVICE), torch.zeros(V, device=DEVICE)  # the dispatcher gives them memory
    found, wanted = (
        torch.func.grad(lambda h: linear_cross_entropy(h, HEAD["weight"], HEAD["target"], z))(HEAD["hidden"]) for z in zeros
    )
    assert torch.equal(found, wanted)


def test_partitioned_parameters_are_named():
    """DeepSpeed's ZeRO-3 leaves parameters without elements between uses."""
    weight = nn.Parameter(torch.empty(0, device=DEVICE))
    weight.ds_shape = torch.Size((V, D))
    for call in (linear_cross_entropy, linear_logprobs, FarFieldHead(), selective_log_softmax):
        with pytest.raises(ValueError, match=r"^weight: is empty, its \[40, 8\] being partitioned by DeepSpeed's ZeRO-3"):
            call(HEAD["hidden"], weight, HEAD["target"])


def test_tensors_without_numbers():
    """FakeTensors give shapes; beside real tensors PyTorch refuses them."""
    mode = FakeTensorMode()
    fake = {name: mode.from_tensor(t) for name, t in HEAD.items()}
    for reduction, shape in (("mean", ()), ("none", (B, T))):
        linear_cross_entropy(*HEAD.values(), reduction=reduction)  # fills the cache
        found = linear_cross_entropy(*fake.values(), reduction=reduction)
        assert type(found).__name__ == "FakeTensor" and found.shape == shape
    for name in ("hidden", "weight", "target", "bias", "token_weight"):
        given = {**HEAD, name: fake[name] if name in fake else mode.from_tensor(ones(B, T))}
        with pytest.raises(Exception, match="FakeTensor|fake"):
            linear_cross_entropy(**given)


def test_rows_that_a_gpu_reads_in_place():
    """Rows are contiguous and begin at multiples of 16 bytes, or would in memory of their own."""
    wide, odd = torch.zeros(6, 16), torch.zeros(6, 9)
    assert wide.data_ptr() % 16 == odd.data_ptr() % 16 == 0
    for t, aligned in (
        (wide, True), (odd, True), (wide[:, :9], True), (wide[:, 4:], True), (wide[2:], True), (wide[::2], True), (wide[0], True),
        (wide[None], True), (wide[:, 1:], False), (odd[:, :8], False), (odd[1:], False), (odd[1], False), (wide.t(), False),
        (wide[:, ::2], False), (wide[:1].expand(6, 16), False), (wide.bfloat16()[:, :8], True), (wide.bfloat16()[:, 4:], False),
        (torch.zeros(6, 12).bfloat16()[:, :8], False),
    ):
        assert rows_are_aligned(t) == aligned, (t.shape, t.stride(), t.storage_offset(), t.dtype)


@pytest.mark.parametrize("device", ELSEWHERE)
def test_lazy_logits_leave_it_to_pytorch(device):
    """Lazy logits raise the error of real logits."""
    hidden, weight, target, bias = HEAD["hidden"].reshape(-1, D), HEAD["weight"], HEAD["target"].flatten(), HEAD["bias"]
    logits = lazy_linear(hidden, weight, bias)
    with pytest.raises(RuntimeError):
        F.cross_entropy(logits, target.to(device))
    with pytest.raises(RuntimeError):
        lazy_linear(hidden, weight, bias.to(device))


def test_a_number_of_the_cpu_goes_to_a_program():
    scaled = autochunk(lambda h, w, t, s: F.cross_entropy(F.linear(h, w) * s, t), executor="native", chunks=2)
    hidden, weight, target = (CALLS["autochunk"][1][n] for n in ("hidden", "weight", "target"))
    found = scaled(hidden, weight, target, torch.tensor(0.5))
    assert torch.allclose(found, F.cross_entropy(0.5 * F.linear(hidden, weight), target), rtol=1e-5)


def test_a_normalizer_is_a_scalar():
    for call in (linear_cross_entropy, FarFieldHead()):
        for value, found in (
            (torch.tensor([4.0]), r"float32\[1\]"), (torch.ones(2, 2), r"float32\[2, 2\]"), (torch.tensor(True), r"bool\[\]")
        ):
            with pytest.raises(ValueError, match=rf"^normalizer: expected a number or a scalar tensor, got {found}"):
                call(HEAD["hidden"], HEAD["weight"], HEAD["target"], normalizer=value.to(DEVICE))
        assert call(HEAD["hidden"], HEAD["weight"], HEAD["target"], normalizer=torch.tensor(4)).shape == ()
