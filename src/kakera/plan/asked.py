"""What was asked for: refused at start where it could only fail later, and the KV format that it means. No torch."""

from __future__ import annotations

from kakera.arch.shard import can_share
from kakera.arch.spec import ModelSpec
from kakera.arch.tensors import BLOCK
from kakera.contract.grid import PAGE
from kakera.errors import UsageError
from kakera.plan.kv_format import KvFormat
from kakera.plan.plan import Wishes
from kakera.plan.tower import LEAST_TOKENS, MOST_TOKENS
from kakera.plan.weights import WeightBytes
from kakera.target.devices import Machine


def check(spec: ModelSpec, wishes: Wishes, machine: Machine, weights: WeightBytes) -> None:
    """Raises UsageError."""
    if wishes.kv not in ("fp32", "bf16", "int2"):
        raise UsageError(f"--kv {wishes.kv}: unknown KV codec; choose fp32, bf16 or int2")
    kv_format(spec, wishes).check(spec.head_dim)
    most = -(-spec.max_positions // PAGE) * PAGE
    if wishes.kv_window > most:
        raise UsageError(f"--kv-window {wishes.kv_window}: at most {most} tokens, all that this model takes")
    if wishes.kv_window % PAGE:
        raise UsageError(f"--kv-window {wishes.kv_window}: must be a multiple of {PAGE} tokens")
    if wishes.context is not None and not 1 < wishes.context <= spec.max_positions:
        raise UsageError(f"--context {wishes.context}: this model takes 2 to {spec.max_positions} tokens")
    if wishes.max_running is not None and wishes.max_running < 1:
        raise UsageError(f"--max-running {wishes.max_running}: at least one request must run")
    if wishes.max_running is not None and wishes.max_running > MOST_RUNNING:
        raise UsageError(f"--max-running {wishes.max_running}: at most {MOST_RUNNING} requests run at once")
    if wishes.chunk is not None and wishes.chunk > MOST_CHUNK:
        raise UsageError(f"--chunk {wishes.chunk}: at most {MOST_CHUNK} tokens")
    if wishes.chunk is not None and (wishes.chunk < PAGE or wishes.chunk % PAGE):
        raise UsageError(f"--chunk {wishes.chunk}: must be a multiple of {PAGE} tokens")
    if wishes.state_dtype not in (None, "fp32", "fp16"):
        raise UsageError(f"--state-dtype {wishes.state_dtype}: choose fp32 or fp16")
    if wishes.host_cache is not None and wishes.host_cache < 0:
        raise UsageError(f"--host-cache {wishes.host_cache}: must not be negative")
    if wishes.embedding not in ("auto", "device", "host"):
        raise UsageError(f"--embedding {wishes.embedding}: choose auto, device or host")
    if wishes.vision not in ("auto", "device", "host", "off"):
        raise UsageError(f"--vision {wishes.vision}: choose auto, device, host or off")
    if wishes.image_tokens is not None and not LEAST_TOKENS <= wishes.image_tokens <= MOST_TOKENS:
        raise UsageError(f"--image-tokens {wishes.image_tokens}: an image takes {LEAST_TOKENS} to {MOST_TOKENS} tokens")
    if wishes.staging is not None and not 1 <= wishes.staging <= MOST_STAGED:
        raise UsageError(f"--staging {wishes.staging}: 1 to {MOST_STAGED} checkpoints may be on their way at a time")
    if wishes.reserve is not None and wishes.reserve < 0:
        raise UsageError(f"--reserve {wishes.reserve}: must not be negative")
    if isinstance(wishes.pool, str) and wishes.pool != "all":
        raise UsageError(f"--pool {wishes.pool}: a number of tokens, or all")
    if isinstance(wishes.pool, int) and wishes.pool < max(PAGE, wishes.context or 0):
        raise UsageError(
            f"--pool {wishes.pool}: must hold one request of the longest context, {wishes.context or PAGE}"
        )
    if wishes.gpus != "auto" and not weights.sharable(spec, machine.ranks):
        kind = "cards" if machine.target.has_cards else "processes"
        counts = ", ".join(str(n) for n in range(1, spec.kv_heads + 1) if weights.sharable(spec, n))
        what = f"{spec.kv_heads} KV heads evenly"
        if spec.kv_heads % machine.ranks == 0:
            what = f"{_undivided(spec, machine.ranks)}, which is cut in runs of {BLOCK} channels"
        if can_share(spec, machine.ranks):
            what = f"linears that are coded in runs of {BLOCK} channels"
        raise UsageError(f"{machine.ranks} {kind} can not share {what}; this model runs on {counts} {kind}")


def _undivided(spec: ModelSpec, ranks: int) -> str:
    """The first tensor that so many ranks can not share."""
    tensors = (tensor for block in spec.distinct for tensor in block.tensors(spec.hidden))
    return next((tensor.name for tensor in tensors if not tensor.shard.divides(ranks)), "the vocabulary")


MOST_STAGED = 8  # a step saves no more than a few
MOST_RUNNING, MOST_CHUNK = 4096, 2**20  # far beyond what is of use, and planned in no time


def kv_format(spec: ModelSpec, wishes: Wishes) -> KvFormat:
    group = wishes.kv_group if wishes.kv_group is not None else min(256, spec.head_dim)
    return KvFormat(wishes.kv, group=group, window_pages=wishes.kv_window // PAGE)  # type: ignore[arg-type]
