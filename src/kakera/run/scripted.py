"""`scripted:FILE`: a fake model that plays back token streams, for testing parsers, streaming and clients.

It sits where the torch runner sits, so everything else (scheduler, processes, server) is the real thing. FILE is JSON:

    {"tokenizer": "DIR",     optional: directory of a tokenizer.json; default: the bundled mini model's
     "context": 4096,        optional: tokens of the longest request
     "streams": [
       {"match": "weather",  optional: for prompts whose text contains this; a stream without it is for any prompt
        "text": "Hello.",    tokenised as the model's tokenizer does, or instead of it
        "pieces": ["H", "el", {"bytes": "f09f"}, {"bytes": "9880"}, 16374],
        "delay_ms": 20}]}    optional: before each token

A string piece is one token if the vocabulary has exactly that text, otherwise the tokens of that piece alone; so tokens
never reach over a piece's border. A number is a token id. {"bytes": hex} is one token if the vocabulary has these
bytes, otherwise one token a byte: that is how half a character is written. Control tokens may be spelled
("<|im_end|>"). After its stream a request gets the end token for ever.

A script keeps to a thinking budget (a forced token takes the place of the script's) and does not look at grammars that
only bind calls which the model may leave out. Where a request demands a grammar, a script that breaks it fails.

A request takes the first stream whose `match` its prompt contains, else the streams without `match` in turn.
"""

from __future__ import annotations

import json
import math
import time
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import cycle
from pathlib import Path
from typing import Any

import kakera
from kakera.cache.host import CacheSizes
from kakera.cache.prefix import PrefixCache
from kakera.constrain.compiler import Compiler, GrammarFailed
from kakera.constrain.output import Outputs, grammar_failure
from kakera.contract.events import RegionRead, TokenLogprob
from kakera.contract.grid import PAGE
from kakera.contract.step import RowResult, SamplingInput, Segment, StepPlan, StepResult, follow_drafts
from kakera.errors import CheckpointError
from kakera.run.engine import LocalEngine
from kakera.run.interface import NOTHING_SAMPLED, PROBE
from kakera.run.process.kv_events import KvEvents, Publisher
from kakera.schedule.limits import Limits
from kakera.schedule.scheduler import Scheduler
from kakera.text.tokenizer import Tokenizer

BUNDLED = Path(kakera.__file__).parent / "data" / "mini"
DEFAULT_CONTEXT = 4096
REMEMBERED_REQUESTS = 10_000
SLOTS = 8
CHUNK = 512
HOST_RECORDS = 4096  # a script has no states: the cache counts its records, one byte each


class ScriptFailed(Exception):
    """The script says what the request's grammar does not allow."""


@dataclass(frozen=True)
class Stream:
    tokens: tuple[int, ...]
    match: str | None = None
    delay_seconds: float = 0.0


@dataclass(frozen=True)
class Script:
    """A parsed script file. `tokenizer_dir` is the model directory whose tokenizer and template go with it."""

    tokenizer_dir: Path
    context: int
    streams: tuple[Stream, ...]
    tokenizer: Tokenizer

    @staticmethod
    def load(path: Path) -> Script:
        """Raises CheckpointError saying what in the file is wrong."""
        try:
            document = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise CheckpointError(f"{path}: can not be read as a script ({error})") from None
        entries = document.get("streams") if isinstance(document, dict) else None
        if not isinstance(entries, list) or not entries:
            raise CheckpointError(f'{path}: a script is an object with a list "streams" of at least one stream')
        context = document.get("context", DEFAULT_CONTEXT)
        if not isinstance(context, int) or context < 2:
            raise CheckpointError(f'{path}: "context" is {context!r}; give at least 2 tokens')
        directory = (path.parent / str(document["tokenizer"])) if "tokenizer" in document else BUNDLED
        tokenizer = Tokenizer.load(directory)
        streams = tuple(_stream(entry, tokenizer, f"{path}: streams[{i}]") for i, entry in enumerate(entries))
        return Script(directory, context, streams, tokenizer)


