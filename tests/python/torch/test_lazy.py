"""Hugging Face models whose head is lazy: the same loss, gradients and text, without the logits."""

import copy
import io
import pickle
import sys
import warnings

import oracle
import pytest
import torch
import torch.nn.functional as F
from logitless.torch import LazyHeadWarning, LazyLogits, lazy_head, unpatch
from logitless.torch._lazy import _warnings, lazy_linear
from logitless.torch._lazy._tensor import Lazy

transformers = pytest.importorskip("transformers")

SIZES = dict(
    vocab_size=5000, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2, max_position_embeddings=128, bos_token_id=1, eos_token_id=2, pad_token_id=0,
)
MODELS = {
    "gpt2": lambda: transformers.GPT2LMHeadModel(
        transformers.GPT2Config(vocab_size=5000, n_embd=64, n_layer=2, n_head=4, n_positions=128, bos_token_id=1, eos_token_id=2)
    ),
    "llama": lambda: transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES)),
    "mistral": lambda: transformers.MistralForCausalLM(transformers.MistralConfig(**SIZES)),
    "gemma2": lambda: transformers.Gemma2ForCausalLM(transformers.Gemma2Config(**SIZES, head_dim=16)),
    "qwen2": lambda: transformers.Qwen2ForCausalLM(transformers.Qwen2Config(**SIZES)),
    "phi3": lambda: transformers.Phi3ForCausalLM(transformers.Phi3Config(**SIZES)),
}


def model_of(name):
    torch.manual_seed(0)
    model = MODELS[name]()
    model.train(False)
    return model


def batch(tokens=40):
    g = oracle.generator(1)
    ids = torch.randint(3, 5000, (2, tokens), generator=g)
    labels = ids.clone()
    labels[0, :7] = -100
    return dict(input_ids=ids, labels=labels, attention_mask=torch.ones_like(ids))


