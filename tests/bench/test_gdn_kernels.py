"""The benchmark of GDN kernels on a CPU: a clock and kernels stand in, what is given to them is the real thing."""

from __future__ import annotations

import io

import pytest
import torch
from rich.console import Console

from kakera.arch.blocks import GdnSpec
from kakera.arch.registry import spec_of
from kakera.bench import gdn
from kakera.ops.gdn_step import gdn_step_reference
from kakera.plan.known import KNOWN

SMALL = GdnSpec(1, 2, 32, 32, 4)


def test_decode_calls_step_every_row_of_every_layer(monkeypatch):
    monkeypatch.setattr(gdn, "gdn_step", gdn_step_reference)
    monkeypatch.setattr(gdn, "copies", lambda size: 3)
    calls = gdn.step_calls(SMALL, 2, "cpu")
    assert len(calls) == 8
    before = [call.args[5].clone() for call in calls]
    for call in calls:
        assert call().shape == (2, 64)
    assert all((call.args[5] != state).any((1, 2, 3)).all() for call, state in zip(calls, before, strict=True))


def test_prefill_calls_run():
    pytest.importorskip("triton", reason="needs Triton (Linux)")
    if torch.cuda.is_available():
        pytest.skip("Triton's interpreter is off where there is a GPU")
    (call, *_) = gdn.scan_calls(SMALL, 65, "cpu")
    assert call().shape == (65, 64)


def test_the_table_of_a_27b(monkeypatch):
    monkeypatch.setattr(gdn, "copy_bytes_per_second", lambda: 4e12)
    monkeypatch.setattr(gdn, "graph_seconds", lambda calls: len(calls) * 1e-6)
    monkeypatch.setattr(gdn, "step_calls", lambda spec, rows, device: [None] * spec.v_heads)
    monkeypatch.setattr(gdn, "scan_calls", lambda spec, tokens, device: [None] * (tokens // 10))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "a card")
    found = gdn.measure(spec_of(KNOWN["qwen3.8-27b"]), 2, lambda text: None)
    assert found.steps[0] == gdn.Step(1, 24e-6, 2 * 4 * 24 * 128 * 128 / 4e12)
    out = Console(file=io.StringIO(), width=100)
    for table in gdn.tables(found, "qwen3.8-27b"):
        out.print(table)
    assert "819" in out.file.getvalue() and "24.0" in out.file.getvalue()
