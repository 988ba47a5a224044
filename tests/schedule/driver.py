"""Drive a scheduler with the fake runner: submit, step, collect; checks integrity after every step."""

from __future__ import annotations

from collections import defaultdict

from fake_runner import VOCAB, FakeRunner, next_token

from kakera.cache.host import CacheSizes
from kakera.cache.integrity import check_integrity
from kakera.cache.prefix import PrefixCache
from kakera.contract.events import Event, Finished, Flushed, PromptLogprobs, Tokens
from kakera.contract.grid import PAGE
from kakera.contract.request import NO_LIMIT, Boundary, Request, Sampling
from kakera.contract.step import StepPlan
from kakera.schedule.drafts import Drafts
from kakera.schedule.limits import Limits
from kakera.schedule.scheduler import Scheduler

CHECKPOINT_BYTES, SINK_BYTES, PAGE_BYTES = 100, 20, 5


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


class Driver:
    """`host` is in checkpoints' worth of bytes."""

    def __init__(
        self,
        pages=256,
        slots=4,
        chunk=512,
        context=300_000,
        host=100,
        windowed=True,
        max_waiting=1000,
        seconds=None,
        saves=2**31,
        drafter=None,
        disk=None,
    ):
        host_bytes = int(host * CHECKPOINT_BYTES)
        self.cache = PrefixCache(CacheSizes(pages, host_bytes, CHECKPOINT_BYTES, SINK_BYTES, PAGE_BYTES, windowed))
        self.clock = Clock()
        limits = Limits(context=context, pages=pages, slots=slots, chunk=chunk, max_waiting=max_waiting, saves=saves)
        drafts = drafter if isinstance(drafter, Drafts) else drafter and Drafts(drafter)
        self.scheduler = Scheduler(limits, self.cache, self.clock, drafts, disk)
        self.runner = FakeRunner(self.cache, self.context_of, seconds or (lambda plan: 0.01))
        self.runner.disk = disk
        if disk is not None:
            disk.restart(self.runner)
        self.plans: list[StepPlan] = []
        self.text: dict[str, list[int]] = defaultdict(list)
        self.finished: dict[str, Finished] = {}
        self.echo: dict[str, tuple] = {}
        self._serial = 0

    def submit(
        self,
        tokens,
        max_tokens=4,
        id=None,
        boundaries=(),
        salt=b"",
        cache=True,
        allowed=NO_LIMIT,
        client="",
        background=False,
        **sampling,
    ) -> str:
        self._serial += 1
        name = id or f"r{self._serial}"
        chosen = Sampling(max_tokens=max_tokens, seed=1, **sampling)
        self.scheduler.submit(
            Request(name, tuple(tokens), chosen, tuple(boundaries), salt, cache, client, background),
            allowed,
        )
        return name

    def step(self) -> bool:
        """One step; False if there was nothing to do."""
        plan = self.scheduler.plan_step()
        check_integrity(self.cache)
        if plan is None:
            self.note(self.scheduler.take_events())
            if self.scheduler.disk is not None and self.scheduler.disk.busy and not self.scheduler.stats().idle:
                self.clock.now += 0.01
                return True
            assert self.scheduler.stats().idle, "somebody could go on"
            return False
        self.plans.append(plan)
        self.commit(plan)
        return True

    def commit(self, plan: StepPlan) -> None:
        result = self.runner.execute(plan, self.scheduler.sampling_of(plan))
        self.clock.now += result.seconds
        self.note(self.scheduler.commit(plan, result))
        check_integrity(self.cache)

    def context_of(self, request_id: str) -> tuple[int, ...]:
        return tuple(self.scheduler.running.get(request_id).tokens)

    def flush(self) -> Flushed:
        flushed, plan = self.scheduler.flush()
        self.runner.execute(plan)
        check_integrity(self.cache)
        self.runner.check_stores()
        return flushed

    def resize(self, pages: int, slots: int) -> int:
        """Pages that stay in use. What the others held is lost, as it is when a card's memory goes back."""
        self.scheduler.admit_up_to(slots)
        there, plan = self.scheduler.resize(pages)
        self.runner.execute(plan)
        check_integrity(self.cache)
        assert (
            there == self.cache.device.count and pages <= there and all(page < there for page in self.cache.device.held)
        )
        self.runner.pages = {page: held for page, held in self.runner.pages.items() if page < there}
        return there

    def sleep(self) -> None:
        """The device's memory is lost; who ran goes on from the host store or begins anew."""
        plan = self.scheduler.suspend()
        self.runner.execute(plan)
        check_integrity(self.cache)
        assert not self.cache.device.held and not self.scheduler.stats().running
        self.runner.pages, self.runner.states = {}, {}
        self.plans.append(plan)  # whom the last one let follow has lost its slot

    def stop(self) -> None:
        """As at SIGTERM: what conversations hold goes to the disk."""
        for _ in self.scheduler.disk.write_all(1000.0):
            for action in self.cache.take_actions():
                self.runner.apply(action)
            self.clock.now += 0.1

    def note(self, events: list[Event]) -> None:
        for event in events:
            assert event.request_id not in self.finished, "an event after the last one"
            match event:
                case Tokens():
                    self.text[event.request_id] += event.tokens
                case PromptLogprobs():
                    assert event.request_id not in self.echo
                    self.echo[event.request_id] = event.logprobs
                case Finished():
                    self.finished[event.request_id] = event

    def run(self, most_steps=20_000) -> None:
        for _ in range(most_steps):
            if not self.step():
                break
        assert len(self.scheduler.waiting) == len(self.scheduler.running) == 0, "a request never ended"

    def ask(self, tokens, **kwargs) -> Finished:
        """Submit one request and run until everything is done."""
        name = self.submit(tokens, **kwargs)
        self.run()
        return self.finished[name]

    def cached(self, tokens, **kwargs) -> int:
        return self.ask(tokens, **kwargs).usage.cached_tokens

    def assert_idle_is_clean(self) -> None:
        """Idle: nothing is held but the cache, and the cache can be evicted to the last page."""
        while self.cache.imports.live:  # of clients that left
            self.step()
        for action in self.cache.take_actions():
            self.runner.apply(action)
        self.runner.check_stores()
        assert self.scheduler.running.slots.free == self.scheduler.limits.slots
        assert self.cache.available == self.cache.sizes.pages
        assert not self.cache.leases and not self.cache.checkpoints.reserved
        self.cache._residency.free_device(self.cache.sizes.pages)
        while record := self.cache.checkpoints.victim("message"):
            self.cache._residency.drop_checkpoint(record)
        check_integrity(self.cache)
        for action in self.cache.take_actions():
            self.runner.apply(action)
        self.runner.check_stores()
        assert self.cache.host.used == 0 and self.cache.tree.size == 0


def answer(prompt, max_tokens, stop=(), min_tokens=0) -> list[int]:
    """What the fake model generates, computed without scheduler or cache; a stop token is not shown."""
    tokens = list(prompt)
    for done in range(max_tokens):
        token = next_token(tuple(tokens))
        if done < min_tokens:
            while token in stop:
                token = (token + 1) % VOCAB
        if token in stop:
            break
        tokens.append(token)
    return tokens[len(prompt) :]


def prose(count: int, seed: int = 0) -> tuple[int, ...]:
    """`count` tokens of a text that differs from other seeds' everywhere."""
    return tuple((seed * 7919 + i * 31 + i // 64) % 100_003 for i in range(count))


def message_ends(*positions: int, system: int | None = None) -> list[Boundary]:
    ends = [Boundary(position, "message") for position in positions]
    return ([Boundary(system, "system")] if system is not None else []) + ends


def floor64(tokens: int) -> int:
    return tokens // PAGE * PAGE
