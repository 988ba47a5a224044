"""Tables that are kept by difference are those that a plan with whole tables would have brought."""

from __future__ import annotations

import random

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace
from run_world import World, ask, tokens_of

from kakera.contract.grid import PAGE
from kakera.contract.step import ResetSlot, RestoreCheckpoint, Segment, StepPlan
from kakera.run.step.page_tables import PageTables

CPU = torch.device("cpu")


class Whole:
    """What a scheduler knows of a slot: its whole table, and how much of it was sent."""

    def __init__(self, rng: random.Random):
        self.rng, self.pages, self.sent, self.tokens = rng, [], 0, 0

    def row(self, slot: int) -> Segment:
        """Some tokens more; now and then a page that was sent has become another one."""
        count = self.rng.choice([1, 1, 3, PAGE, 200])
        start, self.tokens = self.tokens, self.tokens + count
        if self.pages and self.rng.random() < 0.2:
            i = self.rng.randrange(len(self.pages))
            self.pages[i], self.sent = self.rng.randrange(1000), min(self.sent, i)
        while len(self.pages) * PAGE < self.tokens:
            self.pages.append(self.rng.randrange(1000))
        known, self.sent = self.sent, len(self.pages)
        return Segment(f"r{slot}", slot, (0,) * count, start, known, tuple(self.pages[known:]))


@given(st.integers(0, 2**32))
def test_tables_follow_any_slots_that_come_grow_and_go(seed):
    rng = random.Random(seed)
    tables, slots = PageTables(3, 200, CPU), [Whole(rng) for _ in range(3)]
    for _ in range(60):
        if rng.random() < 0.1 or any(whole.tokens > 190 * PAGE for whole in slots):
            slot = max(range(3), key=lambda i: slots[i].tokens)
            slots[slot] = Whole(rng)  # a reset, a restore, another request: whoever comes brings everything
            tables.forget(slot)
        rows = [slots[slot].row(slot) for slot in rng.sample(range(3), rng.randint(1, 3))]
        tables.update(rows)
        for row in rows:
            assert tables.of(row).tolist() == slots[row.slot].pages


def test_what_a_slot_lacks_is_said_and_changes_nothing():
    tables = PageTables(2, 8, CPU)
    tables.update([Segment("a", 0, (0,) * 130, 0, 0, (5, 6, 7))])
    good, early = Segment("a", 0, (1,), 130, 3), Segment("b", 1, (1,), 64, 1, (4,))
    with pytest.raises(RuntimeError, match="b needs 2 pages and brings 1 behind 1, but slot 1 has 0"):
        tables.update([Segment("a", 0, (1,) * 64, 130, 3, (9,)), early])
    assert tables.of(good).tolist() == [5, 6, 7]
    tables.forget(0)
    with pytest.raises(RuntimeError, match="slot 0 has 0"):
        tables.update([good])
    with pytest.raises(RuntimeError, match="needs 3 pages and brings 2"):
        tables.update([Segment("c", 0, (0,) * 130, 0, 0, (5, 6))])


@pytest.mark.parametrize("again", [ResetSlot(0), RestoreCheckpoint(0, 5, 64, None)], ids=["reset", "restored"])
def test_a_slot_that_begins_again_has_no_table(tiny_model, again):
    runner = World.build(tiny_model, "fp32").runner
    runner.store.keep_checkpoint(5, runner.store.new_checkpoint(64))
    row = Segment("a", 0, (1,) * 70, 0, 0, (3, 4))
    (first,) = runner.execute(StepPlan(1, prefill=(row,))).rows
    (late,) = runner.execute(
        StepPlan(2, (again,), decode=(replace(row, start=70, tokens=(1,), known_pages=2, new_pages=()),))
    ).rows
    assert not first.error and "slot 0 has 0" in late.error


def test_rope_positions_are_those_of_the_cache_unless_a_row_says_otherwise(tiny_model):
    """Attention sees their distances only: all of them moved alike change the keys, and no more than rounding else."""
    plain, moved, apart = (World.build(tiny_model, "fp32").watch() for _ in range(3))

    def with_positions(world, of):
        execute = world.runner.execute

        def execute_other(plan, *sampling):
            rows = tuple(replace(row, positions=of(row)) for row in plan.prefill)
            return execute(replace(plan, prefill=rows), *sampling)

        world.runner.execute = execute_other

    with_positions(moved, lambda row: (tuple(range(row.start + 7, row.end + 7)),))
    with_positions(apart, lambda row: (tuple(3 * p for p in range(row.start, row.end)),))
    prompt = ask("a", tokens_of(1, 100), 1)
    for world in (plain, moved, apart):
        world.one(prompt)
    gap = [(world.seen["a"].logits_V - plain.seen["a"].logits_V).abs().max() for world in (moved, apart)]
    assert 0 < gap[0] < 1e-3 < gap[1]
