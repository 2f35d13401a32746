"""Changes to models after lazy_head, most of all to their heads. Losses and gradients are those of the same change to a
plain model, without logits, or a warning names the new head. unpatch gives the changed plain model."""

import copy
import io
import pickle
import warnings

import oracle
import pytest
import torch
import torch.nn.functional as F
from expecting import expected_shares
from logitless.torch import FarFieldHead, LazyHeadWarning, LazyLogits, _engine, lazy_head, unpatch
from test_lazy import no_logits
from torch import nn
from torch.nn.utils import parametrizations, parametrize, prune

V = 60


class Model(nn.Module):
    """A model with the methods of transformers' language models."""

    def __init__(self, kind=nn.Linear):
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.lm_head = nn.Embedding(V, 16), kind(16, V)

    def get_output_embeddings(self):
        return self.lm_head

    def set_output_embeddings(self, head):
        self.lm_head = head

    def forward(self, ids):
        logits = self.lm_head(self.embed(ids).tanh())
        self.seen = type(logits)
        return F.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())


class Named(nn.Linear):
    pass


class Rounded(nn.Linear):
    def forward(self, x):
        return super().forward(x.round())


class Lora(nn.Module):
    def __init__(self, base):
        super().__init__()
        torch.manual_seed(4)
        self.base_layer = base
        self.lora_A, self.lora_B = nn.ModuleDict(), nn.ModuleDict()
        self.lora_A["default"] = nn.Linear(base.in_features, 4, bias=False)
        self.lora_B["default"] = nn.Linear(4, base.out_features, bias=False)

    def forward(self, x):
        return self.base_layer(x) + self.lora_B["default"](self.lora_A["default"](x)) * 2.0


def new_head(vocab=V, kind=nn.Linear):
    torch.manual_seed(1)
    return kind(16, vocab)


def on_head(change):
    def surgery(model):
        torch.manual_seed(2)
        change(model.lm_head)

    return surgery


def put(model, head):
    model.lm_head = head


def put_unseen(model, head):
    model._modules["lm_head"] = head


def delete_and_put(model, head):
    del model.lm_head
    model.lm_head = head


def saved(model):
    buffer = io.BytesIO()
    torch.save(model, buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=False)


def normed_and_back(head):
    parametrizations.weight_norm(head)
    parametrize.remove_parametrizations(head, "weight")


def with_hook_of_accelerate(head):
    hooks = pytest.importorskip("accelerate.hooks")
    hooks.add_hook_to_module(head, hooks.AlignDevicesHook(io_same_device=True))


SURGERIES = {
    "nothing": lambda model: None,
    "set_output_embeddings": lambda model: model.set_output_embeddings(new_head()),
    "more vocabulary entries": lambda model: put(model, new_head(V + 7)),
    "a subclass": lambda model: put(model, new_head(kind=Named)),
    "add_module": lambda model: model.add_module("lm_head", new_head()),
    "unseen": lambda model: put_unseen(model, new_head()),
    "deleted": lambda model: delete_and_put(model, new_head()),
    "adapter": lambda model: put(model, Lora(model.lm_head)),
    "adapter and back": lambda model: put(model, Lora(model.lm_head)) or put(model, model.lm_head.base_layer),
    "tied": lambda model: setattr(model.lm_head, "weight", model.embed.weight),
    "new parameters": lambda model: model.load_state_dict({k: v * 1.5 for k, v in model.state_dict().items()}, assign=True) and None,
    "bfloat16": lambda model: model.bfloat16(),
    "double": lambda model: model.double(),
    "deepcopy": copy.deepcopy,
    "pickle": lambda model: pickle.loads(pickle.dumps(model)),
    "torch.save": saved,
    "weight_norm of old": on_head(nn.utils.weight_norm),
    "weight_norm": on_head(parametrizations.weight_norm),
    "weight_norm and back": on_head(normed_and_back),
    "spectral_norm of old": on_head(nn.utils.spectral_norm),
    "spectral_norm": on_head(parametrizations.spectral_norm),
    "pruned": on_head(lambda head: prune.l1_unstructured(head, "weight", 0.3)),
    "hook of Accelerate": on_head(with_hook_of_accelerate),
}


def step(model):
    """Returns (loss, gradients by name) of a second step, after which a spectral norm has iterated twice."""
    ids = torch.arange(24).view(2, 12) * 7 % V
    for _ in range(2):
        model.zero_grad()
        loss = model(ids)
        loss.backward()
    return loss.detach(), {name: p.grad.clone() for name, p in model.named_parameters()}


@pytest.mark.parametrize("before", [False, True])
@pytest.mark.parametrize("kind", [nn.Linear, Named])
@pytest.mark.parametrize("name", SURGERIES)
@pytest.mark.filterwarnings("ignore:`torch.nn.utils.weight_norm`", "ignore:.*weight_norm.*deprecated")
def test_surgery(name, kind, before):
    """before: whether the surgery comes before the patch."""
    plain, lazy = Model(kind), Model(kind)
    plain = SURGERIES[name](plain) or plain
    if not before:
        lazy_head(lazy)
    lazy = SURGERIES[name](lazy) or lazy
    if before:
        lazy_head(lazy)
    with warnings.catch_warnings(), no_logits():
        warnings.simplefilter("error")
        loss, gradients = step(lazy)
    wanted, theirs = step(plain)
    assert lazy.seen is LazyLogits and plain.seen is torch.Tensor and gradients.keys() == theirs.keys()
    close = 3e-2 if loss.dtype == torch.bfloat16 else 1e-5
    assert abs(loss - wanted) <= close * wanted
    for n, g in gradients.items():
        assert g.dtype == theirs[n].dtype and (g - theirs[n]).norm() <= close * theirs[n].norm() + 1e-7, n
    unpatch(lazy)
    assert [type(m).__name__ for m in lazy.modules()] == [type(m).__name__ for m in plain.modules()]
    assert not lazy._forward_hooks and not lazy._forward_pre_hooks
    assert lazy.state_dict().keys() == plain.state_dict().keys()
    again, theirs = step(lazy), step(plain)
    assert lazy.seen is torch.Tensor and torch.equal(again[0], theirs[0])
    assert all(torch.equal(again[1][n], theirs[1][n]) for n in theirs[1])


