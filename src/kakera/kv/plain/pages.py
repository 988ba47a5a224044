"""Pages of a store as the plain path uses them, one class per kind of codec.

A pool knows nothing of sequences or precision rules: it writes rows, reads pages as float32 for prefill, and gives
blocks of pages that decode can score and mix without turning them into keys and values first.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from kakera.contract.grid import PAGE
from kakera.kv import codec
from kakera.kv.plain.softmax import PlainBlock, ValueBlock
from kakera.kv.store import DenseStore, Int2Store, pages_to_rows


class PagePool(Protocol):
    """What attention needs of a pool. `layer` counts full-attention layers; ids are int64 tensors on the device."""

    def write_pages(self, layer: int, ids: Tensor, kv_P2KND: Tensor) -> None:
        """Whole pages [P, 2 (K, V), kv_heads, 64, D]."""
        ...

    def write_tokens(self, layer: int, ids_T: Tensor, offsets_T: Tensor, kv_T2KD: Tensor) -> None:
        """Single tokens: page and place within the page, each pair once."""
        ...

    def read(self, layer: int, ids: Tensor) -> Tensor:
        """float32 [2, kv_heads, len(ids) * 64, D], tokens in the order of ids."""
        ...

    def scorer(self, q_KGD: Tensor) -> Callable[[int, Tensor], tuple[Tensor, ValueBlock]]:
        """A function of (layer, ids) that gives the logits [K, G, N] of one query token and the block itself. The block
        is valid until the next call."""
        ...

    def scratch(self) -> tuple[Tensor, ...]:
        """Working memory, of a size fixed at construction."""
        ...


class DensePool:
    """Plain float32 or bfloat16 keys and values."""

    def __init__(self, store: DenseStore):
        self._kv_LP2KND = store.kv_LP2KND

    def write_pages(self, layer: int, ids: Tensor, kv_P2KND: Tensor) -> None:
        self._kv_LP2KND[layer].index_copy_(0, ids, kv_P2KND)

    def write_tokens(self, layer: int, ids_T: Tensor, offsets_T: Tensor, kv_T2KD: Tensor) -> None:
        self._kv_LP2KND[layer][ids_T, :, :, offsets_T] = kv_T2KD

    def read(self, layer: int, ids: Tensor) -> Tensor:
        return pages_to_rows(self._kv_LP2KND[layer].index_select(0, ids))

    def scorer(self, q_KGD: Tensor) -> Callable[[int, Tensor], tuple[Tensor, ValueBlock]]:
        def score(layer: int, ids: Tensor) -> tuple[Tensor, ValueBlock]:
            block = PlainBlock(self.read(layer, ids))
            return block.scores(q_KGD), block

        return score

    def scratch(self) -> tuple[Tensor, ...]:
        return ()


class Int2Pool:
    """2-bit codes, with an fp16 scale and minimum per group.

    Codes of graded rows stand for digits instead of dims (`codec.encode_graded`): a linear map, which queries take
    before the products and mixed values behind them.
    """

    def __init__(self, store: Int2Store, piece_pages: int):
        """`piece_pages` bounds the pages of one decode block."""
        self._codes, self._parameters = store.codes, store.parameters
        self._group, self._graded = store.group, store.rotation.graded
        heads, device = store.codes.shape[3], store.device
        dim = 4 * store.codes.shape[5]
        # A run is a range of dims in one quarter of the bytes and in one group: the unit of the products below.
        self._runs = max(4, dim // self._group)
        self._weights_R111 = codec.field_weights(self._runs, device).view(-1, 1, 1, 1)
        self._masks = codec.field_masks(device).view(torch.int64).view(4, 1, 1, 1)
        self._masked = torch.empty(piece_pages * heads * PAGE * dim // 8, dtype=torch.int64, device=device)
        self._levels = torch.empty(self._masked.numel() * 8, device=device)  # keys and values take turns

    def write_pages(self, layer: int, ids: Tensor, kv_P2KND: Tensor) -> None:
        codes, parameters_P2KN2G = self._encode(kv_P2KND)
        self._codes[layer].index_copy_(0, ids, codes)
        self._parameters[layer].index_copy_(0, ids, parameters_P2KN2G.movedim(3, -1))

    def write_tokens(self, layer: int, ids_T: Tensor, offsets_T: Tensor, kv_T2KD: Tensor) -> None:
        codes, parameters_T2K2G = self._encode(kv_T2KD)
        self._codes[layer][ids_T, :, :, offsets_T] = codes
        self._parameters[layer][ids_T, ..., offsets_T] = parameters_T2K2G

    def _encode(self, kv_B2: Tensor) -> tuple[Tensor, Tensor]:
        """Codes [B, 2, ..., D / 4] and parameters [B, 2, ..., 2, groups] of kv [B, 2, ..., D]."""
        rows = codec.encode_graded(kv_B2) if self._graded else codec.encode(kv_B2, self._group)
        return rows.codes, torch.stack((rows.scale, rows.minimum), -2)

    def read(self, layer: int, ids: Tensor) -> Tensor:
        parameters = self._parameters[layer].index_select(0, ids).movedim(-1, 3)
        codes = self._codes[layer].index_select(0, ids)
        rows = codec.decode(codec.Int2Rows(codes, parameters[..., 0, :], parameters[..., 1, :]))
        return pages_to_rows(codec.from_digits(rows) if self._graded else rows)

    def scorer(self, q_KGD: Tensor) -> Callable[[int, Tensor], tuple[Tensor, ValueBlock]]:
        """q . key = scale (q . level) + minimum sum(q), group by group.

        Letters: C groups of dims, R runs (each in one group), W dims of a run; X eight bytes of codes; B = R K.
        Measured on two AVX2 cores, 2 KV heads of 256, 59 pages: masking eight bytes at a time and converting to float32
        0.27 ms for keys and values (0.68 with masks broadcast along the bytes), the products 0.6 ms. A table look-up
        per byte took 14 ms, torch's int8 weight product 22 ms.
        """
        if self._graded:
            q_KGD = codec.to_digits(q_KGD)
        q_RKGW = torch.unflatten(q_KGD, -1, (self._runs, -1)).permute(2, 0, 1, 3)
        sums_CKG1 = self._by_group(q_RKGW.sum(-1, keepdim=True)).sum(1)
        q_BGW = (q_RKGW * self._weights_R111).flatten(0, 1)

        def score(layer: int, ids: Tensor) -> tuple[Tensor, ValueBlock]:
            codes_P2KX = self._codes[layer].index_select(0, ids).flatten(3).view(torch.int64)
            parameters_22CKN = self._parameters_of(layer, ids)
            scale_CKN, minimum_CKN = parameters_22CKN[0]
            dots_BGN = torch.bmm(q_BGW, self._unpack(codes_P2KX[:, 0]).transpose(1, 2))
            dots_CKGN = self._by_group(dots_BGN.view(*q_RKGW.shape[:3], -1)).sum(1)
            parts_CKGN = dots_CKGN.mul_(scale_CKN.unsqueeze(2)).addcmul_(sums_CKG1, minimum_CKN.unsqueeze(2))
            return sum_groups(parts_CKGN), LevelBlock(self, codes_P2KX[:, 1], *parameters_22CKN[1])

        return score

    def mix(self, p_KGN: Tensor, codes_PKX: Tensor, scale_CKN: Tensor, minimum_CKN: Tensor) -> Tensor:
        """sum over tokens of p (scale level + minimum): [K, G, D]."""
        scale_RKN = self._by_group(self._weights_R111[..., 0]) * scale_CKN.unsqueeze(1)
        scaled_BGN = (p_KGN * scale_RKN.flatten(0, 1).unsqueeze(2)).flatten(0, 1)
        mixed_BGW = torch.bmm(scaled_BGN, self._unpack(codes_PKX))
        mixed_KGRW = mixed_BGW.view(self._runs, *p_KGN.shape[:2], -1).permute(1, 2, 0, 3)
        offset_KGC = torch.bmm(p_KGN, minimum_CKN.permute(1, 2, 0))
        offset_KGR1 = offset_KGC.repeat_interleave(self._runs // len(scale_CKN), -1).unsqueeze(-1)
        mixed_KGD = (mixed_KGRW + offset_KGR1).flatten(2)
        return codec.from_digits(mixed_KGD) if self._graded else mixed_KGD

    def _by_group(self, x_R: Tensor) -> Tensor:
        """[R, ...] to [C, R / C, ...]."""
        return torch.unflatten(x_R, 0, (self._parameters.shape[5], -1))

    def _parameters_of(self, layer: int, ids: Tensor) -> Tensor:
        """Float32 [2 (K, V), 2 (scale, minimum), C, K, pages * 64]."""
        stored_P2K2CN = self._parameters[layer].index_select(0, ids)
        ordered_22CKPN = stored_P2K2CN.permute(1, 3, 4, 2, 0, 5)
        return ordered_22CKPN.to(torch.float32, memory_format=torch.contiguous_format).flatten(4)

    def _unpack(self, codes_PKX: Tensor) -> Tensor:
        """Float32 [R * K, pages * 64, W]: 4^quarter times each level. Valid until the next call."""
        pages, heads, words = codes_PKX.shape
        masked_4KPX = self._masked[: 4 * codes_PKX.numel()].view(4, heads, pages, words)
        torch.bitwise_and(codes_PKX.transpose(0, 1), self._masks, out=masked_4KPX)
        rows = pages * PAGE
        bytes_4KNrW = masked_4KPX.view(torch.uint8).view(4, heads, rows, self._runs // 4, -1)
        levels_4rKNW = self._levels[: bytes_4KNrW.numel()].view(4, self._runs // 4, heads, rows, -1)
        return levels_4rKNW.copy_(bytes_4KNrW.permute(0, 3, 1, 2, 4)).flatten(0, 2)

    def scratch(self) -> tuple[Tensor, ...]:
        return (self._masked, self._levels)


class LevelBlock(NamedTuple):
    """The values of some pages, still coded: int64 [P, K, 64 * D / 32] and float32 parameters [C, K, P * 64]."""

    pool: Int2Pool
    codes_PKX: Tensor
    scale_CKN: Tensor
    minimum_CKN: Tensor

    def mix(self, p_BMN: Tensor) -> Tensor:
        return self.pool.mix(p_BMN, self.codes_PKX, self.scale_CKN, self.minimum_CKN)


def sum_groups(parts_CKGN: Tensor) -> Tensor:
    """[K, G, N]; the usual single group costs nothing."""
    return parts_CKGN.squeeze(0) if len(parts_CKGN) == 1 else parts_CKGN.sum(0)
