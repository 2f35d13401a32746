"""docs/use/recipes/transformers.md, accelerate.md and lightning.md: their loops with the model's head made lazy."""

import types
import warnings

import pytest
import torch
from logitless.torch import lazy_head
from recipes.models import Made, batches, furthest, parameters, snippet, tiny_llama

pytest.importorskip("transformers")

STEPS = 3


@pytest.fixture(autouse=True)
def quiet(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def compare(run, tolerance=1e-5, lazy=True):
    """Checks run(ours) -> (losses, model): results agree, a lazy head was called, and nothing read its logits."""
    before = parameters(tiny_llama())
    losses, model = run(False)
    with Made() as made:
        found, other = run(True)
    assert made.count == 0 and len(losses) >= STEPS and (made.calls >= STEPS) == lazy
    assert found == pytest.approx(losses, rel=tolerance)
    moved = furthest(before, parameters(model))
    assert moved > 0.05 and furthest(parameters(other), parameters(model)) < tolerance * max(1, moved)


CASES = {
    "plain": {}, "accumulation, clipping": dict(gradient_accumulation_steps=2, max_grad_norm=0.1),
    "smoothing, checkpointing": dict(label_smoothing_factor=0.1, gradient_checkpointing=True), "autocast": dict(bf16=True),
}


@pytest.mark.parametrize("name", CASES)
def test_transformers_trainer(name):
    pytest.importorskip("accelerate")
    import transformers

    options = dict(
        output_dir="out", max_steps=STEPS, per_device_train_batch_size=4, optim="sgd", learning_rate=1.0, logging_steps=1,
        report_to=[], save_strategy="no", use_cpu=True, disable_tqdm=True, **CASES[name],
    )

    def run(lazy):
        model = tiny_llama()
        if lazy:
            trainer = snippet("transformers.md", model=model, options=options, dataset=batches(8))["trainer"]
        else:
            trainer = transformers.Trainer(model, transformers.TrainingArguments(**options), train_dataset=batches(8))
            trainer.train()
        losses = [log["loss"] for log in trainer.state.log_history if "loss" in log]
        return [*losses, trainer.evaluate(batches(2))["eval_loss"]], model

    # Real bf16 logits are rounded; lazy ones are not.
    compare(run, 1e-2 if name == "autocast" else 1e-5)


def test_callback():
    """The callback that serves LLaMA-Factory and ms-swift, here in a Trainer of transformers."""
    pytest.importorskip("accelerate")
    import transformers
    from logitless.torch.integrations.transformers import LazyHead

    options = dict(
        output_dir="out", max_steps=STEPS, per_device_train_batch_size=4, optim="sgd", learning_rate=1.0, logging_steps=1,
        report_to=[], save_strategy="no", use_cpu=True, disable_tqdm=True,
    )
    swift = types.SimpleNamespace(_compute_acc=lambda outputs, labels: outputs.logits.argmax(-1))

    def run(lazy):
        model, callbacks = tiny_llama(), [LazyHead(options, swift)] if lazy else None
        trainer = transformers.Trainer(model, transformers.TrainingArguments(**options), train_dataset=batches(8), callbacks=callbacks)
        trainer.train()
        return [log["loss"] for log in trainer.state.log_history if "loss" in log], model

    compare(run)
    assert swift._compute_acc(None, None, cu_seqlens=None) is None
    with pytest.raises(TypeError, match="far_field: expected an error"):
        LazyHead(far_field="0.01").on_init_end(None, None, None, model=tiny_llama())


def test_token_metrics_page():
    pytest.importorskip("accelerate")
    import transformers

    rows = batches(4)
    options = dict(
        output_dir="out", max_steps=STEPS, per_device_train_batch_size=4, optim="sgd", learning_rate=1.0, logging_steps=1,
        report_to=[], save_strategy="no", use_cpu=True, disable_tqdm=True, gradient_accumulation_steps=2, per_device_eval_batch_size=2,
    )
    plain, ours = tiny_llama(), tiny_llama()
    of_logits = []

    def record(module, inputs, given, output):
        targets = given["labels"][:, 1:]
        log_probs = output.logits.detach()[:, :-1].log_softmax(-1)
        counted = targets != -100
        of_logits.append((
            (log_probs.argmax(-1) == targets)[counted].float().mean().item(),
            -(log_probs.exp() * log_probs).sum(-1)[counted].mean().item(),
        ))

    hook = plain.register_forward_hook(record, with_kwargs=True)
    expected = transformers.Trainer(plain, transformers.TrainingArguments(**options), train_dataset=rows)
    expected.train()
    hook.remove()
    ours.lm_head.register_forward_hook(lambda *_: pytest.fail("logits"))
    found = snippet("trainer_metrics.md", model=ours, options=options, dataset=rows)["trainer"]
    steps = [log for log in found.state.log_history if "loss" in log]
    assert len(steps) == STEPS
    for log, other, (accuracy, entropy) in zip(steps, expected.state.log_history, of_logits):
        assert log["loss"] == pytest.approx(other["loss"], rel=1e-3)  # logged with four digits
        assert log["token_accuracy"] == pytest.approx(accuracy) and log["entropy"] == pytest.approx(entropy, rel=1e-5)
    assert furthest(parameters(ours), parameters(plain)) < 1e-5
    evaluated = next(log for log in found.state.log_history if "eval_loss" in log)
    assert 0 < evaluated["eval_entropy"] < 8 and 0 <= evaluated["eval_token_accuracy"] <= 1


def test_metrics_of_transformers_trainer_read_the_logits():
    pytest.importorskip("accelerate")
    import transformers

    def run(lazy):
        model, seen = tiny_llama(), []
        if lazy:
            lazy_head(model)

        def metrics(found):
            seen.append(torch.from_numpy(found.predictions))
            return {}

        args = transformers.TrainingArguments(
            "out", per_device_eval_batch_size=2, report_to=[], use_cpu=True, disable_tqdm=True
        )
        transformers.Trainer(model, args, eval_dataset=batches(4), compute_metrics=metrics).evaluate()
        return seen[0]

    with Made() as made:
        found = run(True)
    assert made.count == made.calls == 2 and torch.allclose(found, run(False), atol=1e-6)


@pytest.mark.parametrize("precision", ["no", "bf16"])
def test_accelerate(precision):
    accelerate = pytest.importorskip("accelerate")

    def run(lazy):
        accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)
        accelerator = accelerate.Accelerator(mixed_precision=precision, cpu=True, gradient_accumulation_steps=2)
        model = tiny_llama()
        if lazy:
            lazy_head(model)
        rows = [{k: torch.tensor(v) for k, v in row.items()} for row in batches(16)]
        loader = torch.utils.data.DataLoader(rows, batch_size=4)
        prepared, optimizer, loader = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=1.0), loader)
        losses = []
        for batch in loader:
            with accelerator.accumulate(prepared):
                loss = prepared(**batch).loss  # under bf16 accelerate casts the outputs, lazy logits among them
                accelerator.backward(loss)
                optimizer.step()
                optimizer.zero_grad()
            losses.append(loss.item())
        return losses, model

    compare(run, 1e-5 if precision == "no" else 1e-2)


