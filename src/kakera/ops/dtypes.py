"""Dtypes of activations, and their names for conditions that have to be known without torch."""

from __future__ import annotations

import torch

from kakera.arch.layout import Dtype

HALVES = (torch.float16, torch.bfloat16)  # what kernels compute with
HALF_NAMES = ("float16", "bfloat16")


def name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


TORCH_DTYPES: dict[Dtype, torch.dtype] = {  # of the parts of a record
    "fp32": torch.float32,
    "fp16": torch.float16,
    "bf16": torch.bfloat16,
    "uint8": torch.uint8,
}


def dtype_name(dtype: torch.dtype) -> Dtype:
    """As records name it."""
    return next(name for name, known in TORCH_DTYPES.items() if known == dtype)
