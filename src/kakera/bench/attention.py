"""Attention kernels of a model on a GPU: decode, prefill and KV write, beside torch's over ready bf16 keys."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from kakera.arch.spec import ModelSpec
from kakera.bench import attention_prefill
from kakera.bench.attention_prefill import WINDOW, Prefill
from kakera.bench.cuda_time import copies, copy_bytes_per_second, graph_seconds
from kakera.contract.grid import PAGE
from kakera.kv.gpu.decode import DecodeRows, DecodeScratch, LayerPages, attend_decode, query_tiles
from kakera.kv.gpu.finish import Finish
from kakera.kv.gpu.write import Places, write_rows
from kakera.ops.heads import ProjectedHeads
from kakera.ops.rotary import Rotary, frequencies
from kakera.plan.kv_format import KvFormat

DECODE = ((8192, 1, 1), (32768, 1, 1), (131072, 1, 1), (262144, 1, 1), (131072, 8, 1), (262144, 8, 1))
MORE_DECODE = ((8192, 32, 1), (131072, 1, 4))  # context, rows, query tokens a row
PREFILL = ((8192, (8192, 65536, 131072, 196608)), (2048, (8192, 196608)))
WRITES = (1, 32, 8192)
MANY_TOKENS = 1024
MOST_BYTES = 20e9  # of the bf16 keys and values of one shape
BACKENDS = {"flash": SDPBackend.FLASH_ATTENTION, "cudnn": SDPBackend.CUDNN_ATTENTION}
Tell = Callable[[str], None]


@dataclass(frozen=True)
class Decode:
    """Seconds of one layer's decode attention, with un-rotation and gate. `int2_bytes`: what INT2 reads, floor:
    seconds of that at a copy's speed. flash, cudnn: torch's SDPA; None where it refuses or keys are too many."""

    context: int
    rows: int
    tokens: int
    int2: float
    bf16: float | None
    flash: float | None
    cudnn: float | None
    int2_bytes: int
    floor: float


@dataclass(frozen=True)
class Write:
    """Seconds from a projection to pages, one layer."""

    tokens: int
    int2: float
    bf16: float


@dataclass(frozen=True)
class AttentionBench:
    device: str
    heads: int
    kv_heads: int
    head_dim: int
    copy_bytes_per_second: float
    decode: tuple[Decode, ...]
    prefill: tuple[Prefill, ...]
    writes: tuple[Write, ...]


def measure(spec: ModelSpec, ranks: int, tell: Tell) -> AttentionBench:
    """The heads of one of `ranks` cards."""
    shape = _Shape(spec.heads // ranks, max(1, spec.kv_heads // ranks), spec.head_dim, spec.rotary_dim)
    copy = copy_bytes_per_second()
    decode = []
    for context, rows, tokens in (*DECODE, *MORE_DECODE):
        tell(f"decode, {rows} x {context:,}")
        decode.append(_decode(shape, context, rows, tokens, copy))
    prefill: list[Prefill] = []
    for tokens, contexts in PREFILL:
        tell(f"prefill of {tokens:,} tokens")
        codecs = ("int2", "bf16") if tokens == PREFILL[0][0] else ("int2",)
        prefill += attention_prefill.measure(shape.heads, shape.kv_heads, shape.dim, tokens, contexts, codecs)
    tell("KV write")
    writes = [Write(tokens, *(_write(shape, tokens, codec) for codec in ("int2", "bf16"))) for tokens in WRITES]
    name = torch.cuda.get_device_name()
    return AttentionBench(
        name, shape.heads, shape.kv_heads, shape.dim, copy, tuple(decode), tuple(prefill), tuple(writes)
    )


@dataclass(frozen=True)
class _Shape:
    heads: int
    kv_heads: int
    dim: int
    rotary: int

    @property
    def group(self) -> int:
        return self.heads // self.kv_heads


def _decode(shape: _Shape, context: int, rows: int, tokens: int, copy: float) -> Decode:
    int2_bytes = rows * context * 2 * shape.kv_heads * KvFormat("int2", shape.dim).vector_bytes(shape.dim)
    bf16_bytes = rows * context * 2 * shape.kv_heads * shape.dim * 2
    times: dict[str, float | None] = {"int2": graph_seconds(list(_ours(shape, context, rows, tokens, "int2")))}
    fits = bf16_bytes <= MOST_BYTES
    times["bf16"] = graph_seconds(list(_ours(shape, context, rows, tokens, "bf16"))) if fits else None
    for name, backend in BACKENDS.items():
        times[name] = _sdpa(shape, context, rows, tokens, backend) if fits and tokens == 1 else None
    torch.cuda.empty_cache()
    return Decode(context, rows, tokens, **times, int2_bytes=int2_bytes, floor=int2_bytes / copy)  # type: ignore[arg-type]


def _ours(shape: _Shape, context: int, rows: int, tokens: int, codec: str) -> Iterator[Callable[[], object]]:
    pages = context // PAGE
    per_page = 2 * shape.kv_heads * PAGE
    page_bytes = per_page * (shape.dim // 4 + 4 if codec == "int2" else 2 * shape.dim)
    starts = torch.full((rows,), context - tokens, dtype=torch.int32, device="cuda")
    offsets = torch.arange(0, rows * tokens + 1, tokens, dtype=torch.int32, device="cuda")
    slots = torch.arange(rows, dtype=torch.int32, device="cuda")
    q_TQD = (torch.randn(rows * tokens, shape.heads, shape.dim, device="cuda") * shape.dim**-0.5).half()
    gate_TI, y_TQD = torch.randn_like(q_TQD).flatten(1), torch.empty_like(q_TQD)
    tiles = query_tiles(tokens, shape.group)
    scratch = DecodeScratch.allocate(rows, tiles, shape.kv_heads, shape.dim, q_TQD.device)
    finish = Finish(y_TQD, codec == "int2", None, gate_TI)
    for _ in range(copies(rows * pages * page_bytes)):
        table = torch.randperm(rows * pages, device="cuda").int().view(rows, pages)
        where = DecodeRows(starts, offsets, slots, table, tokens, rows * tokens)
        held = _pages(shape, rows * pages, rows, codec)
        yield partial(attend_decode, held, where, q_TQD, finish, scratch)


def _pages(shape: _Shape, pages: int, slots: int, codec: str) -> LayerPages:
    rows = (2, shape.kv_heads, PAGE)
    if codec == "bf16":
        return LayerPages(None, None, _normal(pages, *rows, shape.dim), None)
    codes = torch.randint(0, 256, (pages, *rows, shape.dim // 4), dtype=torch.uint8, device="cuda")
    parameters = torch.rand(pages, 2, shape.kv_heads, 2, 1, PAGE, device="cuda").half()
    ring = _normal(slots, WINDOW + 2, *rows, shape.dim)
    return LayerPages(codes, parameters, ring, _normal(slots, *rows, shape.dim))


def _normal(*shape: int) -> Tensor:
    return torch.empty(shape, dtype=torch.bfloat16, device="cuda").normal_()


def _sdpa(shape: _Shape, context: int, rows: int, tokens: int, backend: SDPBackend) -> float | None:
    q = _normal(rows, shape.heads, tokens, shape.dim)
    size = (rows, shape.kv_heads, context, shape.dim)
    keys = [(_normal(*size), _normal(*size)) for _ in range(copies(4 * rows * shape.kv_heads * context * shape.dim))]
    try:
        with sdpa_kernel(backend):
            return graph_seconds([partial(F.scaled_dot_product_attention, q, k, v, enable_gqa=True) for k, v in keys])
    except RuntimeError:  # no kernel of this backend for the shape or the card
        return None


def _write(shape: _Shape, tokens: int, codec: str) -> float:
    width = (shape.heads + 2 * shape.kv_heads) * shape.dim
    qkv = torch.randn(tokens, width, device="cuda").half()
    sizes = [n * shape.dim for n in (shape.heads, shape.kv_heads, shape.kv_heads)]
    q, k, v = (torch.unflatten(part, 1, (-1, shape.dim)) for part in torch.split(qkv, sizes, 1))
    position_T = torch.arange(tokens, device="cuda")
    scale = torch.ones(shape.dim, device="cuda")
    rotary = Rotary.at(position_T, frequencies(shape.rotary, 1e7).cuda())
    heads = ProjectedHeads(q, k, v, None, scale, scale, 1e-6, rotary)
    pages = tokens // PAGE + 1
    held = _pages(shape, pages, pages, codec)
    if codec == "int2":  # 16-bit rows to a band of whole pages, as in prefill
        held = LayerPages(held.codes, held.parameters, _normal(pages, 2, shape.kv_heads, PAGE, shape.dim), None)
    page_T, offset_T = (position_T // PAGE).int(), (position_T % PAGE).int()
    places = Places(page_T, page_T, torch.full_like(page_T, -1), offset_T)
    centres = torch.zeros(2, shape.kv_heads, shape.dim, device="cuda")
    q_to_TQD = torch.empty(q.shape, dtype=torch.float16, device="cuda")
    call = partial(write_rows, heads, held, places, centres, q_to_TQD)
    return graph_seconds([call] * (1 if tokens > MANY_TOKENS else 16))  # the launch of a graph takes 25 us itself
