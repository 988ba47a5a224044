"""Speed of an engine in this process, without a server: decode and prefill by context and batch."""

from __future__ import annotations

import random
import time
from dataclasses import dataclass

from kakera.bench.quantiles import Times
from kakera.errors import KakeraError
from kakera.run.interface import Engine
from kakera.schedule.request import Event, Finished, Request, Sampling, Tokens
from kakera.schedule.step import PAGE


@dataclass(frozen=True)
class DecodeSpeed:
    """`step` times one token of all `batch` rows; `tokens_per_second` counts all rows."""

    batch: int
    context: int
    step: Times
    tokens_per_second: float


@dataclass(frozen=True)
class PrefillSpeed:
    """`batch` prompts of `context` tokens each, sent at once; tokens per second of all of them."""

    batch: int
    context: int
    seconds: float
    tokens_per_second: float


class EngineBench:
    """Sends random tokens from `vocab` ids. Prompts differ from their first token on, so nothing is a cache hit."""

    def __init__(self, engine: Engine, vocab: int, seed: int = 0):
        self.engine = engine
        self._vocab = vocab
        self._random = random.Random(seed)
        self._sent = 0

    def prefill(self, context: int, batch: int) -> PrefillSpeed:
        """Time from sending `batch` prompts until the last has its first token."""
        began = time.perf_counter()
        for prompt in self._prompts(context, batch):
            self._submit(prompt, 1)
        self._run(until_ended=batch)
        seconds = time.perf_counter() - began
        return PrefillSpeed(batch, context, seconds, batch * context / seconds)

    def decode(self, context: int, batch: int, steps: int) -> DecodeSpeed:
        """Time `steps` steps in which all of `batch` rows decode, each with at least `context` tokens before it.

        Prompts are filled in before the clock starts. Raises KakeraError if not all rows could run together.
        """
        # all rows must still run when the last prompt is in: a row may say one token for every PAGE prefilled beside it
        slack = batch * (context // PAGE + 1)
        names = [self._submit(prompt, steps + slack) for prompt in self._prompts(context, batch)]
        waiting = set(names)
        while waiting:
            for event in self._step():
                if isinstance(event, Tokens):
                    waiting.discard(event.request_id)
        times, tokens = [], 0
        for _ in range(steps):
            began = time.perf_counter()
            events = self._step()
            times.append(time.perf_counter() - began)
            tokens += sum(len(event.tokens) for event in events if isinstance(event, Tokens))
        for name in names:
            self.engine.abort(name)
        self._run(until_ended=0)
        if tokens < steps * batch:
            raise KakeraError(f"only {tokens} tokens in {steps} steps of {batch} rows: rows ended or waited meanwhile")
        return DecodeSpeed(batch, context, Times.of(times), tokens / sum(times))

    def _prompts(self, tokens: int, count: int) -> list[tuple[int, ...]]:
        return [tuple(self._random.randrange(self._vocab) for _ in range(tokens)) for _ in range(count)]

    def _submit(self, prompt: tuple[int, ...], max_tokens: int) -> str:
        self._sent += 1
        name = f"bench-{self._sent}"
        self.engine.submit(Request(name, prompt, Sampling(max_tokens=max_tokens, seed=0, temperature=0.0)))
        return name

    def _step(self) -> list[Event]:
        events = self.engine.step()
        for event in events:
            if isinstance(event, Finished) and event.reason == "error":
                raise KakeraError(f"a benchmark request failed: {event.message}")
        return events

    def _run(self, until_ended: int) -> None:
        """Step until that many requests have ended; 0: until nothing runs or waits."""
        ended = 0
        while ended < until_ended or (until_ended == 0 and self._busy()):
            ended += sum(isinstance(event, Finished) for event in self._step())

    def _busy(self) -> bool:
        stats = self.engine.stats()
        return stats.running + stats.waiting > 0
