"""Drive an engine until every given request has ended: the Python API for tests, evaluation and scripts."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from kakera.contract.events import Event, Finished, PromptLogprobs, TokenLogprob, Tokens
from kakera.contract.request import Request
from kakera.errors import RequestRefused
from kakera.run.interface import Engine


@dataclass
class Completion:
    """What became of one request. `finished` is set when it has ended."""

    tokens: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprob] = field(default_factory=list)
    finished: Finished | None = None


def generate(
    engine: Engine, requests: Iterable[Request], on_event: Callable[[Event], None] | None = None
) -> dict[str, Completion]:
    """Run all requests with continuous batching; returns completions by request id, in the order given.

    A full queue is waited for; a request that can never run raises RequestRefused. However this ends, none of the
    requests is left in the engine. Events of requests that others submitted are only shown to `on_event`.
    """
    waiting = deque(requests)
    done: dict[str, Completion] = {request.id: Completion() for request in waiting}
    running: set[str] = set()
    try:
        while waiting or running:
            _submit(engine, waiting, running)
            for event in engine.step():
                if completion := done.get(event.request_id):
                    _note(completion, event)
                if isinstance(event, Finished):
                    running.discard(event.request_id)
                if on_event:
                    on_event(event)
    finally:
        for request_id in running:
            engine.abort(request_id)
        if running:
            engine.step()  # takes the events of the aborts, or the next request with such an id would see them
    return done


def _submit(engine: Engine, waiting: deque[Request], running: set[str]) -> None:
    while waiting:
        try:
            engine.submit(waiting[0])
        except RequestRefused as refusal:
            if refusal.status != 429:
                raise
            return
        running.add(waiting.popleft().id)


def _note(completion: Completion, event: Event) -> None:
    match event:
        case Tokens(_, tokens, logprobs):
            completion.tokens += tokens
            completion.logprobs += logprobs
        case PromptLogprobs(_, logprobs):
            completion.prompt_logprobs += logprobs
        case Finished():
            completion.finished = event
