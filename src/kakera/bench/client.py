"""One streamed completion over HTTP, with the time of every arrival."""

from __future__ import annotations

import json
import time
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from typing import Any

from kakera.errors import KakeraError

TIMEOUT_SECONDS = 600


@dataclass(frozen=True)
class Trace:
    """What a client saw. Times in seconds of one clock; `arrivals` holds one entry a chunk that carried text."""

    sent: float
    arrivals: tuple[float, ...]
    text: str
    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int

    @property
    def ttft(self) -> float:
        """Seconds from sending to the first text."""
        return self.arrivals[0] - self.sent

    @property
    def gaps(self) -> list[float]:
        """Seconds between neighbouring chunks."""
        return [b - a for a, b in zip(self.arrivals, self.arrivals[1:], strict=False)]

    @property
    def tokens_per_second(self) -> float:
        """Decode speed: tokens after the first over the time after the first."""
        span = self.arrivals[-1] - self.arrivals[0]
        return (self.completion_tokens - 1) / span if span > 0 else 0.0


class Client:
    """Talks to an OpenAI-compatible server at `url` (without /v1). Use as an async context manager."""

    def __init__(self, url: str, api_key: str | None = None):
        httpx = _httpx()
        headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        limits = httpx.Limits(max_connections=None)
        self._http = httpx.AsyncClient(
            base_url=url.rstrip("/").removesuffix("/v1"), headers=headers, timeout=TIMEOUT_SECONDS, limits=limits
        )
        self._model = ""

    async def __aenter__(self) -> Client:
        try:
            answer = await self._http.get("/v1/models")
            answer.raise_for_status()
            self._model = answer.json()["data"][0]["id"]
        except (_httpx().HTTPError, KeyError, IndexError, ValueError) as error:
            await self._http.aclose()
            raise KakeraError(
                f"{self._http.base_url} does not answer GET /v1/models ({error}); is it running?"
            ) from None
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._http.aclose()

    async def complete(
        self,
        prompt: str | Sequence[int],
        max_tokens: int,
        on_text: Callable[[str], None] | None = None,
        on_progress: Callable[[int, float], None] | None = None,
    ) -> Trace:
        """Continue plain text, or tokens, by exactly `max_tokens` greedy tokens: the end token does not stop it.

        `on_progress` hears how many tokens of the prompt are read, and by the server's clock since when, in seconds.
        """
        body = {"prompt": prompt, "max_tokens": max_tokens, "ignore_eos": True}
        if on_progress:
            body["return_progress"] = True
        return await self._stream(
            "/v1/completions", body, lambda choice: choice.get("text") or "", on_text, on_progress
        )

    async def chat(
        self, messages: list[dict[str, Any]], max_tokens: int, on_text: Callable[[str], None] | None = None
    ) -> Trace:
        """Answer a conversation greedily, thinking off."""
        body = {
            "messages": messages,
            "max_tokens": max_tokens,
            "chat_template_kwargs": {"enable_thinking": False},
        }
        return await self._stream(
            "/v1/chat/completions", body, lambda choice: choice["delta"].get("content") or "", on_text
        )

    async def send(self, path: str, body: Any) -> tuple[int, str]:
        """Status and body of any POST, a stream read to its end. Raises KakeraError if the connection breaks."""
        if isinstance(body, dict):
            body = {"model": self._model, **body}
        try:
            answer = await self._http.post(path, json=body)
        except _httpx().HTTPError as error:
            raise KakeraError(f"{path}: the connection failed ({type(error).__name__}: {error})") from None
        return answer.status_code, answer.text

    async def text(self, path: str) -> str:
        """Body of a GET. Raises KakeraError for anything but 200."""
        try:
            answer = await self._http.get(path)
            answer.raise_for_status()
        except _httpx().HTTPError as error:
            raise KakeraError(f"{path}: {type(error).__name__}: {error}") from None
        return str(answer.text)

    async def status(self) -> dict[str, Any]:
        """What a kakera server says about itself. Raises KakeraError if it is none, or gone."""
        found: dict[str, Any] = json.loads(await self.text("/v1/kakera/status"))
        return found

    async def healthy(self) -> bool:
        try:
            await self.text("/health")
        except KakeraError:
            return False
        return True

    async def _stream(
        self,
        path: str,
        body: dict[str, Any],
        text_of: Callable[[dict[str, Any]], str],
        on_text: Callable[[str], None] | None = None,
        on_progress: Callable[[int, float], None] | None = None,
    ) -> Trace:
        body = {
            "model": self._model,
            "temperature": 0,
            "stream": True,
            "stream_options": {"include_usage": True},
            **body,
        }
        pieces: list[str] = []
        arrivals: list[float] = []
        usage: dict[str, Any] = {}
        sent = time.perf_counter()
        async for chunk in self._events(path, body):
            now = time.perf_counter()
            for choice in chunk.get("choices", []):
                if text := text_of(choice):
                    arrivals.append(now)
                    pieces.append(text)
                    if on_text:
                        on_text(text)
            if on_progress and (read := chunk.get("prompt_progress")):
                on_progress(read["processed"], read["time_ms"] / 1e3)
            usage = chunk.get("usage") or usage
        if not arrivals:
            raise KakeraError(f"{path}: the stream ended without any text")
        details = usage.get("prompt_tokens_details") or {}
        return Trace(
            sent=sent,
            arrivals=tuple(arrivals),
            text="".join(pieces),
            prompt_tokens=usage.get("prompt_tokens", 0),
            cached_tokens=details.get("cached_tokens") or 0,
            completion_tokens=usage.get("completion_tokens", len(arrivals)),
        )

    async def _events(self, path: str, body: dict[str, Any]) -> AsyncIterator[dict[str, Any]]:
        """The JSON documents of a server-sent event stream. Raises KakeraError with the server's words on an error."""
        try:
            async with self._http.stream("POST", path, json=body) as answer:
                if answer.status_code != 200:
                    raise KakeraError(f"{path}: HTTP {answer.status_code}: {(await answer.aread()).decode()[:500]}")
                async for line in answer.aiter_lines():
                    if not line.startswith("data:") or line == "data: [DONE]":
                        continue
                    chunk = json.loads(line[len("data:") :])
                    if "error" in chunk:
                        raise KakeraError(f"{path}: {chunk['error'].get('message', chunk['error'])}")
                    yield chunk
        except _httpx().HTTPError as error:
            raise KakeraError(f"{path}: the connection failed ({type(error).__name__}: {error})") from None


def _httpx() -> Any:
    """httpx, imported late: only the HTTP measurements need it."""
    try:
        import httpx
    except ImportError:
        raise KakeraError("measuring a server needs httpx: pip install 'kakera[bench]'") from None
    return httpx
