"""Speed of an engine in this process, without a server: decode and prefill by context and batch."""

from __future__ import annotations

import random
import time
from collections.abc import Sequence
from dataclasses import dataclass

from kakera.bench.quantiles import Times
from kakera.contract.events import Event, Finished, Tokens, Usage
from kakera.contract.grid import PAGE
from kakera.contract.request import Boundary, Request, Sampling
from kakera.errors import KakeraError
from kakera.run.interface import Engine

WARM_STEPS = 8  # before the clock: the first steps of a batch compile, capture, and fill the library's caches
# Tokens of prefill before the clock starts. On a GPU several whole chunks, since kernels compile when they first run;
# on a CPU nothing does. A multiple of every usual chunk, so that the last piece is as long as that of what is measured.
WARM_TOKENS = {"cpu": 256, "cuda": 16384}


@dataclass(frozen=True)
class DecodeSpeed:
    """`step` times one token of all `batch` rows; `tokens_per_second` counts all rows.

    Of the rows' contexts, `computed_tokens` were computed in `fill_seconds` before the clock started; the others came
    from the prefix cache, since they begin longer contexts of this run. `device_seconds` is what a GPU computes in a
    step, captured as a graph, without the choice of tokens; `idle` is the rest of the mean step, as a share.
    """

    batch: int
    context: int
    step: Times
    tokens_per_second: float
    computed_tokens: int
    fill_seconds: float
    device_seconds: float | None = None
    idle: float | None = None


@dataclass(frozen=True)
class PrefillSpeed:
    """`batch` prompts of `context` tokens each, sent at once; tokens per second of all of them."""

    batch: int
    context: int
    seconds: float
    tokens_per_second: float


class EngineBench:
    """Sends random tokens from `vocab` ids. What `prefill` sends differs from its first token on, so nothing is a hit.

    `decode` gives each row of a batch a text of its own, whose beginning is the context. So a shorter context is cached
    where a longer one of `contexts` came before, and no two rows share a page that the hardware would read only once.
    """

    def __init__(
        self, engine: Engine, vocab: int, contexts: Sequence[int] = (), seed: int = 0, warm_tokens: int = 0
    ) -> None:
        """`contexts`: of `decode`, which have to be saved in the longest. `warm_tokens`: see WARM_TOKENS."""
        self.engine = engine
        self._vocab = vocab
        self._seed = seed
        self._warm_tokens = warm_tokens
        # the last page of a prompt is computed even on a hit, so that is where a checkpoint is looked for
        self._marks = sorted((context - 1) // PAGE * PAGE for context in contexts)
        self._random = random.Random(seed)
        self._texts: dict[int, list[int]] = {}
        self._sent = 0

    def prefill(self, context: int, batch: int) -> PrefillSpeed:
        """Time from sending `batch` prompts until the last has its first token."""
        if warm := self._warm_tokens:
            self._time_prefill(context if context < 2 * warm else warm + context % warm, batch)
        seconds = self._time_prefill(context, batch)
        return PrefillSpeed(batch, context, seconds, batch * context / seconds)

    def decode(self, context: int, batch: int, steps: int) -> DecodeSpeed:
        """Time `steps` steps in which all of `batch` rows decode, each with at least `context` tokens before it.

        Contexts are filled before the clock starts. Raises KakeraError if not all rows could run together.
        """
        prompts = [self._text(i, context) for i in range(batch)]
        began = time.perf_counter()
        # one after the other, while no stream runs: nothing has to be held back for the inter-token time of others
        remembers = self.engine.stats().host_bytes_total > 0
        usages = [self._ask(prompt) for prompt in prompts] if remembers else []
        # all rows must still run when the last prompt is in: a row may say one token for every PAGE prefilled beside it
        slack = batch * (context // PAGE + 1)
        names = [self._submit(prompt, WARM_STEPS + steps + slack) for prompt in prompts]
        self._until_all_spoke(names)
        filled = time.perf_counter() - began
        for _ in range(WARM_STEPS):
            self._step()
        times, tokens = [], 0
        for _ in range(steps):
            began = time.perf_counter()
            events = self._step()
            times.append(time.perf_counter() - began)
            tokens += sum(len(event.tokens) for event in events if isinstance(event, Tokens))
        device = self._device_seconds(batch)
        for name in names:
            self.engine.abort(name)
        self._until_idle()
        if tokens < steps * batch:
            raise KakeraError(f"only {tokens} tokens in {steps} steps of {batch} rows: rows ended or waited meanwhile")
        computed = batch * context - sum(usage.cached_tokens for usage in usages)
        idle = None if device is None else 1 - device * steps / sum(times)
        return DecodeSpeed(batch, context, Times.of(times), tokens / sum(times), computed, filled, device, idle)

    def _device_seconds(self, batch: int) -> float | None:
        graphs = getattr(getattr(self.engine, "runner", None), "graphs", None)
        return graphs.seconds(batch) if graphs is not None and batch <= graphs.rows else None

    def _time_prefill(self, context: int, batch: int) -> float:
        prompts = [self._tokens(self._random, context) for _ in range(batch)]
        began = time.perf_counter()
        for prompt in prompts:
            self._submit(tuple(prompt), 1)
        self._until_idle()
        return time.perf_counter() - began

    def _text(self, row: int, tokens: int) -> tuple[int, ...]:
        """The first tokens of a row's own text."""
        if len(self._texts.get(row, ())) < tokens:
            longest = max(tokens, *self._marks, 0)
            self._texts[row] = self._tokens(random.Random(f"{self._seed} {row}"), longest)
        return tuple(self._texts[row][:tokens])

    def _tokens(self, source: random.Random, count: int) -> list[int]:
        return source.choices(range(self._vocab), k=count)

    def _ask(self, prompt: tuple[int, ...]) -> Usage:
        """Compute a prompt, to be cached from then on."""
        name = self._submit(prompt, 1)
        while True:
            for event in self._step():
                if isinstance(event, Finished) and event.request_id == name:
                    return event.usage

    def _submit(self, prompt: tuple[int, ...], max_tokens: int) -> str:
        self._sent += 1
        name = f"bench-{self._sent}"
        sampling = Sampling(max_tokens=max_tokens, seed=0, temperature=0.0)
        marks = tuple(Boundary(mark, "message") for mark in self._marks if 0 < mark < len(prompt))
        self.engine.submit(Request(name, prompt, sampling, marks))
        return name

    def _step(self) -> list[Event]:
        events = self.engine.step()
        for event in events:
            if isinstance(event, Finished) and event.reason == "error":
                raise KakeraError(f"a benchmark request failed: {event.message}")
        return events

    def _until_all_spoke(self, names: Sequence[str]) -> None:
        waiting = set(names)
        while waiting:
            waiting -= {event.request_id for event in self._step() if isinstance(event, Tokens)}

    def _until_idle(self) -> None:
        busy = True
        while busy:
            self._step()
            stats = self.engine.stats()
            busy = stats.running + stats.waiting > 0
