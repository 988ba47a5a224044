"""Measured speeds as tables for a terminal."""

from __future__ import annotations

from collections.abc import Sequence

from rich.table import Table

from kakera.bench.engine import DecodeSpeed, PrefillSpeed
from kakera.bench.load import Beside, Level, SecondTurn


def levels(model: str, rows: Sequence[Level]) -> Table:
    times = ("first token p50 / p95 / max (ms)", "between tokens p50 / p95 / max (ms)")
    view = right_aligned(f"{model}: parallel streams", ("streams", "prompt", "new", *times, "tokens/s"))
    for row in rows:
        view.add_row(
            str(row.streams),
            f"{row.prompt_tokens:,}",
            str(row.new_tokens),
            row.ttft.text(),
            row.gap.text(),
            f"{row.tokens_per_second:.1f}",
        )
    return view


def second_turn(turn: SecondTurn) -> Table:
    view = right_aligned(
        "second turn of a conversation", ("turn", "prompt", "cached", "first token (s)", "against cold")
    )
    view.add_row("first (cold)", f"{turn.cold_tokens:,}", "0", f"{turn.cold_seconds:.3f}", "")
    cached = f"{turn.cached_tokens:,} ({turn.cached_share:.1%})"
    view.add_row("second", f"{turn.warm_tokens:,}", cached, f"{turn.warm_seconds:.3f}", f"{turn.ratio:.1%}")
    return view


def beside(found: Beside) -> Table:
    view = right_aligned(
        f"{found.streams} streams beside a prompt of {found.prompt_tokens:,} tokens",
        ("", "between tokens p50 / p95 / max (ms)", "prefill tokens/s"),
    )
    view.add_row("alone", found.alone.text(), f"{found.solo_prefill:,.0f}")
    view.add_row("together", found.beside.text(), f"{found.shared_prefill:,.0f}")
    view.add_row("ratio", f"p95 {found.slowdown:.1f} x", f"{found.kept:.0%}")
    return view


def grid(title: str, rows: Sequence[DecodeSpeed | PrefillSpeed]) -> Table:
    view = right_aligned(title, ("context", "at once", "time", "GPU idle", "tokens/s", "computed before"))
    for row in rows:
        if isinstance(row, DecodeSpeed):
            time = f"{row.step.text()} ms a step (p50 / p95 / max)"
            idle = "" if row.idle is None else f"{row.idle:.1%}"
            filled = f"{row.computed_tokens:,}, {row.fill_seconds:.1f} s"
        else:
            time, idle, filled = f"{row.seconds:.2f} s", "", ""
        view.add_row(f"{row.context:,}", str(row.batch), time, idle, f"{row.tokens_per_second:,.1f}", filled)
    return view


def right_aligned(title: str, columns: Sequence[str]) -> Table:
    view = Table(title=title)
    for column in columns:
        view.add_column(column, justify="right")
    return view
