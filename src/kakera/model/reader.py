"""LinearReader: linears of a checkpoint in the form in which a device computes them fastest.

A CPU decodes them and fuses those that read the same input into one matrix. A GPU keeps trellis codes and int8 rows as
they are stored (`kakera.model.coded`); what is stored plainly is fused as on a CPU.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby

import torch
from torch import Tensor

from kakera.arch.blocks import AttentionSpec
from kakera.arch.spec import EMBEDDING, LM_HEAD
from kakera.arch.tensors import Tensor as Declared
from kakera.model.coded import CodedProjection, Int8Embedding, Int8Projection
from kakera.model.linear import Embedding, EmbeddingMap, Linear, LinearMap, fused
from kakera.ops.codec.coded import CodedLinear
from kakera.ops.codec.hadamard import BLOCK
from kakera.ops.host_rows import HostRows
from kakera.ops.int8 import COLUMN_STEP, ROW_STEP
from kakera.ops.trellis import TrellisLinear, TrellisScratch
from kakera.plan.sizes import decoded_bytes
from kakera.target.as_torch import name_of, target_of
from kakera.target.kernels import keeps_codes
from kakera.weights.checkpoint import Checkpoint

TRELLIS = ("escha", "exl3")
Tensors = Mapping[str, Declared]  # by canonical name


@dataclass(frozen=True)
class LinearReader:
    checkpoint: Checkpoint  # of a rank: all that is read are its parts
    tensors: Tensors  # of the whole model
    dtype: torch.dtype
    device: torch.device
    kernels: bool  # False: decode everything
    scratch: TrellisScratch | None  # of the trellis kernels

    @staticmethod
    def of(checkpoint: Checkpoint, tensors: Tensors, dtype: torch.dtype, device: torch.device) -> LinearReader:
        kernels = keeps_codes(target_of(device), name_of(dtype))
        modules = [t for t in tensors.values() if t.role == "linear" and checkpoint.has(t.name)] if kernels else []
        shapes = [checkpoint.shape(t.name) for t in modules if checkpoint.kind(t.name) in TRELLIS]
        coded = [(outputs, inputs) for outputs, inputs in shapes]
        scratch = TrellisScratch.allocate(coded, decoded_bytes(checkpoint.own), device) if coded else None
        return LinearReader(checkpoint, tensors, dtype, device, kernels, scratch)

    def projection(self, names: Sequence[str], tail: Sequence[str] = ()) -> LinearMap:
        """Linears that read the same input, as one; `tail`: small ones behind them, that no format codes."""
        if (parts := self.coded(names)) is not None:
            return self._coded(parts, self._biases(names), tail)
        return fused([self.linear(name) for name in (*names, *tail)]).packed()

    def attention_input(self, name: str, block: AttentionSpec) -> LinearMap:
        """q | k | v, and behind them the output gate if the model has one, each head by head.

        With a gate q_proj holds, per head, head_dim rows of query, then head_dim rows of gate.
        """
        names = [f"{name}.{part}_proj" for part in "qkv"]
        if not block.gated:
            return self.projection(names)
        rows = torch.arange(2 * block.heads * block.head_dim, device=self.device).view(block.heads, 2, -1)
        parts = self.coded(names)
        biases = self._biases(names)
        if parts is not None and block.head_dim % BLOCK == 0 and all(bias is None for bias in biases):
            query, gate = (parts[0].blocks(rows[:, i].flatten()[::BLOCK] // BLOCK) for i in range(2))
            return self._coded([query, *parts[1:], gate], [None], ())
        q, k, v = (self.linear(part) for part in names)
        return fused([q.rows(rows[:, 0].flatten()), k, v, q.rows(rows[:, 1].flatten())]).packed()

    def embedding_and_head(self, on_host: bool) -> tuple[EmbeddingMap, LinearMap]:
        """One table for both if the model is tied. `on_host`: of a GPU, rows are read from the host's memory; a table
        that is the head, too, is on the device in any case."""
        tied = self.tensors[LM_HEAD].alias != "" and not self.checkpoint.has(LM_HEAD)
        if on_host and not tied:
            return self._host_rows(), self._head()
        table = self._int8(EMBEDDING)
        if table is not None:
            embedding: EmbeddingMap = Int8Embedding(*table, self.dtype)
            return embedding, Int8Projection(*table) if tied else self._head()
        linear = self.linear(EMBEDDING)
        return Embedding(linear.weight_OI), linear if tied else self._head()

    def linear(self, name: str) -> Linear:
        """Decoded."""
        out_channels, in_channels = self.tensors[name].shape
        return Linear(
            self.checkpoint.linear(name, out_channels, in_channels, self.dtype, self.device), *self._biases([name])
        )

    def expert(self, name: str, number: int) -> LinearMap:
        """One linear of a stack, decoded."""
        return Linear(self.checkpoint.expert(name, number, self.dtype, self.device)).packed()

    def coded(self, names: Sequence[str]) -> list[CodedLinear] | None:
        """As they are stored, if kernels can compute them so."""
        if self.scratch is None or any(self.checkpoint.kind(name) not in TRELLIS for name in names):
            return None
        found = []
        for name in names:
            outputs, inputs = self.tensors[name].shape
            found.append(self.checkpoint.coded(name, outputs, inputs, self.device))
        return [part for part in found if part is not None]

    def _head(self) -> LinearMap:
        table = self._int8(LM_HEAD)
        return Int8Projection(*table) if table is not None else self.projection([LM_HEAD])

    def _host_rows(self) -> HostRows:
        """As they are stored if that is int8, whatever their number; else in the model's dtype."""
        rows, columns = self.tensors[EMBEDDING].shape
        stored = self.checkpoint.int8_rows(EMBEDDING, rows, columns)
        if stored is not None:
            return HostRows(*stored, self.dtype, self.device)
        return HostRows(self.checkpoint.linear(EMBEDDING, rows, columns, self.dtype), None, self.dtype, self.device)

    def _int8(self, name: str) -> tuple[Tensor, Tensor] | None:
        if not self.kernels or self._biases([name]) != [None]:
            return None
        own, (rows, columns) = self.checkpoint.shape(name), self.tensors[name].shape
        if own[0] % ROW_STEP or columns % COLUMN_STEP:  # decoded instead
            return None
        return self.checkpoint.int8_rows(name, rows, columns, self.device)

    def _coded(
        self, parts: Sequence[CodedLinear], biases: Sequence[Tensor | None], tail: Sequence[str]
    ) -> CodedProjection:
        assert self.scratch is not None
        plain = fused([self.linear(name) for name in tail]) if tail else None
        widths = [part.out_channels for part in parts]
        bias_O = None
        if any(bias is not None for bias in biases):
            zeros = [torch.zeros(width, dtype=self.dtype, device=self.device) for width in widths]
            bias_O = torch.cat([zero if bias is None else bias for bias, zero in zip(biases, zeros, strict=True)])
        alike = [TrellisLinear(tuple(group)) for _, group in groupby(parts, lambda part: part.codebook)]
        return CodedProjection(tuple(alike), self.scratch, plain, bias_O)

    def _biases(self, names: Sequence[str]) -> list[Tensor | None]:
        return [self.checkpoint.bias(name, self.tensors[name].shape[0], self.dtype, self.device) for name in names]
