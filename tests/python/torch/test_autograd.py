"""PyTorch's own machinery with the losses: gradcheck, retained graphs, checkpointing, autocast, compilation."""

import oracle
import pytest
import torch
from logitless.torch import linear_cross_entropy, linear_logprobs
from logitless.torch.ranks import ALL
from test_loss import problem
from torch.utils.checkpoint import checkpoint


def small(per_token=0):
    g = oracle.generator(0)
    hidden = torch.randn(6, 4, generator=g, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(11, 4, generator=g, dtype=torch.float64, requires_grad=True)
    bias = torch.randn(11, generator=g, dtype=torch.float64, requires_grad=True)
    shape = (6, per_token) if per_token else (6,)
    target = torch.randint(0, 11, shape, generator=g)
    target.view(6, -1)[2] = -100
    return hidden, weight, target, bias


@pytest.mark.parametrize("reduction", ["none", "mean", "sum"])
@pytest.mark.parametrize(
    "options",
    [
        {},
        dict(label_smoothing=0.2, z_loss=0.05, softcap=3.0, logit_scale=0.7),
        dict(token_weight=torch.rand(6), class_weight=torch.rand(11) + 0.5, label_smoothing=0.1),
    ],
    ids=["plain", "terms", "weights"],
)
def test_gradcheck(reduction, options):
    hidden, weight, target, bias = small()
    assert torch.autograd.gradcheck(
        lambda x, w, b: linear_cross_entropy(x, w, target, b, reduction=reduction, **options), (hidden, weight, bias)
    )


@pytest.mark.parametrize("per_token", [0, 3])
def test_gradcheck_of_logprobs(per_token):
    hidden, weight, target, bias = small(per_token)
    assert torch.autograd.gradcheck(
        lambda x, w, b: linear_logprobs(x, w, target, b, softcap=3.0, logit_scale=0.7), (hidden, weight, bias)
    )


def test_float64_is_float64():
    from test_loss import compare

    hidden, weight, target, bias = small()
    compare(hidden, weight, target, bias, torch.tensor(0.3), label_smoothing=0.1, softcap=4.0)


def test_a_retained_graph_gives_the_gradients_again():
    hidden, weight, target, _ = problem(1, (30,), 16, 80, torch.float32)
    loss = linear_cross_entropy(hidden, weight, target)
    loss.backward(retain_graph=True)
    first = [hidden.grad.clone(), weight.grad.clone()]
    loss.backward(retain_graph=True)
    assert torch.equal(hidden.grad, 2 * first[0]) and torch.equal(weight.grad, 2 * first[1])
    loss.backward(torch.tensor(3.0))
    assert torch.allclose(weight.grad, 5 * first[1], rtol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_an_upstream_gradient_scales_in_place(dtype):
    """The backward returns the gradients that the forward made, unless the graph is retained."""
    hidden, weight, target, bias = problem(1, (30,), 16, 80, dtype, bias=True)
    leaves = (hidden, weight, bias)
    for kwargs in ({}, dict(token_weight=torch.ones(30))):  # cached calls, and checked ones
        for _ in range(2):
            loss = linear_cross_entropy(hidden, weight, target, bias, **kwargs)
            unscaled = [g.clone() for g in torch.autograd.grad(loss, leaves, retain_graph=True)]
            made = {t.data_ptr() for t in loss.grad_fn.saved_tensors}
            for factor in (1.0, 0.37):
                kept = torch.autograd.grad(loss * factor, leaves, retain_graph=True)
                assert not made & {g.data_ptr() for g in kept}
                for g, u in zip(kept, unscaled):
                    assert torch.equal(g, (u.float() * factor).to(g.dtype))
                    g.zero_()  # no other result uses this memory
            found = torch.autograd.grad(loss * 0.37, leaves)
            assert {g.data_ptr() for g in found} == made
            for g, u in zip(found, unscaled):
                assert torch.equal(g, (u.float() * 0.37).to(g.dtype))
            with pytest.raises(RuntimeError, match="second time"):
                loss.backward()


def test_a_second_derivative_is_refused():
    hidden, weight, target, _ = problem(1, (30,), 16, 80, torch.float32)
    for make in (
        lambda: linear_cross_entropy(hidden, weight, target),
        lambda: linear_cross_entropy(hidden, weight, target, reduction="none").sum(),
        lambda: linear_logprobs(hidden, weight, target)[0].sum(),
    ):
        for _ in range(2):  # a checked call and a cached one
            with pytest.raises(NotImplementedError, match="second derivatives"):
                torch.autograd.grad(make(), hidden, create_graph=True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_no_tokens(dtype):
    """The upstream gradient of a sum is expanded: an empty one has a stride of 0."""
    hidden, weight, target, bias = problem(1, (0,), 16, 70, dtype, bias=True)
    loss = linear_cross_entropy(hidden, weight, target, bias, reduction="none")
    log_prob, entropy, lse = linear_logprobs(hidden, weight, target, bias)
    for made in (loss, log_prob, entropy, lse):
        for found in torch.autograd.grad(made.sum(), (hidden, weight, bias), retain_graph=True):
            assert not found.any()


def test_checkpointing():
    hidden, weight, target, _ = problem(2, (30,), 16, 80, torch.float32)
    plain = linear_cross_entropy(hidden.tanh(), weight, target)
    wanted = torch.autograd.grad(plain, (hidden, weight))
    for reentrant in (False, True):
        loss = checkpoint(lambda x: linear_cross_entropy(x.tanh(), weight, target), hidden, use_reentrant=reentrant)
        loss.backward()
        assert torch.equal(hidden.grad, wanted[0]) and torch.equal(weight.grad, wanted[1])
        hidden.grad = weight.grad = None


def test_autocast_computes_in_its_dtype_and_keeps_fp32_gradients():
    hidden, weight, target, bias = problem(3, (40,), 32, 200, torch.float32, bias=True)
    with torch.autocast(oracle.DEVICE, torch.bfloat16):
        loss = linear_cross_entropy(hidden, weight, target, bias)
        log_prob, _, _ = linear_logprobs(hidden, weight, target, bias)
    found = torch.autograd.grad(loss, (hidden, weight, bias))
    x, w, b = oracle.leaves(hidden.bfloat16().requires_grad_(), weight.bfloat16().requires_grad_(), bias)
    wanted = oracle.loss(x, w, target, b)
    assert abs(loss.item() - wanted.item()) <= 1e-5
    for a, e in zip(found, torch.autograd.grad(wanted, (x, w, b))):
        assert a.dtype == torch.float32 and oracle.error(a, e) <= 4e-3
    assert log_prob.dtype == torch.float32
    # Sums are in fp32, never rounded to bf16: they are more accurate than bf16 allows.
    assert not torch.equal(found[1], found[1].bfloat16().float())


def test_inference_mode():
    hidden, weight, target, _ = problem(3, (40,), 32, 200, torch.float32)
    with torch.inference_mode():
        assert not linear_cross_entropy(hidden, weight, target).requires_grad
        assert not linear_logprobs(hidden, weight, target)[0].requires_grad


COMPILED = {
    "mean": lambda x, w, t, b: linear_cross_entropy(x.tanh(), w, t, b, softcap=4.0),
    "none": lambda x, w, t, b: (linear_cross_entropy(x, w, t, b, reduction="none") ** 2).sum(),
    "terms": lambda x, w, t, b: 2 * linear_cross_entropy(x, w, t, b, label_smoothing=0.1, z_loss=0.01, normalizer=9.0),
    "accuracy": lambda x, w, t, b: linear_cross_entropy(x, w, t, b, accuracy=True)[0],
    "logprobs": lambda x, w, t, b: sum((o**2).sum() for o in linear_logprobs(x, w, t, b)),
}


@pytest.mark.parametrize("name", COMPILED)
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_compile_without_a_graph_break(name, backend):
    if backend == "inductor" and name not in ("mean", "logprobs"):
        pytest.skip("the code generator is the same for all")
    function = COMPILED[name]
    hidden, weight, target, bias = problem(4, (3, 20), 16, 90, torch.float32, bias=True)
    torch._dynamo.reset()
    compiled = torch.compile(function, fullgraph=True, backend=backend)
    found, wanted = compiled(hidden, weight, target, bias), function(hidden, weight, target, bias)
    assert torch.allclose(found, wanted, rtol=1e-6)
    inputs = (hidden, weight, bias)
    for a, e in zip(torch.autograd.grad(found, inputs), torch.autograd.grad(wanted, inputs)):
        assert oracle.error(a, e) <= 1e-5


@pytest.mark.parametrize("name", COMPILED)
def test_compile_of_float64(name):
    hidden, weight, target, bias = problem(4, (3, 20), 16, 90, torch.float64, bias=True)
    torch._dynamo.reset()
    compiled = torch.compile(COMPILED[name], fullgraph=True, backend="aot_eager")
    found, wanted = compiled(hidden, weight, target, bias), COMPILED[name](hidden, weight, target, bias)
    assert found.dtype == torch.float64 and torch.allclose(found, wanted, rtol=1e-14)
    inputs = (hidden, weight, bias)
    for a, e in zip(torch.autograd.grad(found, inputs), torch.autograd.grad(wanted, inputs)):
        assert torch.equal(a, e) and a.any()


@pytest.mark.parametrize("name", COMPILED)
def test_gradients_of_float64(name):
    hidden, weight, target, bias = problem(5, (7,), 6, 11, torch.float64, bias=True)
    assert torch.autograd.gradcheck(lambda x, w, b: COMPILED[name](x, w, target, b), (hidden, weight, bias))


def test_compile_of_other_lengths():
    torch._dynamo.reset()
    compiled = torch.compile(COMPILED["mean"], fullgraph=True, backend="aot_eager", dynamic=True)
    for tokens in (20, 33, 47):
        hidden, weight, target, bias = problem(4, (tokens,), 16, 90, torch.float32, bias=True)
        assert torch.allclose(compiled(hidden, weight, target, bias), COMPILED["mean"](hidden, weight, target, bias), rtol=1e-6)


def test_operators_pass_torchs_own_checks():
    hidden, weight, target, bias = problem(5, (12,), 8, 30, torch.float32, bias=True)
    options = ["mean", "ieee", -100, 0.0, 0.0, 0.0, 1.0, 0.0, 0, 0.0, *ALL, None, 7, True]
    torch.library.opcheck(
        torch.ops.logitless.cross_entropy, (hidden, weight, target, bias, None, None, None, None, *options),
        test_utils=("test_schema", "test_faketensor", "test_autograd_registration"),
    )
    torch.library.opcheck(
        torch.ops.logitless.head, (hidden, weight, target, bias, "ieee", -100, 0.0, 1.0, 0, 0.0, *ALL, None, 7, True),
        test_utils=("test_schema", "test_faketensor", "test_autograd_registration", "test_aot_dispatch_static"),
    )


def test_concurrent_callers():
    import threading

    hidden, weight, target, _ = problem(6, (60,), 16, 300, torch.float32)
    wanted = torch.autograd.grad(linear_cross_entropy(hidden, weight, target), (hidden, weight))
    wrong = []

    def work():
        for _ in range(20):
            x, w = hidden.detach().requires_grad_(), weight.detach().requires_grad_()
            linear_cross_entropy(x, w, target).backward()
            if not (torch.equal(x.grad, wanted[0]) and torch.equal(w.grad, wanted[1])):
                wrong.append(1)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert not wrong
