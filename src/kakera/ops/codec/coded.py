"""CodedLinear: a trellis-coded linear between two block Hadamard transforms, and what it means as numbers.

W_eff [I, O] = diag(in_scale) Hb Wq Hb diag(out_scale) / 128, with y = x W_eff; Hb is the block-diagonal unnormalised
128-point Hadamard matrix and Wq [I, O] the decoded trellis. Shared by the EXL3 and Escha formats.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kakera.ops.codec import codebook, trellis
from kakera.ops.codec.hadamard import BLOCK, hadamard
from kakera.target.as_torch import target_of

RSQRT_BLOCK = 0.088388347648  # 1 / sqrt(128) as the formats' own runtimes write it
CORE_VALUES, CARD_VALUES = 1 << 18, 1 << 24  # decoded at a time: stays in a core's cache; fills a GPU


@dataclass(frozen=True)
class CodedLinear:
    """code int16 [I/16, O/16, 16K], in_scale fp32 [I], out_scale fp32 [O], and the codebook of the states.

    K is whole, or of mul1 also 1.5, 2.5 and 3.5.
    """

    code: Tensor
    in_scale: Tensor
    out_scale: Tensor
    codebook: codebook.Name

    @property
    def bits(self) -> float:
        """K, bits a weight."""
        return self.half_bits / 2

    @property
    def half_bits(self) -> int:
        """2K, which is whole."""
        return self.code.shape[-1] // 8

    @property
    def in_channels(self) -> int:
        return self.in_scale.numel()

    @property
    def out_channels(self) -> int:
        return self.out_scale.numel()

    def blocks(self, which: Tensor) -> CodedLinear:
        """The runs of 128 output channels `which`, in that order (the transform mixes channels within a run only)."""
        tiles = (which[:, None] * (BLOCK // 16) + torch.arange(BLOCK // 16, device=which.device)).flatten()
        scale = self.out_scale.view(-1, BLOCK)[which].flatten()
        return CodedLinear(self.code[:, tiles], self.in_scale, scale, self.codebook)

    def weight(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """W_eff transposed: [O, I], as linears are kept. Computed in fp32 with bounded temporaries."""
        device = self.code.device
        weight_OI = torch.empty(self.out_channels, self.in_channels, dtype=dtype, device=device)
        table = codebook.table(self.codebook, torch.float32, device)
        columns = (CARD_VALUES if target_of(device).has_cards else CORE_VALUES) // BLOCK
        for i in range(0, self.in_channels, BLOCK):
            for o in range(0, self.out_channels, columns):
                code = self.code[i // 16 : (i + BLOCK) // 16, o // 16 : (o + columns) // 16]
                block_OI = hadamard(hadamard(trellis.decode(code, table), -1, 1 / BLOCK), 0)
                block_OI *= self.out_scale[o : o + columns, None]
                torch.mul(block_OI, self.in_scale[i : i + BLOCK], out=weight_OI[o : o + columns, i : i + BLOCK])
        return weight_OI

    def forward(self, x_NI: Tensor) -> Tensor:
        """y fp16 [N, O] with the formats' own rounding points: what fused kernels are measured against."""
        table = codebook.table(self.codebook, torch.float32, self.code.device)
        xh_NI = (hadamard(x_NI.float() * self.in_scale) * RSQRT_BLOCK).half()
        mid_NO = xh_NI.float() @ trellis.decode(self.code, table).T
        return (hadamard(mid_NO) * RSQRT_BLOCK * self.out_scale).half()
