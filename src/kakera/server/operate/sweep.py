"""POST /v1/kakera/sweep: timed reads of the device's memory, by which `kakera prove` finds what has left it."""

from __future__ import annotations

from fastapi import APIRouter

from kakera.server.operate.answers import SweepAnswer
from kakera.server.service import Service


def sweep_routes(service: Service) -> APIRouter:
    router = APIRouter()

    @router.post("/v1/kakera/sweep")
    async def sweep() -> SweepAnswer:
        """Between two steps of the engine; running streams wait meanwhile, 40 ms for 10 GB on a card. Nothing but
        sizes and times."""
        return {"reads": await service.engine.sweep()}

    return router
