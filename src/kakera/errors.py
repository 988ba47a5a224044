"""Errors that reach a person: what happened, which limit, what to do.

Every error that kakera raises on purpose derives from KakeraError; the command line prints its text without a
traceback and exits with `exit_status`, the server turns it into an HTTP answer.
"""

from __future__ import annotations

from typing import Any

CONTEXT_LENGTH_EXCEEDED = "context_length_exceeded"


class KakeraError(Exception):
    """Something that a person can act on."""

    exit_status = 1


class UsageError(KakeraError):
    """The command, an option or an argument is wrong."""

    exit_status = 2


class Unserved(UsageError):
    """The model can be planned and shown, and nothing more. The text says why."""


class CheckpointError(KakeraError):
    """A model directory, file or tensor is missing, truncated, of the wrong shape, or not understood."""


class PlanRefused(KakeraError):
    """The memory plan does not fit; the text names the cheapest ways to make it fit. `details`: the same for JSON."""

    def __init__(self, message: str, details: dict[str, Any] | None = None):
        super().__init__(message)
        self.details = details or {}


class RequestRefused(KakeraError):
    """A request can not be served. `status` is the HTTP status, `code` the machine-readable reason."""

    def __init__(self, message: str, *, status: int = 400, code: str = "invalid_request", param: str | None = None):
        super().__init__(message)
        self.status = status
        self.code = code
        self.param = param


def prompt_too_long(tokens: int, limit: int, param: str, at_least: bool = False) -> RequestRefused:
    """`tokens` of a prompt are more than a context of `limit`, or leave no room in it for an answer.

    Agents shorten their history only where they know the words: Claude Code reads the numbers behind "prompt is too
    long", others look for "maximum context length is N tokens" or the code.
    """
    about = "at least " if at_least else ""
    return RequestRefused(
        f"prompt is too long: {tokens} tokens > {limit - 1} maximum. This model's maximum context length is {limit} "
        f"tokens, one of them for the answer: shorten the prompt by {about}{tokens - limit + 1} tokens, or "
        "start the server with a larger --context",
        code=CONTEXT_LENGTH_EXCEEDED,
        param=param,
    )


class EngineDied(KakeraError):
    """The engine process ended while it was needed."""

    exit_status = 70


class RanksApart(EngineDied):
    """A rank of a shared model did not come, gave up, or computes something else: what they hold is out of step."""
