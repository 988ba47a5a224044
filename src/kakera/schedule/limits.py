"""Limits: the sizes within which the scheduler works. Derived from the Plan; nothing mutates it."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass

from kakera.contract.grid import PAGE
from kakera.contract.request import Request
from kakera.errors import RequestRefused, prompt_too_long
from kakera.plan.plan import Plan


@dataclass(frozen=True)
class Limits:
    """Tokens, pages and requests, except where a unit is named."""

    context: int  # longest request, prompt + completion
    pages: int  # device pages in the pool
    slots: int  # running requests
    chunk: int  # most prefill tokens in one step
    max_waiting: int = 256  # of whom one client's are at most three quarters
    target_seconds: float = 0.25  # between two tokens of a running stream, prefill of others included
    grid: int = 8192  # a checkpoint each so many tokens where the text offers no better place
    vocab: int = 2**31  # token ids of a prompt are below
    saves: int = 2**31  # most checkpoints in a step that lie inside prompts
    image_tokens: int = 2**31  # whose embeddings are kept
    pixel_bytes: int = 2**62  # of images of all requests that wait or run
    room: int = 2048  # for so many tokens more each running request keeps pages while others get the card's memory

    @staticmethod
    def of(plan: Plan, max_waiting: int = 256) -> Limits:
        staged = Limits.saves if plan.staged is None else plan.staged
        return Limits(
            plan.context,
            plan.pages,
            plan.slots,
            plan.chunk,
            max_waiting,
            vocab=plan.spec.vocab,
            saves=staged,
            image_tokens=plan.image_store,
            pixel_bytes=plan.pixel_bytes,
        )

    @property
    def share(self) -> int:
        """Waiting requests of one client: the rest of the queue is for others."""
        return max(1, self.max_waiting * 3 // 4)

    def check(self, request: Request) -> None:
        """Refuse now what could never run, or would fail a step that others share. Raises RequestRefused (400)."""
        count = len(request.tokens)
        param = "messages" if request.boundaries else "prompt"
        if count == 0:
            raise RequestRefused("the prompt is empty: give at least one token", param=param)
        self._check_ids(request.tokens, "the prompt", param)
        self._check_ids([token for token, _ in request.sampling.logit_bias], "logit_bias", "logit_bias")
        end = 0
        for image in request.images:
            if image.start < end or image.tokens < 1 or image.end > count:
                raise RequestRefused("images of a prompt lie in it, one behind the other", param=param)
            end = image.end
        if (pixels := pixel_bytes(request)) > self.pixel_bytes:
            raise RequestRefused(
                f"the images have {pixels:,} bytes of pixels; one request may have {self.pixel_bytes:,}: send smaller "
                "or fewer ones",
                param=param,
            )
        if request.sampling.max_tokens < 0:
            raise RequestRefused(
                f"max_tokens is {request.sampling.max_tokens}; it can not be negative", param="max_tokens"
            )
        limit = min(self.context, self.pages * PAGE)
        if count + min(1, request.sampling.max_tokens) > limit:
            raise prompt_too_long(count, limit, param)

    def _check_ids(self, tokens: Sequence[int], where: str, param: str) -> None:
        if not tokens:
            return
        least, most = _least_and_most(tokens)
        if least < 0 or most >= self.vocab:
            wrong = least if least < 0 else most
            raise RequestRefused(f"{where} holds the token id {wrong}; ids are 0 to {self.vocab - 1}", param=param)


def pixel_bytes(request: Request) -> int:
    return sum(len(image.pixels) for image in request.images)


def _least_and_most(tokens: Sequence[int]) -> tuple[int, int]:
    if not isinstance(tokens, array):
        return min(tokens), max(tokens)
    import numpy  # only where requests come packed, which is the engine's process: the server does without it

    ids = numpy.frombuffer(tokens, numpy.intc)
    return int(ids.min()), int(ids.max())
