"""Results of a suite as rows: by kind and size, with intervals and agreement with a baseline."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from rich.table import Table

from kakera.evaluate.data import Case
from kakera.evaluate.intervals import Estimate, share


@dataclass(frozen=True)
class Answer:
    """One case's outcome. `error` is set if the engine refused or failed it; it counts as wrong."""

    id: str
    kind: str
    size: str
    ok: bool
    answer: str
    prompt_tokens: int
    error: str = ""


@dataclass(frozen=True)
class Group:
    """Answers of one kind and size. `base_right` and `same_text` count only cases that the baseline answers."""

    kind: str
    size: str
    right: int
    total: int
    base_right: int
    base_total: int
    same_verdict: int
    same_text: int

    @property
    def share(self) -> Estimate:
        return share(self.right, self.total)

    def json(self) -> dict[str, Any]:
        row: dict[str, Any] = {"kind": self.kind, "size": self.size, "right": self.right, "total": self.total}
        row["share"] = self.share.json()
        if self.base_total:
            row["baseline"] = {
                "right": self.base_right,
                "total": self.base_total,
                "same_verdict": self.same_verdict,
                "same_text": self.same_text,
            }
        return row


def groups(answers: Sequence[Answer], baseline: dict[str, Case] | None) -> list[Group]:
    """One group for each (size, kind) in the order of first appearance, and one for all."""
    keys = list(dict.fromkeys((answer.kind, answer.size) for answer in answers))
    found = [_group(*key, [a for a in answers if (a.kind, a.size) == key], baseline or {}) for key in keys]
    return [*found, _group("all", "", answers, baseline or {})]


def _group(kind: str, size: str, answers: Sequence[Answer], baseline: dict[str, Case]) -> Group:
    pairs = [(answer, baseline[answer.id]) for answer in answers if answer.id in baseline]
    return Group(
        kind=kind,
        size=size,
        right=sum(answer.ok for answer in answers),
        total=len(answers),
        base_right=sum(base["ok"] for _, base in pairs),
        base_total=len(pairs),
        same_verdict=sum(answer.ok == base["ok"] for answer, base in pairs),
        same_text=sum(answer.answer == base["answer"].strip() for answer, base in pairs),
    )


def table(suite: str, rows: Iterable[Group]) -> Table:
    """The rows for a terminal; baseline columns only if there is a baseline."""
    rows = list(rows)
    compared = any(row.base_total for row in rows)
    view = Table(title=suite)
    for name in ("kind", "size"):
        view.add_column(name)
    for name in ("right", "%", "5–95 %", *(("baseline", "same verdict", "same text") if compared else ())):
        view.add_column(name, justify="right")
    for row in rows:
        s = row.share
        cells = [row.kind, row.size, f"{row.right} of {row.total}", f"{s.mean:.1%}", f"{s.low:.0%}–{s.high:.0%}"]
        if compared:
            of = f" of {row.base_total}"
            cells += [f"{row.base_right}{of}", f"{row.same_verdict}{of}", f"{row.same_text}{of}"]
        view.add_row(*cells, style="bold" if row.kind == "all" else "")
    return view
