"""One of two gloo processes that train a model under FSDP2 with a recipe's loss; the head may be a unit of its own.
Start: ``torchrun fsdp_worker.py torchtitan|torchtune``. Rank 0 prints "ok" when the parameters are those of the plain
loss and no logits were made."""

import sys
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

sys.path.insert(0, str(Path(__file__).parents[1]))

from recipes.models import Made, furthest  # noqa: E402


class Model(nn.Module):
    """A model with the names that both libraries use for a head that the loss computes."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.body, self.lm_head = nn.Embedding(300, 16), nn.Linear(16, 16), nn.Linear(16, 300, bias=False)
        self.skip_output_layer = self._skip_lm_head = False

    @property
    def output(self):
        return self.lm_head

    def forward(self, ids):
        hidden = torch.relu(self.body(self.embed(ids)))
        return hidden if self.skip_output_layer or self._skip_lm_head else self.lm_head(hidden)


def plain(model):
    return lambda logits, labels: F.cross_entropy(logits.flatten(0, 1), labels.flatten())


def torchtitan(model):
    from logitless.torch.integrations.torchtitan import LazyLoss

    loss = LazyLoss.Config().build()
    loss.set_lm_head(model.lm_head)
    model._skip_lm_head = True
    return lambda hidden, labels: loss(hidden, labels, torch.tensor(float(labels.numel())))[0]


def torchtune(model):
    from logitless.torch.integrations.torchtune import LinearCrossEntropyLoss

    loss = LinearCrossEntropyLoss()
    loss.set_model_output(model)
    return loss


def train(recipe, own_unit, mesh):
    model = Model()
    for module in [model.lm_head] * own_unit + [model]:
        fully_shard(module, mesh=mesh)
    loss = recipe(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    ids, labels = torch.randint(0, 300, (2, 2, 16), generator=torch.Generator().manual_seed(dist.get_rank()))
    for _ in range(3):
        loss(model(ids), labels).backward()
        optimizer.step()
        optimizer.zero_grad()
    return {name: p.full_tensor().detach().clone() for name, p in model.named_parameters()}


def main(recipe):
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("fsdp",))
    for own_unit in (False, True):
        expected = train(plain, own_unit, mesh)
        with Made() as made:
            found = train(recipe, own_unit, mesh)
        assert made.count == 0 and (made.calls == 3) == (recipe is torchtitan), (made.count, made.calls)
        assert furthest(found, expected) < 1e-5, own_unit
    if dist.get_rank() == 0:
        print("ok")
    dist.destroy_process_group()


if __name__ == "__main__":
    main({"torchtitan": torchtitan, "torchtune": torchtune}[sys.argv[1]])
