"""What a person should know about a plan that fits. A plan that kakera chose itself is no reason for a warning."""

from __future__ import annotations

from dataclasses import replace

from kakera.errors import UsageError
from kakera.plan.budget import LEAST_CONTEXT
from kakera.plan.plan import Plan, Wishes
from kakera.plan.search import LEAST_CHUNK, draft, usable_devices
from kakera.plan.sizes import left_over, margin
from kakera.plan.speed import Speed, predict
from kakera.plan.store_sizes import StoreSizes
from kakera.plan.weights import WeightBytes
from kakera.target.devices import Machine

TIGHT = 200 * 10**6  # less than this beyond the margin deserves a warning where sizes were asked for


def cautions(plan: Plan, machine: Machine, wishes: Wishes) -> tuple[str, ...]:
    """Who else holds memory, and what was asked for and is little, or means nothing here."""
    found = [*machine.warnings, *_embedding(plan, wishes), *_staging(plan, wishes), *_store(plan, wishes)]
    found += _tower(plan, wishes)
    spare = left_over(plan, machine)
    if spare < TIGHT and (lower := _lower(plan, wishes)):
        smallest = min(machine.devices, key=lambda d: d.bytes - d.used)
        kept = margin(smallest.bytes) + plan.reserve
        found.append(
            f"only {spare / 1e6:.0f} MB to spare beyond the {kept / 1e6:.0f} MB that stay free: another program that "
            f"takes memory on {smallest.name} will make it slow; lower {' or '.join(lower)}"
        )
    return tuple(found)


def _lower(plan: Plan, wishes: Wishes) -> list[str]:
    """Options that were given and can be less, where nothing large was left to choose."""
    if wishes.pool is None and (wishes.context is None or wishes.max_running is None):
        return []
    can = {
        "--context": wishes.context is not None and plan.context > LEAST_CONTEXT,
        "--pool": wishes.pool is not None and plan.pages * 64 > plan.context,
        "--max-running": wishes.max_running is not None and plan.slots > 1,
        "--chunk": wishes.chunk is not None and plan.chunk > LEAST_CHUNK,
    }
    return [option for option, possible in can.items() if possible]


def _store(plan: Plan, wishes: Wishes) -> list[str]:
    if not wishes.host_cache or StoreSizes.of_plan(plan).checkpoints:
        return []
    return [
        f"--host-cache {plan.host_cache / 1e6:.0f} MB holds no checkpoint of {plan.checkpoint_bytes / 1e6:.1f} MB "
        "with its sink: every turn computes its whole prompt; give it more, or 0"
    ]


def _tower(plan: Plan, wishes: Wishes) -> list[str]:
    if wishes.vision == "off" or plan.vision is not None or not (plan.spec.vision or plan.spec.blind):
        return []
    shared = "a model that several processes share has no tower so far" if plan.ranks > 1 else ""
    why = plan.spec.blind or shared or "the checkpoint holds no whole vision tower, or there is no room for it"
    return [f"images are refused: {why} (kakera info tells; --vision off says so)"]


def _staging(plan: Plan, wishes: Wishes) -> list[str]:
    if wishes.staging is None or plan.staged is not None:
        return []
    return [f"--staging {wishes.staging}: on a CPU checkpoints are in the host's memory already, so it changes nothing"]


def _embedding(plan: Plan, wishes: Wishes) -> list[str]:
    if wishes.embedding != "host" or plan.embedding == "host":
        return []
    if plan.target.one_memory:
        return ["--embedding host: a CPU has one memory, so it lies where it would lie anyway"]
    if plan.placed:  # rows of a part: `placement.wished` has heard it
        return []
    if plan.spec.tied:
        return ["--embedding host: this model's head reads the whole table for every token, so it stays on the device"]
    return ["--embedding host: no kernel reads such rows from there, so it stays on the device"]


def uneven(plan: Plan, speed: Speed, wishes: Wishes, machine: Machine, weights: WeightBytes) -> tuple[str, ...]:
    """Where one of the cards alone would be faster than all of them together, or hold as much."""
    if len(plan.device_names) < 2 or speed.decode_short is None:  # unknown together, so nothing to compare with
        return ()
    best = None
    for device in {d.name: d for d in usable_devices(plan.spec, wishes, machine, weights).devices}.values():
        alone = replace(machine, devices=(device,), warnings=())
        try:
            one = draft(plan.spec, wishes, alone, weights)
        except UsageError:
            continue
        faster = predict(one.plan, alone, weights) if one.fits else Speed(None, None, None)
        if _rate(faster) > speed.decode_short and (best is None or _rate(faster) > _rate(best[2])):
            best = (device.name, one.plan, faster)
    if best is None:
        return ()
    name, single, rates = best
    return (
        f"{name} alone is faster: {_rate(rates):.0f} tokens/s instead of {_rate(speed):.0f}, with {single.context} "
        f"tokens of context and {single.slots} running, because each card gets an equal share and waits for the "
        f"slowest: --gpus {name}",
    )


def _rate(speed: Speed) -> float:
    return speed.decode_short or 0.0
