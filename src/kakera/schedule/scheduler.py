"""Scheduler: which rows the next step computes. One plan in flight at a time: plan_step, execute, commit.

Each step: decode rows first, then new admissions, then prompts up to a budget that keeps the streams fluent.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from kakera.cache.keys import LastKeys
from kakera.cache.prefix import PrefixCache
from kakera.contract.events import (
    LATE_STEPS,
    EngineStats,
    Event,
    Finished,
    FinishReason,
    Flushed,
    Progress,
    PromptLogprobs,
    Tokens,
)
from kakera.contract.grid import PAGE, pages_for
from kakera.contract.images import rope_positions
from kakera.contract.request import NO_LIMIT, Request
from kakera.contract.step import (
    Action,
    EncodeImage,
    RowResult,
    SamplingInput,
    Segment,
    StepPlan,
    StepResult,
)
from kakera.errors import RequestRefused
from kakera.schedule.admission import Admission
from kakera.schedule.ahead import followers
from kakera.schedule.budget import PrefillBudget, divide
from kakera.schedule.disk import DiskWork, Tier
from kakera.schedule.drafts import Checked, Drafts, Guess, count_accepted
from kakera.schedule.images import Embeddings, image_rows
from kakera.schedule.lateness import Lateness
from kakera.schedule.limits import Limits, pixel_bytes
from kakera.schedule.queue import WaitingQueue
from kakera.schedule.running import Running
from kakera.schedule.sequence import Sequence


def _queue_full(why: str) -> RequestRefused:
    return RequestRefused(f"{why}; try again in a few seconds", status=429, code="queue_full")


class Scheduler:
    def __init__(
        self,
        limits: Limits,
        cache: PrefixCache,
        clock: Callable[[], float] = time.monotonic,
        drafts: Drafts | None = None,
        disk: Tier | None = None,
    ) -> None:
        """`drafts`: decode rows carry them, and nothing runs ahead of them. `disk`: keeps prefixes too."""
        self.limits = limits
        self.cache = cache
        self.clock = clock
        self.drafts = drafts
        self.waiting = WaitingQueue()
        self.running = Running(limits.slots)
        self.admission = Admission(limits, cache, clock)
        self.budget = PrefillBudget(limits.chunk, limits.target_seconds)
        self.embeddings = Embeddings(limits.image_tokens)
        self.lateness = Lateness()
        self.disk = None
        if disk is not None and cache.can_save:
            self.disk = DiskWork(disk, cache, self.admission, lambda: self.budget.token_seconds, clock)
        self._in_flight: StepPlan | None = None
        self._events: list[Event] = []
        self._arrivals = 0
        self._last_keys = LastKeys()
        self._steps = 0
        self._last_step_at = clock()

    # What callers do

    def submit(self, request: Request, allowed: int = NO_LIMIT) -> None:
        """Queue a request that may generate `allowed` tokens before `allow` lets it go on.

        Raises RequestRefused: 400 if it can never run or its id is taken, 429 if too many wait.
        """
        self.limits.check(request)
        if request.id in self.waiting or request.id in self.running:
            raise RequestRefused(f"a request with the id {request.id!r} is not finished yet", code="duplicate_id")
        free = self.running.slots.free
        if len(self.waiting) >= self.limits.max_waiting + free:
            raise _queue_full(f"{len(self.waiting)} requests are waiting, which is the limit")
        own = self.waiting.of(request.client, request.background)
        if request.client and own >= self.limits.share + free:
            raise _queue_full(f"{own} of your requests are waiting, which is your share")
        if request.images:
            self._refuse_pixels(request)
        self._arrivals += 1
        self.waiting.push(Sequence(request, self._arrivals, self.clock(), self._last_keys, allowed=allowed))

    def _refuse_pixels(self, request: Request) -> None:
        """Images wait as pixels, of which a small body may hold many."""
        others = (sequence.request for sequence in (*self.waiting, *self.running.oldest_first()))
        held = sum(pixel_bytes(other) for other in others if other.images)
        if held + pixel_bytes(request) > self.limits.pixel_bytes:
            raise _queue_full(f"images of other requests have {held:,} bytes of pixels")

    def allow(self, request_id: str, tokens: int) -> None:
        """Let a request generate up to `tokens` tokens in all; there it pauses. Unknown ids are ignored."""
        if sequence := self.running.get(request_id) or self.waiting.get(request_id):
            sequence.allowed = max(sequence.allowed, tokens)

    def abort(self, request_id: str) -> None:
        """End a request: now, or when the step in flight is committed. Unknown ids are ignored."""
        if sequence := self.waiting.pop(request_id):
            self._report_end(sequence, "abort")
        elif sequence := self.running.get(request_id):
            sequence.aborted = True
            if self._in_flight is None:
                self._end(sequence, "abort")

    def abort_all(self) -> None:
        for sequence in [*self.waiting, *self.running.oldest_first()]:
            self.abort(sequence.id)

    def take_events(self) -> list[Event]:
        """Events since the last call (commit calls it): of a planned step the admissions, of an abort while idle the
        ends."""
        taken, self._events = self._events, []
        return taken

    # Planning

    def plan_step(self) -> StepPlan | None:
        """Decide the next step; None if there is nothing to do. One without rows serves the disk. Commit it before
        planning again. What its tokens are chosen by: `sampling_of`."""
        assert self._in_flight is None, "plan_step before the last plan was committed"
        if self.disk is not None:
            self.disk.read(self.waiting)
        running = len(self.running)
        drafts = self.drafts.of(self._decoding(), self.limits.context) if self.drafts is not None else {}
        decoding = (sequence for sequence in self._decoding() if self._has_page(sequence))
        decode = [self._row(s, len(s.tokens), drafts.get(s.id)) for s in decoding]
        if len(self.running) == running or not self.running:  # after a preemption nobody new may take the pages
            gone = self._admit()
            decode = [row for row in decode if row.request_id not in gone]
        prompts = self.running.prefilling()
        prefill = self._segments(prompts, self._shares(prompts, self.budget.tokens(len(decode))))
        may_follow = self._let_ahead(decode, bool(prefill))
        if self.disk is not None:
            self.disk.write(idle=not decode and not prefill)
        if not (decode or prefill or (self.disk is not None and self.cache.has_actions)):
            return None
        self._steps += 1
        before, after = self.cache.take_actions() + self._encodes(prefill), self.cache.sink_actions()
        self._in_flight = StepPlan(self._steps, before, tuple(decode), tuple(prefill), after, may_follow)
        return self._in_flight

    def _decoding(self) -> list[Sequence]:
        """Who decodes in the next step, in the order of `Running`. Whoever was let ahead is among them."""
        return [s for s in self.running.oldest_first() if s.decoding and not s.paused]

    def _admit(self) -> set[str]:
        """Who can run takes the places of those that wait for their readers, and who is waited for those of the
        background. Returns the ids of who lost its place."""
        before = set(self.running.oldest_first())
        gone = self._make_room()
        admitted = [sequence for sequence in self.running.oldest_first() if sequence not in before]
        self._events += [Progress(sequence.id, sequence.computed, sequence.target) for sequence in admitted]
        return gone

    def _make_room(self) -> set[str]:
        gone: set[str] = set()
        while (blocked := self.admission.admit(self.waiting, self.running)) and self.running:
            victim = self.running.victim()
            if not victim.paused and (blocked.background or not victim.background):
                break
            self._preempt(victim)
            gone.add(victim.id)
        return gone

    def _shares(self, prompts: list[Sequence], budget: int) -> list[int]:
        """Prompt tokens of the step for each; those in the background, who come last, share what the others leave."""
        left = [sequence.target - sequence.computed for sequence in prompts]
        first = sum(not sequence.background for sequence in prompts)
        shares = divide(budget, left[:first], self._steps)
        return shares + divide(budget - sum(shares), left[first:], self._steps)

    def _let_ahead(self, decode: list[Segment], beside_prompts: bool) -> tuple[int, ...]:
        rows = {row.request_id: i for i, row in enumerate(decode)}
        running = self.running.oldest_first()
        left_out = [sequence.id for sequence in running if sequence.ahead and sequence.id not in rows]
        assert not left_out, f"{left_out} were let ahead: their states are a token further than what is planned"
        last = {sequence.id for sequence in running if sequence.is_last_token(self.limits.context)}
        may_follow = () if beside_prompts or self.drafts else followers(decode, last)
        for sequence in running:
            sequence.ahead = rows.get(sequence.id) in may_follow
        return may_follow

    def sampling_of(self, plan: StepPlan) -> dict[str, SamplingInput]:
        """By request, for rows that are sampled or scored. Beside the plan, because it holds what lives on here."""
        running = (self.running.get(row.request_id) for row in plan.rows if row.sampled or row.scored)
        return {sequence.id: sequence.sampling_input() for sequence in running if sequence is not None}

    def _segments(self, prompts: list[Sequence], shares: list[int]) -> list[Segment]:
        """Rows of the prompts' shares, cut where the step would save more than it may, or encode more of images than
        a chunk of tokens."""
        rows, left, encoded = [], self.limits.saves, 0
        for sequence, share in zip(prompts, shares, strict=True):
            images, start = sequence.request.images, sequence.computed
            end, tokens = self.embeddings.reach(
                images, start, start + share, self.limits.chunk - encoded, first=not encoded
            )
            end, passed = sequence.fit_saves(end, left)
            left, encoded = left - passed, encoded + tokens
            if end > start:
                rows.append(self._row(sequence, end))
        return rows

    def _encodes(self, rows: list[Segment]) -> tuple[Action, ...]:
        """What makes the embeddings ready that these rows need."""
        named = [(self.running.get(row.request_id), {part.digest for part in row.images}) for row in rows]
        needed = [i for s, digests in named if s is not None for i in s.request.images if i.digest in digests]
        actions = self.embeddings.take(needed)
        for action in actions:
            if isinstance(action, EncodeImage):
                self.cache.counters["images_encoded"] += 1
                self.cache.counters["image_tokens_encoded"] += action.rows * action.columns
        return actions

    def _row(self, sequence: Sequence, known: int, guess: Guess | None = None) -> Segment:
        """The tokens not computed yet, up to number `known`, and guesses behind them."""
        drafts = () if guess is None else guess.drafts
        lease = sequence.lease
        assert lease is not None
        end, known_all = known + len(drafts), known == len(sequence.tokens)
        saves = sequence.take_saves(end) if sequence.cached and self.cache.can_save else []
        known_pages, new_pages = lease.send(pages_for(end))
        return Segment(
            request_id=sequence.id,
            slot=lease.slot,
            tokens=(*sequence.tokens[sequence.computed : known], *drafts),
            start=sequence.computed,
            known_pages=known_pages,
            new_pages=new_pages,
            sampled=1 + len(drafts) if known_all and sequence.request.sampling.max_tokens > 0 else 0,
            scored=sequence.scored(end),
            saves=self.cache.reserve(lease, saves),
            positions=rope_positions(sequence.request.images, sequence.computed, end),
            images=image_rows(sequence.request.images, sequence.computed, end),
            propose=0 if guess is None else guess.propose,
        )

    def _has_page(self, sequence: Sequence) -> bool:
        """A page for the next token: free, evicted, or taken from the youngest request. False if it was this one's own.

        Only the youngest is ever preempted (of those that wait for their readers, if there are any), so the oldest that
        can go on always finishes; if others have taken memory of the card that it needs, once that is back.
        """
        while sequence.lease is not None and len(sequence.lease.pages) * PAGE < len(sequence.tokens):
            if self.cache.grow(sequence.lease):
                break
            if len(self.running) == 1 and self.cache.device.count == self.limits.pages:
                self._end(sequence, "length")  # it fills the whole pool
            else:
                self._preempt(self.running.victim())
        return sequence.lease is not None

    def _preempt(self, sequence: Sequence) -> None:
        """Complete pages and the rolling checkpoint are cached already; coming back is an ordinary prefix hit."""
        self._give_back(sequence)
        self.waiting.push_back(sequence)
        self.cache.counters["preemptions"] += 1

    # Committing

    def commit(self, plan: StepPlan, result: StepResult) -> list[Event]:
        """Take in what the plan's rows yielded; returns the events since the last commit."""
        assert plan is self._in_flight and result.step == plan.step, "commit of a plan that is not in flight"
        self._in_flight = None
        self._last_step_at = self.clock()
        prefilled = sum(len(row.tokens) for row in plan.prefill)
        drafted = any(row.drafts for row in plan.decode)
        encoded = any(isinstance(action, EncodeImage) for action in plan.before)  # takes its own time
        if (plan.prefill or (plan.rows and not drafted)) and not encoded:
            self.budget.observe(prefilled, result.seconds)
            self.lateness.observe(plan, result.seconds)
        self.cache.counters["prefilled_tokens"] += prefilled
        results = {row.request_id: row for row in result.rows}
        checked = []
        for i, row in enumerate(plan.rows):
            sequence = self.running.get(row.request_id)
            assert sequence is not None
            accepted = self._commit_row(sequence, row, results.get(row.request_id))
            if i < len(plan.decode):
                checked.append(Checked(sequence, len(row.drafts), accepted, len(sequence.proposed)))
        if self.drafts is not None:
            self.drafts.observe(checked, result, beside_prompts=bool(plan.prefill))
        for sequence in self.running.oldest_first():
            if sequence.aborted:
                self._end(sequence, "abort")
        return self.take_events()

    def _commit_row(self, sequence: Sequence, row: Segment, result: RowResult | None) -> int:
        """Returns how many of its drafts stay."""
        lease = sequence.lease
        assert lease is not None
        if result is None or result.error:
            self.cache.forfeit(lease)
            self.embeddings.distrust(row.images)
            result = result or RowResult(row.request_id, error="the runner returned nothing for this request")
            self._end(sequence, "error", result.error, result.code)
            return 0
        tokens, reason = sequence.advance(row, result, self.limits.context)
        sequence.proposed = result.proposed
        accepted = self._count_drafts(sequence, row, tokens)
        if sequence.computed < row.end:
            self.cache.forfeit(lease)  # not all drafts stay, so its end was not saved
        if sequence.cached:
            self.cache.extend(lease, sequence.keys, sequence.computed // PAGE)
        self.cache.publish(lease)
        if not sequence.aborted:
            self._report_row(sequence, tokens, reason, result)
            if reason:
                self._end(sequence, reason)
        return accepted

    def _count_drafts(self, sequence: Sequence, row: Segment, tokens: list[int]) -> int:
        """How many of a row's drafts stay, since these tokens do."""
        if not row.drafts:
            return 0
        accepted = count_accepted(row, tokens)
        sequence.accepted += accepted
        sequence.rejected += len(row.drafts) - accepted
        self.cache.counters["drafted_tokens"] += len(row.drafts)
        self.cache.counters["accepted_tokens"] += accepted
        return accepted

    def _report_row(
        self, sequence: Sequence, tokens: list[int], reason: FinishReason | None, result: RowResult
    ) -> None:
        if sequence.prefilling:
            self._events.append(Progress(sequence.id, sequence.computed, sequence.target))
            return
        if sequence.wants_echo:
            self._events.append(PromptLogprobs(sequence.id, tuple(sequence.prompt_logprobs)))
            sequence.echoed = True
        if tokens and sequence.first_token_at is None:
            sequence.first_token_at = self.clock()
        shown = tokens[:-1] if sequence.stop_token is not None else tokens
        if shown:
            self._events.append(Tokens(sequence.id, tuple(shown), result.logprobs[: len(shown)]))

    def _end(self, sequence: Sequence, reason: FinishReason, message: str = "", code: str = "") -> None:
        self._give_back(sequence, failed=reason == "error")
        self._report_end(sequence, reason, message, code)

    def _give_back(self, sequence: Sequence, failed: bool = False) -> None:
        """A prompt that is not whole yet rests where it stops: whoever sends it again goes on there."""
        lease = sequence.lease
        assert lease is not None
        if sequence.prefilling and sequence.cached and not failed:
            self.cache.rest(lease)
        self.cache.release(lease)
        self.running.remove(sequence, lease.slot)
        sequence.stop()

    def _report_end(self, sequence: Sequence, reason: FinishReason, message: str = "", code: str = "") -> None:
        looped = reason == "length" and sequence.loops is not None and sequence.loops.found
        code = "loop" if looped else code
        usage = sequence.usage(self.clock())
        self._events.append(Finished(sequence.id, reason, usage, sequence.stop_token, message, code))
        self.cache.counters["finished: loop" if looped else f"finished: {reason}"] += 1

    def flush(self) -> tuple[Flushed, StepPlan]:
        """Forget every prefix that no running request holds. The plan carries it out; it is not to be committed."""
        assert self._in_flight is None, "flush while a plan is in flight"
        return self.cache.flush(), StepPlan(self._steps, self.cache.take_actions() + self.embeddings.flush())

    def resize(self, pages: int) -> tuple[int, StepPlan]:
        """Use the device's first `pages` pages, or as few more as running requests hold and go on in (`Limits.room`):
        how many it are. The plan carries it out; it is not to be committed."""
        assert self._in_flight is None, "resize while a plan is in flight"
        room = sum(self._pages_ahead(sequence) for sequence in self.running.oldest_first())
        return self.cache.resize(pages, room), StepPlan(self._steps, self.cache.take_actions())

    def _pages_ahead(self, sequence: Sequence) -> int:
        """Pages beyond its own that a running request needs for its next `room` tokens."""
        assert sequence.lease is not None
        left = sequence.request.sampling.max_tokens - sequence.completion_tokens
        end = min(len(sequence.tokens) + min(left, self.limits.room), self.limits.context)
        return max(0, pages_for(end) - len(sequence.lease.pages))

    def admit_up_to(self, slots: int) -> None:
        """From now on nobody is admitted while so many requests run. Who runs goes on."""
        self.admission.slots = slots

    def suspend(self) -> StepPlan:
        """Everybody who runs goes back to the queue, and the device holds nothing any more: states and pages are in the
        host store. The plan carries it out; it is not to be committed."""
        assert self._in_flight is None, "suspend while a plan is in flight"
        for sequence in reversed(self.running.oldest_first()):
            self._preempt(sequence)
        self.cache.demote()
        return StepPlan(self._steps, self.cache.take_actions())

    def stats(self) -> EngineStats:
        now = self.clock()
        waiting = list(self.waiting)
        return EngineStats(
            running=len(self.running),
            waiting=len(waiting),
            paused=sum(s.paused for s in self.running.oldest_first()) + sum(s.paused for s in waiting),
            held_back=sum(self.admission.is_held_back(s) and not s.paused for s in waiting),
            pages_free=self.cache.available,
            pages_cached=self.cache.tree.unlocked,
            pages_total=self.limits.pages,
            pages_lent=self.limits.pages - self.cache.device.count,
            slots_free=self.running.slots.free,
            slots_total=self.limits.slots,
            slots_lent=self.limits.slots - self.admission.slots,
            host_bytes_used=self.cache.host.used,
            host_bytes_total=self.cache.host.limit,
            steps=self._steps - (self._in_flight is not None),
            last_step_at=self._last_step_at,
            host_bytes=self.cache.host.by_tier(),
            counters=self._counters(),
            active=tuple(sequence.active(now) for sequence in self.running.oldest_first()),
            at=now,
        )

    def _counters(self) -> dict[str, float]:
        of_disk = self.disk.tier.counters if self.disk is not None else {}
        mine = {"checkpoints": len(self.cache.checkpoints.published), LATE_STEPS: self.lateness.found}
        return {**self.cache.counters, **of_disk, **mine}
