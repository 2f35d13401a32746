"""docs/use/recipes/trl.md: TRL's trainers, with token scores by the library."""

import warnings

import pytest
import torch
from logitless.torch.integrations import trl as recipe
from logitless.torch.integrations._scores import OUTPUTS, score_tokens
from recipes.models import VOCAB, Made, furthest, parameters, snippet, text, tiny_llama, tokenizer

STEPS = 3


def formula(hidden, weight, target, bias, *, temperature, softcap, logit_scale):
    """The formula on full logits, in the order of OUTPUTS, log-probabilities first."""
    z = (hidden @ weight.T + (0 if bias is None else bias)) * logit_scale
    z = (z if softcap is None else softcap * torch.tanh(z / softcap)) / temperature
    log_p = z.log_softmax(-1)
    chosen = log_p.gather(-1, target[:, None])[:, 0]
    return (
        chosen, -(log_p.exp() * log_p).sum(-1), (2 * log_p).logsumexp(-1), z.mean(-1), z.argmax(-1) == target,
    )


@pytest.mark.parametrize("softcap", [None, 3.0])
@pytest.mark.parametrize("with_bias", [False, True])
def test_scores(softcap, with_bias):
    torch.manual_seed(0)
    hidden, weight, bias = torch.randn(40, 8), torch.randn(50, 8), torch.randn(50) if with_bias else None
    leaves = [t.requires_grad_() for t in (hidden, weight, bias) if t is not None]
    target = (hidden @ weight.T).argmax(-1)  # half of the targets are the likeliest tokens
    target[::2] = torch.randint(0, 50, (20,))
    how = dict(temperature=0.7, softcap=softcap, logit_scale=1.5)
    found, expected = score_tokens(hidden, weight, target, bias, outputs=OUTPUTS, **how), formula(
        hidden.double(), weight.double(), target, None if bias is None else bias.double(), **how
    )
    assert 5 < found.is_top1.sum() < 35
    assert torch.equal(found.is_top1, expected[-1])
    for got, want in zip(found[:-1], expected[:-1]):
        assert got.dtype == torch.float32 and torch.allclose(got.double(), want, atol=2e-5, rtol=2e-5)
    assert not found.log_sum_sq_probs.requires_grad and not found.mean_logits.requires_grad
    gradients = [
        torch.autograd.grad(log_prob.sin().sum() + entropy.cos().sum(), leaves) for log_prob, entropy in (found[:2], expected[:2])
    ]
    for got, want in zip(*gradients):
        assert (got - want).norm() < 1e-5 * want.norm()
    assert score_tokens(hidden, weight, target, bias, outputs=("log_probs",), **how)[1:] == (None,) * 4


def test_mean_logits_under_autocast():
    """The mean over the vocabulary is small beside a logit, and is not rounded to 16 bits."""
    torch.manual_seed(0)
    hidden, weight, target = torch.randn(40, 8), torch.randn(50, 8), torch.zeros(40, dtype=torch.int64)
    how = dict(temperature=0.7, softcap=None, logit_scale=1.0)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = score_tokens(hidden, weight, target, None, outputs=("mean_logits",), **how)
    wanted = formula(hidden, weight, target, None, **how)[3]
    assert (found.mean_logits - wanted).norm() < 1e-5 * wanted.norm()


def test_no_token_scores():
    hidden, weight = torch.randn(0, 8, requires_grad=True), torch.randn(50, 8, requires_grad=True)
    found = score_tokens(
        hidden, weight, torch.zeros(0, dtype=torch.int64), None, temperature=1.0, softcap=None, logit_scale=1.0, outputs=OUTPUTS
    )
    found.log_probs.sum().backward()  # a batch without tokens to learn from has no effect, and no error
    assert found.is_top1.shape == (0,) and not weight.grad.any()


