"""Line plots of measured figures, for --plot FILE. matplotlib is an optional extra."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from kakera.errors import KakeraError, UsageError


@dataclass(frozen=True)
class Line:
    label: str
    x: Sequence[float]
    y: Sequence[float]


def draw(path: Path, title: str, x_label: str, y_label: str, lines: Sequence[Line]) -> None:
    """Write a plot with a logarithmic x axis (base 2) and a y axis from 0. The file's ending chooses the format.

    Raises UsageError for an ending other than .png, .svg or .pdf, KakeraError if matplotlib is not installed.
    """
    check(path)
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4.2), layout="constrained")
    axes = figure.add_subplot()
    for line in lines:
        axes.plot(line.x, line.y, marker="o", label=line.label)
    ticks = sorted({x for line in lines for x in line.x})
    axes.set_xscale("log", base=2)
    axes.set_xticks(ticks, [f"{x:,.0f}" for x in ticks])
    axes.set_ylim(bottom=0)
    axes.set(title=title, xlabel=x_label, ylabel=y_label)
    axes.grid(alpha=0.3)
    if len(lines) > 1:
        axes.legend()
    figure.savefig(path, dpi=150)


def check(path: Path) -> None:
    """Raise before the measurement what would fail after it."""
    if path.suffix not in (".png", ".svg", ".pdf"):
        raise UsageError(f"--plot {path}: the file must end in .png, .svg or .pdf")
    if not path.absolute().parent.is_dir():
        raise UsageError(f"--plot {path}: there is no directory {path.parent}")
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        raise KakeraError("--plot needs matplotlib: pip install 'kakera[plot]'") from None
