"""POST /sleep, POST /wake_up, GET /is_sleeping: the card is lent and taken back. Names and levels are vLLM's."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Query, Request

from kakera.contract.events import SleepState
from kakera.server.http.sleep import Mode
from kakera.server.operate.answers import IsSleeping, SleepAnswer
from kakera.server.operate.misplaced import NO_BODY
from kakera.server.service import Service


def sleep_routes(service: Service) -> APIRouter:
    router = APIRouter()

    # not in /openapi.json, of which programs try every route
    @router.post("/sleep", include_in_schema=False, dependencies=[NO_BODY])
    async def sleep(
        request: Request,
        level: Annotated[int, Query(ge=1, le=2)] = 1,
        mode: Mode = "wait",
        wake_on_request: bool = False,
    ) -> SleepAnswer:
        """Give the card's memory back, and answer when that is done. Level 1 keeps the weights in host memory, 2 drops
        them and reads them again. `mode`: requests that run end first (wait), go on behind the sleep (keep), or end
        with an error (abort). New ones are refused, or wake the engine. Without the server's key, from this machine
        only."""
        service.access.check_operator(request.client.host if request.client else "")
        return _answer(await service.sleep.fall(level, mode, wake_on_request))

    @router.post("/wake_up", include_in_schema=False)
    async def wake_up(request: Request) -> SleepAnswer:
        """Take the card's memory again, and answer when requests are served. Refused (503) while the card has no room.
        Who may ask: as for sleep."""
        service.access.check_operator(request.client.host if request.client else "")
        return _answer(await service.sleep.wake())

    @router.get("/is_sleeping")
    async def is_sleeping() -> IsSleeping:
        return {"is_sleeping": service.sleep.level > 0, "level": service.sleep.level}

    return router


def _answer(state: SleepState) -> SleepAnswer:
    return {
        "is_sleeping": state.level > 0,
        "level": state.level,
        "seconds": round(state.seconds, 3),
        "device_bytes": state.device_bytes,
        "host_bytes": state.host_bytes,
    }
