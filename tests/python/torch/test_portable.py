"""The implementation in PyTorch's own operations: options against float64, budgets as ceilings, devices without
kernels, and systems without the library."""

import functools
import os
import subprocess
import sys
import threading
import weakref

import oracle
import pytest
import torch
import torch.distributed
from logitless._losses.chunks import plan_of
from logitless._options import HeadOptions, LossOptions
from logitless.torch import (
    _backend, _chunks, _portable, _portable_head, _portable_plan, _portable_products, _portable_tokens, backend, groups, linear_cross_entropy, linear_logprobs, linear_sample,
    linear_top_logprobs, losses,
)
from logitless.torch._peak import peak_of
from logitless.torch._precision import products_in
from logitless.torch.ranks import ALL, VocabShard
from test_loss import compare, problem
from torch.utils._python_dispatch import TorchDispatchMode

pytestmark = pytest.mark.skipif(oracle.DEVICE != "cpu", reason="other tests run on a GPU with LOGITLESS_BACKEND=portable")
_DTYPES = torch.float32, torch.float16, torch.bfloat16
STORED, RECOMPUTED = None, 150_000  # budgets


@pytest.fixture(autouse=True)
def portable(monkeypatch):
    monkeypatch.setenv("LOGITLESS_BACKEND", "portable")


@pytest.fixture
def wide_products(monkeypatch):
    """Emulates a device that multiplies 16-bit matrices with results in fp32."""
    for module in (_portable_head, _portable_products, _chunks):
        monkeypatch.setattr(module, "has_wide_products", lambda device, dtype: True)
        monkeypatch.setattr(module, "wide_product", lambda a, b: (a.double() @ b.double()).float())


def options_of(tokens, vocab):
    g = oracle.generator(5)
    weights = dict(class_weight=torch.rand(vocab, generator=g) + 0.5, token_weight=torch.rand(tokens, generator=g))
    return [
        {},
        dict(reduction="none", softcap=3.0, logit_scale=0.5, **weights),
        dict(reduction="sum", label_smoothing=0.1, z_loss=0.01, **weights),
        dict(label_smoothing=0.2, softcap=5.0, normalizer=7.0),
    ]


@pytest.mark.parametrize("budget", [STORED, RECOMPUTED])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_options(dtype, budget):
    for per_token in (0, 3):
        hidden, weight, target, bias = problem(3, (90,), 24, 500, dtype, per_token, bias=True)
        for options in options_of(90, 500):
            if per_token:
                options = dict(options, target_weight=torch.rand(90, 3, generator=oracle.generator(8)))
            upstream = torch.rand(90, generator=oracle.generator(9)) if options.get("reduction") == "none" else None
            compare(hidden, weight, target, bias, upstream, memory_budget=budget, **options)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_products_with_results_in_fp32(dtype, wide_products):
    test_options(dtype, STORED)
    test_options(dtype, RECOMPUTED)


@pytest.mark.parametrize("budget", [STORED, RECOMPUTED])
def test_log_probabilities(budget):
    for dtype in (torch.float32, torch.bfloat16):
        for softcap in (None, 4.0):
            hidden, weight, target, bias = problem(4, (3, 30), 24, 500, dtype, 2, bias=True)
            found = linear_logprobs(hidden, weight, target, bias, softcap=softcap, memory_budget=budget, return_argmax=True)
            x, w, b = oracle.leaves(hidden, weight, bias)
            wanted = oracle.logprobs(x, w, target, b, softcap=softcap)
            for one, exact in zip(found, wanted):
                assert (one - exact).abs().max() < 2e-5
            z = oracle.logits(x, w, b, softcap)
            assert (found[3] == torch.where((target != -100).any(-1), z.argmax(-1), -1)).all()
            ups = [torch.rand(t.shape, generator=oracle.generator(i)) for i, t in enumerate(wanted)]
            for chosen in ((0, 1, 2), (1,), (0,)):
                ours = torch.autograd.grad([found[i] for i in chosen], (hidden, weight, bias), [ups[i] for i in chosen], retain_graph=True)
                theirs = torch.autograd.grad([wanted[i] for i in chosen], (x, w, b), [ups[i].double() for i in chosen], retain_graph=True)
                for a, e in zip(ours, theirs):
                    assert oracle.error(a, e) <= oracle.GRADIENT[dtype]


