"""One choice of what kakera may vary -> a Plan, and what is left over or missing. Pure arithmetic, nothing allocated.

Order of the decisions: what must be there (weights, slots, scratch, runtime, one request of the full length, the
checkpoint store) is added up first; memory left over becomes more KV pages, up to a full context for every slot.
`search.py` says which choices there are and which is best.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache

from kakera.arch.shard import of_rank
from kakera.arch.spec import ModelSpec
from kakera.contract.grid import PAGE, pages_for
from kakera.plan.asked import kv_format
from kakera.plan.placement import must, part_rows, place, wished
from kakera.plan.plan import MOST_DRAFTS, Meter, Place, Plan, PlanRow, Wishes, total_on
from kakera.plan.sizes import (
    checkpoint_bytes,
    drafted_bytes,
    exchange_bytes,
    gap_bytes,
    live_state_bytes,
    margin,
    scratch_bytes,
    usable,
)
from kakera.plan.speed import ROWS_BANDWIDTH
from kakera.plan.store_sizes import StoreSizes, fitting
from kakera.plan.tower import TowerPlan, most_tokens
from kakera.plan.weights import CPU_LINEAR_BYTES, Placed, WeightBytes
from kakera.target.devices import Machine
from kakera.target.kernels import serves_attention
from kakera.target.target import StateDtype

AGENT_CONTEXT = 65536  # coding agents send 50K-200K tokens a turn: a slot is worth having if it gets pages for this
LEAST_CONTEXT = 4096  # kakera does not choose less on its own; --context may
SPARED = 200 * 10**6  # what is placed last would else take all that is left
POOL_SHARE = 0.5  # of the memory left over that becomes KV pages beyond what slots need


@dataclass(frozen=True)
class Choice:
    """What kakera varies where nobody wishes otherwise. `most_context`: what it takes on its own with this, at most."""

    slots: int
    chunk: int
    staged: int | None  # as in `Target`
    state_dtype: StateDtype
    embedding: Place
    most_context: int | None = None
    vision: Place | None = None


@dataclass(frozen=True)
class Draft:
    """A plan that may not fit. `room` is what is left per device, `host_room` on the host; negative = missing.

    `need` and `host_need` are the bytes that can not be done without; on a CPU they are one and the same sum.
    `checkpoints`: that the store holds. `starved`: a slot has pages for less than an agent's turn.
    """

    plan: Plan
    room: int
    host_room: int
    need: int
    host_need: int
    checkpoints: int = 0
    starved: bool = False

    @property
    def fits(self) -> bool:
        return self.room >= 0 and self.host_room >= 0


class Case:
    """Model, machine and wishes, and the sums that many choices share. Sizes are per device: of all ranks on a CPU."""

    def __init__(self, spec: ModelSpec, wishes: Wishes, machine: Machine, weights: WeightBytes):
        self.spec, self.wishes, self.machine, self.weights = spec, wishes, machine, weights
        self.kv = kv_format(spec, wishes)
        self.ranks = machine.ranks
        self.own = of_rank(spec, self.ranks - 1, self.ranks)  # what one rank computes with; none has more
        self.target, self.one_memory = machine.target, machine.target.one_memory
        self.here = self.ranks if self.one_memory else 1  # ranks on a device
        self.parts = wished(weights.parts, wishes.embedding)
        self.image_tokens = most_tokens(wishes.image_tokens, self.target)
        self.reserve = machine.reserve if wishes.reserve is None else wishes.reserve
        self.usable = [usable(device, self.reserve) for device in machine.devices]
        host = machine.ram - machine.ram_used - margin(machine.ram)
        self.host_usable = self.usable[0] if self.one_memory else host
        turned = wishes.rotation is not None  # whatever is in the file
        served = serves_attention(self.own.head_dim, self.own.rotary_dim, self.kv, turned, self.target.dtype)
        self.plain = self.target.has_cards and not served
        self.live = self.here * live_state_bytes(self.own, self.target)
        self.window = self.here * self.kv.slot_bytes(self.own)
        self.page = self.here * self.kv.page_bytes(self.own)
        self.page_of_all, self.sink_of_all = self.kv.page_bytes(spec), self.kv.window_page_bytes(spec)
        self.held = cache(self._held)
        self.scratch = cache(self._scratch)
        self.checkpoint = cache(self._checkpoint)
        self.store = cache(self._store)

    def draft(self, choice: Choice) -> Draft:
        return _Budget(self, choice).draft()

    def _held(self, apart: bool) -> list[int]:
        """Weights on each device. `apart`: the embedding is not."""
        weights = self.weights.without_embedding() if apart else self.weights
        if self.one_memory:
            return [weights.on_device(self.target, self.ranks)]
        return [weights.of_rank(rank, self.ranks) for rank in range(self.ranks)]

    def _scratch(self, chunk: int, slots: int) -> tuple[list[int], list[int]]:
        """Activations and scratch, and gaps in torch's allocator, on each device."""
        of = (self.kv, chunk, slots, self.target, self.plain)
        shares = [of_rank(self.spec, rank, self.ranks) for rank in range(self.ranks)]
        shares[0] = replace(shares[0], vocab=self.spec.vocab)  # it has all logits
        scratch = [scratch_bytes(own, *of) for own in shares]
        if not self.target.has_cards:
            return [sum(scratch)], [0]
        return scratch, [gap_bytes(own, *of) for own in shares]

    def _checkpoint(self, state_dtype: StateDtype) -> int:
        if self.here == 1:
            return checkpoint_bytes(self.spec, self.kv, state_dtype, self.target)
        return self.here * checkpoint_bytes(self.own, self.kv, state_dtype, self.target)  # each keeps the last hidden

    def _store(self, state_dtype: StateDtype, host_cache: int) -> StoreSizes:
        """Of a card's rank, or of a CPU."""
        if self.one_memory:
            return StoreSizes.of(self.spec, self.kv, self.target, self.checkpoint(state_dtype), host_cache)
        record = checkpoint_bytes(self.own, self.kv, state_dtype, self.target)
        return StoreSizes.of(self.own, self.kv, self.target, record, host_cache // self.ranks)


class _Budget:
    """The sums for one choice."""

    def __init__(self, case: Case, choice: Choice):
        self.case, self.choice, self.wishes = case, choice, case.wishes
        self.one_memory, self.target = case.one_memory, case.target
        self.embedding = case.weights.embedding if choice.embedding == "host" else 0
        self.tower = None
        if case.spec.vision is not None and choice.vision is not None:
            self.tower = TowerPlan(case.spec.vision, choice.vision, case.image_tokens, case.weights.vision, case.target)

    def draft(self) -> Draft:
        case, target = self.case, self.target
        fixed = self._device_rows() + self._host_rows() + (self.tower.rows() if self.tower else ())
        asked_cache = self.wishes.host_cache or 0
        forced = must(case.parts, target)
        # all else is as much on one card as on another, so the one that has least left decides
        taken = [total_on(fixed, "device", card) for card in range(len(case.usable))]
        most, fixed_bytes = min(zip(case.usable, taken, strict=True), key=lambda card: card[0] - card[1])
        need = fixed_bytes + forced
        need += asked_cache + total_on(fixed, "host") if self.one_memory else 0
        context = self.wishes.context or self._longest_context(most - need)
        least = pages_for(context)
        need += least * case.page
        host_need = need if self.one_memory else total_on(fixed, "host") + self._cache_bytes(asked_cache)
        spared = SPARED if case.parts else 0
        placed = place(case.parts, target, case.ranks, most - need - spared, case.host_usable - host_need)
        apart = sum(part.device for part in placed) - forced
        host_need += sum(part.host for part in placed)
        cache = self._host_cache(case.host_usable - host_need - (apart if self.one_memory else 0))
        extra_cache = self._cache_bytes(cache) - self._cache_bytes(asked_cache)
        left = most - need - apart - (extra_cache if self.one_memory else 0)
        more = self._more_pages(left - spared, context)
        of_parts = (row for part in placed for row in part_rows(part))
        rows = (*fixed, *of_parts, *self._page_rows(context, least, more), self._cache_row(cache))
        room = left - more * case.page
        host_room = room if self.one_memory else case.host_usable - host_need - extra_cache
        return Draft(
            self._plan(context, least + more, cache, rows, placed),
            room,
            host_room,
            need + (more * case.page if isinstance(self.wishes.pool, int) else 0),
            host_need,
            self._store(cache).checkpoints,
            (least + more) * PAGE < self.choice.slots * min(AGENT_CONTEXT, context),
        )

    def _device_rows(self) -> tuple[PlanRow, ...]:
        case, choice, ranks = self.case, self.choice, self.case.ranks
        slots = choice.slots
        scratch, gaps = case.scratch(choice.chunk, slots)
        form = (
            f"decoded at load, linears {CPU_LINEAR_BYTES} bytes a value" + (f", in {ranks} parts" if ranks > 1 else "")
            if self.one_memory
            else "as stored" + (f", 1/{ranks} of it" if ranks > 1 else "")
        )
        form += ", draft layer included" if case.spec.drafting else ""
        rows = [_on_cards("weights", case.held(self.embedding > 0), form, "load")]
        if case.live:
            note = f"{slots} x {case.live / 1e6:.1f} MB, fp32 live state + conv columns"
            rows.append(PlanRow("recurrent states", "device", slots * case.live, note, "slots"))
        if case.window:
            pages = case.kv.ring_pages
            note = f"{slots} x {case.window / 1e6:.1f} MB, {pages} ring pages + 1 sink page in 16 bit"
            rows.append(PlanRow("KV windows and sinks", "device", slots * case.window, note, "slots"))
        rows.append(_on_cards("activations and scratch", scratch, f"chunk {choice.chunk}, any context"))
        if self.wishes.drafts:
            note = f"what states go on by, for {slots} + {MOST_DRAFTS} tokens of a step; one row's states"
            rows.append(PlanRow("drafts", "device", drafted_bytes(case.own, slots, self.target), note))
        asked, staged = self.wishes.host_cache, choice.staged
        if staged is not None and (asked is None or self._store(asked).blocks):
            staging = staged * self._store(0).place_bytes
            rows.append(PlanRow("checkpoint staging", "device", staging, f"{staged} on their way to the host"))
        if self.target.has_cards:
            note = "estimate: a third of what a step allocates"
            rows.append(_on_cards("gaps in torch's allocator", gaps, note))
        overheads = self.target.overheads
        if ranks > 1:
            times = ranks - 1 if self.one_memory else 1
            overheads += tuple(replace(o, bytes=times * o.bytes) for o in self.target.group_overheads)
        return (*rows, *(PlanRow(o.name, "device", o.bytes, o.note) for o in overheads))

    def _host_rows(self) -> tuple[PlanRow, ...]:
        if self.one_memory:
            return ()
        ranks = self.case.ranks
        runtime = self.target.server_host_bytes + ranks * self.target.card_host_bytes
        rows = [PlanRow("server and engine processes", "host", runtime, f"estimate: torch with CUDA, {ranks} x")]
        if ranks > 1:
            size = exchange_bytes(self.case.spec, ranks)
            rows.append(PlanRow("exchange between cards", "host", size, "pinned: sums, logits, tokens (estimate)"))
        if self.embedding:
            read = self.embedding / self.case.spec.vocab
            a_chunk = self.choice.chunk * read / ROWS_BANDWIDTH
            note = f"pinned, read there: {read / 1e3:.1f} KB a token, {a_chunk * 1e3:.1f} ms a chunk (estimate)"
            rows.append(PlanRow("embedding", "host", self.embedding, note, "load"))
        return tuple(rows)

    def _longest_context(self, left: int) -> int:
        """The model's maximum, or the multiple of 64 that fits in three quarters of the room (the rest: host cache)."""
        limit = min(self.case.spec.max_positions, self.choice.most_context or self.case.spec.max_positions)
        if isinstance(self.wishes.pool, int):
            limit = min(limit, self.wishes.pool)
        room = max(0, left) * 3 // 4 if self.one_memory else max(0, left)
        fitting = room // self.case.page * PAGE
        return min(limit, max(fitting, LEAST_CONTEXT))

    def _host_cache(self, host_left: int) -> int:
        if self.wishes.host_cache is not None:
            return self.wishes.host_cache
        most, share = self.target.defaults.host_cache, self.target.defaults.host_cache_share
        limit = max(0, min(most, int(self.case.machine.ram * share), host_left // 2))
        ranks = self.case.ranks
        cache = limit if self.one_memory else ranks * fitting(limit // ranks)
        return cache if self._store(cache).blocks else 0

    def _store(self, cache: int) -> StoreSizes:
        return self.case.store(self.choice.state_dtype, cache)

    def _cache_bytes(self, cache: int) -> int:
        """What the host gives for it."""
        return cache if self.one_memory else self.case.ranks * self._store(cache).pinned_bytes

    def _more_pages(self, left: int, context: int) -> int:
        """Beyond one full request: what was asked for, whether it fits or not; else at most what fits."""
        least, pool = pages_for(context), self.wishes.pool
        if isinstance(pool, int):
            return max(0, pages_for(pool) - least)
        fitting = max(0, left // self.case.page)
        return fitting if pool == "all" else min(fitting, self._optional_pages(left, context))

    def _optional_pages(self, left: int, context: int) -> int:
        """A slot gets pages for an agent's turn; half of what is left then makes slots full."""
        least, slots = pages_for(context), self.choice.slots
        for_turns = max(0, slots * pages_for(min(AGENT_CONTEXT, context)) - least)
        half = int(max(0, left) * POOL_SHARE) // self.case.page
        return min((slots - 1) * least, max(for_turns, half))

    def _page_rows(self, context: int, least: int, more: int) -> tuple[PlanRow, ...]:
        page = self.case.page
        each = f"{self.case.kv.codec}, {page / PAGE / 1024:.2f} KiB a token"
        what = f"{least} pages, {context} tokens, {each}"
        one = PlanRow("KV pages, one full request", "device", least * page, what, "pages")
        note = f"{more} pages, {(least + more) / least:.1f} full requests in all"
        return (one, PlanRow("KV pages, further", "device", more * page, note, "pages")) if more else (one,)

    def _cache_row(self, cache: int) -> PlanRow:
        each = f"{self.case.checkpoint(self.choice.state_dtype) / 1e6:.1f} MB"
        count = self._store(cache).checkpoints
        note = f"room for {count} checkpoints of {each}, or demoted pages" + ("" if self.one_memory else "; pinned")
        if not count:
            note = f"too little for a checkpoint of {each}: no prefix is kept"
        return PlanRow("prefix cache store", "host", self._cache_bytes(cache), note, "cache")

    def _plan(
        self, context: int, pages: int, cache: int, rows: tuple[PlanRow, ...], placed: tuple[Placed, ...]
    ) -> Plan:
        case, choice = self.case, self.choice
        return Plan(
            spec=case.spec,
            kv=case.kv,
            target=self.target,
            device_names=tuple(d.name for d in case.machine.devices),
            device_bytes=tuple(d.bytes for d in case.machine.devices),
            context=context,
            pages=pages,
            slots=choice.slots,
            chunk=choice.chunk,
            state_dtype=choice.state_dtype,
            rotation=self.wishes.rotation,
            host_cache=cache,
            checkpoint_bytes=case.checkpoint(choice.state_dtype),
            sink_bytes=case.sink_of_all,
            page_bytes=case.page_of_all,
            rows=rows,
            placed=placed,
            staged=choice.staged,
            embedding=choice.embedding,
            reserve=case.reserve,
            vision=choice.vision if self.tower else None,
            image_tokens=self.tower.tokens if self.tower else 0,
            image_store=self.tower.store_tokens if self.tower else 0,
            pixel_bytes=self.tower.pixel_bytes if self.tower else 0,
            vision_tower=self.wishes.vision_tower if self.tower else None,
            ranks=case.ranks,
            drafts=self.wishes.drafts,
        )


def _on_cards(name: str, counts: Sequence[int], note: str, meter: Meter | None = None) -> PlanRow:
    """A row of so many bytes on each device."""
    cards = tuple(counts) if len({*counts}) > 1 else ()
    return PlanRow(name, "device", max(counts), note, meter, cards)
