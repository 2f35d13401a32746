"""docs/recipes/transformers.md, accelerate.md and lightning.md: their loops with the model's head made lazy."""

import warnings

import pytest
import torch
from logitless.torch import lazy_head, linear_cross_entropy
from recipes.models import Made, batches, furthest, parameters, tiny_llama

pytest.importorskip("transformers")

STEPS = 3


@pytest.fixture(autouse=True)
def quiet(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def compare(run, tolerance=1e-5):
    """run(lazy) -> (losses, model): that both come to the same, and that nothing asked for logits."""
    before = parameters(tiny_llama())
    losses, model = run(False)
    with Made() as made:
        found, other = run(True)
    assert made.count == 0 and len(losses) >= STEPS
    assert type(other.get_output_embeddings()).__name__ == "LazyLinear"
    assert found == pytest.approx(losses, rel=tolerance)
    moved = furthest(before, parameters(model))
    assert moved > 0.05 and furthest(parameters(other), parameters(model)) < tolerance * max(1, moved)


CASES = {
    "plain": {}, "accumulation": dict(gradient_accumulation_steps=2), "smoothing": dict(label_smoothing_factor=0.1),
    "checkpointing": dict(gradient_checkpointing=True), "clipping": dict(max_grad_norm=0.1),
}


@pytest.mark.parametrize("name", CASES)
def test_transformers_trainer(name):
    pytest.importorskip("accelerate")
    import transformers

    def run(lazy):
        model = tiny_llama()
        if lazy:
            lazy_head(model)
        args = transformers.TrainingArguments(
            "out", max_steps=STEPS, per_device_train_batch_size=4, optim="sgd", learning_rate=1.0, logging_steps=1, report_to=[],
            save_strategy="no", use_cpu=True, disable_tqdm=True, **CASES[name],
        )
        trainer = transformers.Trainer(model, args, train_dataset=batches(8), eval_dataset=batches(2))
        trainer.train()
        losses = [log["loss"] for log in trainer.state.log_history if "loss" in log]
        return [*losses, trainer.evaluate()["eval_loss"]], model

    compare(run)


def test_transformers_trainer_under_autocast():
    """Real bf16 logits are rounded, lazy ones are not: the gradients agree to bf16."""
    pytest.importorskip("accelerate")
    import transformers

    def run(lazy):
        model = tiny_llama()
        if lazy:
            lazy_head(model)
        args = transformers.TrainingArguments(
            "out", max_steps=STEPS, per_device_train_batch_size=4, optim="sgd", learning_rate=1.0, logging_steps=1, report_to=[],
            save_strategy="no", use_cpu=True, disable_tqdm=True, bf16=True,
        )
        trainer = transformers.Trainer(model, args, train_dataset=batches(8))
        trainer.train()
        return [log["loss"] for log in trainer.state.log_history if "loss" in log], model

    compare(run, 1e-2)


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


@pytest.mark.parametrize("by", ["lazy_head", "linear_cross_entropy"])
def test_lightning(by):
    lightning = pytest.importorskip("lightning")

    class Module(lightning.LightningModule):
        def __init__(self, how):
            super().__init__()
            self.model, self.how, self.losses = tiny_llama(), how, []
            if how == "lazy_head":
                lazy_head(self.model)
            elif how == "linear_cross_entropy":  # reads the head's weight, and must not call it
                self.model.lm_head.register_forward_hook(lambda *_: pytest.fail("logits"))

        def training_step(self, batch, _):
            if self.how == "linear_cross_entropy":
                hidden = self.model.model(input_ids=batch["input_ids"]).last_hidden_state
                loss = linear_cross_entropy(hidden, self.model.lm_head.weight, batch["labels"], shift=True)
            else:
                loss = self.model(**batch).loss
            self.losses.append(loss.item())
            return loss

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=1.0)

    def run(ours):
        module = Module(by if ours else "plain")
        rows = [{k: torch.tensor(v) for k, v in row.items()} for row in batches(16)]
        trainer = lightning.Trainer(
            max_epochs=1, accelerator="cpu", logger=False, enable_checkpointing=False, enable_progress_bar=False,
            enable_model_summary=False,
        )
        trainer.fit(module, torch.utils.data.DataLoader(rows, batch_size=4))
        if ours and by != "lazy_head":
            lazy_head(module.model)  # as compare() expects; nothing runs any more
        return module.losses, module.model

    compare(run)
