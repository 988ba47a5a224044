"""What the server process and the engine process say to each other: msgpack over one ZeroMQ pair socket.

Server to engine: Submit, Allow, Abort, Flush, Sweep, Sleep, WakeUp. Engine to server: Ready or Failed once, then
Accepted or Refused per request, Step when a step that admits somebody begins and after each step that had events,
FlushDone, SweepDone, and SleepDone or SleepRefused per question in order, and Alive at least once a second.
"""

from __future__ import annotations

from array import array
from dataclasses import replace

import msgspec

from kakera.contract.events import (
    EngineStats,
    Event,
    Finished,
    Flushed,
    Progress,
    PromptLogprobs,
    RegionRead,
    SleepState,
    Tokens,
)
from kakera.contract.request import NO_LIMIT, Request, packed
from kakera.run.interface import EngineLimits


class Submit(msgspec.Struct, tag=True):
    """A request, its tokens apart and packed: 192K of them as a list take 10 ms to write and read."""

    head: Request
    tokens: bytes
    allowed: int  # tokens that may be generated before an Allow comes

    @staticmethod
    def of(request: Request, allowed: int = NO_LIMIT) -> Submit:
        return Submit(replace(request, tokens=()), packed(request.tokens).tobytes(), allowed)

    @property
    def request(self) -> Request:
        return replace(self.head, tokens=array("i", self.tokens))


class Allow(msgspec.Struct, tag=True):
    """The request's reader has come further: up to `tokens` tokens may be generated in all."""

    request_id: str
    tokens: int


class Abort(msgspec.Struct, tag=True):
    request_id: str


class Flush(msgspec.Struct, tag=True):
    """Forget the cached prefixes that nobody holds, and those on the disk if so."""

    disk: bool = False


class Sweep(msgspec.Struct, tag=True):
    """Time reads of the device's memory."""


class Sleep(msgspec.Struct, tag=True):
    level: int


class WakeUp(msgspec.Struct, tag=True):
    """Take the device's memory again."""


ToEngine = Submit | Allow | Abort | Flush | Sweep | Sleep | WakeUp


class Ready(msgspec.Struct, tag=True):
    limits: EngineLimits
    stats: EngineStats


class Failed(msgspec.Struct, tag=True):
    """The engine can not start; `message` is for a person."""

    message: str
    exit_status: int


class Accepted(msgspec.Struct, tag=True):
    request_id: str


class Refused(msgspec.Struct, tag=True):
    request_id: str
    message: str
    status: int
    code: str
    param: str | None


class Step(msgspec.Struct, tag=True):
    """Events of one step, or of its planning, by kind: msgspec can not tell plain dataclasses in one list apart."""

    progress: list[Progress]
    prompt_logprobs: list[PromptLogprobs]
    tokens: list[Tokens]
    finished: list[Finished]
    stats: EngineStats

    @staticmethod
    def of(events: list[Event], stats: EngineStats) -> Step:
        return Step(
            progress=[e for e in events if isinstance(e, Progress)],
            prompt_logprobs=[e for e in events if isinstance(e, PromptLogprobs)],
            tokens=[e for e in events if isinstance(e, Tokens)],
            finished=[e for e in events if isinstance(e, Finished)],
            stats=stats,
        )

    @property
    def events(self) -> list[Event]:
        """In an order in which a request's last event is Finished."""
        return [*self.progress, *self.prompt_logprobs, *self.tokens, *self.finished]


class Alive(msgspec.Struct, tag=True):
    stats: EngineStats


class FlushDone(msgspec.Struct, tag=True):
    flushed: Flushed
    stats: EngineStats


class SweepDone(msgspec.Struct, tag=True):
    reads: list[RegionRead]


class SleepDone(msgspec.Struct, tag=True):
    """Of a Sleep or a WakeUp."""

    state: SleepState
    stats: EngineStats


class SleepRefused(msgspec.Struct, tag=True):
    message: str
    status: int
    code: str


FromEngine = Ready | Failed | Accepted | Refused | Step | Alive | FlushDone | SweepDone | SleepDone | SleepRefused

encode = msgspec.msgpack.Encoder().encode
decode_to_engine = msgspec.msgpack.Decoder(ToEngine).decode
decode_from_engine = msgspec.msgpack.Decoder(FromEngine).decode
