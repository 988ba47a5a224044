"""Loader: the tensors of one checkpoint as their declaration says, for what builds blocks from them."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kakera.model.reader import LinearReader, Tensors
from kakera.weights.checkpoint import Checkpoint


@dataclass(frozen=True)
class Loader:
    """`linears`: as the device computes them fastest. Every method raises CheckpointError for what is damaged."""

    checkpoint: Checkpoint
    tensors: Tensors
    device: torch.device
    linears: LinearReader

    def norm(self, name: str) -> Tensor:
        """Float32 scale of the norm `name`, with the one added that a `delta` is stored without."""
        declared = self.tensors[f"{name}.weight"]
        return self.float32(declared.name) + (1.0 if declared.values == "delta" else 0.0)

    def float32(self, name: str) -> Tensor:
        return self.checkpoint.tensor(name, self.tensors[name].shape, torch.float32, self.device)
