"""draft: model + machine + wishes -> a Plan, and what is left over or missing. Pure arithmetic, nothing allocated.

Order of the decisions: what must be there (weights, slots, scratch, runtime, one request of the full length, the
checkpoint store) is added up first; memory left over becomes more KV pages, up to a full context for every slot.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from kakera.arch.shard import can_share, of_rank
from kakera.arch.spec import ModelSpec
from kakera.contract.grid import PAGE, pages_for
from kakera.errors import UsageError
from kakera.plan.kv_format import KvFormat
from kakera.plan.placement import must, part_rows, place
from kakera.plan.plan import Place, Plan, PlanRow, Wishes
from kakera.plan.sizes import (
    checkpoint_bytes,
    gap_bytes,
    live_state_bytes,
    margin,
    scratch_bytes,
)
from kakera.plan.store_sizes import StoreSizes, fitting
from kakera.plan.weights import CPU_LINEAR_BYTES, Placed, WeightBytes
from kakera.target.devices import Machine
from kakera.target.kernels import serves_attention

SLOT_CHOICES = (8, 4, 2, 1)
AGENT_CONTEXT = 65536  # coding agents send 50K-200K tokens a turn: below this, fewer slots beat a shorter context
LEAST_CONTEXT = 4096  # kakera does not choose less on its own; --context may
TIGHT = 200 * 10**6  # less than this beyond the margin deserves a warning
POOL_SHARE = 0.5  # of the memory left over that becomes KV pages beyond one full request


@dataclass(frozen=True)
class Draft:
    """A plan that may not fit. `room` is what is left per device, `host_room` on the host; negative = missing.

    `need` and `host_need` are the bytes that can not be done without; on a CPU they are one and the same sum.
    """

    plan: Plan
    room: int
    host_room: int
    need: int
    host_need: int

    @property
    def fits(self) -> bool:
        return self.room >= 0 and self.host_room >= 0


def draft(spec: ModelSpec, wishes: Wishes, machine: Machine, weights: WeightBytes) -> Draft:
    """Fill in what was not asked for. Of the slot counts, the first that leaves room for an agent's context wins."""
    check(spec, wishes, machine)
    machine = _usable_devices(spec, wishes, machine)
    if wishes.max_running is not None:
        return _Budget(spec, wishes, machine, weights, wishes.max_running).draft()
    drafts = [_Budget(spec, wishes, machine, weights, slots).draft() for slots in SLOT_CHOICES]
    fitting = [d for d in drafts if d.fits]
    if not fitting:
        return drafts[-1]
    enough = min(wishes.context or AGENT_CONTEXT, spec.max_positions)
    return next((d for d in fitting if d.plan.context >= enough), max(fitting, key=lambda d: d.plan.context))


def check(spec: ModelSpec, wishes: Wishes, machine: Machine) -> None:
    """Refuse at start what could only fail later. Raises UsageError."""
    if wishes.kv not in ("fp32", "bf16", "int2"):
        raise UsageError(f"--kv {wishes.kv}: unknown KV codec; choose fp32, bf16 or int2")
    kv_format(spec, wishes).check(spec.head_dim)
    if wishes.kv_window % PAGE:
        raise UsageError(f"--kv-window {wishes.kv_window}: must be a multiple of {PAGE} tokens")
    if wishes.context is not None and not 1 < wishes.context <= spec.max_positions:
        raise UsageError(f"--context {wishes.context}: this model takes 2 to {spec.max_positions} tokens")
    if wishes.max_running is not None and wishes.max_running < 1:
        raise UsageError(f"--max-running {wishes.max_running}: at least one request must run")
    if wishes.chunk is not None and (wishes.chunk < PAGE or wishes.chunk % PAGE):
        raise UsageError(f"--chunk {wishes.chunk}: must be a multiple of {PAGE} tokens")
    if wishes.state_dtype not in (None, "fp32", "fp16"):
        raise UsageError(f"--state-dtype {wishes.state_dtype}: choose fp32 or fp16")
    if wishes.host_cache is not None and wishes.host_cache < 0:
        raise UsageError(f"--host-cache {wishes.host_cache}: must not be negative")
    if wishes.gpus != "auto" and not can_share(spec, len(machine.devices)):
        raise UsageError(
            f"{len(machine.devices)} cards can not share {spec.kv_heads} KV heads evenly; "
            f"this model runs on {', '.join(str(n) for n in range(1, spec.kv_heads + 1) if can_share(spec, n))} cards"
        )


