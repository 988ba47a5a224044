"""Measured linears as tables for a terminal."""

from __future__ import annotations

from collections.abc import Sequence

from rich.table import Table

from kakera.bench.linears import LONG_ROWS, LinearBench
from kakera.bench.tables import right_aligned

SPEEDS = ("seconds", "cublas_seconds", "rested", "cublas_rested")


def tables(found: LinearBench, model: str) -> list[Table]:
    """A table of short batches, which memory and decoding bound, and one of long ones, which arithmetic bounds."""
    counts = sorted({m.rows for m in found.rows})
    short, long = [n for n in counts if n < LONG_ROWS], [n for n in counts if n >= LONG_ROWS]
    title = f"{model}, {found.device}"
    return [*([_short(found, title, short)] if short else []), *([_long(found, title, long)] if long else [])]


def _short(found: LinearBench, title: str, counts: Sequence[int]) -> Table:
    """Times, and the bytes of the codes a second as a share of what a copy moves."""
    copy = found.copy_bytes_per_second
    columns = ("linears", "rows", "ours", "share", "cuBLAS fp16")
    view = right_aligned(f"{title}: microseconds, and codes read as a share of {copy / 1e12:.2f} TB/s", columns)
    for m in found.rows:
        if m.rows in counts:
            share = f"{m.group.code_bytes / m.seconds / copy:.0%}"
            view.add_row(f"{m.group.count} x {m.group.name}", str(m.rows), _us(m.seconds), share, _us(m.cublas_seconds))
    for rows, seconds in found.head:
        view.add_row("int8 head", str(rows), _us(seconds), f"{found.head_bytes / seconds / copy:.0%}", "")
    for rows in counts:
        ours, cublas = (_us(found.total(rows, field)) for field in SPEEDS[:2])
        view.add_row("all coded", str(rows), ours, "", cublas, style="bold")
    return view


def _long(found: LinearBench, title: str, counts: Sequence[int]) -> Table:
    columns = ("linears", "rows", "ours", "cuBLAS fp16", "ours, rested", "cuBLAS, rested")
    view = right_aligned(f"{title}: TFLOP/s", columns)
    for m in found.rows:
        if m.rows in counts:
            speeds = (_tflops(m.rows, m.group.weights, getattr(m, field)) for field in SPEEDS)
            view.add_row(f"{m.group.count} x {m.group.name}", f"{m.rows:,}", *speeds)
    for rows in counts:
        speeds = (_tflops(rows, found.weights(rows), found.total(rows, field)) for field in SPEEDS)
        view.add_row("all coded", f"{rows:,}", *speeds, style="bold")
    return view


def _us(seconds: float) -> str:
    return f"{seconds * 1e6:,.1f}"


def _tflops(rows: int, weights: int, seconds: float) -> str:
    return f"{2 * rows * weights / seconds / 1e12:,.0f}"
