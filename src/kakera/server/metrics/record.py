"""One request's figures, gathered while it runs; they end in the metrics and in the log. Never any text."""

from __future__ import annotations

import json
import logging
import re
import time
from dataclasses import dataclass, field

from kakera.contract.events import Usage
from kakera.errors import RequestRefused
from kakera.server.metrics.prometheus import Metrics

WHERE = re.compile(r" at token \d+$")  # for the log; a metric with a label a position would never end
PROGRESS_SECONDS = 10.0  # at most one line so often for a prompt that is being read
SHOWN_PATH = 200  # characters of a path that nobody serves
request_log = logging.getLogger("kakera.requests")
progress_log = logging.getLogger("kakera.progress")


def record_refusal(
    metrics: Metrics,
    route: str,
    status: int,
    code: str,
    param: str | None,
    path: str | None = None,
    client: str | None = None,
) -> None:
    """A request that was refused before it became a generation: one count and one log line, which no text enters.

    `route` labels the metrics; the line shows `path`, where that is not one of ours.
    """
    metrics.requests.labels(route, code).inc()
    metrics.refused.labels(code).inc()
    shown = {"client": client, "route": (path or route)[:SHOWN_PATH], "status": status, "param": param, "finish": code}
    request_log.info(json.dumps(shown))


@dataclass
class RequestRecord:
    """Times are seconds of the monotonic clock. `began`: when the whole request was received."""

    id: str
    route: str
    prompt_tokens: int
    metrics: Metrics
    began: float
    client: str | None = None  # its address
    queued: float = field(default_factory=time.monotonic)  # from here on the engine counts its queue
    first_token: float | None = None
    generated: int = 0
    reasons: list[str] = field(default_factory=list)
    _last_token: dict[int, float] = field(default_factory=dict)
    _first_read: tuple[float, int] | None = None  # when progress was first heard of, and the tokens read by then
    _told: float = 0.0  # when progress was last logged

    def progress(self, done: int, total: int) -> None:
        """`done` of `total` prompt tokens have been read: now and then a line, or a long prompt looks like a hang."""
        now = time.monotonic()
        since, before = self._first_read = self._first_read or (now, done)
        if now - max(self._told, self.queued) < PROGRESS_SECONDS or done >= total:
            return
        self._told = now
        line = f"{self.id} of {self.client}: {done:,} of {total:,} prompt tokens read"
        if done > before and now > since:
            speed = (done - before) / (now - since)
            line += f", {speed:,.0f} tokens/s, about {(total - done) / speed:,.0f} s left"
        progress_log.info("%s", line)

    def tokens(self, choice: int, count: int) -> None:
        now = time.monotonic()
        if self.first_token is None:
            self.first_token = now
            self.metrics.ttft.observe(now - self.began)
        if (last := self._last_token.get(choice)) is not None and count:
            self.metrics.inter_token.observe((now - last) / count)
        self._last_token[choice] = now
        self.generated += count
        self.metrics.count_generated(count)

    def choice_ended(self, reason: str) -> None:
        self.reasons.append(reason)

    def finished(self, usages: list[Usage]) -> None:
        self._end(",".join(sorted(set(self.reasons))) or "stop", usages)

    def failed(self, error: Exception | None) -> None:
        """`error` is None if the client left."""
        reason = "abort" if error is None else error.code if isinstance(error, RequestRefused) else "error"
        if error is None:
            self.metrics.aborted.inc()
        else:
            self.metrics.refused.labels(reason).inc()
        self._end(reason, [])

    def _end(self, reason: str, usages: list[Usage]) -> None:
        cached = min((usage.cached_tokens for usage in usages), default=0)
        miss = usages[0].miss_reason if usages else ""
        if usages:  # the end token counts too, though it is never sent
            known, self.generated = self.generated, sum(usage.completion_tokens for usage in usages)
            self.metrics.count_generated(max(0, self.generated - known))
        self.metrics.requests.labels(self.route, reason).inc()
        self.metrics.request_seconds.observe(time.monotonic() - self.began)
        self.metrics.prompt_sizes.observe(self.prompt_tokens)
        self.metrics.answer_sizes.observe(self.generated)
        if usages:
            self.metrics.queue_seconds.observe(self._waited(usages))
            self.metrics.prompt_tokens.inc(self.prompt_tokens)
            self.metrics.cached_tokens.inc(cached)
            self.metrics.drafted_tokens.inc(sum(_drafted(usage) for usage in usages))
            self.metrics.accepted_tokens.inc(sum(usage.accepted_tokens for usage in usages))
            self.metrics.misses.labels(WHERE.sub("", miss) or "none").inc()
        line = self._line(reason, cached, miss, usages)
        self.metrics.recent.append({"at": time.time(), **line})
        request_log.info(
            json.dumps({"client": self.client, **line, "prompt_tokens_per_s": _read_speed(usages, cached)})
        )

    def _waited(self, usages: list[Usage]) -> float:
        return self.queued - self.began + usages[0].queue_seconds

    def _line(self, reason: str, cached: int, miss: str, usages: list[Usage]) -> dict[str, object]:
        now = time.monotonic()
        decode = now - self.first_token if self.first_token is not None else 0.0
        return {
            "id": self.id,
            "route": self.route,
            "prompt": self.prompt_tokens,
            "cached": cached,
            "miss": miss,
            "generated": self.generated,
            "drafted": sum(_drafted(usage) for usage in usages),
            "accepted": sum(usage.accepted_tokens for usage in usages),
            "queue_s": round(self._waited(usages), 4) if usages else None,
            "ttft_s": None if self.first_token is None else round(self.first_token - self.began, 4),
            "tokens_per_s": round((self.generated - 1) / decode, 1) if self.generated > 1 and decode > 0 else None,
            "total_s": round(now - self.began, 4),
            "finish": reason,
        }


def _drafted(usage: Usage) -> int:
    return usage.accepted_tokens + usage.rejected_tokens


def _read_speed(usages: list[Usage], cached: int) -> float | None:
    """Prompt tokens a second, of those that were not cached."""
    if not usages or usages[0].prefill_seconds <= 0:
        return None
    return round((usages[0].prompt_tokens - cached) / usages[0].prefill_seconds, 1)
