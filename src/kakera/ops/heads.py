"""Queries, keys and values of a layer as its projection gave them, and what comes before and behind attention."""

from __future__ import annotations

from dataclasses import dataclass, replace

from torch import Tensor

from kakera.ops.activation import sigmoid
from kakera.ops.norm import rms_norm
from kakera.ops.rotary import Rotary, rotate


@dataclass(frozen=True)
class ProjectedHeads:
    """q_TQD, k_TKD, v_TKD, and gate_TI or None: views of one projection, dims contiguous.

    q_scale_D, k_scale_D: float32 scales of the QK-norm, and its eps; rotary: angles of every token.
    """

    q_TQD: Tensor
    k_TKD: Tensor
    v_TKD: Tensor
    gate_TI: Tensor | None
    q_scale_D: Tensor
    k_scale_D: Tensor
    eps: float
    rotary: Rotary

    def turned(self) -> tuple[Tensor, Tensor, Tensor]:
        """q and k behind QK-norm and RoPE, and v: contiguous, in the projection's dtype."""
        q_TQD = rotate(rms_norm(self.q_TQD, self.q_scale_D, self.eps), self.rotary)
        k_TKD = rotate(rms_norm(self.k_TKD, self.k_scale_D, self.eps), self.rotary)
        return q_TQD, k_TKD, self.v_TKD.contiguous()

    def part(self, rows: slice) -> ProjectedHeads:
        """Some tokens."""
        gate_TI = None if self.gate_TI is None else self.gate_TI[rows]
        rotary = Rotary(self.rotary.cos[rows], self.rotary.sin[rows])
        return replace(
            self, q_TQD=self.q_TQD[rows], k_TKD=self.k_TKD[rows], v_TKD=self.v_TKD[rows], gate_TI=gate_TI, rotary=rotary
        )

    def gated(self, o_TQD: Tensor) -> Tensor:
        """sigmoid(gate) o, [T, I] in the projection's dtype.

        A sigmoid whatever `output_gate_type` of a config says: that key names the activation of the norm inside Gated
        DeltaNet.
        """
        o_TI = o_TQD.flatten(1)
        return o_TI if self.gate_TI is None else (sigmoid(self.gate_TI) * o_TI).to(self.q_TQD.dtype)
