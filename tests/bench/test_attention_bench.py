"""What `bench kernels --only attention` shows; the measuring itself needs a GPU."""

from __future__ import annotations

import pytest
from rich.console import Console

pytest.importorskip("triton", reason="needs Triton, which CUDA builds of torch bring (make kernels)")

from kakera.bench.attention import AttentionBench, Decode, Write
from kakera.bench.attention_prefill import Prefill
from kakera.bench.attention_tables import lines, tables

FOUND = AttentionBench(
    device="a card",
    heads=24,
    kv_heads=4,
    head_dim=256,
    copy_bytes_per_second=4e12,
    decode=(
        Decode(8192, 1, 1, 12e-6, 20e-6, 30e-6, None, 4_456_448, 1.1e-6),
        Decode(131072, 1, 1, 37e-6, None, None, None, 71_303_168, 17e-6),
        Decode(131072, 8, 1, 200e-6, None, None, None, 570_425_344, 142e-6),
    ),
    prefill=(Prefill("int2", 8192, 196608, 60e-3, 640.0, 58e-3, 662.0, 0.1, {"diagonal": 0.6}, 400_000_000),),
    writes=(Write(8192, 117.6e-6, 91.9e-6),),
)


def test_tables_show_times_and_leave_out_what_was_not_measured():
    console = Console(width=160)
    with console.capture() as shown:
        for view in tables(FOUND, "a model"):
            console.print(view)
    rows = [[cell.strip() for cell in line.split("│")[1:-1]] for line in shown.get().splitlines() if "│" in line]
    assert rows == [
        ["8,192", "1", "1", "12.0", "1.1", "20.0", "30.0", ""],
        ["131,072", "1", "1", "37.0", "17.0", "", "", ""],
        ["131,072", "8", "1", "200.0", "142.0", "", "", ""],
        ["int2", "8,192", "196,608", "60.00", "640", "662", "400"],
        ["8,192", "117.6", "91.9"],
    ]


def test_the_plot_has_one_row_by_context_and_no_gaps():
    drawn = {line.label: (list(line.x), [round(y, 3) for y in line.y]) for line in lines(FOUND)}
    assert drawn["INT2"] == ([8192, 131072], [12.0, 37.0])
    assert drawn["bf16"] == ([8192], [20.0])
