"""What the cache announces, in the form and over the sockets of vLLM's KV-cache events: routers subscribe to it.

A PUB socket sends three frames: topic, sequence number (8 bytes, big-endian, from 0) and a msgpack array of time,
events as maps, and rank. A ROUTER socket on the next port sends batches again: asked for a first number, it answers
with those from there on (topic, number, payload) and ends with the number -1. A thread of its own writes and sends, so
a slow network costs the engine nothing; nobody who reads too slowly is waited for.
"""

from __future__ import annotations

import contextlib
import logging
import sys
import threading
import time
from array import array
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import zmq

from kakera.contract.cached import AllRemoved, CacheEvent, PagesRemoved, PagesStored
from kakera.contract.grid import PAGE
from kakera.errors import UsageError

log = logging.getLogger(__name__)
HEARTBEAT_SECONDS = 1.0  # a router notices by its number that it has missed something, or that a worker began again
KEPT_BATCHES, KEPT_BYTES = 10_000, 64 * 2**20  # to be sent again
BATCH_TOKENS, BATCH_EVENTS = 10**6, 1000  # vllm-router 0.1.17 takes 16 MiB and not any number of events
UNSENT_BATCHES = 100  # beyond these the engine keeps changes to itself, where they add up to fewer
END = (-1).to_bytes(8, "big", signed=True)


@dataclass(frozen=True)
class KvEvents:
    """Where to publish: `host` "*" or an address, `port` for events and the next one for what is asked for again."""

    host: str
    port: int
    topic: str = ""

    @property
    def endpoint(self) -> str:
        return f"tcp://{self.host}:{self.port}"

    @property
    def replay(self) -> str:
        return f"tcp://{self.host}:{self.port + 1}"


class Publisher:
    """`offer` and `full` by the engine's thread, all else in one of its own.

    `lost`: somebody has asked for batches that are not kept; everything has to be told again.
    """

    def __init__(self, place: KvEvents) -> None:
        """Raises UsageError if the ports can not be had."""
        self._topic = place.topic.encode()
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context.instance()
        self._out = _bound(context, zmq.PUB, place.endpoint, 100_000)
        self._replay = _bound(context, zmq.ROUTER, place.replay, 2 * KEPT_BATCHES)
        self._bell, self._heard = context.socket(zmq.PAIR), context.socket(zmq.PAIR)
        self._heard.bind(f"inproc://kv-events-{id(self)}")
        self._bell.connect(f"inproc://kv-events-{id(self)}")
        self._unsent: deque[Sequence[CacheEvent]] = deque()
        self._kept: deque[tuple[int, bytes]] = deque()
        self._kept_bytes = 0
        self._next = 0
        self._told = False  # anything but that nothing is there
        self.lost = threading.Event()
        self._closing = False
        self._thread = threading.Thread(target=self._run, name="kv-events", daemon=True)
        self._thread.start()

    @property
    def full(self) -> bool:
        return len(self._unsent) >= UNSENT_BATCHES

    def offer(self, events: Sequence[CacheEvent]) -> None:
        """One batch. Nobody waits for it to be sent."""
        self._unsent.append(events)
        self._ring()

    def close(self) -> None:
        """Send what was offered, and let the ports go."""
        self._closing = True
        self._ring()
        self._thread.join(5)

    def _ring(self) -> None:
        with contextlib.suppress(zmq.Again):  # it has not heard the bells before this one
            self._bell.send(b"", zmq.NOBLOCK)

    def _run(self) -> None:
        # Whoever was connected to an earlier server of this name forgets what that one told; a single batch may have
        # the number of its last one and be taken for a copy.
        self._send([AllRemoved()])
        self._send([AllRemoved()])
        poller = zmq.Poller()
        poller.register(self._replay, zmq.POLLIN)
        poller.register(self._heard, zmq.POLLIN)
        while not (self._closing and not self._unsent):
            ready = dict(poller.poll(int(HEARTBEAT_SECONDS * 1000)))
            if not ready:
                self._send([] if self._told else [AllRemoved()])
            if self._heard in ready:
                self._heard.recv()
            while self._unsent:
                self._told = True
                for part in _parts(self._unsent.popleft()):
                    self._send(part)
            if self._replay in ready:
                self._answer(self._replay.recv_multipart())
        for socket in (self._out, self._replay, self._heard, self._bell):
            socket.close(linger=200)

    def _send(self, events: Sequence[CacheEvent]) -> None:
        payload = batch(events, time.time())
        number, self._next = self._next, self._next + 1
        self._kept.append((number, payload))
        self._kept_bytes += len(payload)
        while len(self._kept) > KEPT_BATCHES or (self._kept_bytes > KEPT_BYTES and len(self._kept) > 1):
            self._kept_bytes -= len(self._kept.popleft()[1])
        self._out.send_multipart((self._topic, number.to_bytes(8, "big"), payload))

    def _answer(self, frames: list[bytes]) -> None:
        *address, wanted = frames  # the asker, and an empty frame if it speaks as a REQ socket does
        if len(frames) not in (2, 3) or len(wanted) != 8:
            log.warning("kv events: a request of %d frames was not understood", len(frames))
            return
        first = int.from_bytes(wanted, "big")
        if first < self._kept[0][0]:
            self.lost.set()
        for number, payload in self._kept:
            if number >= first:
                self._replay.send_multipart((*address, self._topic, number.to_bytes(8, "big"), payload))
        self._replay.send_multipart((*address, b"", END, b""))  # without the topic, as vLLM does


