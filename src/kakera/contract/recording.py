"""A recording: every step that a runner carried out, and what came of it, as a file that can be replayed. No torch.

A file is a header and then steps, each a msgpack message behind its length in four bytes. Token ids are other people's
text. Unless prompts are asked for, each id is replaced by a random stand-in that is the same throughout the file and
nowhere written down: which prefixes were shared, restored and continued stays true, what they said does not. Images
are black then, and have another name.
"""

from __future__ import annotations

import hashlib
import os
import random
import struct
from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from kakera.contract.request import Sampling
from kakera.contract.step import (
    Action,
    EncodeImage,
    ForgetImages,
    RowResult,
    SamplingInput,
    Segment,
    StepPlan,
    StepResult,
)
from kakera.errors import UsageError

VERSION = 1
MOST_BYTES = 256 * 2**20  # of a file; then it ends, and the server goes on
LENGTH = struct.Struct("<I")


class Header(msgspec.Struct, frozen=True, array_like=True):
    """Who recorded. `wishes`: the memory options that give the same plan again; `pages`: of the device then."""

    version: int
    kakera: str
    model: str
    wishes: dict[str, str | int | None]
    vocab: int
    pages: int
    prompts: bool  # False: tokens are stand-ins


class Input(msgspec.Struct, frozen=True, array_like=True):
    """A request as it was when the first token was chosen for it; later steps go on from there."""

    request_id: str
    sampling: Sampling
    context: bytes  # 32-bit integers
    prompt_tokens: int

    @property
    def tokens(self) -> array[int]:
        """Raises ValueError if the bytes are no whole number of integers."""
        return array("i", self.context)


class Yielded(msgspec.Struct, frozen=True, array_like=True):
    """What a row gave. `prints`: hashes of its state and of the pages it completed, b"" where none were taken."""

    request_id: str
    tokens: tuple[int, ...]
    error: str
    prints: bytes = b""


class RecordedStep(msgspec.Struct, frozen=True, array_like=True):
    plan: StepPlan
    inputs: tuple[Input, ...]
    yielded: tuple[Yielded, ...]


