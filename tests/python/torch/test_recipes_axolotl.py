"""docs/use/recipes/axolotl.md: the plugin, as axolotl loads and calls it."""

import pytest
import torch
from recipes.models import VOCAB, Made, tiny_llama

base = pytest.importorskip("axolotl.integrations.base", exc_type=ImportError)
from axolotl.utils.dict import DictDefault  # noqa: E402


def loaded():
    return base.load_plugin("logitless.torch.integrations.axolotl.LogitlessPlugin")


@pytest.mark.parametrize("adapter", [None, ["q_proj"], ["q_proj", "lm_head"]])
def test_plugin(adapter):
    def step(patched):
        model = tiny_llama()
        if adapter:
            peft = pytest.importorskip("peft")
            torch.manual_seed(1)
            model = peft.get_peft_model(
                model, peft.LoraConfig(r=4, target_modules=adapter, task_type="CAUSAL_LM", init_lora_weights=False)
            )
        if patched:
            loaded().post_model_load(DictDefault(base_model="tiny"), model)
        ids = torch.arange(3, 43).view(2, 20) % VOCAB
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        return loss.item(), [p.grad for p in model.parameters() if p.requires_grad]

    with Made() as made:
        found, gradients = step(True)
    assert made.count == 0 and made.calls > 0
    expected, wanted = step(False)
    assert found == pytest.approx(expected, rel=1e-6)
    assert len(gradients) == len(wanted) > 0
    for got, want in zip(gradients, wanted):
        assert (got - want).norm() <= 2e-5 * want.norm()


def test_refusals():
    for name in ("cut_cross_entropy", "liger_fused_linear_cross_entropy", "chunked_cross_entropy"):
        with pytest.raises(ValueError, match=f"{name}: expected false"):
            loaded().post_model_load(DictDefault({name: True}), tiny_llama())
    with pytest.raises(NotImplementedError, match="rl: expected none, got 'dpo'"):
        loaded().post_model_load(DictDefault(rl="dpo"), tiny_llama())
