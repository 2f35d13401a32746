#!/usr/bin/env python3
"""Measures the memory that docs/use/recipes save: the peak of PyTorch's allocator in one training step of each installed
library, with its own loss and with logitless's, beyond the model.

    LOGITLESS_LIBRARY=build/src/liblogitless.so PYTHONPATH=python python3 bench/compare/recipes_torch.py
        [--recipe NAME ...] [--sequences B --length T --dim D --vocab V] [--budget 8MiB]

The model is a tiny Llama of two layers, float32, on the CPU; gradients are included. Recipes: trainer, trl-sft,
trl-dpo, trl-grpo, torchtune, verl, plain (the model by itself, as Accelerate and Lightning call it).
"""
import argparse
import gc
import os
import sys
import tempfile
import types
import warnings
from importlib.metadata import version
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tests/python/torch"))

from recipes import models  # noqa: E402

from logitless.torch._peak import peak_of  # noqa: E402
from logitless.torch import lazy_head  # noqa: E402


class Setting:
    def __init__(self, args):
        self.rows, self.length, self.dim, self.vocab, self.budget = (
            args.sequences, args.length, args.dim, args.vocab, args.budget)

    def model(self):
        return models.tiny_llama(
            self.vocab, hidden_size=self.dim, intermediate_size=2 * self.dim, max_position_embeddings=2 * self.length)

    def ids(self):
        return torch.randint(3, self.vocab, (self.rows, self.length), generator=torch.Generator().manual_seed(0))


def arguments(setting, **more):
    return dict(
        output_dir="out", max_steps=1, per_device_train_batch_size=setting.rows, optim="sgd", report_to=[], save_strategy="no",
        use_cpu=True, bf16=False, disable_tqdm=True, gradient_checkpointing=False, logging_strategy="no", **more)


def plain(setting, ours):
    model, ids = setting.model(), setting.ids()
    if ours:
        lazy_head(model)
    return lambda: model(input_ids=ids, labels=ids).loss.backward()


def trainer(setting, ours):
    import transformers

    model = setting.model()
    if ours:
        lazy_head(model)
    rows = [{"input_ids": row, "labels": row} for row in setting.ids().tolist()]
    made = transformers.Trainer(model, transformers.TrainingArguments(**arguments(setting)), train_dataset=rows)
    return made.train


def of_trl(kind):
    def recipe(setting, ours):
        import datasets
        import transformers
        import trl

        from logitless.torch.integrations import trl as integration

        integration.patch(memory_budget=setting.budget) if ours else integration.unpatch()
        tokenizer = models.tokenizer(setting.vocab)
        setting.model().save_pretrained("model")
        tokenizer.save_pretrained("model")
        model = transformers.LlamaForCausalLM.from_pretrained("model")
        half = setting.length // 2
        prompts = [{"prompt": models.text(half, k, setting.vocab)} for k in range(setting.rows)]
        completions = lambda k: " " + models.text(setting.length - half - 1, 1000 + k, setting.vocab)
        data = datasets.Dataset.from_list
        if kind == "sft":
            rows = [{**row, "completion": completions(k)} for k, row in enumerate(prompts)]
            return trl.SFTTrainer(
                model, args=trl.SFTConfig(**arguments(setting)), train_dataset=data(rows), processing_class=tokenizer).train
        if kind == "dpo":
            rows = [{**row, "chosen": completions(k), "rejected": completions(k + 500)} for k, row in enumerate(prompts)]
            half_batch = {**arguments(setting), "per_device_train_batch_size": setting.rows // 2}
            return trl.DPOTrainer(
                model, args=trl.DPOConfig(**half_batch), train_dataset=data(rows), processing_class=tokenizer).train
        reward = lambda completion_ids, **_: [float(sum(ids) % 7) for ids in completion_ids]
        config = trl.GRPOConfig(
            **arguments(setting, num_generations=setting.rows, max_completion_length=setting.length - half, beta=0.04))
        return trl.GRPOTrainer(model, reward, config, data(prompts), processing_class=tokenizer).train

    return recipe


def torchtune(setting, ours):
    from torchtune.models.llama3 import llama3
    from torchtune.modules.loss import LinearCrossEntropyLoss

    if ours:
        from logitless.torch.integrations.torchtune import LinearCrossEntropyLoss  # noqa: F811

        loss = LinearCrossEntropyLoss(memory_budget=setting.budget)
    else:
        loss = LinearCrossEntropyLoss()
    model = llama3(
        vocab_size=setting.vocab, num_layers=2, num_heads=4, num_kv_heads=2, embed_dim=setting.dim,
        max_seq_len=2 * setting.length, intermediate_dim=2 * setting.dim)
    loss.set_model_output(model)
    ids = setting.ids()
    return lambda: loss(model(tokens=ids), ids.roll(-1, 1)).backward()


def verl(setting, ours):
    from verl.models.transformers.dense_common import forward_with_torch_backend

    from logitless.torch.integrations import verl as integration

    integration.patch(memory_budget=setting.budget) if ours else integration.unpatch()
    model, ids = setting.model(), setting.ids()
    model.forward = types.MethodType(forward_with_torch_backend, model)
    return lambda: model(input_ids=ids, return_dict=True).log_probs.sum().backward()


RECIPES = {
    "plain": (plain, "transformers"), "trainer": (trainer, "transformers"), "trl-sft": (of_trl("sft"), "trl"),
    "trl-dpo": (of_trl("dpo"), "trl"), "trl-grpo": (of_trl("grpo"), "trl"), "torchtune": (torchtune, "torchtune"),
    "verl": (verl, "verl"),
}


def peak(recipe, setting, ours):
    """Returns MiB. Trainers are cyclic garbage, which must not be freed while another one is measured."""
    step = recipe(setting, ours)
    gc.collect()
    return peak_of(step)[0] / 2**20


def parse_arguments():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--recipe", nargs="+", choices=RECIPES, default=list(RECIPES))
    parser.add_argument("--sequences", type=int, default=8)
    parser.add_argument("--length", type=int, default=128)
    parser.add_argument("--dim", type=int, default=128)
    parser.add_argument("--vocab", type=int, default=32768)
    parser.add_argument("--budget", default=None, help="memory_budget where the recipe has one")
    return parser.parse_args()


def main():
    args = parse_arguments()
    warnings.simplefilter("ignore")
    os.environ["HF_HUB_OFFLINE"] = "1"
    setting = Setting(args)
    print(f"fp32 logits: {setting.rows * setting.length * setting.vocab * 4 / 2**20:.0f} MiB; "
          f"the head's gradient: {setting.vocab * setting.dim * 4 / 2**20:.0f} MiB")
    os.chdir(tempfile.mkdtemp())
    for name in args.recipe:
        recipe, package = RECIPES[name]
        try:
            peaks = [peak(recipe, setting, ours) for ours in (False, True)]
        except ImportError as error:
            print(f"{name}: not here ({error})")
            continue
        try:
            package = f"{package} {version(package)}"
        except ImportError:
            pass
        print(f"{name} ({package}): {peaks[0]:.1f} MiB before, {peaks[1]:.1f} MiB with logitless", flush=True)


if __name__ == "__main__":
    main()
