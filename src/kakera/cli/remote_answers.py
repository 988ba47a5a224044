"""Answers of a running server, over its OpenAI API. The standard library speaks HTTP well enough for one stream."""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Generator, Iterator, Sequence
from http.client import HTTPConnection, HTTPException, HTTPResponse, HTTPSConnection
from typing import Any

from kakera.batch.endpoint import Endpoint
from kakera.cli.conversation import Ended, Piece, Reading, Settings
from kakera.contract.events import Usage
from kakera.errors import KakeraError

CONNECT_SECONDS = 10.0  # to reach a server; an answer may take as long as it takes
SHOWN_BODY = 300  # characters of an error that is none of OpenAI's


class RemoteModel:
    """Raises UsageError for a URL that is none, KakeraError if nobody answers there. `name`: "" is its first model."""

    def __init__(self, url: str, key: str | None, name: str, settings: Settings):
        there = Endpoint.of(url, key)
        self._host, self._port, self._base, self.url = there.host, there.port, there.base, there.url
        self._connection = HTTPSConnection if there.scheme == "https" else HTTPConnection
        self._headers = {"Content-Type": "application/json"} | ({"Authorization": f"Bearer {key}"} if key else {})
        self._settings = settings
        self.name = name or self._first_model()

    def answer(self, messages: Sequence[dict[str, Any]]) -> Generator[Reading | Piece | Ended]:
        """See Answerer. Leaving the connection is what aborts the request."""
        began, first, last, pieces, usage = time.monotonic(), 0.0, 0.0, 0, None
        reason = ""
        with contextlib.closing(self._events(self._body(messages))) as events:
            for event in events:
                usage = event.get("usage") or usage
                for choice in event.get("choices") or ():
                    reason = choice.get("finish_reason") or reason
                    for piece in _pieces(choice.get("delta") or {}):
                        last, pieces = time.monotonic(), pieces + 1
                        first = first or last
                        yield piece
        if not reason:
            raise KakeraError(f"the answer of {self.url} broke off: is the server still running?")
        yield Ended(reason, _usage(usage or {"completion_tokens": pieces}, first - began, last - first))

    def _body(self, messages: Sequence[dict[str, Any]]) -> dict[str, Any]:
        settings = self._settings
        body = {
            "model": self.name,
            "messages": list(messages),
            "stream": True,
            "stream_options": {"include_usage": True},
            "max_tokens": settings.max_tokens,
            "seed": settings.seed,
            "chat_template_kwargs": {"enable_thinking": settings.thinking},
        }
        return body if settings.temperature is None else {**body, "temperature": settings.temperature}

    def _first_model(self) -> str:
        with self._opened("GET", "/models") as response:
            try:
                return str(json.load(response)["data"][0]["id"])
            except (ValueError, LookupError, TypeError):
                raise KakeraError(f"{self.url}/models is no list of models: is {self.url} an OpenAI API?") from None

    def _events(self, body: dict[str, Any]) -> Generator[dict[str, Any]]:
        with self._opened("POST", "/chat/completions", body) as response:
            for raw in response:
                field, _, data = raw.decode("utf-8", "replace").rstrip("\r\n").partition(":")
                if field != "data":
                    continue
                if data.strip() == "[DONE]":
                    return
                event = _parsed(data)
                if "error" in event:
                    raise KakeraError(_error_text(event, data))
                yield event

    @contextlib.contextmanager
    def _opened(self, method: str, path: str, body: dict[str, Any] | None = None) -> Iterator[HTTPResponse]:
        connection = self._connection(self._host, self._port, timeout=CONNECT_SECONDS)
        advice = "start one with kakera serve, or check --url"
        try:
            connection.connect()
            advice = "is the server still running?"
            connection.sock.settimeout(None)
            connection.request(method, self._base + path, json.dumps(body) if body else None, self._headers)
            response = connection.getresponse()
            if response.status != 200:
                raise KakeraError(self._refusal(response))
            yield response
        except (OSError, HTTPException) as error:
            why = getattr(error, "strerror", None) or str(error) or type(error).__name__
            raise KakeraError(f"no answer from {self.url} ({why}): {advice}") from None
        finally:
            connection.close()

    def _refusal(self, response: HTTPResponse) -> str:
        text = response.read().decode("utf-8", "replace")
        said = _error_text(_parsed(text), text) or response.reason
        if response.status in (401, 403):
            return f"{self.url} refuses: {said}; give its key with --api-key"
        if response.status in (429, 503):
            return f"{self.url} is busy or stopping: {said}"
        return f"{self.url} answers {response.status}: {said}"


def _parsed(text: str) -> dict[str, Any]:
    try:
        found = json.loads(text)
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}


def _error_text(body: dict[str, Any], text: str) -> str:
    error = body.get("error")
    message = error.get("message") if isinstance(error, dict) else error
    return str(message or text[:SHOWN_BODY]).strip()


def _pieces(delta: dict[str, Any]) -> Iterator[Piece]:
    if reasoning := delta.get("reasoning_content") or delta.get("reasoning"):
        yield Piece("reasoning", str(reasoning))
    if content := delta.get("content"):
        yield Piece("content", str(content))


def _usage(told: dict[str, Any], until_first: float, decoding: float) -> Usage:
    """Counts as the server tells them, seconds as they passed here."""
    return Usage(
        prompt_tokens=told.get("prompt_tokens") or 0,
        cached_tokens=(told.get("prompt_tokens_details") or {}).get("cached_tokens") or 0,
        completion_tokens=told.get("completion_tokens") or 0,
        prefill_seconds=max(0.0, until_first),
        decode_seconds=decoding,
    )
