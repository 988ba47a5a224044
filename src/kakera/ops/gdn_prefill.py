"""Gated DeltaNet's prefill on a GPU: one span of one layer between its projections, in four launches or a few more.

The same result as `causal_conv`, `gated_delta_chunk` and `rms_norm_gated` in turn. The pass over the state is cut into
launches where a save is wanted, so that a save is what a launch leaves behind; chunks lie on a grid of 64 tokens from
the span's start, and each is computed alike wherever the span is cut: a cut on the grid changes no bit.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from kakera.arch.blocks import GdnSpec
from kakera.ops import gdn_prefill_kernels as kernels
from kakera.ops.gdn_step import GdnConstants
from kakera.plan import gdn_plan
from kakera.plan.gdn_plan import CHUNK
from kakera.target.as_torch import target_of
from kakera.target.kernels import has_large_tiles

INVERT_WARPS, NORM_WARPS = 2, 8  # H200, 8,192 tokens of 48 heads: 203 and 80 us; 1 and 4 warps 264 and 102


class StateSave(NamedTuple):
    """Where the state after the span's first `tokens` tokens goes: a multiple of 64, or the whole span."""

    tokens: int
    state_VKD: Tensor  # float32 or float16
    conv_WC: Tensor


class Tile(NamedTuple):
    """Of the pass over the state: columns a program, its warps, stages of its loads; warps and most registers of
    `prepare` (None: as many as it likes)."""

    columns: int
    warps: int
    stages: int
    prepare_warps: int
    prepare_registers: int | None

    @staticmethod
    def of(device: torch.device, spec: GdnSpec) -> Tile:
        return tile_of(has_large_tiles(target_of(device).capability), spec)


def tile_of(large: bool, spec: GdnSpec) -> Tile:
    """64 columns are the rows of a Hopper tensor-core tile; elsewhere two stages have to fit in 99 KB.

    `prepare` likes 211 registers, which is one block on an SM; on an H200 two of 128 are faster (8,192 tokens of 48
    heads: 237 us, not 371). Elsewhere it would spill.
    """
    columns = min(64, spec.v_dim)
    return Tile(columns, 4, 3, 8, 128) if large else Tile(columns, 4, 2, 8, None)


def gdn_prefill(
    mixed_NX: Tensor,
    weights: GdnConstants,
    spec: GdnSpec,
    eps: float,
    state_VKD: Tensor,
    conv_WC: Tensor,
    saves: Sequence[StateSave] = (),
) -> Tensor:
    """[N, V D] in mixed's dtype, for `proj_out`: convolution, gates, delta rule and gated norm of N tokens.

    mixed_NX: q | k | v | z | b | a of each token, bf16 or fp16; its rows may be part of longer ones.
    state_VKD (float32) and conv_WC ([taps - 1, channels], mixed's dtype) are those before the first token, and after
    the last on return. `saves`, in any order, get both at their places. Scratch: `gdn_plan.scratch_bytes`.
    Raises ValueError for shapes that the kernels do not have, and for a save off the grid.
    """
    tokens = len(mixed_NX)
    _check(mixed_NX, spec, state_VKD, conv_WC, saves)
    y_NX = mixed_NX.new_empty(tokens, spec.v_heads * spec.v_dim)
    span = _Span(mixed_NX, weights, spec, eps, state_VKD, conv_WC, y_NX)
    for first in range(0, tokens, gdn_plan.RANGE):
        end = min(first + gdn_plan.RANGE, tokens)
        span.prepare(first, end)
        span.invert(first, end)
        for begin, stop, into in segments(first, end, saves):
            span.advance(begin - first, stop - first, stop, into)
        span.normalise(first, end)
    return y_NX


def segments(first: int, end: int, saves: Sequence[StateSave]) -> Iterator[tuple[int, int, list[StateSave]]]:
    """Tokens first .. end - 1 cut where a save is wanted: begin and end of each part, and the saves at its end."""
    begin = first
    for stop in sorted({save.tokens for save in saves if first < save.tokens < end} | {end}):
        yield begin, stop, [save for save in saves if save.tokens == stop]
        begin = stop


