"""A pool that shrank since the last start is said aloud."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from kakera.arch.registry import spec_of
from kakera.cli.last_plan import compare_with_last
from kakera.plan.known import KNOWN
from kakera.plan.plan import Plan, Wishes
from kakera.plan.planner import make_plan
from kakera.plan.weights import from_config
from kakera.target.devices import Device, Machine
from kakera.target.target import CUDA

WISHES = Wishes(gpus="12GB,12GB")


def plan(used: int) -> Plan:
    spec = spec_of(KNOWN["qwen3.8-27b"])
    card = Device("12GB", 12 * 10**9, used)
    machine = Machine(CUDA, (card, card), 32 * 10**9, 2 * 10**9)
    return make_plan(spec, WISHES, machine, from_config(spec, KNOWN["qwen3.8-27b"]))


def test_other_process_that_took_memory_since_is_noticed(tmp_path: Path) -> None:
    first, second = plan(0), plan(1_300_000_000)
    assert compare_with_last(first, "model", WISHES, tmp_path) == []
    (line,) = compare_with_last(second, "model", WISHES, tmp_path)
    assert f"{first.pages * 64} to {second.pages * 64} tokens" in line
    assert compare_with_last(second, "model", WISHES, tmp_path) == []  # said once


def test_growth_and_small_changes_are_not_worth_a_line(tmp_path: Path) -> None:
    first = plan(0)
    compare_with_last(first, "model", WISHES, tmp_path)
    assert compare_with_last(replace(first, pages=first.pages * 95 // 100), "model", WISHES, tmp_path) == []
    assert compare_with_last(replace(first, pages=first.pages * 2), "model", WISHES, tmp_path) == []


def test_other_wishes_and_damaged_memory_are_no_comparison(tmp_path: Path) -> None:
    compare_with_last(plan(0), "model", WISHES, tmp_path)
    assert compare_with_last(plan(1_300_000_000), "model", replace(WISHES, chunk=4096), tmp_path) == []
    for file in tmp_path.iterdir():
        file.write_text("[1, 2]")
    assert compare_with_last(plan(1_300_000_000), "model", WISHES, tmp_path) == []


def test_state_that_can_not_be_written_is_no_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    assert compare_with_last(plan(0), "model", WISHES, tmp_path / "file" / "below") == []
