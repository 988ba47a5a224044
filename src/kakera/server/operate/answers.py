"""Shapes of what operators, routers and the page read: health, loads, status."""

from __future__ import annotations

from typing import Any, Literal, NotRequired

from typing_extensions import TypedDict  # pydantic needs this TypedDict before Python 3.12

from kakera.contract.events import Active, RegionRead
from kakera.server.http.openapi import closed
from kakera.server.operate.sensors import CardReading


@closed
class Healthy(TypedDict):
    """`token_seconds` only with `deep`, and not of an engine that sleeps."""

    status: Literal["ok", "asleep"]
    running: int
    waiting: int
    token_seconds: NotRequired[float]


@closed
class Failing(TypedDict):
    status: Literal["failing"]
    reason: str


@closed
class NotReady(TypedDict):
    """It takes no new requests: it finishes those that it has, and then stops; or it sleeps until it is woken."""

    status: Literal["draining", "asleep"]
    running: int
    waiting: int


@closed
class DrainAnswer(TypedDict):
    """`requests`: those that may go on for `seconds`."""

    status: Literal["draining"]
    requests: int
    seconds: float


@closed
class IsSleeping(TypedDict):
    """`level`: 0 awake, 1 with its weights in host memory, 2 without weights."""

    is_sleeping: bool
    level: int


@closed
class SleepAnswer(TypedDict):
    """`seconds` that falling asleep or waking took; bytes in use on the card by anybody, and of host memory that the
    sleep takes."""

    is_sleeping: bool
    level: int
    seconds: float
    device_bytes: int
    host_bytes: int


@closed
class ModelInfo(TypedDict):
    model_path: str
    tokenizer_path: str
    is_generation: Literal[True]
    preferred_sampling_params: None
    max_model_len: int
    repository: str | None
    revision: str | None
    commit: str | None


@closed
class Load(TypedDict):
    dp_rank: Literal[0]
    num_running_reqs: int
    num_waiting_reqs: int
    num_total_reqs: int
    max_running_requests: int
    num_used_tokens: int
    max_total_num_tokens: int
    token_usage: float
    utilization: float
    cache_hit_rate: float


@closed
class ServerInfo(TypedDict):
    status: Literal["ready", "draining", "asleep"]
    version: str
    model_path: str
    served_model_name: str
    tp_size: int
    dp_size: Literal[1]
    page_size: int
    kv_block_size: int
    context_length: int
    max_running_requests: int
    max_queued_requests: int
    max_total_num_tokens: int
    internal_states: list[Load]


@closed
class EventSource(TypedDict):
    """`endpoint` publishes, `replay_endpoint` sends again."""

    endpoint: str
    replay_endpoint: str
    topic: str
    publisher: Literal["zmq"]
    encoding: Literal["msgpack"]
    schema_version: Literal[1]


@closed
class LoadSum(TypedDict):
    total_running_reqs: int
    total_waiting_reqs: int
    total_reqs: int
    avg_token_usage: float
    avg_utilization: float


@closed
class Loads(TypedDict):
    timestamp: str
    version: str
    dp_rank_count: Literal[1]
    loads: list[Load]
    aggregate: LoadSum


@closed
class OldLoad(TypedDict):
    dp_rank: Literal[0]
    num_reqs: int
    num_waiting_reqs: int
    num_tokens: int


@closed
class FlushAnswer(TypedDict):
    success: Literal[True]
    pages: int
    checkpoints: int
    host_bytes: int
    disk_bytes: int


MemoryState = Literal["ok", "near", "over"]


@closed
class MemoryRow(TypedDict):
    """Bytes; `used` is null where nobody counts them."""

    name: str
    note: str
    planned: int
    used: int | None


@closed
class Memory(TypedDict):
    name: str
    capacity: int
    used: int | None
    margin: int
    state: MemoryState
    rows: list[MemoryRow]


@closed
class StatusAnswer(TypedDict):
    """What the page at / polls. It grows with the page."""

    version: str
    model: str
    about: str
    sees: bool
    context: int
    uptime_seconds: float
    clock_seconds: float
    warnings: list[str]
    memory: list[Memory]
    resident_bytes: int
    cards: list[CardReading]
    generated_tokens: int
    engine: dict[str, Any]
    active: list[Active]
    finished: list[dict[str, Any]]


@closed
class SweepAnswer(TypedDict):
    reads: list[RegionRead]
