"""The page pools: 64 tokens a page, all full-attention layers, one class per kind of codec.

A pool knows nothing of sequences or precision rules: it writes rows, reads pages as float32 for prefill, and gives
blocks of pages that decode can score and mix without turning them into keys and values first.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from kakera.kv import codec
from kakera.kv.softmax import PlainBlock, ValueBlock
from kakera.plan.kv_format import PAGE_TOKENS, KvFormat
from kakera.plan.spec import ModelSpec

DENSE_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


class PagePool(Protocol):
    """What attention needs of a pool. `layer` counts full-attention layers; ids are int64 tensors on the device."""

    dtype: torch.dtype  # keys and values are rounded to it before they come here

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

    def tensors(self) -> tuple[Tensor, ...]:
        """The storage; the page axis is dimension 1 of each."""
        ...

    def scratch(self) -> tuple[Tensor, ...]:
        """Working memory, of a size fixed at construction."""
        ...


def create_pool(spec: ModelSpec, fmt: KvFormat, pages: int, piece_pages: int, device: torch.device) -> PagePool:
    """`piece_pages` bounds the pages of one decode block."""
    if fmt.codec == "int2":
        return Int2Pool(spec, fmt.group, pages, piece_pages, device)
    return DensePool(spec, DENSE_DTYPES[fmt.codec], pages, device)


class DensePool:
    """Pages of plain float32 or bfloat16 keys and values."""

    def __init__(self, spec: ModelSpec, dtype: torch.dtype, pages: int, device: torch.device):
        self.dtype = dtype
        shape = (len(spec.full_layers), pages, 2, spec.kv_heads, PAGE_TOKENS, spec.head_dim)
        self._kv_LP2KND = torch.empty(shape, dtype=dtype, device=device)

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

    def tensors(self) -> tuple[Tensor, ...]:
        return (self._kv_LP2KND,)

    def scratch(self) -> tuple[Tensor, ...]:
        return ()


class Int2Pool:
    """Pages of 2-bit codes, with an fp16 scale and minimum per group."""

    dtype = codec.WINDOW_DTYPE

    def __init__(self, spec: ModelSpec, group: int, pages: int, piece_pages: int, device: torch.device):
        self._group = group
        layers, heads, dim = len(spec.full_layers), spec.kv_heads, spec.head_dim
        codes = (layers, pages, 2, heads, PAGE_TOKENS, dim // 4)
        parameters = (
            layers,
            pages,
            2,
            heads,
            2,
            dim // group,
            PAGE_TOKENS,
        )  # scales, then minima: contiguous over tokens
        self._codes = torch.empty(codes, dtype=torch.uint8, device=device)
        self._parameters = torch.empty(parameters, dtype=torch.float16, device=device)
        self._masks = codec.field_masks(device)
        self._weights_D = codec.field_weights(dim, device)
        self._masked = torch.empty(piece_pages, heads, PAGE_TOKENS, 4, dim // 4, dtype=torch.uint8, device=device)
        self._levels = torch.empty(self._masked.numel(), device=device)  # keys and values take turns: half the cache

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
        bounds = [codec.clip_bound(kv_B2[:, i], clip) for i, clip in enumerate((codec.CLIP_K, codec.CLIP_V))]
        rows = codec.encode(kv_B2, torch.stack(bounds, 1), self._group)
        return rows.codes, torch.stack((rows.scale, rows.minimum), -2)

    def read(self, layer: int, ids: Tensor) -> Tensor:
        parameters = self._parameters[layer].index_select(0, ids).movedim(-1, 3)
        codes = self._codes[layer].index_select(0, ids)
        return pages_to_rows(codec.decode(codec.Int2Rows(codes, parameters[..., 0, :], parameters[..., 1, :])))

    def scorer(self, q_KGD: Tensor) -> Callable[[int, Tensor], tuple[Tensor, ValueBlock]]:
        """q . key = scale (q . level) + minimum sum(q), group by group. C counts groups of dims below, W dims of one.

        Measured on one AVX2 core, 2 KV heads of 256, 59 pages: masking and converting bytes to float32 0.9 ms, the
        products 1.4 ms. A table look-up per byte took 14 ms, torch's int8 weight product 22 ms.
        """
        q_KCGW = torch.unflatten(q_KGD, -1, (-1, self._group)).transpose(1, 2)
        sums_KCG1 = q_KCGW.sum(-1, keepdim=True)
        weights_C1W = self._weights_D.view(-1, 1, self._group)
        q_BGW = (q_KCGW * weights_C1W).flatten(0, 1)

        def score(layer: int, ids: Tensor) -> tuple[Tensor, ValueBlock]:
            codes = self._codes[layer].index_select(0, ids)
            # [pages, 2, K, 2, C, 64] to [2, K, 2, C, pages * 64]
            parameters = self._parameters[layer].index_select(0, ids).float().permute(1, 2, 3, 4, 0, 5).flatten(4)
            scale_KCN, minimum_KCN = parameters[0].unbind(1)
            dots_BGN = torch.bmm(q_BGW, self._unpack(codes[:, 0]).transpose(1, 2))
            dots_KCGN = dots_BGN.view(*scale_KCN.shape[:2], *dots_BGN.shape[1:])
            parts_KCGN = dots_KCGN.mul_(scale_KCN.unsqueeze(2)).addcmul_(sums_KCG1, minimum_KCN.unsqueeze(2))
            return sum_groups(parts_KCGN), LevelBlock(self, codes[:, 1], *parameters[1].unbind(1))

        return score

    def mix(self, p_KGN: Tensor, codes_PKNB: Tensor, scale_KCN: Tensor, minimum_KCN: Tensor) -> Tensor:
        """sum over tokens of p (scale level + minimum): [K, G, D]."""
        scaled_BGN = (p_KGN.unsqueeze(1) * scale_KCN.unsqueeze(2)).flatten(0, 1)
        mixed_BGW = torch.bmm(scaled_BGN, self._unpack(codes_PKNB))
        mixed_KGCW = mixed_BGW.view(*scale_KCN.shape[:2], *mixed_BGW.shape[1:]).transpose(1, 2)
        offset_KGC = torch.bmm(p_KGN, minimum_KCN.transpose(1, 2))
        weights_CW = self._weights_D.view(-1, self._group)
        return (mixed_KGCW * weights_CW + offset_KGC.unsqueeze(-1)).flatten(2)

    def _unpack(self, codes_PKNB: Tensor) -> Tensor:
        """Float32 [K * C, pages * 64, W]: 4^quarter times each level. Valid until the next call."""
        masked = torch.bitwise_and(codes_PKNB.unsqueeze(-2), self._masks, out=self._masked[: len(codes_PKNB)])
        masked_PKNCW = torch.unflatten(masked.flatten(-2), -1, (-1, self._group))
        masked_KCPNW = masked_PKNCW.permute(1, 3, 0, 2, 4)
        levels_KCPNW = self._levels[: masked.numel()].view(masked_KCPNW.shape).copy_(masked_KCPNW)
        return levels_KCPNW.flatten(2, 3).flatten(0, 1)

    def tensors(self) -> tuple[Tensor, ...]:
        return (self._codes, self._parameters)

    def scratch(self) -> tuple[Tensor, ...]:
        return (self._masked, self._levels)


class LevelBlock(NamedTuple):
    """The values of some pages, still coded: uint8 [P, K, 64, D / 4] and float32 parameters [K, C, P * 64]."""

    pool: Int2Pool
    codes_PKNB: Tensor
    scale_KCN: Tensor
    minimum_KCN: Tensor

    def mix(self, p_BMN: Tensor) -> Tensor:
        return self.pool.mix(p_BMN, self.codes_PKNB, self.scale_KCN, self.minimum_KCN)


def sum_groups(parts_KCGN: Tensor) -> Tensor:
    """[K, G, N]; the usual single group costs nothing."""
    return parts_KCGN.squeeze(1) if parts_KCGN.shape[1] == 1 else parts_KCGN.sum(1)


def pages_to_rows(kv_P2KND: Tensor) -> Tensor:
    """[P, 2, K, 64, D] of any dtype to contiguous float32 [2, K, P * 64, D]."""
    pages, _, heads, _, dim = kv_P2KND.shape
    rows = torch.empty(2, heads, pages, PAGE_TOKENS, dim, device=kv_P2KND.device)
    return rows.copy_(kv_P2KND.permute(1, 2, 0, 3, 4)).flatten(2, 3)
