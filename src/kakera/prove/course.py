"""The course of a proof: a server is calibrated, filled to its last token and asked again; swept, and watched."""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from statistics import median
from typing import Any

from kakera.bench.client import Client
from kakera.bench.client import Trace as Seen
from kakera.contract.events import RegionRead
from kakera.contract.grid import PAGE
from kakera.errors import KakeraError, UsageError
from kakera.plan.plan import Plan
from kakera.plan.sizes import margin
from kakera.prove.trace import Card, Chunk, Decoding, Filled, Phase, Resent, Sample, Trace
from kakera.server.operate.sensors import Reading
from kakera.target import cards
from kakera.target.devices import Machine

SAMPLE_SECONDS = 0.5
LOOK_SECONDS = 5.0  # between looks whether a request of ours is held back
ANSWER, MORE, AGAIN = 256, 50, 32  # tokens: of the answer, added to the second turn, of its answer
LEAST_CONTEXT = 1024
SHORT, LONG = 1024, 8192  # tokens of the calibration's prompts: decode, prefill
CALM_STEPS = 64
FURTHER = 4  # requests at most that fill the rest of the pool; an H200's would take hours
FULL = 0.98  # of the pool's pages
SEED = 0

Stage = Callable[[str, int], AbstractContextManager[Callable[[int], None]]]


@dataclass
class Recorder:
    """What is being recorded. `phase` is set as the course goes on."""

    plan: Plan
    card: Card | None
    read: Callable[[], Reading]
    phase: Phase = "other"
    samples: list[Sample] = field(default_factory=list)
    sweeps: list[tuple[RegionRead, ...]] = field(default_factory=list)
    began: float = field(default_factory=time.perf_counter)

    @property
    def now(self) -> float:
        return time.perf_counter() - self.began

    @contextlib.asynccontextmanager
    async def watching(self) -> AsyncIterator[None]:
        """Samples are taken while the block runs."""
        task = asyncio.create_task(self._watch())
        try:
            yield
        finally:
            task.cancel()

    async def _watch(self) -> None:
        while True:
            reading = await asyncio.to_thread(self.read)
            self.samples.append(sample_of(reading, self.now, self.phase))
            await asyncio.sleep(SAMPLE_SECONDS)


def card_of(plan: Plan, machine: Machine, reading: Reading) -> Card | None:
    """The card before the server comes; None of a CPU. One that its driver does not show has the plan's figures."""
    if not plan.target.has_cards:
        return None
    device, kept = machine.devices[0], margin(plan.device_bytes[0])
    name, size, used = device.name, device.bytes, device.used
    if reading.cards:
        name, size, used = reading.cards[0].name, reading.cards[0].bytes, reading.cards[0].used
    known = cards.find(name)
    bandwidth = known.bandwidth_gbs * 1e9 if known else device.bandwidth
    return Card(name, device.driver, size, kept, plan.total("device"), used, bandwidth)


def sample_of(reading: Reading, seconds: float, phase: Phase) -> Sample:
    host = Sample(seconds, phase, resident=reading.resident, host_free=reading.host_bytes - reading.host_used)
    if not reading.cards:
        return host
    card = reading.cards[0]
    return replace(
        host,
        free=card.bytes - card.used,
        watts=card.watts,
        clock_mhz=card.clock_mhz,
        utilization=card.utilization,
        slowed=card.slowed,
    )


def check(plan: Plan) -> None:
    """Raises UsageError for a plan that has no room for what a proof does."""
    if plan.context < LEAST_CONTEXT:
        raise UsageError(
            f"--context: a proof fills at least {LEAST_CONTEXT:,} tokens, and the plan has {plan.context:,}"
        )


async def prove(url: str, recorder: Recorder, stage: Stage, quick: bool = False) -> Trace:
    """Fill what a server at `url` has planned. Whatever goes wrong on the way stands in the trace as its failure."""
    trace = Trace(recorder.card)
    course = _Course(recorder, stage, random.Random(SEED))
    try:
        async with Client(url) as client, recorder.watching():
            for part in (course.calibrate, course.fill, course.resend, *(() if quick else (course.fill_the_rest,))):
                trace = await _unless_held_back(client, part(client, trace))
                recorder.sweeps.append(await _sweep(client))
    except KakeraError as error:
        trace = replace(trace, failure=str(error))
    return replace(trace, samples=tuple(recorder.samples), sweeps=tuple(recorder.sweeps))


