"""Targets and dtypes in torch's words: the only file of this room that imports it."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import torch

from kakera.arch.layout import Dtype
from kakera.errors import UsageError
from kakera.target.kernels import is_half
from kakera.target.target import CPU, CUDA, Target

DTYPES: dict[Dtype, torch.dtype] = {
    "fp32": torch.float32,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "uint8": torch.uint8,
}
HALVES = tuple(dtype for name, dtype in DTYPES.items() if is_half(name))  # what kernels take
_NAMES = {dtype: name for name, dtype in DTYPES.items()}


def name_of(dtype: torch.dtype) -> Dtype | None:
    """None for dtypes that kakera stores nothing in."""
    return _NAMES.get(dtype)


def activation_of(dtype: torch.dtype) -> Dtype:
    """The name of a dtype of activations. Raises KeyError for what none has."""
    return _NAMES[dtype]


@cache
def target_of(device: torch.device) -> Target:
    """What `device` is, with the capability of a card."""
    if is_card(device):
        return replace(CUDA, capability=torch.cuda.get_device_capability(device))
    return CPU


def is_card(device: torch.device) -> bool:
    """Whether it is one by its name, be it there or not."""
    return device.type == CUDA.kind


def is_there(target: Target) -> bool:
    """Whether torch can compute on one."""
    return not target.has_cards or torch.cuda.is_available()


def device_called(name: str) -> torch.device:
    """Of `--device`: cpu, cuda, cuda:1; "auto" is the first card, or the CPU without one. Raises UsageError."""
    if name == "auto":
        return torch.device((CUDA if is_there(CUDA) else CPU).kind)
    found = {CPU.kind: CPU, CUDA.kind: CUDA}.get(name.partition(":")[0])  # type: ignore[call-overload]
    if found is None:
        raise UsageError(f"--device {name}: choose auto, {CPU.kind} or {CUDA.kind}")
    if not is_there(found):
        raise UsageError(f"--device {name}: torch sees no CUDA device; kakera doctor says why")
    return torch.device(name)
