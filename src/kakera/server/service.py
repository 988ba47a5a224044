"""What every route needs: the engine, the model, the metrics, and the checks that all dialects share."""

from __future__ import annotations

import logging
import uuid
import weakref
from collections.abc import Awaitable
from dataclasses import dataclass, field, replace
from typing import TypeVar

from fastapi import Request

from kakera.contract.events import EngineStats
from kakera.errors import RequestRefused
from kakera.run.interface import AsyncEngine
from kakera.server.choice import Job
from kakera.server.fields import RequestBody
from kakera.server.foreign import LIMITS, check_foreign
from kakera.server.generate import Generation
from kakera.server.http.access import OPEN, Access
from kakera.server.http.drain import Drain
from kakera.server.http.guard import client_of, is_background
from kakera.server.http.intake import Intake
from kakera.server.http.sleep import Sleep
from kakera.server.metrics.prometheus import Metrics
from kakera.server.metrics.record import RequestRecord
from kakera.server.model import ServedModel
from kakera.server.watch import EngineWatch

T = TypeVar("T")
log = logging.getLogger(__name__)
MAX_NAMES = 1000  # of unknown fields remembered; a client that invents names must not fill memory


@dataclass
class Service:
    engine: AsyncEngine
    model: ServedModel
    watch: EngineWatch
    intake: Intake
    access: Access = OPEN
    metrics: Metrics = field(default_factory=Metrics)
    arriving: int = 0  # requests that become jobs just now: a long prompt is tokenised for a second
    drain: Drain = field(init=False)
    sleep: Sleep = field(init=False)
    _noted: set[str] = field(default_factory=set)
    _generations: weakref.WeakSet[Generation] = field(default_factory=weakref.WeakSet)
    _stopped: Exception | None = None

    def __post_init__(self) -> None:
        self.drain = Drain(self.stop)
        self.sleep = Sleep(self.engine, self.interrupt)

    def check_model(self, name: str | None) -> None:
        """Raises RequestRefused (404) for a model that is not served here."""
        if not self.model.answers_to(name):
            names = " and ".join(map(repr, self.model.names))
            raise RequestRefused(
                f"the model {name!r} is not served here; {names} {'are' if self.model.aliases else 'is'} (kakera serve "
                "takes more names by --served-name, and every name by --any-name)",
                status=404,
                code="model_not_found",
                param="model",
            )

    def check(self, body: RequestBody) -> None:
        """What all dialects check. Says once per name that a field has no effect; raises RequestRefused for a model
        that is not served, and for a field that would have to have one."""
        self.check_model(body.model)
        unknown = {name: value for name, value in (body.model_extra or {}).items() if name not in body.passed}
        limited = any(name in body.model_fields_set - unknown.keys() for name in LIMITS)
        for name, value in unknown.items():
            check_foreign(name, value, limited)
        for name in list(unknown)[:MAX_NAMES]:
            self.note(name, f"request field {name[:100]!r} is not known and has no effect")

    def note(self, key: str, message: str) -> None:
        """Log it once per key."""
        if key not in self._noted and len(self._noted) < MAX_NAMES:
            self._noted.add(key)
            log.warning("%s", message)

    async def arrives(self, reply: Awaitable[T]) -> T:
        """The reply that a request gets; it counts as waiting until the engine has it."""
        self.arriving += 1
        try:
            return await reply
        finally:
            self.arriving -= 1

    async def look(self) -> EngineStats:
        """The engine's figures now, with the requests that are on their way to it as waiting. Raises EngineDied."""
        stats = await self.watch.look()
        return replace(stats, waiting=stats.waiting + self.arriving)

    def generation(self, job: Job, request: Request) -> Generation:
        """From here on the generation's own record says how the request ended. Raises RequestRefused for a priority
        that does not exist, and what everybody got who waited when the server was told to stop."""
        if self._stopped is not None:
            raise self._stopped
        background = is_background(request.scope)
        request.state.recorded = True
        self.intake.leave()
        received: float = request.state.received
        client = request.client.host if request.client else None
        record = RequestRecord(job.id, request.url.path, len(job.tokens), self.metrics, received, client)
        name = client_of(request.scope, self.access)
        salts = [name.encode() if self.access.cache_per_key else b"", job.salt]
        job = replace(job, client=name, salt=b"\0".join(salts) if any(salts) else b"", background=background)
        generation = Generation(self.engine, self.model.tokenizer, job, record, lambda: self.watch.last)
        self._generations.add(generation)
        return generation

    def stop(self, error: Exception | None = None) -> None:
        """Give everybody who still waits, or comes, an error, so that nobody is cut off in silence."""
        error = error or RequestRefused("the server is stopping; send it again", status=503, code="server_stopping")
        self._stopped = self._stopped or error
        self.interrupt(error)

    def interrupt(self, error: Exception) -> None:
        """Whoever waits for an answer gets this error."""
        for generation in list(self._generations):
            generation.end(error)


def new_id(prefix: str) -> str:
    return f"{prefix}-{uuid.uuid4().hex}"
