"""check(): a model's step with and without a lazy head, and the model as it was before."""

import pytest
import torch
import torch.nn.functional as F
from logitless.torch import LazyHeadWarning, check, lazy_head
from logitless.torch._lazy import _warnings
from torch import nn

VOCAB = 3000


class Tiny(nn.Module):
    """Has a buffer that a step changes, dropout, and a loss like that of a Hugging Face model."""

    def __init__(self, head=None, reads="loss"):
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.norm = nn.Embedding(VOCAB, 16), nn.BatchNorm1d(16)
        self.lm_head = head or nn.Linear(16, VOCAB)
        self.reads = reads

    def forward(self, ids, labels=None):
        hidden = F.dropout(self.norm(self.embed(ids)), 0.1, self.training)
        logits = hidden @ self.lm_head.weight.T if self.reads == "weight" else self.lm_head(hidden)
        if self.reads == "class" and type(self.lm_head) is not nn.Linear:
            logits = logits * 2
        if self.reads == "logits":
            logits = logits.sin()
        return {"loss": None if labels is None else F.cross_entropy(logits, labels)}


def batch():
    ids = torch.arange(64) * 7 % VOCAB
    return dict(ids=ids, labels=ids.roll(-1))


def state_of(model):
    hooks = [dict(m._forward_hooks) | dict(m._forward_pre_hooks) for m in model.modules()]
    classes = [type(m) for m in model.modules()]
    numbers = [t.clone() for t in (*model.parameters(), *model.buffers(), torch.get_rng_state())]
    return hooks, classes, [m.training for m in model.modules()], [id(p.grad) for p in model.parameters()], numbers


def same_state(a, b):
    return a[:4] == b[:4] and all(torch.equal(x, y) for x, y in zip(a[4], b[4]))


def test_a_language_model_is_the_same_takes_less_and_is_restored(capsys):
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    sizes = dict(hidden_size=32, intermediate_size=48, num_hidden_layers=1, num_attention_heads=2, max_position_embeddings=256)
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(vocab_size=VOCAB, attention_dropout=0.1, **sizes)).train()
    ids = torch.arange(512).view(2, 256) * 7 % VOCAB
    model.lm_head.weight.grad = torch.full((VOCAB, 32), 3.0)
    before = state_of(model)
    result = check(model, dict(input_ids=ids, labels=ids), rtol=1e-5, steps=1)
    assert same_state(state_of(model), before) and model.lm_head.weight.grad.eq(3.0).all()
    assert result.same and 0 < result.gradient_error < 1e-5 and result.furthest in dict(model.named_parameters())
    assert result.plain.peak_bytes - result.lazy.peak_bytes > 512 * VOCAB * 4  # the logits alone
    assert result.plain.seconds > 0 and result.lazy.seconds > 0 and not result.notes
    text = capsys.readouterr().out
    assert text == f"{result}\n"
    for expected in ("are the same to a relative 1e-05", "MiB saved", "One training step on "):
        assert expected in text


def test_a_step_without_a_saving_says_why(monkeypatch, capsys):
    """The second state of the batch norm and another dropout would make another loss."""
    monkeypatch.setattr(_warnings, "WARN_BYTES", 0)
    for reads, note in (("logits", "are computed after all, read by sin"), ("weight", "did not call its head")):
        model = Tiny(reads=reads)
        before = state_of(model)
        result = check(model, batch(), steps=1, verbose=False)
        assert result.same and result.rtol == 1e-4 and any(note in n for n in result.notes), result
        assert same_state(state_of(model), before) and f"note: {result.notes[0]}" in str(result)
    assert capsys.readouterr().out == ""


def test_a_loss_that_changes_is_seen():
    result = check(Tiny(reads="class"), batch(), steps=1, verbose=False)
    assert not result.same and result.gradient_error > 0.1 and "are NOT the same" in str(result)


def test_a_model_without_gradients_is_compared_by_its_loss():
    result = check(Tiny().requires_grad_(False).eval(), batch(), steps=1, verbose=False)
    assert result.same and result.gradient_error == 0 and result.furthest == ""


class Quantised(nn.Linear):
    def forward(self, x):
        return super().forward(x.round())


def lazy():
    return lazy_head(Tiny())


@pytest.mark.parametrize("make, change, error, message", [
    (lambda: nn.Sequential(nn.Linear(4, 4)), {}, ValueError, r"expected a language model with get_output_embeddings\(\) or lm_head"),
    (lambda: Tiny(Quantised(16, VOCAB)), {}, TypeError, "expected a head of class torch.nn.Linear, got Quantised"),
    (lazy, {}, ValueError, r"its head is lazy already.*call unpatch\(model\) first"),
    (lambda: Tiny().to("meta"), {}, ValueError, "expected its parameters on one device, cpu or cuda, got meta"),
    (lambda: print, {}, TypeError, "expected a torch.nn.Module with a head, got builtin_function_or_method"),
    (Tiny, {"batch": dict(ids=torch.arange(8))}, ValueError, "expected an output with a loss of one number, got dict; do the labels"),
    (Tiny, {"batch": [1]}, TypeError, "batch: expected a mapping of the model's keyword arguments, got list"),
    (Tiny, {"steps": 0}, ValueError, "steps: expected 1 or more, got 0"),
])
@pytest.mark.filterwarnings("ignore", category=LazyHeadWarning)
def test_errors_say_why_and_leave_the_model(make, change, error, message):
    model = make()
    before = state_of(model) if isinstance(model, nn.Module) else None
    with pytest.raises(error, match=message):
        check(model, **{"batch": batch(), "verbose": False, **change})
    after = state_of(model) if before else None
    if before:
        assert after[:4] == before[:4]
