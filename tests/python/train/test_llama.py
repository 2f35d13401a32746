"""`logitless train` (path of the command in LOGITLESS_CLI) on the files of transformers' Llama and Qwen: the same losses,
and files that transformers reads back."""

import json
import os
import struct
import subprocess

import pytest
import torch
import transformers

CLI = os.environ.get("LOGITLESS_CLI", "")
VOCAB, LENGTH, WINDOWS = 96, 24, 3
SIZES = {"vocab_size": VOCAB, "hidden_size": 32, "intermediate_size": 56, "num_hidden_layers": 2,
         "num_attention_heads": 4, "max_position_embeddings": 64, "bos_token_id": 1, "eos_token_id": 2}
LLAMA3 = {"rope_type": "llama3", "rope_theta": 500.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
          "original_max_position_embeddings": 32}
MODELS = {
    "llama": ("Llama", {}),
    "llama-groups-tied": ("Llama", {"num_key_value_heads": 2, "tie_word_embeddings": True}),
    "llama-3": ("Llama", {"num_key_value_heads": 1, "head_dim": 12, "rope_parameters": LLAMA3, "rms_norm_eps": 1e-5}),
    "llama-linear-biases": ("Llama", {"attention_bias": True, "rope_parameters": {
        "rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0}}),
    "qwen2": ("Qwen2", {"num_key_value_heads": 2, "tie_word_embeddings": True}),
    "qwen3": ("Qwen3", {"num_key_value_heads": 2, "head_dim": 16}),
}


def make(name):
    """Makes a model in which every weight matters: norms and biases are neither ones nor zeros."""
    family, options = MODELS[name]
    config = getattr(transformers, family + "Config")(**{**SIZES, **options})
    torch.manual_seed(7)
    model = getattr(transformers, family + "ForCausalLM")(config).float().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn_like(parameter) * 0.2 + (parameter.dim() == 1) * 0.6)
    return model


def read(folder):
    return transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


def tokens():
    return torch.randint(0, VOCAB, (WINDOWS * LENGTH + 1,), generator=torch.Generator().manual_seed(3))


@pytest.fixture(params=["u16"])
def data(tmp_path, request):
    path, words = tmp_path / "data.bin", tokens().tolist()
    magic, version, kind = (20240520, 1, "H") if request.param == "u16" else (20240801, 7, "I")
    path.write_bytes(struct.pack("<3i", magic, version, len(words)).ljust(1024, b"\0") + struct.pack(f"<{len(words)}{kind}", *words))
    return path


def run(data, *arguments):
    return subprocess.run(
        [CLI, "train", "--data", data, "--val", data, "--batch", str(WINDOWS), "--length", str(LENGTH), "--clip", "0",
         "--sample", "0", "--json", *map(str, arguments)], capture_output=True, text=True, timeout=120, check=False)


def train(data, *arguments):
    done = run(data, *arguments)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def refused(data, *arguments):
    done = run(data, *arguments)
    assert done.returncode == 2, done.stderr
    return done.stderr.strip().splitlines()[-1]


def loss(model):
    words = tokens()
    logits = model(words[:-1].view(WINDOWS, LENGTH)).logits
    return torch.nn.functional.cross_entropy(logits.flatten(0, 1).float(), words[1:])


def losses(model, rates):
    """Returns the losses of steps with all the data in each, so that the order of its windows does not matter."""
    parameters = list(model.parameters())
    optimizer = torch.optim.AdamW(
        [{"params": [p for p in parameters if p.dim() == 2], "weight_decay": 0.1},
         {"params": [p for p in parameters if p.dim() != 2], "weight_decay": 0.0}], betas=(0.9, 0.95), eps=1e-8)
    result = []
    for rate in rates:
        for group in optimizer.param_groups:
            group["lr"] = rate
        optimizer.zero_grad()
        now = loss(model)
        now.backward()
        optimizer.step()
        result.append(now.item())
    return result


@pytest.fixture
def out(tmp_path):
    path = tmp_path / "out"
    path.mkdir()
    return path


@pytest.mark.parametrize("name", MODELS)
def test_losses_of_steps(name, data, out, tmp_path):
    model = make(name)
    model.save_pretrained(tmp_path / "model", max_shard_size="20KB")
    assert len(list((tmp_path / "model").glob("model-0*.safetensors"))) > 1
    got = train(data, "--init", tmp_path / "model", "--steps", 4, "--lr", 0.02, "--export", out)
    assert got["model"]["parameters"] == sum(p.numel() for p in model.parameters())
    expected = losses(model, [step["lr"] for step in got["steps"]])
    assert [step["loss"] for step in got["steps"]] == pytest.approx(expected, rel=1e-5)
    assert expected[-1] < 0.9 * expected[0]
    # The weights after the last step, read by transformers.
    assert got["validations"][-1]["loss"] == pytest.approx(loss(model).item(), rel=1e-5)
    assert loss(read(out)).item() == pytest.approx(got["validations"][-1]["loss"], rel=1e-5)


def test_gpt2_is_read_by_transformers(data, out):
    got = train(data, "--vocab", VOCAB, "--dim", 32, "--layers", 2, "--heads", 4, "--context", 64, "--steps", 4, "--lr", 0.02,
                "--export", out)
    assert got["validations"][-1]["loss"] < 0.9 * got["steps"][0]["loss"]
    assert loss(read(out)).item() == pytest.approx(got["validations"][-1]["loss"], rel=1e-5)


@pytest.mark.parametrize("data", ["u32"], indirect=True)
@pytest.mark.parametrize("name, dtype", [*((name, "bf16") for name in MODELS), ("llama-groups-tied", "f32"), ("qwen3", "f32")])
def test_weights_go_through_unchanged(name, dtype, data, out, tmp_path):
    """Files are read, written in shards, and read by transformers: the same model to the bit, and the same
    configuration."""
    model = make(name).to(torch.bfloat16 if dtype == "bf16" else torch.float32)
    model.save_pretrained(tmp_path / "model")
    before = train(data, "--init", tmp_path / "model", "--steps", 1, "--lr", 0, "--export", out,
                   "--shard-size", 20000, "--export-dtype", dtype)
    assert not (out / "model.safetensors").exists()
    assert len(list(out.glob("model-0*.safetensors"))) > 1
    again = transformers.AutoModelForCausalLM.from_pretrained(out, dtype="auto")
    assert again.dtype == model.dtype and type(again) is type(model)
    expected, found = model.state_dict(), again.state_dict()
    assert expected.keys() == found.keys()
    for key, value in expected.items():
        assert torch.equal(found[key], value), key
    kept = ["vocab_size", "num_key_value_heads", "rms_norm_eps", "rope_parameters", "tie_word_embeddings",
            "max_position_embeddings", "initializer_range", "bos_token_id", "eos_token_id"]
    assert {key: getattr(again.config, key) for key in kept} == {key: getattr(model.config, key) for key in kept}
    # The command reads the files that it wrote, too.
    assert train(data, "--init", out, "--steps", 1)["steps"][0]["loss"] == before["steps"][0]["loss"]


@pytest.mark.parametrize("name", ["llama-3", "qwen3"])
def test_bf16_activations(name, data, tmp_path):
    model = make(name)
    model.save_pretrained(tmp_path / "model")
    got = train(data, "--init", tmp_path / "model", "--steps", 1, "--lr", 0, "--dtype", "bf16")
    assert got["steps"][0]["loss"] == pytest.approx(loss(model).item(), rel=0.02)
    assert got["model"]["dtype"] == "bf16"


@pytest.mark.parametrize("name", ["llama-groups-tied", "qwen3"])
def test_resumes_to_the_same_bits(name, data, out, tmp_path):
    make(name).save_pretrained(tmp_path / "model")
    options = ["--init", tmp_path / "model", "--lr", 0.02, "--min-lr", 0.02, "--warmup", 0, "--seed", 5]
    whole = train(data, *options, "--steps", 4, "--save", out / "whole.safetensors")
    train(data, *options, "--steps", 2, "--save", out / "part.safetensors")
    # The model's folder is no longer needed, and may belong to another model now.
    (tmp_path / "model" / "config.json").unlink()
    for threads in (1, 2):
        rest = train(data, "--resume", out / "part.safetensors", "--steps", 4, "--threads", threads,
                     "--save", out / "rest.safetensors")
        assert rest["steps"] == whole["steps"][2:]
        assert (out / "rest.safetensors").read_bytes() == (out / "whole.safetensors").read_bytes()


def test_memory_budget(data):
    options = ["--model", "llama-tiny", "--steps", 2, "--threads", 1]
    free = train(data, *options, "--no-chunk")
    arena = free["memory"]["arena_bytes"]
    tight = train(data, *options, "--budget", arena // 2)
    assert tight["memory"]["arena_bytes"] <= arena // 2
    assert [s["loss"] for s in tight["steps"]] == pytest.approx([s["loss"] for s in free["steps"]], rel=1e-5)
    assert free["memory"]["table_bytes"] == 2 * LENGTH * 16 * 4
    assert "--budget: a step takes" in refused(data, *options, "--budget", 1000)


def edited(folder, **fields):
    path = folder / "config.json"
    config = json.loads(path.read_text())
    config.update(fields)
    path.write_text(json.dumps(config))


def test_from_scratch(data, out, tmp_path):
    """--model takes the sizes alone, those of a preset or of a config.json."""
    transformers.Qwen3Config(**SIZES, head_dim=16, num_key_value_heads=2).save_pretrained(tmp_path)
    for path in (tmp_path, tmp_path / "config.json"):
        got = train(data, "--model", path, "--steps", 8, "--lr", 0.02, "--export", out)
        assert got["model"]["type"] == "qwen3" and got["steps"][-1]["loss"] < got["steps"][0]["loss"]
    assert loss(read(out)).item() == pytest.approx(got["validations"][-1]["loss"], rel=1e-5)
    got = train(data, "--model", "llama-tiny", "--steps", 1)
    assert got["model"] == {"type": "llama", "vocab": 8192, "context": 2048, "dim": 128, "heads": 4, "layers": 4,
                            "untied": False, "dtype": "f32", "parameters": got["model"]["parameters"]}


def test_refusals(data, out, tmp_path):
    folder = tmp_path / "model"
    model = make("llama")
    model.save_pretrained(folder)
    name = folder / "config.json"
    assert f"--model: '{name}': hidden_act: expected \"silu\", found \"gelu\"" in (
        edited(folder, hidden_act="gelu") or refused(data, "--model", folder))
    assert f"--init: '{name}': hidden_act: expected" in refused(data, "--init", folder)
    edited(folder, hidden_act="silu", model_type="mistral")
    assert "model_type: expected \"llama\", \"qwen2\" or \"qwen3\", found \"mistral\"" in refused(data, "--init", folder)
    edited(folder, model_type="llama")
    assert f"--dim: '{folder / 'model.safetensors'}' has its own sizes" in refused(data, "--init", folder, "--dim", 32)
    edited(folder, max_position_embeddings=16)
    assert f"--length: expected at most --context 16, got {LENGTH}" in refused(data, "--init", folder)
    edited(folder, max_position_embeddings=64, intermediate_size=57)
    assert ("tensor 'model.layers.0.mlp.gate_proj.weight': expected f32[57, 32], found f32[56, 32]"
            in refused(data, "--init", folder))
    edited(folder, intermediate_size=56, tie_word_embeddings=True)
    assert "the model's head is not tied" in refused(data, "--init", folder)
    edited(folder, tie_word_embeddings=False, num_hidden_layers=1)
    assert "tensor 'model.layers.1." in refused(data, "--init", folder)
    edited(folder, num_hidden_layers=3)
    assert "expected f32[32], found none" in refused(data, "--init", folder)
    edited(folder, num_hidden_layers=2, vocab_size=128256)
    # A corpus for a tokenizer.json that holds no tokenizer.
    (folder / "tokenizer.json").write_text("{}")
    text = tmp_path / "text.txt"
    text.write_text("some words " * 4000)
    done = subprocess.run([CLI, "train", "--init", folder, "--text", text, "--length", "16"], capture_output=True, text=True, check=False)
    assert done.returncode == 2 and f"--text: the tokenizer of '{folder / 'model.safetensors'}': model: expected an object" in done.stderr, done.stderr
    # A folder of another model is not overwritten.
    (out / "config.json").write_text('{"model_type": "gpt2"}')
    assert "expected that of a llama, which may be replaced" in refused(data, "--model", "llama-tiny", "--export", out)
    assert "--shard-size: is of --export" in refused(data, "--model", "llama-tiny", "--shard-size", "1MB")
