"""A measured figure with the bar that it has to clear."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from rich.table import Table


@dataclass(frozen=True)
class Figure:
    """`value` compared with `bar`: at most or at least. `form` prints both; `note` says what else was seen."""

    name: str
    value: float
    side: Literal["<=", ">="]
    bar: float
    form: str = ".2f"
    unit: str = ""
    note: str = ""

    @property
    def ok(self) -> bool:
        """False for NaN: what could not be measured has not passed."""
        return self.value <= self.bar if self.side == "<=" else self.value >= self.bar

    def json(self) -> dict[str, Any]:
        keys = ("name", "value", "side", "bar", "unit", "note", "ok")
        return {key: getattr(self, key) for key in keys}


def table(figures: Sequence[Figure], title: str) -> Table:
    view = Table(title=title)
    view.add_column("figure")
    view.add_column("measured", justify="right")
    view.add_column("bar", justify="right")
    view.add_column("")
    view.add_column("beside it")
    for f in figures:
        bar = f"{f.side} {f.bar:{f.form}}{f.unit}"
        view.add_row(f.name, f"{f.value:{f.form}}{f.unit}", bar, "[green]pass" if f.ok else "[red]FAIL", f.note)
    return view
