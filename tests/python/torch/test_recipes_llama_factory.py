"""docs/use/recipes/llama_factory.md: its own training run of a tiny Llama, with the callback and without."""

import json
import os
import sys

import pytest
import torch
from recipes.models import VOCAB, Made, snippet, text, tiny_llama, tokenizer

os.environ.setdefault("DISABLE_VERSION_CHECK", "1")  # its pinned versions are others than these
os.environ.setdefault("HF_HUB_OFFLINE", "1")
tuner = pytest.importorskip("llamafactory.train.tuner", exc_type=(ImportError, RuntimeError))


@pytest.mark.parametrize("tuning", ["full", "lora"])
def test_sft(tmp_path, monkeypatch, tuning):
    tiny_llama(VOCAB).save_pretrained(tmp_path / "model")
    tokenizer(VOCAB).save_pretrained(tmp_path / "model")
    rows = [{"instruction": text(4, k), "input": "", "output": text(6, 100 + k)} for k in range(8)]
    (tmp_path / "rows.json").write_text(json.dumps(rows))
    (tmp_path / "dataset_info.json").write_text(json.dumps({"rows": {"file_name": "rows.json"}}))
    options = dict(
        stage="sft", do_train=True, finetuning_type=tuning, model_name_or_path=str(tmp_path / "model"), dataset="rows",
        dataset_dir=str(tmp_path), template="empty", cutoff_len=32, max_steps=2, per_device_train_batch_size=2, learning_rate=1e-2,
        lr_scheduler_type="constant", optim="sgd", logging_steps=1, save_strategy="no", report_to="none", use_cpu=True,
        overwrite_cache=True, output_dir=str(tmp_path / "out"), preprocessing_num_workers=1, flash_attn="disabled",
        disable_gradient_checkpointing=True,  # 0.9.5 has its own, of an older transformers
    )
    (tmp_path / "options.yaml").write_text(json.dumps({**options, "output_dir": str(tmp_path / "ours")}))

    def losses(folder):
        return [log["loss"] for log in json.loads((tmp_path / folder / "trainer_state.json").read_text())["log_history"] if "loss" in log]

    torch.manual_seed(0)
    tuner.run_exp(dict(options))
    expected = losses("out")
    monkeypatch.setattr(sys, "argv", ["train.py", str(tmp_path / "options.yaml")])
    with Made() as made:
        snippet("llama_factory.md")
    assert made.calls >= 2 and made.count == 0 and len(expected) == 2
    assert losses("ours") == pytest.approx(expected, rel=1e-4)
