"""A segment of any length calls the library with shapes that are known beforehand, and with few of them."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kakera.plan.prefill_plan import GRID, SUB, PrefillPlan, key_pieces, library_shapes, query_blocks

PLANS = {
    "27B": PrefillPlan(24, 4, 256, 4, 8192, 132),
    "27B, short chunks": PrefillPlan(24, 4, 256, 4, 512, 132),
    "half of it": PrefillPlan(12, 2, 256, 4, 2048, 170),
    "exact pages": PrefillPlan(32, 8, 128, 0, 4096, 108),
    "three heads": PrefillPlan(9, 3, 128, 2, 8192, 48),
}


def calls(plan: PrefillPlan, start: int, tokens: int) -> set[tuple[int, int, int]]:
    """What PrefillAttention does with a segment."""
    heads = plan.heads_per_call(tokens)
    common = covered(plan, start)
    pairs = [(size, keys) for _, keys in key_pieces(common, plan.piece(heads)) for _, size in query_blocks(tokens)]
    for block in range(SUB, tokens, SUB):
        own = covered(plan, start + block) - common
        sizes = [size for _, size in query_blocks(min(SUB, tokens - block), SUB)]
        pairs += [(size, keys) for _, keys in key_pieces(own, plan.piece(heads)) for size in sizes]
    shapes = set()
    for queries, keys in pairs:
        splits = plan.splits(heads, queries, keys)
        shapes.add((heads * splits, queries * plan.group, keys // splits))
    return shapes


def covered(plan: PrefillPlan, token: int) -> int:
    return max(0, token - plan.window_pages * 64) // GRID * GRID


@settings(max_examples=60)
@given(page=st.integers(0, 4000), tokens=st.integers(1, 8192), name=st.sampled_from(sorted(PLANS)))
def test_all_calls_are_foreseen(page, tokens, name):
    plan = PLANS[name]
    assert calls(plan, page * 64, min(tokens, plan.chunk)) <= library_shapes(plan)


@pytest.mark.parametrize("name", PLANS)
def test_plans_are_few(name):
    assert len(library_shapes(PLANS[name])) <= 130
    for batch, rows, keys in library_shapes(PLANS[name]):
        assert batch * rows <= PLANS[name].query_slots * PLANS[name].group
        assert batch * keys <= PLANS[name].history_slots
