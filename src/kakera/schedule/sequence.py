"""Sequence: one request's progress, from the queue to its last token."""

from __future__ import annotations

from array import array
from dataclasses import InitVar, dataclass, field

from kakera.cache.keys import LastKeys, PageKey, page_keys
from kakera.cache.lease import Lease
from kakera.cache.match import Match
from kakera.cache.tree import Kind
from kakera.contract.events import Active, FinishReason, TokenLogprob, Usage
from kakera.contract.grid import PAGE
from kakera.contract.images import page_extras
from kakera.contract.request import NO_LIMIT, Request, packed
from kakera.contract.step import RowResult, SamplingInput, Segment
from kakera.schedule.depths import Depths
from kakera.schedule.loops import LoopGuard


@dataclass(eq=False)
class Sequence:
    """`tokens` are the prompt and what was generated; the first `computed` of them are in the KV cache and the state.

    Until `target` tokens are computed the sequence prefills; then it decodes, and its last token is the only one not
    computed. A preempted sequence prefills again, generated tokens included; `request` never changes.
    """

    request: Request
    arrival: int
    submitted_at: float
    last_keys: InitVar[LastKeys | None] = None
    tokens: array[int] = field(init=False)
    keys: list[PageKey] = field(default_factory=list)
    target: int = 0
    computed: int = 0
    lease: Lease | None = None
    saves: list[tuple[int, Kind]] = field(default_factory=list)  # still ahead, ascending
    cached_tokens: int = 0
    miss_reason: str = ""
    admitted_at: float | None = None
    first_token_at: float | None = None
    prompt_logprobs: list[TokenLogprob] = field(default_factory=list)
    echoed: bool = False  # the prompt's log-probabilities were reported
    aborted: bool = False
    fetching: int = 0  # the import from the disk that it waits for
    asked_disk: bool = False  # once a life: what the disk has was fetched, or was not worth it
    ahead: bool = False  # its next row may have been computed (ahead.py)
    stop_token: int | None = None  # the end token that ended it
    allowed: int = NO_LIMIT  # tokens that its reader lets it generate by now, in all
    loops: LoopGuard | None = None
    accepted: int = 0  # drafts that stayed, and those that did not
    rejected: int = 0
    credit: float | None = None  # seconds that drafts may cost it (drafts.py)
    depths: Depths = field(default_factory=Depths)  # how often its draft layer is right
    proposed: tuple[int, ...] = ()  # what that guesses next
    extras: dict[int, bytes] = field(init=False)  # what the keys of its pages say beside their tokens

    def __post_init__(self, last_keys: LastKeys | None) -> None:
        self.loops = LoopGuard() if self.request.sampling.loop_guard else None
        self.tokens = packed(self.request.tokens)
        self.extras = page_extras(self.request.images)
        self.keys = (last_keys or LastKeys()).page_keys(self.tokens, self.request.salt, self.extras)

    @property
    def id(self) -> str:
        return self.request.id

    @property
    def cached(self) -> bool:
        """Whether it has to do with the prefix cache at all."""
        return self.request.cache

    @property
    def background(self) -> bool:
        """Nobody waits for it: it takes what others leave."""
        return self.request.background

    @property
    def prompt_tokens(self) -> int:
        return len(self.request.tokens)

    @property
    def completion_tokens(self) -> int:
        return len(self.tokens) - self.prompt_tokens

    @property
    def prefilling(self) -> bool:
        return self.lease is not None and self.computed < self.target

    @property
    def decoding(self) -> bool:
        return self.lease is not None and self.computed >= self.target

    @property
    def paused(self) -> bool:
        """It waits for its reader: no step computes it and nobody admits it. It decodes then, or is in the queue."""
        return self.completion_tokens >= self.allowed

    @property
    def wants_echo(self) -> bool:
        return self.request.sampling.prompt_logprobs is not None and not self.echoed

    def scored(self, end: int) -> int:
        """How many tokens of a row up to `end` have successors in the prompt, where the request wants an echo."""
        return max(0, min(end, self.prompt_tokens - 1) - self.computed) if self.wants_echo else 0

    def sampling_input(self) -> SamplingInput:
        return SamplingInput(self.id, self.request.sampling, self.tokens, self.prompt_tokens)

    def start(self, lease: Lease, match: Match, now: float) -> None:
        """Admitted: the state after `match.position` tokens is about to be in the slot."""
        self.lease = lease
        self.computed, self.target = match.position, len(self.tokens)
        if self.admitted_at is None:
            self.admitted_at = now
            self.cached_tokens, self.miss_reason = match.position, match.explain()

    def stop(self) -> None:
        """Preempted or finished: nothing is held any more."""
        self.lease = None
        self.computed = self.target = 0
        self.saves = []
        self.ahead = False
        self.proposed = ()
        if not self.echoed:
            self.prompt_logprobs = []

    def is_last_token(self, context: int) -> bool:
        """Whether the next token ends it or pauses it, whatever it is."""
        most = min(self.request.sampling.max_tokens, self.allowed)
        return self.completion_tokens + 1 >= most or len(self.tokens) + 1 >= context

    def most_drafts(self, context: int) -> int:
        """Drafts that its next row may carry: to the page's border, where it is saved, and no further than it may grow.

        So a row needs no page that it would not need anyway, and no step commits across a border.
        """
        most = min(self.request.sampling.max_tokens, self.allowed)
        left = min(most - self.completion_tokens, context - len(self.tokens)) - 1
        return min(left, -len(self.tokens) % PAGE)

    def add_save(self, position: int, kind: Kind) -> None:
        """One more save point ahead of what is computed; a multiple of PAGE."""
        self.saves = sorted([save for save in self.saves if save[0] != position] + [(position, kind)])

    def fit_saves(self, end: int, places: int) -> tuple[int, int]:
        """`end`, or the place before it up to which a row has no more save points than `places`; and how many it has.

        Points of the sparse grid, whose only worth is that nothing better is near, give way instead: they are dropped.
        """
        better = [position for position, kind in self.saves if position <= end and kind != "grid"]
        if len(better) > places:
            end = better[places - 1] if places else better[0] - PAGE
            better = better[:places]
        grid = [save for save in self.saves if save[0] <= end and save[1] == "grid"]
        kept = grid[max(0, len(grid) + len(better) - places) :]
        self.saves = [save for save in self.saves if save not in grid or save in kept]
        return end, len(better) + len(kept)

    def take_saves(self, end: int) -> list[tuple[int, Kind]]:
        """The save points that a row ending at `end` passes. In decode every page border is one."""
        passed = [save for save in self.saves if save[0] <= end]
        self.saves = self.saves[len(passed) :]
        if self.decoding and end % PAGE == 0:
            passed.append((end, "rolling"))
        return passed

    def advance(self, row: Segment, result: RowResult, context: int) -> tuple[list[int], FinishReason | None]:
        """Take in what a row yielded: the tokens that count, and the reason if the sequence ends with them."""
        decoding = self.decoding
        known = len(self.tokens)
        self.prompt_logprobs += result.prompt_logprobs if self.wants_echo else ()
        reason: FinishReason | None = None
        for token in result.tokens:
            self.tokens.append(token)
            reason = self._reason_to_stop(token, context)
            if reason:
                break
        if result.complete and reason is None:
            reason = "stop"
        taken = self.tokens[known:].tolist()
        self.computed = row.start + (len(taken) if decoding else len(row.tokens))
        if len(self.tokens) >= (len(self.keys) + 1) * PAGE:
            self.keys += page_keys(self.tokens, self.request.salt, self.keys, self.extras)
        if self.computed == self.target == self.prompt_tokens and self.request.sampling.max_tokens == 0:
            reason = "length"
        return taken, reason

    def _reason_to_stop(self, token: int, context: int) -> FinishReason | None:
        sampling = self.request.sampling
        if token in sampling.stop_token_ids and self.completion_tokens > sampling.min_tokens:
            self.stop_token = token
            return "stop"
        if self.loops is not None and self.loops.add(token):
            return "length"
        if self.completion_tokens >= sampling.max_tokens or len(self.tokens) >= context:
            return "length"
        return None

    def active(self, now: float) -> Active:
        """As a running request shows in the engine's stats."""
        admitted = self.admitted_at if self.admitted_at is not None else now
        first = self.first_token_at if self.first_token_at is not None else now
        return Active(
            id=self.id,
            prompt_tokens=self.prompt_tokens,
            cached_tokens=self.cached_tokens,
            done=min(self.computed, self.target),
            target=self.target,
            generated=self.completion_tokens,
            seconds=now - admitted,
            decode_seconds=now - first,
        )

    def usage(self, now: float) -> Usage:
        admitted = self.admitted_at if self.admitted_at is not None else now
        first = self.first_token_at if self.first_token_at is not None else now
        return Usage(
            prompt_tokens=self.prompt_tokens,
            cached_tokens=self.cached_tokens,
            completion_tokens=self.completion_tokens,
            miss_reason=self.miss_reason,
            queue_seconds=admitted - self.submitted_at,
            prefill_seconds=first - admitted,
            decode_seconds=now - first,
            accepted_tokens=self.accepted,
            rejected_tokens=self.rejected,
        )