@pytest.fixture
def trl(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.chdir(tmp_path)
    found = pytest.importorskip("trl")
    tiny_llama().save_pretrained("model")
    tokenizer().save_pretrained("model")  # reference models are loaded from it
    yield found
    recipe.unpatch()


def options(**more):
    return dict(
        output_dir="out", max_steps=STEPS, per_device_train_batch_size=4, optim="sgd", logging_steps=1, report_to=[],
        save_strategy="no", use_cpu=True, seed=3, disable_tqdm=True, gradient_checkpointing=False,
        **{"learning_rate": 1.0, "bf16": False, **more},
    )


def model():
    import transformers

    return transformers.LlamaForCausalLM.from_pretrained("model")


def dataset(rows):
    import datasets

    return datasets.Dataset.from_list(rows)


def completions():
    return dataset([{"prompt": text(5, k), "completion": " " + text(7 + k % 3, 100 + k)} for k in range(16)])


def sft(trl, **more):
    return trl.SFTTrainer(
        model(), args=trl.SFTConfig(**options(**more)), train_dataset=completions(), processing_class=tokenizer()
    )


def dpo(trl, **more):
    rows = [
        {"prompt": text(5, k), "chosen": " " + text(6, 100 + k), "rejected": " " + text(8, 200 + k)} for k in range(16)
    ]
    return trl.DPOTrainer(
        model(), args=trl.DPOConfig(**options(**more)), train_dataset=dataset(rows), processing_class=tokenizer()
    )


def kto(trl, **more):
    rows = [{"prompt": text(5, k), "completion": " " + text(6 + k % 3, 100 + k), "label": k % 2 == 0} for k in range(16)]
    return trl.KTOTrainer(
        model(), args=trl.KTOConfig(**options(**more)), train_dataset=dataset(rows), processing_class=tokenizer()
    )


def reward(completion_ids, **_):
    return [sum(vocab_id % 2 for vocab_id in vocab_ids) / len(vocab_ids) for vocab_ids in completion_ids]


def rloo(trl, **more):
    return trl.RLOOTrainer(
        model(), reward, trl.RLOOConfig(**options(num_generations=4, max_completion_length=8, beta=0.05, **more)),
        dataset([{"prompt": text(5, k)} for k in range(16)]), processing_class=tokenizer(),
    )


def grpo(trl, **more):
    return trl.GRPOTrainer(
        model(), reward, trl.GRPOConfig(**options(num_generations=4, max_completion_length=8, beta=0.04, **more)),
        dataset([{"prompt": text(5, k)} for k in range(16)]), processing_class=tokenizer(),
    )


def train(trainer):
    """Returns (logged values of each step, parameters)."""
    trainer.train()
    return [log for log in trainer.state.log_history if "loss" in log], parameters(trainer.model)


CASES = {
    "sft": (sft, {}),
    "sft-autocast": (sft, dict(bf16=True)),
    "sft-dft": (sft, dict(loss_type="dft", learning_rate=300.0)),
    "dpo": (dpo, {}),
    "dpo-wpo": (dpo, dict(use_weighting=True)),
    "kto": (kto, {}),
    "rloo": (rloo, {}),
    "grpo": (grpo, {}),
    "grpo-entropy": (grpo, dict(entropy_coef=0.1, temperature=0.9)),
}


@pytest.mark.parametrize("name", CASES)
def test_trains_as_before_and_by_the_library(trl, name):
    make, more = CASES[name]
    close = 1e-2 if "bf16" in more else 1e-4  # TRL rounds tiles of logits to bf16
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        expected, after = train(make(trl, **more))
        trainer = make(trl, **more)
        before = parameters(trainer.model)
        scores = recipe.patch()
        logs, found = train(trainer)
    assert scores.calls >= STEPS  # TRL's own tiles do not run
    assert len(logs) == STEPS and furthest(before, after) > 0.01
    for log, want in zip(logs, expected):
        read = {"loss", "entropy", "mean_token_accuracy", "logits/chosen", "rewards/margins", "kl"} & want.keys()
        assert len(read) >= 3 and read <= log.keys()
        for key in read:
            assert log[key] == pytest.approx(want[key], rel=close, abs=close / 10), key
    assert furthest(found, after) < 10 * close * furthest(before, after)


def test_losses_of_logits_beside_the_patch(trl):
    """Label smoothing calls the model for its logits, its metrics the fused head."""
    from logitless.torch import lazy_head

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        expected, after = train(sft(trl, label_smoothing_factor=0.1))
        trainer = sft(trl, label_smoothing_factor=0.1)
        before = parameters(trainer.model)
        lazy_head(trainer.model)
        scores = recipe.patch()
        with Made() as made:
            logs, found = train(trainer)
    assert made.count == 0 and made.calls == scores.calls == STEPS
    assert [log["loss"] for log in logs] == pytest.approx([log["loss"] for log in expected], rel=1e-4)
    assert furthest(found, after) < 1e-3 * furthest(before, after)


def test_page(trl, capsys):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = snippet("trl.md", model=model(), options=options(), dataset=completions(), tokenizer=tokenizer())
    assert found["scores"].calls == STEPS and "3 calls of the head by logitless" in capsys.readouterr().out


def test_memory(trl):
    """A patched step makes no tensor of the size of TRL's tiles."""
    from torch.utils._python_dispatch import TorchDispatchMode

    largest = [0]

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            out = func(*args, **(kwargs or {}))
            for t in out if isinstance(out, (tuple, list)) else [out]:
                if isinstance(t, torch.Tensor):
                    largest[0] = max(largest[0], t.numel() * t.element_size())
            return out

    tiny, ids = tiny_llama(), torch.randint(3, VOCAB, (4, 64))
    trl.trainer.utils.add_fused_lm_head(tiny)

    def step():
        largest[0] = 0
        with Watch():
            tiny(input_ids=ids, labels=ids, fused_lm_head=True).loss.backward()
        return largest[0]

    assert step() > 256 * VOCAB * 4  # a tile
    recipe.patch(memory_budget="300KiB")
    assert step() <= 300 << 10  # the workspace; the head and its gradient are 250 KiB


def test_errors(trl, monkeypatch):
    with pytest.raises(ValueError, match="memory_budget"):
        recipe.patch(memory_budget=0)
    scores = recipe.patch()
    assert recipe.patch().replaced is scores.replaced  # the second patch does not wrap the first
    recipe.unpatch()
    assert trl.trainer.utils._ChunkedLogProbFunction is scores.replaced
    sharded = torch.nn.Parameter(torch.zeros(4, 8))
    sharded.ds_status = "NOT_AVAILABLE"
    with pytest.raises(NotImplementedError, match="ZeRO-3"):
        scores.apply(torch.zeros(2, 8), sharded, None, torch.zeros(2, dtype=torch.int64), 1.0, 32768)
    monkeypatch.setattr(trl.trainer.utils, "_ChunkedLogProbFunction", torch.autograd.Function)
    with pytest.raises(NotImplementedError, match="TRL 1.16"):
        recipe.patch()
    monkeypatch.delattr(trl.trainer.utils, "_ChunkedLogProbFunction")
    with pytest.raises(NotImplementedError, match="which is not there"):
        recipe.patch()