def test_a_confident_token_keeps_its_digits():
    """1 - p of the target is 1e-4, below what fp32 keeps of p beside 1."""
    hidden, weight = torch.ones(1, 1, requires_grad=True), torch.zeros(4, 1)
    weight[2] = torch.tensor(3e4).log()
    found = linear_cross_entropy(hidden, weight, torch.tensor([2]), torch.zeros(4))
    found.backward()
    p = torch.softmax(weight.double()[:, 0], 0)
    assert abs(hidden.grad.item() / ((p[2] - 1) * weight[2, 0].double()).item() - 1) < 1e-5
    assert abs(found.item() / -p[2].log().item() - 1) < 1e-5


class Peak(TorchDispatchMode):
    """Counts the bytes of tensors that operations make, while they are alive, beside some tensors."""

    def __init__(self, beside):
        super().__init__()
        self.beside = {t.untyped_storage()._cdata for t in beside}
        self.alive, self.now, self.most = {}, 0, 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        made = function(*args, **(kwargs or {}))
        for t in made if isinstance(made, (tuple, list)) else [made]:
            if isinstance(t, torch.Tensor):
                self.add(t)
        return made

    def add(self, t):
        key, size = t.untyped_storage()._cdata, t.untyped_storage().nbytes()
        if key in self.beside:
            return
        if key not in self.alive:
            self.alive[key] = 0
            self.now += size
            self.most = max(self.most, self.now)
        self.alive[key] += 1
        weakref.finalize(t, self.drop, key, size)

    def drop(self, key, size):
        self.alive[key] -= 1
        if not self.alive[key]:
            del self.alive[key]
            self.now -= size


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("budget", [2 << 20, 400_000])
def test_a_budget_is_a_ceiling(dtype, budget, monkeypatch):
    taken, run = [], _portable.run

    def measured(*arguments, **more):
        with Peak([t for group in arguments[3:] for t in group.values() if t is not None]) as peak:
            run(*arguments, **more)
        taken.append(peak.most)

    monkeypatch.setattr(_portable, "run", measured)
    for tokens, vocab, times in ((128, 8_000, 1), (512, 4_096, 3)):  # fp32 logits of 4 and 8 MB
        inputs = problem(11, (tokens,), 32, vocab, dtype)[:3]
        inputs[2][::3] = -100
        for options in ({}, dict(softcap=5.0), dict(reduction="none", label_smoothing=0.1)):
            linear_cross_entropy(*inputs, memory_budget=budget * times, **options).sum().backward()
        for softcap in (None, 5.0):
            log_prob, entropy, _ = linear_logprobs(*inputs, softcap=softcap, memory_budget=budget * times)
            (log_prob.sum() + entropy.sum()).backward()
        assert len(taken) == 8 and max(taken) <= budget * times, taken
        taken.clear()


def test_a_budget_below_the_least_plan_is_refused():
    inputs = problem(11, (64,), 32, 5000, torch.float32)[:3]
    with pytest.raises(ValueError, match="memory_budget: 1000 bytes is below the least plan .* needs [0-9]+ bytes") as refused:
        linear_cross_entropy(*inputs, memory_budget=1000)
    least = int(str(refused.value).split()[-2])
    linear_cross_entropy(*inputs, memory_budget=least)


