"""What an architecture declares of its tensors and states, and how ranks share them. No torch.

Everything else that a room says of a model (bytes of a plan, what a checkpoint must hold, rates of a quantiser, random
weights, records of a store, slices of a rank) is a fold over these records.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from fractions import Fraction
from typing import Literal

BLOCK = 128  # channels that a trellis codec transforms together: nothing coded is cut inside of one
INT8_ROWS = 16  # that kernels take at a time

Role = Literal["linear", "stack", "table", "small"]
Format = Literal["plain", "int8", "escha", "exl3"]
Values = Literal["weight", "scale", "delta", "filter", "decay", "step"]
Place = Literal["device", "host", "file"]

CODED: tuple[Format, ...] = ("escha", "exl3", "int8", "plain")  # what a linear of the layers may be stored as
ROWS: tuple[Format, ...] = ("int8", "plain")  # what is looked up row by row
HEAD: tuple[Format, ...] = ("int8", "exl3", "plain")
CODED_ROWS: tuple[Format, ...] = ("exl3", "plain")  # a trellis a row, with a scale and no Hadamard
PLAIN: tuple[Format, ...] = ("plain",)


@dataclass(frozen=True)
class Cut:
    """Of a tensor what lies in the `ranges` (first, behind the last) along `axis`, one range behind the other."""

    axis: int
    ranges: tuple[tuple[int, int], ...]

    def shape(self, whole: tuple[int, ...]) -> tuple[int, ...]:
        """Of the part of a tensor of shape `whole`."""
        size = sum(end - begin for begin, end in self.ranges)
        return (*whole[: self.axis], size, *whole[self.axis + 1 :])

    def runs(self, step: int, axis: int) -> Cut:
        """The same along `axis` of a tensor that holds `step` channels in each place. Raises ValueError for a range
        that does not begin and end between two of them."""
        if off := [edge for part in self.ranges for edge in part if edge % step]:
            raise ValueError(f"channel {off[0]} is inside of a run of {step}")
        return Cut(axis, tuple((begin // step, end // step) for begin, end in self.ranges))


@dataclass(frozen=True)
class Shard:
    """What a rank holds of a tensor or a state: along `axis`, of each of the consecutive `ranges` of (units, channels
    of a unit), its share of whole units. No axis: every rank holds all of it.

    `unequal`: shares may differ by a unit. Without it units that do not divide evenly can not be shared.
    """

    axis: int | None = None
    ranges: tuple[tuple[int, int], ...] = ()
    unequal: bool = False

    def divides(self, ranks: int) -> bool:
        """Whether so many ranks can share it."""
        if self.axis is None or ranks == 1:
            return True
        return all(units >= ranks if self.unequal else units % ranks == 0 for units, _ in self.ranges)

    def parts(self, rank: int, ranks: int) -> Iterator[tuple[int, int]]:
        """(first channel, channel behind the last) of a rank in every range, along the whole tensor's axis.

        Raises ValueError if so many ranks can not share it.
        """
        if not self.divides(ranks):
            raise ValueError(f"{ranks} ranks can not share {self.ranges} evenly")
        start = 0
        for units, width in self.ranges:
            yield start + rank * units // ranks * width, start + (rank + 1) * units // ranks * width
            start += units * width

    def share(self, rank: int, ranks: int) -> Fraction:
        """The part of the whole that a rank holds."""
        if self.axis is None or ranks == 1:
            return Fraction(1)
        whole = sum(units * width for units, width in self.ranges)
        return Fraction(sum(end - begin for begin, end in self.parts(rank, ranks)), whole)

    def largest(self, ranks: int) -> Fraction:
        """The largest part of the whole that one of the ranks holds."""
        return max(self.share(rank, ranks) for rank in range(ranks))

    def cut(self, rank: int, ranks: int) -> Cut | None:
        """What a rank holds; None: all of it. Raises ValueError if so many ranks can not share it."""
        if self.axis is None or ranks == 1:
            return None
        return Cut(self.axis, tuple(self.parts(rank, ranks)))

    def shape(self, whole: tuple[int, ...], rank: int, ranks: int) -> tuple[int, ...]:
        """Shape of a rank's part of a tensor of shape `whole`."""
        cut = self.cut(rank, ranks)
        return whole if cut is None else cut.shape(whole)


WHOLE = Shard()


def by_heads(axis: int, *ranges: tuple[int, int]) -> Shard:
    """(heads, channels of a head) one behind the other."""
    return Shard(axis, ranges)


