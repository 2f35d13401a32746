"""FarFieldHead: the library's bits, one step a call under any transform, runs that resume, and refusals."""

import copy
import ctypes
import io
import pickle
import re
import subprocess
import sys
from pathlib import Path

import far_runs
import oracle
import pytest
import torch
import torch.nn.functional as F
from far_runs import same
from logitless import _far_field
from logitless import _library as c
from logitless._options import LossOptions, struct_of
from logitless.torch import FarFieldHead, _engine, lazy_head, linear_cross_entropy, unpatch
from torch import nn
from torch.utils.checkpoint import checkpoint

if oracle.DEVICE != "cpu":
    pytest.skip("the far field of a GPU is tested from C++", allow_module_level=True)
V, D, N = 65536, 8, 64
QUICK = dict(error=0.05, audit_every=3, refresh_every=3, refresh_delay=2, sample_rows=64)
STEPS = 6  # an order is begun at step 3 and tried at 5
AT_ONCE = dict(error=0.05, refresh_every=1, refresh_delay=0)  # a far-field step from the first one on


def problem():
    """Returns hidden [N, D], weight [V, D], target [N]: tiles of similar vocabulary entries, and tokens of four
    topics."""
    g = torch.Generator().manual_seed(0)
    centers = 4 * torch.rand(V // 128, D, generator=g) - 2
    weight = centers.repeat(128, 1) + 0.15 * (2 * torch.rand(V, D, generator=g) - 1)
    hidden = 1.2 * centers[:4].repeat(N // 4, 1) + 0.3 * (2 * torch.rand(N, D, generator=g) - 1)
    return hidden, weight, torch.randint(V, (N,), generator=g)


HIDDEN, WEIGHT, TARGET = problem()


def call(head, hidden, weight):
    return head(hidden, weight, TARGET)


def run(head, steps=STEPS, loss_of=call, start=(HIDDEN, WEIGHT)):
    """Returns the results of each step with a small optimizer, and the final values."""
    return far_runs.run(lambda hidden, weight: loss_of(head, hidden, weight), steps, start)


@pytest.fixture(scope="module")
def whole():
    head = FarFieldHead(**QUICK)
    return run(head)[0], head.report


def by_the_library(steps):
    """The same run by calls of the C ABI."""
    native = _far_field.Head(_far_field.options(**QUICK), c.Context(threads=1))
    hidden, weight = HIDDEN.clone(), WEIGHT.clone()
    results, passes = [], []
    for _ in range(steps):
        loss, d_hidden, d_weight = torch.empty(()), torch.empty_like(hidden), torch.empty_like(weight)
        inputs, _i = _engine.fill(c.CrossEntropyInputs, dict(hidden=hidden, weight=weight, targets=TARGET))
        outputs, _o = _engine.fill(c.CrossEntropyOutputs, dict(loss=loss, d_hidden=d_hidden, d_weight=d_weight))
        statistics = c.new(c.LossStatistics)
        arguments = [ctypes.byref(s) for s in (struct_of(LossOptions()), inputs, outputs, statistics)]
        c.check(c.lib.logitless_far_head_step(native.handle, *arguments))
        results.append((loss, d_hidden, d_weight))
        passes.append(statistics.passes)
        hidden, weight = hidden - 0.5 * d_hidden, weight - 0.5 * d_weight
    return results, passes


def test_a_run_has_the_bits_of_the_library(whole):
    results, passes = by_the_library(STEPS)
    assert [p > 0 for p in passes] == [False] * 4 + [True] * 2
    assert same(whole[0], results)
    report = whole[1]
    assert (report.steps, report.dense_steps, report.audits, report.refreshes) == (STEPS, 4, 1, 1)
    assert report.far and 0 < report.last_error < 0.05 and report.vocab == V and 0 < report.mean_selected < 0.6


def test_a_run_resumes(whole):
    """Resumes while an order is made, from state dicts, checkpoints, pickles and copies."""
    head = FarFieldHead(**QUICK)
    first, then = run(head, 4)
    file = io.BytesIO()
    torch.save({"head": head.state_dict()}, file)
    file.seek(0)
    loaded = FarFieldHead(**QUICK)
    loaded.load_state_dict(torch.load(file, weights_only=True)["head"])
    for other in (loaded, pickle.loads(pickle.dumps(head)), copy.deepcopy(head)):
        assert other.report == head.report and other.report.steps == 4
        rest, _ = run(other, STEPS - 4, start=then)
        assert same(first + rest, whole[0]) and other.report == whole[1]
    again = FarFieldHead(**QUICK)
    again.load_state_dict(FarFieldHead(**QUICK).state_dict())  # the state before the first step
    assert same(run(again, 1)[0], whole[0][:1])


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_checkpoint_takes_one_step(whole, reentrant):
    calls = []

    def loss_of(head, hidden, weight):
        def region(hidden, weight):
            calls.append(1)
            return head(hidden * 1.0, weight, TARGET).abs()  # abs saves the loss for its backward

        return checkpoint(region, hidden, weight, use_reentrant=reentrant)

    head = FarFieldHead(**QUICK)
    found = run(head, loss_of=loss_of)[0]
    # A reentrant checkpoint returns the loss of its first run, without gradients: it is exact, by another plan.
    assert all(torch.allclose(a[0], b[0], rtol=1e-6, atol=0) for a, b in zip(found, whole[0]))
    assert same([r[reentrant:] for r in found], [r[reentrant:] for r in whole[0]])
    assert len(calls) == 2 * STEPS and head.report == whole[1]


def test_several_steps_recomputed_in_one_backward():
    """Each recomputation gets the loss of its own step."""
    head = FarFieldHead(**AT_ONCE)
    other = FarFieldHead(**AT_ONCE)
    hidden, weight = HIDDEN.clone().requires_grad_(), WEIGHT.clone()
    region = lambda h: head(h * 1.0, weight, TARGET).square()  # noqa: E731
    sum(checkpoint(region, hidden * s, use_reentrant=False) for s in (1.0, 0.5)).backward()
    found, hidden.grad = hidden.grad, None
    sum(other(hidden * s, weight, TARGET).square() for s in (1.0, 0.5)).backward()
    assert torch.equal(found, hidden.grad) and head.report == other.report and head.report.steps == 2


def test_losses_gone_back_through_in_any_order():
    """A recomputation belongs to the call with its hidden states, not to the last call."""
    head, other = FarFieldHead(**AT_ONCE), FarFieldHead(**AT_ONCE)
    found = []
    for far, checkpointed in ((head, True), (other, False)):
        hidden, weight = (t.clone().requires_grad_() for t in (HIDDEN, WEIGHT))
        region = lambda h, w, far=far: far(h * 1.0, w, TARGET).square()  # noqa: E731
        losses = [
            checkpoint(region, hidden * s, weight, use_reentrant=False) if checkpointed else region(hidden * s, weight)
            for s in (1.0, 0.5)
        ]
        for loss in losses:
            loss.backward()
        found.append((hidden.grad, weight.grad))
    assert same(found[:1], found[1:]) and head.report == other.report and head.report.steps == 2


@pytest.mark.parametrize("change", ["hidden", "weight", "bias", "target", "token_weight", "label_smoothing"])
def test_a_reentrant_checkpoint_beside_another_call(change):
    """Two calls, as in R-Drop, that differ in one argument. The second takes its step in the backward, while the
    gradients of the first wait."""
    arguments = dict(
        hidden=HIDDEN, weight=WEIGHT, bias=torch.zeros(V), target=TARGET, token_weight=torch.ones(N),
        label_smoothing=0.0,
    )
    changes = dict(
        hidden=lambda t: t.flip(1), weight=lambda t: t.roll(128, 0), bias=lambda t: t + torch.arange(V) / V,
        target=lambda t: t.flip(0), token_weight=lambda t: torch.linspace(0, 2, N), label_smoothing=lambda _: 0.1,
    )
    found = []
    for checkpointed in (True, False):
        head = FarFieldHead(**AT_ONCE)
        first = {**arguments, "target": arguments["target"].clone()}
        leaves = [first[n].clone().requires_grad_() for n in ("hidden", "weight", "bias")]
        first.update(zip(("hidden", "weight", "bias"), leaves))
        second = {**first, change: changes[change](first[change])}
        tensors = [second.pop(n) for n in ("hidden", "weight")]
        region = lambda h, w, head=head, rest=second: head(h * 1.0, w, **rest)  # noqa: E731
        loss = head(**first)
        if change == "target":  # in memory that is reused
            second["target"] = first["target"].copy_(second["target"])
        loss = loss + (checkpoint(region, *tensors, use_reentrant=True) if checkpointed else region(*tensors))
        loss.backward()
        found.append([t.grad for t in leaves])
        assert head.report.steps == 2
    assert same(found[:1], found[1:])


def test_accumulated_micro_steps_are_steps(whole):
    head = FarFieldHead(**QUICK, accumulate=2)
    assert head._options.refresh_every == 6 and head._options.audit_every == 6
    hidden, weight = (t.clone().requires_grad_() for t in (HIDDEN, WEIGHT))
    for _ in range(2):
        (head(hidden, weight, TARGET) / 2).backward()
    assert torch.equal(weight.grad, whole[0][0][2]) and head.report.steps == 2


def test_upstream_gradients_and_kept_graphs():
    head = FarFieldHead(**AT_ONCE)
    hidden, weight = (t.clone().requires_grad_() for t in (HIDDEN, WEIGHT))
    loss = head(hidden, weight, TARGET)
    assert head.statistics().passes > 0 and head.statistics().audited_error < 0.05
    one = torch.autograd.grad(loss, (hidden, weight), retain_graph=True)
    two = torch.autograd.grad(loss * 2, (hidden, weight))
    assert all(torch.equal(2 * a, b) for a, b in zip(one, two)) and head.report.steps == 1
    with pytest.raises(RuntimeError, match="a second time"):
        torch.autograd.grad(loss, hidden)
    with pytest.raises(NotImplementedError, match="second derivatives"):
        torch.autograd.grad(head(hidden, weight, TARGET), hidden, create_graph=True)


def test_statistics_are_asked_for_on_the_heads_device(monkeypatch):
    head = FarFieldHead(**AT_ONCE)
    head(HIDDEN.clone().requires_grad_(), WEIGHT, TARGET)
    devices = []
    monkeypatch.setattr(_engine, "on_device", lambda device, function: (devices.append(device), function())[1])
    assert head.statistics().tokens == N and devices == [torch.device("cpu")]


def test_compiled():
    head, eager = FarFieldHead(**AT_ONCE), FarFieldHead(**AT_ONCE)
    compiled = torch.compile(call, fullgraph=True, backend="aot_eager")
    assert same(run(head, 2, loss_of=compiled)[0], run(eager, 2)[0])
    assert head.report == eager.report and head.report.far and head.report.steps == 2
    twice = torch.compile(
        lambda head, h, w: checkpoint(lambda h, w: call(head, h * 1.0, w), h, w, use_reentrant=False),
        fullgraph=True, backend="aot_eager",
    )
    with pytest.raises(NotImplementedError, match="torch.utils.checkpoint under torch.compile"):
        run(head, 1, loss_of=twice)


def test_evaluation_is_exact_and_no_step():
    head = FarFieldHead(**AT_ONCE)
    hidden, weight = (t.clone().requires_grad_() for t in (HIDDEN, WEIGHT))
    exact = torch.autograd.grad(linear_cross_entropy(hidden, weight, TARGET), (hidden, weight))
    with torch.no_grad():
        assert torch.equal(head(hidden, weight, TARGET), linear_cross_entropy(HIDDEN, WEIGHT, TARGET))
    found = torch.autograd.grad(head.eval()(hidden, weight, TARGET), (hidden, weight))
    assert all(torch.equal(a, b) for a, b in zip(found, exact))
    assert head.train()(hidden[:0], weight, TARGET[:0]) == 0  # without tokens
    assert head.report.steps == 0
    found = torch.autograd.grad(head(hidden, weight, TARGET), (hidden, weight))
    assert head.report.steps == 1 and not torch.equal(found[0], exact[0])
    assert (found[0] - exact[0]).norm() < 0.05 * exact[0].norm()


@pytest.mark.parametrize("frozen", ["hidden", "weight"])
def test_frozen_sides(frozen):
    head = FarFieldHead(**AT_ONCE)
    hidden, weight = HIDDEN.clone().requires_grad_(frozen != "hidden"), WEIGHT.clone().requires_grad_(frozen != "weight")
    head(hidden, weight, TARGET).backward()
    assert (hidden.grad is None) == (frozen == "hidden") and (weight.grad is None) == (frozen == "weight")
    assert head.report.steps == 1 and head.statistics().passes > 0


def test_far_both():
    head = FarFieldHead(**AT_ONCE, accuracy="far_both")
    hidden, weight = (t.clone().requires_grad_() for t in (HIDDEN, WEIGHT))
    loss, exact = head(hidden, weight, TARGET), linear_cross_entropy(HIDDEN, WEIGHT, TARGET)
    assert head.report.far and loss != exact and abs(loss - exact) < 0.05
    other = copy.deepcopy(head)  # including the moments of its order
    assert torch.equal(head(hidden, weight, TARGET), other(hidden, weight, TARGET)) and other.report == head.report


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("options", [
    dict(label_smoothing=0.1, z_loss=1e-3, logit_scale=0.7, ignore_index=3),
    dict(reduction="sum", class_weight=torch.linspace(0.5, 1.5, 40), softcap=9.0),
    dict(shift=True, normalizer=torch.tensor(7.0)),
    dict(target_weight=torch.tensor([0.75, 0.25]).expand(2, 5, 2), token_weight=torch.linspace(0, 1, 10).view(2, 5)),
])
def test_options_of_a_dense_step(options, dtype):
    """A small vocabulary always takes the dense plan, with the numbers of linear_cross_entropy, under autocast too."""
    g = torch.Generator().manual_seed(1)
    hidden, weight, bias = (torch.randn(*s, generator=g).requires_grad_() for s in ((2, 5, 8), (40, 8), (40,)))
    target = torch.randint(40, (2, 5, 2) if "target_weight" in options else (2, 5), generator=g)
    found = []
    for loss in (FarFieldHead(), linear_cross_entropy):
        with torch.autocast("cpu", dtype, enabled=dtype != torch.float32):
            value = loss(hidden, weight, target, bias, **options)
        found.append((value.detach(), *torch.autograd.grad(value, (hidden, weight, bias))))
    assert same(found[:1], found[1:])


def test_errors_are_named():
    head = FarFieldHead(**QUICK)
    hidden, weight = (t.clone().requires_grad_() for t in (HIDDEN, WEIGHT))
    for error, match, options in (
        (ValueError, r"error: expected a number in \(0, 1\), got 1.5", dict(error=1.5)),
        (TypeError, "error: expected a number", dict(error="0.01")),
        (ValueError, "accuracy: expected one of 'far_backward', 'far_both', got 'exact'", dict(accuracy="exact")),
        (ValueError, "audit_rows: expected 1 to 1099511627776, got 0", dict(audit_rows=0)),
        (ValueError, f"refresh_delay: expected 0 to {1 << 40}, got {(1 << 63) - 1}", dict(refresh_delay=(1 << 63) - 1)),
        (ValueError, "audit_every: expected an int of 64 bits, got 9223372036854775808", dict(audit_every=1 << 63)),
        (
            ValueError, f"accumulate: with 1048576 calls a step, audit_every: expected 1 to {1 << 40}, got {1 << 60}$",
            dict(audit_every=1 << 40, accumulate=1 << 20),
        ),
        (ValueError, r"memory_budget: expected less than 4611686018427387904 bytes, got", dict(memory_budget=1 << 62)),
        (ValueError, r"error: expected a number in \(0, 1\), got 1000", dict(error=10**400)),
        (TypeError, "sample_every: expected an int, got 1.5", dict(sample_every=1.5)),
        (ValueError, "accumulate: expected an int from 1", dict(accumulate=0)),
    ):
        with pytest.raises(error, match=match):
            FarFieldHead(**options)
    for error, match, options in (
        (NotImplementedError, "reduction: .* got 'none'", dict(reduction="none")),
        (NotImplementedError, "return_lse: is no option", dict(return_lse=True)),
        (NotImplementedError, "expected_ignored: is no option", dict(expected_ignored=0.5)),
        (NotImplementedError, "memory_budget: .* give it to FarFieldHead", dict(memory_budget="1MiB")),
        (TypeError, "unexpected keyword argument 'far'", dict(far=1)),
    ):
        with pytest.raises(error, match=match):
            head(hidden, weight, TARGET, **options)
    with pytest.raises(NotImplementedError, match="hidden: float64 has no far field"):
        head(hidden.double(), weight.double(), TARGET)
    with pytest.raises(NotImplementedError, match="class probabilities have no far field"):
        head(hidden, weight, torch.rand(N, 4))
    with pytest.raises(NotImplementedError, match="cannot be transformed by torch.func"):
        torch.func.grad(lambda w: head(HIDDEN, w, TARGET))(weight)
    assert head.report.steps == 0 and "next step: dense" in head.explain()
    with pytest.raises(ValueError, match="targets"):
        head(hidden, weight, TARGET + V)
    assert head.report.steps == 0


def test_states_that_are_refused():
    head = FarFieldHead(**AT_ONCE)
    run(head, 1)
    state, report = head.get_extra_state(), head.report
    flipped = bytearray(state)
    flipped[len(state) // 4] ^= 0x40  # in the vocabulary ids
    flipped[len(state) // 4 + 7] ^= 0x7F
    for damaged, match in ((state[:-9], "state"), (bytes(flipped), "vocab_ids"), (b"\0" * 64, "state")):
        with pytest.raises(ValueError, match=match):
            head.set_extra_state(damaged)
        assert head.report == report
    with pytest.raises(TypeError, match="state: expected bytes, got Tensor"):
        head.set_extra_state(torch.zeros(3))
    with pytest.raises(ValueError, match="saved with accuracy far_backward, this head has far_both"):
        FarFieldHead(accuracy="far_both").load_state_dict(head.state_dict())
    with pytest.raises(ValueError, match=f"weight: expected {V} vocabulary entries, of which the order of this far field is, got 4096"):
        head(HIDDEN, WEIGHT[:4096].clone().requires_grad_(), TARGET % 4096)
    assert head.report == report


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.lm_head = nn.Linear(D, V, bias=False)
        with torch.no_grad():
            self.lm_head.weight.copy_(WEIGHT)

    def forward(self, hidden, labels):
        logits = self.lm_head(hidden)
        return F.cross_entropy(logits.view(-1, V).float(), labels.view(-1))


def by_model(model, steps=2):
    hidden, weight, found = HIDDEN.clone().requires_grad_(), model.lm_head.weight, []
    for _ in range(steps):
        loss = model(hidden, TARGET)
        found.append((loss.detach(), *torch.autograd.grad(loss, (hidden, weight))))
    return found


def test_lazy_head(whole):
    """The loss of a lazy head is a step of its far field; evaluation is exact."""
    far = FarFieldHead(**AT_ONCE)
    model = lazy_head(Model(), far_field=far)
    assert model.lm_head.far_field is far and list(model.state_dict()) == ["lm_head.weight"]
    plain = FarFieldHead(**AT_ONCE)
    hidden, weight = (t.clone().requires_grad_() for t in (HIDDEN, WEIGHT))
    expected = []
    for _ in range(2):
        loss = plain(hidden, weight, TARGET)
        expected.append((loss.detach(), *torch.autograd.grad(loss, (hidden, weight))))
    assert same(by_model(model), expected) and far.report == plain.report and far.report.steps == 2
    model.eval()
    exact = linear_cross_entropy(hidden, weight, TARGET)
    assert same(by_model(model, 1), [(exact.detach(), *torch.autograd.grad(exact, (hidden, weight)))])
    with torch.no_grad():
        model.train()(HIDDEN, TARGET)
        F.cross_entropy(model.lm_head(HIDDEN), TARGET, reduction="none")
    assert far.report.steps == 2
    other = copy.deepcopy(model)
    assert other.lm_head.far_field.report == far.report and other.lm_head.far_field is not far
    lazy_head(model, far_field=0.02)
    assert model.lm_head.far_field.report.steps == 0 and "error=0.02" in repr(model.lm_head.far_field)
    assert same(by_model(model, 1), whole[0][:1])  # dense
    unpatch(model)
    assert not hasattr(model.lm_head, "far_field")
    with pytest.raises(TypeError, match="far_field: expected an error"):
        lazy_head(model, far_field="0.01")
    with pytest.raises(ValueError, match="error: expected a number"):
        lazy_head(model, far_field=2)


def test_a_lazy_head_compiled():
    far = FarFieldHead(**AT_ONCE)
    model = lazy_head(Model(), far_field=far)
    expected = by_model(lazy_head(Model(), far_field=FarFieldHead(**AT_ONCE)))
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    compiled.lm_head = model.lm_head
    assert same(by_model(compiled), expected) and far.report.steps == 2


def test_the_documents_example(tmp_path):
    """Runs the Python of docs/use/far_field.md, after the lines that a reader has before it."""
    text = (Path(__file__).parents[3] / "docs/use/far_field.md").read_text(encoding="utf-8")
    (code,) = re.findall(r"^## PyTorch\n.*?^```python\n(.*?)^```", text, re.M | re.S)
    trunk, model = nn.Linear(D, D), Model()
    weight = nn.Parameter(WEIGHT.clone())
    names = dict(
        torch=torch, trunk=trunk, weight=weight, model=model, batches=[(HIDDEN, TARGET)] * 3, path=tmp_path / "run.pt",
        optimizer=torch.optim.SGD([weight, *trunk.parameters()], lr=0.1),
    )
    exec(code, names)
    assert names["far"].report.steps == 3 and not torch.equal(weight, WEIGHT)
    saved = torch.load(names["path"], weights_only=True)
    assert FarFieldHead().load_state_dict(saved["far"]) and model.lm_head.far_field is names["far"]


def test_interleaved_entries_are_as_frequent_on_each_rank():
    from logitless.torch import interleave_vocab

    vocab, ranks = 1003, 4
    average = torch.rand(vocab, generator=torch.Generator().manual_seed(1)) ** 8  # a few entries have most of the sum
    for given in (None, average, average.double()):
        frequency = 1.0 / (1.0 + torch.arange(vocab)) if given is None else average
        interleaved = interleave_vocab(vocab, ranks, given)
        assert torch.equal(interleaved.sort().values, torch.arange(vocab))
        parts = interleaved.tensor_split(ranks)
        sums = torch.stack([frequency[part].sum() for part in parts])
        assert sums.max() < (2.2 if given is None else 1.3) * sums.mean(), sums  # entry 0 alone has a third
        rare = torch.stack([(frequency[part] < frequency.median()).sum() for part in parts])
        assert rare.max() - rare.min() <= 8, rare
        assert torch.equal(torch.argsort(interleaved)[interleaved], torch.arange(vocab))
    assert not torch.equal(interleave_vocab(vocab, ranks, seed=1), interleave_vocab(vocab, ranks))
    for wrong, text in (
        (lambda: interleave_vocab(0, 2), "vocab: expected"),
        (lambda: interleave_vocab(5, True), "ranks: expected"),
        (lambda: interleave_vocab(5, 2, torch.ones(4)), r"average: expected \[5\], got \[4\]"),
        (lambda: interleave_vocab(2, 1, torch.tensor([1.0, float("nan")])), "average"),
        (lambda: interleave_vocab(5, 2, seed=-1), "seed: expected"),
    ):
        with pytest.raises(ValueError, match=text):
            wrong()


ALIVE = """
import torch, logitless, logitless._library, logitless.torch._engine
from logitless._compiler import PreparedProgram, Program
hidden, weight = torch.randn(64, 16, requires_grad=True), torch.randn(300, 16, requires_grad=True)
for module in (torch, logitless, logitless._library, logitless.torch._engine):
    head = logitless.torch.FarFieldHead(0.05)
    loss = head(hidden, weight, torch.arange(64))
    plain = logitless.torch.linear_cross_entropy(hidden, weight, torch.arange(64))
    context = logitless._library.Context(threads=1)
    program = Program("graph main(%x: f32[2]) {\\n  %y = add %x, %x\\n  return y: %y\\n}\\n")
    alive = [head, loss, plain, context, program, PreparedProgram(program, context), logitless.Communicator.threads(2)]
    module.alive = alive[::-1] if module is logitless else alive
"""


def test_what_is_alive_at_the_end_of_the_interpreter_ends_silently():
    done = subprocess.run([sys.executable, "-c", ALIVE], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
