"""What to change when a plan does not fit: every candidate is planned again, and only what really fits is named."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from kakera.arch.shard import can_share
from kakera.contract.grid import PAGE
from kakera.plan.budget import LEAST_CONTEXT, Draft, draft
from kakera.plan.plan import Wishes
from kakera.plan.sizes import margin
from kakera.plan.table import as_text, gigabytes, memory_of, to_json
from kakera.plan.weights import WeightBytes
from kakera.target.devices import Device, Machine
from kakera.target.target import CUDA, Target

WAYS = 3
LEAST_CHUNK = 256  # below this, prefill is bound by reading the weights again and again


@dataclass(frozen=True)
class Way:
    """A change that makes the plan fit, in words, and the bytes gained per device and on the host."""

    text: str
    gained: int
    host_gained: int = 0


@dataclass(frozen=True)
class _Change:
    """One option at one level."""

    option: str
    field: str
    value: Any


@dataclass(frozen=True)
class _Case:
    failed: Draft
    wishes: Wishes
    machine: Machine
    weights: WeightBytes

    def retry(self, *changes: _Change, machine: Machine | None = None) -> Draft:
        wishes = replace(self.wishes, **{change.field: change.value for change in changes})
        return draft(self.failed.plan.spec, wishes, machine or self.machine, self.weights)


def refusal(failed: Draft, wishes: Wishes, machine: Machine, weights: WeightBytes) -> tuple[str, dict[str, Any]]:
    """The text of PlanRefused, and the same as data for JSON."""
    ways = find_ways(failed, wishes, machine, weights)
    lines = [verdict(failed), "", as_text(failed.plan, machine), "", "Cheapest ways to make it fit:"]
    lines += [f"  {i}. {_describe(way, failed.plan.target)}" for i, way in enumerate(ways, 1)]
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
    """At most three: single options in the order of what they cost the user, then all together, then hardware."""
    case = _Case(failed, wishes, machine, weights)
    options = list(_options(failed, wishes))
    ways = [way for levels in options if (way := _first_level_that_fits(case, levels))]
    ways += _shorter_context(case)
    if not ways:
        ways += _together(case, [levels[-1] for levels in options])
    return (ways + _hardware(case))[:WAYS]


def _options(failed: Draft, wishes: Wishes) -> Iterator[list[_Change]]:
    """Options with a level left, cheapest for the user first; the levels of each from mild to strong."""
    plan = failed.plan
    if plan.host_cache:
        halves = (plan.host_cache >> n for n in range(1, plan.host_cache.bit_length()))
        # less than a checkpoint is no cache at all
        steps = [size // 2**20 * 2**20 for size in halves if size >= plan.checkpoint_bytes + plan.sink_bytes + 2**20]
        yield [_Change(f"--host-cache {size // 2**20}MiB", "host_cache", size) for size in (*steps, 0)]
    if plan.state_dtype == "fp32":
        yield [_Change("--state-dtype fp16", "state_dtype", "fp16")]
    if plan.kv.codec != "int2":
        yield [_Change("--kv int2", "kv", "int2")]
    chunks = [size for n in (1, 2, 3) if (size := plan.chunk >> n) >= LEAST_CHUNK and size % PAGE == 0]
    if chunks:
        yield [_Change(f"--chunk {chunk}", "chunk", chunk) for chunk in chunks]
    slots = [n for n in (plan.slots // 2, plan.slots // 4, 1) if 1 <= n < plan.slots]
    if wishes.max_running is not None and slots:
        yield [_Change(f"--max-running {n}", "max_running", n) for n in slots]


def _first_level_that_fits(case: _Case, levels: list[_Change]) -> Way | None:
    for change in levels:
        tried = case.retry(change)
        if tried.fits:
            return _way(case, change.option, tried)
    return None


def _shorter_context(case: _Case, *others: _Change) -> list[Way]:
    """The longest context that fits, if it is one that anybody would want."""
    longest = case.retry(*others, _Change("", "context", None)).plan.context
    if not min(LEAST_CONTEXT, case.failed.plan.context) <= longest < case.failed.plan.context:
        return []
    change = _Change(f"--context {longest}", "context", longest)
    tried = case.retry(*others, change)
    return [_way(case, " ".join(c.option for c in (*others, change)), tried)] if tried.fits else []


def _together(case: _Case, strongest: list[_Change]) -> list[Way]:
    """Options added one by one until they fit; with a shorter context if they do not suffice."""
    for count in range(2, len(strongest) + 1):
        tried = case.retry(*strongest[:count])
        if tried.fits:
            return [_way(case, " ".join(change.option for change in strongest[:count]), tried)]
    return _shorter_context(case, *strongest)


def _hardware(case: _Case) -> list[Way]:
    """Larger or more cards of the same kind; more memory, or cards instead of the CPU."""
    failed, machine = case.failed, case.machine
    memory = _capacity(machine.ram_used + failed.host_need)
    if failed.plan.target.one_memory:
        whole = failed.plan.device_names == ("cpu",)
        more = f"a machine with at least {memory} GB of memory" if whole else f"more memory: --gpus cpu:{memory}GB"
        return [Way(more, -failed.room), *_cards_instead(case)]
    used = max(d.used for d in machine.devices)
    if failed.room >= 0:
        apart = sum(placed.part.on_device(CUDA, len(machine.devices)) for placed in failed.plan.placed if placed.host)
        cards = _cards_way(case, len(machine.devices), _capacity(failed.need + apart + used)) if apart else []
        return [Way(f"a machine with at least {memory} GB of memory", 0, -failed.host_room), *cards, *_more_cards(case)]
    size = _capacity(failed.need + used)
    ways = [*_cards_way(case, len(machine.devices), size), *_more_cards(case)]
    if ways:
        return ways
    names = ",".join(d.name for d in _cards(len(machine.devices), size))
    gained = size * 10**9 - min(d.bytes for d in machine.devices)
    text = f"larger cards (--gpus {names}) in a machine with at least {memory} GB of memory"
    return [Way(text, gained, max(0, -failed.host_room))]


def _more_cards(case: _Case) -> list[Way]:
    devices, spec, ways = case.machine.devices, case.failed.plan.spec, []
    for count in range(len(devices) + 1, spec.kv_heads + 1):
        more = replace(case.machine, devices=tuple(devices[i % len(devices)] for i in range(count)))
        if can_share(spec, count) and (tried := case.retry(machine=more)).fits:
            ways.append(_way(case, f"{count} cards: --gpus {_names(more)}", tried))
    return ways


def _cards_instead(case: _Case) -> list[Way]:
    """One card or two that would hold the model which the CPU's memory can not."""
    ways = []
    for count in (1, 2):
        if not can_share(case.failed.plan.spec, count):
            continue
        huge = replace(case.machine, target=CUDA, devices=_cards(count, 1000))
        ways += _cards_way(case, count, _capacity(case.retry(_Change("", "max_running", 1), machine=huge).need))
    return ways


