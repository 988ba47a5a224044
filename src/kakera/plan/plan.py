"""Wishes in, Plan out: the frozen records. `kakera.plan.budget` computes one from the other. No torch."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final, Literal

from kakera.arch.spec import ModelSpec
from kakera.contract.grid import PAGE
from kakera.plan.kv_format import KvFormat
from kakera.plan.weights import Placed
from kakera.target.target import StateDtype, Target

Place = Literal["device", "host"]
Meter = Literal["load", "slots", "pages", "cache"]
DraftWish = Literal["auto"] | int  # guesses of what comes next: as many as pay, or the most at a time
AUTO: Final = "auto"
OFF: Final = 0
MOST_DRAFTS = 31  # in a step: a row of 32 tokens; products of more rows are bound by arithmetic


@dataclass(frozen=True)
class Wishes:
    """The memory options of the command line, and what is guessed. None means: kakera chooses."""

    gpus: str = "auto"  # auto | cpu | "12GB,12GB" | "rtx5070,rtx5070"
    context: int | None = None  # tokens of the longest request
    max_running: int | None = None
    chunk: int | None = None  # largest number of prefill tokens in one step
    kv: str = "int2"
    kv_group: int | None = None
    kv_window: int = 256  # tokens
    rotation: str | None = None
    state_dtype: StateDtype | None = None
    host_cache: int | None = None  # bytes
    staging: int | None = None  # checkpoints on their way to the host at a time
    embedding: Literal["auto", "device", "host"] = "auto"
    reserve: int | None = None  # bytes of each device that stay free beyond the margin
    pool: int | Literal["all"] | None = None  # tokens of all KV pages together, or all that fit
    vision: Literal["auto", "device", "host", "off"] = "auto"  # where a tower lies
    image_tokens: int | None = None  # of the largest image
    vision_tower: str | None = None  # directory of a tower, if that is not the model's
    drafts: DraftWish = OFF


@dataclass(frozen=True)
class PlanRow:
    """One line of the memory table: what it is, where it lives, bytes per device (or of the host), and why so many.
    `cards`: bytes on each card where they differ, of which `bytes` are the most.

    `meter` says what fills it while serving: all of it at load, the running requests' slots, the pages in use, or what
    the prefix cache keeps on the host. None: nobody counts it.
    """

    name: str
    place: Place
    bytes: int
    note: str = ""
    meter: Meter | None = None
    cards: tuple[int, ...] = ()

    def on_card(self, card: int) -> int:
        return self.cards[card] if self.cards else self.bytes


def total_on(rows: Iterable[PlanRow], place: Place, card: int = 0) -> int:
    """Bytes of the rows on one card, or on the host."""
    return sum(row.on_card(card) for row in rows if row.place == place)


@dataclass(frozen=True)
class Plan:
    """Every size that an allocator needs. Nothing mutates it; a changed plan is a new object."""

    spec: ModelSpec
    kv: KvFormat
    target: Target
    device_names: tuple[str, ...]
    device_bytes: tuple[int, ...]  # capacity of each device
    context: int  # tokens of the longest request, prompt + completion
    pages: int  # KV pages on the device
    slots: int  # running requests
    chunk: int
    state_dtype: StateDtype  # of stored checkpoints; live states are fp32
    rotation: str | None
    host_cache: int  # bytes for checkpoints, sinks and demoted pages
    checkpoint_bytes: int
    sink_bytes: int
    page_bytes: int
    rows: tuple[PlanRow, ...]
    placed: tuple[Placed, ...] = ()  # weights that may lie apart from the others
    staged: int | None = None  # checkpoints on their way to the host at a time; None: stored where they are computed
    embedding: Place = "device"  # where its rows lie, if it is a table of its own
    reserve: int = 0  # bytes of each device that stay free beyond the margin
    vision: Place | None = None  # where the blocks of a vision tower lie; None: no image is read
    image_tokens: int = 0  # of the largest image
    image_store: int = 0  # tokens of images whose embeddings are kept
    pixel_bytes: int = 0  # of images of all requests that wait or run
    vision_tower: str | None = None  # directory of the tower, if that is not the model's
    ranks: int = 1  # processes, each with its part of the model: a card each, or all on one CPU
    drafts: DraftWish = OFF

    def wishes(self) -> Wishes:
        """Memory options that give this plan again on such a machine."""
        return Wishes(
            gpus="auto" if self.target.has_cards else ",".join(["cpu"] * self.ranks),
            context=self.context,
            max_running=self.slots,
            chunk=self.chunk,
            kv=self.kv.codec,
            kv_group=self.kv.group if self.kv.windowed else None,
            kv_window=self.kv.window_pages * PAGE,
            rotation=self.rotation,
            state_dtype=self.state_dtype,
            host_cache=self.host_cache,
            staging=self.staged,
            embedding="auto" if self.placed else self.embedding,  # a part finds its place as the others do
            reserve=self.reserve,
            vision=self.vision or "off",
            image_tokens=self.image_tokens or None,
            vision_tower=self.vision_tower,
            drafts=self.drafts,
        )

    def total(self, place: Place) -> int:
        """Of the host, or of the card that holds most."""
        cards = len(self.device_bytes) if place == "device" else 1
        return max(total_on(self.rows, place, card) for card in range(cards))

    @property
    def shape(self) -> str:
        """A name for the model's shape and what does not follow from how much memory is free today: a plan of the same
        shape with less of everything is proven by this one."""
        spec = self.spec
        model = (spec.model_type, spec.vocab, spec.hidden, len(spec.layers), spec.max_positions)
        weights = [row.bytes for row in self.rows if row.name == "weights"]
        same: tuple[object, ...] = (model, weights, self.kv, self.slots, self.chunk, self.embedding, self.staged)
        if self.vision:
            same += (self.vision, self.image_tokens)
        if self.drafts:
            same += (self.drafts,)
        return hashlib.sha256(repr(same).encode()).hexdigest()[:16]