def test_a_device_without_kernels_and_no_synchronisation(monkeypatch):
    """A synchronisation with the host raises on meta tensors."""
    monkeypatch.delenv("LOGITLESS_BACKEND")
    for budget in (STORED, RECOMPUTED):
        for dtype in (torch.float32, torch.bfloat16):
            given = [t.detach().to("meta") for t in problem(3, (90,), 24, 500, dtype, bias=True)]
            for t in (given[0], given[1], given[3]):
                t.requires_grad_()
            assert backend(given[0]) == ("portable", "the library has kernels for cpu and cuda, the device is meta")
            more = dict(token_weight=torch.rand(90, device="meta"), label_smoothing=0.1, memory_budget=budget)
            loss, accuracy, index = linear_cross_entropy(*given, accuracy=True, return_argmax=True, **more)
            loss.backward()
            outputs = linear_logprobs(*given, memory_budget=budget)
            sum(t.sum() for t in outputs).backward()
            assert loss.shape == () and index.shape == (90,) and accuracy.is_meta
            assert all(t.grad.is_meta and t.grad.dtype == t.dtype for t in (given[0], given[1], given[3]))
    hidden, weight, teacher, target = two_heads(torch.bfloat16)
    given = [t.detach().to("meta").requires_grad_() for t in (hidden, weight)]
    teacher, target = [t.to("meta") for t in teacher], target.to("meta")
    for formula in (jsd, arcface):
        assert all(g.is_meta for g in torch.autograd.grad(formula(*given, teacher, target), given))
    assert linear_sample(*given, top_k=9).tokens.is_meta


@pytest.mark.parametrize("counts", [False, True], ids=["computed", "left out"])
def test_ignored_tokens_of_other_devices(counts, monkeypatch):
    """Their hidden states leave no trace. They are left out where the host may wait, as a GPU's does for large heads; a bad
    target gives NaN."""
    for module in (_portable, _portable_head, _portable_tokens):
        monkeypatch.setattr(module, "is_cpu", lambda device: False)
    monkeypatch.setattr(_portable_tokens, "_WAITING", ("cpu",) if counts else ())
    monkeypatch.setattr(_portable_tokens, "_LEAST_WORK", 90 * 24 * 500)
    rows, states = [], _portable_head.Head.states
    monkeypatch.setattr(_portable_head.Head, "states", lambda self, first, last, of: rows.append(last - first) or states(self, first, last, of))
    for budget in (STORED, RECOMPUTED):
        hidden, weight, target, bias = problem(3, (90,), 24, 500, torch.float32, bias=True)
        with torch.no_grad():
            hidden[target == -100] = torch.nan
        rows.clear()
        linear_cross_entropy(hidden, weight, target, bias, memory_budget=budget).backward()
        kept = target != -100
        assert budget or sum(rows) == (int(kept.sum()) if counts else 90)
        x, w, b = oracle.leaves(hidden[kept].detach().requires_grad_(), weight, bias)
        oracle.loss(x, w, target[kept], b).backward()
        assert oracle.error(weight.grad, w.grad) < 1e-5 and oracle.error(bias.grad, b.grad) < 1e-5
        assert oracle.error(hidden.grad[kept], x.grad) < 1e-5 and not hidden.grad[~kept].any()
        target[kept.nonzero()[0]] = 500
        each = linear_cross_entropy(hidden, weight, target, bias, reduction="none", memory_budget=budget)
        assert each.isnan().sum() == 1 and each[kept.nonzero()[0]].isnan().all()
        assert linear_logprobs(hidden, weight, target, bias, memory_budget=budget)[0].isnan().sum() == 1
    hidden, weight, teacher, target = two_heads(torch.float32)
    student = torch.where(target[:, None] == -100, torch.nan, hidden.detach()).requires_grad_()
    sizes = []
    monkeypatch.setattr(_chunks, "plan_of", lambda s, budget: sizes.append(s.tokens) or plan_of(s, budget))
    found, exact = (torch.autograd.grad(jsd(x, weight, teacher, target), (x, weight)) for x in (student, hidden))
    assert all(oracle.error(a, b) < 1e-6 for a, b in zip(found, exact))
    assert sizes[0] == (int((target != -100).sum()) if counts else 90)


