"""Which choices there are, and which is best: slots, chunk, staging places, state dtype and the embedding's place are
searched together. Pure and deterministic.

The order of preference, the first that differs decides. What is left over after that goes into KV pages by half.

1. It fits.
2. The context, up to `ENOUGH`: agents send 50K-200K tokens a turn, and slots yield to that.
3. Slots, each of which gets pages for an agent's turn.
4. The context, up to the model's maximum.
5. A store that holds a checkpoint.
6. What costs least time: the largest chunk, then exact states, then staging places, then the embedding on the device,
   then a vision tower there.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import product

from kakera.arch.spec import ModelSpec
from kakera.contract.grid import PAGE
from kakera.errors import UsageError
from kakera.plan.asked import check
from kakera.plan.budget import AGENT_CONTEXT, Case, Choice, Draft
from kakera.plan.plan import Place, Wishes
from kakera.plan.weights import WeightBytes
from kakera.target.devices import Machine
from kakera.target.kernels import serves_host_rows
from kakera.target.target import StateDtype

ENOUGH = 200 * 1024  # tokens
SLOT_CHOICES = (8, 4, 2, 1)
LEAST_CHUNK = 256  # below this, prefill is bound by reading the weights again and again
# How much context kakera takes on its own with a chunk halved so many times. Of the 27B 2,048 to 1,024 gives 117 MB for
# 6 % of prefill, 512 gives 43 for 11 more, 256 gives 22 for 16 more.
HALVINGS = (None, None, AGENT_CONTEXT, AGENT_CONTEXT // 4)


def draft(spec: ModelSpec, wishes: Wishes, machine: Machine, weights: WeightBytes) -> Draft:
    """The best plan, or if none fits the one that lacks least. Raises UsageError for a wrong wish."""
    check(spec, wishes, machine, weights)
    if wishes.vision in ("device", "host") and not weights.vision:
        raise UsageError(f"--vision {wishes.vision}: {spec.blind or 'this checkpoint holds no vision tower'}")
    found = _best(spec, wishes, machine, weights)
    if not found.fits and wishes.vision == "auto" and weights.vision:  # better text alone than nothing
        blind = _best(spec, replace(wishes, vision="off"), machine, weights)
        return blind if blind.fits else found
    return found


def _best(spec: ModelSpec, wishes: Wishes, machine: Machine, weights: WeightBytes) -> Draft:
    case = Case(spec, wishes, usable_devices(spec, wishes, machine, weights), weights)
    first, *others = choices(case)
    easiest = case.draft(first)
    whole = easiest.fits and easiest.plan.context == (wishes.context or spec.max_positions)
    if whole and easiest.checkpoints and admits(case, easiest):
        return easiest  # nothing is preferred to it
    drafts = [easiest, *(case.draft(choice) for choice in others)]
    return max((found for found in drafts if admits(case, found)), key=preference)


def tightest(spec: ModelSpec, wishes: Wishes, machine: Machine, weights: WeightBytes) -> Draft:
    """With everything that kakera may choose as small as it goes: if this does not fit, nothing does."""
    case = Case(spec, wishes, usable_devices(spec, wishes, machine, weights), weights)
    *_, last = choices(case)
    least = (replace(last, embedding=place, most_context=None) for place in _places(case))
    return max((case.draft(choice) for choice in least), key=lambda d: (min(0, d.room) + min(0, d.host_room), d.room))


def usable_devices(spec: ModelSpec, wishes: Wishes, machine: Machine, weights: WeightBytes) -> Machine:
    """`auto` takes as many cards as can share the heads; cards that were named are all used."""
    if wishes.gpus != "auto":
        return machine
    count = max(n for n in range(1, len(machine.devices) + 1) if weights.sharable(spec, n))
    return replace(machine, devices=machine.devices[:count])


def preference(draft: Draft) -> tuple[bool | int | float, ...]:
    """Greater is better."""
    plan = draft.plan
    if not draft.fits:
        return (False, min(0, draft.room) + min(0, draft.host_room))
    towers = (plan.embedding == "device", plan.vision == "device")
    ease = (plan.chunk, plan.state_dtype == "fp32", plan.staged or 0, *towers)
    return (True, min(plan.context, ENOUGH), plan.slots, plan.context, draft.checkpoints > 0, *ease)


def admits(case: Case, found: Draft) -> bool:
    """Not a slot that would wait for pages, nor an embedding that takes the place of the store, if nobody asked."""
    asked, plan = case.wishes, found.plan
    starved = asked.max_running is None and plan.slots > 1 and found.starved
    robbed = asked.embedding == "auto" and plan.embedding == "host"
    return not starved and not (robbed and asked.host_cache is None and not found.checkpoints)


def choices(case: Case) -> Iterator[Choice]:
    asked = case.wishes
    slots = SLOT_CHOICES if asked.max_running is None else (asked.max_running,)
    beside = product(_staged(case), _state_dtypes(case), _places(case), _towers(case))
    levels = product(slots, _chunks(case), list(beside))
    return (
        Choice(n, chunk, staged, dtype, place, most, tower)
        for n, (chunk, most), (staged, dtype, place, tower) in levels
    )


def _chunks(case: Case) -> list[tuple[int, int | None]]:
    """Each with the context that kakera takes on its own with it: a small one is for what would not be served else."""
    if case.wishes.chunk is not None:
        return [(case.wishes.chunk, None)]
    sizes = [(case.target.defaults.chunk >> n, most) for n, most in enumerate(HALVINGS)]
    return [(size, most) for size, most in sizes if size >= LEAST_CHUNK and size % PAGE == 0]


def _staged(case: Case) -> tuple[int | None, ...]:
    if case.target.staged is None:
        return (None,)
    if case.wishes.staging is not None:
        return (case.wishes.staging,)
    return tuple(range(case.target.staged, 0, -1))


def _state_dtypes(case: Case) -> tuple[StateDtype, ...]:
    if case.wishes.state_dtype is not None:
        return (case.wishes.state_dtype,)
    return ("fp32", "fp16") if case.target.defaults.state_dtype == "fp32" else ("fp16",)


def _places(case: Case) -> tuple[Place, ...]:
    apart = case.weights.embedding and serves_host_rows(case.spec.hidden, case.target.dtype)
    if case.one_memory or not apart or case.wishes.embedding == "device":
        return ("device",)
    return ("host",) if case.wishes.embedding == "host" else ("device", "host")


def _towers(case: Case) -> tuple[Place | None, ...]:
    """A tower that streams costs about 40 ms an image, and leaves 0.9 GB to the context."""
    wish = case.wishes.vision
    if wish == "off" or not case.weights.vision or case.ranks > 1:  # no tower is shared, nor its embeddings sent
        return (None,)
    if case.one_memory:
        return ("device",)
    return ("device", "host") if wish == "auto" else (wish,)
