"""Hugging Face models whose head is lazy: the same loss, gradients and text, without the logits."""

import copy
import io
import pickle
import warnings

import oracle
import pytest
import torch
import torch.nn.functional as F
from logitless.torch import LazyHeadWarning, LazyLogits, lazy_head, unpatch

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
    assert isinstance(after.logits, LazyLogits) and after.logits._real is None
    assert after.logits.shape == before.logits.shape and after.logits.dtype == before.logits.dtype
    # In bf16 the model rounds its logits and ours are exact: the loss may differ by what that costs.
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


def largest_during(function):
    """Bytes of the largest tensor that an operation makes."""
    from torch.utils._python_dispatch import TorchDispatchMode

    most = 0

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            nonlocal most
            out = func(*args, **(kwargs or {}))
            for t in out if isinstance(out, (tuple, list)) else [out]:
                if isinstance(t, torch.Tensor):
                    most = max(most, t.numel() * t.element_size())
            return out

    with Watch():
        function()
    return most


class Peak:
    """Bytes that tensors of 1 MiB and more take at a time, by their storages."""

    def __init__(self):
        self.live, self.now, self.most = {}, 0, 0

    def add(self, t):
        import weakref

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
    sizes, vocab, tokens = dict(SIZES), 48000, 800
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
    after = Peak().of(step)
    logits = tokens * vocab * 4
    assert before - after >= 0.8 * logits, (before, after, logits)


def test_what_keeps_the_promise_and_what_breaks_it():
    torch.manual_seed(0)
    hidden = torch.randn(4, 200, 8, requires_grad=True)
    weight = torch.randn(6000, 8, requires_grad=True)
    target = torch.randint(0, 6000, (4, 200))
    x = LazyLogits(hidden, weight)
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
            assert isinstance(lazy, LazyLogits) and lazy.shape == wanted.shape and lazy._real is None
            y = target.reshape(-1)[: lazy.shape[0]]
            for reduction in ("mean", "none"):
                loss = F.cross_entropy(lazy, y, reduction=reduction, label_smoothing=0.1)
                assert torch.allclose(loss, F.cross_entropy(wanted, y, reduction=reduction, label_smoothing=0.1), rtol=1e-5)
            assert torch.nn.CrossEntropyLoss()(lazy, y).requires_grad
            assert torch.allclose(lazy.materialize(), wanted, atol=1e-5)
        assert torch.isnan(F.cross_entropy(x[0], torch.full((200,), -100)))
    with pytest.warns(LazyHeadWarning, match=r"logits \[4, 200, 6000\] \(18 MiB\)"):
        assert torch.equal(x.argmax(-1), real.argmax(-1))
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # once
        assert torch.allclose(x.softmax(-1), real.softmax(-1))
        assert torch.allclose(x[..., :10], real[..., :10])
        assert not isinstance(x.transpose(1, 2), LazyLogits)
        assert torch.allclose(torch.cat([x, x]), torch.cat([real, real]))
        (g,) = torch.autograd.grad(x.square().mean(), hidden)
        assert torch.allclose(g, torch.autograd.grad(real.square().mean(), hidden)[0])
    assert "LazyLogits([4, 200, 6000]" in repr(x) and len(x) == 4 and x.requires_grad


def test_a_softcap_in_two_steps_is_not_a_loss():
    hidden, weight, target = torch.randn(5, 8), torch.randn(50, 8), torch.randint(0, 50, (5,))
    half = torch.tanh(LazyLogits(hidden, weight))
    assert torch.allclose(F.cross_entropy(half, target), F.cross_entropy(torch.tanh(hidden @ weight.t()), target), rtol=1e-5)


def test_under_autocast():
    model = model_of("llama")
    with torch.autocast(oracle.DEVICE, torch.bfloat16):
        wanted = model(**batch()).loss
        lazy_head(model)
        out = model(**batch())
    out.loss.backward()
    assert out.logits._real is None and abs(out.loss - wanted) < 2e-2 and model.lm_head.weight.grad.dtype == torch.float32


def test_heads_that_are_not_plain_are_refused():
    with pytest.raises(ValueError, match="expected a language model with get_output_embeddings"):
        lazy_head(torch.nn.Linear(3, 4))

    class Adapter(torch.nn.Linear):
        pass

    model = model_of("llama")
    model.lm_head = Adapter(64, 5000, bias=False)
    with pytest.raises(TypeError, match="expected a head of class torch.nn.Linear, got Adapter"):
        lazy_head(model)
    model = model_of("llama")
    model.lm_head.register_forward_hook(lambda *a: None)
    with pytest.raises(ValueError, match="forward hooks"):
        lazy_head(model)