@pytest.mark.parametrize("softcap", [None, 5.0])
def test_a_forward_refuses_what_its_backward_would(softcap):
    hidden, weight, target, _ = problem(11, (256,), 64, 5000, torch.bfloat16)
    calls = (lambda budget: linear_cross_entropy(hidden, weight, target, reduction="none", softcap=softcap, memory_budget=budget),
             lambda budget: linear_logprobs(hidden, weight, target, softcap=softcap, memory_budget=budget)[1])
    for call in calls:
        with pytest.raises(ValueError) as refused:
            call(1)
        least = int(str(refused.value).split()[-2])
        call(least).sum().backward()
        with torch.no_grad(), pytest.raises(ValueError):  # a forward alone takes less
            call(1)
        with pytest.raises(ValueError, match=f"needs {least} bytes"):
            call(least - 1)


class Ranks:
    """Threads as ranks, with the collectives that the implementation calls."""

    def __init__(self, monkeypatch, size):
        self.barrier, self.given, self.rank = threading.Barrier(size), {}, threading.local()
        monkeypatch.setattr(torch.distributed, "all_reduce", self.all_reduce)
        monkeypatch.setattr(groups, "process_group", lambda name: name)
        monkeypatch.setattr(groups, "least_of_ranks", self.least)

    def least(self, name, number, device):
        self.all_reduce(made := torch.tensor(number), torch.distributed.ReduceOp.MIN)
        return int(made)

    def all_reduce(self, tensor, op=torch.distributed.ReduceOp.SUM, group=None):
        self.given[self.rank.number] = tensor.clone()
        self.barrier.wait(20)
        every = torch.stack([self.given[r] for r in sorted(self.given)])
        of = torch.distributed.ReduceOp
        tensor.copy_(every.amax(0) if op == of.MAX else every.amin(0) if op == of.MIN else every.sum(0))
        self.barrier.wait(20)


