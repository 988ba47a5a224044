"""Load scenarios against a server: parallel streams, a second turn, a long prompt beside running streams."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass

from kakera.bench.client import Client, Trace
from kakera.bench.quantiles import Times
from kakera.bench.text import Prose
from kakera.errors import KakeraError

QUESTION = "What is the text about?"
SECOND_QUESTION = "Who are you?"
ALONE_SECONDS = 4.0  # at 25 tokens/s and 4 streams: 400 gaps, so that the 95th percentile rests on 20
BESIDE_STREAMS = 4
STREAM_PROMPT_TOKENS = 128
STREAM_NEW_TOKENS = 30_000  # more than a stream can say while the long prompt runs, on a GPU and for 192K, too


@dataclass(frozen=True)
class Level:
    """`streams` requests at once. `tokens_per_second` counts all streams, first send to last arrival."""

    streams: int
    prompt_tokens: int
    new_tokens: int
    ttft: Times
    gap: Times
    tokens_per_second: float
    decode_tokens_per_second: float  # from the moment when all streams have their first token


@dataclass(frozen=True)
class SecondTurn:
    """The first and the second turn of one conversation. Seconds to the first token; tokens."""

    cold_seconds: float
    warm_seconds: float
    cold_tokens: int
    warm_tokens: int
    cached_tokens: int

    @property
    def ratio(self) -> float:
        return self.warm_seconds / self.cold_seconds

    @property
    def cached_share(self) -> float:
        return self.cached_tokens / self.warm_tokens


@dataclass(frozen=True)
class Beside:
    """A long prompt next to `streams` running ones, against each alone. Seconds and tokens per second."""

    streams: int
    prompt_tokens: int
    alone: Times
    beside: Times
    solo_prefill: float
    shared_prefill: float

    @property
    def slowdown(self) -> float:
        return self.beside.p95 / self.alone.p95

    @property
    def kept(self) -> float:
        return self.shared_prefill / self.solo_prefill


async def calibrate(client: Client, prose: Prose) -> None:
    """Learn how many characters a token has; also the warm-up of every code path."""
    text = prose.take(1000)
    prose.calibrate(text, (await client.complete(text, 4)).prompt_tokens)


async def level(client: Client, prose: Prose, streams: int, prompt_tokens: int, new_tokens: int) -> Level:
    """Send `streams` different prompts at once and read each to its end."""
    prompts = [prose.take(prompt_tokens) for _ in range(streams)]
    traces = await asyncio.gather(*(client.complete(prompt, new_tokens) for prompt in prompts))
    last = max(trace.arrivals[-1] for trace in traces)
    return Level(
        streams=streams,
        prompt_tokens=max(trace.prompt_tokens for trace in traces),
        new_tokens=new_tokens,
        ttft=Times.of(trace.ttft for trace in traces),
        gap=Times.of(gap for trace in traces for gap in trace.gaps),
        tokens_per_second=sum(t.completion_tokens for t in traces) / (last - min(t.sent for t in traces)),
        decode_tokens_per_second=_joint_speed(traces),
    )


def _joint_speed(traces: list[Trace]) -> float:
    """Tokens per second of all streams while all of them run."""
    begin = max(trace.arrivals[0] for trace in traces)
    end = min(trace.arrivals[-1] for trace in traces)
    chunks = sum(begin < at <= end for trace in traces for at in trace.arrivals)
    arrived = sum(len(trace.arrivals) for trace in traces)
    tokens = chunks * sum(trace.completion_tokens for trace in traces) / arrived
    return tokens / (end - begin) if end > begin else 0.0


async def second_turn(client: Client, prose: Prose, prompt_tokens: int, new_tokens: int = 16) -> SecondTurn:
    """Ask about a long text, then ask again in the same conversation."""
    messages = [{"role": "user", "content": f"{prose.take(prompt_tokens)}\n\n{QUESTION}"}]
    cold = await client.chat(messages, new_tokens)
    messages += [{"role": "assistant", "content": cold.text}, {"role": "user", "content": SECOND_QUESTION}]
    warm = await client.chat(messages, new_tokens)
    return SecondTurn(cold.ttft, warm.ttft, cold.prompt_tokens, warm.prompt_tokens, warm.cached_tokens)


async def prefill_beside(client: Client, prose: Prose, streams: int, prompt_tokens: int) -> Beside:
    """Measure a long prefill alone, the streams alone for a while, then a long prefill while the streams run on."""
    solo = await client.complete(prose.take(prompt_tokens), 1)
    running = [_Running(client, prose.take(STREAM_PROMPT_TOKENS)) for _ in range(streams)]
    try:
        await asyncio.gather(*(stream.started() for stream in running))
        settled = time.perf_counter()
        await asyncio.sleep(ALONE_SECONDS)
        began = time.perf_counter()
        long = await client.complete(prose.take(prompt_tokens), 1)
        ended = long.arrivals[0]
    finally:
        for stream in running:
            await stream.stop()
    return Beside(
        streams=streams,
        prompt_tokens=long.prompt_tokens,
        alone=Times.of(gap for stream in running for gap in stream.gaps(settled, began)),
        beside=Times.of(gap for stream in running for gap in stream.gaps(began, ended)),
        solo_prefill=solo.prompt_tokens / solo.ttft,
        shared_prefill=long.prompt_tokens / long.ttft,
    )


class _Running:
    """A stream that runs until it is stopped, and when its text arrived."""

    def __init__(self, client: Client, prompt: str):
        self.arrivals: list[float] = []
        self._first = asyncio.Event()
        self._task = asyncio.create_task(client.complete(prompt, STREAM_NEW_TOKENS, self._arrived))

    def _arrived(self, _: str) -> None:
        self.arrivals.append(time.perf_counter())
        self._first.set()

    async def started(self) -> None:
        """Wait for the first text; raises what the request raised if it never comes."""
        first = asyncio.create_task(self._first.wait())
        await asyncio.wait((first, self._task), return_when=asyncio.FIRST_COMPLETED)
        first.cancel()
        if self._task.done():
            self._task.result()

    async def stop(self) -> None:
        self._task.cancel()
        await asyncio.wait((self._task,))

    def gaps(self, begin: float, end: float) -> list[float]:
        """Times between neighbouring arrivals that overlap a stretch of time. Raises KakeraError if it ended before."""
        if self._task.done() and not self._task.cancelled():
            raise KakeraError(
                f"a stream ended while the long prompt ran: {self._task.exception() or 'all tokens sent'}"
            )
        pairs = zip(self.arrivals, self.arrivals[1:], strict=False)
        return [b - a for a, b in pairs if b > begin and a < end]