@dataclass
class StandIns:
    """A random one-to-one map of token ids within a vocabulary, made as ids come."""

    vocab: int
    _free: list[int] = field(default_factory=list)
    _known: dict[int, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._key = os.urandom(32)
        self._free = list(range(self.vocab))
        random.SystemRandom().shuffle(self._free)

    def digest(self, digest: bytes) -> bytes:
        """The same name for the same image, from which nobody can tell whether it is one that he knows."""
        return hashlib.blake2b(digest, digest_size=len(digest), key=self._key).digest()

    def __call__(self, tokens: Iterable[int]) -> tuple[int, ...]:
        known = self._known
        return tuple([known[t] if t in known else known.setdefault(t, self._free.pop()) for t in tokens])


class Recorder:
    """Writes a recording. `full` once the file has its size: nothing more is written then."""

    def __init__(self, path: Path, header: Header, most_bytes: int = MOST_BYTES) -> None:
        """Raises OSError. The file is readable by its owner alone; an older one is replaced, and nothing but a file."""
        if path.is_file():
            path.unlink()
        self._file = os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb")
        self._left = most_bytes
        self._seen: set[str] = set()
        self._hidden: StandIns | None = None if header.prompts else StandIns(header.vocab)
        self.full = False
        self._write(header)

    def add(
        self, plan: StepPlan, sampling: Mapping[str, SamplingInput], result: StepResult, prints: Sequence[bytes] = ()
    ) -> None:
        """`sampling` as it was before the step: its contexts grow. `prints`: one a row, or none. Raises OSError."""
        begun = [given for given in sampling.values() if given.request_id not in self._seen]
        self._seen.update(given.request_id for given in begun)
        by_row = dict(zip((row.request_id for row in plan.rows), prints, strict=False))
        hidden = self._hidden
        self._write(
            RecordedStep(
                _hide_plan(plan, hidden) if hidden else plan,
                tuple(_input(given, hidden) for given in begun),
                tuple(_yielded(row, by_row.get(row.request_id, b""), hidden) for row in result.rows),
            )
        )

    def _write(self, message: Header | RecordedStep) -> None:
        data = msgspec.msgpack.encode(message)
        if self.full or len(data) + LENGTH.size > self._left:
            self.full = True
            return
        self._left -= len(data) + LENGTH.size
        self._file.write(LENGTH.pack(len(data)) + data)
        self._file.flush()  # whoever looks for a wrong answer may kill the server


def _hide_plan(plan: StepPlan, hide: StandIns) -> StepPlan:
    def rows(found: tuple[Segment, ...]) -> tuple[Segment, ...]:
        return tuple(
            msgspec.structs.replace(
                row,
                tokens=hide(row.tokens),
                images=tuple(msgspec.structs.replace(part, digest=hide.digest(part.digest)) for part in row.images),
            )
            for row in found
        )

    def action(found: Action) -> Action:
        match found:
            case EncodeImage(digest):
                return msgspec.structs.replace(found, digest=hide.digest(digest), pixels=b"")
            case ForgetImages(digests):
                return ForgetImages(tuple(map(hide.digest, digests)))
        return found

    before = tuple(map(action, plan.before))
    return msgspec.structs.replace(plan, before=before, decode=rows(plan.decode), prefill=rows(plan.prefill))


def _input(given: SamplingInput, hide: StandIns | None) -> Input:
    """Without prompts, what a token is chosen by goes too: a grammar, a bias and end tokens tell of the text."""
    if hide is None:
        context, sampling = given.context, given.sampling
    else:
        context, sampling = hide(given.context), Sampling(given.sampling.max_tokens, seed=0)
    return Input(given.request_id, sampling, array("i", context).tobytes(), given.prompt_tokens)


def _yielded(row: RowResult, prints: bytes, hide: StandIns | None) -> Yielded:
    return Yielded(row.request_id, hide(row.tokens) if hide else row.tokens, row.error, prints)


def check_place(path: Path) -> None:
    """Whether a recording can be begun here, before minutes of loading: a new file, or one in an older recording's
    place. Raises UsageError."""
    if path.exists() and path.stat().st_size:
        try:
            read_recording(path)
        except UsageError:
            raise UsageError(f"--record {path} is there and is no recording: it is not replaced") from None
    elif path.is_dir() or not os.access(path.parent, os.W_OK):
        raise UsageError(f"--record {path}: no file can be made there")


def ends_whole(path: Path) -> bool:
    """Whether the last step is there to its end; a server that was killed may have left half of one."""
    size = sum(LENGTH.size + len(message) for message in _messages(path))
    return size == path.stat().st_size


def read_recording(path: Path) -> tuple[Header, Iterator[RecordedStep]]:
    """The header, and the steps as they are read, one in memory at a time; a step that was cut off ends them. Raises
    UsageError, and so do the steps."""
    messages = _messages(path)
    try:
        header = msgspec.msgpack.decode(next(messages, b""), type=Header)
    except msgspec.DecodeError:
        raise UsageError(f"{path} is no recording of kakera serve --record") from None
    if header.version != VERSION:
        raise UsageError(f"{path} was recorded by kakera {header.kakera}, which writes another form of recordings")
    return header, _steps(path, messages)


def _steps(path: Path, messages: Iterator[bytes]) -> Iterator[RecordedStep]:
    decoder = msgspec.msgpack.Decoder(RecordedStep)
    for number, message in enumerate(messages, 1):
        try:
            yield decoder.decode(message)
        except msgspec.DecodeError as error:
            raise UsageError(f"{path} is damaged: its step number {number} can not be read ({error})") from None


def _messages(path: Path) -> Iterator[bytes]:
    try:
        left = path.stat().st_size
        with path.open("rb") as file:
            while left >= LENGTH.size:
                (length,) = LENGTH.unpack(file.read(LENGTH.size))
                left -= LENGTH.size + length
                if left < 0:
                    return
                yield file.read(length)
    except OSError as error:
        raise UsageError(f"{path}: {error.strerror}") from None
    except struct.error:  # it becomes shorter while it is read
        return
