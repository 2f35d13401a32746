"""docs/use/recipes/ms_swift.md: swift's own training run of a tiny Llama, with the plugin and without."""

import json
import os
import re

import pytest
from recipes.models import PAGES, VOCAB, Made, text, tiny_llama, tokenizer

os.environ.update(HF_HUB_OFFLINE="1", USE_HF="1")
swift = pytest.importorskip("swift", exc_type=ImportError)


def test_sft(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    tiny_llama(VOCAB).save_pretrained("model")
    tokenizer(VOCAB).save_pretrained("model")
    turns = [[("user", text(4, k)), ("assistant", text(6, 100 + k))] for k in range(8)]
    rows = [{"messages": [{"role": role, "content": content} for role, content in turn]} for turn in turns]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    (plugin,) = re.findall(r"^```python\n(.*?)^```", (PAGES / "ms_swift.md").read_text(encoding="utf-8"), re.M | re.S)
    (tmp_path / "lazy_head.py").write_text(plugin)
    options = dict(
        model="model", model_type="llama", template="dummy", dataset="rows.jsonl", max_steps=2, per_device_train_batch_size=2,
        optim="sgd", learning_rate=0.1, lr_scheduler_type="constant", warmup_ratio=0, logging_steps=1, save_strategy="no",
        eval_strategy="no", report_to="none", use_cpu="true", torch_dtype="float32", attn_impl="eager", tuner_type="full",
        gradient_checkpointing="false", dataloader_num_workers=0, split_dataset_ratio=0, add_version="false",
    )

    def losses(**more):
        given = [text for name, value in {**options, **more}.items() for text in (f"--{name}", str(value))]
        return [log["loss"] for log in swift.sft_main(given)["log_history"] if "loss" in log]

    expected = losses(output_dir="out")
    with Made() as made:
        assert losses(output_dir="ours", external_plugins="lazy_head.py", callbacks="lazy_head") == pytest.approx(expected, rel=1e-5)
    assert made.calls >= 2 and made.count == 0 and len(expected) == 2
