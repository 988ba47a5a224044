"""A Plan for people (a rich table, or the same as plain text) and for programs (JSON). Estimates are named as such."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from kakera.plan.plan import Place, Plan, PlanRow
from kakera.plan.sizes import left_over, margin
from kakera.target.devices import Machine

if TYPE_CHECKING:
    from rich.table import Table

    from kakera.plan.costs import Cost
    from kakera.plan.speed import Speed


def gigabytes(count: int) -> str:
    """ "8.40 GB" (10^9 bytes), or MB below 0.1 GB."""
    return f"{count / 1e9:.2f} GB" if abs(count) >= 10**8 else f"{count / 1e6:.1f} MB"


def as_rows(plan: Plan, machine: Machine) -> list[tuple[str, str, str, str]]:
    """(name, device column, host column, note); sums and limits come last. Empty names separate."""
    one = plan.target.one_memory
    lines = [_line(row.name, row.bytes, one or row.place == "device", _note(row)) for row in plan.rows]
    smallest = min(machine.devices, key=lambda d: d.bytes - d.used)
    device, host = plan.total("device"), plan.total("host")
    total = gigabytes(device + host) if one else gigabytes(device)
    lines.append(("total", total, "" if one else gigabytes(host), "" if one else "per card | host"))
    lines.append(("in use by others", gigabytes(smallest.used), "" if one else gigabytes(machine.ram_used), "now"))
    kept = "" if one else gigabytes(margin(machine.ram))
    near_the_end = "near the end the system swaps" if one else "drivers spill or slow down near the end"
    lines.append(("kept free", gigabytes(margin(smallest.bytes)), kept, near_the_end))
    if plan.reserve:
        lines.append(("reserve", gigabytes(plan.reserve), "", "kept free as well: --reserve, or WSL2's driver"))
    if (spare := left_over(plan, machine)) >= 0:
        lines.append(("left over", gigabytes(spare), "", "--pool all gives it to KV pages"))
    lines.append(("capacity", gigabytes(smallest.bytes), "" if one else gigabytes(machine.ram), _names(plan)))
    return lines


def _line(name: str, count: int, device: bool, note: str) -> tuple[str, str, str, str]:
    return (name, gigabytes(count) if device else "", "" if device else gigabytes(count), note)


def _note(row: PlanRow) -> str:
    """With what the other cards hold, where that is not the same."""
    others = dict.fromkeys(map(gigabytes, row.cards))
    others.pop(gigabytes(row.bytes), None)
    return "; ".join([row.note, *([f"{' or '.join(others)} on other cards"] if others else [])])


def _names(plan: Plan) -> str:
    return memory_of(plan) if plan.target.one_memory else " + ".join(plan.device_names)


def memory_of(plan: Plan) -> str:
    """Of a plan for a CPU: whose memory is divided."""
    (name,) = plan.device_names
    return "this machine's memory" if name == "cpu" else f"the memory of --gpus {name}"


def title(plan: Plan) -> str:
    spec = plan.spec
    return (
        f"{spec.model_type}, {len(spec.gdn_layers)} GDN + {len(spec.full_layers)} full-attention layers; "
        f"context {plan.context} tokens, {plan.slots} running, KV {plan.kv.codec}"
    )


def as_text(plan: Plan, machine: Machine) -> str:
    """Plain columns, for error texts and logs."""
    head = [("", "memory" if plan.target.one_memory else "per card", "" if plan.target.one_memory else "host", "")]
    rows = head + as_rows(plan, machine)
    lines = [f"{name:<29}{device:>10}{host:>10}  {note}".rstrip() for name, device, host, note in rows]
    return "\n".join([title(plan), *lines])


def as_table(plan: Plan, machine: Machine) -> Table:
    """The same for a terminal."""
    from rich.table import Table

    table = Table(title=title(plan), title_justify="left", show_edge=False, pad_edge=False)
    one = plan.target.one_memory
    table.add_column("")
    table.add_column("memory" if one else "per card", justify="right", no_wrap=True)
    if not one:
        table.add_column("host", justify="right", no_wrap=True)
    table.add_column("", style="dim")
    rows = as_rows(plan, machine)
    for i, (name, device, host, note) in enumerate(rows):
        cells = (name, device, note) if one else (name, device, host, note)
        table.add_row(
            *cells, end_section=rows[min(i + 1, len(rows) - 1)][0] == "total", style="bold" if name == "total" else None
        )
    return table


def read_line(speed: Speed, plan: Plan) -> str:
    """Of weights that lie apart from the others: what one token reads of all that is resident, and where."""
    where = "" if plan.target.one_memory else f" on each card and {gigabytes(speed.read_on_host)} from the host"
    resident = sum(row.bytes for row in plan.rows if row.meter == "load")
    return f"Of {gigabytes(resident)} of weights a token reads {gigabytes(speed.read_on_device)}{where}."


def speed_line(speed: Speed, plan: Plan, machine: Machine) -> str:
    """One line, which names the cards whose figures would be needed if there is no estimate."""
    parts = []
    if speed.decode_short and speed.decode_full:
        full = f"{_rate(speed.decode_full)} at {plan.context} tokens"
        parts.append(f"decode {_rate(speed.decode_short)} tokens/s, {full}")
    if speed.prefill:
        parts.append(f"prefill {_rate(speed.prefill)} tokens/s")
    if not parts:
        unknown = dict.fromkeys(d.name for d in machine.devices if d.bandwidth is None)
        return f"No estimate of speed: the bandwidth of {' and '.join(unknown)} is not known."
    return f"Estimated speed of one stream: {'; '.join(parts)}. Estimates, not measurements."


def _rate(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.2g}"


def to_json(
    plan: Plan,
    machine: Machine,
    speed: Speed | None = None,
    cautions: tuple[str, ...] = (),
    costs: tuple[Cost, ...] = (),
) -> dict[str, Any]:
    """Everything an allocator or a script needs; bytes are integers. `fits` is true: refusals overwrite it."""
    places: tuple[Place, ...] = ("device", "host")
    return {
        "fits": True,
        "device": plan.target.kind,
        "devices": [asdict(device) for device in machine.devices[: len(plan.device_names)]],
        "host_bytes": machine.ram,
        "context": plan.context,
        "max_running": plan.slots,
        "chunk": plan.chunk,
        "kv": asdict(plan.kv),
        "state_dtype": plan.state_dtype,
        "rotation": plan.rotation,
        "pages": plan.pages,
        "pool_tokens": plan.pages * 64,
        "page_bytes": plan.page_bytes,
        "checkpoint_bytes": plan.checkpoint_bytes,
        "sink_bytes": plan.sink_bytes,
        "host_cache": plan.host_cache,
        "rows": [asdict(row) for row in plan.rows],
        "totals": {place: plan.total(place) for place in places},
        "staging": plan.staged,
        "embedding": plan.embedding,
        **({"vision": plan.vision, "image_tokens": plan.image_tokens} if plan.vision else {}),
        "reserve_bytes": plan.reserve,
        "left_over_bytes": max(0, left_over(plan, machine)),
        "choices": [{**asdict(cost), "text": cost.text} for cost in costs],
        "estimated_speed": asdict(speed) if speed else None,
        "warnings": list(cautions),
    }


def summary(plan: Plan) -> str:
    """One line for a log."""
    places = gigabytes(plan.total("device") + (plan.total("host") if plan.target.one_memory else 0))
    cards = len(plan.device_names)
    per = "in all" if plan.target.one_memory else f"on each of {cards} cards" if cards > 1 else "on one card"
    return (
        f"plan: {places} {per}; context {plan.context} tokens, {plan.slots} running, "
        f"{plan.pages * 64} tokens of {plan.kv.codec} KV, {gigabytes(plan.host_cache)} prefix cache"
        + (", embedding on the host" if plan.embedding == "host" else "")
        + (f", images of up to {plan.image_tokens} tokens" if plan.vision else "")
        + (f", {gigabytes(plan.reserve)} in reserve" if plan.reserve else "")
    )
