"""GET /v1/kakera/status: everything that the page shows, in one JSON document. Cheap, and no text of any request."""

from __future__ import annotations

import asyncio
import time
from dataclasses import asdict
from typing import Any

from fastapi import APIRouter

from kakera import __version__
from kakera.contract.events import EngineStats
from kakera.plan.plan import Plan
from kakera.plan.table import title
from kakera.server.operate.answers import StatusAnswer
from kakera.server.operate.memory_map import bars, lent_line
from kakera.server.operate.sensors import Sensors
from kakera.server.operate.spill import SpillWatch
from kakera.server.service import Service


def status_routes(
    service: Service, plan: Plan | None, sensors: Sensors | None = None, spill: SpillWatch | None = None
) -> APIRouter:
    """`plan` is None for scripted models, which have no memory to show."""
    router = APIRouter()
    on_cards = plan is not None and plan.target.has_cards
    sensors = sensors or Sensors(len(plan.device_names) if plan and on_cards else 0)

    @router.get("/v1/kakera/status")
    async def status() -> StatusAnswer:
        stats = await service.look()
        reading = await asyncio.to_thread(sensors.read)
        memory = bars(plan, stats, reading) if plan else []
        lent = lent_line(plan, stats) if plan else None
        warnings = [line for line in (*(bar.warning for bar in memory), lent) if line]
        warnings += spill.warnings if spill else []
        if service.sleep.closed:
            warnings.append(service.sleep.text)
        if service.watch.stalled_for > service.watch.stall_seconds:
            warnings.append(service.watch.stall_text())
        return {
            "version": __version__,
            "model": service.model.name,
            "about": title(plan) if plan else "a scripted model: no weights, no memory plan",
            "sees": service.model.sees,
            "context": service.engine.limits.context,
            "uptime_seconds": round(time.monotonic() - service.metrics.began, 1),
            "clock_seconds": round(time.monotonic(), 3),
            "warnings": warnings,
            "memory": [bar.as_json() for bar in memory],
            "resident_bytes": reading.resident,
            "cards": list(reading.cards),
            "generated_tokens": service.metrics.generated,
            "engine": _engine(stats),
            "active": [active.later(time.monotonic() - stats.at) for active in stats.active],
            "finished": list(reversed(service.metrics.recent)),
        }

    return router


def _engine(stats: EngineStats) -> dict[str, Any]:
    """The stats without lists; the counters that rates are made of."""
    fields = asdict(stats)
    counters = fields.pop("counters")
    for name in ("active", "last_step_at", "at"):
        del fields[name]
    wanted = ("prefilled_tokens", "prompt_tokens", "cached_tokens", "preemptions", "checkpoints")
    return {**fields, "counters": {name: counters.get(name, 0) for name in wanted}}
