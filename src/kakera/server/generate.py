"""From engine events to what a dialect sends: text, reasoning, tool calls and log-probabilities, choice by choice.

Every API dialect is a thin file on top of `Generation`: it turns a body into a Job and Deltas into its own chunks.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Callable
from dataclasses import dataclass, field, replace
from typing import Any

from kakera.contract.events import (
    ENGINE_ERROR,
    INVALID_GRAMMAR,
    EngineStats,
    Event,
    Finished,
    Progress,
    PromptLogprobs,
    Tokens,
    Usage,
)
from kakera.contract.grid import PAGE, pages_for
from kakera.errors import RequestRefused
from kakera.run.interface import AsyncEngine
from kakera.server.choice import ChoiceText, Delta, Job
from kakera.server.metrics.record import RequestRecord
from kakera.text.tokenizer import Tokenizer

UNREAD_DELTAS = 16  # of a generation; then its streams are not read on, and the engine pauses them
STATUS = {ENGINE_ERROR: 500, INVALID_GRAMMAR: 400}  # by the code of an error


@dataclass(eq=False)
class Generation:
    """Runs a Job on the engine, once. `load`: the engine's figures as they were last heard."""

    engine: AsyncEngine
    tokenizer: Tokenizer
    job: Job
    record: RequestRecord
    load: Callable[[], EngineStats] = EngineStats
    usages: list[Usage] = field(default_factory=list)
    reasoning_tokens: int = 0  # of the choices that have ended
    _begun: bool = False  # the engine has said something about it
    _merged: asyncio.Queue[Delta | Exception | None] = field(default_factory=asyncio.Queue)
    _room: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(UNREAD_DELTAS))  # for Deltas in _merged

    @property
    def standing(self) -> str:
        """What it does, for a client that has not seen anything for a while."""
        load = self.load()
        if load.asleep:
            return "waiting for the card, which is lent: this goes on when the server is woken"
        there = load.pages_total - load.pages_lent
        if load.pages_lent and pages_for(len(self.job.tokens) + 1) > there:
            return (
                f"waiting for memory of the card that other programs have: what is under {there * PAGE} tokens runs now"
            )
        if self._begun:
            return "still working"
        return f"waiting for a place: {load.running} running, {load.waiting} waiting"

    def end(self, error: Exception) -> None:
        """Have `deltas` raise this, now or when it is asked."""
        self._merged.put_nowait(error)

    async def deltas(self) -> AsyncGenerator[Delta]:
        """What happens, as it happens; while nobody asks for more, the choices pause. Closing the generator aborts
        whatever still runs, so use `aclosing`."""
        runs = [asyncio.create_task(self._pump(choice)) for choice in range(self.job.choices)]
        open_choices = self.job.choices
        try:
            while open_choices:
                item = await self._merged.get()
                if isinstance(item, Exception):
                    raise item
                if item is None:
                    open_choices -= 1
                    continue
                if not item.empty:
                    yield item
                self._room.release()
            self.record.finished(self.usages)
        except Exception as error:
            self.record.failed(error)
            raise
        except BaseException:  # the client left: CancelledError or GeneratorExit
            self.record.failed(None)
            raise
        finally:
            for run in runs:
                run.cancel()
            await asyncio.gather(*runs, return_exceptions=True)

    async def _pump(self, choice: int) -> None:
        try:
            async with contextlib.aclosing(self._choice(choice)) as deltas:
                async for delta in deltas:
                    await self._room.acquire()
                    self._merged.put_nowait(delta)
            self._merged.put_nowait(None)
        except Exception as error:
            self.end(error)

    async def _choice(self, choice: int) -> AsyncGenerator[Delta]:
        request = self.job.request(choice)
        text = ChoiceText(self.job, choice, self.tokenizer)
        aborted = False
        events: Any = self.engine.stream(request)
        async with contextlib.aclosing(events):
            async for event in events:
                yield self._translate(event, text, choice)
                if text.stopped and not aborted:
                    aborted = True
                    self.engine.abort(request.id)

    def _translate(self, event: Event, text: ChoiceText, choice: int) -> Delta:
        self._begun = True
        if isinstance(event, Progress) and choice == 0:
            self.record.progress(event.done, event.total)
        match event:
            case Tokens():
                self.record.tokens(choice, len(event.tokens))
                return text.feed(event)
            case Progress() if self.job.progress:
                return Delta(choice, progress=event)
            case PromptLogprobs():
                return Delta(choice, prompt_logprobs=event.logprobs)
            case Finished():
                _refuse_failed(event, text.stopped)
                delta = text.finish(event)
                self.usages.append(delta.usage or event.usage)
                self.reasoning_tokens += delta.reasoning_tokens
                self.record.choice_ended(event.code if event.code == "loop" else delta.finish or "stop")
                return delta
            case _:
                return Delta(choice)

    @property
    def usage(self) -> Usage:
        """Of all choices together: the prompt counts once, as does what was cached of it."""
        if not self.usages:
            return Usage(0, 0, 0)
        return replace(
            self.usages[0],
            cached_tokens=min(usage.cached_tokens for usage in self.usages),
            completion_tokens=sum(usage.completion_tokens for usage in self.usages),
            accepted_tokens=sum(usage.accepted_tokens for usage in self.usages),
            rejected_tokens=sum(usage.rejected_tokens for usage in self.usages),
        )


def _refuse_failed(event: Finished, stopped: bool) -> None:
    """Raises RequestRefused (500, 503) if the engine gave up on a choice, and 400 if its grammar has failed: then
    another server would not help."""
    if event.reason == "error" or (event.reason == "abort" and not stopped):
        message = event.message or "the engine aborted this request"
        raise RequestRefused(message, status=STATUS.get(event.code, 503), code=event.code or "aborted")


def join_usage(usages: list[Usage]) -> Usage:
    """Of several prompts in one body: everything adds up."""
    return Usage(
        prompt_tokens=sum(usage.prompt_tokens for usage in usages),
        cached_tokens=sum(usage.cached_tokens for usage in usages),
        completion_tokens=sum(usage.completion_tokens for usage in usages),
        accepted_tokens=sum(usage.accepted_tokens for usage in usages),
        rejected_tokens=sum(usage.rejected_tokens for usage in usages),
    )
