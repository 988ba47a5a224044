"""Shared by the tests of kv/: small model shapes, random sequences, a driver that feeds a KVCache, and the oracle."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kakera.arch.blocks import AttentionSpec
from kakera.arch.spec import AddNorm, Layer, ModelSpec, Site
from kakera.kv.batch import Batch, CheckpointTensors, Save, Span
from kakera.kv.cache import KVCache
from kakera.kv.rotation import Rotation
from kakera.plan.kv_format import KvFormat

PAGE = 64


def make_spec(
    heads: int = 4,
    kv_heads: int = 2,
    head_dim: int = 64,
    full: int = 2,
    rotary_dim: int | None = None,
    gated: bool = False,
) -> ModelSpec:
    """A plain model of `full` attention layers with a GDN-free layer list."""
    attention = AttentionSpec(heads, kv_heads, head_dim, rotary_dim or head_dim, 1e4, gated, norms="scale")
    layers = tuple(Layer(f"model.layers.{i}", (Site(attention, "input_layernorm"),)) for i in range(full))
    return ModelSpec("qwen3", 16, heads * head_dim, layers, AddNorm("scale"), 1 << 20, 1e-6, tied=True, eos=())


@dataclass
class Stream:
    """One request's queries, keys and values per layer, its slot and its page table."""

    q: Tensor  # [L, T, Q, D]
    k: Tensor  # [L, T, K, D]
    v: Tensor
    slot: int
    pages: Tensor