def kv_format(spec: ModelSpec, wishes: Wishes) -> KvFormat:
    group = wishes.kv_group if wishes.kv_group is not None else min(256, spec.head_dim)
    return KvFormat(wishes.kv, group=group, window_pages=wishes.kv_window // PAGE)  # type: ignore[arg-type]


def cautions(plan: Plan, machine: Machine) -> tuple[str, ...]:
    """What a person should know about a plan that fits: who else holds memory, and how little is to spare."""
    found = list(machine.warnings)
    if plan.host_cache and not StoreSizes.of_plan(plan).checkpoints:
        found.append(
            f"--host-cache {plan.host_cache / 1e6:.0f} MB holds no checkpoint of {plan.checkpoint_bytes / 1e6:.1f} MB "
            "with its sink: every turn computes its whole prompt; give it more, or 0"
        )
    smallest = min(machine.devices, key=lambda d: d.bytes - d.used)
    taken = plan.total("device") + (plan.total("host") if plan.target.one_memory else 0)
    spare = smallest.bytes - smallest.used - margin(smallest.bytes) - taken
    if spare >= TIGHT:
        return tuple(found)
    line = (
        f"only {spare / 1e6:.0f} MB to spare beyond the {margin(smallest.bytes) / 1e6:.0f} MB that stay free: "
        f"another program that takes memory on {smallest.name} will make it slow; lower --context or --max-running"
    )
    return (*found, line)


def _usable_devices(spec: ModelSpec, wishes: Wishes, machine: Machine) -> Machine:
    """`auto` takes as many cards as can share the heads; cards that were named are all used."""
    if wishes.gpus != "auto":
        return machine
    count = max(n for n in range(1, len(machine.devices) + 1) if can_share(spec, n))
    return replace(machine, devices=machine.devices[:count])


class _Budget:
    """The sums for one choice of slots. Sizes are per device; the smallest device decides."""

    def __init__(self, spec: ModelSpec, wishes: Wishes, machine: Machine, weights: WeightBytes, slots: int):
        self.spec, self.wishes, self.machine, self.weights, self.slots = spec, wishes, machine, weights, slots
        self.kv = kv_format(spec, wishes)
        self.ranks = len(machine.devices)
        self.own = of_rank(spec, self.ranks - 1, self.ranks)  # what one device computes with; none has more
        self.target, self.one_memory = machine.target, machine.target.one_memory
        self.chunk = wishes.chunk or self.target.defaults.chunk
        self.state_dtype = wishes.state_dtype or self.target.defaults.state_dtype
        self.page = self.kv.page_bytes(self.own)
        self.checkpoint = checkpoint_bytes(spec, self.kv, self.state_dtype, self.target)
        smallest = min(machine.devices, key=lambda d: d.bytes - d.used)
        self.usable = smallest.bytes - smallest.used - margin(smallest.bytes)
        self.host_usable = self.usable if self.one_memory else machine.ram - machine.ram_used - margin(machine.ram)

    def draft(self) -> Draft:
        fixed = self._device_rows() + self._host_rows()
        asked_cache = self.wishes.host_cache or 0
        parts, target = self.weights.parts, self.target
        forced = must(parts, target)
        need = _total(fixed, "device") + forced + (asked_cache if self.one_memory else 0)
        context = self.wishes.context or self._longest_context(self.usable - need)
        least = pages_for(context)
        need += least * self.page
        host_need = need if self.one_memory else _total(fixed, "host") + self._cache_bytes(asked_cache)
        spared = TIGHT if parts else 0  # what is placed last would else take all up to a warning
        placed = place(parts, target, self.ranks, self.usable - need - spared, self.host_usable - host_need)
        apart = sum(part.device for part in placed) - forced
        host_need += sum(part.host for part in placed)
        cache = self._host_cache(self.host_usable - host_need - (apart if self.one_memory else 0))
        extra_cache = self._cache_bytes(cache) - self._cache_bytes(asked_cache)
        left = self.usable - need - apart - (extra_cache if self.one_memory else 0)
        more = self._more_pages(left - spared, context)
        of_parts = (row for part in placed for row in part_rows(part))
        rows = (*fixed, *of_parts, *self._page_rows(context, least, more), self._cache_row(cache))
        room = left - more * self.page
        host_room = room if self.one_memory else self.host_usable - host_need - extra_cache
        return Draft(self._plan(context, least + more, cache, rows, placed), room, host_room, need, host_need)

    def _device_rows(self) -> tuple[PlanRow, ...]:
        spec, ranks = self.own, self.ranks
        live = live_state_bytes(spec, self.target)
        window = self.kv.slot_bytes(spec)
        turned = self.wishes.rotation is not None  # whatever is in the file
        served = serves_attention(spec.head_dim, spec.rotary_dim, self.kv, turned, self.target.dtype)
        plain = self.target.has_cards and not served
        scratch = scratch_bytes(spec, self.kv, self.chunk, self.slots, self.target, plain)
        form = (
            f"decoded at load, linears {CPU_LINEAR_BYTES} bytes a value"
            if self.one_memory
            else "as stored" + (f", 1/{ranks} of it" if ranks > 1 else "")
        )
        rows = [PlanRow("weights", "device", self.weights.on_device(self.target, ranks), form, "load")]
        if live:
            note = f"{self.slots} x {live / 1e6:.1f} MB, fp32 live state + conv columns"
            rows.append(PlanRow("recurrent states", "device", self.slots * live, note, "slots"))
        if window:
            note = f"{self.slots} x {window / 1e6:.1f} MB, {self.kv.ring_pages} ring pages + 1 sink page in 16 bit"
            rows.append(PlanRow("KV windows and sinks", "device", self.slots * window, note, "slots"))
        rows.append(PlanRow("activations and scratch", "device", scratch, f"chunk {self.chunk}, any context"))
        asked, staged = self.wishes.host_cache, self.target.staged
        if staged is not None and (asked is None or self._store(asked).blocks):
            staging = staged * self._store(0).place_bytes // ranks
            rows.append(PlanRow("checkpoint staging", "device", staging, f"{staged} on their way to the host"))
        if self.target.has_cards:
            gaps = gap_bytes(spec, self.kv, self.chunk, self.slots, self.target, plain)
            note = "estimate: a third of what a step allocates"
            rows.append(PlanRow("gaps in torch's allocator", "device", gaps, note))
        overheads = self.target.overheads + (self.target.group_overheads if ranks > 1 else ())
        return (*rows, *(PlanRow(o.name, "device", o.bytes, o.note) for o in overheads))

    def _host_rows(self) -> tuple[PlanRow, ...]:
        if self.one_memory:
            return ()
        runtime = self.target.server_host_bytes + self.ranks * self.target.card_host_bytes
        return (PlanRow("server and engine processes", "host", runtime, f"estimate: torch with CUDA, {self.ranks} x"),)

    def _longest_context(self, left: int) -> int:
        """The model's maximum, or the multiple of 64 that fits in three quarters of the room (the rest: host cache)."""
        limit = self.spec.max_positions
        room = max(0, left) * 3 // 4 if self.one_memory else max(0, left)
        fitting = room // self.page * PAGE
        return min(limit, max(fitting, LEAST_CONTEXT))

    def _host_cache(self, host_left: int) -> int:
        if self.wishes.host_cache is not None:
            return self.wishes.host_cache
        most, share = self.target.defaults.host_cache, self.target.defaults.host_cache_share
        limit = max(0, min(most, int(self.machine.ram * share), host_left // 2))
        cache = limit if self.one_memory else fitting(limit)
        return cache if self._store(cache).blocks else 0

    def _store(self, cache: int) -> StoreSizes:
        return StoreSizes.of(self.spec, self.kv, self.target, self.checkpoint, cache)

    def _cache_bytes(self, cache: int) -> int:
        """What the host gives for it."""
        return cache if self.one_memory else self._store(cache).pinned_bytes

    def _more_pages(self, left: int, context: int) -> int:
        wanted = (self.slots - 1) * pages_for(context)
        return max(0, min(wanted, int(left * POOL_SHARE) // self.page))

    def _page_rows(self, context: int, least: int, more: int) -> tuple[PlanRow, ...]:
        each = f"{self.kv.codec}, {self.kv.token_bytes(self.own) / 1024:.2f} KiB a token"
        what = f"{least} pages, {context} tokens, {each}"
        one = PlanRow("KV pages, one full request", "device", least * self.page, what, "pages")
        note = f"{more} pages from half of the memory left over, {(least + more) / least:.1f} full requests in all"
        return (one, PlanRow("KV pages, further", "device", more * self.page, note, "pages")) if more else (one,)

    def _cache_row(self, cache: int) -> PlanRow:
        each = f"{self.checkpoint / 1e6:.1f} MB"
        count = self._store(cache).checkpoints
        note = f"room for {count} checkpoints of {each}, or demoted pages" + ("" if self.one_memory else "; pinned")
        if not count:
            note = f"too little for a checkpoint of {each}: no prefix is kept"
        return PlanRow("prefix cache store", "host", self._cache_bytes(cache), note, "cache")

    def _plan(
        self, context: int, pages: int, cache: int, rows: tuple[PlanRow, ...], placed: tuple[Placed, ...]
    ) -> Plan:
        return Plan(
            spec=self.spec,
            kv=self.kv,
            target=self.target,
            device_names=tuple(d.name for d in self.machine.devices),
            device_bytes=tuple(d.bytes for d in self.machine.devices),
            context=context,
            pages=pages,
            slots=self.slots,
            chunk=self.chunk,
            state_dtype=self.state_dtype,
            rotation=self.wishes.rotation,
            host_cache=cache,
            checkpoint_bytes=self.checkpoint,
            sink_bytes=self.kv.window_page_bytes(self.spec),
            page_bytes=self.kv.page_bytes(self.spec),
            rows=rows,
            placed=placed,
        )


def _total(rows: tuple[PlanRow, ...], place: Place) -> int:
    return sum(row.bytes for row in rows if row.place == place)
