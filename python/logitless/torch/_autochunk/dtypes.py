"""PyTorch's dtypes in tensor programs."""

import torch

from logitless._autochunk.dtypes import Dtypes

DTYPES = Dtypes(
    f32=torch.float32,
    bf16=torch.bfloat16,
    f16=torch.float16,
    f64=torch.float64,
    i32=torch.int32,
    i64=torch.int64,
    i8=torch.bool,
)
