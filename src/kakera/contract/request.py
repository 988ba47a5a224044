"""What a caller asks for: tokens, where the messages end, and how to sample. Frozen; no torch."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from kakera.contract.images import ImageSpan

BoundaryKind = Literal["system", "message", "image", "prompt"]
NO_LIMIT = 2**31  # tokens: more than any context


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
    """One choice of one completion. `salt` separates prefix caches that must not be shared; without `cache` it neither
    reads nor writes the prefix cache. Waiting requests of different `client`s take turns. `background`: it gives way to
    all that are not. `images`: in the order of the prompt, whose tokens at their places say nothing.

    Long prompts should come `packed`.
    """

    id: str
    tokens: Sequence[int]
    sampling: Sampling
    boundaries: tuple[Boundary, ...] = ()
    salt: bytes = b""
    cache: bool = True
    client: str = ""  # whose it is, as a name that says nothing; "" is nobody's
    background: bool = False
    images: tuple[ImageSpan, ...] = ()


def packed(tokens: Iterable[int]) -> array[int]:
    """As 32-bit integers, copied: 192K tokens in 50 us, where a list of Python's integers takes 10 ms at every hand.

    Raises OverflowError for a number that 32 bits do not hold.
    """
    return array("i", tokens)
