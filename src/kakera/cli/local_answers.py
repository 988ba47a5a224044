"""Answers of an engine in this process."""

from __future__ import annotations

import signal
from collections.abc import Generator, Iterator, Sequence
from contextlib import contextmanager
from itertools import count
from threading import Event as Flag
from typing import Any

from kakera.cli.conversation import Ended, Piece, Reading, Settings
from kakera.contract.events import Event, Finished, Progress, Tokens
from kakera.contract.request import Request, Sampling
from kakera.errors import KakeraError, UsageError
from kakera.run.interface import Engine
from kakera.server.choice import ChatOutput, ChoiceText, Delta, Job
from kakera.server.model import ServedModel


class LocalModel:
    """Raises UsageError for a model without a chat template."""

    def __init__(self, engine: Engine, model: ServedModel, settings: Settings):
        if model.template is None:
            raise UsageError(f"{model.name} has no chat template: it is a base model and can not chat")
        self.engine, self.model, self.settings = engine, model, settings
        self._template = model.template
        self._ids = count()

    def answer(self, messages: Sequence[dict[str, Any]]) -> Generator[Reading | Piece | Ended]:
        """See Answerer."""
        variables = {"enable_thinking": self.settings.thinking}
        sight = None if self.model.images is None else self.model.images.look
        prompt = self._template.prompt(list(messages), variables=variables, sight=sight)
        job = Job(
            f"chat-{next(self._ids)}",
            prompt.tokens,
            self._sampling(),
            prompt.boundaries,
            chat=ChatOutput(prompt.opens_thinking),
            images=prompt.images,
        )
        text = ChoiceText(job, 0, self.model.tokenizer)
        for event in self._events(job.request(0)):
            match event:
                case Progress(_, done, total):
                    yield Reading(done, total)
                case Tokens() as tokens:
                    yield from _pieces(text.feed(tokens))
                case Finished() as finished:
                    yield from _pieces(text.finish(finished))
                    if finished.reason == "error":
                        raise KakeraError(finished.message)
                    yield Ended(finished.reason, finished.usage)

    def _events(self, request: Request) -> Iterator[Event]:
        """Up to and including Finished. Ctrl-C aborts the request between two steps."""
        self.engine.submit(request)
        ended = False
        with _interrupt() as interrupted:
            while not ended:
                if interrupted.is_set():
                    self.engine.abort(request.id)
                for event in self.engine.step():
                    yield event
                    ended = ended or isinstance(event, Finished)

    def _sampling(self) -> Sampling:
        defaults, wish = self.model.defaults, self.settings.temperature
        return Sampling(
            max_tokens=self.settings.max_tokens,
            seed=self.settings.seed,
            temperature=defaults.temperature if wish is None else wish,
            top_p=defaults.top_p,
            top_k=defaults.top_k,
            min_p=defaults.min_p,
            repetition_penalty=defaults.repetition_penalty,
            stop_token_ids=self.model.eos,
        )


def _pieces(delta: Delta) -> Iterator[Piece]:
    if delta.reasoning:
        yield Piece("reasoning", delta.reasoning)
    if delta.text:
        yield Piece("content", delta.text)


@contextmanager
def _interrupt() -> Iterator[Flag]:
    """Ctrl-C sets the flag instead of tearing a step apart: the engine must commit what it planned."""
    flag = Flag()
    before = signal.signal(signal.SIGINT, lambda *_: flag.set())
    try:
        yield flag
    finally:
        signal.signal(signal.SIGINT, before)
