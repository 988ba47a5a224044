"""Prometheus metrics: what requests did, and the engine's own figures read at scrape time."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from kakera.schedule.request import EngineStats

# A cached turn answers in tens of milliseconds, a cold 200K-token prompt in minutes.
TTFT_BUCKETS = (0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 60, 120, 300)
INTER_TOKEN_BUCKETS = (0.005, 0.01, 0.015, 0.02, 0.03, 0.05, 0.1, 0.2, 0.5, 1, 2)
GAUGES = (
    ("running", "requests that generate or prefill"),
    ("waiting", "requests in the queue"),
    ("pages_free", "KV pages of 64 tokens without an owner"),
    ("pages_total", "KV pages of 64 tokens"),
    ("slots_free", "slots for running requests without an owner"),
    ("slots_total", "slots for running requests"),
    ("host_bytes_used", "bytes of the host cache in use"),
    ("host_bytes_total", "bytes of the host cache"),
    ("steps", "engine steps since the start"),
)


class Metrics:
    """One registry per app, so that two apps in one process do not collide."""

    def __init__(self) -> None:
        registry = self.registry = CollectorRegistry()
        self.requests = Counter(
            "kakera_requests", "requests that ended, by how", ["route", "finish_reason"], registry=registry
        )
        self.prompt_tokens = Counter("kakera_prompt_tokens", "prompt tokens of finished requests", registry=registry)
        self.cached_tokens = Counter("kakera_cached_tokens", "prompt tokens taken from the cache", registry=registry)
        self.generated_tokens = Counter("kakera_generated_tokens", "tokens generated", registry=registry)
        self.misses = Counter(
            "kakera_cache_misses", "finished requests by why not more was cached", ["reason"], registry=registry
        )
        self.ttft = Histogram(
            "kakera_time_to_first_token_seconds", "receipt to first token", buckets=TTFT_BUCKETS, registry=registry
        )
        self.inter_token = Histogram(
            "kakera_inter_token_seconds", "between tokens of a choice", buckets=INTER_TOKEN_BUCKETS, registry=registry
        )
        self._gauges = {name: Gauge(f"kakera_{name}", text, registry=registry) for name, text in GAUGES}
        self._engine = Gauge("kakera_engine_counter", "what the engine counts, by name", ["name"], registry=registry)

    def render(self, stats: EngineStats) -> bytes:
        """The exposition text with the engine's figures as of now."""
        for name, gauge in self._gauges.items():
            gauge.set(getattr(stats, name))
        for name, value in stats.counters.items():
            self._engine.labels(name).set(value)
        return generate_latest(self.registry)
