"""Figures of the engine itself: bytes of the 2-bit cache, what it costs in quality, and decode speed."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from kakera.arch.registry import load_spec
from kakera.bench.engine import EngineBench
from kakera.bench.figure import Figure
from kakera.bench.quantiles import milliseconds
from kakera.contract.grid import PAGE
from kakera.evaluate.data import load_cases
from kakera.evaluate.kld import divergence
from kakera.evaluate.session import open_engine, open_forced, open_reader
from kakera.evaluate.suites import run_suite
from kakera.evaluate.tables import Group, groups
from kakera.evaluate.windows import cut_held_out
from kakera.kv.cache import KVCache
from kakera.plan.asked import kv_format
from kakera.plan.plan import Wishes
from kakera.text.tokenizer import Tokenizer

WINDOW = 2048
WINDOWS = 4  # 8,188 positions
DECODE_CONTEXT = 4096
DECODE_STEPS = 64
PROBE_PAGES = 64


def kv_bytes(directory: Path, wishes: Wishes) -> list[Figure]:
    """Bytes of a token in really allocated page pools."""
    spec = load_spec(directory)
    caches = {
        codec: KVCache(spec, kv_format(spec, replace(wishes, kv=codec)), PROBE_PAGES, 1) for codec in ("int2", "bf16")
    }
    token = {codec: cache.bytes().pages / (PROBE_PAGES * PAGE) for codec, cache in caches.items()}
    int2 = caches["int2"].bytes()
    note = (
        f"{token['int2']:,.0f} against {token['bf16']:,.0f} bytes; beside the pool, a running request: "
        f"{int2.ring / 1024:,.0f} KiB window, {int2.sink / 1024:,.0f} KiB sink, in 16 bit"
    )
    return [
        Figure("int2 pages: bytes a token against bf16", token["int2"] / token["bf16"], "<=", 0.15, ".3f", note=note)
    ]


def kv_divergence(directory: Path, wishes: Wishes) -> list[Figure]:
    windows = cut_held_out(Tokenizer.load(directory), WINDOW, WINDOWS)
    tested = open_forced(directory, replace(wishes, kv="int2"), WINDOW)
    base = open_forced(directory, replace(wishes, kv="bf16", rotation=None), WINDOW, tested.model)
    found = divergence(base, tested, windows)
    note = (
        f"5–95 % [{found.kld.low:.4f}, {found.kld.high:.4f}], {found.positions:,} positions, "
        f"same top-1 {found.top1.mean:.1%}, max {found.max:.2f}"
    )
    return [Figure("int2 against bf16 KV: mean KLD (nats)", found.kld.mean, "<=", 0.006, ".4f", note=note)]


def retrieval(directory: Path, wishes: Wishes, data: Path | None, longest: int | None) -> list[Figure]:
    """Points lost by int2 against bf16, for each size of prompt."""
    cases = load_cases("retrieval", data, None, 0, longest)
    reader = open_reader(directory)
    rows: dict[str, dict[str, Group]] = {}
    for codec in ("bf16", "int2"):
        engine = open_engine(directory, replace(wishes, kv=codec))
        answers = run_suite("retrieval", cases, engine, reader)
        for size in dict.fromkeys(answer.size for answer in answers):
            *_, everything = groups([answer for answer in answers if answer.size == size], None)
            rows.setdefault(size, {})[codec] = everything
    return [_lost(size, found["bf16"], found["int2"]) for size, found in rows.items()]


def _lost(size: str, base: Group, tested: Group) -> Figure:
    lost = 100 * (base.share.mean - tested.share.mean)
    note = f"{tested.right} against {base.right} of {base.total}"
    return Figure(f"retrieval {size}: points lost by int2", lost, "<=", 2.0, ".1f", note=note)


def decode_speed(directory: Path, wishes: Wishes) -> list[Figure]:
    engine = open_engine(directory, replace(wishes, kv="int2"))
    bench = EngineBench(engine, load_spec(directory).vocab)
    found = bench.decode(DECODE_CONTEXT, 1, DECODE_STEPS)
    note = f"a step takes {milliseconds(found.step.p50)} ms, p95 {milliseconds(found.step.p95)}"
    name = f"decode, int2, {DECODE_CONTEXT:,} tokens of context"
    return [Figure(name, found.tokens_per_second, ">=", 25.0, ".1f", " tok/s", note)]