def _cards_way(case: _Case, count: int, size_gb: int) -> list[Way]:
    machine = replace(case.machine, target=CUDA, devices=_cards(count, size_gb))
    tried = case.retry(machine=machine)
    if not tried.fits:
        return []
    if case.failed.plan.target.one_memory:
        what = "one NVIDIA card instead of the CPU" if count == 1 else f"{count} NVIDIA cards instead of the CPU"
        return [Way(f"{what}: --gpus {_names(machine)}", -case.failed.room)]
    what = "a larger card" if count == 1 else "larger cards"
    return [Way(f"{what}: --gpus {_names(machine)}", size_gb * 10**9 - min(d.bytes for d in case.machine.devices))]


def _cards(count: int, size_gb: int) -> tuple[Device, ...]:
    return tuple(Device(f"{size_gb}GB", size_gb * 10**9) for _ in range(count))


def _names(machine: Machine) -> str:
    return ",".join(device.name for device in machine.devices)


def _capacity(need: int) -> int:
    """The least whole number of GB whose memory less the margin holds `need` bytes."""
    size = need // 10**9
    while size * 10**9 - margin(size * 10**9) < need:
        size += 1
    return size


def _way(case: _Case, text: str, tried: Draft) -> Way:
    return Way(text, case.failed.need - tried.need, case.failed.host_need - tried.host_need)
