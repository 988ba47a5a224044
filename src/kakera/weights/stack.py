"""Stacks of linears, one for every expert, read expert by expert.

[E, O, I] in one tensor, with or without `.weight` at the end of its name; Escha's leaves with an axis more in front; or
every expert's linears by themselves (`Tensor.pieces`), each as any linear is stored.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kakera.arch.tensors import Cut
from kakera.arch.tensors import Tensor as Declared
from kakera.errors import CheckpointError
from kakera.weights import escha, plain
from kakera.weights.leaves import Leaves


def linears(declared: Declared, number: int) -> list[str]:
    """Names of one expert's linears where they are stored one by one, in the order of their rows in the stack."""
    return [piece.replace("*", str(number)) for piece in declared.pieces]


def all_linears(declared: Declared) -> list[str]:
    return [name for number in range(declared.shape[0]) for name in linears(declared, number)]


def of_expert(cut: Cut | None) -> Cut | None:
    """Of one expert's weight [O, I], by that of the stack."""
    return None if cut is None else Cut(cut.axis - 1, cut.ranges)


def of_linear(cut: Cut | None, place: int, outputs: int) -> Cut | None:
    """Of the linear of `outputs` rows that stands at `place` among those of an expert, by the cut of all its rows."""
    if cut is None or cut.axis == 1:
        return cut
    begin, end = place * outputs, (place + 1) * outputs
    return Cut(0, tuple((max(a, begin) - begin, min(b, end) - begin) for a, b in cut.ranges if a < end and b > begin))


def read(
    leaves: Leaves,
    declared: Declared,
    number: int,
    dtype: torch.dtype,
    device: str | torch.device = "cpu",
    cut: Cut | None = None,
) -> Tensor:
    """Weight [O, I] of one expert, decoded, or a rank's part of it; `leaves`: of a stack in one piece. Raises
    CheckpointError for another number of experts, other shapes, or leaves that no stack has."""
    experts, outputs, inputs = declared.shape
    mark, known = (escha.MARK, escha.LEAVES) if escha.MARK in leaves else (plain.MARK, (plain.MARK,))
    leaves.refuse_unknown(known)
    found = Leaves(f"{leaves.module}.{number}")
    for leaf in leaves.names():
        stored = leaves[leaf]
        if leaf == "escha_config":
            continue
        if not stored.shape or stored.shape[0] != experts:
            raise CheckpointError(f"{stored} has shape {list(stored.shape)}, the model has {experts} experts")
        found.add(leaf, stored.piece(number))
    if mark == plain.MARK:
        return plain.read(found, outputs, inputs, dtype, device, cut)
    coded = escha.read_coded(found, outputs, inputs, device, cut)
    escha.check_config(leaves, int(coded.bits), outputs, inputs, experts)
    return coded.weight(dtype)