def test_of_a_head_by_itself():
    """No model is known for a head that is patched alone: a new head in its model is lazy, too."""
    model = Model()
    lazy_head(model.lm_head)
    model.lm_head = new_head()
    step(model)
    assert model.seen is LazyLogits


@pytest.mark.parametrize("how", [put, put_unseen, delete_and_put])
@pytest.mark.parametrize("kind, said", [(lambda: new_head(kind=Rounded), "Rounded"), (nn.Identity, "Identity")])
def test_a_replacement_that_cannot_be_lazy_is_named(how, kind, said):
    model = lazy_head(Model())
    step(model)
    with pytest.warns(LazyHeadWarning, match=rf"lazy head \w+ of Model was replaced by {said}, which computes its logits") as seen:
        how(model, kind())
        model(torch.zeros(2, 12, dtype=torch.int64))
        model(torch.zeros(2, 12, dtype=torch.int64))
    assert len(seen) == 1 and seen[0].filename == __file__


def test_a_model_without_its_head():
    model = lazy_head(Model())
    del model.lm_head
    model.get_output_embeddings, model.forward = lambda: None, lambda x: x
    with pytest.warns(LazyHeadWarning, match="Model has no head any more"):
        model(torch.zeros(2))
    model(torch.zeros(2))


def test_the_far_field_goes_with_the_head():
    far = FarFieldHead(0.05)
    model = lazy_head(Model(), far)
    step(model)
    model.lm_head = new_head(V + 7)
    assert model.lm_head.far_field is far
    put_unseen(model, new_head(V + 9))
    step(model)
    assert model.lm_head.far_field is far and far.explain()


def test_the_share_of_ignored_tokens_goes_with_the_head(monkeypatch):
    found, seen = step(lazy_head(Model())), expected_shares(monkeypatch, _engine)
    model = lazy_head(Model(), expected_ignored=0.265625)
    loss, gradients = step(model)
    assert torch.equal(loss, found[0]) and all(torch.equal(g, found[1][name]) for name, g in gradients.items())
    lazy_head(model)  # keeps it
    model.lm_head = new_head(V + 7)
    put_unseen(model, new_head(V + 9))
    step(model)
    assert model.lm_head.expected_ignored == 0.265625 and seen == [0.265625] * 2
    lazy_head(model, expected_ignored=0.28125)
    step(model)
    assert seen[2:] == [0.28125]
    with pytest.raises(ValueError, match=r"expected_ignored: expected a number in \[0, 1\], got 2"):
        lazy_head(model, expected_ignored=2)
    with pytest.raises(ValueError, match=r"expected_ignored: expected 0 beside a far_field, got 0.28125"):
        lazy_head(model, 0.05)
    assert "expected_ignored" not in unpatch(model).lm_head.__dict__


def test_resized_embeddings():
    transformers = pytest.importorskip("transformers")
    from test_lazy import batch, model_of

    for tied in (False, True):
        models = []
        for patch in (lambda model: model, lazy_head):
            model = patch(model_of("llama"))
            model.config.tie_word_embeddings = tied
            if tied:
                model.tie_weights()
            torch.manual_seed(3)
            model.resize_token_embeddings(5010, mean_resizing=False)
            models.append(model)
        losses = [model(**batch()) for model in models]
        assert isinstance(losses[1].logits, LazyLogits) and not losses[1].logits.is_real
        assert losses[1].logits.shape[-1] == 5010 and torch.allclose(losses[0].loss, losses[1].loss, rtol=1e-5)
    assert transformers is not None


def test_a_head_sharded_after_the_patch(tmp_path):
    distributed = pytest.importorskip("torch.distributed")
    fsdp = pytest.importorskip("torch.distributed.fsdp")
    distributed.init_process_group("gloo", store=distributed.FileStore(str(tmp_path / "store"), 1), rank=0, world_size=1)
    try:
        found = []
        for kind in (nn.Linear, Named):
            plain, model = Model(kind), lazy_head(Model(kind))
            mesh = distributed.init_device_mesh(oracle.DEVICE, (1,))
            for m in (plain, model):
                fsdp.fully_shard(m.lm_head, mesh=mesh)
            with no_logits():
                losses = [m(torch.arange(24).view(2, 12)) for m in (plain, model)]
            assert model.seen is LazyLogits and torch.allclose(*losses, rtol=1e-5)
            unpatch(model)
            assert type(model.lm_head).__mro__[1:] == type(plain.lm_head).__mro__[1:]
            assert type(model.lm_head).__name__ == type(plain.lm_head).__name__
            assert torch.allclose(model(torch.arange(24).view(2, 12)), losses[0]) and model.seen is torch.Tensor
            found.append(isinstance(model.lm_head, fsdp.FSDPModule))
        assert found == [True, True]
    finally:
        distributed.destroy_process_group()