def make_stream(spec: ModelSpec, tokens: int, seed: int, pages: Sequence[int], slot: int = 0) -> Stream:
    """Keys and values are multiples of 1/16, so that a Hadamard of 64 or 256 dims is exact in float32 and float64 and
    the oracle meets the same rounding decisions."""
    generator = torch.Generator().manual_seed(seed)
    layers, dim = len(spec.full_layers), spec.head_dim

    def normal(heads: int) -> Tensor:
        return torch.randn(layers, tokens, heads, dim, generator=generator)

    q, k, v = normal(spec.heads) * 2, normal(spec.kv_heads) + 0.5, normal(spec.kv_heads)
    return Stream(
        q,
        (k * 16).round() / 16,
        (v * 16).round() / 16,
        slot,
        torch.tensor(pages[: -(-tokens // PAGE)], dtype=torch.int64),
    )


@dataclass(frozen=True)
class Part:
    """Tokens start .. end - 1 of a sequence in one pass."""

    sequence: Stream
    start: int
    end: int
    saves: tuple[CheckpointTensors, ...] = ()


def run(cache: KVCache, prefill: Sequence[Part] = (), decode: Sequence[Part] = ()) -> list[Tensor]:
    """One pass over all layers; the outputs [L, tokens, Q, D] of each part, decode parts first."""
    parts, spans, offset = [*decode, *prefill], [], 0
    for part in parts:
        saves = tuple(Save(into) for into in part.saves)
        sequence = part.sequence
        spans.append(Span(offset, part.end - part.start, part.start, sequence.slot, sequence.pages, saves))
        offset += part.end - part.start
    positions = torch.cat([torch.arange(part.start, part.end) for part in parts])
    batch = Batch(
        torch.zeros_like(positions),
        positions,
        tuple(spans[: len(decode)]),
        tuple(spans[len(decode) :]),
        torch.empty(0, dtype=torch.int64),
    )
    made, outputs = cache.backend.plan(batch), []
    for layer in range(parts[0].sequence.q.shape[0]):
        q, k, v = (
            torch.cat([getattr(part.sequence, name)[layer, part.start : part.end] for part in parts]) for name in "qkv"
        )
        outputs.append(made.attend(layer, q, k, v))
    stacked = torch.stack(outputs)
    return [stacked[:, span.rows] for span in spans]


def prefill(cache: KVCache, sequence: Stream, cuts: Sequence[int]) -> Tensor:
    """Feed the whole sequence in segments that end at `cuts` (the last cut is its length)."""
    starts = [0, *cuts[:-1]]
    return torch.cat([run(cache, [Part(sequence, a, b)])[0] for a, b in zip(starts, cuts, strict=True)], 1)


def decode_from(cache: KVCache, sequence: Stream, start: int, tokens_per_row: int = 1) -> Tensor:
    length, outputs = sequence.q.shape[1], []
    for position in range(start, length, tokens_per_row):
        outputs += run(cache, decode=[Part(sequence, position, min(length, position + tokens_per_row))])
    return torch.cat(outputs, 1)


def new_window(cache: KVCache) -> tuple[Tensor, Tensor]:
    """`window_k`, `window_v` of a checkpoint, zeroed."""
    ring = cache.store.recent.ring
    window_k, window_v = ring.new_zeros(2, len(ring), cache.store.window_pages, *ring.shape[4:])
    return window_k, window_v


def new_checkpoint(cache: KVCache, position: int) -> CheckpointTensors:
    window_k, window_v = new_window(cache)
    return CheckpointTensors(position, {"window_k": window_k, "window_v": window_v})


def oracle(spec: ModelSpec, fmt: KvFormat, sequence: Stream, rotation: Rotation | None = None) -> Tensor:
    """Attention in float64 with the precision rule applied to each (query, key) pair by position. [L, T, Q, D]."""
    layers, tokens = sequence.q.shape[:2]
    out = torch.empty(layers, tokens, spec.heads, spec.head_dim, dtype=torch.float64)
    rotation = rotation or (Rotation.hadamard(spec) if fmt.windowed else None)
    position = torch.arange(tokens)
    query, key = position[:, None], position[None, :]
    exact = (key < PAGE) | (key // PAGE >= query // PAGE - fmt.window_pages)
    for layer in range(layers):
        for head in range(spec.heads):
            kv_head = head * spec.kv_heads // spec.heads
            q = sequence.q[layer, :, head].double()
            k = sequence.k[layer, :, kv_head].double()
            v = sequence.v[layer, :, kv_head].double()
            turn_k = turn_v = torch.eye(spec.head_dim, dtype=torch.float64)
            centre_k = centre_v = torch.zeros(spec.head_dim, dtype=torch.float64)
            if rotation is not None:
                turn_k, turn_v = (frame.dense()[layer, kv_head].double() for frame in (rotation.k, rotation.v))
                centre_k, centre_v = (frame.centre_LKD[layer, kv_head].double() for frame in (rotation.k, rotation.v))
            q, k, v = q @ turn_k, (k - centre_k) @ turn_k, (v - centre_v) @ turn_v
            fine_k, coarse_k = _two_precisions(fmt, k)
            fine_v, coarse_v = _two_precisions(fmt, v)
            logits = torch.where(exact, q @ fine_k.T, q @ coarse_k.T) / spec.head_dim**0.5
            p = logits.masked_fill(key > query, float("-inf")).softmax(-1)
            mixed = (p * exact) @ fine_v + (p * ~exact) @ coarse_v
            out[layer, :, head] = mixed @ turn_v.T + centre_v
    return out


def _two_precisions(fmt: KvFormat, x: Tensor) -> tuple[Tensor, Tensor]:
    if fmt.codec == "fp32":
        return x, x
    fine = x.float().bfloat16()
    if fmt.codec == "bf16":
        return fine.double(), fine.double()
    return fine.double(), reference_int2(fine.double(), fmt.group)


def reference_int2(x: Tensor, group: int) -> Tensor:
    """The 2-bit quantiser written from its definition in float64: rows x [N, D], one group after the other."""
    out = torch.empty_like(x)
    for start in range(0, x.shape[-1], group):
        part = x[:, start : start + group]
        mean, deviation = part.mean(-1, keepdim=True), part.std(-1, keepdim=True, correction=0)
        levels, _, _ = _nearest(part, 0.9957 * deviation, mean - 1.5 * 0.9957 * deviation)
        away = levels - levels.mean(-1, keepdim=True)
        slope = (away * (part - mean)).sum(-1, keepdim=True) / away.square().sum(-1, keepdim=True)
        levels, step, low = _nearest(part, slope, mean - slope * levels.mean(-1, keepdim=True))
        full = part.square().sum(-1, keepdim=True) / (part * (levels * step + low)).sum(-1, keepdim=True)
        stretch = full.clamp(0.8, 1.25)
        out[:, start : start + group] = levels * (stretch * step).half().double() + (stretch * low).half().double()
    return out


def _nearest(part: Tensor, step: Tensor, low: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    step, low = step.half().double(), low.half().double()
    return ((part - low) / step + 0.5).floor().clamp(0, 3), step, low
