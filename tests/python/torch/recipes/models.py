"""Models and texts that the tests of recipes train: tiny, and made here."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import torch

PAGES = Path(__file__).parents[4] / "docs/use/recipes"

VOCAB = 2000


def tiny_llama(vocab: int = VOCAB, **more):
    import transformers

    torch.manual_seed(0)
    sizes = dict(
        vocab_size=vocab, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, bos_token_id=1, eos_token_id=2, pad_token_id=0, max_position_embeddings=128,
    )
    config = transformers.LlamaConfig(**{**sizes, **more})
    return transformers.LlamaForCausalLM(config)


def tokenizer(vocab: int = VOCAB):
    """Makes a tokenizer of the tokens "w3" to "w(vocab - 1)", split at spaces."""
    import tokenizers
    import transformers

    vocabulary = {"<pad>": 0, "<s>": 1, "</s>": 2, **{f"w{k}": k for k in range(3, vocab)}}
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="w3"))
    made.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=made, pad_token="<pad>", bos_token="<s>", eos_token="</s>", padding_side="left"
    )


def text(count: int, seed: int, vocab: int = VOCAB) -> str:
    found = torch.randint(3, vocab, (count,), generator=torch.Generator().manual_seed(seed))
    return " ".join(f"w{k}" for k in found.tolist())


def parameters(model) -> dict[str, torch.Tensor]:
    """Returns copies of the parameters by name."""
    return {name: p.detach().clone() for name, p in model.named_parameters()}


def furthest(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> float:
    """Returns the largest relative difference of a parameter, in the 2-norm."""
    assert found.keys() == expected.keys()
    return max(float((found[k] - expected[k]).norm() / expected[k].norm()) for k in expected)


def batches(count: int, tokens: int = 12, vocab: int = VOCAB) -> list[dict]:
    """Returns sequences of random tokens, the first three of which are a prompt."""
    rows = []
    for k in range(count):
        ids = torch.randint(3, vocab, (tokens,), generator=torch.Generator().manual_seed(k)).tolist()
        rows.append({"input_ids": ids, "labels": [-100] * 3 + ids[3:]})
    return rows


def snippet(page: str, **names) -> dict:
    """Runs the Python of a page of docs/use/recipes, to which these names are known. Returns its names."""
    (code,) = re.findall(r"^```python\n(.*?)^```", (PAGES / page).read_text(encoding="utf-8"), re.M | re.S)
    exec(compile(code, page, "exec"), names)
    return names


def under_fsdp(recipe: str) -> None:
    """Runs fsdp_worker.py in two processes."""
    run_worker("fsdp_worker.py", 2, recipe)


def run_worker(name: str, ranks: int, *arguments: str) -> None:
    """Runs a script of this folder in several processes, the first of which prints "ok"."""
    start = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={ranks}"]
    command = [*start, str(Path(__file__).with_name(name)), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0 and "ok" in done.stdout, done.stdout + done.stderr


class Made:
    """Counts while it is entered: ``calls`` of lazy heads, and ``count``, the requests for the numbers of their
    logits."""

    def __enter__(self):
        from logitless.torch._lazy import _call, _form

        self.count = self.calls = 0
        self._undo = [(_form.Form, "value", _form.Form.value), (_call.HeadCall, "__init__", _call.HeadCall.__init__)]
        (_, _, value), (_, _, make) = self._undo

        def counted_value(form):
            self.count += 1
            return value(form)

        def counted_call(call, *args, **kwargs):
            self.calls += 1
            make(call, *args, **kwargs)

        _form.Form.value, _call.HeadCall.__init__ = counted_value, counted_call
        return self

    def __exit__(self, *_):
        for owner, name, value in self._undo:
            setattr(owner, name, value)