class ScriptedRunner:
    """Implements Runner. Log-probabilities are 0 for the token played and -infinity for every alternative."""

    def __init__(self, script: Script):
        if script.tokenizer.eos is None:
            raise CheckpointError(
                f"{script.tokenizer_dir}: tokenizer_config.json names no eos_token to end streams with"
            )
        self._end: int = script.tokenizer.eos
        self._tokenizer = script.tokenizer
        self._matching = [stream for stream in script.streams if stream.match is not None]
        self._turns = cycle([s for s in script.streams if s.match is None] or [Stream(())])
        self._chosen: OrderedDict[str, Stream] = OrderedDict()
        self._outputs = Outputs(Compiler(lambda: script.tokenizer, script.tokenizer.vocab))

    def execute(self, plan: StepPlan, sampling: Mapping[str, SamplingInput] = NOTHING_SAMPLED) -> StepResult:
        began = time.perf_counter()
        sampled = [sampling[row.request_id] for row in plan.rows if row.sampled]
        if delay := max((self._stream_of(given).delay_seconds for given in sampled), default=0.0):
            time.sleep(delay)
        results = tuple(self._result(row, sampling.get(row.request_id)) for row in plan.rows)
        return StepResult(plan.step, results, time.perf_counter() - began)

    def sweep(self) -> list[RegionRead]:
        return []

    def _result(self, row: Segment, given: SamplingInput | None) -> RowResult:
        if given is None:
            return RowResult(row.request_id)
        prompt = _prompt_logprobs(row, given)
        if not row.sampled:
            return RowResult(row.request_id, prompt_logprobs=prompt)
        result = follow_drafts(row.drafts, lambda i: self._play(given.behind(row.drafts[:i])))
        return replace(result, prompt_logprobs=prompt)

    def _play(self, given: SamplingInput) -> RowResult:
        """The script's next token."""
        stream, played = self._stream_of(given).tokens, given.generated
        token = stream[played] if played < len(stream) else self._end
        try:
            chosen, complete = self._constrained(given, token)
        except GrammarFailed as error:
            return grammar_failure(given, error)
        except ScriptFailed as error:
            return RowResult(given.request_id, error=f"the script does not follow the request's grammar: {error}")
        if chosen is None:
            return RowResult(given.request_id, complete=True)
        wanted = given.sampling.logprobs
        logprobs = () if wanted is None else (_certain(chosen, wanted),)
        return RowResult(given.request_id, (chosen,), logprobs, complete=complete)

    def _constrained(self, given: SamplingInput, token: int) -> tuple[int | None, bool]:
        """The token to play, None if the answer was complete before it, and whether it is complete with it."""
        constraint = given.sampling.constraint
        if constraint is not None and not constraint.required:
            given = replace(given, sampling=replace(given.sampling, constraint=None))
        allowed = self._outputs.allowed(given)
        if allowed is None:
            return None, True
        if allowed.forced is not None:
            token = allowed.forced
        elif not allowed.permits(token):
            raise ScriptFailed(f"token {token}, {self._tokenizer.token_bytes(token)!r}, is not allowed here")
        return token, self._outputs.took(given, token)

    def _stream_of(self, given: SamplingInput) -> Stream:
        name = given.request_id
        if name.startswith(PROBE):
            return Stream(())
        if name not in self._chosen:
            text = self._tokenizer.decode(given.context[: given.prompt_tokens]) if self._matching else ""
            found = next((s for s in self._matching if s.match is not None and s.match in text), None)
            self._chosen[name] = found or next(self._turns)
            if len(self._chosen) > REMEMBERED_REQUESTS:
                self._chosen.popitem(last=False)
        return self._chosen[name]


@dataclass(frozen=True)
class ScriptedRecipe:
    """A picklable build function for the engine process: the real scheduler around a script. Needs no torch."""

    path: Path
    kv_events: KvEvents | None = None

    @property
    def plan(self) -> None:
        """A script has no weights and no states, so there is nothing to plan."""

    def __call__(self) -> LocalEngine:
        script = Script.load(self.path)
        pages = SLOTS * -(-script.context // PAGE)
        limits = Limits(context=script.context, pages=pages, slots=SLOTS, chunk=CHUNK)
        sizes = CacheSizes(pages, HOST_RECORDS, checkpoint_bytes=1, sink_bytes=1, page_bytes=1, windowed=False)
        engine = LocalEngine(Scheduler(limits, PrefixCache(sizes), time.monotonic), ScriptedRunner(script))
        if self.kv_events is not None:
            engine.publish(Publisher(self.kv_events))
        return engine


def _prompt_logprobs(row: Segment, given: SamplingInput) -> tuple[TokenLogprob, ...]:
    targets = given.context[row.start + 1 : row.start + 1 + row.scored]
    return tuple(_certain(token, given.sampling.prompt_logprobs or 0) for token in targets)


def _certain(token: int, alternatives: int) -> TokenLogprob:
    others = [(other, -math.inf) for other in range(alternatives + 1) if other != token]
    return TokenLogprob(token, 0.0, ((token, 0.0), *others)[:alternatives])


def _stream(entry: Any, tokenizer: Tokenizer, where: str) -> Stream:
    if not isinstance(entry, dict) or ("text" in entry) == ("pieces" in entry):
        raise CheckpointError(f'{where}: a stream is an object with either "text" or "pieces"')
    for name, kind in (("text", str), ("pieces", list), ("match", str), ("delay_ms", int | float)):
        if name in entry and not isinstance(entry[name], kind):
            raise CheckpointError(f'{where}: "{name}" can not be {entry[name]!r}')
    if entry.get("delay_ms", 0) < 0:
        raise CheckpointError(f'{where}: "delay_ms" is negative')
    if "text" in entry:
        tokens = tokenizer.encode(entry["text"], allow_special=True)
    else:
        tokens = [
            token for i, piece in enumerate(entry["pieces"]) for token in _piece(piece, tokenizer, f"{where}[{i}]")
        ]
    return Stream(tuple(tokens), entry.get("match"), float(entry.get("delay_ms", 0)) / 1000)


def _piece(piece: Any, tokenizer: Tokenizer, where: str) -> list[int]:
    if isinstance(piece, int) and 0 <= piece < tokenizer.vocab:
        return [piece]
    if isinstance(piece, str):
        token = tokenizer.token_of_bytes(piece.encode())
        return tokenizer.encode(piece, allow_special=True) if token is None else [token]
    if isinstance(piece, dict) and isinstance(piece.get("bytes"), str):
        return _bytes_piece(piece["bytes"], tokenizer, where)
    raise CheckpointError(f'{where}: a piece is a string, a token id below {tokenizer.vocab} or {{"bytes": "hex"}}')


def _bytes_piece(text: str, tokenizer: Tokenizer, where: str) -> list[int]:
    try:
        data = bytes.fromhex(text)
    except ValueError:
        raise CheckpointError(f"{where}: {text!r} is not hexadecimal") from None
    whole = tokenizer.token_of_bytes(data)
    parts = [whole] if whole is not None else [tokenizer.token_of_bytes(data[i : i + 1]) for i in range(len(data))]
    if any(part is None for part in parts):
        raise CheckpointError(f"{where}: the vocabulary lacks some of these bytes")
    return [part for part in parts if part is not None]
