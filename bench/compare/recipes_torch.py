#!/usr/bin/env python3
"""Runs a training step of each installed library, with its own loss and with logitless's, and prints loss, time and peak.

    LOGITLESS_LIBRARY=build/src/liblogitless.so PYTHONPATH=python python3 bench/compare/recipes_torch.py
        [--recipe NAME ...] [--device cpu|cuda] [--sequences B --length T --dim D --vocab V] [--budget 8MiB]
        [--steps N] [--limit SECONDS] [--kernels N] [--tiny] [--json FILE]

Each recipe is one of docs/use/recipes, and runs in a process of its own for at most --limit seconds; a library that is
not installed is named. The model is a Llama of two layers with random weights: tiny and in float32 on the CPU, of 128256
entries and in bfloat16 on a GPU. The peak is that of PyTorch's allocator in the first step, beyond the model, gradients
included. The time is of later steps, after as many others: the median of a trainer's, else their mean. Losses of the two
are compared, to 1e-4 in float32 and 1e-2 in bfloat16. --kernels N also prints the N kernels of a GPU that took longest.
"""
import argparse
import gc
import json
import os
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import time
import types
import warnings
from importlib.metadata import version
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tests/python/torch"))

from recipes import models  # noqa: E402

from logitless.torch._peak import peak_of  # noqa: E402
from logitless.torch import lazy_head  # noqa: E402

MARK = "RECIPE "  # begins the line of a result
WAYS = (("before", False), ("logitless", True))


