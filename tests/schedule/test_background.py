"""Requests in the background give way: in the queue, in the prompt budget, and with their slots and pages."""

from __future__ import annotations

import pytest
from driver import Driver, answer, prose


def running(driver: Driver) -> list[str]:
    return [sequence.id for sequence in driver.scheduler.running.oldest_first()]


def test_none_starts_while_another_request_waits_and_all_end():
    driver = Driver(slots=1)
    rows = [driver.submit(prose(70, seed=i), client="a", background=True) for i in range(3)]
    driver.step()
    asked = [driver.submit(prose(70, seed=10 + i), client=client) for i, client in enumerate("aba")]
    driver.run()
    assert [*driver.finished] == [*asked, *rows], "whoever was running gave way, too"
    driver.assert_idle_is_clean()


@pytest.mark.parametrize("generated", [0, 1, 40, 70])
def test_one_that_loses_its_slot_says_what_it_would_have_said(generated):
    driver = Driver(slots=1, pages=64)
    row = driver.submit(prose(200), max_tokens=100, background=True)
    for _ in range(1 + generated):
        driver.step()
    asked = driver.submit(prose(90, seed=1), max_tokens=3)
    driver.step()
    assert running(driver) == [asked], "in the very next step"
    driver.run()
    assert driver.text[row] == answer(prose(200), 100) and driver.text[asked] == answer(prose(90, seed=1), 3)
    assert driver.cache.counters["preemptions"] == 1
    driver.assert_idle_is_clean()


def test_pages_are_given_up_by_those_in_the_background_however_old_they_are():
    driver = Driver(slots=4, pages=16)
    old = driver.submit(prose(400), max_tokens=200, background=True)
    driver.step()
    asked = [driver.submit(prose(300, seed=i), max_tokens=150) for i in (1, 2)]
    driver.run()
    ends = [*driver.finished]
    assert ends[-1] == old and set(ends[:2]) == set(asked)
    assert driver.text[old] == answer(prose(400), 200)
    driver.assert_idle_is_clean()


def test_prompts_in_the_background_get_what_others_leave():
    driver = Driver(slots=4, chunk=512)
    row = driver.submit(prose(2000), background=True)
    driver.step()
    asked = driver.submit(prose(1200, seed=1))
    for tokens in (512, 512, 176):
        driver.step()
        lengths = {segment.request_id: len(segment.tokens) for segment in driver.plans[-1].prefill}
        assert lengths[asked] == tokens and sum(lengths.values()) <= 512
        assert (row in lengths) == (tokens < 448)
    driver.run()


def test_nobody_waits_for_the_checkpoint_of_one_in_the_background():
    driver = Driver(slots=4, chunk=128)
    row = driver.submit(prose(3000), background=True)
    driver.step()
    asked = driver.submit(prose(3000))
    driver.step()
    assert asked in running(driver)
    driver.run()
    assert next(iter(driver.finished)) == asked and driver.text[row] == driver.text[asked]


def test_who_waits_for_a_checkpoint_takes_no_slot_from_the_background():
    """Or it would be taken and given back in every step."""
    driver = Driver(slots=2, chunk=128)
    row = driver.submit(prose(64, seed=5), max_tokens=60, background=True)
    driver.step()
    first = driver.submit(prose(2000))
    driver.step()
    second = driver.submit(prose(2000))  # what `first` saves is worth waiting for
    for _ in range(5):
        driver.step()
        assert set(running(driver)) == {row, first}
    driver.run()
    assert driver.finished[second].usage.cached_tokens > 1800
    assert driver.cache.counters["preemptions"] <= 1


def test_rows_and_questions_of_one_key_have_shares_of_their_own():
    driver = Driver(slots=1, max_waiting=8)
    for i in range(6 + 1):
        driver.submit(prose(70, seed=i), client="a", background=True)
    driver.submit(prose(70), client="a")
    driver.run()
    assert len(driver.finished) == 8
