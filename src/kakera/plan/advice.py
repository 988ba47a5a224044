"""What to change when a plan does not fit: every candidate is planned again, and only what really fits is named."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

from kakera.contract.grid import PAGE
from kakera.plan.budget import LEAST_CONTEXT, Draft
from kakera.plan.plan import Wishes
from kakera.plan.search import LEAST_CHUNK, draft, tightest
from kakera.plan.sizes import MARGIN_SHARE, margin
from kakera.plan.table import as_text, gigabytes, memory_of, to_json
from kakera.plan.weights import WeightBytes
from kakera.target.devices import Device, Machine
from kakera.target.target import CUDA, Target

WAYS = 3
OF_OPTIONS = 2  # of those, sets of options at most: the next is a shorter context, then hardware
SMALL_CHUNKS = {512: 6, 256: 12}  # cost of a chunk; larger ones cost 2
ADDED = 64 * 2**20  # bytes by which two changes together may give more than one and the other
USUAL_WINDOW = 256  # tokens, the default
LEAST_RESERVE_MB = 100
MOST_GB = 4096  # of a card that is looked for


@dataclass(frozen=True)
class Way:
    """A change that makes the plan fit, in words, and the bytes gained per device and on the host. `shared`: by several
    cards, which can be planned and not served yet."""

    text: str
    gained: int
    host_gained: int = 0
    shared: bool = False


@dataclass(frozen=True)
class _Change:
    """One option at one level. `cost`: to the user, to compare; sums are those of changes together."""

    option: str
    field: str
    value: Any
    cost: int = 0


@dataclass(frozen=True)
class _Case:
    failed: Draft
    wishes: Wishes
    machine: Machine
    weights: WeightBytes

    def retry(self, *changes: _Change, machine: Machine | None = None) -> Draft:
        return draft(self.failed.plan.spec, self._changed(changes), machine or self.machine, self.weights)

    def tightest(self, *changes: _Change, machine: Machine | None = None) -> Draft:
        """Whether it fits at all, at a hundredth of the time."""
        return tightest(self.failed.plan.spec, self._changed(changes), machine or self.machine, self.weights)

    def _changed(self, changes: Iterable[_Change]) -> Wishes:
        return replace(self.wishes, **{change.field: change.value for change in changes})


def refusal(failed: Draft, wishes: Wishes, machine: Machine, weights: WeightBytes) -> tuple[str, dict[str, Any]]:
    """The text of PlanRefused, and the same as data for JSON."""
    ways = find_ways(failed, wishes, machine, weights)
    lines = [verdict(failed), "", as_text(failed.plan, machine), "", "Cheapest ways to make it fit:"]
    lines += [f"  {i}. {_describe(way, failed.plan.target)}" for i, way in enumerate(ways, 1)]
    if any(way.shared for way in ways):
        lines += ["", "kakera computes on one card so far: what several will hold is planned, and not served yet."]
    data = {
        **to_json(failed.plan, machine),
        "fits": False,
        "reason": verdict(failed),
        "missing_bytes": {"device": max(0, -failed.room), "host": max(0, -failed.host_room)},
        "ways": [{"change": w.text, "device_bytes": w.gained, "host_bytes": w.host_gained} for w in ways],
    }
    return "\n".join(lines), data


def verdict(failed: Draft) -> str:
    """One sentence: what does not fit, and by how much."""
    plan = failed.plan
    if plan.target.one_memory:
        where, missing = f"in {memory_of(plan)}", -failed.room
    elif failed.room < 0:
        each = " per card" if len(plan.device_names) > 1 else ""
        where, missing = f"on {' + '.join(plan.device_names)}{each}", -failed.room
    else:
        where, missing = "in the host's memory", -failed.host_room
    return f"The plan does not fit {where}: {gigabytes(missing)} too much for a context of {plan.context} tokens."


def _describe(way: Way, target: Target) -> str:
    where = "" if target.one_memory else " per card"
    parts = [_change(way.gained) + where] if way.gained else []
    parts += [_change(way.host_gained) + " on the host"] if way.host_gained and not target.one_memory else []
    return f"{way.text}   ({', '.join(parts)})"


def _change(gained: int) -> str:
    return f"{'gains' if gained > 0 else 'costs'} {gigabytes(abs(gained))}"


def find_ways(failed: Draft, wishes: Wishes, machine: Machine, weights: WeightBytes) -> list[Way]:
    """At most three: the cheapest changes of options, single or together; a shorter context; then hardware."""
    case = _Case(failed, wishes, machine, weights)
    options = list(_options(failed, wishes))
    ways = [_way(case, _text(found), case.tightest(*found)) for found in _cheapest(case, options, [], OF_OPTIONS)]
    ways += _shorter_context(case, options)
    return (ways + _hardware(case))[:WAYS]


def _options(failed: Draft, wishes: Wishes) -> Iterator[list[_Change]]:
    """What was asked for and can be less, each from mild to strong. What was not asked for is as small as it goes."""
    plan = failed.plan
    if wishes.embedding == "device" and not plan.target.one_memory and not plan.spec.tied:
        yield [_Change("--embedding host", "embedding", "host", 1)]
    if wishes.vision == "device" and not plan.target.one_memory:
        yield [_Change("--vision host", "vision", "host", 1), _Change("--vision off", "vision", "off", 9)]
    elif wishes.vision in ("device", "host"):
        yield [_Change("--vision off", "vision", "off", 9)]
    if (wishes.staging or 1) > 1:
        yield [_Change("--staging 1", "staging", 1, 1)]
    if plan.host_cache:
        sizes = [(wishes.host_cache or 0) >> n for n in range(1, 64)]
        # less than a checkpoint is no cache at all
        steps = [size // 2**20 * 2**20 for size in sizes if size >= plan.checkpoint_bytes + plan.sink_bytes + 2**20]
        smaller = [
            _Change(f"--host-cache {size // 2**20}MiB", "host_cache", size, n) for n, size in enumerate(steps, 1)
        ]
        yield [*smaller, _Change("--host-cache 0MiB", "host_cache", 0, 10 + len(steps))]
    if wishes.state_dtype == "fp32":
        yield [_Change("--state-dtype fp16", "state_dtype", "fp16", 2)]
    if wishes.reserve:
        halves = [half for n in range(1, 64) if (half := (wishes.reserve >> n) // 10**6) >= LEAST_RESERVE_MB]
        less = [_Change(f"--reserve {half}MB", "reserve", half * 10**6, 4 + n) for n, half in enumerate(halves, 1)]
        yield [*less, _Change("--reserve 0", "reserve", 0, 7 + len(less))]
    if wishes.pool is not None:
        yield [_Change("without --pool", "pool", None, 2)]
    if wishes.chunk is not None:
        sizes = [size for n in range(1, 14) if (size := (plan.chunk >> n) // PAGE * PAGE) >= LEAST_CHUNK]
        if sizes:
            yield [
                _Change(f"--chunk {size}", "chunk", size, SMALL_CHUNKS.get(size, 2) + n) for n, size in enumerate(sizes)
            ]
    if plan.kv.codec != "int2":
        yield [_Change("--kv int2", "kv", "int2", 6)]
    if wishes.kv_window > USUAL_WINDOW:
        yield [_Change(f"--kv-window {USUAL_WINDOW}", "kv_window", USUAL_WINDOW, 3)]
    if wishes.max_running is not None and plan.slots > 1:
        fewer = [plan.slots >> n for n in range(1, plan.slots.bit_length())]
        yield [_Change(f"--max-running {n}", "max_running", n, 8 * i) for i, n in enumerate(fewer, 1)]


def _cheapest(case: _Case, options: list[list[_Change]], always: list[_Change], most: int) -> list[tuple[_Change, ...]]:
    """Up to `most` sets of changes that make it fit together with `always`, cheapest first; none contains another.

    What each gives alone is added up to pass over those that can not suffice, and the rest is planned.
    """
    start = case.tightest(*always)
    if not case.tightest(*always, *(levels[-1] for levels in options)).fits:
        return []
    alone = {change: case.tightest(*always, change) for levels in options for change in levels}
    gains = {change: (tried.room - start.room, tried.host_room - start.host_room) for change, tried in alone.items()}
    sets = (tuple(filter(None, each)) for each in product(*([None, *levels] for levels in options)))
    found: list[tuple[_Change, ...]] = []
    for changes in sorted(sets, key=lambda each: (sum(change.cost for change in each), len(each))):
        fields = {change.field for change in changes}
        if not changes or any({change.field for change in other} <= fields for other in found):
            continue
        room = start.room + sum(gains[change][0] for change in changes)
        host_room = start.host_room + sum(gains[change][1] for change in changes)
        if min(room, host_room) >= -ADDED and case.tightest(*always, *changes).fits:
            found.append(changes)
            if len(found) == most:
                break
    return found


def _shorter_context(case: _Case, options: list[list[_Change]]) -> list[Way]:
    """The longest context that fits, if it is one that anybody would want; with changes of options if it must be."""
    free = _Change("", "context", None)
    if case.tightest(free).fits:
        others: tuple[_Change, ...] = ()
    elif found := _cheapest(case, options, [free], 1):
        others = found[0]
    else:
        return []
    longest = case.retry(*others, free).plan.context
    if not min(LEAST_CONTEXT, case.failed.plan.context) <= longest < case.failed.plan.context:
        return []
    changes = (*others, _Change(f"--context {longest}", "context", longest))
    return [_way(case, _text(changes), case.tightest(*changes))] if case.retry(*changes).fits else []


def _text(changes: Iterable[_Change]) -> str:
    return " ".join(change.option for change in changes)


def _hardware(case: _Case) -> list[Way]:
    """Larger or more cards of the same kind; more memory, or cards instead of the CPU."""
    failed, machine = case.failed, case.machine
    memory = _capacity(machine.ram_used + failed.host_need)
    if failed.plan.target.one_memory:
        memory = _capacity(machine.ram_used + failed.host_need + failed.plan.reserve)
        whole = failed.plan.device_names == ("cpu",)
        more = f"a machine with at least {memory} GB of memory" if whole else f"more memory: --gpus cpu:{memory}GB"
        counts = [count for count in (1, 2) if case.weights.sharable(failed.plan.spec, count)]
        cards = [way for count in counts for way in _cards_way(case, count)]
        return [Way(more, -failed.room), *cards]
    if failed.room >= 0:
        larger = _cards_way(case, len(machine.devices)) if failed.plan.placed else []
        return [
            Way(f"a machine with at least {memory} GB of memory", 0, -failed.host_room),
            *larger,
            *_more_cards(case),
        ]
    ways = [*_cards_way(case, len(machine.devices)), *_more_cards(case)]
    if ways:
        return ways
    size = _capacity(failed.need + failed.plan.reserve + max(d.used for d in machine.devices))
    names = ",".join(d.name for d in _cards(len(machine.devices), size))
    gained = size * 10**9 - min(d.bytes for d in machine.devices)
    text = f"larger cards (--gpus {names}) in a machine with at least {memory} GB of memory"
    return [Way(text, gained, max(0, -failed.host_room))]


def _more_cards(case: _Case) -> list[Way]:
    devices, spec, ways = case.machine.devices, case.failed.plan.spec, []
    for count in range(len(devices) + 1, spec.kv_heads + 1):
        more = replace(case.machine, devices=tuple(devices[i % len(devices)] for i in range(count)))
        if case.weights.sharable(spec, count) and case.retry(machine=more).fits:
            way = _way(case, f"{count} cards: --gpus {_names(more)}", case.tightest(machine=more))
            ways.append(replace(way, shared=True))
    return ways


def _cards_way(case: _Case, count: int) -> list[Way]:
    """The smallest cards that hold it."""
    one_memory = case.failed.plan.target.one_memory
    low, high = 0, MOST_GB  # GB
    while low + 1 < high:
        middle = (low + high) // 2
        fits = case.tightest(machine=_with_cards(case, count, middle)).fits
        low, high = (low, middle) if fits else (middle, high)
    machine = _with_cards(case, count, high)
    if high == MOST_GB or not case.retry(machine=machine).fits:
        return []
    if one_memory:
        what = "one NVIDIA card instead of the CPU" if count == 1 else f"{count} NVIDIA cards instead of the CPU"
        return [Way(f"{what}: --gpus {_names(machine)}", -case.failed.room, shared=count > 1)]
    what = "a larger card" if count == 1 else "larger cards"
    gained = high * 10**9 - min(d.bytes for d in case.machine.devices)
    return [Way(f"{what}: --gpus {_names(machine)}", gained, shared=count > 1)]


def _with_cards(case: _Case, count: int, size_gb: int) -> Machine:
    """As `--gpus` with sizes: nobody else uses them. On what holds a part of the host's memory, all of it counts."""
    return replace(case.machine, target=CUDA, devices=_cards(count, size_gb))


def _cards(count: int, size_gb: int) -> tuple[Device, ...]:
    return tuple(Device(f"{size_gb}GB", size_gb * 10**9) for _ in range(count))


def _names(machine: Machine) -> str:
    return ",".join(device.name for device in machine.devices)


def _capacity(need: int) -> int:
    """The least whole number of GB whose memory less the margin holds `need` bytes."""
    size = int(need / (1 - MARGIN_SHARE)) // 10**9
    while size * 10**9 - margin(size * 10**9) < need:
        size += 1
    return size


def _way(case: _Case, text: str, tried: Draft) -> Way:
    reserved = case.failed.plan.reserve - tried.plan.reserve
    return Way(text, case.failed.need - tried.need + reserved, case.failed.host_need - tried.host_need)
