"""A step saves no more checkpoints inside its prompts than there are places for; what is left waits for the next."""

from __future__ import annotations

import pytest
from driver import Driver
from hypothesis import given, settings
from hypothesis import strategies as st

from kakera.contract.grid import PAGE
from kakera.contract.request import Boundary

prompt = st.tuples(st.integers(1, 40 * PAGE), st.lists(st.integers(1, 40 * PAGE), max_size=12))


@pytest.mark.slow
@settings(max_examples=20)
@given(
    prompts=st.lists(prompt, min_size=1, max_size=4), saves=st.integers(1, 3), chunk=st.sampled_from([64, 512, 4096])
)
def test_prompts_with_any_boundaries(prompts, saves, chunk):
    limited, free = Driver(chunk=chunk, saves=saves), Driver(chunk=chunk)
    for i, (length, places) in enumerate(prompts):
        tokens = [(i * 31 + j) % 97 for j in range(length)]
        marks = [Boundary(place, "message") for place in sorted(places) if place <= length]
        for driver in (limited, free):
            driver.submit(tokens, id=f"r{i}", boundaries=marks)
    for driver in (limited, free):
        driver.run()
    assert all(sum(len(row.saves) for row in plan.prefill) <= saves for plan in limited.plans)
    assert limited.text == free.text


def test_a_segment_ends_where_the_last_place_is_taken():
    driver = Driver(chunk=4096, saves=2)
    marks = [Boundary(at, "message") for at in (5 * PAGE, 9 * PAGE, 12 * PAGE, 20 * PAGE)]
    driver.ask(range(30 * PAGE), boundaries=marks)
    ends = [(plan.prefill[0].start + len(plan.prefill[0].tokens)) // PAGE for plan in driver.plans if plan.prefill]
    points = [save.position // PAGE for plan in driver.plans for row in plan.prefill for save in row.saves]
    assert [point for point in points if point in (5, 9, 12, 20)] == [5, 9, 12, 20]
    assert ends[:-1] == [9, 20] and ends[-1] == 30  # 29, before the prompt's last token, is saved by the last step


def test_points_of_the_sparse_grid_give_way_to_better_ones():
    driver = Driver(chunk=8192, saves=2)
    driver.ask(range(8192 - 5))
    assert [len(plan.prefill[0].tokens) for plan in driver.plans if plan.prefill] == [8187]
    assert [save.position for save in driver.plans[0].prefill[0].saves] == [4096, 8128]
