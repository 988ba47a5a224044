"""GET /health: whether the engine makes progress and, with `deep`, a token."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse

from kakera.errors import RequestRefused
from kakera.server.operate.answers import Failing, Healthy, NotReady
from kakera.server.service import Service
from kakera.server.watch import EngineWatch, one_token

SHARED_SECONDS = 1.0
LOOK_SECONDS = 0.05  # the engine reports after every step
ELSEWHERE = ("cross-site", "same-site")  # what browsers say of a page's images and links, which send no Origin


@dataclass
class DeepProbe:
    """One token for all who ask within SHARED_SECONDS: needing no key, it must cost the same whoever asks how often.

    While every slot is taken, a finished step instead: behind a queue of minutes the token would come too late, and
    whoever restarts what is unhealthy would restart a server that only has much to do.
    """

    watch: EngineWatch
    _task: asyncio.Task[tuple[str | None, float]] | None = None
    _began: float = 0.0

    async def result(self) -> tuple[str | None, float]:
        """What is wrong or None, and the seconds that the token or the step took."""
        if self._task is None or (self._task.done() and time.monotonic() - self._began > SHARED_SECONDS):
            self._began = time.monotonic()
            self._task = asyncio.create_task(self._generate())
        return await asyncio.shield(self._task)  # the others wait on when one of them leaves

    async def _generate(self) -> tuple[str | None, float]:
        began = self.watch.last.steps
        problem = None
        while self._crowded and self.watch.last.steps == began and problem is None:
            await asyncio.sleep(LOOK_SECONDS)
            problem = await self.watch.problem()
        if problem is None and self.watch.last.steps == began:
            problem = await one_token(self.watch.engine, self.watch.stall_seconds)
        return problem, time.monotonic() - self._began

    @property
    def _crowded(self) -> bool:
        last = self.watch.last
        return not last.idle and (last.waiting > 0 or last.slots_free == 0)


def health_routes(service: Service) -> APIRouter:
    router, watch = APIRouter(), service.watch
    probe = DeepProbe(watch)

    text = "No progress, and why; or it ends its requests and stops."
    unwell = {"model": Failing | NotReady, "description": text}

    @router.get("/health", responses={200: {"model": Healthy}, 503: unwell})
    async def health(request: Request, deep: bool = False, ready: bool = True) -> JSONResponse:
        """200 while the engine makes progress and new requests are taken, if need be by waking it; with `ready=0` also
        while the server finishes those that it has, or sleeps. `deep` has an engine that is awake generate a token as
        well."""
        if deep and request.headers.get("sec-fetch-site") in ELSEWHERE:
            text = "pages of other sites may not have tokens generated; leave deep out"
            raise RequestRefused(text, status=403, code="origin_not_allowed", param="deep")
        problem, seconds = await watch.problem(), 0.0
        status = "draining" if service.drain.began and ready else "asleep" if service.sleep.closed else "ok"
        if problem is None and deep and status == "ok":
            problem, seconds = await probe.result()
        if problem:
            return JSONResponse({"status": "failing", "reason": problem}, status_code=503)
        answer: dict[str, object] = {"running": watch.last.running, "waiting": watch.last.waiting + service.arriving}
        answer = {"status": status, **answer}
        if status == "draining" or (status == "asleep" and ready and not service.sleep.on_request):
            return JSONResponse(answer, status_code=503)
        return JSONResponse({**answer, "token_seconds": round(seconds, 4)} if deep and status == "ok" else answer)

    return router
