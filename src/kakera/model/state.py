"""StatePool: the live recurrent state of every running request, by slot."""

from __future__ import annotations

import torch
from torch import Tensor

from kakera.arch.layout import slot_record
from kakera.arch.spec import ModelSpec
from kakera.kv.batch import CheckpointTensors
from kakera.target.as_torch import DTYPES, activation_of


class StatePool:
    """`parts`: every state that the model's blocks declare for a slot, [layers, slots, ...] by name.

    Gated DeltaNet's: state_LSVKD, float32 [GDN layers, slots, v_heads, k_dim, v_dim], never rounded while a request
    lives; conv_LSWC [GDN layers, slots, taps - 1, channels], the last qkv columns before the convolution, model dtype.
    Both are empty for a model without. before_SH: what a draft layer takes of the token before the next one, as it was
    when the slot was reset or loaded; empty for a model whose draft layer is not computed.
    """

    def __init__(
        self, spec: ModelSpec, slots: int, device: torch.device | str = "cpu", dtype: torch.dtype = torch.float32
    ):
        self.parts = {
            part.name: torch.zeros(part.shape[0], slots, *part.shape[1:], dtype=DTYPES[part.dtype], device=device)
            for part in slot_record(spec, activation_of(dtype))
        }
        self._none = torch.zeros(0, slots, device=device)
        width = spec.draft.width if spec.drafting and spec.draft is not None else 0
        self.before_SH = torch.zeros(slots, width, dtype=dtype, device=device)
        self.device = self._none.device

    @property
    def state_LSVKD(self) -> Tensor:
        return self.parts.get("state", self._none)

    @property
    def conv_LSWC(self) -> Tensor:
        return self.parts.get("conv", self._none)

    def of(self, slot: int) -> tuple[Tensor, ...]:
        """What a slot holds, part by part: views [layers, ...]."""
        return tuple(part[:, slot] for part in self.parts.values())

    def reset(self, slot: int) -> None:
        """A sequence starts: no token has been seen."""
        self.before_SH[slot] = 0.0
        for part in self.parts.values():
            part[:, slot] = 0.0

    def load(self, slot: int, checkpoint: CheckpointTensors) -> None:
        """Continue from a checkpoint; rounded if its dtype was. What none carries is empty on the grid."""
        if checkpoint.hidden_H is not None and self.before_SH.shape[1]:
            self.before_SH[slot].copy_(checkpoint.hidden_H)
        for name, part in self.parts.items():
            part[:, slot].copy_(checkpoint.parts[name]) if name in checkpoint.parts else part[:, slot].zero_()

    def save(self, slot: int, checkpoint: CheckpointTensors) -> None:
        """Copy the slot's state as it is now into a checkpoint, all layers. The caller knows its position."""
        for name, part in self.parts.items():
            if name in checkpoint.parts:
                checkpoint.parts[name].copy_(part[:, slot])


def save_layer(checkpoint: CheckpointTensors, layer: int, state_VKD: Tensor, columns_WC: Tensor) -> None:
    """One GDN layer's part of a checkpoint."""
    if checkpoint.state_LVKD is not None and checkpoint.conv_LCW is not None:
        checkpoint.state_LVKD[layer].copy_(state_VKD)
        checkpoint.conv_LCW[layer].copy_(columns_WC)