class Setting:
    def __init__(self, args):
        self.rows, self.length, self.dim, self.vocab, self.budget = (
            args.sequences, args.length, args.dim, args.vocab, args.budget)
        self.device, self.steps, self.kernels = args.device, args.steps, args.kernels
        self.dtype = torch.float32 if self.device == "cpu" else torch.bfloat16

    def model(self):
        heads = dict(num_attention_heads=self.dim // 128, num_key_value_heads=self.dim // 128) if self.dim >= 512 else {}
        with torch.device(self.device):
            made = models.tiny_llama(
                self.vocab, hidden_size=self.dim, intermediate_size=2 * self.dim, max_position_embeddings=2 * self.length, **heads)
        return made.to(self.device, self.dtype)

    def now(self):
        """Returns the time at which the device has done its work, in seconds."""
        if self.device == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter()

    def ids(self):
        return torch.randint(3, self.vocab, (self.rows, self.length), generator=torch.Generator().manual_seed(0)).to(self.device)


def arguments(setting, **more):
    on_cpu = setting.device == "cpu"
    return dict(
        output_dir="out", max_steps=setting.steps, per_device_train_batch_size=setting.rows, optim="sgd", report_to=[],
        save_strategy="no", use_cpu=on_cpu, bf16=not on_cpu, disable_tqdm=True, gradient_checkpointing=False,
        logging_strategy="no", **more)


class Training:
    """A training by a Trainer of transformers; ``seconds`` has those of each step of the last one."""

    def __init__(self, trainer, setting):
        import transformers

        class Clock(transformers.TrainerCallback):
            def on_step_begin(clock, *_, **__):
                clock.begin = setting.now()

            def on_step_end(clock, *_, **__):
                self.seconds.append(setting.now() - clock.begin)

        self.trainer, self.seconds = trainer, []
        trainer.add_callback(Clock())

    def __call__(self):
        self.seconds.clear()
        return self.trainer.train().training_loss


def backward(loss):
    loss.backward()
    return loss


def plain(setting, ours):
    model, ids = setting.model(), setting.ids()
    if ours:
        lazy_head(model)
    return lambda: backward(model(input_ids=ids, labels=ids).loss)


def trainer(setting, ours):
    import transformers

    model = setting.model()
    if ours:
        lazy_head(model)
    rows = [{"input_ids": row, "labels": row} for row in setting.ids().tolist()]
    return Training(transformers.Trainer(model, transformers.TrainingArguments(**arguments(setting)), train_dataset=rows), setting)


def of_trl(kind):
    def recipe(setting, ours):
        import datasets
        import transformers
        import trl

        from logitless.torch.integrations import trl as integration

        integration.patch(memory_budget=setting.budget) if ours else integration.unpatch()
        tokenizer = models.tokenizer(setting.vocab)
        setting.model().save_pretrained("model")  # references are loaded from it
        tokenizer.save_pretrained("model")
        model = transformers.LlamaForCausalLM.from_pretrained("model")
        half = setting.length // 2
        prompts = [{"prompt": models.text(half, k, setting.vocab)} for k in range(setting.rows)]
        completion = lambda k: models.text(setting.length - half - 1, 1000 + k, setting.vocab)
        if kind == "sft":
            make, config = trl.SFTTrainer, trl.SFTConfig(**arguments(setting))
            rows = [{**row, "completion": " " + completion(k)} for k, row in enumerate(prompts)]
        elif kind == "dpo":
            make, config = trl.DPOTrainer, trl.DPOConfig(**{**arguments(setting), "per_device_train_batch_size": setting.rows // 2})
            rows = [
                {**row, "chosen": " " + completion(k), "rejected": " " + completion(k + 500)} for k, row in enumerate(prompts)]
        else:
            config = trl.GRPOConfig(
                **arguments(setting, num_generations=setting.rows, max_completion_length=setting.length - half, beta=0.04))
            rows = prompts

            # Completions that are there already: half a thousand steps of generation take longer than all else.
            def rollout(prompts, _):
                made = [models.text(setting.length - half - 1 - k, 1000 + k, setting.vocab) for k in range(len(prompts))]
                return dict(prompt_ids=tokenizer(prompts)["input_ids"], completion_ids=tokenizer(made)["input_ids"], logprobs=None)

            def make(*args, **more):
                reward = lambda completion_ids, **_: [float(sum(ids) % 7) for ids in completion_ids]
                return trl.GRPOTrainer(args[0], reward, rollout_func=rollout, **more)
        made = make(model, args=config, train_dataset=datasets.Dataset.from_list(rows), processing_class=tokenizer)
        return Training(made, setting)

    return recipe


def trl_head(dtype=None):
    """Returns the recipe of TRL's fused head alone, as SFT calls it: under autocast, and half of the tokens. dtype: of the
    weights."""

    def recipe(setting, ours):
        from trl.kernels import ChunkedLogProbFunction

        from logitless.torch.integrations.trl import FusedScores

        function = FusedScores(ChunkedLogProbFunction, setting.budget) if ours else ChunkedLogProbFunction
        like = dict(dtype=dtype or setting.dtype, device=setting.device)
        weight = torch.nn.Parameter(torch.randn(setting.vocab, setting.dim, **like) * setting.dim**-0.5)
        target = setting.ids()[:, setting.length // 2 + 1 :].flatten()
        hidden = torch.randn(target.numel(), setting.dim, **like, requires_grad=True)

        def step():
            hidden.grad = weight.grad = None
            with torch.autocast(setting.device, torch.bfloat16, enabled=setting.device == "cuda"):
                log_probs, *_ = function.apply(
                    hidden, weight, None, target, 1.0, 32768, None, 1.0, ("log_probs", "entropy", "is_top1"))
            return backward(-log_probs.mean())

        return step

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
    model = model.to(setting.device, setting.dtype)
    return lambda: backward(loss(model(tokens=ids), ids.roll(-1, 1)))


def verl(setting, ours):
    from verl.models.transformers.dense_common import forward_with_torch_backend

    from logitless.torch.integrations import verl as integration

    integration.patch(memory_budget=setting.budget) if ours else integration.unpatch()
    model, ids = setting.model(), setting.ids()
    model.forward = types.MethodType(forward_with_torch_backend, model)
    return lambda: backward(-model(input_ids=ids, return_dict=True).log_probs.mean())


def verl_megatron(setting, ours):
    """verl's kernel of the Megatron engine; its own wants Triton."""
    import verl.utils.kernel.linear_cross_entropy as kernel

    from logitless.torch.integrations import verl as integration

    integration.patch(memory_budget=setting.budget) if ours else integration.unpatch()
    model, ids = setting.model(), setting.ids()

    def step():
        hidden = model.model(ids).last_hidden_state
        return backward(-kernel.linear_cross_entropy(hidden, model.lm_head.weight, ids.roll(-1, 1), 1.0, "none", None)[0].mean())

    return step


def megatron(setting, ours):
    import contextlib

    import torch.distributed as dist
    from megatron.core import parallel_state, tensor_parallel
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.transformer.transformer_config import TransformerConfig

    from logitless.torch.integrations import megatron as integration

    if not dist.is_initialized():
        dist.init_process_group("gloo" if setting.device == "cpu" else "nccl", rank=0, world_size=1, store=dist.HashStore())
    if not parallel_state.model_parallel_is_initialized():
        parallel_state.initialize_model_parallel()
        if setting.device == "cpu":
            torch.cuda.current_device = lambda: "cpu"
            tensor_parallel.get_cuda_rng_tracker().fork = contextlib.nullcontext
        else:
            tensor_parallel.model_parallel_cuda_manual_seed(0)
    torch.manual_seed(0)
    config = TransformerConfig(
        num_layers=2, hidden_size=setting.dim, num_attention_heads=max(4, setting.dim // 128), use_cpu_initialization=True,
        params_dtype=setting.dtype, pipeline_dtype=setting.dtype, bf16=setting.dtype == torch.bfloat16, hidden_dropout=0.0,
        attention_dropout=0.0, bias_dropout_fusion=False)
    model = GPTModel(config, get_gpt_layer_local_spec(), vocab_size=setting.vocab, max_sequence_length=setting.length)
    model = model.to(setting.device, setting.dtype)
    if ours:
        integration.patch(model, memory_budget=setting.budget)
    ids, position = setting.ids(), torch.arange(setting.length, device=setting.device).expand(setting.rows, -1)
    mask = torch.ones(1, 1, setting.length, setting.length, device=setting.device).tril() < 0.5
    return lambda: backward(model(ids, position, mask, labels=ids.roll(-1, 1)).mean())


def axolotl(setting, ours):
    from axolotl.integrations import base
    from axolotl.utils.dict import DictDefault

    model, ids = setting.model(), setting.ids()
    if ours:
        plugin = base.load_plugin("logitless.torch.integrations.axolotl.LogitlessPlugin")
        plugin.post_model_load(DictDefault(base_model="tiny"), model)
    return lambda: backward(model(input_ids=ids, labels=ids).loss)


def torchtitan(setting, ours):
    from torchtitan.components.loss import ChunkedLossWrapper

    if ours:
        from logitless.torch.integrations.torchtitan import LazyLoss

        loss = LazyLoss.Config().build()
    else:
        loss = ChunkedLossWrapper.Config().build()
    model, ids = setting.model(), setting.ids()
    loss.set_lm_head(model.lm_head)
    count = torch.tensor(float(ids.numel()), device=setting.device)
    return lambda: backward(loss(model.model(ids).last_hidden_state, ids.roll(-1, 1), count)[0])


def unsloth(setting, ours):
    """unsloth's fused loss alone. It compiles its own on a GPU, not on a CPU."""
    on_cpu = setting.device == "cpu"
    for name in ("UNSLOTH_IS_PRESENT", *["UNSLOTH_ALLOW_CPU", "UNSLOTH_COMPILE_DISABLE"] * on_cpu):
        os.environ.setdefault(name, "1")
    import unsloth_zoo.loss_utils as zoo

    from logitless.torch.integrations import unsloth as integration

    integration.patch(memory_budget=setting.budget) if ours else integration.unpatch()
    model, ids = setting.model(), setting.ids()
    return lambda: backward(zoo.unsloth_fused_ce_loss(
        None, model.model(ids).last_hidden_state, model.lm_head.weight, None, ids, torch_compile=not on_cpu))


def deepspeed(setting, ours):
    """ZeRO-2 of one process."""
    import deepspeed

    model, ids = setting.model(), setting.ids()
    if ours:
        lazy_head(model)
    for name, value in dict(RANK=0, LOCAL_RANK=0, WORLD_SIZE=1, MASTER_ADDR="127.0.0.1", MASTER_PORT=29517).items():
        os.environ.setdefault(name, str(value))
    config = {"train_micro_batch_size_per_gpu": setting.rows, "zero_optimization": {"stage": 2, "reduce_bucket_size": 1 << 20}, "zero_allow_untested_optimizer": True,
              "bf16": {"enabled": setting.dtype == torch.bfloat16}}
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    engine = deepspeed.initialize(model=model, optimizer=optimizer, config=config)[0]

    def step():
        loss = engine(input_ids=ids, labels=ids).loss
        engine.backward(loss)
        engine.step()
        return loss

    return step


RECIPES = {
    "plain": (plain, "transformers"), "trainer": (trainer, "transformers"), "trl-sft": (of_trl("sft"), "trl"),
    "trl-dpo": (of_trl("dpo"), "trl"), "trl-grpo": (of_trl("grpo"), "trl"), "trl-head": (trl_head(), "trl"), "trl-head-fp32": (trl_head(torch.float32), "trl"), "torchtune": (torchtune, "torchtune"),
    "torchtitan": (torchtitan, "torchtitan"), "axolotl": (axolotl, "axolotl"), "verl": (verl, "verl"),
    "verl-megatron": (verl_megatron, "verl"), "megatron": (megatron, "megatron-core"),
    "unsloth": (unsloth, "unsloth_zoo"), "deepspeed": (deepspeed, "deepspeed"),
}


def measure(recipe, setting, ours):
    """Returns loss, milliseconds and the MiB of the peak. Trainers are cyclic garbage, which must not be freed while another
    one is measured."""
    torch.manual_seed(0)
    step = recipe(setting, ours)
    gc.collect()
    if setting.device == "cpu":
        taken, result = peak_of(step)
    else:
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        result = step()
        torch.cuda.synchronize()
        taken = torch.cuda.max_memory_allocated() - before
    loss = float(result)
    if isinstance(step, Training):
        step()
        seconds = statistics.median(step.seconds)
    else:
        begin = setting.now()
        for _ in range(setting.steps):
            step()
        seconds = (setting.now() - begin) / setting.steps
    found = {"loss": loss, "ms": 1e3 * seconds, "mib": taken / 2**20}
    if isinstance(step, Training):
        found["weights"] = str(step.trainer.model.get_output_embeddings().weight.dtype).removeprefix("torch.")
    return {**found, "kernels": kernels_of(step, setting)} if setting.kernels else found


def kernels_of(step, setting):
    """Returns [milliseconds, calls, name] of the kernels that take longest in a call of ``step``, their sum first."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        step()
        torch.cuda.synchronize()
    rows = [[row.self_device_time_total / 1e3, row.count, row.key] for row in profile.key_averages() if row.self_device_time_total]
    rows.sort(reverse=True)
    return [[sum(row[0] for row in rows), sum(row[1] for row in rows), "all"], *rows[: setting.kernels]]


def row(name, setting, report=lambda found: None):
    """Returns the measurements of a recipe's two ways, or why there are none. Reports what is there so far."""
    recipe, package = RECIPES[name]
    try:
        result = {"package": f"{package} {version(package)}"}
    except ImportError:
        result = {"package": package}
    for way, ours in WAYS:
        try:
            result[way] = measure(recipe, setting, ours)
        except ImportError as error:
            return {"not installed": str(error)}
        except Exception as error:  # a library's own path may want another device, and the other way goes on
            result[way] = {"failed": f"{type(error).__name__}: {error}".splitlines()[0][:120]}
        report(result)
    if all("loss" in result[way] for way, _ in WAYS):
        first, second = result["before"]["loss"], result["logitless"]["loss"]
        tolerance = 1e-4 if setting.dtype == torch.float32 else 1e-2
        result["agrees"] = abs(first - second) <= tolerance * max(1.0, abs(first))
    return result


def run(name, args):
    """Returns the result of ``row`` in a process of its own, which ends after ``args.limit`` seconds."""
    names = "device", "sequences", "length", "dim", "vocab", "budget", "steps", "kernels"
    more = [text for key in names if getattr(args, key) is not None for text in (f"--{key}", str(getattr(args, key)))]
    command = [sys.executable, __file__, "--worker", "--recipe", name, *more]
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as errors:
        process = subprocess.Popen(command, stdout=out, stderr=errors, start_new_session=True)
        try:
            status = f"exit status {process.wait(args.limit)}"
        except subprocess.TimeoutExpired:
            status = f"no result within {args.limit:g} s"
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
        out.seek(0)
        errors.seek(0)
        lines = [line.removeprefix(MARK) for line in out if line.startswith(MARK)]
        raised = re.findall(r"^[\w.]*(?:Error|Exception|Exit)\b: .*", errors.read(), re.M)
    result = json.loads(lines[-1]) if lines else {"package": RECIPES[name][1]}
    if "not installed" not in result:
        for way, _ in WAYS:
            result.setdefault(way, {"failed": f"{status}: {raised[-1]}" if raised and "exit" in status else status})
    return result


def text_of(name, result):
    if "not installed" in result:
        return f"{name}: not installed ({result['not installed']})"
    lines = [f"{name} ({result['package']}):" + " the losses DIFFER" * (not result.get("agrees", True))]
    for way in ("before", "logitless"):
        at = result[way]
        lines.append(f"  {way:10}" + (at["failed"] if "failed" in at else f"loss {at['loss']:.6f}, {at['ms']:.1f} ms, {at['mib']:.1f} MiB")
                     + (f", {at['weights']} weights" if "weights" in at else ""))
        lines += [f"    {ms:9.2f} ms {calls:6}  {kernel[:110]}" for ms, calls, kernel in at.get("kernels", ())]
    return "\n".join(lines)


def parse_arguments():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--recipe", nargs="+", choices=RECIPES, default=list(RECIPES))
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    for name, value, on_gpu in (("sequences", 8, 8), ("length", 128, 1024), ("dim", 128, 2048), ("vocab", 32768, 128256)):
        parser.add_argument(f"--{name}", type=int, help=f"default: {value}, with --device cuda {on_gpu}")
        parser.set_defaults(**{f"default_{name}": {"cpu": value, "cuda": on_gpu}})
    parser.add_argument("--budget", default=None, help="memory_budget where the recipe has one")
    parser.add_argument("--steps", type=int, help="timed; default: 1, with --device cuda 5")
    parser.add_argument("--limit", type=float, default=300, metavar="SECONDS", help="of a recipe; default: 300")
    parser.add_argument("--kernels", type=int, metavar="N", help="with --device cuda: prints the N that take longest in a call")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--tiny", action="store_true", help="4 sequences of 16 tokens, dim 32, 2000 entries")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    if args.kernels and args.device == "cpu":
        parser.error("--kernels: expected --device cuda, got cpu")
    tiny = dict(sequences=4, length=16, dim=32, vocab=2000) if args.tiny else {}
    for name in ("sequences", "length", "dim", "vocab"):
        if getattr(args, name) is None:
            setattr(args, name, tiny.get(name, getattr(args, f"default_{name}")[args.device]))
    args.steps = args.steps or (1 if args.device == "cpu" else 5)
    return args


def work(args):
    """Runs the recipe of a process, and prints what is there after each way."""
    report = lambda found: print(f"\n{MARK}{json.dumps(found)}", flush=True)
    os.environ["HF_HUB_OFFLINE"] = os.environ["TRANSFORMERS_OFFLINE"] = "1"
    warnings.simplefilter("ignore")
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        report(row(args.recipe[0], Setting(args), report))
        os.chdir("/")


def main():
    args = parse_arguments()
    if args.worker:
        return work(args)
    setting = Setting(args)
    device = "CPU" if args.device == "cpu" else torch.cuda.get_device_name()
    size = 2 if setting.dtype == torch.bfloat16 else 4
    print(f"{device}, torch {torch.__version__}; {setting.rows} x {setting.length} x {setting.dim} x {setting.vocab}; fp32 logits: "
          f"{setting.rows * setting.length * setting.vocab * 4 / 2**20:.0f} MiB; the head's gradient: "
          f"{setting.vocab * setting.dim * size / 2**20:.0f} MiB")
    results = {}
    for name in args.recipe:
        results[name] = run(name, args)
        print(text_of(name, results[name]), flush=True)
    if args.json:
        args.json.write_text(json.dumps(results, indent=1))
    sys.exit(any("failed" in r.get("logitless", {}) or not r.get("agrees", True) for r in results.values()))


if __name__ == "__main__":
    main()