@pytest.mark.parametrize("splits", [(0, 200, 500), (0, 0, 500)])
def test_a_vocabulary_over_ranks(monkeypatch, splits):
    hidden, weight, target, bias = (t.detach() for t in problem(3, (90,), 24, 500, torch.float32, bias=True))
    options = LossOptions(label_smoothing=0.1, softcap=5.0, z_loss=0.01)
    of_entropy = HeadOptions(softcap=5.0)
    ranks, found = Ranks(monkeypatch, 2), {}

    def run(name, number, rows, made, options, *cotangents):
        shard = ALL if number is None else VocabShard("ranks", 500, rows.start)
        inputs = dict(hidden=hidden, weight=weight[rows], targets=target, bias=bias[rows])
        if name == "cross_entropy":
            inputs |= dict(class_weight=None, token_weight=None, target_weight=None, grad_losses=None)
        _portable.run(name, options, shard, inputs, *cotangents, made)

    def call(number, rows):
        ranks.rank.number = number
        n = torch.zeros
        index = torch.zeros(90, dtype=torch.int64)
        loss = dict(loss=n(()), d_hidden=n(90, 24), d_weight=n(weight[rows].shape), d_bias=n(bias[rows].shape), lse=n(90), argmax=index)
        run("cross_entropy", number, rows, loss, options)
        head = dict(log_prob=n(90), entropy=n(90), lse=n(90), argmax=None)
        run("head", number, rows, head, of_entropy)
        back = dict(d_hidden=n(90, 24), d_weight=n(weight[rows].shape), d_bias=None)
        run("head_backward", number, rows, back, of_entropy, dict(log_prob=torch.ones(90), entropy=torch.ones(90), lse=None))
        found[number] = loss, head, back

    call(None, slice(0, 500))
    threads = [threading.Thread(target=call, args=(r, slice(splits[r], splits[r + 1]))) for r in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for k, whole in enumerate(found[None]):
        for name, exact in whole.items():
            if exact is None:
                continue
            if name in ("d_weight", "d_bias"):
                assert oracle.error(torch.cat([found[0][k][name], found[1][k][name]]), exact) < 1e-5
            else:
                assert all(oracle.error(found[r][k][name], exact) < 1e-5 for r in range(2)), name


def test_other_shardings_are_refused():
    inputs = dict(hidden=torch.zeros(2, 2), weight=torch.zeros(3, 2), bias=None, targets=torch.zeros(2, dtype=torch.int64))
    for shard in (VocabShard("ranks", 3, 0, tokens=True), VocabShard("ranks", 3, 0, True, columns=1)):
        with pytest.raises(NotImplementedError, match="sharding: the portable implementation supports rows of weight"):
            _portable.run("head", HeadOptions(), shard, inputs, {})


def test_backend(monkeypatch):
    hidden = torch.zeros(2, 2)
    assert backend(hidden) == ("portable", "LOGITLESS_BACKEND=portable")
    monkeypatch.setenv("LOGITLESS_BACKEND", "fast")
    with pytest.raises(ValueError, match="LOGITLESS_BACKEND: expected native or portable, got 'fast'"):
        backend(hidden)
    for value in ("native", ""):
        monkeypatch.setenv("LOGITLESS_BACKEND", value)
        assert backend(hidden) == ("native", "the library has kernels for cpu")
        assert backend(hidden.double()) == ("portable", "the library has no kernels for float64")


# --- Formulas of whole logits; tests/python/losses compares them with the papers.


def two_heads(dtype, tokens=90, vocab=500):
    g = oracle.generator(12)
    shapes = (tokens, 24), (vocab, 24), (tokens, 16), (vocab, 16)
    student, weight, *teacher = (torch.randn(*shape, generator=g).to(dtype) for shape in shapes)
    target = torch.randint(0, vocab, (tokens,), generator=g)
    target[::4] = -100
    return student.requires_grad_(), weight.requires_grad_(), teacher, target


def jsd(hidden, weight, teacher, target, **options):
    return losses.jsd_loss(hidden, weight, *teacher, target=target, weight_hard_loss=0.5, softcap=5.0, **options)


def arcface(hidden, weight, teacher, target, **options):
    return losses.arcface_loss(hidden, weight, target, **options)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_chunks_of_16_bit_formulas(dtype, reduction, wide_products, monkeypatch):
    """Wide products round the gradients of logits; float16 has them at a scale of its own."""
    hidden, weight, teacher, target = two_heads(dtype)
    scale = 1024.0 if dtype == torch.float16 else 1.0  # as a GradScaler's
    monkeypatch.setattr(_chunks, "plan_of", lambda *_: plan_of(*_)._replace(tokens=32))
    exact = [t.detach().double().requires_grad_() for t in (hidden, weight)]
    for formula in (jsd, arcface):
        loss = formula(hidden, weight, teacher, target, reduction=reduction).sum()
        value = formula(*exact, [t.double() for t in teacher], target, reduction=reduction).sum()
        found, others = (torch.autograd.grad(x * scale, of) for x, of in ((loss, (hidden, weight)), (value, exact)))
        for one, other in zip(found, others):
            assert one.dtype == dtype and oracle.error(one, other) < 0.5 * torch.finfo(dtype).eps


def test_budgets_of_formulas():
    hidden, weight, teacher, target = two_heads(torch.float32, 128, 4000)
    for budget in (1 << 20, 6 << 20, None):
        limit = budget or 17 << 20
        for formula in (jsd, arcface):
            call = functools.partial(formula, hidden, weight, teacher, target, memory_budget=budget)
            assert peak_of(lambda call=call: torch.autograd.grad(call(), (hidden, weight)))[0] <= limit
        calls = (lambda: linear_sample(hidden, weight, top_p=0.9, seed=1, memory_budget=budget),
                 lambda: losses.teacher_top_k(*teacher, k=9, memory_budget=budget))
        assert all(peak_of(call)[0] <= limit for call in calls)
    with pytest.raises(ValueError, match="memory_budget: 1000 bytes is below the least plan .* needs [0-9]+ bytes"):
        jsd(hidden, weight, teacher, target, memory_budget=1000)
    text = losses.explain_divergence(hidden, weight, *teacher, target=target, memory_budget="6MiB")
    assert "PyTorch's own operations, because LOGITLESS_BACKEND=portable" in text and "96 tokens x 4000 entries in " in text


def test_samples_are_those_of_the_library(monkeypatch):
    hidden, weight, teacher, target = two_heads(torch.float32)
    options = dict(), dict(top_k=50, top_p=0.9), dict(min_p=0.05, temperature=0.7), dict(temperature=0)
    calls = [lambda of=of: linear_sample(hidden, weight, seed=3, memory_budget="256KiB", **of)[0] for of in options]
    calls += [lambda: linear_top_logprobs(hidden, weight, k=9).top_ids, lambda: losses.teacher_top_k(*teacher, k=9)[0]]
    found = [call() for call in calls]
    monkeypatch.delenv("LOGITLESS_BACKEND")
    assert all(torch.equal(ours, call()) for ours, call in zip(found, calls))


def test_formulas_under_transforms_and_torch_compile():
    hidden, weight, teacher, target = two_heads(torch.float32)
    for formula in (jsd, arcface):
        for reduction in ("mean", "none"):
            def loss(x, w, formula=formula, reduction=reduction):
                return formula(x, w, teacher, target, reduction=reduction).mean()

            exact = torch.autograd.grad(loss(hidden, weight), (hidden, weight))
            by_func = torch.func.grad(loss, (0, 1))(hidden.detach(), weight.detach())
            traced = torch.autograd.grad(torch.compile(loss, fullgraph=True, backend="aot_eager")(hidden, weight), (hidden, weight))
            for ours in (by_func, traced):
                assert all(oracle.error(a, b) < 1e-6 for a, b in zip(ours, exact))
        batch = torch.stack([hidden.detach(), 2 * hidden.detach()])
        assert oracle.error(torch.func.vmap(loss, (0, None))(batch, weight.detach())[1], loss(batch[1], weight)) < 1e-6
    with pytest.raises(NotImplementedError, match="second derivatives"):
        torch.autograd.grad(loss(hidden, weight), hidden, create_graph=True)


WITHOUT = """
import torch
import logitless
import logitless.torch as lt
import logitless.torch.losses
hidden, weight = torch.randn(2, 6, 16, requires_grad=True), torch.randn(70, 16, requires_grad=True)
target = torch.randint(0, 70, (2, 6))
chosen = lt.backend(hidden)
assert chosen.name == "portable" and "cannot load" in chosen.reason, chosen
loss = lt.linear_cross_entropy(hidden, weight, target, memory_budget="1MiB")
loss.backward()
wanted = torch.nn.functional.cross_entropy((hidden @ weight.t()).flatten(0, 1), target.flatten())
assert torch.allclose(loss, wanted, rtol=1e-5)
log_prob, entropy, lse = lt.linear_logprobs(hidden, weight, target)
(log_prob.sum() + entropy.sum()).backward()
lt.losses.grpo_loss(hidden, weight, target, torch.ones(2))
lt.losses.student_top_k_loss(hidden, weight, hidden, weight, k=3).backward()
for call in (
    lambda: logitless.kernels(), lambda: logitless.Program(""), lambda: logitless.Communicator.threads(2),
    lambda: lt.autochunk(lambda x, w: (x @ w.t()).logsumexp(-1).sum(), executor="native")(hidden, weight),
):
    try:
        call()
    except ImportError as error:
        assert "cannot load" in str(error), error
    else:
        raise AssertionError("no error")
try:
    lt.linear_logprobs(hidden, weight, target, keep=True)
except ValueError as error:
    assert "keep" in str(error)
import warnings
with warnings.catch_warnings(record=True) as said:
    warnings.simplefilter("always")
    far = lt.FarFieldHead()
    assert torch.equal(far(hidden, weight, target), lt.linear_cross_entropy(hidden, weight, target))
assert "full softmax" in str(said[0].message) and "cannot load" in far.explain()
print("done")
"""


def test_without_the_library(tmp_path):
    environment = {k: v for k, v in os.environ.items() if k != "LOGITLESS_BACKEND"}
    environment["LOGITLESS_LIBRARY"] = str(tmp_path / "missing.so")
    done = subprocess.run([sys.executable, "-c", WITHOUT], capture_output=True, text=True, env=environment)
    assert done.stdout == "done\n", done.stderr


def test_old_gpus_have_no_kernels_of_some_dtypes(monkeypatch):
    monkeypatch.setenv("LOGITLESS_BACKEND", "native")
    for capability, served in (((7, 0), []), ((7, 5), [torch.float32, torch.float16]), ((8, 0), [*_DTYPES])):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device, found=capability: found)
        _backend._device_refusal.cache_clear()
        assert [d for d in _DTYPES if not _backend.why_portable("cuda", 0, d)] == served
    _backend._device_refusal.cache_clear()


