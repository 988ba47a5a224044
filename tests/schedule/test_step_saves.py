"""A step saves no more checkpoints inside its prompts than there are places for; what is left waits for the next."""

from __future__ import annotations

from driver import Driver
from hypothesis import given, settings
from hypothesis import strategies as st

from kakera.schedule.request import Boundary
from kakera.schedule.step import PAGE

prompt = st.tuples(st.integers(1, 40 * PAGE), st.lists(st.integers(1, 40 * PAGE), max_size=12))


@settings(max_examples=40, deadline=None)
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
    saved = [
        sorted((row.request_id, save.position) for plan in driver.plans for row in plan.rows for save in row.saves)
        for driver in (limited, free)
    ]
    if len(prompts) == 1:  # several may find each other's checkpoints, sooner or later
        assert saved[0] == saved[1]


def test_a_segment_ends_where_the_last_place_is_taken():
    driver = Driver(chunk=4096, saves=2)
    marks = [Boundary(at, "message") for at in (5 * PAGE, 9 * PAGE, 12 * PAGE, 20 * PAGE)]
    driver.ask(range(30 * PAGE), boundaries=marks)
    ends = [(plan.prefill[0].start + len(plan.prefill[0].tokens)) // PAGE for plan in driver.plans if plan.prefill]
    points = [save.position // PAGE for plan in driver.plans for row in plan.prefill for save in row.saves]
    assert ends == [*points[1::2], *([30] if len(points) % 2 or points[-1] != 30 else [])]
