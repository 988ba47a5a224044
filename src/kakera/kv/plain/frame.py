"""The frame that keys and values are stored in, and the way into it and back: the model's own, or a rotated one."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from kakera.kv.store import Int2Store


class StoredFrame(Protocol):
    """`layer` counts the full-attention layers."""

    def centre(self, layer: int, kv_T2KD: Tensor) -> None:
        """In place, before anything else."""
        ...

    def turn_pages(self, layer: int, q_PKMD: Tensor, kv_P2KND: Tensor) -> None:
        """Queries and centred keys and values of a prefill segment, in place: products have the shape of a page."""
        ...

    def turn_pages_back(self, layer: int, o_PKMD: Tensor) -> None:
        """What came out for them, in place."""
        ...

    def turn_tokens(self, layer: int, q_TKGD: Tensor, kv_T2KD: Tensor) -> tuple[Tensor, Tensor]:
        """The same of decode tokens, each with the bits that it has alone."""
        ...

    def turn_tokens_back(self, layer: int, o_TKGD: Tensor) -> Tensor: ...

    def uncentre(self, layer: int, o_TQD: Tensor) -> None:
        """In place, after everything else."""
        ...


class ModelFrame:
    """The model's own: nothing to do."""

    def centre(self, layer: int, kv_T2KD: Tensor) -> None: ...

    def turn_pages(self, layer: int, q_PKMD: Tensor, kv_P2KND: Tensor) -> None: ...

    def turn_pages_back(self, layer: int, o_PKMD: Tensor) -> None: ...

    def turn_tokens(self, layer: int, q_TKGD: Tensor, kv_T2KD: Tensor) -> tuple[Tensor, Tensor]:
        return q_TKGD, kv_T2KD

    def turn_tokens_back(self, layer: int, o_TKGD: Tensor) -> Tensor:
        return o_TKGD

    def uncentre(self, layer: int, o_TQD: Tensor) -> None: ...


class RotatedFrame:
    """That of an INT2 store: rotated, less its centres."""

    def __init__(self, store: Int2Store):
        self._rotation, self._centres_L2KD = store.rotation, store.centres_L2KD

    def centre(self, layer: int, kv_T2KD: Tensor) -> None:
        kv_T2KD -= self._centres_L2KD[layer]

    def turn_pages(self, layer: int, q_PKMD: Tensor, kv_P2KND: Tensor) -> None:
        for q_KMD, (k_KND, v_KND) in zip(q_PKMD, kv_P2KND, strict=True):
            q_KMD.copy_(self._rotation.k.turn(layer, q_KMD))
            k_KND.copy_(self._rotation.k.turn(layer, k_KND))
            v_KND.copy_(self._rotation.v.turn(layer, v_KND))

    def turn_pages_back(self, layer: int, o_PKMD: Tensor) -> None:
        for o_KMD in o_PKMD:
            o_KMD.copy_(self._rotation.v.turn_back(layer, o_KMD))

    def turn_tokens(self, layer: int, q_TKGD: Tensor, kv_T2KD: Tensor) -> tuple[Tensor, Tensor]:
        k_TK1D, v_TK1D = kv_T2KD.unsqueeze(3).unbind(1)
        kq_TKMD = self._rotation.k.turn_rows(layer, torch.cat((k_TK1D, q_TKGD), 2))
        v_TK1D = self._rotation.v.turn_rows(layer, v_TK1D)
        return kq_TKMD[:, :, 1:], torch.stack((kq_TKMD[:, :, 0], v_TK1D.squeeze(2)), 1)

    def turn_tokens_back(self, layer: int, o_TKGD: Tensor) -> Tensor:
        return self._rotation.v.turn_rows_back(layer, o_TKGD)

    def uncentre(self, layer: int, o_TQD: Tensor) -> None:
        group = o_TQD.shape[1] // self._centres_L2KD.shape[2]
        o_TQD += self._centres_L2KD[layer, 1].repeat_interleave(group, 0)
