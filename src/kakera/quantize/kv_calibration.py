"""Graded rotations from a model's own keys and values: principal axes, so that the codec's bits go where variance is.

Of 256 dims of a real key or value 64 hold most of the variance and 64 nearly none: two digits for the former and none
for the latter, instead of one for every dim, leave 0.4 of the error of values behind the output projection and 0.25 of
that of logits. Hadamard matrices inside the grades make their dims alike, as one scale for all of them supposes.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kakera.arch.spec import ModelSpec
from kakera.contract.grid import PAGE
from kakera.errors import UsageError
from kakera.kv.backend import Attention, AttentionPass
from kakera.kv.batch import Batch
from kakera.kv.rotation import Frame, Rotation, hadamard_matrix
from kakera.ops.heads import ProjectedHeads


class Moments:
    """Count, sum and sum of outer products of keys and values, float64: [L, 2 (K, V), kv_heads, D (, D)]."""

    def __init__(self, spec: ModelSpec):
        shape = (len(spec.full_layers), 2, spec.kv_heads, spec.head_dim)
        self.counts_L = torch.zeros(len(spec.full_layers), dtype=torch.int64)
        self.sum_L2KD = torch.zeros(shape, dtype=torch.float64)
        self.outer_L2KDD = torch.zeros(*shape, spec.head_dim, dtype=torch.float64)

    def add(self, layer: int, kv_T2KD: Tensor) -> None:
        kv_2KTD = kv_T2KD.permute(1, 2, 0, 3).float()
        self.counts_L[layer] += len(kv_T2KD)
        self.sum_L2KD[layer] += kv_2KTD.sum(2, dtype=torch.float64).cpu()
        self.outer_L2KDD[layer] += (kv_2KTD.mT @ kv_2KTD).double().cpu()

    def rotation(self) -> Rotation:
        """Raises UsageError if there are too few vectors to tell the axes apart."""
        dim = self.sum_L2KD.shape[-1]
        if (found := int(self.counts_L.min())) < 4 * dim:
            raise UsageError(f"{found} tokens are too few to calibrate {dim} dims; give a longer text")
        count = self.counts_L.view(-1, 1, 1, 1)
        centre_L2KD = self.sum_L2KD / count
        covariance_L2KDD = self.outer_L2KDD / count.unsqueeze(-1) - centre_L2KD.unsqueeze(-1) * centre_L2KD.unsqueeze(
            -2
        )
        rotation_L2KDD = (principal_axes(covariance_L2KDD) @ grades(dim).double()).float()
        k, v = (Frame(rotation_L2KDD[:, i].contiguous(), centre_L2KD[:, i].float().contiguous()) for i in range(2))
        return Rotation(k, v, graded=True)


class Recorder:
    """Passes everything on to a KV cache's attention and keeps the moments of what is stored."""

    def __init__(self, attention: Attention, spec: ModelSpec):
        self._attention = attention
        self.moments = Moments(spec)

    def plan(self, batch: Batch) -> AttentionPass:
        """The first page is left out: it stays in 16 bit, and its first tokens are like no others."""
        return _RecordedPass(self._attention.plan(batch), self.moments, batch.positions_T >= PAGE)


@dataclass(frozen=True)
class _RecordedPass:
    inner: AttentionPass
    moments: Moments
    late_T: Tensor

    def run(self, layer: int, heads: ProjectedHeads) -> Tensor:
        _, k_TKD, v_TKD = heads.turned()
        self.moments.add(layer, torch.stack((k_TKD[self.late_T], v_TKD[self.late_T]), 1))
        return self.inner.run(layer, heads)


def principal_axes(covariance: Tensor) -> Tensor:
    """Orthogonal [..., D, D], axes in columns in falling order of variance; each with its largest entry positive."""
    axes: Tensor = torch.linalg.eigh(covariance).eigenvectors.flip(-1)
    largest = axes.gather(-2, axes.abs().argmax(-2, keepdim=True))
    return axes * largest.sign()


def grades(dim: int) -> Tensor:
    """[D, D]: Hadamard matrices of the first quarter, the middle half and the last quarter of the dims."""
    matrix = torch.zeros(dim, dim)
    for start, end in ((0, dim // 4), (dim // 4, 3 * dim // 4), (3 * dim // 4, dim)):
        matrix[start:end, start:end] = hadamard_matrix(end - start)
    return matrix