def by_blocks(axis: int, channels: int, *, unequal: bool = False) -> Shard:
    """By runs of 128 channels; a number of channels that is no multiple stays in one piece, which nobody shares."""
    return Shard(axis, ((channels // BLOCK, BLOCK) if channels % BLOCK == 0 else (1, channels),), unequal)


def by_rows(axis: int, rows: int) -> Shard:
    """Rows that are independent of each other, as evenly as they go: in runs of 128, which a coded head needs, or of
    16, as kernels of int8 rows take them, or one by one."""
    step = next(step for step in (BLOCK, INT8_ROWS, 1) if rows % step == 0)
    return Shard(axis, ((rows // step, step),), unequal=True)


@dataclass(frozen=True)
class Kind:
    """Linears that get one rate when a model is quantised. `order`: which kind gets one bit more first, lowest first;
    `escha`: bits a weight in Escha's published mix; `above`: bits above the experts in EXL3's mixes of models that have
    them."""

    name: str
    order: int
    escha: int = 2
    above: int = 2


@dataclass(frozen=True)
class Tensor:
    """One tensor of a model, under its canonical name: of its module for what has formats, its own for a small one.

    shape: rows first, so [O, I] of a linear, [E, O, I] of a stack of experts, [rows, width] of a table.
    role: a `linear` or a `stack` of linears multiplies activations; of a `table` only rows are looked up; `small` ones
        (norms, filters, gates of heads) are never coded.
    formats: what it may be stored as. Biases and scales of a format belong to their module and are not declared.
    kind: None if no rate applies (it stays plain, or int8 rows).
    values: what a small tensor's numbers mean: `scale` multiplies as it is, `delta` is stored as its distance from 1;
        `filter` taps, `decay` log of a rate, `step` inverse softplus of a step. Loading and random weights ask.
    alias: it may be absent, and is that tensor then (a tied head).
    active: what one token reads of the first axis: rows of a table, experts of a stack. None: all of it.
    pieces: names under which the parts of a stack's rows may be stored one by one, `*` for the expert.
    part, places: what a plan calls it where it may lie apart from the other weights, and where, best first.
    derived: integer constants (offsets, hash multipliers) that follow from the config and are not read from a file.
    """

    name: str
    shape: tuple[int, ...]
    role: Role
    shard: Shard = WHOLE
    formats: tuple[Format, ...] = PLAIN
    kind: Kind | None = None
    values: Values = "weight"
    alias: str = ""
    active: int | None = None
    pieces: tuple[str, ...] = ()
    part: str = ""
    places: tuple[Place, ...] = ("device",)
    derived: tuple[tuple[str, tuple[int, ...]], ...] = ()

    @property
    def count(self) -> int:
        """Number of values."""
        return math.prod(self.shape)

    @property
    def share(self) -> Fraction:
        """Of the whole, what one token reads."""
        return Fraction(self.active or self.shape[0], self.shape[0])

    def stored_as(self, method: str) -> Format:
        """Its format in a checkpoint of the quantisation `method` (escha, eschamoe, exl3 or none). Of eschamoe stacks
        alone are coded, and what escha would code is int8 rows."""
        if method == "eschamoe" and self.role != "stack":
            return "int8" if "int8" in self.formats else "plain"
        method = method.removesuffix("moe")
        if method == "escha":
            return next(f for f in ("escha", "int8", "plain") if f in self.formats)
        return "exl3" if method == "exl3" and "exl3" in self.formats else "plain"


def linear(name: str, outputs: int, inputs: int, kind: Kind, shard: Shard) -> Tensor:
    """A linear that formats code."""
    return Tensor(name, (outputs, inputs), "linear", shard, CODED, kind)


def gate(name: str, outputs: int, inputs: int, shard: Shard) -> Tensor:
    """A linear that no format codes: small and sensitive."""
    return Tensor(name, (outputs, inputs), "linear", shard)


def small(name: str, shape: tuple[int, ...], values: Values, shard: Shard = WHOLE) -> Tensor:
    return Tensor(name, shape, "small", shard, values=values)


Lifetime = Literal["slot", "page", "checkpoint"]
Commit = Literal["recurrent", "shift", "derived"]
Precision = Literal["state", "activation", "codec", "bf16"]


@dataclass(frozen=True)
class State:
    """What a block of a layer remembers of a sequence.

    shape: of a slot's or a checkpoint's state, of one layer; of a page's state, of one entry.
    lifetime: `slot` as long as a request runs, `page` as long as its tokens' page is kept, `checkpoint` if only a
        resumed request needs it.
    dtype: `state` is float32 while it lives, and stored as the plan says; `activation` the dtype of activations;
        `codec` the KV codec's; or a dtype.
    commit: `recurrent` needs the scan again for tokens that a draft got wrong, `shift` drops its newest columns,
        `derived` follows from others.
    kept: whether a checkpoint carries a slot's state; False if it is empty on the grid.
    tokens_per_entry: of a page's state.
    """

    name: str
    shape: tuple[int, ...]
    lifetime: Lifetime
    dtype: Precision
    commit: Commit
    shard: Shard = WHOLE
    kept: bool = True
    tokens_per_entry: int = 1
