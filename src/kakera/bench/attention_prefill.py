"""Prefill attention over INT2 and bf16 pages on a GPU, beside the library alone over ready 16-bit keys."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch

from kakera.contract.grid import PAGE
from kakera.kv.gpu import dense_attention
from kakera.kv.gpu.prefill import Bf16History, Int2History, PrefillAttention
from kakera.plan.prefill_plan import PrefillPlan

WINDOW = 4


@dataclass(frozen=True)
class Prefill:
    """Seconds of `tokens` queries at the end of `context`; `library`: unmasked over bf16 keys, as many products.

    `kernels`: milliseconds by kernel, in a profiled call. `first`: seconds of the first call of this
    shape. `scratch_bytes`: ours and the library's, which do not depend on the context.
    """

    codec: str
    tokens: int
    context: int
    seconds: float
    tflops: float
    library: float
    alone_tflops: float
    first: float
    kernels: dict[str, float]
    scratch_bytes: int


def measure(
    heads: int, kv_heads: int, dim: int, tokens: int, contexts: Sequence[int], codecs: Sequence[str] = ("int2", "bf16")
) -> Iterator[Prefill]:
    """`tokens` queries at the end of each context, random pages."""
    device = torch.device("cuda", torch.cuda.current_device())
    multiprocessors = torch.cuda.get_device_properties(device).multi_processor_count
    pages = max(contexts) // PAGE
    rows = (2, kv_heads, PAGE, dim)
    codes = torch.randint(0, 256, (pages, *rows[:3], dim // 4), dtype=torch.uint8, device=device)
    parameters = torch.rand(pages, 2, kv_heads, 2, 1, PAGE, device=device).half()
    parameters[:, :, :, 1] *= -1.5
    recent = torch.randn(WINDOW + -(-tokens // PAGE), *rows, device=device).bfloat16()
    dense = torch.empty(pages, *rows, dtype=torch.bfloat16, device=device).normal_()
    table = torch.randperm(pages, device=device).int()
    q_TQD = (torch.randn(tokens, heads, dim, device=device) * dim**-0.5).half()
    out_TQD = torch.empty_like(q_TQD)
    int2 = Int2History(codes, parameters, recent[0])
    for codec in codecs:
        history, window = (int2, WINDOW) if codec == "int2" else (Bf16History(dense), 0)
        plan = PrefillPlan(heads, kv_heads, dim, window, tokens, multiprocessors)
        attention = PrefillAttention(plan, device)
        for context in contexts:
            start = context - -(-tokens // PAGE) * PAGE
            band = None if window == 0 else recent[0 if start else WINDOW :]

            def call() -> None:
                attention(history, table, start, q_TQD, band, out_TQD)  # noqa: B023

            first = _once(call)
            keys = start + tokens // 2
            products = 4 * tokens * heads * dim * keys
            seconds, library = _median(call), _library(heads, kv_heads, dim, tokens, keys, device)
            yield Prefill(
                codec,
                tokens,
                context,
                seconds,
                products / seconds / 1e12,
                library,
                products / library / 1e12,
                first,
                _by_kernel(call),
                plan.scratch_bytes + plan.transient_bytes,
            )


def _library(heads: int, kv_heads: int, dim: int, tokens: int, keys: int, device: torch.device) -> float:
    attend = dense_attention.choose(device)
    q_KMD = torch.randn(kv_heads, tokens * heads // kv_heads, dim, device=device).bfloat16() * dim**-0.5
    k_KND, v_KND = torch.randn(2, kv_heads, keys, dim, device=device, dtype=torch.bfloat16)
    return _median(lambda: attend(q_KMD, k_KND, v_KND))


def _once(call: Callable[[], object]) -> float:
    torch.cuda.synchronize()
    begin = time.perf_counter()
    call()
    torch.cuda.synchronize()
    return time.perf_counter() - begin


def _median(call: Callable[[], object], repeats: int = 9) -> float:
    """Launches included: queued behind each other as in a prefill, timed by the card."""
    call()
    times = []
    for _ in range(repeats):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        begin.record()
        call()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) / 1e3)
    return float(statistics.median(times))


def _by_kernel(call: Callable[[], object]) -> dict[str, float]:
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        call()
        torch.cuda.synchronize()
    times = {event.key[:60]: round(event.device_time_total / 1e3, 3) for event in profile.key_averages()}
    return {name: ms for name, ms in sorted(times.items(), key=lambda item: -item[1]) if ms >= 0.001}
