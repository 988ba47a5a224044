"""Dtypes of activations, and their names for conditions that have to be known without torch."""

from __future__ import annotations

import torch

HALVES = (torch.float16, torch.bfloat16)  # what kernels compute with
HALF_NAMES = ("float16", "bfloat16")


def name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