def test_a_mean_by_weights_of_a_negative_sum():
    hidden, weight, target, _ = problem(3, (6,), 8, 20, torch.float32)
    compare(hidden, weight, target, None, None, token_weight=torch.tensor([-1.0, -1.0, -1.0, 0.0, 0.0, 0.5]))


def test_the_precision_of_products_by_either_setting_of_pytorch():
    matmul, gpu = torch.backends.cuda.matmul, torch.device("cuda")
    before = matmul.fp32_precision if hasattr(matmul, "fp32_precision") else None
    with products_in(gpu, "tf32"), products_in(gpu, "ieee"):
        pass
    assert before is None or matmul.fp32_precision == before
    if before is not None:
        matmul.fp32_precision = "tf32"
        try:
            with products_in(gpu, "ieee"):
                assert matmul.fp32_precision == "ieee"
            assert matmul.fp32_precision == "tf32"
        finally:
            matmul.fp32_precision = before


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_gpu_saves_gradients_of_logits(dtype, monkeypatch, wide_products):
    """Some in the memory of d_weight, some in memory of their own; those of other tokens are recomputed. Within the budget."""
    for module in (_portable, _portable_head, _portable_tokens):
        monkeypatch.setattr(module, "is_cpu", lambda device: False)
    for name in ("_ROUND", "_PASS"):  # small tiles are not worth launching
        monkeypatch.setattr(_portable_plan, name, 0.0)
    plans, plan_of_head = [], _portable_plan.plan_of.__wrapped__  # plans of other constants are not kept
    monkeypatch.setattr(_portable_head, "plan_of", lambda s, budget: plans.append(plan_of_head(s, budget)) or plans[-1])
    found = set()
    for budget in (1_000_000, 1_400_000, 1_600_000, 1_800_000):
        for options in options_of(400, 1000):
            hidden, weight, target, bias = problem(3, (400,), 96, 1000, dtype, bias=True)
            upstream = torch.rand(400, generator=oracle.generator(9)) if options.get("reduction") == "none" else None
            compare(hidden, weight, target, bias, upstream, memory_budget=budget, **options)
        hidden, weight, target, bias = problem(4, (400,), 96, 1000, dtype, bias=True)
        log_prob, entropy, _ = linear_logprobs(hidden, weight, target, bias, memory_budget=budget)
        ours = torch.autograd.grad(log_prob.sum() + entropy.sum(), (hidden, weight, bias))
        x, w, b = oracle.leaves(hidden, weight, bias)
        exact = oracle.logprobs(x, w, target, b)
        theirs = torch.autograd.grad(exact[0].sum() + exact[1].sum(), (x, w, b))
        assert all(oracle.error(a, e) <= oracle.GRADIENT[dtype] for a, e in zip(ours, theirs))
        call = lambda: torch.autograd.grad(linear_cross_entropy(hidden, weight, target, bias, memory_budget=budget), (hidden, weight))
        assert peak_of(call)[0] <= budget or dtype != torch.float32  # products are emulated in float64
        found |= {(plan.own > 0, plan.saved > plan.own, plan.saved < 400) for plan in plans if not plan.stored}
    assert found >= {(True, True, True)} | ({(True, True, False)} if dtype == torch.bfloat16 else set())
