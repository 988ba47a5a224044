"""Measured attention as tables for a terminal, and as the lines of a plot."""

from __future__ import annotations

from rich.table import Table

from kakera.bench.attention import AttentionBench
from kakera.bench.plot import Line
from kakera.bench.tables import right_aligned


def tables(found: AttentionBench, model: str) -> list[Table]:
    title = f"{model}, {found.heads}/{found.kv_heads} heads x {found.head_dim}, {found.device}"
    return [_decode(found, title), _prefill(found, title), _writes(found, title)]


def lines(found: AttentionBench) -> list[Line]:
    """Microseconds by context of one row with one query token."""
    one = [d for d in found.decode if d.rows == d.tokens == 1]
    fields = {"int2": "INT2", "bf16": "bf16", "flash": "torch flash, bf16", "floor": "INT2 bytes at copy speed"}
    made = []
    for field, label in fields.items():
        points = [(d.context, getattr(d, field)) for d in one if getattr(d, field) is not None]
        made.append(Line(label, [x for x, _ in points], [y * 1e6 for _, y in points]))
    return made


def _decode(found: AttentionBench, title: str) -> Table:
    columns = ("context", "rows", "query tokens", "INT2", "floor", "bf16 pages", "torch flash", "torch cuDNN")
    copy = found.copy_bytes_per_second / 1e12
    view = right_aligned(f"{title}: decode, microseconds (floor: INT2 bytes at {copy:.2f} TB/s)", columns)
    for d in found.decode:
        times = (_us(x) for x in (d.int2, d.floor, d.bf16, d.flash, d.cudnn))
        view.add_row(f"{d.context:,}", str(d.rows), str(d.tokens), *times)
    return view


def _prefill(found: AttentionBench, title: str) -> Table:
    columns = ("pages", "tokens", "of", "ms", "TFLOP/s", "library alone", "scratch, MB")
    view = right_aligned(f"{title}: prefill", columns)
    for p in found.prefill:
        speeds = (f"{p.seconds * 1e3:,.2f}", f"{p.tflops:,.0f}", f"{p.alone_tflops:,.0f}")
        view.add_row(p.codec, f"{p.tokens:,}", f"{p.context:,}", *speeds, f"{p.scratch_bytes / 1e6:,.0f}")
    return view


def _writes(found: AttentionBench, title: str) -> Table:
    view = right_aligned(f"{title}: KV write of a layer, microseconds", ("tokens", "INT2", "bf16"))
    for w in found.writes:
        view.add_row(f"{w.tokens:,}", _us(w.int2), _us(w.bf16))
    return view


def _us(seconds: float | None) -> str:
    return "" if seconds is None else f"{seconds * 1e6:,.1f}"
