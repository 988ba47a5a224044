"""What `bench kernels` measures and shows; the measuring itself needs a GPU."""

from __future__ import annotations

import pytest
from rich.console import Console
from typer.testing import CliRunner

from kakera.arch.registry import spec_of
from kakera.bench.linear_tables import tables
from kakera.bench.linears import LinearBench, Measured, groups
from kakera.cli.bench import app
from kakera.errors import UsageError
from kakera.plan.known import KNOWN

SPEC = spec_of(KNOWN["qwen3.8-27b"])


@pytest.mark.parametrize("ranks", [1, 2])
def test_groups_are_all_coded_linears_of_the_27b_at_eschas_rates(ranks):
    found = groups(SPEC, ranks)
    assert ranks * sum(group.count * group.weights for group in found) == 24_326_963_200
    assert ranks * sum(group.count * group.code_bytes for group in found) == 7_507_804_160
    assert all(channels % 128 == 0 for group in found for channels in (group.inputs, *group.outputs))


def test_tables_show_times_shares_and_sums():
    group = groups(SPEC)[-1]  # 64 x down: 17408 -> 5120 at 3 bits, 33.4 MB of codes
    short = Measured(group, 1, seconds=20e-6, cublas_seconds=50e-6)
    long = Measured(group, 8192, seconds=2e-3, cublas_seconds=1.9e-3, rested=1.8e-3, cublas_rested=1.7e-3)
    bench = LinearBench("a card", 4e12, (short, long), ((1, 0.4e-3),), 1_280_000_000)
    console = Console(width=140, record=True, file=None, quiet=False)
    with console.capture() as shown:
        for view in tables(bench, "a model"):
            console.print(view)
    rows = [[cell.strip() for cell in line.split("│")[1:-1]] for line in shown.get().splitlines() if "│" in line]
    assert rows[0] == ["64 x down", "1", "20.0", "42%", "50.0"]
    assert rows[1] == ["int8 head", "1", "400.0", "80%", ""]
    assert rows[2] == ["all coded", "1", "1,280.0", "", "3,200.0"]
    assert rows[3] == ["64 x down", "8,192", "730", "769", "811", "859"]
    assert rows[4] == ["all coded", "8,192", "730", "769", "811", "859"]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--only", "norms"], "there are linear, attention, gdn"),
        (["--rows", "0"], "whole numbers from 1 on"),
        (["--rows", "1024", "--plot", "x.png"], "--rows below 1024 as well"),
        (["--spec", "no-such-shape"], "no-such-shape"),
    ],
)
def test_wrong_options_are_refused_before_anything_is_measured(options, words):
    with pytest.raises(UsageError, match=words):
        CliRunner().invoke(app, ["kernels", *options], catch_exceptions=False)