def gradients(model, **kwargs):
    model.zero_grad()
    out = model(**batch(), **kwargs)
    out.loss.backward()
    return out, {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_loss_gradients_text_and_restoring(name, dtype):
    model = model_of(name).to(dtype)
    before, wanted = gradients(model)
    classes = [type(m) for m in model.modules()]
    assert lazy_head(model) is model and lazy_head(model) is model
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        after, found = gradients(model)
        summed = model(**batch(), num_items_in_batch=torch.tensor(50))
    assert isinstance(after.logits, LazyLogits) and not after.logits.is_real
    assert after.logits.shape == before.logits.shape and after.logits.dtype == before.logits.dtype
    # The model rounds its bf16 logits and ours are exact: the losses may differ by the rounding.
    loss_tolerance, tolerance = (1e-6, 1e-5) if dtype == torch.float32 else (2e-3, 3e-2)
    assert abs(after.loss.item() - before.loss.item()) <= loss_tolerance * abs(before.loss.item())
    assert found.keys() == wanted.keys()
    for n in wanted:
        scale = wanted[n].float().norm()
        if scale > 1e-6:
            assert (found[n].float() - wanted[n].float()).norm() <= tolerance * scale, n
    valid = (batch()["labels"][:, 1:] != -100).sum()
    assert abs(summed.loss.item() * 50 / valid.item() - after.loss.item()) <= 1e-5
    ids = dict(input_ids=batch()["input_ids"][:, :6], attention_mask=torch.ones(2, 6, dtype=torch.int64))
    lazy_text = model.generate(**ids, max_new_tokens=6, do_sample=False)
    state = {k: v.clone() for k, v in model.state_dict().items()}
    loaded = pickle.loads(pickle.dumps(model))
    assert abs(loaded(**batch()).loss - after.loss) < 1e-6
    assert unpatch(model) is model and [type(m) for m in model.modules()] == classes
    assert torch.equal(model.generate(**ids, max_new_tokens=6, do_sample=False), lazy_text)
    assert all(torch.equal(v, state[k]) for k, v in model.state_dict().items())
    assert torch.equal(gradients(model)[0].loss, before.loss)


def test_saves_and_loads(tmp_path):
    model = lazy_head(model_of("llama"))
    model.save_pretrained(tmp_path)
    again = transformers.LlamaForCausalLM.from_pretrained(tmp_path).to(oracle.DEVICE)
    assert type(again.lm_head) is torch.nn.Linear
    assert torch.allclose(unpatch(model)(**batch()).loss, again(**batch()).loss)
    buffer = io.BytesIO()
    torch.save(model.state_dict(), buffer)
    assert copy.deepcopy(lazy_head(model))(**batch()).loss.isfinite()


def test_the_head_itself():
    """A head that is patched alone, outside of a model."""
    body, head = torch.nn.Embedding(40, 8), torch.nn.Linear(8, 40)
    ids = torch.randint(0, 40, (3, 7))

    def gradients():
        logits = head(body(ids))
        loss = F.cross_entropy(logits.flatten(0, 1), ids.flatten())
        return type(logits), torch.autograd.grad(loss, [*body.parameters(), *head.parameters()])

    kind, plain = gradients()
    assert kind is torch.Tensor and lazy_head(head) is head
    kind, lazy = gradients()
    assert kind is LazyLogits and all((a - b).norm() < 1e-5 * b.norm() for a, b in zip(lazy, plain))
    assert type(unpatch(head)) is torch.nn.Linear and not head._forward_hooks


class Peak:
    """Measures the bytes of live tensors of 1 MiB and more, by their storages."""

    def __init__(self):
        self.live, self.now, self.most = {}, 0, 0

    def add(self, t):
        import weakref

        if isinstance(t, Lazy) or t.is_meta:  # it has no memory; no_logits watches for its numbers
            return
        storage = t.untyped_storage()
        key = storage._cdata
        if storage.nbytes() < 1 << 20 or key in self.live:
            return
        self.live[key] = storage.nbytes()
        self.now += storage.nbytes()
        self.most = max(self.most, self.now)
        weakref.finalize(storage, self.drop, key)

    def drop(self, key):
        self.now -= self.live.pop(key)

    def of(self, function):
        from torch.utils._python_dispatch import TorchDispatchMode
        from torch.utils._pytree import tree_leaves

        peak = self

        class Watch(TorchDispatchMode):
            def __torch_dispatch__(self, func, types, args=(), kwargs=None):
                out = func(*args, **(kwargs or {}))
                for t in tree_leaves(out):
                    if isinstance(t, torch.Tensor):
                        peak.add(t)
                return out

        with Watch():
            function()
        return self.most


@pytest.mark.parametrize("name", MODELS)
def test_memory_falls_by_the_logits(name):
    make = MODELS[name]
    sizes, vocab, tokens = dict(SIZES), 24000, 400
    config = model_of(name).config
    config.vocab_size, config.hidden_size = vocab, 64
    config.max_position_embeddings = 1024
    model = type(make())(config)
    assert sizes["hidden_size"] == 64
    ids = torch.randint(3, vocab, (1, tokens))

    def step():
        model.zero_grad()
        model(input_ids=ids, labels=ids).loss.backward()

    step()
    before = Peak().of(step)
    lazy_head(model)
    with no_logits():
        after = Peak().of(step)
    logits = tokens * vocab * 4
    # On a GPU a plan in one chunk may take three tenths of the logits' bytes.
    share = 0.8 if oracle.DEVICE == "cpu" else 0.65
    assert before - after >= share * logits, (before, after, logits)


def test_what_keeps_the_promise_and_what_breaks_it():
    torch.manual_seed(0)
    hidden = torch.randn(4, 200, 8, requires_grad=True)
    weight = torch.randn(6000, 8, requires_grad=True)
    target = torch.randint(0, 6000, (4, 200))
    x = lazy_linear(hidden, weight)
    real = hidden @ weight.t()
    lazily = [
        (x.float().view(-1, 6000), real.view(-1, 6000)),
        (x[..., :-1, :].contiguous().view(-1, 6000), real[..., :-1, :].reshape(-1, 6000)),
        (x[:, 3:9].reshape(-1, 6000), real[:, 3:9].reshape(-1, 6000)),
        (x[1], real[1]),
        (x[target > 3000], real[target > 3000]),
        (x.to(torch.float32).view(800, -1) / 2.0, real.view(800, -1) / 2.0),
        ((torch.tanh(x / 30.0) * 30.0).view(-1, 6000), (torch.tanh(real / 30.0) * 30.0).view(-1, 6000)),
    ]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for lazy, wanted in lazily:
            assert isinstance(lazy, LazyLogits) and lazy.shape == wanted.shape and not lazy.is_real
            y = target.reshape(-1)[: lazy.shape[0]]
            for reduction in ("mean", "none"):
                loss = F.cross_entropy(lazy, y, reduction=reduction, label_smoothing=0.1)
                assert torch.allclose(loss, F.cross_entropy(wanted, y, reduction=reduction, label_smoothing=0.1), rtol=1e-5)
            assert torch.nn.CrossEntropyLoss()(lazy, y).requires_grad
        assert torch.isnan(F.cross_entropy(x[0], torch.full((200,), -100)))
        again = lazy_linear(hidden, weight)
        assert torch.allclose(again[:, 3:9].materialize(), real[:, 3:9], atol=1e-5) and again.is_real  # by name
    message = r"logits \[4, 200, 6000\] \(18 MiB\) are computed after all, read by argmax at .*test_lazy\.py:\d+$"
    with pytest.warns(LazyHeadWarning, match=message) as seen:
        assert torch.equal(x.argmax(-1), real.argmax(-1))
    assert seen[0].filename == __file__ and f":{seen[0].lineno}" in str(seen[0].message)
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # once
        assert torch.allclose(x.softmax(-1), real.softmax(-1))
        assert torch.allclose(x[..., :10], real[..., :10])
        assert isinstance(x.transpose(1, 2), LazyLogits) and x.transpose(1, 2).is_real
        assert torch.allclose(torch.cat([x, x]), torch.cat([real, real]))
        (g,) = torch.autograd.grad(x.square().mean(), hidden)
        assert torch.allclose(g, torch.autograd.grad(real.square().mean(), hidden)[0])
    assert "LazyLogits([4, 200, 6000]" in repr(lazy_linear(hidden, weight)) and len(x) == 4 and x.requires_grad


def test_a_softcap_in_two_steps_is_not_a_loss():
    hidden, weight, target = torch.randn(5, 8), torch.randn(50, 8), torch.randint(0, 50, (5,))
    half = torch.tanh(lazy_linear(hidden, weight))
    assert torch.allclose(F.cross_entropy(half, target), F.cross_entropy(torch.tanh(hidden @ weight.t()), target), rtol=1e-5)


def test_under_autocast():
    model = model_of("llama")
    with torch.autocast(oracle.DEVICE, torch.bfloat16):
        wanted = model(**batch()).loss
        lazy_head(model)
        out = model(**batch())
    out.loss.backward()
    assert not out.logits.is_real and abs(out.loss - wanted) < 2e-2 and model.lm_head.weight.grad.dtype == torch.float32


def test_heads_that_are_not_plain_are_refused():
    with pytest.raises(ValueError, match="expected a language model with get_output_embeddings"):
        lazy_head(torch.nn.Sequential(torch.nn.Linear(3, 4)))

    class Quantised(torch.nn.Linear):
        def forward(self, x):
            return super().forward(x.round())

    model = model_of("llama")
    model.lm_head = Quantised(64, 5000, bias=False)
    with pytest.raises(TypeError, match="expected a head of class torch.nn.Linear, got Quantised"):
        lazy_head(model)
    with pytest.raises(TypeError, match="expected a head of class torch.nn.Linear, got Quantised"):
        lazy_head(model.lm_head)


def test_a_subclass_that_computes_alike_and_forward_hooks():
    class Named(torch.nn.Linear):
        pass

    model = model_of("llama")
    model.lm_head = Named(64, 5000, bias=False)
    seen = []
    model.lm_head.register_forward_hook(lambda module, args, logits: seen.append(logits.shape))
    before, wanted = gradients(model)
    with no_logits():
        after, found = gradients(lazy_head(model))
    assert torch.allclose(before.loss, after.loss) and isinstance(after.logits, LazyLogits)
    assert all(torch.allclose(wanted[n], found[n], atol=1e-6) for n in wanted) and seen[0] == seen[1]
    assert type(unpatch(model).lm_head) is Named


class no_logits:
    """Fails when logits are computed."""

    def __enter__(self):
        self.before = _warnings.warn_made
        _warnings.warn_made = lambda made, what="logits", why="": pytest.fail(f"{what} {list(made.shape)} were made")

    def __exit__(self, *_):
        _warnings.warn_made = self.before


H, W, Y = (2, 6, 8), (50, 8), (torch.arange(12) * 7 % 50).view(2, 6)
WITHOUT = {
    "flatten": lambda z: F.cross_entropy(z.flatten(0, 1), Y.flatten()),
    "squeeze": lambda z: F.cross_entropy(z[:1].squeeze(0), Y[0]),
    "unsqueeze": lambda z: F.cross_entropy(z.unsqueeze(0).view(-1, 50), Y.view(-1)),
    "clone": lambda z: F.cross_entropy(z.clone().view(-1, 50), Y.view(-1)),
    "chunk": lambda z: sum(F.cross_entropy(a, b) for a, b in zip(z.view(-1, 50).chunk(3), Y.view(-1).chunk(3))),
    "split": lambda z: sum(F.cross_entropy(a, b) for a, b in zip(z.view(-1, 50).split([5, 7]), Y.view(-1).split([5, 7]))),
    "rows": lambda z: sum(F.cross_entropy(a, b) for a, b in zip(z, Y)),
    "narrow": lambda z: F.cross_entropy(z.narrow(1, 1, 4).reshape(-1, 50), Y[:, 1:5].reshape(-1)),
    "transpose": lambda z: F.cross_entropy(z.transpose(1, 2), Y),
    "permute": lambda z: F.cross_entropy(z.permute(0, 2, 1), Y),
    "over a tensor": lambda z: F.cross_entropy((z / torch.tensor(0.7)).view(-1, 50), Y.view(-1)),
    "double": lambda z: F.cross_entropy(z.double().view(-1, 50), Y.view(-1)),
    "log_softmax, nll_loss": lambda z: F.nll_loss(F.log_softmax(z, -1).view(-1, 50), Y.view(-1)),
    "log_softmax, gather": lambda z: -torch.log_softmax(z, -1).gather(-1, Y[..., None]).squeeze(-1).mean(),
    "gather, logsumexp": lambda z: (z.logsumexp(-1) - z.gather(-1, Y[..., None])[..., 0]).mean(),
    "a bias of its own": lambda z: F.cross_entropy((z + torch.arange(50.0)[None] / 9).view(-1, 50), Y.view(-1)),
    "padding vocabulary entries cut": lambda z: F.cross_entropy(z[..., :47].reshape(-1, 47), Y.view(-1) % 47),
    "softcap": lambda z: F.cross_entropy((torch.tanh(z / 5.0) * 5.0).transpose(1, 2), Y),
    "probabilities": lambda z: F.cross_entropy(z.view(-1, 50), torch.full((12, 50), 0.02)),
    "class weights": lambda z: F.cross_entropy(z.view(-1, 50), Y.view(-1), weight=torch.linspace(0.5, 2, 50)),
    "trainer": lambda z: transformers.trainer_pt_utils.LabelSmoother(0.1)({"logits": z}, Y, shift_labels=True),
    "two losses": lambda z: F.cross_entropy(z[0], Y[0]) + 2 * F.cross_entropy(z[1].float(), Y[1]),
}


@pytest.mark.parametrize("name", WITHOUT)
@pytest.mark.parametrize("bias", [False, True])
def test_no_logits(name, bias):
    if oracle.DEVICE != "cpu" and name == "over a tensor":
        pytest.skip("a number on a GPU is not read")
    found = []
    for linear in (lazy_linear, F.linear):
        g = oracle.generator(0)
        leaves = [torch.randn(*shape, generator=g).requires_grad_() for shape in (H, W, (50,))[: 2 + bias]]
        with no_logits():
            loss = WITHOUT[name](linear(*leaves))
            loss.backward()
        found.append((loss.detach(), *[t.grad for t in leaves]))
    for a, b in zip(*found):
        assert a.dtype == b.dtype and torch.allclose(a, b, rtol=1e-5, atol=1e-5)


def test_an_adapter_on_the_head():
    """The computation of PEFT's LoRA layer."""

    class Lora(torch.nn.Module):
        def __init__(self, base):
            super().__init__()
            self.base_layer = base.requires_grad_(False)
            self.lora_A = torch.nn.ModuleDict({"default": torch.nn.Linear(base.in_features, 4, bias=False)})
            self.lora_B = torch.nn.ModuleDict({"default": torch.nn.Linear(4, base.out_features, bias=False)})

        def forward(self, x):
            result = self.base_layer(x)
            dropped = F.dropout(x, 0.0)
            return result + self.lora_B["default"](self.lora_A["default"](dropped)) * 2.0

    model = model_of("llama")
    model.lm_head = Lora(model.lm_head)
    before, wanted = gradients(model)
    with no_logits():
        after, found = gradients(lazy_head(model))
    assert torch.allclose(before.loss, after.loss) and wanted.keys() == found.keys()
    assert all(torch.allclose(wanted[n], found[n], atol=1e-6) for n in wanted)
    assert torch.allclose(after.logits.detach() + 0, before.logits.detach(), atol=1e-5)
    unpatch(model)
    assert all(type(m) is torch.nn.Linear for m in model.lm_head.modules() if isinstance(m, torch.nn.Linear))


def other_model(name):
    torch.manual_seed(0)
    if name == "bart":
        return transformers.BartForConditionalGeneration(transformers.BartConfig(
            vocab_size=5000, d_model=32, encoder_layers=1, decoder_layers=1, encoder_attention_heads=2, decoder_attention_heads=2,
            encoder_ffn_dim=32, decoder_ffn_dim=32, max_position_embeddings=64,
        )).train(False)
    return transformers.ProphetNetForConditionalGeneration(transformers.ProphetNetConfig(
        vocab_size=5000, hidden_size=32, num_encoder_layers=1, num_decoder_layers=1, num_encoder_attention_heads=2,
        num_decoder_attention_heads=2, encoder_ffn_dim=32, decoder_ffn_dim=32, max_position_embeddings=64, eps=0.1,
    )).train(False)


@pytest.mark.parametrize("name", ["bart", "prophetnet"])
def test_models_with_calls_of_their_own(name):
    model = other_model(name)
    if name == "bart":
        model.final_logits_bias.copy_(torch.linspace(-1, 1, 5000)[None])
    before, wanted = gradients(model)
    with no_logits():
        after, found = gradients(lazy_head(model))
    assert torch.allclose(before.loss, after.loss, rtol=1e-5) and wanted.keys() == found.keys()
    for n in wanted:
        assert (wanted[n] - found[n]).norm() <= 1e-4 * wanted[n].norm() + 1e-6, n


class Tied(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.lm_head = torch.nn.Linear(8, 8), torch.nn.Linear(8, 50)

    def forward(self, x, call):
        return self.lm_head(x) if call else F.linear(self.body(x), self.lm_head.weight)


def test_a_head_that_is_never_called():
    model = lazy_head(Tied())
    with pytest.warns(LazyHeadWarning, match="Tied did not call its head in this forward"):
        model(torch.randn(2, 8), False)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model(torch.randn(2, 8), False)  # one warning alone
        model = lazy_head(Tied())
        model(torch.randn(2, 8), True)
        copied = copy.deepcopy(lazy_head(Tied()))
        copied(torch.randn(2, 8), True)
    assert not model._forward_hooks and not copied._forward_hooks
    assert not unpatch(lazy_head(Tied()))._forward_hooks


def test_a_head_that_is_never_called_and_no_hook_runs():
    """PEFT calls the forward of the model that it wraps, so no hook runs."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for model, call in ((lazy_head(Tied()), True), (unpatch(lazy_head(Tied())), False)):
            model.forward(torch.randn(2, 8), call).sum().backward()
            torch.optim.SGD(model.parameters(), 0.1).step()
        model = lazy_head(Tied())
        torch.optim.SGD([torch.nn.Parameter(torch.ones(2))], 0.1).step()  # an optimizer of another model
    model.forward(torch.randn(2, 8), False).sum().backward()
    optimizer = torch.optim.SGD(model.body.parameters(), 0.1)
    with pytest.warns(LazyHeadWarning, match="Tied did not call its head before this step of its optimizer") as seen:
        optimizer.step()
        optimizer.step()
    assert len(seen) == 1 and seen[0].filename == __file__


def test_a_head_that_trl_s_trainers_do_not_call(monkeypatch):
    """The warning names the call that installs the library, and none comes once it is installed."""
    from types import ModuleType

    from logitless.torch.integrations import trl as recipe

    utils = ModuleType("trl.trainer.utils")
    monkeypatch.setitem(sys.modules, "trl", ModuleType("trl"))
    monkeypatch.setitem(sys.modules, "trl.trainer.utils", utils)
    with pytest.warns(LazyHeadWarning, match=r"call logitless.torch.integrations.trl.patch\(\) once"):
        lazy_head(Tied())(torch.randn(2, 8), False)
    setattr(utils, recipe._NAME, recipe.FusedScores(None, None))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        lazy_head(Tied())(torch.randn(2, 8), False)
    reads = {"__name__": "trl.trainer.utils"}
    exec("def entropy(z):\n    return z.softmax(-1)\n", reads)
    z = lazy_linear(torch.randn(800, 8), torch.randn(6000, 8))
    with pytest.warns(LazyHeadWarning, match=r"read by softmax at <string>:2; .* call logitless.torch.integrations.trl.patch"):
        reads["entropy"](z)
