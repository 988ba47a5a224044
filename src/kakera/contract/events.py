"""What the engine says of its requests: events, usage, and a snapshot of itself. No torch."""

from __future__ import annotations

import time
from dataclasses import dataclass, field, replace
from typing import Literal


@dataclass(frozen=True)
class TokenLogprob:
    """The chosen token's log-probability and the most likely alternatives, most likely first."""

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True)
class Usage:
    """`accepted_tokens` of the completion were guessed right and computed together; `rejected_tokens` were computed
    and are not part of it."""

    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int
    miss_reason: str = ""  # why cached_tokens is not higher; "" on a full hit
    queue_seconds: float = 0.0
    prefill_seconds: float = 0.0  # admission to first token
    decode_seconds: float = 0.0
    accepted_tokens: int = 0
    rejected_tokens: int = 0


FinishReason = Literal["stop", "length", "abort", "error"]
LATE_STEPS = "late_steps"  # the counter of times when several steps in a row took far longer than usual
ENGINE_ERROR, INVALID_GRAMMAR = "engine_error", "invalid_grammar"  # codes of an error: whose fault it is


@dataclass(frozen=True)
class Tokens:
    """Event: new tokens of a running request."""

    request_id: str
    tokens: tuple[int, ...]
    logprobs: tuple[TokenLogprob, ...] = ()


@dataclass(frozen=True)
class PromptLogprobs:
    """Event: log-probabilities of the prompt's tokens 1 .. n-1 given what precedes them (echo)."""

    request_id: str
    logprobs: tuple[TokenLogprob, ...]


@dataclass(frozen=True)
class Progress:
    """Event: prefill reached `done` of `total` prompt tokens. The first one, of what the cache had, comes before the
    step that begins the prefill is executed."""

    request_id: str
    done: int
    total: int


@dataclass(frozen=True)
class Finished:
    """Event: the last one of a request. `message` and `code` are set when reason is "error"; `code` is "loop" when the
    loop guard ended it (reason "length"). `stop_token` is the end token, which is never shown."""

    request_id: str
    reason: FinishReason
    usage: Usage
    stop_token: int | None = None
    message: str = ""
    code: str = ""


Event = Tokens | PromptLogprobs | Progress | Finished


@dataclass(frozen=True)
class Active:
    """A running request. It prefills until `done` of its `target` tokens are computed; then it decodes."""

    id: str
    prompt_tokens: int
    cached_tokens: int
    done: int
    target: int
    generated: int
    seconds: float  # since it was admitted
    decode_seconds: float  # since its first token

    def later(self, seconds: float) -> Active:
        """So much later, if nothing has happened but time."""
        decode_seconds = self.decode_seconds + (seconds if self.generated else 0.0)
        return replace(self, seconds=self.seconds + seconds, decode_seconds=decode_seconds)


@dataclass(frozen=True)
class Flushed:
    """What a flush of the prefix cache gave back: device pages, checkpoints, bytes of the host cache, and of the disk
    if that was asked for."""

    pages: int
    checkpoints: int
    host_bytes: int
    disk_bytes: int = 0


@dataclass(frozen=True)
class RegionRead:
    """`bytes` of the device's memory from `offset` of a region on, and the seconds that each read of them took."""

    region: str
    offset: int
    bytes: int
    seconds: tuple[float, ...]


@dataclass(frozen=True)
class SleepState:
    """How deep an engine sleeps: 0 not at all, 1 with its weights in host memory, 2 without weights. `seconds` that
    falling asleep or waking took; bytes in use on the device by anybody, 0 on a CPU, and bytes of host memory that the
    sleep takes."""

    level: int
    seconds: float = 0.0
    device_bytes: int = 0
    host_bytes: int = 0


@dataclass
class EngineStats:
    """A snapshot of the engine for /metrics, /health, the page and the log. Numbers and ids only.

    `pages_free` counts every page that a request can have now; `pages_cached` of these hold a reusable prefix.
    `pages_lent` are given back to the card while other programs need its memory, and so many slots stay empty.
    `paused` of the requests that run and wait do so for their readers, and `held_back` wait for lent pages. `asleep`:
    as SleepState.level. `at`: when the engine made it, by the clock that all processes of a machine share.
    """

    running: int = 0
    waiting: int = 0
    paused: int = 0
    held_back: int = 0
    asleep: int = 0
    pages_free: int = 0
    pages_cached: int = 0
    pages_total: int = 0
    pages_lent: int = 0
    slots_free: int = 0
    slots_total: int = 0
    slots_lent: int = 0
    host_bytes_used: int = 0
    host_bytes_total: int = 0
    steps: int = 0  # that have finished
    last_step_at: float = 0.0
    host_bytes: dict[str, int] = field(default_factory=dict)  # in use, by kind: checkpoint, sink, page
    counters: dict[str, float] = field(default_factory=dict)
    active: tuple[Active, ...] = ()  # oldest first
    at: float = field(default_factory=time.monotonic, compare=False)

    @property
    def idle(self) -> bool:
        """There is nothing to compute: whoever is left waits for its reader, for lent pages, or for the engine to be
        woken."""
        return self.asleep > 0 or self.running + self.waiting == self.paused + self.held_back

    @property
    def pages_used(self) -> int:
        """By running requests."""
        return self.pages_total - self.pages_lent - self.pages_free
