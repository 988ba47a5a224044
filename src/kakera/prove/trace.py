"""What is recorded while a plan is filled once: readings of the card, times of steps, timed reads of its memory."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from kakera.contract.events import RegionRead

Phase = Literal["calibration", "filling", "answering", "other"]  # the first two: prefill, and nothing else


@dataclass(frozen=True)
class Card:
    """Bytes. `planned`: of ours on this card; `used_before`: by everybody before we came; `margin`: to stay free."""

    name: str
    driver: str | None
    bytes: int
    margin: int
    planned: int
    used_before: int
    bandwidth: float | None = None  # bytes a second by its maker; None: an unknown card


@dataclass(frozen=True)
class Sample:
    """The card at one moment. None: its driver does not say. `slowed`: it lowers its clocks for heat or for the supply;
    that it stays below its power limit, as every card at full load does, is not meant."""

    seconds: float  # since the beginning, as in all records here
    phase: Phase
    free: int | None = None
    watts: float | None = None
    clock_mhz: int | None = None
    utilization: int | None = None  # percent
    slowed: bool | None = None
    resident: int | None = None  # bytes of our processes on the host
    host_free: int | None = None


@dataclass(frozen=True)
class Chunk:
    """A step of prefill: `tokens` behind `position` others, finished at `at`. One prompt ran, so steps follow each
    other without a gap."""

    at: float
    position: int
    tokens: int
    seconds: float


@dataclass(frozen=True)
class Decoding:
    """Seconds of the median decode step, and the bytes of keys and values that it reads."""

    seconds: float
    kv_bytes: int


@dataclass(frozen=True)
class Link:
    """Exchanges of one card with the others: bytes a second and when nothing else ran, seconds, share of a step that
    it waits. None has been measured with one card."""

    card: int
    rate: float
    calm_rate: float
    p50: float
    p99: float
    waiting: float


@dataclass(frozen=True)
class Filled:
    """The one request: tokens that were asked for and came, and seconds to the first one."""

    prompt_tokens: int
    wanted: int
    answered: int
    first_token: float


@dataclass(frozen=True)
class Resent:
    """The same prompt with some tokens more. `same`: two that were sent behind it got the same greedy answer."""

    prompt_tokens: int
    cached_tokens: int
    first_token: float
    same: bool


@dataclass(frozen=True)
class Trace:
    """`card` None: a CPU, where nothing can be watched but times. `sweeps`: each region's reads, sweep by sweep; the
    first is made while next to nothing has been computed. `failure`: what the server said, or how it ended."""

    card: Card | None
    samples: tuple[Sample, ...] = ()
    calm_chunks: tuple[Chunk, ...] = ()  # of the calibration, behind at most 8K tokens
    chunks: tuple[Chunk, ...] = ()
    calm_decoding: Decoding | None = None
    decoding: Decoding | None = None  # at the end of the context
    sweeps: tuple[tuple[RegionRead, ...], ...] = ()
    links: tuple[Link, ...] = ()
    filled: Filled | None = None
    resent: Resent | None = None
    failure: str | None = None