@dataclass
class _Course:
    recorder: Recorder
    stage: Stage
    dice: random.Random
    filled: list[int] = field(default_factory=list)  # the tokens of the fill

    async def calibrate(self, client: Client, trace: Trace) -> Trace:
        """Decode behind a short prompt and chunks of a longer one, while next to nothing has been computed."""
        plan = self.recorder.plan
        short, long = min(SHORT, plan.context // 4), min(LONG, plan.context // 4)
        with self.stage("calibrating", short + long) as advance:
            seen = await client.complete(self._tokens(short), CALM_STEPS)
            advance(short)
            chunks = _Chunks(self.recorder, advance)
            self.recorder.phase = "calibration"
            await client.complete(self._tokens(long), 1, on_progress=chunks.hear)
            self.recorder.phase = "other"
        kv_bytes = plan.kv.read_bytes(plan.spec, short)
        return replace(trace, calm_chunks=tuple(chunks.found), calm_decoding=Decoding(median(seen.gaps), kv_bytes))

    async def fill(self, client: Client, trace: Trace) -> Trace:
        """One request of the whole context, prompt and answer."""
        recorder, plan = self.recorder, self.recorder.plan
        answer = min(ANSWER, plan.context // 8)
        self.filled = self._tokens(plan.context - answer)
        recorder.phase = "filling"

        def on_text(_: str) -> None:
            recorder.phase = "answering"

        with self.stage("filling the context", len(self.filled)) as advance:
            chunks = _Chunks(recorder, advance)
            seen = await client.complete(self.filled, answer, on_text, chunks.hear)
        recorder.phase = "other"
        return replace(
            trace,
            chunks=tuple(chunks.found),
            decoding=Decoding(_late(seen), plan.kv.read_bytes(plan.spec, plan.context)),
            filled=Filled(seen.prompt_tokens, answer, seen.completion_tokens, seen.ttft),
        )

    async def resend(self, client: Client, trace: Trace) -> Trace:
        """The same conversation with a little more, three times. The first goes on from the fill's checkpoint and saves
        one of its own, rounded to 16 bit on a card; the others go on from that, and have to agree."""
        prompt = self.filled + self._tokens(MORE)
        seen = []
        with self.stage("sending it again", 3 * AGAIN) as advance:
            for _ in range(3):
                seen.append(await client.complete(prompt, AGAIN))
                advance(AGAIN)
        first, same = seen[0], seen[1].text == seen[2].text
        return replace(trace, resent=Resent(first.prompt_tokens, first.cached_tokens, first.ttft, same))

    async def fill_the_rest(self, client: Client, trace: Trace) -> Trace:
        """Further requests until every page of the pool has been used and the store has got pages from it."""
        plan = self.recorder.plan
        with self.stage("filling the rest of the pool", plan.pages) as advance:
            for _ in range(FURTHER):
                engine = (await client.status())["engine"]
                unused = engine["pages_free"] - engine["pages_cached"]
                demoted = engine["host_bytes_total"] == 0 or engine["host_bytes"].get("page", 0) > 0
                if unused <= (1 - FULL) * plan.pages and demoted:
                    break
                pages = max(unused, plan.pages // 8)
                await client.complete(self._tokens(min(plan.context - 1, pages * PAGE)), 1)
                advance(min(unused, plan.context // PAGE))
        return trace

    def _tokens(self, count: int) -> list[int]:
        """Random ids; none of the last ones, which are for control tokens or nothing."""
        return self.dice.choices(range(1, self.recorder.plan.spec.vocab * 3 // 4), k=count)


@dataclass
class _Chunks:
    """Steps of a prompt, from how far the server says that it is read."""

    recorder: Recorder
    advance: Callable[[int], None]
    found: list[Chunk] = field(default_factory=list)
    _done: int | None = None  # tokens, and the server's seconds then
    _at: float = 0.0

    def hear(self, done: int, at: float) -> None:
        if self._done is not None and done > self._done:
            self.found.append(Chunk(self.recorder.now, self._done, done - self._done, at - self._at))
            self.advance(done - self._done)
        self._done, self._at = done, at


async def _unless_held_back(client: Client, part: Coroutine[Any, Any, Trace]) -> Trace:
    """What a part of the course gives. Raises KakeraError once its request waits for pages that were given back, which
    could be for ever."""
    task = asyncio.ensure_future(part)
    try:
        while not (await asyncio.wait({task}, timeout=LOOK_SECONDS))[0]:
            engine = (await client.status())["engine"]
            if engine.get("held_back"):
                raise KakeraError(
                    f"other programs have taken memory of the card: {engine['pages_lent']} KV pages were given back, "
                    "and the request waits for them; close those programs, and prove again"
                )
        return task.result()
    finally:
        task.cancel()


def _late(seen: Seen) -> float:
    """Seconds of the median step in the second half of an answer."""
    gaps = seen.gaps[len(seen.gaps) // 2 :]
    return median(gaps) if gaps else 0.0


async def _sweep(client: Client) -> tuple[RegionRead, ...]:
    status, text = await client.send("/v1/kakera/sweep", None)
    if status != 200:
        raise KakeraError(f"/v1/kakera/sweep: HTTP {status}: {text[:500]}")
    reads = json.loads(text)["reads"]
    return tuple(RegionRead(r["region"], r["offset"], r["bytes"], tuple(r["seconds"])) for r in reads)
