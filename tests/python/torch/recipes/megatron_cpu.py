"""Megatron-Core without GPUs: importing this replaces what asks for CUDA, and Apex's extension that multiplies into
main_grad. Makes tiny GPTModels, and compares their steps."""

import contextlib
import sys
import types
import warnings

import torch

warnings.simplefilter("ignore")
VOCAB, BATCH, LENGTH, DIM = 96, 2, 8, 16


def multiply_into(total_input, grad_output, main_grad):
    main_grad.add_(grad_output.t().float() @ total_input.float())


def _without_cuda(function):
    def made(*args, device=None, **kwargs):
        return function(*args, device="cpu" if device == "cuda" else device, **kwargs)

    return made


sys.modules["fused_weight_gradient_mlp_cuda"] = types.SimpleNamespace(
    wgrad_gemm_accum_fp32=multiply_into, wgrad_gemm_accum_fp16=multiply_into
)
torch.cuda.current_device = lambda: "cpu"
torch.cuda.synchronize = torch.cuda.current_stream = lambda *device: None
torch.Tensor.cuda = lambda self, *args, **kwargs: self
torch.zeros = _without_cuda(torch.zeros)

from megatron.core import parallel_state, tensor_parallel  # noqa: E402
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig  # noqa: E402
from megatron.core.models.gpt import GPTModel  # noqa: E402
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec, get_gpt_mtp_block_spec  # noqa: E402
from megatron.core.transformer.torch_norm import WrappedTorchNorm  # noqa: E402
from megatron.core.transformer.transformer_config import TransformerConfig  # noqa: E402

# It refuses sequence parallelism, which needs norms whose gradients are summed over ranks; nothing is summed here.
WrappedTorchNorm.__new__ = lambda cls, config, hidden_size, eps=1e-5, **more: torch.nn.LayerNorm(hidden_size, eps)


def start(tensor=1, pipeline=1):
    """Starts gloo and Megatron's groups."""
    torch.distributed.init_process_group("gloo")
    parallel_state.initialize_model_parallel(tensor, pipeline)
    tensor_parallel.get_cuda_rng_tracker().fork = contextlib.nullcontext  # and for random states


def made(sequence_parallel=False, tied=False, mtp=None, dtype=torch.float32, **options):
    """Returns a GPTModel, or this process's stage of one. mtp: the layers of multi-token prediction."""
    torch.manual_seed(0)
    stages = parallel_state.get_pipeline_model_parallel_world_size()
    config = TransformerConfig(
        num_layers=stages, hidden_size=DIM, num_attention_heads=2, use_cpu_initialization=True, hidden_dropout=0.0,
        attention_dropout=0.0, tensor_model_parallel_size=parallel_state.get_tensor_model_parallel_world_size(),
        pipeline_model_parallel_size=stages, sequence_parallel=sequence_parallel, bias_dropout_fusion=False,
        mtp_num_layers=mtp, mtp_loss_scaling_factor=0.4, params_dtype=dtype, pipeline_dtype=dtype, bf16=dtype == torch.bfloat16,
        **options,
    )
    spec, last = get_gpt_layer_local_spec(), parallel_state.is_pipeline_last_stage()
    return GPTModel(
        config, spec, vocab_size=VOCAB, max_sequence_length=LENGTH, share_embeddings_and_output_weights=tied,
        position_embedding_type="rope", pre_process=parallel_state.is_pipeline_first_stage(), post_process=last,
        mtp_block_spec=get_gpt_mtp_block_spec(config, spec, use_transformer_engine=False) if mtp and last else None,
    ).to(dtype)


def inputs(seed=1):
    ids = torch.randint(0, VOCAB, (BATCH, LENGTH), generator=torch.Generator().manual_seed(seed))
    mask = torch.ones(1, 1, LENGTH, LENGTH).tril() < 0.5
    return ids, torch.arange(LENGTH).repeat(BATCH, 1), mask, None, ids.roll(-1, 1)


def in_ddp(model):
    """Returns the model in Megatron's DDP, with main gradients in float32."""
    return DistributedDataParallel(model.config, DistributedDataParallelConfig(grad_reduce_in_fp32=True), model)


def main_grads(model):
    """Returns copies of the main gradients of a model in DDP, and clears them."""
    found = {name: p.main_grad.clone() for name, p in model.module.named_parameters()}
    model.zero_grad_buffer()
    return found


def agree(found, expected, tolerance=2e-5):
    """Compares losses, and gradients by name in the 2-norm."""
    assert torch.allclose(found[0], expected[0], rtol=tolerance / 2, atol=tolerance / 2), (found[0], expected[0])
    assert found[1].keys() == expected[1].keys()
    for name, want in expected[1].items():
        assert (found[1][name] - want).norm() <= tolerance * want.norm() + 1e-7, name


@contextlib.contextmanager
def no_logits(layer):
    """Fails when a layer of the vocabulary multiplies."""
    kind = type(layer)
    forward_impl = kind._forward_impl

    def checked(self, *args, **kwargs):
        assert self.output_size != VOCAB, "logits were computed"
        return forward_impl(self, *args, **kwargs)

    kind._forward_impl = checked
    try:
        yield
    finally:
        kind._forward_impl = forward_impl
