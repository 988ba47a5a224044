"""A batch: every row asked once, so many at a time, what is refused for now asked again, and each outcome written."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import msgspec

from kakera.batch.lines import Fault, Row, among, answer_line, error_line
from kakera.batch.output import Output
from kakera.batch.servers import Broken, Reply, Server, Unreached
from kakera.errors import KakeraError

BUSY = 429  # the server lives and has no place: asked again for as long as it says so
AWAY = (502, 503, 504)  # of a server that stops or starts, and of proxies in front of one
STRANGERS = (401, 403, 421)  # for one row as for all
TRIES = 5  # of a row by which a server goes away: it may be the reason
PATIENCE_SECONDS = 600.0  # without a word from the server; a large model loads in less
LONGEST_WAIT = 30.0  # between two tries


@dataclass
class Tally:
    lines: int = 0  # that were looked at
    before: int = 0  # answered by an earlier run
    answered: int = 0
    failed: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0
    seconds: float = 0.0


class _Usage(msgspec.Struct):
    usage: Any = None
    id: Any = ""


_usage = msgspec.json.Decoder(_Usage)


@dataclass
class Batch:
    """`on_line` is called for each line that is done. Raises KakeraError if the server is gone for good or refuses us;
    what was answered until then is written."""

    server: Server
    output: Output
    parallel: int
    on_line: Callable[[int], None] = lambda _: None
    patience_seconds: float = PATIENCE_SECONDS
    tally: Tally = field(default_factory=Tally)
    _heard: float | None = None  # when the server last said anything

    async def run(self, lines: Iterator[Row | Fault]) -> Tally:
        began = time.monotonic()
        workers = [asyncio.create_task(self._work(lines)) for _ in range(self.parallel)]
        try:
            await asyncio.gather(*workers)
        finally:
            for worker in workers:
                worker.cancel()
            await asyncio.gather(*workers, return_exceptions=True)
            self.tally.seconds = time.monotonic() - began
        return self.tally

    async def _work(self, lines: Iterator[Row | Fault]) -> None:
        for line in lines:
            self.tally.lines += 1
            if isinstance(line, Fault):
                self._fail(error_line(line))
            elif among(line.custom_id, self.output.answered):
                self.tally.before += 1
            else:
                self._take(line, await self._ask(line))
            self.on_line(1)
            await asyncio.sleep(0)  # a million lines that were answered before shall not hold up the others

    async def _ask(self, row: Row) -> Reply | Fault:
        """The reply that counts."""
        tries, wait = 0, 1.0
        while True:
            asked_for = wait
            try:
                reply = await self.server.post(row.url, row.body)
            except Unreached as error:
                why = f"no answer ({error})"
                self._bear(why)
            except Broken as error:
                tries, why = tries + 1, f"the connection broke off ({error})"
                self._bear(why)
            else:
                if reply.status not in (BUSY, *AWAY):
                    self._heard = time.monotonic()
                    return reply
                why = f"status {reply.status}"
                if reply.status == BUSY:
                    self._heard = time.monotonic()
                else:
                    tries, self._heard = tries + 1, self._heard or time.monotonic()
                    self._bear(why)
                asked_for = _retry_after(reply, wait)
            if tries == TRIES:
                return Fault(row.number, row.custom_id, "no_answer", f"line {row.number}: {why}, {TRIES} times")
            await asyncio.sleep(min(asked_for, LONGEST_WAIT))
            wait = min(2 * wait, LONGEST_WAIT)

    def _bear(self, why: str) -> None:
        """Raises KakeraError if the server never said anything, or not for long."""
        if self._heard is None:
            raise KakeraError(f"{why}: is the server running? Start one with kakera serve, or check --url")
        if time.monotonic() - self._heard > self.patience_seconds:
            raise KakeraError(
                f"{why}, for {self.patience_seconds:.0f} seconds; the same command goes on where this one ended"
            )

    def _take(self, row: Row, reply: Reply | Fault) -> None:
        if isinstance(reply, Fault):
            self._fail(error_line(reply))
            return
        if reply.status in STRANGERS:
            raise KakeraError(
                f"the server refuses with {reply.status}: {_shown(reply.body)}; check --url and --api-key"
            )
        told = _told(reply.body)
        request_id = reply.headers.get(b"x-request-id", b"").decode("latin-1") or str(told.id or "")
        line = answer_line(row, reply.status, request_id, reply.body)
        if 200 <= reply.status < 300:
            self.output.answer(line)
            self.tally.answered += 1
            self._count(told.usage)
        else:
            self._fail(line)

    def _fail(self, line: bytes) -> None:
        self.output.error(line)
        self.tally.failed += 1

    def _count(self, usage: Any) -> None:
        """In the names of every dialect; Anthropic's does not count what was cached as input."""
        if not isinstance(usage, dict):
            return
        details = usage.get("prompt_tokens_details") or usage.get("input_tokens_details") or {}
        apart = _number(usage, "cache_read_input_tokens")
        self.tally.cached_tokens += apart + _number(details, "cached_tokens")
        self.tally.prompt_tokens += _number(usage, "prompt_tokens", "input_tokens") + apart
        self.tally.completion_tokens += _number(usage, "completion_tokens", "output_tokens")


def _number(told: Any, *names: str) -> int:
    found = (told.get(name) for name in names) if isinstance(told, dict) else ()
    return next((value for value in found if isinstance(value, int)), 0)


def _told(body: bytes) -> _Usage:
    try:
        return _usage.decode(body)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return _Usage()


def _shown(body: bytes) -> str:
    return body[:300].decode("utf-8", "replace")


def _retry_after(reply: Reply, otherwise: float) -> float:
    try:
        return max(0.0, float(reply.headers.get(b"retry-after", b"")))
    except ValueError:
        return otherwise
