"""Threads are bound on a CPU, never beside a GPU, and never against the user's own setting."""

from __future__ import annotations

import os

import pytest

from kakera.cli.options import bind_cpu_threads
from kakera.plan.plan import Wishes


@pytest.mark.parametrize(
    ("gpus", "before", "after"),
    [("cpu", None, "true"), ("cpu", "false", "false"), ("12GB", None, None), ("rtx5070", "spread", "spread")],
)
def test_binding(monkeypatch: pytest.MonkeyPatch, gpus: str, before: str | None, after: str | None):
    monkeypatch.setenv("OMP_PROC_BIND", "to be undone")  # so that monkeypatch restores what was there
    monkeypatch.delenv("OMP_PROC_BIND")
    if before is not None:
        monkeypatch.setenv("OMP_PROC_BIND", before)
    bind_cpu_threads(Wishes(gpus=gpus))
    assert os.environ.get("OMP_PROC_BIND") == after
