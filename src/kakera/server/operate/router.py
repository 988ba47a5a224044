"""What routers ask a worker: its model, its sizes, its load, and to forget its cache. The shapes are SGLang's.

Paths with and without "get_" are the old and the new spelling. Only fields that are true here are sent.
"""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Annotated

from fastapi import APIRouter, Request
from pydantic import Field

from kakera import __version__
from kakera.contract.events import EngineStats
from kakera.contract.grid import PAGE
from kakera.plan.plan import Plan
from kakera.run.process.kv_events import KvEvents
from kakera.server.fields import Body
from kakera.server.operate.answers import (
    DrainAnswer,
    EventSource,
    FlushAnswer,
    Load,
    Loads,
    ModelInfo,
    OldLoad,
    ServerInfo,
)
from kakera.server.operate.misplaced import in_body
from kakera.server.service import Service


class FlushBody(Body):
    disk: bool = False


class DrainBody(Body):
    seconds: Annotated[float, Field(ge=0, le=86400)] = 600.0


def router_routes(service: Service, plan: Plan | None, kv_events: KvEvents | None = None) -> APIRouter:
    router = APIRouter()
    name = service.model.name

    @router.get("/get_model_info")
    @router.get("/model_info")
    async def model_info() -> ModelInfo:
        """`model_path` is the served name: a router compares it with what clients send. Where the model comes from is
        null for a directory."""
        source = service.model.source
        return {
            "model_path": name,
            "tokenizer_path": name,
            "is_generation": True,
            "preferred_sampling_params": None,
            "max_model_len": service.engine.limits.context,
            "repository": source.repository if source else None,
            "revision": source.revision if source else None,
            "commit": source.commit if source else None,
        }

    @router.get("/get_server_info")
    @router.get("/server_info")
    async def server_info() -> ServerInfo:
        stats = await service.look()
        return {
            "status": "draining" if service.drain.began else "asleep" if service.sleep.closed else "ready",
            "version": __version__,
            "model_path": name,
            "served_model_name": name,
            "tp_size": len(plan.device_names) if plan else 1,
            "dp_size": 1,
            "page_size": PAGE,
            "kv_block_size": PAGE,
            "context_length": service.engine.limits.context,
            "max_running_requests": stats.slots_total,
            "max_queued_requests": service.engine.limits.max_waiting,
            "max_total_num_tokens": stats.pages_total * PAGE,
            "internal_states": [_load(stats)],
        }

    @router.get("/kv_event_sources")
    async def kv_event_sources() -> dict[str, EventSource]:
        """Where each rank tells what is cached, as vllm-router 0.1.17 asks a new worker: a list, which vLLM's own route
        gives, it refuses, and a source without each of the last three fields it passes over. It reads a host "*" as
        the worker's. Empty without --kv-events."""
        if kv_events is None:
            return {}
        source: EventSource = {
            "endpoint": kv_events.endpoint,
            "replay_endpoint": kv_events.replay,
            "topic": kv_events.topic,
            "publisher": "zmq",
            "encoding": "msgpack",
            "schema_version": 1,
        }
        return {"0": source}

    @router.get("/v1/loads")
    async def loads() -> Loads:
        load = _load(await service.look())
        return {
            "timestamp": datetime.now(UTC).isoformat(),
            "version": __version__,
            "dp_rank_count": 1,
            "loads": [load],
            "aggregate": {
                "total_running_reqs": load["num_running_reqs"],
                "total_waiting_reqs": load["num_waiting_reqs"],
                "total_reqs": load["num_total_reqs"],
                "avg_token_usage": load["token_usage"],
                "avg_utilization": load["utilization"],
            },
        }

    @router.get("/get_load")
    async def load() -> list[OldLoad]:
        load = _load(await service.look())
        tokens = load["num_used_tokens"]
        waiting, total = load["num_waiting_reqs"], load["num_total_reqs"]
        return [{"dp_rank": 0, "num_reqs": total, "num_waiting_reqs": waiting, "num_tokens": tokens}]

    @router.post("/flush_cache", dependencies=[in_body("disk")])
    async def flush_cache(body: FlushBody | None = None) -> FlushAnswer:
        """Forget every cached prefix that no running request holds; with `disk` this model's on the disk, too. Never
        refused, and harms no request."""
        flushed = await service.engine.flush(body is not None and body.disk)
        return {
            "success": True,
            "pages": flushed.pages,
            "checkpoints": flushed.checkpoints,
            "host_bytes": flushed.host_bytes,
            "disk_bytes": flushed.disk_bytes,
        }

    # not in /openapi.json, of which programs try every route
    @router.post("/drain", include_in_schema=False, dependencies=[in_body("seconds")])
    async def drain(request: Request, body: DrainBody | None = None) -> DrainAnswer:
        """Refuse new requests, let running ones go on for `seconds`, keep the cache if there is a disk for it, and end
        the server with status 0. Answers at once; once more changes how long. Without the server's key, from this
        machine only."""
        service.access.check_operator(request.client.host if request.client else "")
        seconds = (body or DrainBody()).seconds
        service.drain.begin(seconds)
        return {"status": "draining", "requests": service.drain.inside, "seconds": seconds}

    return router


def _load(stats: EngineStats) -> Load:
    """Tokens count whole pages that running requests hold; cached prefixes are room, since they make way."""
    return {
        "dp_rank": 0,
        "num_running_reqs": stats.running,
        "num_waiting_reqs": stats.waiting,
        "num_total_reqs": stats.running + stats.waiting,
        "max_running_requests": stats.slots_total,
        "num_used_tokens": stats.pages_used * PAGE,
        "max_total_num_tokens": stats.pages_total * PAGE,
        "token_usage": round(1 - stats.pages_free / stats.pages_total, 4) if stats.pages_total else 0.0,
        "utilization": round(stats.running / max(stats.slots_total, 1), 4),
        "cache_hit_rate": round(
            stats.counters.get("cached_tokens", 0) / max(stats.counters.get("prompt_tokens", 0), 1), 4
        ),
    }
