"""The cache's announcements on the wire, as a router meets them: vLLM's maps, numbers, replay and restarts."""

from __future__ import annotations

import json
from array import array

import msgspec
import pytest
import zmq
from tests.command_server import free_port_pair

from kakera.contract.cached import PagesRemoved, PagesStored
from kakera.contract.grid import PAGE
from kakera.contract.request import Boundary, Request, Sampling
from kakera.errors import UsageError
from kakera.run.process import kv_events
from kakera.run.process.kv_events import END, KvEvents, Publisher
from kakera.run.scripted import ScriptedRecipe

PATIENCE = 20_000  # ms; nothing here takes so long


@pytest.fixture
def place(monkeypatch) -> KvEvents:
    monkeypatch.setattr(kv_events, "HEARTBEAT_SECONDS", 0.05)
    return KvEvents("127.0.0.1", free_port_pair(), "kv@pod@mini")


class Router:
    """Subscribes, asks for what it has missed, and keeps the index: (parent, tokens of a block) -> hash."""

    def __init__(self, place: KvEvents) -> None:
        context = zmq.Context.instance()
        self._events, self._replay = context.socket(zmq.SUB), context.socket(zmq.DEALER)
        for each, endpoint in ((self._events, place.endpoint), (self._replay, place.replay)):
            each.setsockopt(zmq.RCVTIMEO, PATIENCE)
            each.setsockopt(zmq.LINGER, 0)
            each.connect(endpoint)
        self._events.setsockopt(zmq.SUBSCRIBE, b"kv@")
        self.next = 0
        self.index: dict[tuple[int | None, tuple[int, ...]], int] = {}

    def close(self) -> None:
        self._events.close()
        self._replay.close()

    def hear(self) -> None:
        topic, number, payload = self._events.recv_multipart()
        assert topic == b"kv@pod@mini"
        number = int.from_bytes(number, "big")
        if number < self.next - 1:  # the worker has started again
            self.index, self.next = {}, 0
        if number > self.next:
            self.ask()
        elif number == self.next:
            self.take(payload)

    def ask(self) -> list[int]:
        """Have all from the next number on sent again; returns the numbers that came."""
        self._replay.send_multipart([b"", self.next.to_bytes(8, "big")])
        came = []
        while True:
            _, topic, number, payload = self._replay.recv_multipart()
            if number == END:
                return came
            assert topic == b"kv@pod@mini"
            came.append(int.from_bytes(number, "big"))
            self.next = came[-1]
            self.take(payload)

    def take(self, payload: bytes) -> None:
        self.next += 1
        _, events, rank = msgspec.msgpack.decode(payload)
        assert rank == 0
        for event in events:
            match event["type"]:
                case "AllBlocksCleared":
                    self.index = {}
                case "BlockRemoved":
                    gone = set(event["block_hashes"])
                    self.index = {key: name for key, name in self.index.items() if name not in gone}
                case "BlockStored":
                    tokens, parent = event["token_ids"], event["parent_block_hash"]
                    assert event["block_size"] == PAGE and len(tokens) == PAGE * len(event["block_hashes"])
                    for i, name in enumerate(event["block_hashes"]):
                        self.index[parent, tuple(tokens[i * PAGE : (i + 1) * PAGE])] = name
                        parent = name

    def credit(self, tokens) -> int:
        parent, count = None, 0
        while parent := self.index.get((parent, tuple(tokens[count : count + PAGE]))):
            count += PAGE
        return count

    def until(self, reached) -> None:
        while not reached():
            self.hear()


def worker(place, path):
    path.write_text(json.dumps({"streams": [{"text": "Hello."}]}))
    return ScriptedRecipe(path, place)()


def answer(engine, name: str, tokens) -> None:
    sampling = Sampling(max_tokens=1, seed=1)
    engine.submit(Request(name, tokens, sampling, (Boundary(len(tokens), "prompt"),)))
    while not engine.stats().idle:
        engine.step()
        engine.announce()


def test_a_router_knows_what_a_worker_can_hit_also_after_gaps_flushes_and_restarts(place, tmp_path):
    engine = worker(place, tmp_path / "script.json")
    router = Router(place)
    prompts = [array("i", range(begin, begin + 5 * PAGE + 9)) for begin in (100, 500)]
    for name, prompt in enumerate(prompts):
        answer(engine, str(name), prompt)
    router.until(lambda: all(router.credit(prompt) == 5 * PAGE for prompt in prompts))
    late = Router(place)
    late.until(lambda: late.index == router.index)
    engine.flush()
    engine.announce()
    router.until(lambda: not router.index)
    answer(engine, "again", prompts[0])
    router.until(lambda: router.credit(prompts[0]) == 5 * PAGE)
    engine._publisher.close()
    empty = worker(place, tmp_path / "script.json")
    router.until(lambda: not router.index)
    for each in (router, late):
        each.close()
    empty._publisher.close()


def test_a_batch_is_no_larger_than_routers_take(monkeypatch):
    monkeypatch.setattr(kv_events, "BATCH_TOKENS", 3 * PAGE)
    monkeypatch.setattr(kv_events, "BATCH_EVENTS", 2)
    events = [PagesStored((bytes(16),) * n, None, bytes(n * PAGE * 4), "GPU") for n in (2, 1, 1, 9, 1)]
    assert [[len(event.hashes) for event in part] for part in kv_events._parts(events)] == [[2, 1], [1], [9], [1]]


def test_who_asks_for_batches_that_are_gone_hears_everything_anew(place, tmp_path, monkeypatch):
    monkeypatch.setattr(kv_events, "KEPT_BATCHES", 2)
    engine = worker(place, tmp_path / "script.json")
    prompts = [array("i", range(begin, begin + 2 * PAGE + 1)) for begin in (100, 500, 900)]
    for name, prompt in enumerate(prompts):
        answer(engine, str(name), prompt)
    router = Router(place)
    while not engine._publisher.lost.is_set():
        router.hear()
    engine.announce()
    router.until(lambda: all(router.credit(prompt) == 2 * PAGE for prompt in prompts))
    router.close()
    engine._publisher.close()


def test_an_engine_does_not_wait_for_its_publisher(place, tmp_path, monkeypatch):
    engine = worker(place, tmp_path / "script.json")
    publisher, engine._publisher = engine._publisher, type("Stuck", (), {"full": True})()
    prompt = array("i", range(3 * PAGE + 1))
    answer(engine, "one", prompt)
    engine._publisher = publisher
    router = Router(place)
    engine.announce()
    router.until(lambda: router.credit(prompt) == 3 * PAGE)
    router.close()
    publisher.close()


def test_ports_in_use_and_strange_requests(place):
    publisher = Publisher(place)
    with pytest.raises(UsageError, match=f"--kv-events: {place.endpoint} can not be used"):
        Publisher(place)
    asker = zmq.Context.instance().socket(zmq.DEALER)
    asker.setsockopt(zmq.RCVTIMEO, PATIENCE)
    asker.connect(place.replay)
    publisher.offer([PagesRemoved((b"x" * 16,), "CPU")])
    for frames in ([b"1"], [b"", b"", b"", b""], [b"", b"not a number"], [bytes(8)]):
        asker.send_multipart(frames)
    numbers = []
    while (frames := asker.recv_multipart())[1] != END:
        numbers.append(int.from_bytes(frames[1], "big"))
    assert numbers == list(range(len(numbers))) and len(numbers) >= 3
    asker.close(linger=0)
    publisher.close()