class _Span:
    """One span, and the scratch of a range of it."""

    def __init__(
        self,
        mixed_NX: Tensor,
        weights: GdnConstants,
        spec: GdnSpec,
        eps: float,
        state_VKD: Tensor,
        conv_WC: Tensor,
        y_NX: Tensor,
    ):
        self._mixed, self._weights, self._spec, self._eps = mixed_NX, weights, spec, eps
        self._state, self._conv, self._y = state_VKD, conv_WC, y_NX
        self._tokens = len(mixed_NX)
        self._tile = Tile.of(mixed_NX.device, spec)
        self._sizes = {
            "STRIDE": mixed_NX.stride(0),  # compiled in: its power of two decides how wide loads are
            "J": spec.k_heads,
            "V": spec.v_heads,
            "K": spec.k_dim,
            "D": spec.v_dim,
        }
        chunks = _chunks(min(self._tokens, gdn_plan.RANGE))
        half = partial(torch.empty, dtype=torch.float16, device=mixed_NX.device)
        single = partial(torch.empty, dtype=torch.float32, device=mixed_NX.device)
        J, V, K, D = spec.k_heads, spec.v_heads, spec.k_dim, spec.v_dim
        self._qk = half(chunks, 2 * J, CHUNK, K)
        self._v, self._o = half(chunks, V, D, CHUNK), half(chunks, V, D, CHUNK)
        self._inverse, self._scores = half(chunks, V, CHUNK, CHUNK), half(chunks, V, CHUNK, CHUNK)
        self._overlap = single(chunks, J, CHUNK, CHUNK)
        self._decays = single(chunks, V, 3, CHUNK)

    def prepare(self, first: int, end: int) -> None:
        """q, k, v, decays and scores of tokens first .. end - 1."""
        spec = self._spec
        kernels.prepare[(spec.k_heads + spec.v_heads, _chunks(end - first))](
            self._mixed,
            self._conv,
            self._weights.conv_KC,
            self._weights.rate_V,
            self._weights.dt_bias_V,
            self._qk,
            self._v,
            self._overlap,
            self._scores,
            self._decays,
            first // CHUNK,
            self._tokens,
            TAPS=spec.conv_taps,
            num_warps=self._tile.prepare_warps,
            maxnreg=self._tile.prepare_registers,
            **self._sizes,
        )

    def invert(self, first: int, end: int) -> None:
        kernels.invert[(self._spec.v_heads, _chunks(end - first))](
            self._mixed,
            self._overlap,
            self._decays,
            self._inverse,
            first // CHUNK,
            self._tokens,
            num_warps=INVERT_WARPS,
            **self._sizes,
        )

    def advance(self, begin: int, stop: int, end: int, into: list[StateSave]) -> None:
        """The state past tokens begin .. stop - 1 of the range; `end` counts from the span's start."""
        spec, tile = self._spec, self._tile
        saved = into[0] if into else StateSave(end, self._state, self._conv)
        kernels.advance[(spec.v_dim // tile.columns, spec.v_heads)](
            self._qk,
            self._v,
            self._inverse,
            self._scores,
            self._decays,
            self._o,
            self._state,
            saved.state_VKD,
            self._mixed,
            self._conv,
            saved.conv_WC,
            begin // CHUNK,
            _chunks(stop),
            end,
            TAPS=spec.conv_taps,
            SAVE=bool(into),
            BLOCK_D=tile.columns,
            STAGES=tile.stages,
            num_warps=tile.warps,
            **self._sizes,
        )
        for save in into[1:]:
            save.state_VKD.copy_(saved.state_VKD if saved.state_VKD.dtype == torch.float32 else self._state)
            save.conv_WC.copy_(saved.conv_WC)

    def normalise(self, first: int, end: int) -> None:
        spec = self._spec
        kernels.normalise[(spec.v_heads, _chunks(end - first))](
            self._o,
            self._mixed,
            self._weights.scale_D,
            self._y,
            first // CHUNK,
            self._tokens,
            self._eps,
            spec.k_dim**-0.5,
            num_warps=NORM_WARPS,
            **self._sizes,
        )


def _chunks(tokens: int) -> int:
    return -(-tokens // CHUNK)


def _check(mixed_NX: Tensor, spec: GdnSpec, state_VKD: Tensor, conv_WC: Tensor, saves: Sequence[StateSave]) -> None:
    for what, value, least in (
        ("k_dim", spec.k_dim, 16),
        ("v_dim", spec.v_dim, 16),
        ("conv_taps", spec.conv_taps, 2),
    ):
        if value < least or value & (value - 1):
            raise ValueError(f"{what} is {value}: the prefill kernels take powers of two from {least}")
    width = spec.conv_channels + spec.v_heads * (spec.v_dim + 2)
    if mixed_NX.dim() != 2 or mixed_NX.shape[1] < width or mixed_NX.stride(1) != 1 or not len(mixed_NX):
        raise ValueError(f"mixed is {tuple(mixed_NX.shape)}: rows of {width} values, next to each other, are needed")
    state, columns = (spec.v_heads, spec.k_dim, spec.v_dim), (spec.conv_taps - 1, spec.conv_channels)
    if state_VKD.dtype != torch.float32:
        raise ValueError(f"the state is {state_VKD.dtype}, and has to be float32")
    for tensor, shape in [(state_VKD, state), (conv_WC, columns)] + [
        pair for save in saves for pair in ((save.state_VKD, state), (save.conv_WC, columns))
    ]:
        if tuple(tensor.shape) != shape or not tensor.is_contiguous():
            raise ValueError(f"a state is {tuple(tensor.shape)}, and has to be {shape} and contiguous")
    for save in saves:
        on_grid = save.tokens % CHUNK == 0 or save.tokens == len(mixed_NX)
        if not (0 < save.tokens <= len(mixed_NX) and on_grid):
            raise ValueError(
                f"a save after {save.tokens} of {len(mixed_NX)} tokens: it has to be a multiple of {CHUNK} or the end"
            )