def _bound(context: zmq.Context[zmq.Socket[bytes]], kind: int, endpoint: str, unread: int) -> zmq.Socket[bytes]:
    """`unread`: messages that wait for one reader; what comes then is not for it."""
    socket = context.socket(kind)
    socket.setsockopt(zmq.SNDHWM, unread)
    socket.setsockopt(zmq.IPV6, "[" in endpoint)
    try:
        socket.bind(endpoint)
    except zmq.ZMQError as error:
        socket.close(linger=0)
        raise UsageError(f"--kv-events: {endpoint} can not be used ({error.strerror})") from None
    return socket


def _parts(events: Sequence[CacheEvent]) -> Iterator[Sequence[CacheEvent]]:
    """The events in batches that routers take."""
    part: list[CacheEvent] = []
    tokens = 0
    for event in events:
        count = len(event.hashes) * PAGE if isinstance(event, PagesStored) else 0
        if part and (len(part) == BATCH_EVENTS or tokens + count > BATCH_TOKENS):
            yield part
            part, tokens = [], 0
        part.append(event)
        tokens += count
    yield part


def batch(events: Sequence[CacheEvent], at: float) -> bytes:
    """vLLM's KVEventBatch, its events as maps (arrays are refused by newer routers)."""
    return msgspec.msgpack.encode([at, list(_maps(events)), 0])


def _maps(events: Sequence[CacheEvent]) -> Iterator[dict[str, Any]]:
    for event in events:
        match event:
            case PagesStored(hashes, parent, tokens, medium):
                yield {
                    "type": "BlockStored",
                    "block_hashes": [_number(name) for name in hashes],
                    "parent_block_hash": None if parent is None else _number(parent),
                    "token_ids": _ids(tokens),
                    "block_size": PAGE,
                    "lora_id": None,
                    "medium": medium,
                    "lora_name": None,
                }
            case PagesRemoved(hashes, medium):
                yield {"type": "BlockRemoved", "block_hashes": [_number(name) for name in hashes], "medium": medium}
            case AllRemoved():
                yield {"type": "AllBlocksCleared"}


def _number(name: bytes) -> int:
    """Routers take 64 bits, and only as a name: they hash tokens themselves."""
    return int.from_bytes(name[:8], "big")


def _ids(tokens: bytes) -> list[int]:
    ids = array("i", tokens)
    if sys.byteorder == "big":
        ids.byteswap()
    return ids.tolist()
