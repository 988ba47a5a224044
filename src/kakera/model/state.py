"""StatePool: the live recurrent state of every running request, by slot."""

from __future__ import annotations

import torch
from torch import Tensor

from kakera.arch.spec import ModelSpec
from kakera.kv.batch import CheckpointTensors


class StatePool:
    """state_LSVKD: float32 [GDN layers, slots, v_heads, k_dim, v_dim], never rounded while a request lives.
    conv_LSWC: [GDN layers, slots, taps - 1, channels], the last qkv columns before the convolution, model dtype.
    Both are empty for a model without Gated DeltaNet.
    """

    def __init__(
        self, spec: ModelSpec, slots: int, device: torch.device | str = "cpu", dtype: torch.dtype = torch.float32
    ):
        layers, gdn = len(spec.gdn_layers), spec.gdn
        shape = (gdn.v_heads, gdn.k_dim, gdn.v_dim) if gdn else (0, 0, 0)
        columns = (gdn.conv_taps - 1, gdn.conv_channels) if gdn else (0, 0)
        self.state_LSVKD = torch.zeros(layers, slots, *shape, dtype=torch.float32, device=device)
        self.conv_LSWC = torch.zeros(layers, slots, *columns, dtype=dtype, device=device)

    def reset(self, slot: int) -> None:
        """A sequence starts: no token has been seen."""
        self.state_LSVKD[:, slot] = 0.0
        self.conv_LSWC[:, slot] = 0.0

    def load(self, slot: int, checkpoint: CheckpointTensors) -> None:
        """Continue from a checkpoint; rounded if its dtype was."""
        if checkpoint.state_LVKD is not None and checkpoint.conv_LCW is not None:
            self.state_LSVKD[:, slot].copy_(checkpoint.state_LVKD)
            self.conv_LSWC[:, slot].copy_(checkpoint.conv_LCW)

    def save(self, slot: int, checkpoint: CheckpointTensors) -> None:
        """Copy the slot's state as it is now into a checkpoint, all layers. The caller knows its position."""
        if checkpoint.state_LVKD is not None and checkpoint.conv_LCW is not None:
            checkpoint.state_LVKD.copy_(self.state_LSVKD[:, slot])
            checkpoint.conv_LCW.copy_(self.conv_LSWC[:, slot])


def save_layer(checkpoint: CheckpointTensors, layer: int, state_VKD: Tensor, columns_WC: Tensor) -> None:
    """One GDN layer's part of a checkpoint."""
    if checkpoint.state_LVKD is not None and checkpoint.conv_LCW is not None:
        checkpoint.state_LVKD[layer].copy_(state_VKD)
        checkpoint.conv_LCW[layer].copy_(columns_WC)
