"""A stack of experts as one job: coded expert by expert, stored as the format stores stacks.

EXL3 has every expert's linears by themselves, Escha one tensor of each leaf for all experts.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from kakera.arch.tensors import Tensor as Declared
from kakera.quantize import dialect
from kakera.quantize.linear import encode_linear
from kakera.quantize.recipe import Format
from kakera.quantize.transform import Encoder
from kakera.weights import stack
from kakera.weights.checkpoint import Checkpoint


def sources(checkpoint: Checkpoint, declared: Declared) -> list[tuple[str, str]]:
    """(module, leaf) of all tensors that hold the stack; none if it is not stored."""
    module, _, leaf = declared.name.rpartition(".")
    if checkpoint.has(declared.name):
        bare = checkpoint.has(module) and leaf in checkpoint.leaves(module)
        return [(module, leaf) if bare else (declared.name, "weight")]
    linears = stack.all_linears(declared)
    return [(linear, "weight") for linear in linears] if all(map(checkpoint.has, linears)) else []


def stored_owner(stored: str, name: str) -> str:
    """Name in the file of the module of all experts, by that of one of its tensors and the stack's canonical name."""
    owner = name.split(".")[-2]
    return f"{stored.rpartition(f'.{owner}.')[0]}.{owner}"


def encode_stack(
    checkpoint: Checkpoint,
    declared: Declared,
    format: Format,
    bits: int,
    seed_of: Callable[[str], int],
    device: torch.device,
    encode: Encoder,
) -> tuple[dict[str, Tensor], float]:
    """Tensors by their names behind that of the module of all experts, and the mean relative error. One expert's
    weights are there at a time. `seed_of`: of a linear's canonical name."""
    owner = declared.name.rpartition(".")[0]
    found: dict[str, Tensor] = {}
    held: dict[str, list[Tensor]] = {}
    errors = []
    for number in range(declared.shape[0]):
        weight_OI = checkpoint.expert(declared.name, number, torch.float32, device)
        split = format == "exl3"
        names = stack.linears(declared, number) if split else [f"{declared.name}.{number}"]
        for name, part_OI in zip(names, weight_OI.chunk(len(names)), strict=True):
            coded, error = encode_linear(part_OI, bits, seed_of(name), encode)
            errors.append(error)
            for leaf, tensor in dialect.leaves(format, coded).items():
                if split:
                    found[f"{name.removeprefix(owner)[1:]}.{leaf}"] = tensor.cpu()
                else:
                    held.setdefault(leaf, []).append(tensor.cpu())
    if held:
        held["escha_config"] = [dialect.stack_descriptor(bits, declared.shape)]
        of_stack = declared.name.removeprefix(owner)[1:]
        found = {f"{of_stack}.{leaf}": _joined(tensors) for leaf, tensors in held.items()}
    return found, sum(errors) / len(errors)


def _joined(tensors: list[Tensor]) -> Tensor:
    return tensors[0] if len(tensors) == 1 else torch.stack(tensors)
