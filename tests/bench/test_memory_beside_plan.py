"""Planned and taken bytes, row by row: arithmetic on made-up readings, and real readings of an engine on the CPU."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kakera.arch.registry import spec_of
from kakera.bench.memory import GAPS, Held, MemoryTable, Taken, compare_cpu, compare_gpu, compare_host, compare_total
from kakera.bench.memory_watch import MemoryWatch, graph_bytes, held_bytes
from kakera.contract.step import Drop
from kakera.ops.trellis import TrellisScratch
from kakera.plan.known import KNOWN
from kakera.plan.plan import PlanRow, Wishes
from kakera.plan.planner import make_plan, plan_for
from kakera.plan.weights import from_config
from kakera.run.build import build_engine
from kakera.run.engine import LocalEngine
from kakera.run.ranks.leader import LeadingRunner
from kakera.target.devices import Device, Machine
from kakera.target.target import CPU, CUDA

GIB = 2**30


def plan_27b(**wishes):
    spec = spec_of(KNOWN["qwen3.8-27b"])
    machine = Machine(CUDA, (Device("a card", 140 * GIB),), 128 * GIB)
    return make_plan(spec, Wishes(gpus="auto", **wishes), machine, from_config(spec, KNOWN["qwen3.8-27b"]))


def rows(table: MemoryTable) -> dict[str, tuple[int, int | None]]:
    return {row.name: (row.planned, row.measured) for row in table.rows}


def test_each_reading_stands_in_its_row():
    plan = plan_27b(context=8192, max_running=4)
    planned = {row.name: row.bytes for row in plan.rows}
    pages = planned["KV pages, one full request"] + planned["KV pages, further"]
    held = Held(weights=1000, states=200, windows=30, pages=pages, scratch=50)
    allocated = held.total + 700
    found = rows(compare_gpu(plan.rows, Taken(held, allocated, allocated + 18, 7, allocated + 18 + 5000)))
    assert found["weights"] == (planned["weights"], 1000)
    assert found["recurrent states"][1] == 200
    assert found["KV windows and sinks"][1] == 30
    assert found["KV pages, one full request"][1] == planned["KV pages, one full request"]
    assert found["KV pages, further"][1] == planned["KV pages, further"]
    assert found["activations and scratch"][1] == 750
    assert found["CUDA context and modules"][1] == 5000
    assert found[GAPS] == (planned[GAPS], 11)
    assert found["CUDA graphs"][1] == 7
    assert found["checkpoint staging"][1] is None
    names = list(found)
    assert names.index("checkpoint staging") == names.index("activations and scratch") + 1


@given(parts=st.lists(st.integers(0, 2**40), min_size=10, max_size=10), slots=st.sampled_from([1, 8]))
@settings(max_examples=20)
def test_the_measured_rows_add_up_to_what_the_driver_counts(parts, slots):
    *held, transient, idle, graphs, context = parts
    held = Held(*held)
    allocated = held.total + transient
    taken = Taken(held, allocated, allocated + idle, graphs, allocated + idle + context)
    plan = plan_27b(context=8192, max_running=slots)
    table = compare_gpu(plan.rows, taken)
    assert sum(row.measured or 0 for row in table.rows) == table.total.measured == taken.device
    assert sum(row.planned for row in table.rows) == table.total.planned == plan.total("device")


def test_idle_bytes_of_private_pools_are_those_of_graphs():
    segments = [
        {"total_size": 100, "allocated_size": 90, "segment_pool_id": (0, 0)},
        {"total_size": 50, "allocated_size": 20, "segment_pool_id": (0, 1)},
        {"total_size": 8, "allocated_size": 0, "segment_pool_id": (3, 0)},
    ]
    assert graph_bytes(segments) == 38


def test_the_difference_is_a_share_of_the_plan():
    table = compare_total([PlanRow("weights", "device", 900), PlanRow("states", "device", 100)], 1030, "as counted")
    assert table.difference == pytest.approx(0.03)
    assert table.json()["difference"] == pytest.approx(0.03)
    assert {row["measured"] for row in table.json()["rows"]} == {None}


def test_the_host_of_a_card_has_a_table_of_its_own():
    plan = plan_27b(host_cache=GIB)
    table = compare_host(plan.rows, store=300, anonymous=1000)
    assert rows(table)["server and engine processes"][1] == 1000
    assert rows(table)["prefix cache store"] == (GIB, 300)
    assert (table.total.planned, table.total.measured) == (plan.total("host"), 1300)


@pytest.fixture(scope="module")
def loaded(tiny_model):
    plan = plan_for(tiny_model, Wishes(gpus="cpu", context=512, max_running=2, kv_group=64, chunk=64, host_cache=10**7))
    return build_engine(tiny_model, plan), plan


def test_states_windows_and_pages_of_a_real_engine_are_as_planned(loaded):
    engine, plan = loaded
    table = MemoryWatch.start().tables(engine, plan)["memory"]
    found = rows(table)
    exact = [name for name in found if name.startswith(("recurrent", "KV "))]
    assert len(exact) >= 3
    assert all(found[name][0] == found[name][1] for name in exact)
    assert found["prefix cache store"][1] == 0
    assert table.total.measured > 10**8  # Python and torch
    assert compare_cpu(plan.rows, held_bytes(engine.runner, CPU), 0, 1).total.planned == sum(
        row.bytes for row in plan.rows
    )


def test_what_a_store_holds_on_the_card_is_staging(loaded):
    """On a CPU, where all lies in one memory, it is the store's own row."""
    runner = loaded[0].runner
    before = held_bytes(runner, CPU)
    runner.store.keep_checkpoint(0, runner.store.new_checkpoint(64))
    after = held_bytes(runner, CPU)
    runner.store.drop(Drop((0,)))
    assert before == after and before.staging == 0


def test_scratch_counts_as_scratch_wherever_it_hangs(loaded):
    engine, _ = loaded
    before = held_bytes(engine.runner, CPU)
    empty = torch.empty(0)
    engine.runner.model.scratch = TrellisScratch(torch.empty(100), empty, empty, torch.empty(28))
    try:
        after = held_bytes(engine.runner, CPU)
    finally:
        del engine.runner.model.scratch
    assert (after.scratch - before.scratch, after.weights) == (512, before.weights)


def test_of_ranks_in_one_memory_there_is_no_table(tiny_model):
    """A process is not all of them."""
    plan = replace(plan_for(tiny_model, Wishes(gpus="cpu", context=512, kv_group=64)), ranks=2)
    engine = LocalEngine(None, LeadingRunner(None, None, ()))
    assert MemoryWatch(0).tables(engine, plan) == {}
