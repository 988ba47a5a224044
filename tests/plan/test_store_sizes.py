"""A GPU's host store in blocks: every mix of records that the cache's budget lets in has blocks, and the plan's row is
what the machine gives."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kakera.arch.registry import spec_of
from kakera.cache.host import CacheSizes, HostBudget
from kakera.plan.cautions import cautions
from kakera.plan.known import KNOWN
from kakera.plan.plan import Plan, Wishes
from kakera.plan.planner import make_plan
from kakera.plan.store_sizes import SEGMENT_BYTES, StoreSizes, fitting
from kakera.plan.weights import from_config
from kakera.target.devices import Device, Machine
from kakera.target.target import CPU, CUDA

CARD = Machine(CUDA, (Device("a card", 32 * 2**30),), 64 * 2**30)


def plan_27b(machine: Machine = CARD, **wishes) -> Plan:
    spec = spec_of(KNOWN["qwen3.8-27b"])
    return make_plan(spec, Wishes(gpus="auto", **wishes), machine, from_config(spec, KNOWN["qwen3.8-27b"]))


PLAN = plan_27b(context=8192)


def test_blocks_of_the_27b_waste_little():
    sizes = StoreSizes.of_plan(PLAN)
    assert sizes.block == PLAN.page_bytes == 557_056
    assert sizes.checkpoint * sizes.block < 1.006 * PLAN.checkpoint_bytes
    assert sizes.per_segment * sizes.block > 0.998 * SEGMENT_BYTES
    assert sum(sizes.segments) == sizes.blocks and sizes.blocks * sizes.block > 0.998 * PLAN.host_cache


def test_a_store_that_no_machine_has_is_summed_as_fast_as_any_other():
    """Advice sums it dozens of times: 3.4 million segments of 900 TB took 20 s of CPU time until the refusal."""
    assert StoreSizes.of_plan(replace(PLAN, host_cache=10**18)).pinned_bytes > 0.99 * 10**18


@given(st.integers(0, 3 * SEGMENT_BYTES))
def test_what_is_planned_by_itself_takes_no_more_than_it_may(limit):
    cache = fitting(limit)
    assert limit // 2 <= cache <= limit
    assert StoreSizes.of_plan(replace(PLAN, host_cache=cache)).pinned_bytes <= cache


@pytest.mark.parametrize("cache", [0, 1, 100 * 2**20, 2**30, 8 * 2**30])
@pytest.mark.parametrize("kv", ["int2", "bf16"])
def test_the_row_of_the_store_is_what_segments_take(kv, cache):
    plan = plan_27b(context=8192, kv=kv, host_cache=cache)
    (row,) = [row for row in plan.rows if row.name == "prefix cache store"]
    sizes = StoreSizes.of_plan(plan)
    assert row.bytes == sum(1 << (blocks * sizes.block - 1).bit_length() for blocks in sizes.segments)
    assert sizes.blocks * sizes.block <= cache


@pytest.mark.parametrize("machine", [CARD, Machine(CPU, (Device("cpu", 2**40),), 2**40)])
@pytest.mark.parametrize("kv", ["int2", "bf16", "fp32"])
@pytest.mark.parametrize("cache", [0, 1, 60 * 2**20, 95_300_000, 100 * 2**20, 999_999_999, 12 * 2**30])
def test_the_row_of_the_store_counts_the_checkpoints_that_the_cache_takes(machine, kv, cache):
    plan = plan_27b(machine, context=8192, max_running=1, kv=kv, host_cache=cache)
    budget, count = HostBudget(CacheSizes.of(plan)), 0
    if plan.kv.windowed and budget.fits("sink"):
        budget.take("sink")
    while budget.fits("checkpoint"):
        budget.take("checkpoint")
        count += 1
    (row,) = [row for row in plan.rows if row.name == "prefix cache store"]
    assert row.note.startswith(f"room for {count} checkpoints" if count else "too little for a checkpoint")
    assert bool(count) == CacheSizes.of(plan).can_save
    if not count and plan.target.has_cards:  # then nobody pins it
        assert row.bytes == 0


@pytest.mark.parametrize(("ram", "chosen"), [(2150 * 10**6, 0), (2300 * 10**6, 0), (2400 * 10**6, 2**27)])
def test_a_store_that_would_hold_nothing_is_not_chosen(ram, chosen):
    assert plan_27b(replace(CARD, ram=ram), context=8192).host_cache == chosen


@given(st.integers(0, 6 * 2**30), st.lists(st.sampled_from(["checkpoint", "sink", "page"]), max_size=60))
def test_what_the_budget_lets_in_has_blocks(cache, kinds):
    plan = replace(PLAN, host_cache=cache)
    sizes, budget = StoreSizes.of_plan(plan), HostBudget(CacheSizes.of(plan))
    blocks = {"checkpoint": sizes.checkpoint, "sink": sizes.sink, "page": 1}
    taken = 0
    for kind in kinds:
        if budget.fits(kind):
            budget.take(kind)
            taken += blocks[kind]
    assert taken <= sizes.blocks and taken * sizes.block == budget.used


def test_without_a_store_nothing_is_planned_for_its_copies():
    names = [
        [row.name for row in plan_27b(context=8192, host_cache=cache).rows] for cache in (None, 2**30, 0, 50 * 2**20)
    ]
    assert [("checkpoint staging" in found) for found in names] == [True, True, False, False]


def test_a_store_that_keeps_nothing_is_a_warning():
    machine = Machine(CUDA, (Device("a card", 32 * 2**30),), 64 * 2**30)
    for cache, told in ((0, 0), (50 * 2**20, 1), (2**30, 0)):
        plan, asked = plan_27b(context=8192, host_cache=cache), Wishes(context=8192, host_cache=cache)
        lines = [line for line in cautions(plan, machine, asked) if "--host-cache" in line]
        assert len(lines) == told
        assert not told or "52 MB holds no checkpoint of 95.2 MB" in lines[0]


def test_a_place_on_the_card_takes_any_record():
    for kv in ("int2", "bf16"):
        sizes = StoreSizes.of_plan(plan_27b(context=8192, kv=kv))
        assert sizes.place_bytes >= sizes.block * max(sizes.checkpoint, sizes.sink, 1)
