"""One forward pass's input as tensors: spans of tokens, one a sequence, laid flat one behind the other.

Built by run/ from a StepPlan, read by model/ and by attention. Shape letters: T tokens of the whole pass, H hidden,
L layers, S slots, P pages (see docs/developers/architecture.md for the legend).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor


@dataclass
class CheckpointTensors:
    """The state of one sequence after `position` tokens; layers fill in their part while they run. `parts`: the tensors
    of a checkpoint's record (`arch/layout.py`), by name and in its order.

    Those of the blocks that are here, None if the model has no such part:
    state_LVKD: [GDN layers, v_heads, k_dim, v_dim], float32 or float16
    conv_LCW: [GDN layers, taps - 1, conv channels], the pre-convolution qkv columns before `position`
    window_k, window_v: [full layers, R, kv_heads, 64, head_dim] in the window's dtype, pages position/64 - R ..
        position/64 - 1, rotated frame; pages before 0 are unused. None for codecs without a window.
    hidden_H: what a draft layer takes of the last token, [its width]
    """

    position: int
    parts: Mapping[str, Tensor]

    @property
    def state_LVKD(self) -> Tensor | None:
        return self.parts.get("state")

    @property
    def conv_LCW(self) -> Tensor | None:
        return self.parts.get("conv")

    @property
    def window_k(self) -> Tensor | None:
        return self.parts.get("window_k")

    @property
    def window_v(self) -> Tensor | None:
        return self.parts.get("window_v")

    @property
    def hidden_H(self) -> Tensor | None:
        return self.parts.get("hidden")


@dataclass(frozen=True)
class Save:
    """Fill `into` with the state after `into.position` tokens of the span's sequence."""

    into: CheckpointTensors

    @property
    def position(self) -> int:
        return self.into.position


@dataclass(frozen=True)
class Held:
    """What blocks with a state were given for the tokens of a span, some of which may not stay, [count, ...] by kind of
    block and layer. Such a span only reads the states; `HybridModel.commit` takes them on by the tokens that stay.

    `ends`: not None where there is room for the states behind all of the tokens, by layer: if all stay, that is a copy
    and no computation.
    """

    inputs: dict[str, list[Tensor]] = field(default_factory=lambda: defaultdict(list))
    ends: list[tuple[Tensor, ...]] | None = None


@dataclass(frozen=True)
class Kept:
    """The first `count` tokens of a held span stay."""

    held: Held
    slot: int
    count: int

    @property
    def whole(self) -> bool:
        """All of its tokens stay."""
        return all(self.count == len(given) for layers in self.held.inputs.values() for given in layers)


@dataclass(frozen=True)
class Span:
    """`count` tokens of one sequence at positions start .. start + count - 1, rows offset .. offset + count - 1. A
    decode span with `held` has no saves."""

    offset: int
    count: int
    start: int
    slot: int
    pages: Tensor  # int64 [pages], on the compute device; entry i holds positions 64 i ..
    saves: tuple[Save, ...] = ()
    held: Held | None = None

    @property
    def end(self) -> int:
        return self.start + self.count

    @property
    def rows(self) -> slice:
        return slice(self.offset, self.offset + self.count)

    def parts(self) -> Iterator[tuple[slice, list[Save]]]:
        """The span's tokens cut at its save positions: token ranges within the span, and the saves at each end."""
        ends = sorted({save.position - self.start for save in self.saves} | {self.count})
        for begin, end in zip([0, *ends], ends, strict=False):
            yield slice(begin, end), [save for save in self.saves if save.position == self.start + end]


@dataclass(frozen=True)
class SingleTokens:
    """Decode spans of one token each as tensors of the device, so that a captured graph can be replayed with others.

    starts_R: int64, position of each token; slots_R: int64; tables_RP: int32 page ids, entries behind a row's pages
    are valid ids of whatever page.
    """

    starts_R: Tensor
    slots_R: Tensor
    tables_RP: Tensor


@dataclass(frozen=True)
class Batch:
    """Decode spans first, then prefill spans. `positions_T` are rope positions, apart from cache positions: one of each
    token, or time, row and column. `singles` says the same as `decode`, and nothing reads the positions, slots and
    pages of `decode` then. `images`: embeddings [N, H] that stand for the N tokens from a row of the flat batch on."""

    tokens_T: Tensor  # int64
    positions_T: Tensor  # int64 [T] or [3, T]
    decode: tuple[Span, ...]
    prefill: tuple[Span, ...]
    logit_rows: Tensor  # int64: rows of the flat batch whose logits are wanted
    singles: SingleTokens | None = None
    images: tuple[tuple[int, Tensor], ...] = ()

    @property
    def spans(self) -> tuple[Span, ...]:
        return self.decode + self.prefill

    @property
    def decode_tokens(self) -> int:
        """Of all decode spans: the first rows of the flat batch."""
        return sum(span.count for span in self.decode)

    @property
    def device(self) -> torch.device:
        return self.tokens_T.device
