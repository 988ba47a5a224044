"""What a caller asks for: tokens, where the messages end, and how to sample. Frozen; no torch."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Literal

BoundaryKind = Literal["system", "message", "prompt"]


@dataclass(frozen=True)
class Constraint:
    """What generated text has to match: a grammar as plain data (Lark or JSON, as llguidance reads it).

    The grammar begins with the first generated token or, where `after` or `at` names a token, behind the first `after`
    or with the first `at`, whichever comes earlier; text before that is free. `required`: the answer does not end
    before the grammar has begun. An answer ends only where the grammar accepts, and at once where nothing may follow.
    """

    grammar: str
    after: int | None = None
    at: int | None = None
    required: bool = True


@dataclass(frozen=True)
class ThinkingBudget:
    """Generated tokens that reasoning may take; then the tokens of `close` are forced, the last of which ends it.

    The prompt has opened the reasoning; the first generated token among `ends` closes it.
    """

    tokens: int
    close: tuple[int, ...]
    ends: tuple[int, ...]


@dataclass(frozen=True)
class Sampling:
    """How tokens are chosen and when to stop. Values are validated before they come here.

    `seed` is always set (the server draws one if the client gave none): noise is a function of
    (seed, choice, position), so that batching never changes an answer.
    """

    max_tokens: int
    seed: int
    choice: int = 0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0  # 0 = off
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    min_tokens: int = 0
    stop_token_ids: tuple[int, ...] = ()  # includes the model's end tokens unless ignore_eos
    logprobs: int | None = None  # number of alternatives; None = no logprobs at all
    prompt_logprobs: int | None = None  # the same for the prompt's own tokens (echo)
    constraint: Constraint | None = None
    thinking: ThinkingBudget | None = None
    loop_guard: bool = False  # end an answer that repeats itself (schedule/loops.py)


@dataclass(frozen=True)
class Boundary:
    """`position` tokens of the prompt end a message; a checkpoint is worth most there."""

    position: int
    kind: BoundaryKind


@dataclass(frozen=True)
class Request:
    """One choice of one completion. `salt` separates caches that must not be shared (adapter, images, ...).

    Long prompts should come `packed`.
    """

    id: str
    tokens: Sequence[int]
    sampling: Sampling
    boundaries: tuple[Boundary, ...] = ()
    salt: bytes = b""


def packed(tokens: Iterable[int]) -> array[int]:
    """As 32-bit integers, copied: 192K tokens in 50 us, where a list of Python's integers takes 10 ms at every hand.

    Raises OverflowError for a number that 32 bits do not hold.
    """
    return array("i", tokens)


@dataclass(frozen=True)
class TokenLogprob:
    """The chosen token's log-probability and the most likely alternatives, most likely first."""

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True)
class Usage:
    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int
    miss_reason: str = ""  # why cached_tokens is not higher; "" on a full hit
    queue_seconds: float = 0.0
    prefill_seconds: float = 0.0  # admission to first token
    decode_seconds: float = 0.0


NO_LIMIT = 2**31  # tokens: more than any context
FinishReason = Literal["stop", "length", "abort", "error"]
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
    """Event: prefill reached `done` of `total` prompt tokens."""

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
FINAL_REASONS: tuple[FinishReason, ...] = ("stop", "length", "abort", "error")


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


@dataclass(frozen=True)
class Flushed:
    """What a flush of the prefix cache gave back: device pages, checkpoints, bytes of the host cache."""

    pages: int
    checkpoints: int
    host_bytes: int


@dataclass
class EngineStats:
    """A snapshot of the engine for /metrics, /health, the page and the log. Numbers and ids only.

    `pages_free` counts every page that a request can have now; `pages_cached` of these hold a reusable prefix.
    `paused` of the requests that run and wait do so for their readers.
    """

    running: int = 0
    waiting: int = 0
    paused: int = 0
    pages_free: int = 0
    pages_cached: int = 0
    pages_total: int = 0
    slots_free: int = 0
    slots_total: int = 0
    host_bytes_used: int = 0
    host_bytes_total: int = 0
    steps: int = 0
    last_step_at: float = 0.0
    host_bytes: dict[str, int] = field(default_factory=dict)  # in use, by kind: checkpoint, sink, page
    counters: dict[str, float] = field(default_factory=dict)
    active: tuple[Active, ...] = ()  # oldest first

    @property
    def idle(self) -> bool:
        """There is nothing to compute: whoever is left waits for its reader."""
        return self.running + self.waiting == self.paused
