"""An AsyncEngine without scheduler or process: each request steps the scripted runner on its own."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from functools import partial
from pathlib import Path

from kakera.contract.events import (
    Active,
    EngineStats,
    Event,
    Finished,
    FinishReason,
    Flushed,
    Progress,
    PromptLogprobs,
    RegionRead,
    SleepState,
    Tokens,
    Usage,
)
from kakera.contract.request import Request
from kakera.contract.step import RowResult, SamplingInput, Segment, StepPlan
from kakera.errors import EngineDied, RequestRefused
from kakera.run.interface import EngineLimits
from kakera.run.scripted import Script, ScriptedRunner

CACHED = 7
SHORT = 64  # tokens of an answer that are made in the event loop; those of long ones each take a thread, as pauses do


class FakeEngine:
    def __init__(self, path: Path, streams: list[dict], context: int = 4096, slots: int = 8, max_waiting: int = 8):
        path.write_text(json.dumps({"streams": streams, "context": context}))
        self.limits = EngineLimits(context, max_waiting)
        script = Script.load(path)
        self.runner = ScriptedRunner(script)
        self._waits = any(stream.delay_seconds for stream in script.streams)
        self.slots = asyncio.Semaphore(slots)
        self.requests: list[Request] = []
        self.aborted: list[str] = []
        self.open: set[str] = set()
        self.waiting = 0
        self.steps = 0
        self.prefill_seconds = 0.0
        self.dead = False
        self.stuck = False
        self.asleep = 0
        self._stop: set[str] = set()

    async def stream(self, request: Request) -> AsyncIterator[Event]:
        if self.waiting >= self.limits.max_waiting:
            raise RequestRefused("the queue is full", status=429, code="queue_full")
        self.requests.append(request)
        self.waiting += 1
        try:
            await self.slots.acquire()
        finally:
            self.waiting -= 1
        self.open.add(request.id)
        ended = False
        try:
            yield Progress(request.id, 0, len(request.tokens))
            await self._sleep(self.prefill_seconds)
            async for event in self._run(request):
                ended = isinstance(event, Finished)
                yield event
        finally:
            self.slots.release()
            self.open.discard(request.id)
            if not ended:
                self.aborted.append(request.id)

    def abort(self, request_id: str) -> None:
        self._stop.add(request_id)

    async def flush(self, disk: bool = False) -> Flushed:
        self._check()
        return Flushed(pages=3, checkpoints=1, host_bytes=5, disk_bytes=7 if disk else 0)

    async def sweep(self) -> list[RegionRead]:
        self._check()
        return [RegionRead("weights", 0, 64 * 2**20, (0.001, 0.0001))]

    async def sleep(self, level: int) -> SleepState:
        """Streams stand still until it is woken."""
        self._check()
        self.asleep = max(level, self.asleep)
        return SleepState(self.asleep, 0.5, 7 * 10**8, 10**10)

    async def wake_up(self) -> SleepState:
        self._check()
        self.asleep = 0
        return SleepState(0, 0.25, 10**10)

    async def stats(self) -> EngineStats:
        self._check()
        return EngineStats(
            running=len(self.open),
            waiting=self.waiting,
            steps=self.steps,
            asleep=self.asleep,
            counters={"evictions": 3.0},
            active=tuple(self._halfway(request) for request in self.requests if request.id in self.open),
        )

    def _halfway(self, request: Request) -> Active:
        count = len(request.tokens)
        return Active(request.id, count, CACHED, count // 2, count, 0, seconds=1.0, decode_seconds=0.0)

    async def _run(self, request: Request) -> AsyncIterator[Event]:
        sampling, output = request.sampling, []
        reason: FinishReason = "length"
        stop_token = None
        while len(output) < sampling.max_tokens and request.id not in self._stop:
            result = await self._step(request, output)
            if result.prompt_logprobs:
                yield PromptLogprobs(request.id, result.prompt_logprobs)
            if result.error:
                usage = Usage(len(request.tokens), 0, len(output))
                yield Finished(request.id, "error", usage, None, result.error, result.code)
                return
            output += result.tokens
            yield Tokens(request.id, result.tokens, result.logprobs)
            if result.complete:
                reason = "stop"
                break
            if result.tokens[0] in sampling.stop_token_ids and len(output) > sampling.min_tokens:
                reason, stop_token = "stop", result.tokens[0]
                break
        if request.id in self._stop:
            reason = "abort"
        usage = Usage(len(request.tokens), min(CACHED, len(request.tokens) - 1), len(output), "cold")
        yield Finished(request.id, reason, usage, stop_token)

    async def _step(self, request: Request, output: list[int]) -> RowResult:
        context = (*request.tokens, *output)
        start = 0 if not output else len(context) - 1
        scored = len(request.tokens) - 1 if start == 0 and request.sampling.prompt_logprobs is not None else 0
        row = Segment(request.id, 0, context[start:], start, sampled=1, scored=scored)
        given = {request.id: SamplingInput(request.id, request.sampling, context, len(request.tokens))}
        await self._sleep(0)
        step = partial(self.runner.execute, StepPlan(self.steps, prefill=(row,)), given)
        if self._waits or request.sampling.constraint is not None or len(output) >= SHORT:
            result = await asyncio.to_thread(step)
        else:
            await asyncio.sleep(0)
            result = step()
        self.steps += 1
        return result.rows[0]

    async def _sleep(self, seconds: float) -> None:
        """In small pieces, so that a death or a hang shows at once."""
        self._check()
        while self.stuck or self.asleep or seconds > 0:
            await asyncio.sleep(0.01)
            seconds -= 0.01
            self._check()

    def _check(self) -> None:
        if self.dead:
            raise EngineDied("killed by the test")
