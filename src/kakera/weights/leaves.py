"""Leaves: the stored tensors of one module (`weight`, `bias`, `trellis`, ...), read with their shape checked."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path

import torch
from torch import Tensor

from kakera.arch.parts import leaf_cut
from kakera.arch.tensors import BLOCK, Cut
from kakera.errors import CheckpointError
from kakera.weights.files import StoredTensor


class Leaves:
    """The tensors of one module. The leaves of one linear can sit in different files."""

    def __init__(self, module: str):
        self.module = module
        self._stored: dict[str, StoredTensor] = {}

    def add(self, leaf: str, stored: StoredTensor) -> None:
        if leaf in self._stored:
            raise CheckpointError(f"{stored} is stored twice; the other one is {self._stored[leaf]}")
        self._stored[leaf] = stored

    def __contains__(self, leaf: str) -> bool:
        return leaf in self._stored

    def __getitem__(self, leaf: str) -> StoredTensor:
        if leaf not in self._stored:
            raise CheckpointError(f"tensor {self.module}.{leaf} is missing; the module is in {self.where()}")
        return self._stored[leaf]

    def names(self) -> list[str]:
        return sorted(self._stored)

    def bytes(self) -> int:
        return sum(stored.bytes for stored in self._stored.values())

    def where(self) -> str:
        """The files that hold the module, for error messages."""
        paths: set[Path] = {stored.path for stored in self._stored.values()}
        return ", ".join(str(path) for path in sorted(paths))

    def read(
        self,
        leaf: str,
        shape: tuple[int, ...],
        dtype: torch.dtype | None = None,
        device: str | torch.device = "cpu",
        *,
        stored_as: Collection[torch.dtype] | None = None,
        cut: Cut | None = None,
    ) -> Tensor:
        """The tensor, converted to `dtype`; `cut`: of the module's weight, of which this is to be the part. Raises
        CheckpointError if the shape of the whole or the stored dtype is another one, or if it can not be cut there."""
        stored = self[leaf]
        if stored.shape != shape:
            raise CheckpointError(f"{stored} has shape {list(stored.shape)}, the model needs {list(shape)}")
        if stored_as is not None and stored.torch_dtype not in stored_as:
            raise CheckpointError(f"{stored} is stored as {stored.dtype}, expected {_words(stored_as)}")
        try:
            return stored.read(dtype, device, leaf_cut(cut, leaf))
        except ValueError as error:
            raise CheckpointError(
                f"{stored} is coded in runs of {BLOCK} channels and can not be cut between cards: {error}; run this "
                "model on fewer cards"
            ) from None

    def refuse_unknown(self, known: Collection[str], prefix: str = "") -> None:
        """Raise on a leaf that this version does not understand: guessing would give wrong weights silently."""
        for leaf in self.names():
            if leaf.startswith(prefix) and leaf not in known:
                raise CheckpointError(f"{self._stored[leaf]}: the leaf {leaf!r} is not understood; refusing to guess")


def _words(dtypes: Collection[torch.dtype]) -> str:
    return " or ".join(sorted(str(dtype).removeprefix("torch.") for dtype in dtypes))
