"""Measured linears as tables for a terminal."""

from __future__ import annotations

from rich.table import Table

from kakera.bench.linears import LONG_ROWS, LinearBench
from kakera.bench.tables import right_aligned


def tables(found: LinearBench, model: str) -> list[Table]:
    """A table of short batches, which memory and decoding bound, and one of long ones, which arithmetic bounds."""
    counts = sorted({m.rows for m in found.rows})
    short, long = [n for n in counts if n < LONG_ROWS], [n for n in counts if n >= LONG_ROWS]
    views = []
    if short:
        ceiling = f"{_tera(found.copy_bytes_per_second)}B/s"
        title = f"{model}, {found.device}: microseconds, and codes read as a share of {ceiling}"
        view = right_aligned(title, ("linears", "rows", "ours", "share", "cuBLAS fp16"))
        for m in found.rows:
            if m.rows in short:
                share = m.group.code_bytes / m.seconds / found.copy_bytes_per_second
                times = f"{m.seconds * 1e6:.1f}", f"{share:.0%}", f"{m.cublas_seconds * 1e6:.1f}"
                view.add_row(f"{m.group.count} x {m.group.name}", str(m.rows), *times)
        for rows, seconds in found.head:
            share = found.head_bytes / seconds / found.copy_bytes_per_second
            view.add_row("int8 head", str(rows), f"{seconds * 1e6:.1f}", f"{share:.0%}", "")
        for rows in short:
            both = (f"{found.total(rows, field) * 1e3:.2f} ms" for field in ("seconds", "cublas_seconds"))
            view.add_row("all coded", str(rows), next(both), "", next(both), style="bold")
        views.append(view)
    if long:
        columns = ("linears", "rows", "ours", "cuBLAS fp16", "ours, rested", "cuBLAS, rested")
        view = right_aligned(f"{model}, {found.device}: TFLOP/s", columns)
        fields = ("seconds", "cublas_seconds", "rested", "cublas_rested")
        for m in found.rows:
            if m.rows in long:
                speeds = (_tera(2 * m.rows * m.group.weights / getattr(m, field)) for field in fields)
                view.add_row(f"{m.group.count} x {m.group.name}", f"{m.rows:,}", *speeds)
        for rows in long:
            speeds = (_tera(2 * rows * found.weights(rows) / found.total(rows, field)) for field in fields)
            view.add_row("all coded", f"{rows:,}", *speeds, style="bold")
        views.append(view)
    return views


def _tera(value: float) -> str:
    return f"{value / 1e12:,.2f} T" if value < 1e13 else f"{value / 1e12:,.0f}"