def test_accelerate_page():
    accelerate = pytest.importorskip("accelerate")
    accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)
    model = tiny_llama()
    rows = [{k: torch.tensor(v) for k, v in row.items()} for row in batches(8)]
    before = parameters(model)
    with Made() as made:
        snippet(
            "accelerate.md", model=model, optimizer=torch.optim.SGD(model.parameters(), lr=1.0),
            loader=torch.utils.data.DataLoader(rows, batch_size=4),
        )
    assert made.count == 0 and made.calls == 2 and furthest(parameters(model), before) > 0.05


@pytest.mark.parametrize("by", ["lazy_head", "linear_cross_entropy"])
def test_lightning(by):
    lightning = pytest.importorskip("lightning")

    class Module(lightning.LightningModule):
        """Lightning's usual module, with the model's own loss."""

        def __init__(self, model):
            super().__init__()
            self.model = model

        def training_step(self, batch, _):
            return self.model(**batch).loss

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=1.0)

    def run(ours):
        model, of, losses = tiny_llama(), Module, []
        if ours and by == "lazy_head":
            lazy_head(model)
        elif ours:  # it reads the head's weight, and must not call the head
            of = snippet("lightning.md", torch=torch)["Module"]
            model.lm_head.register_forward_hook(lambda *_: pytest.fail("logits"))

        class Watch(lightning.Callback):
            def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
                losses.append(outputs["loss"].item())

        rows = [{k: torch.tensor(v) for k, v in row.items()} for row in batches(16)]
        trainer = lightning.Trainer(
            max_epochs=1, accelerator="cpu", logger=False, enable_checkpointing=False, enable_progress_bar=False,
            enable_model_summary=False, callbacks=[Watch()],
        )
        trainer.fit(of(model), torch.utils.data.DataLoader(rows, batch_size=4))
        return losses, model

    compare(run, lazy=by == "lazy_head")
